"""What a dense decoder needs to know, read once from a checkpoint's configuration."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its length extensions.

    ``kind`` is Hugging Face's ``rope_type``; the formulas are those of ``transformers.modeling_rope_utils``.
    """

    theta: float = 10_000.0  # base of the wavelengths
    kind: str = "default"  # one of ROPE_TYPES
    factor: float = 1.0  # context extension factor
    original_max_position: int = 0  # tokens; context length before extension (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn; rotations
    beta_slow: float = 1.0  # yarn; rotations
    attention_factor: float | None = None  # yarn; multiplies cos and sin; None = derived
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn; round the correction range outwards

    def __post_init__(self) -> None:
        numbers = {"theta": self.theta, "factor": self.factor}
        if self.kind in ("llama3", "yarn"):
            numbers["original_max_position_embeddings"] = self.original_max_position
        for name, value in numbers.items():
            if not 0 < value < math.inf:
                raise ValueError(f"rope: {name} is {value}; it must be a positive number")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.kind == "llama3" and not 0 < low < high < math.inf:
            raise ValueError(
                f"rope: low_freq_factor {low} and high_freq_factor {high} must be positive and rising"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow < self.beta_fast < math.inf:
            raise ValueError(
                f"rope: beta_slow {self.beta_slow} and beta_fast {self.beta_fast} must be positive and rising"
            )

    def frequencies(self, dim: int) -> tuple[np.ndarray, float]:
        """Inverse frequencies ``[dim/2]`` float32 (radians per position) and the factor on cos and sin."""
        exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        inv_freq = (1.0 / np.power(np.float32(self.theta), exponent)).astype(np.float32)
        if self.kind == "default":
            return inv_freq, 1.0
        if self.kind == "linear":
            return (inv_freq / np.float32(self.factor)).astype(np.float32), 1.0
        if self.kind == "llama3":
            return self._llama3(inv_freq), 1.0
        if self.kind == "yarn":
            return self._yarn(inv_freq, dim), self._yarn_attention_factor()
        raise ValueError(f"rope type {self.kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")

    def _llama3(self, inv_freq: np.ndarray) -> np.ndarray:
        old = self.original_max_position
        wavelength = 2 * math.pi / inv_freq
        smooth = (old / wavelength - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * inv_freq / self.factor + smooth * inv_freq).astype(np.float32)

    def _yarn(self, inv_freq: np.ndarray, dim: int) -> np.ndarray:
        def dim_of(rotations: float) -> float:
            return (
                dim
                * math.log(self.original_max_position / (rotations * 2 * math.pi))
                / (2 * math.log(self.theta))
            )

        low, high = dim_of(self.beta_fast), dim_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        return (inv_freq / self.factor * ramp + inv_freq * (1 - ramp)).astype(np.float32)

    def _yarn_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def scale(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and formula of one dense decoder. Hashable: it is part of every compiled program's key."""

    architecture: str  # Hugging Face class name, e.g. "LlamaForCausalLM"
    vocab_size: int  # V, rows of the embedding table
    hidden_size: int  # E
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # K
    head_dim: int  # D
    intermediate_size: int  # width of the MLP
    max_position_embeddings: int  # tokens
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"  # dtype the checkpoint was saved in

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                      "intermediate_size", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"model configuration: {field} is {value!r}; it must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model configuration: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(
                f"model configuration: rms_norm_eps is {self.rms_norm_eps}; it must be in (0, 1)"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model configuration: head_dim {self.head_dim} is odd; rotary embedding needs it even"
            )

    @property
    def num_parameters(self) -> int:
        """Number of weights, a tied head counted once."""
        e, f, hd, kd = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim, self.kv_width
        layer = e * (hd + 2 * kd) + hd * e + 3 * e * f + 2 * e
        if self.attention_bias:
            layer += hd + 2 * kd + e
        if self.mlp_bias:
            layer += 2 * f + e
        return self.vocab_size * e * (1 if self.tie_word_embeddings else 2) + self.num_layers * layer + e

    @property
    def cache_window(self) -> int | None:
        """Positions that a query sees at most, its own among them, in every layer; None: some layer sees all."""
        return None

    @property
    def kv_width(self) -> int:
        """Elements of K (and of V) per token and layer."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of KV cache that one token takes over all layers, for elements of ``itemsize`` bytes."""
        return 2 * self.num_layers * self.kv_width * itemsize


def read_rope(config: dict[str, Any], max_position: int) -> RopeConfig:
    """Reads ``rope_theta`` + ``rope_scaling`` (older files) or ``rope_parameters`` (newer ones).

    Raises ValueError for a type that is not supported and for a required key that is missing.
    """
    parts = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(
            f"rope_scaling is {config.get('rope_scaling')!r}; it must be an object with rope_type and factor"
        )
    scaling = {**parts[0], **parts[1]}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_scaling type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise ValueError("partial_rotary_factor other than 1 is not supported for this architecture")
    theta = scaling.get("rope_theta", config.get("rope_theta")) or 10_000.0
    values: dict[str, Any] = {"theta": float(theta), "kind": kind}
    if kind == "default":
        return RopeConfig(**values)
    required = {
        "linear": ("factor",),
        "yarn": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    }
    for key in required[kind]:
        if scaling.get(key) is None:
            raise ValueError(f"rope_scaling of type {kind!r} lacks the key {key!r}")
    values["original_max_position"] = int(
        config.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or max_position
    )
    numbers = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
               "mscale", "mscale_all_dim")  # fmt: skip
    values |= {key: float(scaling[key]) for key in numbers if scaling.get(key) is not None}
    values["truncate"] = bool(scaling.get("truncate", True))
    return RopeConfig(**values)

"""Rotary position embedding and its length extensions: the formulas, and how a config.json says them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its length extensions.

    ``kind`` is Hugging Face's ``rope_type``; the formulas are those of ``transformers.modeling_rope_utils``.
    """

    theta: float = 10_000.0  # base of the wavelengths
    kind: str = "default"  # one of ROPE_TYPES
    factor: float = 1.0  # context extension factor
    original_max_position: int = 0  # tokens; context length before extension (llama3, yarn, longrope)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn; rotations
    beta_slow: float = 1.0  # yarn; rotations
    attention_factor: float | None = None  # yarn, longrope; multiplies cos and sin; None = derived
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn; round the correction range outwards
    short_factor: tuple[
        float, ...
    ] = ()  # longrope; divides the frequencies of sequences within the original length
    long_factor: tuple[float, ...] = ()  # longrope; the same beyond it
    long: bool = False  # longrope; which of the two: one for all sequences of an engine, see ``at_length``
    partial: float = 1.0  # share of each head that is rotated: its first dimensions

    def __post_init__(self) -> None:
        numbers = {"theta": self.theta, "factor": self.factor}
        if self.kind in ("llama3", "yarn", "longrope"):
            numbers["original_max_position_embeddings"] = self.original_max_position
        if self.attention_factor is not None:
            numbers["attention_factor"] = self.attention_factor
        for name, value in numbers.items():
            if not 0 < value < math.inf:
                raise ValueError(f"rope: {name} is {value}; it must be a positive number")
        if not 0 < self.partial <= 1:
            raise ValueError(f"rope: partial_rotary_factor is {self.partial}; it must be in (0, 1]")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.kind == "llama3" and not 0 < low < high < math.inf:
            raise ValueError(
                f"rope: low_freq_factor {low} and high_freq_factor {high} must be positive and rising"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow < self.beta_fast < math.inf:
            raise ValueError(
                f"rope: beta_slow {self.beta_slow} and beta_fast {self.beta_fast} must be positive and rising"
            )
        if self.kind == "longrope":
            for name in ("short_factor", "long_factor"):
                if not getattr(self, name) or not all(0 < x < math.inf for x in getattr(self, name)):
                    raise ValueError(f"rope: {name} must be a list of positive numbers")

    def rotated(self, dim: int) -> int:
        """How many of a head's ``dim`` dimensions are rotated; even."""
        return int(dim * self.partial)

    def at_length(self, tokens: int) -> RopeConfig:
        """The embedding for sequences of up to ``tokens``: longrope has other factors beyond the original length.

        Hugging Face changes factors when a sequence grows beyond that length, which turns the keys that it has cached
        wrong; here, as in vLLM, the choice is one for all sequences, by the longest one allowed.
        """
        if self.kind != "longrope":
            return self
        return dataclasses.replace(self, long=tokens > self.original_max_position)

    def frequencies(self, dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Inverse frequencies and factors on cos and sin, both ``[dim/2]`` float32 (radians per position).

        Dimensions that are not rotated have frequency 0 and factor 1; they come last in both halves of a head, where
        ``rotary_order`` puts them.
        """
        rotated = self.rotated(dim)
        if rotated % 2 or rotated < 2:
            raise ValueError(f"rope: {rotated} of {dim} dimensions rotate; that number must be even")
        inv_freq, scale = self._frequencies(rotated)
        rest = (dim - rotated) // 2
        return (
            np.concatenate((inv_freq, np.zeros(rest, np.float32))),
            np.concatenate((np.full(rotated // 2, scale, np.float32), np.ones(rest, np.float32))),
        )

    def _frequencies(self, dim: int) -> tuple[np.ndarray, float]:
        exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
        power = np.power(np.float32(self.theta), exponent)
        inv_freq = (1.0 / power).astype(np.float32)
        if self.kind == "default":
            return inv_freq, 1.0
        if self.kind == "linear":
            return (inv_freq / np.float32(self.factor)).astype(np.float32), 1.0
        if self.kind == "llama3":
            return self._llama3(inv_freq), 1.0
        if self.kind == "yarn":
            return self._yarn(inv_freq, dim), self._yarn_attention_factor()
        if self.kind == "longrope":
            name = "long_factor" if self.long else "short_factor"
            factors = np.array(getattr(self, name), np.float32)
            if factors.shape != power.shape:
                raise ValueError(
                    f"rope: {name} has {factors.size} numbers; {dim} dimensions rotate, so it needs {dim // 2}"
                )
            return (1.0 / (factors * power)).astype(np.float32), self._longrope_attention_factor()
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

    def _longrope_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))


def rotary_order(rope: RopeConfig, dim: int) -> np.ndarray | None:
    """Where each dimension ``[dim]`` of a head comes from so that a partial rotation turns the two halves of the head.

    Queries and keys reordered alike have the same products, so their weights are reordered once, when they are loaded,
    and the kernels only know whole rotations. None where nothing moves.
    """
    rotated = rope.rotated(dim)
    if rotated == dim:
        return None
    turn, stay = np.split(np.arange(dim), [rotated])
    halves = zip(np.split(turn, 2), np.split(stay, 2), strict=True)
    return np.concatenate([part for half in halves for part in half])


_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
            "mscale", "mscale_all_dim")  # fmt: skip
_KEYS = {
    "rope_type", "type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor", "truncate",
    "short_factor", "long_factor", "short_mscale", "long_mscale", *_NUMBERS,
}  # fmt: skip


def read_rope(
    config: dict[str, Any], max_position: int, *, theta: float = 10_000.0, partial: float = 1.0
) -> RopeConfig:
    """Reads ``rope_theta`` + ``rope_scaling`` (older files) or ``rope_parameters`` (newer ones).

    ``theta`` and ``partial`` are the family's defaults. Raises ValueError for a type or key that is not supported and
    for a required key that is missing.
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
    unknown = [key for key in scaling if key not in _KEYS]
    if unknown:
        raise ValueError(
            f"rope_scaling has the key {unknown[0]!r}, which is not supported; known: {', '.join(sorted(_KEYS))}"
        )
    values: dict[str, Any] = {
        "theta": float(scaling.get("rope_theta") or config.get("rope_theta") or theta),
        "kind": kind,
        "partial": float(
            scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or partial
        ),
    }
    if kind == "default":
        return RopeConfig(**values)
    for key in _REQUIRED[kind]:
        if scaling.get(key) is None:
            raise ValueError(f"rope_scaling of type {kind!r} lacks the key {key!r}")
    original = int(
        config.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or max_position
    )
    values["original_max_position"] = original
    values |= {key: float(scaling[key]) for key in _NUMBERS if scaling.get(key) is not None}
    values["truncate"] = bool(scaling.get("truncate", True))
    if kind == "longrope":
        values |= {key: tuple(map(float, scaling[key])) for key in ("short_factor", "long_factor")}
        values.setdefault("factor", max_position / original)
        values["long"] = max_position > original
    return RopeConfig(**values)

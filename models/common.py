"""What the configurations of most families have in common."""

from __future__ import annotations

from typing import Any

from .fields import Fields


def read_shape(
    f: Fields,
    *,
    eps: tuple[str, ...] = ("rms_norm_eps",),
    default_eps: float = 1e-6,
    activation: tuple[str, ...] = ("hidden_act",),
    default_activation: str = "silu",
    max_position: int = 2048,
    tied: bool = False,
) -> dict[str, Any]:
    """Arguments of ModelConfig that nearly all families name alike. The keywords are a family's names and defaults."""
    hidden, layers = f.need("hidden_size"), f.layers("num_hidden_layers")
    heads = f.count("num_attention_heads", most=hidden)
    return {
        "vocab_size": f.need("vocab_size"),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": f.get("num_key_value_heads", default=heads),
        "head_dim": f.get("head_dim", default=hidden // heads),
        "intermediate_size": f.need("intermediate_size"),
        "max_position_embeddings": f.get("max_position_embeddings", default=max_position),
        "norm_eps": f.number(*eps, default=default_eps),
        "activation": f.activation(*activation, default=default_activation),
        "tie_word_embeddings": f.flag("tie_word_embeddings", default=tied),
        "dtype": str(f.config.get("dtype") or f.config.get("torch_dtype") or "float32"),
    }


def window_of(f: Fields, *, switch: str | None = None, default: int | None = None) -> int | None:
    """``sliding_window``, where the flag ``switch`` (if there is one) says that it is used."""
    used = switch is None or f.flag(switch)
    window = f.get("sliding_window", default=default)
    return window if used else None

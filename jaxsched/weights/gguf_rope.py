"""Rotary embedding as GGUF files say it, in the words of a config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..models import RopeConfig
from .gguf_metadata import Metadata, shortest

LLAMA3, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (LLAMA3, SHORT, LONG)
"""Tensors that divide RoPE's frequencies: they belong to the configuration."""
_SCALING = "rope.scaling."


def rope_words(
    meta: Metadata, words: Mapping[str, Any], factors: Mapping[str, np.ndarray], *, whole: bool
) -> dict[str, Any]:
    """``rope_theta``, ``partial_rotary_factor`` and ``rope_scaling``.

    ``words`` are those found so far, ``factors`` the tensors of FACTORS that the file has, ``whole`` refuses heads
    that are rotated in part. Raises CheckpointError.
    """
    found: dict[str, Any] = {"rope_theta": float(meta.number("rope.freq_base", 10_000.0))}
    dim = words["head_dim"]
    rotated = meta.number("rope.dimension_count", dim)
    if rotated != dim:
        if whole or not 0 < rotated < dim:
            raise meta.error(
                f"{meta.prefix}rope.dimension_count is {rotated}; supported: the head width, {dim}"
            )
        share = rotated / dim
        found["partial_rotary_factor"] = share if int(dim * share) == rotated else math.nextafter(share, 1)
    original = meta.number(_SCALING + "original_context_length")
    kind = meta.get(_SCALING + "type", "linear" if meta.number("rope.scale_linear") else "none")
    factor = meta.number(_SCALING + "factor") or meta.number("rope.scale_linear") or 1.0
    attention = meta.number(_SCALING + "attn_factor", 1.0)
    if SHORT in factors or LONG in factors or kind == "longrope":
        return found | _longrope(meta, words, factors, original, attention)
    if attention != 1:
        raise meta.error(f"{meta.prefix}rope.scaling.attn_factor other than 1 is not supported")
    llama3 = factors.get(LLAMA3)
    if llama3 is not None and not np.all(llama3 == 1):
        plain = RopeConfig(theta=found["rope_theta"])
        return found | {"rope_scaling": _llama3(meta, plain, dim, llama3, original or 8192)}
    if kind == "none" or (kind == "linear" and factor == 1):
        return found
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= _yarn(meta, factor)
    if original:
        scaling["original_max_position_embeddings"] = original
    return found | {"rope_scaling": scaling}


def _yarn(meta: Metadata, factor: float) -> dict[str, Any]:
    meta.only(_SCALING + "yarn_ext_factor", 1.0)
    # Whether this one replaces the usual factor of attention or multiplies it depends on who wrote the file.
    meta.only(_SCALING + "yarn_attn_factor", shortest(float(np.float32(0.1 * math.log(max(factor, 1)) + 1))))
    names = ("beta_fast", "beta_slow")
    found = {name: meta.number(f"{_SCALING}yarn_{name}") for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _longrope(
    meta: Metadata,
    words: Mapping[str, Any],
    factors: Mapping[str, np.ndarray],
    original: Any,
    attention: float,
) -> dict[str, Any]:
    if not original or not (SHORT in factors and LONG in factors):
        raise meta.error(
            f"lacks {SHORT}, {LONG} or {meta.prefix}rope.scaling.original_context_length, which longrope needs"
        )
    scaling: dict[str, Any] = {"rope_type": "longrope"}
    for name, tensor in (("short_factor", SHORT), ("long_factor", LONG)):
        scaling[name] = [shortest(float(x)) for x in factors[tensor].reshape(-1)]
    scale = words["max_position_embeddings"] / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 and original > 1 else 1.0
    if not math.isclose(attention, usual, rel_tol=1e-6):  # both are roundings of the same formula
        scaling["attention_factor"] = attention
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _llama3(
    meta: Metadata, plain: RopeConfig, dim: int, factors: np.ndarray, original: int
) -> dict[str, Any]:
    """The Llama 3 parameters behind the divisors ``factors [D/2]`` that llama.cpp stores instead of them.

    Every published Llama 3 model has low and high frequency factors 1 and 4; other divisors are refused.
    """
    values: dict[str, Any] = {
        "factor": float(np.max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    if factors.shape == (dim // 2,) and 0 < values["factor"] < math.inf:
        guess = dataclasses.replace(plain, kind="llama3", original_max_position=original, **values)
        expected = plain.frequencies(dim)[0] / guess.frequencies(dim)[0]
        if np.allclose(factors, expected, rtol=1e-4):  # both sides are float32 roundings of the same formula
            return {"rope_type": "llama3", "original_max_position_embeddings": original, **values}
    raise meta.error(
        f"{LLAMA3!r} of shape {factors.shape} does not follow the llama3 formula "
        f"(low and high frequency factors 1 and 4, original context {original}); "
        "use the safetensors checkpoint of this model"
    )

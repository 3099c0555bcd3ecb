"""What the prefill kernel of the Triton backend knows when it is traced, and how it loads a block of K and V."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from ..shapes import AttentionOptions
from .common import decode_float8


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Tile sizes, all powers of two except ``splits``. Set by `default_config` when not given."""

    block_q: int = 64  # rows of one matrix tile: chunk rows x query heads of the group
    block_kv: int = 64  # positions per iteration
    num_warps: int = 4
    num_stages: int = 2  # KV blocks in flight
    splits: int = 1  # programs per tile, each over every splits-th KV block
    fp8_bits: bool = True  # decode float8 pages by integer arithmetic: needed before sm_89


@dataclasses.dataclass(frozen=True)
class Static:
    """What a kernel is specialised for."""

    options: AttentionOptions
    config: PrefillConfig
    rows: int
    slots: int
    group: int
    kv_heads: int
    head_dim: int
    padded_dim: int
    page_size: int
    width: int
    dot_dtype: Any  # of Q, K and the scores' dot
    weigh_dtype: Any  # of the probabilities and V
    quantized: bool
    interpret: bool

    @property
    def tile_rows(self) -> int:
        return self.config.block_q // self.group


def widen(x: Array, dtype: Any, fp8_bits: bool) -> Array:
    """Stored values as ``dtype``. Exact for int8 and float8 in bfloat16, float16 and float32."""
    if x.dtype == jnp.float8_e4m3fn and fp8_bits:
        return decode_float8(x).astype(dtype)
    return x.astype(dtype)


def dot(a: Array, b: Array, dims: tuple[int, int]) -> Array:
    """Accumulates in float32; float32 operands are multiplied as float32, not as TF32."""
    contract = ((dims[0],), (dims[1],)), ((), ())
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


class Refs(NamedTuple):
    """The kernel's operands. Pages as rows ``[P*Z*K, D]``: one number addresses a position's head."""

    q: Any  # [C, H, D]
    k: Any
    v: Any
    table: Any  # [S, W]
    slot: Any  # [C]
    position: Any  # [C]
    k_scales: Any = None  # [P, K]
    v_scales: Any = None


def load_block(refs: Refs, head: Array, slot: Array, start: Array, live: Array | None, s: Static) -> tuple:
    """K, V ``[T, D]`` and their scales ``[T]`` of the positions from ``start``; zeros where not ``live``."""
    block = s.config.block_kv
    if s.page_size % block == 0:
        page = plt.load(refs.table.at[slot, start // s.page_size])
        pages = jnp.full((block,), page, jnp.int32)
        row = page * s.page_size + start % s.page_size + jnp.arange(block)
    else:
        at = start + jnp.arange(block)
        pages = plt.load(refs.table.at[slot, at // s.page_size], mask=live, other=None if live is None else 0)
        row = pages * s.page_size + at % s.page_size
    row = (row * s.kv_heads + head)[:, None]
    dim = jnp.arange(s.padded_dim)[None, :]
    mask = None if live is None else live[:, None]
    if s.padded_dim != s.head_dim:
        mask = dim < s.head_dim if mask is None else mask & (dim < s.head_dim)
    other = None if mask is None else 0.0
    k = plt.load(refs.k.at[row, dim], mask=mask, other=other)
    v = plt.load(refs.v.at[row, dim], mask=mask, other=other)
    if refs.k_scales is None:
        return k, v, None, None
    scale_other = None if live is None else 0.0
    k_scales = plt.load(refs.k_scales.at[pages, head], mask=live, other=scale_other)
    v_scales = plt.load(refs.v_scales.at[pages, head], mask=live, other=scale_other)
    return k, v, k_scales, v_scales


def exp2_scaled(scores: Array, unit: float, top: Array, interpret: bool) -> Array:
    """``exp2(scores * unit - top[:, None])``.

    On the GPU two instructions a score. Left to the compiler it is six: it never fuses the product and the difference,
    and its exp2 takes care of subnormal results, which weigh nothing beside the row's largest score.
    """
    if interpret:
        return jnp.exp2(scores * unit - top[:, None])
    factor = struct.unpack("<I", struct.pack("<f", unit))[0]
    asm = f"{{ .reg .f32 t; fma.rn.ftz.f32 t, $1, 0f{factor:08X}, $2; ex2.approx.ftz.f32 $0, t; }}"
    shift = jnp.broadcast_to(-top[:, None], scores.shape)
    result = jax.ShapeDtypeStruct(scores.shape, jnp.float32)
    (p,) = plt.elementwise_inline_asm(
        asm, args=[scores, shift], constraints="=f,f,f", pack=1, result_shape_dtypes=[result]
    )
    return p

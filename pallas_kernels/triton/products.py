"""Product with a quantised kernel in the Triton backend of Pallas: numbers are converted on their way to the dot.

One program per block of rows, block of output columns and split of the input rows. Each step multiplies input rows of
one group as they are stored, which 16 bits hold exactly, and scales the sums in float32: so no value is rounded, and
what is read of the kernel is what is stored, once for each block of rows.

XLA keeps two int4 numbers in a byte on a GPU: an even column in the low bits, the odd column after it in the high bits.
The kernel reads these bytes, multiplies even and odd columns apart and joins the two results at the end. A number stays
in the upper half of its byte, sign included, which makes it 16 times as large; the scale makes up for it.

Shapes: T rows, I and O widths, G groups, B bytes of a row of the kernel (O, or O/2 for int4), N splits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from ..products import Stored
from ..tuning import CARDS, card
from .common import power_of_two

SMALLEST = 16  # of each side of a matrix product in Triton
# Not tuned on any card:
DEPTH = 64  # input rows that are loaded together
FEW = 64  # rows up to which the kernel's bytes take longer than the sums
SHARE = 4  # the sums of additional splits may be this part of the kernel's bytes


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a program."""

    tile: int  # rows
    columns: int  # bytes of a row of the kernel
    splits: int  # programs that share the input rows; their sums are added afterwards
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Block:
    """What is static in the product of some rows with some columns."""

    width: int  # I
    row_bytes: int  # B
    group: int  # input rows that share a scale
    halves: int  # 2 for int4, else 1
    depth: int  # input rows of a step, of one group
    unroll: int  # steps in a turn of the loop
    turns: int  # of the loop

    @property
    def covered(self) -> int:
        """Input rows that one program goes over."""
        return self.depth * self.unroll * self.turns


def refusal(x: Any, stored: Stored, family: str | None) -> str | None:
    """Why there is no kernel for rows ``x [..., I]`` and what is ``stored``, or None."""
    kernel, scale = stored.kernel, stored.scale
    group = kernel.shape[-2] // scale.shape[-2]
    if jnp.dtype(x.dtype).name not in ("bfloat16", "float16"):
        return f"rows are {x.dtype}; known: bfloat16, float16"
    if jnp.dtype(kernel.dtype).name not in ("int8", "int4"):
        return f"the kernel is stored as {kernel.dtype}; known: int8, int4"
    if kernel.dtype == jnp.int4 and kernel.shape[-1] % 2:
        return f"rows of {kernel.shape[-1]} int4 numbers do not fill their bytes"
    if scale.shape[-2] > 1 and group % SMALLEST:
        return f"groups of {group} rows are not made of {SMALLEST}"
    if kernel.size >= 2**31:
        return f"kernels of {kernel.size} numbers are above 2**31, where Triton's 32-bit offsets overflow"
    if family is not None and family not in CARDS:
        return f"GPU family {family} is not among {', '.join(CARDS)}"
    return None


def in_bytes(stored: Stored) -> tuple[Array, ...]:
    """Kernel ``[..., I, B]``, scales and offsets. Of int4 it is another name for the same memory on a GPU."""
    kernel = stored.kernel
    if kernel.dtype == jnp.int4:
        kernel = lax.bitcast_convert_type(kernel.reshape(*kernel.shape[:-1], -1, 2), jnp.int8)
    return (kernel, stored.scale) if stored.offset is None else (kernel, stored.scale, stored.offset)


def block_of(stored: Stored, splits: int = 1) -> Block:
    """How a program goes over its share of the input rows."""
    width, wide = stored.kernel.shape[-2:]
    halves, groups = 2 if stored.kernel.dtype == jnp.int4 else 1, stored.scale.shape[-2]
    group, most = width // groups, max(SMALLEST, min(DEPTH, power_of_two(width)))
    depth = most if groups == 1 else min(most, group & -group)
    unroll = most // depth
    return Block(width, wide // halves, group, halves, depth, unroll, -(-width // (most * splits)))


def block_product(
    s: Block, refs: Any, outer: tuple[Any, ...], row: Array, mine: Array, column: Array, start: Any = 0
) -> tuple[Array, ...]:
    """Sums in float32 ``[tile, columns]``: of every column, or for int4 of the even and of the odd ones.

    ``refs`` are x, kernel, scale and perhaps offset, of which all but x are indexed by ``outer`` first. Rows that are
    not ``mine`` are zeros, ``column`` counts bytes, ``start`` is the first input row; those behind I count nothing.
    """
    x_ref, kernel_ref, scale_ref, *offset_ref = refs
    inside = column < s.row_bytes

    def step(first: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        k = first + jnp.arange(s.depth)
        known = k < s.width
        x = plt.load(x_ref.at[row[:, None], k[None, :]], mask=mine[:, None] & known[None, :], other=0.0)
        at = (*outer, k[:, None], column[None, :])
        bytes_ = plt.load(kernel_ref.at[at], mask=known[:, None] & inside[None, :], other=0)
        numbers = (bytes_ << 4, bytes_ & jnp.int8(-16)) if s.halves == 2 else (bytes_,)
        group = jnp.minimum(first, s.width - 1) // s.group
        of_row = jnp.sum(x.astype(jnp.float32), axis=1)[:, None] if offset_ref else None
        new = []
        for half, (part, total) in enumerate(zip(numbers, totals, strict=True)):
            sums = jnp.dot(x, part.astype(x.dtype), preferred_element_type=jnp.float32)
            place = (*outer, group, s.halves * column + half)
            scale = plt.load(scale_ref.at[place], mask=inside, other=0.0)
            total += sums * (scale / 16 if s.halves == 2 else scale)[None, :]
            if of_row is not None:
                total += of_row * plt.load(offset_ref[0].at[place], mask=inside, other=0.0)[None, :]
            new.append(total)
        return tuple(new)

    def turn(i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        for u in range(s.unroll):
            totals = step(start + (i * s.unroll + u) * s.depth, totals)
        return totals

    zeros = jnp.zeros((row.shape[0], column.shape[0]), jnp.float32)
    return lax.fori_loop(0, s.turns, turn, (zeros,) * s.halves)


def store_block(
    s: Block, out_ref: Any, outer: tuple[Any, ...], row: Array, mine: Array, first: Any, sums: Any
) -> None:
    """Writes what ``block_product`` gives, from column ``first`` on, to the rows that are ``mine``."""
    joined = jnp.stack(sums, axis=-1).reshape(row.shape[0], -1) if s.halves == 2 else sums[0]
    column = first + jnp.arange(joined.shape[1])
    mask = mine[:, None] & (column < s.halves * s.row_bytes)[None, :]
    plt.store(out_ref.at[(*outer, row[:, None], column[None, :])], joined.astype(out_ref.dtype), mask=mask)


def _kernel(s: Block, config: Config, rows: int, *refs: Any) -> None:
    *operands, out_ref = refs
    split = pl.program_id(2)
    row = pl.program_id(0) * config.tile + jnp.arange(config.tile)
    first = pl.program_id(1) * config.columns
    column = first + jnp.arange(config.columns)
    sums = block_product(s, operands, (), row, row < rows, column, split * s.covered)
    store_block(s, out_ref, (split,), row, row < rows, s.halves * first, sums)


def default_config(rows: int, stored: Stored, family: str | None) -> Config:
    """Few rows: columns and splits enough to let all multiprocessors load. Many: large blocks, which convert less."""
    s, groups = block_of(stored), stored.scale.shape[0]
    wide, few = s.row_bytes * s.halves, rows <= FEW
    tile = max(SMALLEST, power_of_two(rows)) if few else 128
    narrow = few or stored.offset is not None  # offsets need registers
    columns = min((64 if narrow else 128) // s.halves, max(SMALLEST, power_of_two(s.row_bytes)))
    splits = 1
    if few:
        blocks = -(-s.row_bytes // columns)
        read, sums = (
            s.width * s.row_bytes + 4 * groups * wide,
            8 * rows * wide,
        )  # bytes; sums are written and read
        splits = min(2 * card(family).multiprocessors // blocks, 1 + read // (SHARE * sums), -(-s.turns // 4))
    return Config(tile, columns, max(splits, 1), 4 if few else 8, 4 if few else 3)


def quantized_matmul(
    x: Float[Array, "T I"],
    stored: Stored,
    dtype: Any,
    *,
    family: str | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "T O"]:
    """``x @ (kernel * scale + offset)`` of ``dtype``, summed in float32. For what ``refusal`` says None to."""
    rows, wide = x.shape[0], stored.kernel.shape[1]
    config = config or default_config(rows, stored, family)
    s = block_of(stored, config.splits)
    splits = -(-s.width // s.covered)  # none without work
    out = pl.pallas_call(
        functools.partial(_kernel, s, config, rows),
        grid=(-(-rows // config.tile), -(-s.row_bytes // config.columns), splits),
        out_shape=jax.ShapeDtypeStruct((splits, rows, wide), dtype if splits == 1 else jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
        interpret=interpret,
        name="quantized_matmul",
    )(x, *in_bytes(stored))
    return out[0] if splits == 1 else jnp.sum(out, axis=0).astype(dtype)

"""``paged_decode`` for sm_90 in Pallas Mosaic GPU: one query row per slot against its pages.

One block of 128 threads per (slot, KV head, split of the context). It keeps ``stages`` tiles of K and V in flight in
shared memory (TMA copies), multiplies with wgmma (the heads of a group are the rows of one 64-row tile; the rest of
the rows is padding: the kernel is bound by memory) and keeps the sums in registers. There is no producer warp: with
one warpgroup, three blocks fit the registers of an SM and hide each other's waits, where a second warpgroup would
leave room for one. With more than one split each block writes its normalised part and log2-sum-exp2, and XLA merges.
The streaming softmax is that of FlashAttention (Dao et al. 2022), the split that of Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..shapes import AttentionOptions, AttentionShape
from . import common

Array = jax.Array
FILL = 264  # blocks that keep a card of 132 SMs busy, two on each


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes of ``paged_decode``."""

    block: int = 64  # positions of a tile
    stages: int = 3  # tiles of K and of V in flight
    splits: int = 1  # blocks that share one (slot, KV head)
    min_tiles: int = 4  # a split gets at least so many tiles: short contexts use fewer splits


def default_config(shape: AttentionShape) -> DecodeConfig:
    """Untuned: tiles of 64 positions, as many stages as let two blocks share an SM, splits until the card is full."""
    block = 64
    stages = 3 if shape.head_dim <= 64 else 2
    min_tiles = 4
    tiles = max(1, -(-shape.pages_per_sequence * shape.page_size // block))
    wanted = -(-FILL // max(1, shape.slots * shape.kv_heads))
    return DecodeConfig(block, stages, max(1, min(wanted, tiles // min_tiles, 64)), min_tiles)


def shared_bytes(shape: AttentionShape, config: DecodeConfig) -> int:
    """Shared memory of one block, without barriers and reduction scratch."""
    ring = 2 * config.stages * config.block * shape.head_dim * 2
    dtype = _result_dtype(shape, config)
    result = common.ROWS * common.result_width(shape.head_dim, dtype) * dtype.itemsize
    return ring + common.ROWS * shape.head_dim * 2 + result + common.ROWS * 4


def _result_dtype(shape: AttentionShape, config: DecodeConfig) -> Any:
    """Parts stay in float32 until they are merged."""
    return jnp.dtype(shape.dtype if config.splits == 1 else jnp.float32)


def decode_refusal(shape: AttentionShape, config: DecodeConfig | None = None) -> str | None:
    """Why this backend cannot do ``shape``, or None."""
    config = config or default_config(shape)
    reason = common.refusal(shape) or common.block_refusal(shape, config.block)
    if reason is None and (size := shared_bytes(shape, config)) > common.SHARED_BYTES - common.RESERVED_BYTES:
        return f"{config} needs {size} bytes of shared memory, sm_90 has {common.SHARED_BYTES}"
    return reason


def paged_decode(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_table: Array,
    context_len: Array,
    *,
    options: AttentionOptions,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    config: DecodeConfig | None = None,
    interpret: Any = False,
) -> Array:
    """Attention of one query row per slot.

    q ``[S,H,D]`` bfloat16 or float16, pages ``[P,Z,K,D]`` of that dtype, block_table ``[S,W]`` int32, context_len
    ``[S]`` int32 (positions seen; 0 = dead slot: zeros, and nothing is loaded). ``interpret``: True, or
    ``plgpu.InterpretGPUParams``. Returns ``[S,H,D]`` in q's dtype. Raises ValueError with the reason of a refusal.
    """
    shape = AttentionShape.of(q, k_pages, block_table)
    config = config or default_config(shape)
    if reason := decode_refusal(shape, config):
        raise ValueError(f"mosaic paged_decode: {reason}")
    if k_scales is not None or v_scales is not None:
        raise ValueError("mosaic paged_decode: pages with scales are not supported")
    flat = (shape.num_pages * shape.page_size, shape.kv_heads * shape.head_dim)
    call = _kernel(shape, options, config, interpret)
    rows = common.pad_group(q.reshape(shape.slots, shape.kv_heads, shape.group, shape.head_dim))
    ints = block_table.astype(jnp.int32), context_len.astype(jnp.int32)
    partial, weight = call(rows, k_pages.reshape(flat), v_pages.reshape(flat), *ints)
    if config.splits == 1:
        return partial.reshape(q.shape)
    return _merge(partial, weight[..., : shape.group], context_len).reshape(q.shape).astype(q.dtype)


def _merge(partial: Array, weight: Array, context_len: Array) -> Array:
    """Parts ``[S,splits,K,G,D]`` float32, log2 weights ``[S,splits,K,G]`` to ``[S,K,G,D]``; an empty split has -inf."""
    top = weight.max(axis=1, keepdims=True)
    factor = jnp.where(weight == -jnp.inf, 0.0, jnp.exp2(weight - top))[..., None]
    parts = jnp.where(factor > 0, partial, 0.0)  # an empty split's part was never written
    result = (parts * factor).sum(axis=1) / factor.sum(axis=1)
    return jnp.where((context_len > 0)[:, None, None, None], result, 0.0)


def _kernel(shape: AttentionShape, options: AttentionOptions, config: DecodeConfig, interpret: Any) -> Any:
    """The kernel as a function of flat arrays; returns parts ``[S,splits,H,D]`` and weights ``[S,splits,K,64]``."""
    block, stages, splits, group, dim = (
        config.block,
        config.stages,
        config.splits,
        shape.group,
        shape.head_dim,
    )
    dtype = jnp.dtype(shape.dtype)
    out_dtype = _result_dtype(shape, config)
    query_rows = common.padded(group)
    units = block // common.unit_rows(shape.page_size, block)
    width = common.result_width(dim, out_dtype)
    sizes: dict[str, Any] = {"page_size": shape.page_size, "head_dim": dim}
    interpreted = bool(interpret)

    def decode(
        q: Any, k: Any, v: Any, table: Any, length: Any, out: Any, weight: Any, smem: Any, barriers: Any
    ) -> None:
        queries, k_ring, v_ring, result, row_weight = smem
        q_ready, k_ready, v_ready = barriers
        slot, head, split = lax.axis_index("slot"), lax.axis_index("head"), lax.axis_index("split")
        hi = length[slot]
        lo = jnp.int32(0) if options.window is None else jnp.maximum(hi - options.window, 0)
        first, last = lax.div(lo, jnp.int32(block)), lax.div(hi + (block - 1), jnp.int32(block))
        share = jnp.maximum(lax.div(last - first + (splits - 1), jnp.int32(splits)), config.min_tiles)
        begin = first + split * share
        count = jnp.minimum(last - begin, share)  # tiles of this block of threads; 0 or less = nothing to do

        def load(pages: Any, ring: Any, ready: Any, tile: Array, stage: Any) -> None:
            where = (slot, head, (begin + tile) * block, lo, hi)
            common.load_tile(pages, table, *where, ring.at[stage], ready.at[stage], **sizes)

        def reload(pages: Any, ring: Any, ready: Any, tile: Array, stage: Any) -> None:
            plgpu.commit_smem()  # all four warps have read the tile before the copy overwrites it
            load(pages, ring, ready, tile, stage)

        def step(tile: Array, carry: Any) -> Any:
            sums, top, total = carry
            stage = lax.rem(tile, jnp.int32(stages))
            start = (begin + tile) * block
            more = tile + stages < count
            plgpu.barrier_wait(k_ready.at[stage])
            scores = common.product(queries, k_ring.at[stage].transpose((1, 0)))
            pl.when(more)(lambda: reload(k, k_ring, k_ready, tile + stages, stage))
            scores = common.scores_log2(scores, options)
            position = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + start
            scores = jnp.where((position >= lo) & (position < hi), scores, -jnp.inf)
            weights, factor, top, total = common.softmax_step(scores, top, total)
            plgpu.barrier_wait(v_ready.at[stage])
            edge = (start < lo) | (start + block > hi)
            pl.when(edge)(lambda: common.zero_rows(v_ring.at[stage], start, lo, hi))
            sums = common.weigh_values(weights, v_ring.at[stage], sums, factor, interpreted=interpreted)
            pl.when(more)(lambda: reload(v, v_ring, v_ready, tile + stages, stage))
            return sums, top, total

        def write(column: int) -> None:
            target = out.at[slot, split, head, :, pl.ds(column, width)]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result.at[pl.ds(0, group)], target)
            plgpu.wait_smem_to_gmem(0)

        def write_weight() -> None:
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(row_weight, weight.at[slot, split, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(count > 0)
        def _live() -> None:
            plgpu.copy_gmem_to_smem(q.at[slot, head], queries.at[pl.ds(0, query_rows)], q_ready)
            for stage in range(stages):
                pl.when(stage < count)(partial(load, k, k_ring, k_ready, jnp.int32(stage), stage))
                pl.when(stage < count)(partial(load, v, v_ring, v_ready, jnp.int32(stage), stage))
            plgpu.barrier_wait(q_ready)
            carry = common.empty_sums(dim), common.row_values(common.FLOOR), common.row_values(0.0)
            sums, top, total = lax.fori_loop(0, count, step, carry)
            for column, values in common.result_parts(sums, total, width):
                result[:, pl.ds(0, width)] = values.astype(out_dtype)
                write(column)
            if splits > 1:
                row_weight[...] = top + jnp.log2(total)
                write_weight()

        @pl.when(count <= 0)
        def _dead() -> None:
            if splits > 1:
                row_weight[...] = common.row_values(-jnp.inf)
                write_weight()
            else:
                result[...] = jnp.zeros((common.ROWS, width), out_dtype)
                for column in range(0, dim, width):
                    write(column)

    ring = common.tile_smem((stages, block, dim), dtype)
    smem = (
        common.tile_smem((common.ROWS, dim), dtype),
        ring,
        ring,
        plgpu.SMEM((common.ROWS, width), out_dtype),
        plgpu.SMEM((common.ROWS,), jnp.float32),
    )
    full = plgpu.Barrier(num_arrivals=units, num_barriers=stages)
    return plgpu.kernel(
        decode,
        out_type=(
            jax.ShapeDtypeStruct((shape.slots, splits, shape.kv_heads, group, dim), out_dtype),
            jax.ShapeDtypeStruct((shape.slots, splits, shape.kv_heads, common.ROWS), jnp.float32),
        ),
        scratch_types=(smem, (plgpu.Barrier(), full, full)),
        grid=(splits, shape.slots, shape.kv_heads),
        grid_names=("split", "slot", "head"),
        compiler_params=common.compiler_params(),
        interpret=common.interpreter(interpret),
        kernel_name="paged_decode_sm90",
    )

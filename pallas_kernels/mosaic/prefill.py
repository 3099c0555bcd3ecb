"""``paged_prefill`` for sm_90 in Pallas Mosaic GPU: the rows of a chunk against the pages of their slots.

XLA first cuts the chunk into tiles (``plan``): rows of one slot that stand together, at most ``warpgroups`` times
64 // G of them. One block of threads does one (tile, KV head). A producer warpgroup copies K and V tiles through a
ring in shared memory (TMA, block-table indirection); each consumer warpgroup has 64 rows (query rows times the heads
of the group), multiplies with wgmma and keeps its sums in registers, so that one multiplies while the other takes
exponentials. Tiles of K and V that no row of the tile sees are never loaded. The streaming softmax is that of
FlashAttention (Dao et al. 2022), the split of work among warpgroups that of FlashAttention-3 (Shah et al. 2024).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..shapes import AttentionOptions, AttentionShape
from . import common

Array = jax.Array
COLUMNS = 64  # columns of the queries and results that pass through shared memory at once


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Tile sizes of ``paged_prefill``."""

    block: int = 128  # positions of a tile of K and V
    stages: int = 2  # tiles of K and of V in flight
    warpgroups: int = 2  # consumers, 64 rows each


class Plan(NamedTuple):
    """Tiles of a chunk. T tiles, ``g`` consumer warpgroups; unused tiles have ``hi`` 0."""

    tiles: Array  # [T,4] int32: slot, first chunk row, first position seen (lo), one behind the last (hi)
    bounds: Array  # [T,g,2] int32: lowest and highest position of a warpgroup's rows; -1, -1 without rows
    limits: Array  # [T,g,64] int32: position of each row of a warpgroup's tile, -1 = no row


def default_config(shape: AttentionShape) -> PrefillConfig:
    """Untuned: what fits shared memory and registers; one consumer where the chunk has only 64 rows."""
    warpgroups = 2 if shape.rows * shape.group > common.ROWS else 1
    if shape.head_dim > 128:
        return PrefillConfig(64, 2, warpgroups)
    return PrefillConfig(128, 3 if shape.head_dim <= 64 else 2, warpgroups)


def shared_bytes(shape: AttentionShape, config: PrefillConfig) -> int:
    """Shared memory of one block of threads, without barriers and reduction scratch."""
    ring = 2 * config.stages * config.block * shape.head_dim * 2
    return ring + config.warpgroups * common.ROWS * ((shape.head_dim + COLUMNS) * 2 + 4)


def prefill_refusal(shape: AttentionShape, config: PrefillConfig | None = None) -> str | None:
    """Why this backend cannot do ``shape``, or None."""
    config = config or default_config(shape)
    reason = common.refusal(shape) or common.block_refusal(shape, config.block)
    if reason is None and (size := shared_bytes(shape, config)) > common.SHARED_BYTES - common.RESERVED_BYTES:
        return f"{config} needs {size} bytes of shared memory, sm_90 has {common.SHARED_BYTES}"
    return reason


def paged_prefill(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_table: Array,
    slot: Array,
    position: Array,
    *,
    options: AttentionOptions,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    config: PrefillConfig | None = None,
    interpret: Any = False,
) -> Array:
    """Causal attention of the rows of a chunk.

    q ``[C,H,D]`` bfloat16 or float16, pages ``[P,Z,K,D]`` of that dtype, block_table ``[S,W]`` int32, slot and
    position ``[C]`` int32: row r sees positions 0..position[r] of slot[r]; a slot outside 0..S-1 is padding: zeros.
    Rows of one slot stand together (padding among them is allowed). ``interpret``: True, or
    ``plgpu.InterpretGPUParams``. Returns ``[C,H,D]`` in q's dtype. Raises ValueError with the reason of a refusal.
    """
    shape = AttentionShape.of(q, k_pages, block_table)
    config = config or default_config(shape)
    if reason := prefill_refusal(shape, config):
        raise ValueError(f"mosaic paged_prefill: {reason}")
    if k_scales is not None or v_scales is not None:
        raise ValueError("mosaic paged_prefill: pages with scales are not supported")
    live = (slot >= 0) & (slot < shape.slots) & (position >= 0)
    plan = plan_tiles(shape, options, config, live, slot.astype(jnp.int32), position.astype(jnp.int32))
    flat = (shape.num_pages * shape.page_size, shape.kv_heads * shape.head_dim)
    rows = q.reshape(shape.rows, shape.kv_heads, shape.group, shape.head_dim)
    call = _kernel(shape, options, config, plan.tiles.shape[0], interpret)
    out = call(rows, k_pages.reshape(flat), v_pages.reshape(flat), block_table.astype(jnp.int32), *plan)
    return jnp.where(live[:, None, None], out.reshape(q.shape), jnp.zeros((), q.dtype))


def plan_tiles(
    shape: AttentionShape,
    options: AttentionOptions,
    config: PrefillConfig,
    live: Array,
    slot: Array,
    position: Array,
) -> Plan:
    """Cut a chunk into tiles; ``live``, ``slot``, ``position`` ``[C]``. At most C // rows + S tiles.

    A tile begins at the first row of its slot or a whole number of tiles behind it, so that where a row stands in a
    tile depends on its own slot's rows alone.
    """
    group_rows = common.ROWS // shape.group
    tile_rows = group_rows * config.warpgroups
    most = max(1, min(shape.rows, shape.rows // tile_rows + min(shape.slots, shape.rows)))
    row = jnp.arange(shape.rows, dtype=jnp.int32)
    seen = lax.cummax(jnp.where(live, row, -1))
    before = jnp.concatenate(
        [jnp.full((1,), -1, jnp.int32), seen[:-1]]
    )  # the live row before this one, or -1
    run = live & ((before < 0) | (slot[before] != slot))  # first row of a slot
    begin = lax.cummax(jnp.where(run, row, 0))
    origin = begin + (row - begin) // tile_rows * tile_rows  # first row of this row's tile
    opens = live & ((before < 0) | (origin[before] != origin) | run)
    number = jnp.cumsum(opens.astype(jnp.int32)) - 1
    target = jnp.where(opens, number, most)
    first = jnp.full((most,), shape.rows, jnp.int32).at[target].set(origin, mode="drop")
    owner = jnp.zeros((most,), jnp.int32).at[target].set(slot, mode="drop")
    rows = first[:, None] + jnp.arange(tile_rows, dtype=jnp.int32)  # [T, rows]
    index = jnp.minimum(rows, shape.rows - 1)
    mine = (rows < shape.rows) & live[index] & (number[index] == jnp.arange(most, dtype=jnp.int32)[:, None])
    limit = jnp.where(mine, position[index], -1).reshape(most, config.warpgroups, group_rows)
    high = limit.max(axis=2)
    low = jnp.where(limit < 0, jnp.iinfo(jnp.int32).max, limit).min(axis=2)
    lo = jnp.zeros((most,), jnp.int32)
    if options.window is not None:
        lo = jnp.maximum(low.min(axis=1) - (options.window - 1), 0)
    packed = jnp.repeat(limit, shape.group, axis=2)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, common.ROWS - packed.shape[2])), constant_values=-1)
    tiles = jnp.stack([owner, jnp.minimum(first, shape.rows - 1), lo, high.max(axis=1) + 1], axis=1)
    return Plan(tiles, jnp.stack([jnp.where(high < 0, -1, low), high], axis=2), packed)


def _kernel(
    shape: AttentionShape, options: AttentionOptions, config: PrefillConfig, tiles: int, interpret: Any
) -> Any:
    """The kernel as a function of ``[C,K,G,D]`` queries, flat pages, block table and plan; returns ``[C,K,G,D]``."""
    block, stages, warpgroups, group, dim = (
        config.block,
        config.stages,
        config.warpgroups,
        shape.group,
        shape.head_dim,
    )
    dtype = jnp.dtype(shape.dtype)
    group_rows = common.ROWS // group
    sizes: dict[str, Any] = {"page_size": shape.page_size, "head_dim": dim}
    interpreted = bool(interpret)

    def prefill(
        q: Any,
        k: Any,
        v: Any,
        table: Any,
        tiles: Any,
        bounds: Any,
        limits: Any,
        out: Any,
        smem: Any,
        barriers: Any,
    ) -> None:
        queries, k_ring, v_ring, passing, limit_ring = smem
        q_ready, k_ready, v_ready, k_free, v_free, clean = barriers
        head, tile, me = lax.axis_index("head"), lax.axis_index("tile"), lax.axis_index("warpgroup")
        slot, origin, lo, hi = (tiles[tile, i] for i in range(4))
        first = lax.div(lo, jnp.int32(block))
        count = lax.div(hi + (block - 1), jnp.int32(block)) - first  # 0 where the tile is unused

        def produce(step: Array, _: None) -> None:
            stage = lax.rem(step, jnp.int32(stages))
            where = (slot, head, (first + step) * block, lo, hi)
            for pages, ring, ready, free in ((k, k_ring, k_ready, k_free), (v, v_ring, v_ready, v_free)):
                pl.when(step >= stages)(partial(plgpu.barrier_wait, free.at[stage]))
                common.load_tile(pages, table, *where, ring.at[stage], ready.at[stage], **sizes)

        def chunk_row(index: Array) -> Array:
            return jnp.minimum(origin + me * group_rows + index, shape.rows - 1)

        def load_queries() -> None:
            plgpu.copy_gmem_to_smem(limits.at[tile, me], limit_ring.at[me], q_ready.at[me])
            for column in range(0, dim, COLUMNS):

                def copy(index: Array, _: None, column: int = column) -> None:
                    source = q.at[chunk_row(index), head, :, pl.ds(column, COLUMNS)]
                    plgpu.copy_gmem_to_smem(
                        source, passing.at[me, pl.ds(index * group, group)], q_ready.at[me]
                    )

                lax.fori_loop(0, group_rows, copy, None)
                if column:  # the first part comes with the limits
                    plgpu.barrier_arrive(q_ready.at[me])
                plgpu.barrier_wait(q_ready.at[me])
                queries[me, :, pl.ds(column, COLUMNS)] = passing[me]
                plgpu.commit_smem()  # before the next part comes into the same place

        def consume(step: Array, carry: Any) -> Any:
            stage = lax.rem(step, jnp.int32(stages))
            start = (first + step) * block
            low, high = bounds[tile, me, 0], bounds[tile, me, 1]
            whole = start + block - 1 <= low
            if options.window is not None:
                whole = whole & (start > high - options.window)

            def mask(scores: Array) -> Array:
                limit = plgpu.load(limit_ring.at[me], layout=plgpu.Layout.WGMMA.reduce(1))
                limit = lax.broadcast_in_dim(limit, scores.shape, [0])
                position = (
                    plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA) + start
                )
                visible = position <= limit
                if options.window is not None:
                    visible = visible & (position > limit - options.window)
                return jnp.where(visible, scores, -jnp.inf)

            def weigh(carry: Any) -> Any:
                _, top, total = carry
                scores = common.product(queries.at[me], k_ring.at[stage].transpose((1, 0)))
                scores = common.scores_log2(scores, options)
                scores = lax.cond(whole, lambda s: s, mask, scores)
                weights, factor, top, total = common.softmax_step(scores, top, total)
                return weights.astype(dtype), factor, top, total

            plgpu.barrier_wait(k_ready.at[stage])
            weights, factor, top, total = weigh(carry)
            plgpu.barrier_arrive(k_free.at[stage])
            plgpu.barrier_wait(v_ready.at[stage])

            @pl.when((start < lo) | (start + block > hi))
            def _edge() -> None:
                @pl.when(me == 0)
                def _zero() -> None:
                    common.zero_rows(v_ring.at[stage], start, lo, hi)
                    plgpu.barrier_arrive(clean.at[stage])

                plgpu.barrier_wait(clean.at[stage])

            sums = common.weigh_values(weights, v_ring.at[stage], carry[0], factor, interpreted=interpreted)
            plgpu.barrier_arrive(v_free.at[stage])
            return sums, top, total

        def write(sums: tuple[Array, ...], total: Array) -> None:
            for column, values in common.result_parts(sums, total, COLUMNS):
                passing[me] = values.astype(dtype)
                plgpu.commit_smem()

                def copy(index: Array, _: None, column: int = column) -> None:
                    @pl.when(limits[tile, me, index * group] >= 0)
                    def _put() -> None:
                        target = out.at[chunk_row(index), head, :, pl.ds(column, COLUMNS)]
                        plgpu.copy_smem_to_gmem(passing.at[me, pl.ds(index * group, group)], target)

                lax.fori_loop(0, group_rows, copy, None)
                plgpu.wait_smem_to_gmem(0)

        @pl.when((count > 0) & (me < warpgroups))
        def _consumer() -> None:
            plgpu.set_max_registers(232, action="increase")
            load_queries()
            carry = common.empty_sums(dim), common.row_values(common.FLOOR), common.row_values(0.0)
            sums, _, total = lax.fori_loop(0, count, consume, carry)
            write(sums, total)

        @pl.when((count > 0) & (me == warpgroups))
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")
            lax.fori_loop(0, count, produce, None)

    ring = common.tile_smem((stages, block, dim), dtype)
    smem = (
        common.tile_smem((warpgroups, common.ROWS, dim), dtype),
        ring,
        ring,
        plgpu.SMEM((warpgroups, common.ROWS, COLUMNS), dtype),
        plgpu.SMEM((warpgroups, common.ROWS), jnp.int32),
    )
    full = plgpu.Barrier(num_arrivals=block // common.unit_rows(shape.page_size, block), num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    begin = plgpu.Barrier(num_arrivals=group_rows + 1, num_barriers=warpgroups)
    # One a stage: a consumer that runs ahead meets it again only when the other one has given the stage back.
    clean = plgpu.Barrier(num_barriers=stages)
    return plgpu.kernel(
        prefill,
        out_type=jax.ShapeDtypeStruct((shape.rows, shape.kv_heads, group, dim), dtype),
        scratch_types=(smem, (begin, full, full, free, free, clean)),
        grid=(tiles, shape.kv_heads),
        grid_names=("tile", "head"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=common.compiler_params(),
        interpret=common.interpreter(interpret),
        kernel_name="paged_prefill_sm90",
    )

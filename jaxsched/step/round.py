"""The pure step functions: one step, many steps, a whole round.

A step is one forward pass. A *mixed* step reads C packed prompt tokens and one token of every live slot; a *decode*
step only the latter. A round is M mixed steps and N-M decode steps without the host. A prompt that ends in step i
samples its first token there and decodes from step i+1. A slot that is done is masked: its writes are dropped and it
yields NO_TOKEN.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Int

from jaxsched.models import Decoder
from jaxsched.pallas_kernels import paged_decode, paged_prefill, write_kv
from jaxsched.pallas_kernels.ops import page_of

from .inputs import Chunks, Features, RoundInputs, RoundOutputs, RoundShape, SlotUpdates, apply_updates
from .sampling import sample
from .state import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, NO_TOKEN, EngineState, SlotState

Params = Any  # the parameters of a Decoder as a plain pytree
AUTO = Features()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Rows:
    """What every layer's attention shares in one step: S decode rows, then C chunk rows (or none)."""

    block_table: Array  # [S, W]
    page: Array  # [S+C], where each row's K and V go; P (out of range) for rows that write nothing
    offset: Array  # [S+C]
    visible: Array  # [S], positions that each decode row sees; 0 = dead row
    chunk_slot: Array | None  # [C]
    chunk_position: Array | None  # [C]


def _rows(state: EngineState, rows: SlotState, chunk: Chunks | None) -> _Rows:
    slots, nowhere, size = rows.live.shape[0], state.num_pages, state.page_size
    page = page_of(rows.block_table, jnp.arange(slots), rows.context_len, size)
    page, offset = jnp.where(rows.live, page, nowhere), rows.context_len % size
    visible = jnp.where(rows.live, rows.context_len + 1, 0)
    if chunk is None:
        return _Rows(rows.block_table, page, offset, visible, None, None)
    chunk_page = page_of(rows.block_table, chunk.slots, chunk.positions, size)
    chunk_page = jnp.where(chunk.slots < slots, chunk_page, nowhere)
    page = jnp.concatenate((page, chunk_page))
    offset = jnp.concatenate((offset, chunk.positions % size))
    return _Rows(rows.block_table, page, offset, visible, chunk.slots, chunk.positions)


def _attend(
    rows: _Rows, q: Array, k: Array, v: Array, pages: tuple[Array, Array]
) -> tuple[Array, tuple[Array, Array]]:
    """Writes K and V into a layer's pages, then attends over them."""
    k_pages = write_kv(pages[0], k, rows.page, rows.offset)
    v_pages = write_kv(pages[1], v, rows.page, rows.offset)
    slots, scale = rows.visible.shape[0], q.shape[-1] ** -0.5
    out = paged_decode(q[:slots], k_pages, v_pages, rows.block_table, rows.visible, scale=scale)
    if rows.chunk_slot is not None:
        assert rows.chunk_position is not None
        where = (rows.block_table, rows.chunk_slot, rows.chunk_position)
        out = jnp.concatenate((out, paged_prefill(q[slots:], k_pages, v_pages, *where, scale=scale)))
    return out, (k_pages, v_pages)


def _advance(rows: SlotState, sampled: Array, context_len: Array, token: Array) -> SlotState:
    """Slot rows after a token was sampled where ``sampled``; stops slots at a stop id or at their limit."""
    left = rows.tokens_left - sampled
    stopped = jnp.any(token[:, None] == rows.stop_ids, axis=-1)
    done = sampled & (stopped | (left <= 0))
    code = jnp.where(stopped, FINISH_STOP, FINISH_LENGTH)
    return dataclasses.replace(
        rows,
        context_len=context_len,
        last_token=jnp.where(sampled, token, rows.last_token),
        live=jnp.where(sampled, ~done, rows.live),
        tokens_left=left,
        output_pos=rows.output_pos + sampled,
        finish=jnp.where(sampled, jnp.where(done, code, FINISH_NONE), rows.finish),
    )


def _step(
    decoder: Decoder, state: EngineState, chunk: Chunks | None, slots: int, features: Features
) -> tuple[EngineState, Int[Array, "S"]]:
    """One forward pass over slots ``0..slots-1`` and, in a mixed step, the chunk (its arrays without the M axis)."""
    if slots > state.num_slots:
        raise ValueError(f"slots is {slots}, but the state has {state.num_slots}; use at most that many")
    rows = jax.tree.map(lambda a: a[:slots], state.slots)
    tokens, positions, active = rows.last_token, rows.context_len, rows
    if chunk is not None:
        active = dataclasses.replace(rows, live=rows.live & ~chunk.pause)
        tokens = jnp.concatenate((tokens, chunk.tokens))
        positions = jnp.concatenate((positions, chunk.positions))
    caches = list(zip(state.k_pages, state.v_pages, strict=True))
    hidden, caches = decoder(tokens, positions, _attend, _rows(state, active, chunk), caches)
    sampled, context_len = active.live, rows.context_len + active.live
    if chunk is not None:
        end = chunk.end_row[:slots]
        ends = end >= 0
        # A slot whose prompt ends here has no decode row in this step, so one row of logits per slot is enough.
        hidden = hidden[jnp.where(ends, slots + end, jnp.arange(slots))]
        sampled = sampled | ends
        context_len = jnp.where(ends, chunk.positions[end] + 1, context_len)
    logits = decoder.logits(hidden)
    token = sample(logits, rows.sampling, rows.output_pos, mode=features.sampling)
    rows = _advance(rows, sampled, context_len, token)
    table = jax.tree.map(lambda whole, part: whole.at[:slots].set(part), state.slots, rows)
    token = jnp.where(sampled, token, NO_TOKEN)
    return EngineState([k for k, _ in caches], [v for _, v in caches], table), token


def _mixed(
    decoder: Decoder, state: EngineState, chunks: Chunks, slots: int, features: Features
) -> tuple[EngineState, Array]:
    return lax.scan(lambda s, chunk: _step(decoder, s, chunk, slots, features), state, chunks)


def _decode(
    decoder: Decoder, state: EngineState, steps: int, slots: int, features: Features
) -> tuple[EngineState, Array]:
    return lax.scan(lambda s, _: _step(decoder, s, None, slots, features), state, length=steps)


@partial(jax.jit, static_argnames=("model", "slots", "features"), donate_argnames=("state",))
def prefill_chunk(
    model: nnx.GraphDef,
    params: Params,
    state: EngineState,
    chunks: Chunks,
    *,
    slots: int,
    features: Features = AUTO,
) -> tuple[EngineState, Int[Array, "M slots"]]:
    """M mixed steps: ``chunks`` beside one token of every live slot. Returns the state and the sampled tokens.

    ``state`` is donated: use the returned one.
    """
    return _mixed(nnx.merge(model, params), state, chunks, slots, features)


@partial(jax.jit, static_argnames=("model", "steps", "slots", "features"), donate_argnames=("state",))
def decode_steps(
    model: nnx.GraphDef,
    params: Params,
    state: EngineState,
    *,
    steps: int,
    slots: int,
    features: Features = AUTO,
) -> tuple[EngineState, Int[Array, "steps slots"]]:
    """``steps`` decode steps of slots ``0..slots-1``. ``state`` is donated: use the returned one."""
    return _decode(nnx.merge(model, params), state, steps, slots, features)


@partial(jax.jit, donate_argnames=("state",))
def update_slots(state: EngineState, updates: SlotUpdates) -> EngineState:
    """The state after the host's changes to the slot table. ``state`` is donated."""
    return dataclasses.replace(state, slots=apply_updates(state.slots, updates, state.num_pages))


@partial(jax.jit, static_argnames=("model", "shape", "features"), donate_argnames=("state",))
def run_round(
    model: nnx.GraphDef,
    params: Params,
    state: EngineState,
    inputs: RoundInputs,
    *,
    shape: RoundShape,
    features: Features = AUTO,
) -> tuple[EngineState, RoundOutputs]:
    """A whole round as one program: slot updates, ``shape.mixed_steps`` mixed steps, then decode steps.

    ``model`` and ``params`` come from ``jaxsched.weights.load_model`` (or ``nnx.split`` of a Decoder). ``state`` is
    donated. Equal to ``update_slots``, ``prefill_chunk`` and ``decode_steps`` in a row.
    Raises ValueError when ``inputs`` does not fit ``shape``.
    """
    have = (0, 0) if inputs.chunks is None else inputs.chunks.tokens.shape
    if have != (shape.mixed_steps, shape.chunk_tokens):
        raise ValueError(
            f"run_round: chunks of shape {have} for a RoundShape of {shape.mixed_steps, shape.chunk_tokens}"
        )
    decoder = nnx.merge(model, params)
    state = dataclasses.replace(state, slots=apply_updates(state.slots, inputs.updates, state.num_pages))
    parts = []
    if inputs.chunks is not None:
        state, tokens = _mixed(decoder, state, inputs.chunks, shape.slots, features)
        parts.append(tokens)
    if shape.steps > shape.mixed_steps:
        state, tokens = _decode(decoder, state, shape.steps - shape.mixed_steps, shape.slots, features)
        parts.append(tokens)
    tokens = jnp.concatenate(parts)
    unused = state.num_slots - shape.slots
    tokens = jnp.pad(tokens, ((0, 0), (0, unused)), constant_values=NO_TOKEN)
    return state, RoundOutputs(tokens, state.slots.finish)

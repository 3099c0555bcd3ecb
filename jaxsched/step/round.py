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
from jaxtyping import Array

from jaxsched.models import Decoder
from jaxsched.pallas_kernels import paged_decode, paged_prefill, rotate_and_write, write_kv_quantized
from jaxsched.pallas_kernels.ops import page_of
from jaxsched.pallas_kernels.rotary import rotate
from jaxsched.pallas_kernels.shapes import AttentionOptions

from .controls import advance_controls, controlled, granted
from .inputs import (
    Chunks,
    Features,
    RoundInputs,
    RoundOutputs,
    RoundShape,
    SlotUpdates,
    StepOutputs,
    apply_updates,
)
from .logprobs import logprobs_of, prompt_logprobs
from .sampling import processed_scores, sample
from .state import (
    FINISH_COMPLETE,
    FINISH_DEAD_END,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    NO_TOKEN,
    EngineState,
    SlotState,
)

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


@dataclasses.dataclass(frozen=True)
class _Attention:
    """Rotates, writes K and V into a layer's pages, attends over them. Equal ones are one to the compiler."""

    implementation: str | None

    def heads(
        self,
        rows: _Rows,
        heads: Array,
        cos: Array,
        sin: Array,
        cache: tuple[Array, ...],
        options: AttentionOptions,
    ) -> tuple[Array, tuple[Array, ...]]:
        q, cache = self._write(rows, heads, cos, sin, cache)
        k_pages, v_pages, *scales = cache
        slots = rows.visible.shape[0]
        formula: dict[str, Any] = {**dataclasses.asdict(options), "implementation": self.implementation}
        if scales:
            formula |= {"k_scales": scales[0], "v_scales": scales[1]}
        out = paged_decode(q[:slots], k_pages, v_pages, rows.block_table, rows.visible, **formula)
        if rows.chunk_slot is not None:
            assert rows.chunk_position is not None
            where = (rows.block_table, rows.chunk_slot, rows.chunk_position)
            out = jnp.concatenate((out, paged_prefill(q[slots:], k_pages, v_pages, *where, **formula)))
        return out, cache

    def _write(
        self, rows: _Rows, heads: Array, cos: Array, sin: Array, cache: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        """Rotated queries, and the cache with the rows' keys and values."""
        place = (rows.page, rows.offset)
        if len(cache) == 2:
            q, *plain = rotate_and_write(heads, cos, sin, *cache, *place, implementation=self.implementation)
            return q, tuple(plain)
        k_pages, v_pages, k_scales, v_scales = cache
        kv_heads = k_pages.shape[2]
        q, k, v = jnp.split(heads, (heads.shape[1] - 2 * kv_heads, heads.shape[1] - kv_heads), axis=1)
        write = partial(write_kv_quantized, implementation=self.implementation)
        k_pages, k_scales = write(k_pages, k_scales, rotate(k, cos, sin), *place)
        v_pages, v_scales = write(v_pages, v_scales, v, *place)
        return rotate(q, cos, sin), (k_pages, v_pages, k_scales, v_scales)


def _advance(rows: SlotState, sampled: Array, context_len: Array, token: Array, ended: Array) -> SlotState:
    """Slot rows after a token was sampled where ``sampled``; stops slots at a stop id, at their limit, or ``ended``.

    ``ended`` has a finish code where the controls end a slot.
    """
    left = rows.tokens_left - sampled
    stopped = jnp.any(token[:, None] == rows.stop_ids, axis=-1)
    done = sampled & (stopped | (left <= 0) | (ended > 0))
    code = jnp.where(stopped, FINISH_STOP, jnp.where(ended > 0, ended, FINISH_LENGTH))
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
) -> tuple[EngineState, StepOutputs]:
    """One forward pass over slots ``0..slots-1`` and, in a mixed step, the chunk (its arrays without the M axis)."""
    if slots > state.num_slots:
        raise ValueError(f"slots is {slots}, but the state has {state.num_slots}; use at most that many")
    if features.controls and state.controls is None:
        raise ValueError(
            "features.controls is on, but the state has no controls; give it those of init_controls"
        )
    rows = jax.tree.map(lambda a: a[:slots], state.slots)
    live = rows.live & granted(state.controls, slots) if features.controls else rows.live
    if chunk is not None:
        live &= ~chunk.pause
    active = dataclasses.replace(rows, live=live)
    tokens, positions = rows.last_token, rows.context_len
    adapter = rows.adapter
    if chunk is not None:
        tokens = jnp.concatenate((tokens, chunk.tokens))
        positions = jnp.concatenate((positions, chunk.positions))
        if adapter is not None:
            adapter = jnp.concatenate((adapter, adapter.at[chunk.slots].get(mode="fill", fill_value=0)))
    attend = _Attention(None if features.attention == "auto" else features.attention)
    context = _rows(state, active, chunk)
    hidden, caches = decoder(tokens, positions, attend, context, state.caches, adapter=adapter)
    sampled, context_len, last = live, rows.context_len + live, hidden
    if chunk is not None:
        end = chunk.end_row[:slots]
        ends = end >= 0
        # A slot whose prompt ends here has no decode row in this step, so one row of logits per slot is enough.
        last = hidden[jnp.where(ends, slots + end, jnp.arange(slots))]
        sampled = sampled | ends
        context_len = jnp.where(ends, chunk.positions[end] + 1, context_len)
    rows, controls, outputs = _choose(decoder, last, rows, state.controls, sampled, context_len, features)
    if chunk is not None:
        outputs = _read_prompt(decoder, hidden[slots:], chunk, outputs, features)
    table = jax.tree.map(lambda whole, part: whole.at[:slots].set(part), state.slots, rows)
    return state.with_caches(caches, table, controls), outputs


def _choose(
    decoder: Decoder,
    hidden: Array,
    rows: SlotState,
    controls: Any,
    sampled: Array,
    context_len: Array,
    features: Features,
) -> tuple[SlotState, Any, StepOutputs]:
    """Samples where ``sampled``; returns the slots' rows and controls after it, and what is reported."""
    raw = scores = decoder.logits(hidden)
    if features.controls:
        scores = controlled(raw, controls, rows)
    token = sample(scores, rows.sampling, rows.output_pos, mode=features.sampling)
    logprobs = None
    if features.logprobs >= 0:
        kind = features.logprobs_mode
        reported = (
            raw if kind.startswith("raw") else processed_scores(scores, rows.sampling, mode=features.sampling)
        )
        listed = controls.rows.listed[: token.shape[0]] if features.controls else None
        normalise = kind.endswith("logprobs")
        logprobs = logprobs_of(reported, token, features.logprobs, listed, normalise=normalise)
    if not features.controls:
        ended = jnp.zeros_like(token)
        rows = _advance(rows, sampled, context_len, token, ended)
        return rows, controls, StepOutputs(jnp.where(sampled, token, NO_TOKEN), None, logprobs)
    dead = sampled & jnp.all(scores == -jnp.inf, axis=-1)
    controls, complete = advance_controls(controls, sampled & ~dead, token)
    ended = jnp.where(dead, FINISH_DEAD_END, jnp.where(complete, FINISH_COMPLETE, FINISH_NONE))
    token = jnp.where(sampled & ~dead, token, NO_TOKEN)
    # A dead end is no token: it must not look like a stop id (padding is NO_TOKEN, which none of them is).
    stop_ids = jnp.where(dead[:, None], NO_TOKEN - 1, rows.stop_ids)
    after = _advance(dataclasses.replace(rows, stop_ids=stop_ids), sampled, context_len, token, ended)
    finish = jnp.where(sampled, after.finish, FINISH_NONE)
    return dataclasses.replace(after, stop_ids=rows.stop_ids), controls, StepOutputs(token, finish, logprobs)


def _read_prompt(
    decoder: Decoder, hidden: Array, chunk: Chunks, outputs: StepOutputs, features: Features
) -> StepOutputs:
    """Adds what is reported of the prompt rows."""
    logprobs = states = None
    if features.prompt in ("logprobs", "both"):
        normalise = features.logprobs_mode.endswith("logprobs")
        width = max(features.logprobs, 0)
        logprobs = prompt_logprobs(decoder, hidden, chunk.targets, width, normalise=normalise)
    if features.prompt in ("hidden", "both"):
        states = decoder.norm(hidden).astype(jnp.float32)
    return dataclasses.replace(outputs, prompt_logprobs=logprobs, prompt_hidden=states)


def _mixed(
    decoder: Decoder, state: EngineState, chunks: Chunks, slots: int, features: Features
) -> tuple[EngineState, StepOutputs]:
    return lax.scan(lambda s, chunk: _step(decoder, s, chunk, slots, features), state, chunks)


def _decode(
    decoder: Decoder, state: EngineState, steps: int, slots: int, features: Features
) -> tuple[EngineState, StepOutputs]:
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
) -> tuple[EngineState, StepOutputs]:
    """M mixed steps: ``chunks`` beside one token of every live slot. Returns the state and the outputs.

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
) -> tuple[EngineState, StepOutputs]:
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
    parts: list[StepOutputs] = []
    if inputs.chunks is not None:
        state, outputs = _mixed(decoder, state, inputs.chunks, shape.slots, features)
        parts.append(outputs)
    if shape.steps > shape.mixed_steps:
        state, outputs = _decode(decoder, state, shape.steps - shape.mixed_steps, shape.slots, features)
        parts.append(outputs)
    tokens = jnp.concatenate([part.tokens for part in parts])
    logprobs = None
    if features.logprobs >= 0:
        logprobs = jax.tree.map(lambda *x: jnp.concatenate(x), *(part.logprobs for part in parts))
    unused = state.num_slots - shape.slots
    tokens = jnp.pad(tokens, ((0, 0), (0, unused)), constant_values=NO_TOKEN)
    prompt = (parts[0].prompt_logprobs, parts[0].prompt_hidden)
    return state, RoundOutputs(tokens, state.slots.finish, logprobs, *prompt)

"""What a request may ask of its distribution beyond temperature and filters, as device state and as pure functions.

Penalties, biases, bad words, a minimal length, and constraints (structured output) all change the scores of a step,
and all but the bias change with each token. So they live beside the slot table and advance inside the scan.

An automaton over token ids is a set of tables: a state has a mask of the tokens that are allowed, and a next state for
each of them: a default and a sorted list of exceptions. All automata share one pool of tables; state 0 allows
everything for ever, and states 1..S are one for each slot, whose mask the host writes for a single step
(``grant_step``).

Axis letters: S slots, V vocabulary, U = ceil(V/32) mask words, Q states, R mask rows, A exceptions ("edges"), B bad
words, K tokens of one, J listed ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from .state import NO_TOKEN, SlotState

MAX_BAD_WORDS = 128  # B, token sequences of two and more tokens per request
MAX_BAD_WORD_TOKENS = 16  # K
MAX_LISTED = 128  # J
ANY = -2  # in a bad word: matches every token
FREE = 0  # the state that allows everything
UNLIMITED = np.int32(2**31 - 1)
IN_PROMPT = np.int32(1 << 30)  # added to a token's count when it stands in the prompt
MASK_BYTES = 64 << 20  # of the pool's masks, at most
STATES, EDGES = 1 << 15, 1 << 20
FAN = 64  # comparisons at once; FAN**3 exceptions per state at most, which no vocabulary reaches


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ControlRows:
    """One row per slot; ``neutral_rows`` ask for nothing."""

    repetition: Float[Array, "S"]  # divides positive and multiplies negative logits of tokens seen; 1 = off
    frequency: Float[Array, "S"]  # subtracted for each time that a token stands in the output
    presence: Float[Array, "S"]  # subtracted if it does
    biased: Bool[Array, "S"]  # whether the slot's row of ``Controls.bias`` counts
    min_tokens: Int[Array, "S"]  # before so many tokens stop ids have no probability
    state: Int[Array, "S"]  # of the slot's automaton, in the pool
    eos_allowed: Bool[Array, "S"]  # in an accepting state the model may end the text
    grant: Int[Array, "S"]  # tokens that the slot may sample until the host grants more
    recent: Int[Array, "S K"]  # the latest tokens, prompt included; NO_TOKEN before the first
    bad_prefix: Int[Array, "S B K"]  # all but the last token, right-aligned, ANY before the first
    bad_last: Int[Array, "S B"]  # the last; V where there is no word
    listed: Int[Array, "S J"]  # ids whose log-probabilities are wanted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AutomatonPool:
    """Tables of all automata on the device."""

    masks: UInt32[Array, "R U"]  # bit t%32 of word t//32: token t is allowed
    mask_of: Int[Array, "Q"]
    accepting: Bool[Array, "Q"]  # the text may end here
    final: Bool[Array, "Q"]  # and nothing can follow
    default: Int[Array, "Q"]  # next state of allowed tokens without an edge
    edge_begin: Int[Array, "Q"]
    edge_end: Int[Array, "Q"]
    edge_token: Int[Array, "A"]  # rising within a state
    edge_next: Int[Array, "A"]
    eos: UInt32[Array, "U"]  # mask of the model's end-of-sequence tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Controls:
    """Everything the device remembers for requests with controls. ``EngineState.controls``, or None."""

    rows: ControlRows
    counts: Int[Array, "S V"]  # times a token stands in the output, plus IN_PROMPT if it stands in the prompt
    bias: Float[Array, "S V"]  # added to the logits; -inf forbids
    automata: AutomatonPool


def neutral_rows(num_slots: int, vocab: int) -> ControlRows:
    """Rows that change nothing, as numpy arrays."""

    def full(value: object, dtype: type, *shape: int) -> Any:
        return np.full((num_slots, *shape), value, dtype)

    return ControlRows(
        repetition=full(1, np.float32),
        frequency=full(0, np.float32),
        presence=full(0, np.float32),
        biased=full(False, np.bool_),
        min_tokens=full(0, np.int32),
        state=full(FREE, np.int32),
        eos_allowed=full(True, np.bool_),
        grant=full(UNLIMITED, np.int32),
        recent=full(NO_TOKEN, np.int32, MAX_BAD_WORD_TOKENS),
        bad_prefix=full(ANY, np.int32, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
        bad_last=full(vocab, np.int32, MAX_BAD_WORDS),
        listed=full(0, np.int32, MAX_LISTED),
    )


def mask_words(vocab: int) -> int:
    """U: words of a mask."""
    return -(-vocab // 32)


def token_mask(tokens: Iterable[int], vocab: int) -> np.ndarray:
    """A mask of some tokens, uint32 ``[U]``."""
    mask = np.zeros(mask_words(vocab), np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    return mask


def mask_rows(num_slots: int, vocab: int) -> int:
    """R: masks that the pool holds, those of the slots included."""
    return num_slots + 1 + min(4096, MASK_BYTES // (4 * mask_words(vocab)))


def init_controls(num_slots: int, vocab: int, eos_token_ids: tuple[int, ...] = ()) -> Controls:
    """Controls of ``num_slots`` slots that ask for nothing, and an empty pool of automata."""
    words, states = mask_words(vocab), num_slots + 1 + STATES
    masks = np.zeros((mask_rows(num_slots, vocab), words), np.uint32)
    masks[0] = 0xFFFF_FFFF
    own = np.zeros(states, np.int32)
    own[: num_slots + 1] = np.arange(num_slots + 1)
    accepting = np.zeros(states, bool)
    accepting[FREE] = True
    nothing = jnp.zeros(states, jnp.int32)
    pool = AutomatonPool(
        masks=jnp.asarray(masks),
        mask_of=jnp.array(own),
        accepting=jnp.asarray(accepting),
        final=jnp.zeros(states, bool),
        default=jnp.array(own),
        edge_begin=nothing,
        edge_end=jnp.zeros(states, jnp.int32),
        edge_token=jnp.zeros(EDGES, jnp.int32),
        edge_next=jnp.zeros(EDGES, jnp.int32),
        eos=jnp.asarray(token_mask(eos_token_ids, vocab)),
    )
    return Controls(
        rows=jax.tree.map(jnp.asarray, neutral_rows(num_slots, vocab)),
        counts=jnp.zeros((num_slots, vocab), jnp.int32),
        bias=jnp.zeros((num_slots, vocab), jnp.float32),
        automata=pool,
    )


# -- in a step ---------------------------------------------------------------------------------------------------------


def controlled(logits: Float[Array, "S V"], controls: Controls, slots: SlotState) -> Float[Array, "S V"]:
    """The scores that slots ``0..S-1`` sample from; tokens that are not allowed have -inf.

    In vLLM's order: bias, repetition, frequency, presence; what is forbidden stays so whatever the order.
    """
    count, vocab = logits.shape
    rows, pool = jax.tree.map(lambda x: x[:count], controls.rows), controls.automata
    counts, bias = controls.counts[:count], controls.bias[:count]

    def column(x: Array) -> Array:
        return x[:, None]

    bias = jnp.where(column(rows.biased), bias, 0)
    scores = logits + bias
    seen, in_output = counts > 0, counts & ~IN_PROMPT
    weight = jnp.where(seen, column(rows.repetition), 1)
    scores = jnp.where(scores > 0, scores / weight, scores * weight)
    scores -= column(rows.frequency) * in_output + jnp.where(in_output > 0, column(rows.presence), 0)
    words = pool.masks[pool.mask_of[rows.state]]
    ends = rows.eos_allowed & pool.accepting[rows.state]
    words |= jnp.where(column(ends), pool.eos, 0)
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(count, -1)[:, :vocab] > 0
    scores = jnp.where(allowed & (bias > -jnp.inf), scores, -jnp.inf)  # whatever the penalties made of it
    early = column(slots.output_pos < rows.min_tokens) & (slots.stop_ids != NO_TOKEN)
    forbidden = jnp.where(early, slots.stop_ids, vocab)
    matches = (rows.bad_prefix == ANY) | (rows.bad_prefix == rows.recent[:, None])
    last = jnp.where(jnp.all(matches, axis=-1), rows.bad_last, vocab)
    forbidden = jnp.concatenate((forbidden, last), axis=1)
    return scores.at[jnp.arange(count)[:, None], forbidden].set(-jnp.inf, mode="drop")


def granted(controls: Controls, count: int) -> Bool[Array, "S"]:
    """Which of slots ``0..count-1`` may sample in this step."""
    return controls.rows.grant[:count] > 0


def follow(pool: AutomatonPool, state: Int[Array, "S"], token: Int[Array, "S"]) -> Int[Array, "S"]:
    """The next state after an allowed token.

    Its exception, if there is one, is found in three rounds of 64 comparisons. A binary search would be a chain of as
    many gathers as it has steps, which takes a compiler long to fuse and a GPU long to run.
    """
    low, end = pool.edge_begin[state], pool.edge_end[state]
    last = pool.edge_token.shape[0] - 1
    for stride in (FAN * FAN, FAN, 1):
        at = low[:, None] + stride * jnp.arange(1, FAN)
        below = (at <= end[:, None]) & (pool.edge_token[jnp.minimum(at - 1, last)] < token[:, None])
        low += stride * jnp.sum(below, axis=1, dtype=jnp.int32)
    found = (low < end) & (pool.edge_token[jnp.minimum(low, last)] == token)
    return jnp.maximum(jnp.where(found, pool.edge_next[jnp.minimum(low, last)], pool.default[state]), 0)


def advance_controls(
    controls: Controls, sampled: Bool[Array, "S"], token: Int[Array, "S"]
) -> tuple[Controls, Bool[Array, "S"]]:
    """After ``token`` was sampled where ``sampled``, and where a constraint is complete: no more can follow."""
    count, vocab = token.shape[0], controls.counts.shape[1]
    rows = jax.tree.map(lambda x: x[:count], controls.rows)
    state = jnp.where(sampled, follow(controls.automata, rows.state, token), rows.state)
    shifted = jnp.concatenate((rows.recent[:, 1:], token[:, None]), axis=1)
    advanced = dataclasses.replace(
        controls.rows,
        state=controls.rows.state.at[:count].set(state),
        grant=controls.rows.grant.at[:count].add(-(sampled & (rows.grant < UNLIMITED)).astype(jnp.int32)),
        recent=controls.rows.recent.at[:count].set(jnp.where(sampled[:, None], shifted, rows.recent)),
    )
    where = jnp.where(sampled, token, vocab)
    counts = controls.counts.at[jnp.arange(count), where].add(1, mode="drop")
    complete = sampled & controls.automata.final[state]
    return dataclasses.replace(controls, rows=advanced, counts=counts), complete

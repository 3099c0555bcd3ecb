"""Controls on the device against the same in plain numpy, and what happens to their rows between rounds."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxsched.step import init_controls
from jaxsched.step.control_updates import (
    grant_step,
    load_bias,
    load_counts,
    load_row,
    load_tables,
    move_tables,
    table_blocks,
    update_rows,
)
from jaxsched.step.controls import (
    FREE,
    IN_PROMPT,
    UNLIMITED,
    advance_controls,
    controlled,
    follow,
    granted,
    neutral_rows,
)
from jaxsched.step.logprobs import best, logprobs_of
from jaxsched.step.state import init_slots

SLOTS, VOCAB, EOS = 4, 300, 299


@pytest.fixture
def controls():
    return init_controls(SLOTS, VOCAB, (EOS,))


@pytest.fixture
def slots():
    return init_slots(SLOTS, 9, 4, 3)


def row(**fields):
    one = jax.tree.map(lambda x: x[0], neutral_rows(1, VOCAB))
    return dataclasses.replace(
        one, **{name: np.asarray(value, getattr(one, name).dtype) for name, value in fields.items()}
    )


def random_logits(seed=0):
    return np.random.default_rng(seed).normal(size=(SLOTS, VOCAB)).astype(np.float32) * 5


def test_neutral_controls_change_nothing(controls, slots):
    logits = random_logits()
    np.testing.assert_array_equal(controlled(logits, controls, slots), logits)
    assert np.asarray(granted(controls, SLOTS)).all()


def test_penalties_and_bias(controls, slots):
    """Each slot has its own, and slot 3 none, although its tables are full of what others have left there."""
    rng, logits = np.random.default_rng(1), random_logits()
    settings = [(1.5, 0.3, 0.7), (0.8, -0.2, 0.0), (1.0, 0.0, -1.0), (1.0, 0.0, 0.0)]
    counts = rng.integers(0, 3, (SLOTS, VOCAB)).astype(np.int32)
    prompt = rng.random((SLOTS, VOCAB)) < 0.3
    bias = rng.normal(size=(SLOTS, VOCAB)).astype(np.float32)
    bias[0, :50] = -np.inf
    for slot, (repetition, frequency, presence) in enumerate(settings):
        one = row(repetition=repetition, frequency=frequency, presence=presence, biased=slot in (0, 2))
        controls = load_row(controls, np.int32(slot), one)
        controls = load_counts(controls, np.int32(slot), counts[slot] + IN_PROMPT * prompt[slot])
        controls = load_bias(controls, np.int32(slot), bias[slot])
    got = np.asarray(controlled(logits, controls, slots))
    for slot, (repetition, frequency, presence) in enumerate(settings):
        want = logits[slot] + (bias[slot] if slot in (0, 2) else 0)
        seen = (counts[slot] > 0) | prompt[slot]
        want = np.where(
            seen, np.where(want > 0, want / np.float32(repetition), want * np.float32(repetition)), want
        )
        want = want - np.float32(frequency) * counts[slot] - np.float32(presence) * (counts[slot] > 0)
        np.testing.assert_allclose(got[slot], want, rtol=1e-6, atol=1e-6)


def test_minimal_length_hides_stop_ids(controls, slots):
    slots = dataclasses.replace(
        slots,
        stop_ids=slots.stop_ids.at[:, 0].set(7).at[1, 1].set(9),
        output_pos=np.array([2, 3, 4, 0], np.int32),
    )
    controls = update_rows(controls, np.arange(SLOTS, dtype=np.int32), np.ones(SLOTS, bool))
    for slot in range(3):
        controls = load_row(controls, np.int32(slot), row(min_tokens=4))
    hidden = np.isneginf(controlled(random_logits(), controls, slots))
    assert [np.flatnonzero(r).tolist() for r in hidden] == [[7], [7, 9], [], []]


def test_bad_words(controls, slots):
    """Only the last token of a word is forbidden, and only behind the others."""
    words, one = [(5, 6), (1, 2, 3), (9, 9, 9, 9)], row()
    for i, word in enumerate(words):
        one.bad_prefix[i, 16 - len(word) + 1 :] = word[:-1]
        one.bad_last[i] = word[-1]
    for history, forbidden in [
        ([5], [6]),
        ([1, 2], [3]),
        ([0, 1, 2], [3]),
        ([2, 1], []),
        ([9, 9], []),
        ([9] * 5, [9]),
    ]:
        recent = np.full(16, -1, np.int32)
        recent[16 - len(history) :] = history
        state = load_row(init_controls(SLOTS, VOCAB), np.int32(2), dataclasses.replace(one, recent=recent))
        hidden = np.isneginf(controlled(random_logits(), state, slots))
        assert np.flatnonzero(hidden[2]).tolist() == forbidden and not hidden[[0, 1, 3]].any(), history


def test_counts_and_recent_tokens_advance(controls):
    sampled, token = np.array([True, False, True, True]), np.array([3, 4, 5, 5], np.int32)
    for _ in range(2):
        controls, complete = advance_controls(controls, sampled, token)
        assert not np.asarray(complete).any()
    counts = np.asarray(controls.counts)
    assert counts.sum() == 6 and counts[0, 3] == counts[2, 5] == counts[3, 5] == 2
    assert np.asarray(controls.rows.recent)[:, -3:].tolist() == [[-1, 3, 3], [-1] * 3, [-1, 5, 5], [-1, 5, 5]]
    assert (np.asarray(controls.rows.grant) == UNLIMITED).all()


# -- automata ----------------------------------------------------------------------------------------------------------


class Automaton:
    """Random tables, as ``structured.TokenAutomaton`` has them, and what they mean in a dict."""

    def __init__(self, rng, states):
        self.moves = []
        for _ in range(states):
            allowed = rng.permutation(VOCAB)[: rng.integers(1, VOCAB)]
            target = rng.integers(0, states)
            self.moves.append(
                {int(t): int(target if rng.random() < 0.7 else rng.integers(states)) for t in allowed}
            )
        self.moves[-1] = {}
        rows = np.zeros((states, VOCAB), bool)
        for state, moves in enumerate(self.moves):
            rows[state, list(moves)] = True
        packed = np.packbits(np.pad(rows, ((0, 0), (0, -VOCAB % 32))), axis=1, bitorder="little")
        self.mask, self.mask_of = packed.view(np.uint32), np.arange(states, dtype=np.int32)
        self.default = np.array(
            [max(moves.values(), key=[*moves.values()].count, default=-1) for moves in self.moves]
        )
        edges = [
            sorted((t, n) for t, n in moves.items() if n != self.default[state])
            for state, moves in enumerate(self.moves)
        ]
        self.edge_start = np.cumsum([0, *map(len, edges)]).astype(np.int32)
        flat = np.array([edge for row in edges for edge in row], np.int32).reshape(-1, 2)
        self.edge_token, self.edge_next = flat[:, 0], flat[:, 1]
        self.accepting = rng.random(states) < 0.3
        self.accepting[-1] = True
        self.final = np.zeros(states, bool)
        self.final[-1] = True


def test_automata_on_the_device(controls, slots):
    """Two automata in one pool: every state allows and follows what its tables say."""
    rng, places = np.random.default_rng(3), []
    at = [SLOTS + 1, SLOTS + 1, 0]
    for states in (70, 5):
        automaton = Automaton(rng, states)
        for blocks in table_blocks(automaton, *at, controls.automata):
            controls = load_tables(controls, *blocks)
        places.append((automaton, at[1]))
        at = [at[0] + states, at[1] + states, at[2] + len(automaton.edge_token)]
    followed = jax.jit(follow)
    for automaton, base in places:
        for state, moves in enumerate(automaton.moves):
            for slot in range(SLOTS):
                controls = load_row(controls, np.int32(slot), row(state=base + state, eos_allowed=slot != 1))
            allowed = np.isfinite(controlled(random_logits(), controls, slots))
            for slot in range(SLOTS):
                want = set(moves) | ({EOS} if automaton.accepting[state] and slot != 1 else set())
                assert set(np.flatnonzero(allowed[slot]).tolist()) == want
            tokens = rng.choice([*moves, 0], SLOTS).astype(np.int32)
            after = followed(controls.automata, controls.rows.state, tokens)
            for token, got in zip(tokens.tolist(), np.asarray(after).tolist(), strict=True):
                assert token not in moves or got == base + moves[token]
    sampled = np.array([True, False, False, False])
    state, token = next(
        (q, t) for q, moves in enumerate(places[0][0].moves) for t, n in moves.items() if n == 69
    )
    for slot in range(SLOTS):
        controls = load_row(controls, np.int32(slot), row(state=places[0][1] + state))
    _, complete = advance_controls(controls, sampled, np.full(SLOTS, token, np.int32))
    assert np.asarray(complete).tolist() == sampled.tolist()


def test_a_granted_step(controls, slots):
    """The host lets slot 2 sample one token out of a mask."""
    controls = load_row(controls, np.int32(2), row(grant=0))
    assert np.asarray(granted(controls, SLOTS)).tolist() == [True, True, False, True]
    words = np.zeros((8, -(-VOCAB // 32)), np.uint32)
    words[0, 1] = 0b101  # tokens 32 and 34
    where = np.full(8, SLOTS, np.int32)
    where[0] = 2
    controls = grant_step(controls, where, words)
    assert np.asarray(granted(controls, SLOTS)).all()
    allowed = np.isfinite(controlled(random_logits(), controls, slots))
    assert np.flatnonzero(allowed[2]).tolist() == [32, 34] and allowed[[0, 1, 3]].all()
    everybody = np.ones(SLOTS, bool)
    controls, complete = advance_controls(controls, everybody, np.full(SLOTS, 32, np.int32))
    assert np.asarray(granted(controls, SLOTS)).tolist() == [True, True, False, True]
    assert not np.asarray(complete).any() and np.asarray(controls.rows.state).tolist() == [
        FREE,
        FREE,
        3,
        FREE,
    ]


def test_rows_move_with_their_slots_and_are_cleared(controls):
    for slot in range(SLOTS):
        at = np.int32(slot)
        controls = load_row(controls, at, row(repetition=slot + 2, min_tokens=slot))
        controls = load_counts(controls, at, np.full(VOCAB, slot, np.int32))
        controls = load_bias(controls, at, np.full(VOCAB, slot, np.float32))
    source = np.array([3, 1, 2, 3], np.int32)
    controls = move_tables(update_rows(controls, source, np.array([False, True, False, False])), source)
    assert np.asarray(controls.rows.repetition).tolist() == [5, 1, 4, 5]
    assert np.asarray(controls.rows.min_tokens).tolist() == [3, 0, 2, 3]
    assert np.asarray(controls.counts)[:, 0].tolist() == [3, 1, 2, 3]
    assert np.asarray(controls.bias)[:, 0].tolist() == [3, 1, 2, 3]


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [5, 128, 1000, 5000])
@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_the_best_are_exact(vocab, k):
    """Also with many ties, which go to the lower id, and with -inf."""
    rng = np.random.default_rng(vocab + k)
    scores = rng.integers(0, 40, (6, vocab)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    top, ids = best(scores, k)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(top, np.take_along_axis(scores, order, axis=1))


def test_logprobs_of_a_row():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, 700)).astype(np.float32) * 3
    token, listed = (
        np.array([5, int(scores[1].argmax()), 699], np.int32),
        rng.integers(0, 700, (3, 4)).astype(np.int32),
    )
    wide = scores.astype(np.float64)
    want = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    found = logprobs_of(scores, token, 6, listed)
    np.testing.assert_allclose(found.chosen, want[np.arange(3), token], atol=1e-5)
    np.testing.assert_allclose(found.listed, np.take_along_axis(want, listed, axis=1), atol=1e-5)
    np.testing.assert_allclose(found.top, -np.sort(-want, axis=1)[:, :6], atol=1e-5)
    assert np.asarray(found.rank).tolist() == [
        1 + int((scores[i] > scores[i, t]).sum()) for i, t in enumerate(token)
    ]
    raw = logprobs_of(scores, token, 2, normalise=False)
    np.testing.assert_array_equal(raw.chosen, scores[np.arange(3), token])

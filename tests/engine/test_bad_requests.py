"""O4: a bad request fails at entry with an error that has the numbers in it, and disturbs nobody."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from harness import GREEDY, assert_idle, collect, drain, make_engine, oracle, run_all
from jaxsched import SamplingParams

FEW_PAGES = {"num_pages": 10, "executor": "dispatch"}
SAMPLED = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(toy):
    """max_model_len 128, and a pool that holds 80 tokens."""
    return make_engine(toy("base"), **FEW_PAGES)


BAD = {
    # name: (prompt, changes to GREEDY, message)
    "too long": ([1] * 129, {}, "the prompt has 129 tokens, but max_model_len is 128; shorten the prompt or raise"),
    "never fits the pool": (
        [1] * 70,
        {"max_tokens": 12},
        r"needs 11 KV pages of 8 tokens \(70 prompt \+ 12 output tokens\), but the pool has 10 pages; raise num_pages",
    ),
    "prompt alone does not fit": (
        [1] * 100,
        {"max_tokens": None},
        r"needs 13 KV pages of 8 tokens \(100 prompt \+ 1 output tokens\), but the pool has 10 pages",
    ),
    "id too large": ([1, 272], {}, r"prompt token id 272 is out of range; the model's vocabulary is 0..271"),
    "id negative": ([-1], {}, r"prompt token id -1 is out of range; the model's vocabulary is 0..271"),
    "id huge": ([2**40], {}, r"prompt token id 1099511627776 is out of range"),
    "a float": ([1, 1.5], {}, r"prompt_token_ids must be a list of integers, not \[1, 1.5\]"),
    "a text": ("123", {}, "prompt_token_ids must be a list of integers, not '123'"),
    "nested": ([[1, 2]], {}, r"prompt_token_ids must be a list of integers, not \[\[1, 2\]\]"),
    "a number": (5, {}, "prompt_token_ids must be a list of integers, not 5"),
    "nothing": (None, {}, "prompt_token_ids must be a list of integers, not None"),
    "an array of floats": (np.ones(3), {}, "prompt_token_ids must be a list of integers"),
    "two dimensions": (np.ones((2, 2), int), {}, "prompt_token_ids must be a list of integers"),
    "stop id out of range": (
        [1],
        {"stop_token_ids": [3, 272]},
        r"stop_token_ids has 272, out of range; the model's vocabulary is 0..271",
    ),
    "too many stop ids": (
        [1],
        {"stop_token_ids": list(range(7)), "ignore_eos": False},
        "stop_token_ids and end-of-sequence ids are 9 together; this engine holds 8 per request; raise max_stop_ids",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_and_nothing_is_queued(engine, name):
    prompt, changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, dataclasses.replace(GREEDY, **changes))
    assert_idle(engine)


def test_neighbours_of_bad_requests_finish(engine, toy):
    """Their tokens are those of the same requests without any bad ones, also where the engine draws the seed."""
    model = toy("base")
    good = [([i, 2, 3], GREEDY if i % 2 else SAMPLED) for i in range(6)]
    fresh = run_all(make_engine(model, **FEW_PAGES), good)
    mixed = make_engine(model, **FEW_PAGES)
    ids, results, bad = [], {}, list(BAD.values())
    for request in good:
        for prompt, changes, _ in bad[:3]:
            with pytest.raises(ValueError):
                mixed.add_request(prompt, dataclasses.replace(GREEDY, **changes))
        bad = bad[3:] or bad
        ids.append(mixed.add_request(*request))
        collect(mixed, results)
    drain(mixed, results)
    assert [results[i].ids for i in ids] == [r.ids for r in fresh]
    assert fresh[1].ids == oracle(model, *good[1])[0]
    assert_idle(mixed)


# -- requests at the edge of what is allowed -----------------------------------------------------------------------


def test_a_prompt_of_exactly_max_model_len(toy):
    """There is no room for a token: it ends at once, as documented at SamplingParams.max_tokens."""
    engine = make_engine(toy("base"))
    [result] = run_all(engine, [([1] * 128, GREEDY)])
    assert (result.ids, result.text, result.finish_reason) == ([], "", "length")
    [result] = run_all(engine, [([1] * 127, GREEDY)])
    assert len(result.ids) == 1 and result.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "count"),
    [
        (3, 0, 0),
        (3, 1, 1),
        (120, 8, 8),
        (120, 1000, 8),  # cut to the room that max_model_len leaves
        (120, None, 8),
        (100, None, 28),
    ],
)
def test_max_tokens(toy, prompt_len, max_tokens, count):
    engine = make_engine(toy("base"))
    [result] = run_all(engine, [([1] * prompt_len, dataclasses.replace(GREEDY, max_tokens=max_tokens))])
    assert (len(result.ids), result.finish_reason) == (count, "length")
    assert_idle(engine)


def test_max_tokens_none_in_a_small_pool(engine):
    """As many as the pool holds: 80 positions, and the last token needs none."""
    [result] = run_all(engine, [([1] * 60, dataclasses.replace(GREEDY, max_tokens=None))])
    assert (len(result.ids), result.finish_reason) == (21, "length")
    [result] = run_all(engine, [([1] * 80, dataclasses.replace(GREEDY, max_tokens=None))])
    assert len(result.ids) == 1


def test_an_empty_prompt(toy):
    model = toy("base")
    engine = make_engine(model)
    bos = model.checkpoint.bos_token_id
    [empty, explicit] = run_all(engine, [([], GREEDY), ([bos], GREEDY)])
    assert empty.ids == explicit.ids and len(empty.ids) == GREEDY.max_tokens
    without = make_engine(model, bos_token_id=None)
    message = "the prompt is empty and the model has no beginning-of-sequence token; give a prompt"
    with pytest.raises(ValueError, match=message):
        without.add_request([], GREEDY)
    assert_idle(without)


@pytest.mark.parametrize(
    "prompt",
    [np.array([5, 6, 7]), np.array([5, 6, 7], np.uint8), (5, 6, 7), range(5, 8), jnp.array([5, 6, 7])],
    ids=lambda p: type(p).__name__,
)
def test_kinds_of_prompt_ids(engine, prompt):
    want = run_all(engine, [([5, 6, 7], GREEDY)])[0].ids
    assert run_all(engine, [(prompt, GREEDY)])[0].ids == want


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1e-6},
        {"temperature": 0.0, "top_p": 0.5},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1e-4},
    ],
    ids=str,
)
def test_ways_to_be_greedy(engine, toy, changes):
    [result] = run_all(engine, [([5, 6, 7], dataclasses.replace(GREEDY, **changes))])
    assert result.ids == oracle(toy("base"), [5, 6, 7], GREEDY)[0]


@pytest.mark.parametrize(
    "changes", [{"top_k": 272}, {"top_k": 10**9}, {"top_k": -1}, {"top_p": 1.0}], ids=str
)
def test_filters_that_are_off(engine, changes):
    params = dataclasses.replace(SAMPLED, seed=4)
    plain, same = run_all(engine, [([5], params), ([5], dataclasses.replace(params, **changes))])
    assert plain.ids == same.ids


def test_request_ids(engine):
    """One name can be used again when it is free, and names that the engine makes up avoid those of others."""
    assert engine.add_request([1], GREEDY, request_id="mine") == "mine"
    with pytest.raises(ValueError, match="request id 'mine' is already running; use another or wait until"):
        engine.add_request([2], GREEDY, request_id="mine")
    drain(engine)
    assert engine.add_request([1], GREEDY, request_id="mine") == "mine"
    drain(engine)
    taken = [engine.add_request([1], GREEDY, request_id=str(engine.count + i)) for i in (1, 2, 3)]
    drawn = [engine.add_request([1], GREEDY) for _ in range(4)]
    assert len({*taken, *drawn}) == 7
    assert len(drain(engine)) == 7
    engine.abort("unknown")
    assert_idle(engine)


def test_nan_does_not_reach_the_engine():
    with pytest.raises(ValueError, match=r"temperature is nan; it must be a finite number of at least 0"):
        SamplingParams(temperature=math.nan)

"""Structured output in the engine: every output that ends by itself is valid, whatever N, and the level is as said."""

import functools

import numpy as np
import pytest

from harness import Result, assert_idle, collect, drain, make_engine, run_all
from jaxsched import SamplingParams, StructuredOutputsParams
from jaxsched.engine.guide import Region
from jaxsched.structured import GrammarMatcher
from structured.suite import SUITE

SETTINGS = {
    "N=1": {"num_scheduler_steps": 1, "executor": "dispatch"},
    "N=4": {"num_scheduler_steps": 4, "num_pages": 36},
    "N=16": {"num_scheduler_steps": 16, "prefill_chunk_size": 16},
}
# SamplingParams refuses empty regexes and choices.
CASES = [case for case in SUITE if case.spec.get("regex") != "" and "" not in case.spec.get("choice", ())]
NUMBERS = {
    "json": {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 40}, "maxItems": 4}
}


def asked(case, seed):
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=90, structured_outputs=case.spec)


@functools.cache
def outputs(model, name):
    """The suite's results in one batch, twice with different seeds, and the levels."""
    engine = make_engine(model, **SETTINGS[name], max_num_seqs=8)
    results: dict[str, Result] = {}
    ids = [
        engine.add_request([7, 8, index], asked(case, index), request_id=f"{index}")
        for index, case in enumerate(CASES)
    ]
    levels = {i: engine.requests.by_id[i].constraint for i in ids}
    drain(engine, results, limit=20_000)
    assert_idle(engine)
    return [results[i] for i in ids], [levels[i] for i in ids]


@pytest.fixture(
    params=[pytest.param("N=1", marks=pytest.mark.slow), pytest.param("N=4", marks=pytest.mark.slow), "N=16"]
)
def name(request):
    return request.param


def test_what_ends_by_itself_is_valid(toy, name):
    results, levels = outputs(toy("base", num_layers=1), name)
    ended, count = 0, len(CASES)
    assert count >= 45 and count >= len(SUITE) - 3
    for case, result, level in zip(CASES, results, levels, strict=True):
        assert level == case.level, case.name
        assert result.finish_reason in ("stop", "length"), (case.name, result)
        if result.finish_reason == "stop":
            ended += 1
            case.check(result.text)
    assert ended > 0.6 * count


@pytest.mark.slow
def test_n_does_not_matter(toy):
    model = toy("base", num_layers=1)
    assert outputs(model, "N=1") == outputs(model, "N=16")


@pytest.mark.slow
def test_four_steps_do_not_matter_either(toy):
    model = toy("base", num_layers=1)
    assert outputs(model, "N=1") == outputs(model, "N=4")


def test_the_distribution_is_the_masked_one(toy):
    """Frequencies of the first token under a constraint against the model's own, masked and renormalised."""
    engine = make_engine(toy("base", num_layers=1), max_num_seqs=8)
    choice = {"choice": ["ab", "cd", "e", "f~", "gg"]}
    wanted = SamplingParams(temperature=2.0, max_tokens=1, logprobs=0, structured_outputs=choice)
    free = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=[ord(c) for c in "abcdefg"])
    [entry] = run_all(engine, [([5, 6], free)])[0].logprobs
    weights = {c: np.exp(entry[ord(c)].logprob / 2) for c in "acefg"}
    counts = dict.fromkeys(weights, 0)
    for seed in range(1500):
        engine.add_request([5, 6], SamplingParams(**{**vars(wanted), "seed": seed}), request_id=str(seed))
    for result in drain(engine, limit=20_000).values():
        counts[result.text] += 1
    total = sum(weights.values())
    chi = sum((counts[c] - 1500 * w / total) ** 2 / (1500 * w / total) for c, w in weights.items())
    assert chi < 23.5, (counts, weights)  # 4 degrees of freedom, p = 1e-4


def test_a_host_constraint_holds_nobody_back(toy):
    """Its row gets a token in each round; the others get N."""
    engine = make_engine(toy("base", num_layers=1), num_scheduler_steps=8)
    slow = engine.add_request(
        [1, 2],
        SamplingParams(temperature=1, seed=0, max_tokens=12, structured_outputs=NUMBERS),
        request_id="slow",
    )
    engine.add_request(
        [3, 4], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), request_id="fast"
    )
    results: dict[str, Result] = {}
    while slow in engine.requests.by_id:
        collect(engine, results)
    rounds = len(engine.rounds) + 1
    assert len(results["slow"].ids) >= rounds - 2
    assert len(results["fast"].ids) >= 5 * len(results["slow"].ids)
    drain(engine, results)


def test_a_pool_without_room_falls_back_to_the_host(toy):
    """An automaton that finds no room on the device is followed on the host, with the same result."""
    model, spec = toy("base", num_layers=1), {"regex": "[a-z]{3,9}( [a-z]{2,5})?"}
    params = SamplingParams(temperature=1, seed=3, max_tokens=40, structured_outputs=spec)
    engine = make_engine(model)
    [want] = run_all(engine, [([1, 2], params)])
    crowded = make_engine(model)
    crowded.executor.controls.places._regions[1] = Region(0, 0)
    sequence = []
    crowded.add_request([1, 2], params, request_id="0")
    sequence += crowded.requests.by_id["0"].sequences
    got = drain(crowded)["0"]
    assert sequence[0].hosted and (got.ids, got.text) == (want.ids, want.text)


def test_places_are_used_again(toy):
    """More automata than the pool holds, one after the other and at once."""
    engine = make_engine(toy("base", num_layers=1))
    places = engine.executor.controls.places
    for region in places._regions[:2]:
        region.give(region._free[0][0], 0)
        region._free = [(region._free[0][0], region._free[0][0] + 12)]
    for count in (1, 3, 4):
        specs = [{"choice": [f"{i}{count}a", f"{i}{count}b"]} for i in range(12)]
        wanted = [
            ([i], SamplingParams(temperature=1, seed=i, max_tokens=9, structured_outputs=s))
            for i, s in enumerate(specs)
        ]
        for result, spec in zip(run_all(engine, wanted), specs, strict=True):
            assert result.text in spec["choice"] and result.finish_reason == "stop"
    assert_idle(engine)


def test_a_dead_end_is_said(toy):
    engine = make_engine(toy("base", num_layers=1))
    params = SamplingParams(
        temperature=0,
        max_tokens=9,
        structured_outputs={"regex": "ab[cd]"},
        logit_bias={},
        bad_words=["c", "d"],
    )
    bystander = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    dead, alive = run_all(engine, [([1], params), ([2], bystander)])
    assert (dead.text, dead.finish_reason) == ("ab", "error") and dead.stop_reason.startswith(
        "no token is allowed"
    )
    assert len(alive.ids) == 20
    assert_idle(engine)


def test_a_refused_constraint_leaves_nothing(toy):
    engine = make_engine(toy("base", num_layers=1))
    for spec in (
        {"regex": "(?=a)b"},
        {"choice": ["a"], "regex": "b"},
        {"json": {"type": "nothing"}},
        {"grammar": "]["},
    ):
        with pytest.raises(ValueError, match="structured_outputs"):
            engine.add_request([1], SamplingParams(max_tokens=4, structured_outputs=spec))
    assert_idle(engine)


def test_a_fork_goes_on_within_the_constraint(toy):
    engine = make_engine(toy("base", num_layers=1), num_scheduler_steps=2)
    for spec in ({"regex": "[a-f]{40}"}, NUMBERS | {"json": {**NUMBERS["json"], "minItems": 4}}):
        params = SamplingParams(temperature=1, seed=1, max_tokens=60, structured_outputs=spec)
        results: dict[str, Result] = {}
        parent = engine.add_request([1, 2, 3], params)
        while len(results.get(parent, Result()).ids) < 4:
            collect(engine, results)
        before = len(engine.requests.by_id[parent].sequences[0].output)
        begun = engine.tokenizer.decode(engine.requests.by_id[parent].sequences[0].output)
        child = engine.fork(parent)
        drain(engine, results)
        whole = begun + results[child].text
        assert len(results[parent].ids) > before and results[child].finish_reason == "stop"
        constraint = engine.constraints.compile(StructuredOutputsParams(**spec)).matcher()
        for token in engine.tokenizer.encode(whole, add_special_tokens=False):
            assert constraint.push(token), whole
        assert constraint.final or constraint.accepting


def test_a_matcher_that_gives_up_ends_its_request_alone(toy, monkeypatch):
    """A parser has limits of its own and may refuse what it has allowed."""
    monkeypatch.setattr(GrammarMatcher, "push", lambda matcher, token: False)
    engine = make_engine(toy("base", num_layers=1))
    params = SamplingParams(temperature=1, seed=0, max_tokens=12, structured_outputs=NUMBERS)
    bystander = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    [broken, alive] = run_all(engine, [([1, 2], params), ([2], bystander)])
    assert broken.finish_reason == "error" and len(broken.ids) == 1 and len(alive.ids) == 20
    assert_idle(engine)


@pytest.mark.parametrize("spec", [{"choice": ["ab"]}, {"grammar": 'start: "ab"'}], ids=["device", "host"])
def test_a_text_that_is_complete_at_the_limit_is_complete(toy, spec):
    engine = make_engine(toy("base", num_layers=1))
    for limit, reason in ((1, "length"), (2, "stop"), (3, "stop")):
        params = SamplingParams(temperature=0, max_tokens=limit, structured_outputs=spec)
        [result] = run_all(engine, [([1, 2], params)])
        assert (result.finish_reason, result.text) == (reason, "ab"[:limit])

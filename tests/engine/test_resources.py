"""O5: whatever ends a request, nothing of it stays behind."""

import random

import jax
import numpy as np
import pytest

from harness import Result, assert_idle, collect, drain, make_engine, oracle, random_prompt
from jaxsched import SamplingParams


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("pages", [None, 17])
def test_aborts_at_random_moments(toy, run_ahead, pages):
    """Neighbours of what is aborted get their tokens; what is aborted got a prefix of its own."""
    model = toy("base")
    engine = make_engine(model, run_ahead=run_ahead, num_pages=pages)
    rng, numbers = random.Random(run_ahead), np.random.default_rng(run_ahead)
    requests, results, aborted = {}, {}, set()
    for _ in range(120):
        if rng.random() < 0.5:
            prompt = random_prompt(numbers, rng.randint(1, 60))
            params = SamplingParams(
                temperature=rng.choice([0, 1.0]), seed=rng.getrandbits(60), max_tokens=rng.randint(1, 25)
            )
            requests[engine.add_request(prompt, params)] = (prompt, params)
        if requests and rng.random() < 0.4:
            victim = rng.choice(list(requests)[-8:])
            if results.get(victim, Result()).finish_reason is None and victim in engine.requests.by_id:
                aborted.add(victim)
            engine.abort(victim)
            engine.abort(victim)
        collect(engine, results)
    drain(engine, results)
    assert_idle(engine)
    assert results.keys() == requests.keys() and len(aborted) > 5
    for request_id, (prompt, params) in requests.items():
        ids, reason = oracle(model, prompt, params)
        got = results[request_id]
        if request_id in aborted:
            assert got.finish_reason == "abort" and got.ids == ids[: len(got.ids)]
        else:
            assert (got.ids, got.finish_reason) == (ids, reason)


def test_everything_is_aborted_at_once(toy):
    engine = make_engine(toy("base"), run_ahead=2)
    params = SamplingParams(max_tokens=60)
    for steps in range(6):
        ids = [engine.add_request([1] * (5 + 9 * i), params) for i in range(9)]
        results = {}
        for _ in range(steps):
            collect(engine, results)
        for request_id in ids:
            engine.abort(request_id)
        assert engine.scheduler.memory.pool.used == 0
        drain(engine, results)
        assert {results[i].finish_reason for i in ids} <= {"abort", "stop"}
        assert_idle(engine)


def test_the_device_keeps_no_slot_alive(toy):
    engine = make_engine(toy("base"))
    for i in range(6):
        engine.add_request([i] * 9, SamplingParams(max_tokens=20))
    for _ in range(2):
        engine.step()
    engine.abort("0")
    drain(engine)
    assert not np.asarray(engine.executor.state.slots.live).any()


def test_memory_does_not_grow(toy):
    """The number of device arrays after a request is what it was before."""
    engine = make_engine(toy("base"))

    def serve():
        for i in range(5):
            engine.add_request([i] * 20, SamplingParams(max_tokens=10))
        drain(engine)
        return len(jax.live_arrays())

    before = serve()
    assert serve() == serve() == before

"""O1 and O2: a request's tokens depend on nothing but the request. Every knob is turned; the oracle knows of none."""

import functools

import jax
import numpy as np
import pytest

from harness import assert_idle, collect, drain, make_engine, oracle, random_prompt, run_all, thrash
from jaxsched import SamplingParams

MAX_LEN = 96
TIGHT = "tight"  # a pool that holds one longest request and a bit: preemption all the time


def config(slots, n, chunk, page_size, pages, executor, run_ahead, **more):
    """A row of a table. ``pages``: number, None for plenty, or TIGHT."""
    per_seq = -(-MAX_LEN // page_size)
    settings = {
        "max_model_len": MAX_LEN,
        "max_num_seqs": slots,
        "num_scheduler_steps": n,
        "prefill_chunk_size": chunk,
        "page_size": page_size,
        "num_pages": per_seq + 1 if pages == TIGHT else pages,
        "executor": executor,
        "run_ahead": run_ahead,
    }
    return {**settings, **more}


#          slots N  chunk page pool  executor   run-ahead
TABLE = [
    config(1, 1, None, 16, None, "dispatch", 0),  # one request at a time
    config(8, 8, 32, 16, None, "scan", 1),  # the defaults in small
    config(5, 3, 16, 4, TIGHT, "scan", 1),
    config(8, 2, 64, 8, TIGHT, "dispatch", 2),
    config(2, 8, 16, 32, None, "dispatch", 1),
    config(5, 4, None, 8, TIGHT, "scan", 0),
    config(8, 1, 24, 16, TIGHT, "scan", 2),
    config(2, 4, 48, 4, None, "scan", 2),
    config(8, 8, 16, 8, TIGHT, "dispatch", 0),
    config(5, 3, "auto", 16, 8, "dispatch", 1, enable_chunked_prefill=False),
    config(8, "auto", "auto", 8, TIGHT, "scan", 1),
    config(8, "auto", "auto", 16, None, "scan", 1),
]


def random_config(seed):
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([4, 8, 16, 32]))
    per_seq = -(-MAX_LEN // page_size)
    return config(
        int(rng.choice([1, 2, 5, 8])),
        int(rng.choice([1, 2, 3, 4, 8])),
        [16, 24, 32, 48, 64, None][rng.integers(6)],
        page_size,
        [None, TIGHT, per_seq, per_seq * 2][rng.integers(4)],
        ["scan", "dispatch"][rng.integers(2)],
        int(rng.integers(3)),
    )


def random_request(rng):
    """Half of them greedy; long and short; some with stop ids, some that ignore end-of-sequence."""
    length = int(rng.integers(1, 80) if rng.random() < 0.4 else rng.integers(1, 12))
    sampling = {"temperature": 0}
    if rng.random() < 0.5:
        sampling = {
            "temperature": float(rng.choice([0.3, 1.0, 2.0])),
            "top_k": int(rng.choice([0, 1, 5, 40])),
            "top_p": float(rng.choice([1.0, 0.9, 0.3])),
            "min_p": float(rng.choice([0.0, 0.05])),
            "seed": int(rng.integers(-(2**63), 2**63)),
        }
    stop = rng.integers(0, 256, rng.choice([0, 0, 4])).tolist()
    limit = [int(rng.integers(1, 12)), int(rng.integers(8, 40)), None][rng.choice(3, p=[0.4, 0.5, 0.1])]
    params = SamplingParams(
        **sampling, max_tokens=limit, stop_token_ids=stop, ignore_eos=bool(rng.random() < 0.5)
    )
    return random_prompt(rng, length), params


@functools.cache
def requests_with_answers(model, seed, count):
    rng = np.random.default_rng(seed)
    requests = [random_request(rng) for _ in range(count)]
    return requests, [oracle(model, *request, max_model_len=MAX_LEN) for request in requests]


def play(engine, requests, rng, evict=False):
    """Adds the requests in a random order, some at once and some between steps. ``evict``: preempts now and then."""
    ids, results, order = {}, {}, rng.permutation(len(requests)).tolist()
    burst = int(rng.integers(1, len(order) + 1))
    for _ in range(5000):
        if not order and not engine.has_work:
            break
        for _ in range(min(len(order), burst)):
            index = order.pop()
            ids[index] = engine.add_request(*requests[index])
        burst = int(rng.integers(0, 3))
        collect(engine, results)
        if evict and rng.random() < 0.3:
            thrash(engine, rng)
    else:
        raise AssertionError("the engine comes to no end")
    return [results[ids[index]] for index in range(len(requests))]


def check(model, settings, *, seed, count, rounds=1):
    requests, want = requests_with_answers(model, seed, count)
    engine = make_engine(model, **settings)
    rng = np.random.default_rng(seed + 1)
    for _ in range(rounds):
        results = play(engine, requests, rng, evict=settings["num_pages"] is not None)
        for result, request, (ids, reason) in zip(results, requests, want, strict=True):
            assert (result.ids, result.finish_reason) == (ids, reason), request
        assert_idle(engine)
    return engine


def name_of(settings):
    return "S{1}-N{2}-C{3}-Z{4}-P{5}-{6}-r{7}".format(*settings.values())


OFTEN = (1, 2, 5, 8, 10)  # each takes half a minute to compile
ROWS = [row if i in OFTEN else pytest.param(row, marks=pytest.mark.slow) for i, row in enumerate(TABLE)]


@pytest.mark.parametrize("settings", ROWS, ids=name_of)
def test_tokens_do_not_depend_on_settings(settings, toy):
    # One layer compiles in half the time, and two are enough to tell one layer's pages from the other's.
    model = toy("base", num_layers=2 if settings in TABLE[:4] else 1)
    engine = check(model, settings, seed=0, count=24, rounds=2)
    stats = engine.stats
    if settings["num_pages"] is not None:
        assert engine.scheduler.num_preemptions > 5 and stats.peak_pages <= settings["num_pages"]
    else:
        assert engine.scheduler.num_preemptions == 0
    assert stats.generation_tokens == 2 * sum(len(ids) for ids, _ in requests_with_answers(model, 0, 24)[1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_tokens_do_not_depend_on_settings_at_length(seed, toy):
    names = ("base", "mqa", "gqa3", "all_biases", "llama3", "yarn")
    check(toy(names[seed % len(names)]), random_config(seed), seed=seed // 12, count=40, rounds=2)
    jax.clear_caches()  # hundreds of programs in one process would run out of memory mappings (vm.max_map_count)


def test_a_request_alone(toy):
    """The oracle is not the engine: one request at a time through the engine gives the same as well."""
    model = toy("base")
    requests, want = requests_with_answers(model, 0, 24)
    engine = make_engine(model, **TABLE[1])
    for request, (ids, reason) in zip(requests, want, strict=True):
        [result] = run_all(engine, [request])
        assert (result.ids, result.finish_reason) == (ids, reason)


def test_equal_requests_get_equal_tokens_in_every_slot(toy):
    engine = make_engine(toy("base"), **TABLE[1])
    request = ([3, 1, 4, 1, 5], SamplingParams(temperature=1.5, seed=42, max_tokens=30, ignore_eos=True))
    results = run_all(engine, [request] * 8)
    assert len({tuple(r.ids) for r in results}) == 1 and len(results[0].ids) == 30


def test_seeds(toy):
    """Equal seeds give equal tokens, others do not; without a seed it is drawn from the engine's and the arrival."""
    model = toy("base")

    def sampled(engine_seed, *seeds):
        engine = make_engine(model, **TABLE[1], seed=engine_seed)
        params = [SamplingParams(seed=s, max_tokens=16, ignore_eos=True, temperature=2.0) for s in seeds]
        return [tuple(r.ids) for r in run_all(engine, [([1, 2, 3], p) for p in params])]

    a = sampled(0, 5, 5, 6, -1, 2**64 - 1, None, None)
    assert a[0] == a[1] != a[2] and a[3] == a[4]
    assert len({a[0], a[2], a[3], a[5], a[6]}) == 5
    assert sampled(0, 5, 5, 6, -1, 2**64 - 1, None, None) == a
    b = sampled(1, 5, 5, 6, -1, 2**64 - 1, None, None)
    assert b[:5] == a[:5] and not set(b[5:]) & set(a[5:])


def test_stop_reason(toy):
    """By a stop id of the request: its id. By end-of-sequence or by length: None."""
    model = toy("base")
    prompt = [9, 8, 7]
    free, _ = oracle(model, prompt, SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    at = next(i for i in range(3, 10) if free[i] not in free[:i])
    engine = make_engine(model, **TABLE[1])
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, stop_token_ids=[free[at], 271])
    [result] = run_all(engine, [(prompt, params)])
    assert (result.ids, result.finish_reason, result.stop_reason) == (free[: at + 1], "stop", free[at])
    engine.eos_token_ids = (free[at],)
    for ignore, want in ((False, ("stop", None)), (True, ("length", None))):
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=ignore)
        [result] = run_all(engine, [(prompt, params)])
        assert (result.finish_reason, result.stop_reason) == want


def test_metrics(toy):
    """Times are those of the clock that was passed in."""
    now = [0.0]
    engine = make_engine(toy("base"), **TABLE[2], clock=lambda: now[0])
    first = engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    pieces = []
    while engine.has_work:
        now[0] += 1.0
        pieces += engine.step()
    assert {p.request_id for p in pieces} == {first}
    metrics = pieces[-1].metrics
    assert (metrics.arrival, metrics.first_token, metrics.time_to_first_token) == (0.0, 1.0, 1.0)
    assert metrics.finished == now[0] and metrics.preemptions == 0


def test_preemptions_are_counted(toy):
    engine = make_engine(toy("base"), **TABLE[2])
    for i in range(5):
        engine.add_request([i] * 20, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    engine.scheduler.memory.expected = 0.0  # as if no sequence had ever been long
    finished = []
    while engine.has_work:
        finished += [p for p in engine.step() if p.finished]
    assert sum(p.metrics.preemptions for p in finished) == engine.stats.preemptions > 0
    assert engine.scheduler.memory.expected > 0.5  # it has learned
    assert engine.stats.prompt_tokens + engine.stats.cached_tokens > 5 * 20  # what was dropped is read again
    assert drain(engine) == {}

"""Prefix caching through the engine: what is found, that it is counted, and that it changes nothing but the time."""

import dataclasses

import pytest

from harness import GREEDY, assert_idle, collect, drain, make_engine, oracle, run_all
from jaxsched import SamplingParams

PREFIX = [3 + 7 * i % 200 for i in range(40)]  # five pages of 8
SHORT = dataclasses.replace(GREEDY, max_tokens=4)


@pytest.fixture
def engine(toy):
    """One engine for all that need no settings of their own; each test finds it empty."""
    engine = toy("base", num_layers=1)
    made = _made.setdefault(engine, None) or make_engine(engine)
    _made[engine] = made
    made.reset_prefix_cache()
    yield made
    assert_idle(made)


_made: dict = {}


def ask(engine, prompt, params=SHORT, **options):
    """Result and metrics of a request that has the engine to itself."""
    request_id, results, last = engine.add_request(prompt, params, **options), {}, None
    while engine.has_work:
        pieces = engine.step()
        for piece in pieces:
            last = piece
            for output in piece.outputs:
                results.setdefault(output.index, []).extend(output.token_ids)
    assert last.request_id == request_id and last.finished
    return results[0], last.metrics


def counters(engine):
    metrics = [metric for metric in engine.metrics.snapshot() if "prefix_cache" in metric.name]
    return {metric.name.rpartition(":")[2]: metric.value for metric in metrics}


def check(toy, prompt, ids, params=SHORT):
    assert ids == oracle(toy("base", num_layers=1), prompt, params)[0]


def test_hits_are_counted(engine, toy):
    """In the request's metrics, in the engine's, in its stats and in the records of its rounds."""
    before, cached, counted = engine.stats.prompt_tokens, engine.stats.cached_tokens, counters(engine)
    for tail, want in (([], 0), ([1], 40), ([2, 2, 2], 40), ([], 32)):
        ids, metrics = ask(engine, PREFIX + tail)
        check(toy, PREFIX + tail, ids)
        assert (metrics.cached_tokens, metrics.prompt_tokens) == (want, 40 + len(tail))
    assert engine.stats.cached_tokens - cached == 40 + 40 + 32
    assert engine.stats.prompt_tokens - before == 40 + 1 + 3 + 8
    records = [record for record in engine.rounds if record.prefill_tokens][-4:]
    assert [record.cached_tokens for record in records[-3:]] == [40, 40, 32]
    after = counters(engine)
    assert after["prefix_cache_queries"] - counted["prefix_cache_queries"] == 40 + 41 + 43 + 40
    assert after["prefix_cache_hits"] - counted["prefix_cache_hits"] == 40 + 40 + 32


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 40])
def test_a_prompt_that_is_known_to_its_end(length, engine, toy):
    """The last token is always computed, so there are logits to sample from."""
    prompt = PREFIX[:length]
    params = SamplingParams(temperature=1.3, seed=9, max_tokens=9, ignore_eos=True)
    for turn in range(3):
        ids, metrics = ask(engine, prompt, params)
        check(toy, prompt, ids, params)
        assert metrics.cached_tokens == (0 if turn == 0 else (length - 1) // 8 * 8) < length


def test_salts_separate(engine, toy):
    for salt, want in (("", 0), ("a", 0), ("a", 32), ("", 32), ("b", 0)):
        ids, metrics = ask(engine, PREFIX, cache_salt=salt)
        check(toy, PREFIX, ids)
        assert metrics.cached_tokens == want


def test_salts_may_be_any_text(engine):
    for salt in ("\ud800", "\x00", "x" * 10_000, "ä"):
        assert [ask(engine, PREFIX, cache_salt=salt)[1].cached_tokens for _ in range(2)] == [0, 32]


def test_live_requests_share(engine, toy):
    """The second comes while the first decodes; together they hold the common pages once."""
    pool, results = engine.scheduler.memory.pool, {}
    long = dataclasses.replace(GREEDY, max_tokens=40)
    first = engine.add_request(PREFIX, long)
    for _ in range(3):
        collect(engine, results)
    before = pool.used
    second = engine.add_request([*PREFIX, 5], long)
    for _ in range(2):
        collect(engine, results)
    sequences = [engine.requests.by_id[i].sequences[0] for i in (first, second)]
    assert sequences[0].pages[:5] == sequences[1].pages[:5] and pool.used < before + 6
    drain(engine, results)
    check(toy, PREFIX, results[first].ids, long)
    check(toy, [*PREFIX, 5], results[second].ids, long)


def test_within_one_mixed_step(engine, toy):
    """Three prompts that begin alike fit into one chunk of 32, since what the first reads the others share."""
    prompts = [[*PREFIX[:16], i, i] for i in range(3)]
    steps, read = engine.stats.mixed_steps, engine.stats.prompt_tokens
    results = run_all(engine, [(prompt, SHORT) for prompt in prompts])
    assert (engine.stats.mixed_steps - steps, engine.stats.prompt_tokens - read) == (1, 18 + 2 + 2)
    for prompt, result in zip(prompts, results, strict=True):
        check(toy, prompt, result.ids)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_conversation(run_ahead, toy):
    """Each turn finds the last one's prompt and answer, which ended by a stop token."""
    model = toy("base", num_layers=1)
    engine = make_engine(model, run_ahead=run_ahead)
    history = PREFIX[:10]
    for turn in range(3):
        free, _ = oracle(model, history, dataclasses.replace(GREEDY, max_tokens=30))
        at = next(i for i in range(17, 30) if free[i] not in free[:i])
        params = dataclasses.replace(GREEDY, max_tokens=40, stop_token_ids=(free[at],))
        ids, metrics = ask(engine, history, params)
        assert ids == free[: at + 1]
        # Of the former turn all full pages but the last token, which nobody has read.
        assert metrics.cached_tokens == (0 if turn == 0 else (len(history) - 3) // 8 * 8)
        history = [*history, *ids, 4, 4]
    assert_idle(engine)


def test_the_pages_unused_longest_go_first(toy):
    """A pool of 17 pages: five of a, five of b; a is used again; c needs what b had."""
    engine = make_engine(toy("base", num_layers=1), num_pages=17)
    a, b, c = ([i, *PREFIX] for i in (1, 2, 3))
    ask(engine, a)
    ask(engine, b)
    assert ask(engine, a)[1].cached_tokens == 40
    ask(engine, [*c, *range(50)])  # twelve pages: the seven blank ones and b's
    assert ask(engine, a)[1].cached_tokens == 40
    assert ask(engine, b)[1].cached_tokens < 40
    assert_idle(engine)


def test_reset(engine, toy):
    ask(engine, PREFIX)
    engine.reset_prefix_cache()
    assert engine.scheduler.memory.pool.cached == 0
    assert ask(engine, PREFIX)[1].cached_tokens == 0


def test_reset_while_somebody_runs(engine, toy):
    """It goes on; who comes later shares nothing with it."""
    long, results = dataclasses.replace(GREEDY, max_tokens=30), {}
    first = engine.add_request(PREFIX, long)
    collect(engine, results)
    engine.reset_prefix_cache()
    second = engine.add_request(PREFIX, long)
    drain(engine, results)
    check(toy, PREFIX, results[first].ids, long)
    check(toy, PREFIX, results[second].ids, long)


def test_off(toy):
    engine = make_engine(toy("base", num_layers=1), enable_prefix_caching=False)
    for _ in range(2):
        ids, metrics = ask(engine, PREFIX)
        check(toy, PREFIX, ids)
        assert metrics.cached_tokens == 0
    results = run_all(engine, [(PREFIX, SHORT)] * 3)
    assert {tuple(result.ids) for result in results} == {tuple(ids)}
    assert engine.stats.cached_tokens == 0 and engine.scheduler.memory.pool.cached == 0
    assert_idle(engine)


def test_an_aborted_prompt_leaves_what_it_has_read(engine, toy):
    name = engine.add_request(PREFIX * 2, SHORT)
    engine.step()
    engine.abort(name)
    drain(engine)
    ids, metrics = ask(engine, PREFIX * 2)
    check(toy, PREFIX * 2, ids)
    assert metrics.cached_tokens >= 32


def test_a_preempted_request_finds_its_own_pages(engine, toy):
    """An eviction costs a page at most, as long as nobody needs the others."""
    long, results = dataclasses.replace(GREEDY, max_tokens=30), {}
    name = engine.add_request(PREFIX, long)
    while len(results.get(name).ids if name in results else []) < 12:
        collect(engine, results)
    read = engine.stats.prompt_tokens
    [sequence] = engine.scheduler.running
    engine.scheduler.evict(sequence, engine.clock())
    drain(engine, results)
    check(toy, PREFIX, results[name].ids, long)
    assert engine.stats.prompt_tokens - read <= 8 and sequence.cached == 0

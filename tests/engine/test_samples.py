"""n samples of one prompt: they share its pages, differ in their seeds, and end one by one."""

import dataclasses

import pytest

from harness import assert_idle, collect, drain, make_engine, oracle
from jaxsched import SamplingParams
from jaxsched.engine.entry import sample_seed

PROMPT = [3 + 7 * i % 200 for i in range(41)]  # five pages of 8, and a token
PARAMS = SamplingParams(n=4, temperature=1.5, seed=11, max_tokens=12, ignore_eos=True)
_made: dict = {}


@pytest.fixture(params=[True, False], ids=["caching", "no caching"])
def engine(request, toy):
    key = toy("base", num_layers=1), request.param
    if key not in _made:
        _made[key] = make_engine(key[0], enable_prefix_caching=request.param, max_num_seqs=4)
    yield _made[key]
    assert_idle(_made[key])


def answers(toy, params=PARAMS, prompt=PROMPT):
    model = toy("base", num_layers=1)
    single = [dataclasses.replace(params, n=1, seed=sample_seed(params.seed, i)) for i in range(params.n)]
    return [oracle(model, prompt, one) for one in single]


def of(results, name, n):
    return [results[name if i == 0 else f"{name}#{i}"] for i in range(n)]


def test_samples_are_distinct_and_each_is_its_seeds_own(engine, toy):
    name = engine.add_request(PROMPT, PARAMS)
    results = of(drain(engine), name, 4)
    assert [(r.ids, r.finish_reason) for r in results] == answers(toy)
    assert len({tuple(r.ids) for r in results}) == 4


def test_they_are_reproducible(engine):
    """Alone, beside others, and without a seed by the engine's seed and the order of arrival."""

    def play(*others):
        name = engine.add_request(PROMPT, PARAMS)
        for prompt in others:
            engine.add_request(prompt, dataclasses.replace(PARAMS, n=2, seed=5))
        return [r.ids for r in of(drain(engine), name, 4)]

    assert play() == play() == play([1, 2, 3], [*PROMPT, 4])


def test_without_a_seed(toy):
    params = dataclasses.replace(PARAMS, seed=None)

    def play(seed):
        engine = make_engine(toy("base", num_layers=1), seed=seed)
        names = [engine.add_request(PROMPT, params) for _ in range(2)]
        results = drain(engine)
        return [tuple(r.ids) for name in names for r in of(results, name, 4)]

    first, again, other = play(1), play(1), play(2)
    assert first == again and len({*first, *other}) == 16


def test_the_first_sample_is_that_of_n_1(engine):
    one = engine.add_request(PROMPT, dataclasses.replace(PARAMS, n=1))
    many = engine.add_request(PROMPT, PARAMS)
    results = drain(engine)
    assert results[one].ids == results[many].ids


def test_they_share_the_pages_of_the_prompt(engine):
    """Five pages once, and one for each with the prompt's last token and the output."""
    name = engine.add_request(PROMPT, dataclasses.replace(PARAMS, max_tokens=7))
    results = {}
    read = engine.stats.prompt_tokens
    engine.step()
    running = [*engine.scheduler.running]
    if running:  # with run-ahead all may be over by now
        shared = {tuple(s.pages[:5]) for s in running}
        assert len(shared) == 1
        assert engine.scheduler.memory.pool.used == len({page for s in running for page in s.pages}) <= 5 + 4
    drain(engine, results)
    assert engine.stats.prompt_tokens - read <= 41 + 3
    assert engine.rounds[-1].pages_used <= 9
    assert engine.knows(name) is False


def test_pages_are_counted_once_while_they_run(toy):
    engine = make_engine(toy("base", num_layers=1), run_ahead=0, enable_prefix_caching=False)
    engine.add_request(PROMPT, dataclasses.replace(PARAMS, max_tokens=30))
    results = {}
    for _ in range(4):
        collect(engine, results)
    running = [*engine.scheduler.running]
    assert len(running) == 4 and len({tuple(s.pages[:5]) for s in running}) == 1
    own = sum(len(s.pages) - 5 for s in running)
    assert engine.scheduler.memory.pool.used == 5 + own
    assert {engine.scheduler.memory.pool._owners[page] for page in running[0].pages[:5]} == {4}
    drain(engine, results)
    assert_idle(engine)
    assert engine.scheduler.memory.pool.cached == 0


def test_abort_takes_all(engine, toy):
    name = engine.add_request(PROMPT, dataclasses.replace(PARAMS, max_tokens=40))
    results = {}
    collect(engine, results)
    engine.abort(name)
    pieces = engine.step()
    mine = [piece for piece in pieces if piece.request_id == name]
    assert mine[-1].finished
    ended = {output.index for piece in mine for output in piece.outputs if output.finish_reason == "abort"}
    assert ended == {0, 1, 2, 3} and not engine.knows(name)
    drain(engine)


def test_abort_after_some_have_ended(engine, toy):
    """Those that have ended keep their reason; the others are aborted."""
    params = stopping(toy)
    want = answers(toy, params)
    name, results = engine.add_request(PROMPT, params), {}
    while not any(r.finish_reason for r in results.values()):
        collect(engine, results)
    ended = {key for key, r in results.items() if r.finish_reason}
    engine.abort(name)
    drain(engine, results)
    for i, result in enumerate(of(results, name, 4)):
        key = name if i == 0 else f"{name}#{i}"
        ids, reason = want[i]
        assert (
            result.finish_reason == (reason if key in ended else "abort")
            and result.ids == ids[: len(result.ids)]
        )


def stopping(toy):
    """Parameters under which one sample stops early and the others reach their limit."""
    params = dataclasses.replace(PARAMS, max_tokens=30)
    outputs = [ids for ids, _ in answers(toy, params)]
    for token in outputs[2][:12]:
        if not any(token in outputs[i] for i in (0, 1, 3)):
            return dataclasses.replace(params, stop_token_ids=(token,))
    raise AssertionError("no token tells the samples apart")


def test_each_ends_for_its_own_reason(engine, toy):
    params = stopping(toy)
    want = answers(toy, params)
    name = engine.add_request(PROMPT, params)
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    reasons = {}
    for piece in pieces:
        assert piece.request_id == name and piece.prompt_token_ids == PROMPT
        indices = [output.index for output in piece.outputs]
        assert len(set(indices)) == len(indices) >= 1
        for output in piece.outputs:
            assert output.index not in reasons, "a piece came after the sample's last one"
            if output.finish_reason:
                reasons[output.index] = output.finish_reason, output.stop_reason
    stop = params.stop_token_ids[0]
    assert reasons == {i: (reason, stop if reason == "stop" else None) for i, (_, reason) in enumerate(want)}
    assert [reason for _, reason in want].count("stop") == 1
    assert pieces[-1].metrics.generation_tokens == sum(len(ids) for ids, _ in want)


@pytest.mark.parametrize("n", [5, 9])
def test_more_samples_than_slots(n, engine, toy):
    params = dataclasses.replace(PARAMS, n=n)
    name = engine.add_request(PROMPT, params)
    assert [(r.ids, r.finish_reason) for r in of(drain(engine), name, n)] == answers(toy, params)


def test_a_small_pool(toy):
    """Samples are preempted like any others."""
    model = toy("base", num_layers=1)
    engine = make_engine(model, num_pages=17)
    params = dataclasses.replace(PARAMS, max_tokens=60)
    name = engine.add_request(PROMPT, params)
    assert [(r.ids, r.finish_reason) for r in of(drain(engine), name, 4)] == answers(toy, params)
    assert_idle(engine)


def test_no_tokens_wanted(engine):
    name = engine.add_request(PROMPT, dataclasses.replace(PARAMS, max_tokens=0))
    [piece] = engine.step()
    assert (piece.request_id, piece.finished) == (name, True)
    assert [(o.index, o.token_ids, o.finish_reason) for o in piece.outputs] == [
        (i, [], "length") for i in range(4)
    ]


def test_refused():
    with pytest.raises(
        ValueError, match="n is 2, but temperature 0 is greedy, so all samples would be equal; raise"
    ):
        SamplingParams(n=2, temperature=0)
    for n in (0, -1, 1.5, True, "2", 1025):
        with pytest.raises(ValueError, match="n is"):
            SamplingParams(n=n)

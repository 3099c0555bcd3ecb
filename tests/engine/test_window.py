"""A model whose layers all have a sliding window: giving pages back changes no token, and a small pool is enough."""

import functools

import numpy as np
import pytest

from harness import GREEDY, SMALL, assert_idle, collect, drain, make_engine, random_prompt, run_all
from jaxsched import EngineConfig, SamplingParams, info
from jaxsched.engine.entry import check_fit
from jaxsched.models import ModelConfig
from jaxsched.pallas_kernels import paged_decode, paged_prefill
from jaxsched.step import round as step_round

WINDOW = 20
SETTINGS = {"executor": "dispatch", "num_scheduler_steps": 2, "prefill_chunk_size": 16}


@pytest.fixture(scope="module")
def model(toy):
    """Of sizes that no other test has: what was traced for it elsewhere has no window."""
    return toy("base", num_layers=1, intermediate_size=112)


@pytest.fixture
def windowed(monkeypatch):
    """Attention with a window. Called with True, configurations say so too, and pages are given back."""
    monkeypatch.setattr(step_round, "paged_decode", functools.partial(paged_decode, window=WINDOW))
    monkeypatch.setattr(step_round, "paged_prefill", functools.partial(paged_prefill, window=WINDOW))

    def tell(known):
        monkeypatch.setattr(ModelConfig, "cache_window", property(lambda self: WINDOW if known else None))

    return tell


def requests():
    rng = np.random.default_rng(8)
    prefix = random_prompt(rng, 50)
    for i, length in enumerate((100, 3, 40, 60, 17, 8, 75, 30)):
        prompt = (prefix if i % 2 == 0 else []) + random_prompt(rng, length)
        temperature = float(i % 3 > 0)
        yield prompt[:104], SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True)


def test_tokens_do_not_depend_on_what_is_given_back(model, windowed):
    """A pool of 8 pages, where the longest sequence has 16: hits, preemptions and reused pages all the time."""
    windowed(False)
    want = [r.ids for r in run_all(make_engine(model, **SETTINGS), requests())]
    windowed(True)
    engine = make_engine(model, **SETTINGS, num_pages=8)
    limits = engine.resolved.limits
    assert (limits.window, limits.pages_at_once, engine.resolved.pages_per_seq) == (WINDOW, 6, 16)
    for _ in range(2):
        assert [r.ids for r in run_all(engine, requests())] == want
    assert engine.stats.peak_pages <= 8
    assert_idle(engine)


def test_snapshot_and_fork(model, windowed):
    windowed(True)
    engine, results = make_engine(model, **SETTINGS, num_pages=24), {}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    parent = engine.add_request(list(range(40)), params)
    for _ in range(12):
        collect(engine, results)
    sequence = engine.requests.by_id[parent].sequences[0]
    assert sequence.gone > 2
    saved = engine.snapshot()
    child = engine.fork(parent, GREEDY)
    so_far = len(sequence.output)
    before = {parent: list(results[parent].ids)}
    done = drain(engine, results)
    assert done[child].ids == done[parent].ids[so_far : so_far + GREEDY.max_tokens]
    assert engine.stats.cached_tokens >= 48, "the child reads no more than a page"
    assert_idle(engine)
    engine.restore(saved)
    assert before[parent] + drain(engine)[parent].ids == done[parent].ids
    assert_idle(engine)


def test_what_is_told_and_refused(toy, windowed):
    model = toy("base").config
    windowed(True)
    resolved = EngineConfig(page_size=8, num_scheduler_steps=2, prefill_chunk_size=16).resolve(model, "cpu")
    assert resolved.limits.window == WINDOW and resolved.limits.need(512) == 6
    need = info.needs(model, EngineConfig(page_size=8, num_scheduler_steps=2, prefill_chunk_size=16), "cpu")
    assert (need.full_pages, need.short_pages) == (6, 6)
    small = EngineConfig(max_model_len=WINDOW).resolve(model, "cpu")
    assert small.limits.window is None, "nothing is ever behind it"


@pytest.mark.parametrize(
    ("known", "pages", "message"), [(False, 8, "needs 14 KV pages"), (True, 5, "needs 6 KV pages")]
)
def test_a_request_longer_than_the_pool(known, pages, message, toy, windowed):
    """Refused without a window, and with one when the pool does not hold what it owns at a time."""
    windowed(known)
    config = EngineConfig(**{**SMALL, **SETTINGS, "num_pages": pages})
    with pytest.raises(ValueError, match=message):
        check_fit(100, 12, config.resolve(toy("base").config, "cpu"))
    windowed(True)
    config = EngineConfig(**{**SMALL, **SETTINGS, "num_pages": 6})
    assert check_fit(100, None, config.resolve(toy("base").config, "cpu")) == 28, "up to max_model_len"

"""A model whose layers all have a sliding window: pages behind it go back, a small pool is enough, no token changes."""

import numpy as np
import pytest

from harness import GREEDY, SMALL, assert_idle, collect, drain, make_engine, oracle, random_prompt, run_all
from jaxsched import EngineConfig, SamplingParams, info
from jaxsched.engine.entry import check_fit
from jaxsched.models import ModelConfig

WINDOW, PAGES = 12, 10
SETTINGS = {
    **SMALL, "executor": "dispatch", "num_scheduler_steps": 2, "prefill_chunk_size": 16, "num_pages": PAGES,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(family_toy):
    model = family_toy("mistral")
    assert model.config.cache_window == WINDOW
    return model


def requests():
    rng = np.random.default_rng(8)
    prefix = random_prompt(rng, 50)
    for i, length in enumerate((50, 3, 40, 60, 17, 8)):
        prompt = (prefix if i % 2 == 0 else []) + random_prompt(rng, length)
        temperature = float(i % 3 > 0)
        yield prompt[:104], SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True)


def test_a_pool_smaller_than_a_sequence(model):
    """10 pages of 8, where the longest sequence has 16: hits, preemptions and reused pages all the time."""
    engine = make_engine(model, **SETTINGS)
    limits = engine.resolved.limits
    assert (limits.window, limits.pages_at_once, engine.resolved.pages_per_seq) == (WINDOW, 5, 16)
    want = [oracle(model, prompt, params)[0] for prompt, params in requests()]
    for _ in range(2):
        assert [r.ids for r in run_all(engine, requests())] == want
    assert engine.stats.peak_pages <= PAGES
    before = engine.stats.cached_tokens
    prompt, params = next(requests())
    for _ in range(2):
        assert run_all(engine, [(prompt, params)])[0].ids == want[0]
    assert engine.stats.cached_tokens >= before + 96, (
        "what the next query sees is known; the rest need not be"
    )
    assert_idle(engine)


def test_snapshot_and_fork(model):
    engine, results = make_engine(model, **SETTINGS), {}
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
    assert engine.stats.cached_tokens >= 32, "the child reads little more than a page"
    assert_idle(engine)
    engine.restore(saved)
    assert before[parent] + drain(engine)[parent].ids == done[parent].ids
    assert_idle(engine)


@pytest.fixture
def told(monkeypatch):
    def tell(window):
        monkeypatch.setattr(ModelConfig, "cache_window", property(lambda self: window))

    return tell


def test_what_is_told_and_refused(toy, told):
    model, window = toy("base").config, 20
    told(window)
    resolved = EngineConfig(page_size=8, num_scheduler_steps=2, prefill_chunk_size=16).resolve(model, "cpu")
    assert resolved.limits.window == window and resolved.limits.need(512) == 6
    need = info.needs(model, EngineConfig(page_size=8, num_scheduler_steps=2, prefill_chunk_size=16), "cpu")
    assert (need.full_pages, need.short_pages) == (6, 6)
    small = EngineConfig(max_model_len=window).resolve(model, "cpu")
    assert small.limits.window is None, "nothing is ever behind it"


@pytest.mark.parametrize(
    ("window", "pages", "message"), [(None, 8, "needs 14 KV pages"), (20, 5, "needs 6 KV pages")]
)
def test_a_request_longer_than_the_pool(window, pages, message, toy, told):
    """Refused without a window, and with one when the pool does not hold what it owns at a time."""
    told(window)
    config = EngineConfig(**{**SETTINGS, "num_pages": pages})
    with pytest.raises(ValueError, match=message):
        check_fit(100, 12, config.resolve(toy("base").config, "cpu"))
    told(20)
    config = EngineConfig(**{**SETTINGS, "num_pages": 6})
    assert check_fit(100, None, config.resolve(toy("base").config, "cpu")) == 28, "up to max_model_len"

"""A model whose layers all have a sliding window: pages behind it go back, and nothing else changes."""

import dataclasses

import numpy as np
import pytest

from harness import GREEDY, assert_idle, collect, make_engine, oracle, run_all

PARAMS = dataclasses.replace(GREEDY, max_tokens=20)
SETTINGS = {"max_num_seqs": 3, "page_size": 4, "prefill_chunk_size": 16, "executor": "dispatch"}


@pytest.fixture(scope="module")
def mistral(family_toy):
    """Its window is 12 tokens: 3 pages."""
    return family_toy("mistral")


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, length).tolist() for length in (100, 13, 60)]


def test_a_prompt_longer_than_the_pool(mistral, prompts):
    """10 pages hold 40 tokens; the prompts have 100, 13 and 60."""
    engine = make_engine(mistral, num_pages=10, **SETTINGS)
    results = run_all(engine, [(prompt, PARAMS) for prompt in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        assert result.ids == oracle(mistral, prompt, PARAMS)[0]
    assert_idle(engine)


def test_pages_in_use_stay_bounded_and_shared_beginnings_are_found(mistral, prompts):
    engine = make_engine(mistral, num_pages=60, **SETTINGS)
    results, most = {}, 0
    first = engine.add_request(prompts[0], PARAMS)
    while engine.has_work:
        collect(engine, results)
        most = max(most, engine.scheduler.memory.pool.used)
    bound = engine.resolved.limits.pages_at_once
    assert bound is not None and most <= bound < 30  # 119 positions take 30 pages
    assert engine.stats.cached_tokens == 0
    again = engine.add_request(prompts[0], PARAMS)
    while engine.has_work:
        collect(engine, results)
    assert results[first].ids == results[again].ids == oracle(mistral, prompts[0], PARAMS)[0]
    assert (
        engine.stats.cached_tokens == 96
    )  # all whole pages, though the first had been given back long before
    assert_idle(engine)

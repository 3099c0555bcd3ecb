"""Engines of every family against what transformers generates (tests/goldens/families.npz): in a batch, read in chunks,
preempted and read again."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from families import FAMILIES, MAX_LEN
from harness import GREEDY, assert_idle, collect, make_engine, run_all, thrash

GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "families.npz")
PARAMS = dataclasses.replace(GREEDY, max_tokens=32)
CLOSE = 1e-3  # logits; nearer ones may be swapped by sums in another order
FAST = ("gemma3", "qwen2_moe")


def rows(*, fast: tuple[str, ...]) -> list:
    return [pytest.param(name, marks=[] if name in fast else [pytest.mark.slow]) for name in FAMILIES]


def engine_of(model, name: str, **settings):
    length = {"max_model_len": MAX_LEN[name]} if name in MAX_LEN else {}
    return make_engine(model, max_num_seqs=3, **{"prefill_chunk_size": 24, **length, **settings})


def prompts(name: str) -> list[list[int]]:
    return [GOLDENS[f"{name}/ids_{i}"].tolist() for i in range(3)]


def check(name: str, results: list) -> None:
    for i, result in enumerate(results):
        assert GOLDENS[f"{name}/gap_{i}"].min() > CLOSE, "no difference is allowed anywhere"
        assert (result.ids, result.finish_reason) == (GOLDENS[f"{name}/greedy_{i}"].tolist(), "length")


@pytest.mark.parametrize("name", rows(fast=FAST))
def test_greedy_tokens(name, family_toy):
    """Three prompts of 16, 23 and 80 tokens in one batch, in chunks of 24."""
    engine = engine_of(family_toy(name), name, executor="dispatch", num_pages=40)
    check(name, run_all(engine, [(ids, PARAMS) for ids in prompts(name)]))
    assert_idle(engine)


@pytest.mark.parametrize("name", rows(fast=()))
def test_greedy_tokens_under_eviction(name, family_toy):
    """The same in scans, with other pages and chunks, while sequences are preempted again and again."""
    engine = engine_of(family_toy(name), name, num_pages=34, page_size=4, prefill_chunk_size=16)
    rng, results = np.random.default_rng(0), {}
    ids = [engine.add_request(prompt, PARAMS) for prompt in prompts(name)]
    for _ in range(400):
        if not engine.has_work:
            break
        collect(engine, results)
        if rng.random() < 0.3:
            thrash(engine, rng)
    check(name, [results[i] for i in ids])
    assert_idle(engine)

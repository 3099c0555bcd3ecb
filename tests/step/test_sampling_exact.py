"""The sampler against the probabilities of transformers (tests/goldens/sampling.json), and its edges."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from harness import sampling_rows
from jaxsched import SamplingParams
from jaxsched.step import sampling
from jaxsched.step.controls import IN_PROMPT, controlled, init_controls
from jaxsched.step.state import init_slots

CASES = json.loads((Path(__file__).parents[1] / "goldens" / "sampling.json").read_text())["distributions"]
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
DRAWS = 20_000
LEAST_LIKELY = (
    1e-4  # a chi-square statistic less likely than this fails; seeds are fixed, so this is no lottery
)
MODES = ["full", "auto"]
sample = jax.jit(sampling.sample, static_argnames="mode")


def row_of(case) -> np.ndarray:
    """Logits float32 [V]."""
    return np.array([-np.inf if x is None else x for x in case["logits"]], np.float32)


def penalised(case) -> np.ndarray:
    """The row after the penalties, by the code that runs in a step."""
    row, params = row_of(case), case["params"]
    vocab = len(row)
    controls = init_controls(1, vocab)
    counts = np.bincount(case["output"], minlength=vocab).astype(np.int32)
    counts[np.unique(case["prompt"])] += IN_PROMPT
    values = {
        name.removesuffix("_penalty"): jnp.array([params[name]], jnp.float32)
        for name in PENALTIES
        if name in params
    }
    rows = dataclasses.replace(controls.rows, **values)
    controls = dataclasses.replace(controls, rows=rows, counts=jnp.asarray(counts)[None])
    slots = init_slots(1, num_pages=1, pages_per_seq=1, max_stop_ids=1)
    return np.asarray(controlled(jnp.asarray(row)[None], controls, slots))[0]


def same_rows(params: SamplingParams, count: int):
    """``count`` equal rows but for the seed."""
    rows = jax.tree.map(lambda x: np.repeat(x, count, axis=0), sampling_rows(params))
    seeds = np.random.default_rng(17).integers(0, 2**32, (count, 2), dtype=np.uint32)
    return dataclasses.replace(rows, seed=seeds)


def draws(logits: np.ndarray, params: SamplingParams, mode: str, count: int = DRAWS) -> np.ndarray:
    """Tokens [count], each of a seed and an output position of its own."""
    position = np.random.default_rng(18).integers(0, 4096, count).astype(np.int32)
    batch = np.broadcast_to(logits, (count, len(logits)))
    return np.asarray(sample(batch, same_rows(params, count), position, mode=mode))


def likelihood(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """How likely a chi-square statistic this large is; 0 if a token came that never may.

    Rare tokens count as one, or the statistic would not be chi-square.
    """
    counts = np.bincount(tokens, minlength=len(probabilities))
    if len(counts) > len(probabilities) or counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * len(tokens)
    rare = expected < 5
    seen, want = counts[~rare], expected[~rare]
    if expected[rare].sum() >= 5:
        seen, want = np.append(seen, counts[rare].sum()), np.append(want, expected[rare].sum())
    return float(chi2.sf(((seen - want) ** 2 / want).sum(), len(want) - 1))


def test_the_statistic_tells_right_from_wrong():
    """Draws of numpy pass; probabilities off by a tenth, shifted ids and impossible tokens do not."""
    p = np.array(CASES[0]["probabilities"])
    tokens = np.random.default_rng(0).choice(len(p), DRAWS, p=p / p.sum())
    assert likelihood(tokens, p) > LEAST_LIKELY
    warmer = p**0.9 / (p**0.9).sum()
    assert likelihood(tokens, warmer) < LEAST_LIKELY
    assert likelihood(tokens, np.roll(p, 1)) < LEAST_LIKELY
    without = np.where(np.arange(len(p)) == tokens[0], 0, p)
    assert likelihood(tokens, without / without.sum()) == 0
    assert likelihood(np.append(tokens, len(p)), p) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["params"]))
def test_draws_have_transformers_probabilities(case, mode):
    p = np.array(case["probabilities"])
    np.testing.assert_allclose(p.sum(), 1)
    params = SamplingParams(**{k: v for k, v in case["params"].items() if k not in PENALTIES})
    tokens = draws(penalised(case), params, mode)
    assert likelihood(tokens, p) > LEAST_LIKELY


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["params"]))
def test_scores_are_transformers_probabilities(case):
    """What noise is added to, to the precision of float32, where the draws above can tell a percent."""
    params = SamplingParams(**{k: v for k, v in case["params"].items() if k not in PENALTIES})
    scores = np.asarray(sampling.filtered_scores(penalised(case)[None], sampling_rows(params)))[0]
    weights = np.exp(scores.astype(np.float64))
    np.testing.assert_allclose(weights / weights.sum(), case["probabilities"], rtol=1e-5)


def test_penalties_are_part_of_the_comparison():
    """A case without its penalties fails."""
    for case in CASES:
        if set(PENALTIES) & set(case["params"]):
            params = SamplingParams(**{k: v for k, v in case["params"].items() if k not in PENALTIES})
            tokens = draws(row_of(case), params, "full")
            assert likelihood(tokens, np.array(case["probabilities"])) < LEAST_LIKELY


# -- edges -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_equals_are_equally_likely(mode):
    """Tokens with the same logit, also where a filter cuts among them: they stay together."""
    logits = np.array([0, 2, -1, 2, 2, 0, -np.inf, 2], np.float32)
    four = np.where(logits == 2, 0.25, 0)
    for params in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.01}):
        assert likelihood(draws(logits, SamplingParams(**params), mode), four) > LEAST_LIKELY, params


@pytest.mark.parametrize("mode", MODES)
def test_one_possible_token_is_the_only_one(mode):
    """Whatever the filters and the temperature, at either end of the vocabulary."""
    for only in (0, 5, 8):
        logits = np.full(9, -np.inf, np.float32)
        logits[only] = -3e4
        for params in (
            {},
            {"temperature": 1e30},
            {"temperature": 1e-4, "top_p": 1e-6},
            {"top_k": 3, "top_p": 0.5, "min_p": 0.5},
            {"temperature": 0},
        ):
            assert set(draws(logits, SamplingParams(**params), mode, 200).tolist()) == {only}, params


@pytest.mark.parametrize("mode", MODES)
def test_impossible_tokens_never_come(mode):
    """At a temperature at which all others are equally likely."""
    logits = np.random.default_rng(4).standard_normal(30).astype(np.float32) * 50
    logits[::3] = -np.inf
    p = np.where(np.isfinite(logits), 1 / 20, 0)
    for params in ({}, {"top_k": 29}, {"top_p": 1 - 1e-7}, {"min_p": 1e-7}):
        tokens = draws(logits, SamplingParams(temperature=1e30, **params), mode)
        assert likelihood(tokens, p) > LEAST_LIKELY, params


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 1e-4])
def test_a_low_temperature_takes_the_best(mode, temperature):
    logits = np.random.default_rng(6).standard_normal((40, 50)).astype(np.float32)
    logits[:, 7] = logits.max(-1) + 0.01
    for params in ({}, {"top_k": 4, "top_p": 0.9, "min_p": 0.1}):
        rows = same_rows(SamplingParams(temperature=temperature, **params), 40)
        assert set(np.asarray(sample(logits, rows, np.arange(40), mode=mode)).tolist()) == {7}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("top_p", [1 - 1e-7, 1 - 6e-8, 0.99999])
def test_top_p_close_to_one(mode, top_p):
    """A sum of float32 that never gets to top_p of itself must not leave the vocabulary, nor empty the row."""
    rng = np.random.default_rng(9)
    vocab = 3001
    for scale in (0.0, 1e-3, 1.0, 30.0):
        logits = (rng.standard_normal(vocab) * scale).astype(np.float32)
        logits[[0, 1500, vocab - 1]] = -np.inf
        tokens = draws(logits, SamplingParams(top_p=top_p), mode, 500)
        assert ((0 <= tokens) & (tokens < vocab)).all()
        assert (logits[tokens] > -np.inf).all()
        assert len(set(tokens.tolist())) > 300 or scale > 1, "hardly anything is removed"


@pytest.mark.parametrize("mode", MODES)
def test_top_k_beyond_the_vocabulary_is_off(mode):
    logits = np.random.default_rng(10).standard_normal(50).astype(np.float32)
    want = draws(logits, SamplingParams(), mode, 500)
    assert len(set(want.tolist())) > 20
    for top_k in (50, 51, 2**31 - 1):
        np.testing.assert_array_equal(draws(logits, SamplingParams(top_k=top_k), mode, 500), want)


def test_neighbours_do_not_matter():
    """The same row at every place of batches of other rows, of other sizes, in both modes: one token."""
    rng = np.random.default_rng(12)
    mine = SamplingParams(seed=5, temperature=1.3, top_k=30, top_p=0.95, min_p=0.01)
    others = [
        SamplingParams(temperature=0),
        SamplingParams(seed=5),
        SamplingParams(seed=6, top_k=2),
        SamplingParams(seed=7, top_p=0.2, temperature=1e-3),
        SamplingParams(seed=8, min_p=1.0, temperature=1e30),
    ]
    logits = rng.standard_normal(50).astype(np.float32) * 2
    positions, got = range(40), []
    for size in (1, 2, 6):
        for place in range(size):
            for mode in MODES:
                params = [*rng.permutation(np.array(others, object))[: size - 1]]
                params.insert(place, mine)
                batch = rng.standard_normal((size, 50)).astype(np.float32) * 10
                batch[rng.random(batch.shape) < 0.3] = -np.inf
                batch[place] = logits
                at = rng.integers(0, 99, (len(positions), size)).astype(np.int32)
                at[:, place] = positions
                rows = sampling_rows(*params)
                got.append([int(sample(batch, rows, at[i], mode=mode)[place]) for i in positions])
    assert len(set(got[0])) > 5
    assert all(one == got[0] for one in got)

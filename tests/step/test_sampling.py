"""The sampler against a plain numpy one that sorts, and against exact probabilities."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness import sampling_rows
from jaxsched import SamplingParams
from jaxsched.step import sampling
from jaxsched.step.sampling import _search

VOCAB = 50
sample = jax.jit(sampling.sample, static_argnames="mode")
filtered_scores = jax.jit(sampling.filtered_scores, static_argnames="skip_unused")


def reference_keep(logits, params):
    """Which tokens of one row ``[V]`` stay. Ties of the last token that must stay, stay too."""
    scores = (logits.astype(np.float64) - logits.max()) / max(params.temperature, 1e-5)
    weights = np.exp(scores)
    order = np.argsort(-scores, kind="stable")
    low = -np.inf
    if 0 < params.top_k < len(logits):
        low = scores[order[params.top_k - 1]]
    weights = np.where(scores >= low, weights, 0)
    if params.top_p < 1:
        total = np.cumsum(weights[order])
        needed = int(np.argmax(total >= params.top_p * total[-1] * (1 - 1e-9)))
        low = max(low, scores[order[needed]])
    return (scores >= low) & (np.exp(scores) >= params.min_p) & (scores > -np.inf)


def keep_mask(logits, params):
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    got = np.asarray(filtered_scores(logits, sampling_rows(*[params] * len(logits))))
    assert not np.isnan(got).any()
    return got > -np.inf


FILTERS = list(
    itertools.product(
        (0, 1, 3, VOCAB - 1, VOCAB, VOCAB + 5),  # top_k
        (1.0, 0.95, 0.5, 0.1, 1e-6),  # top_p
        (0.0, 0.02, 0.5, 1.0),  # min_p
        (1.0, 0.3, 4.0),  # temperature
    )
)


@pytest.fixture(scope="module")
def many_logits():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((len(FILTERS), VOCAB)).astype(np.float32) * 3
    rows[::5] = np.round(rows[::5])  # many ties
    rows[1::5, :30] = -np.inf  # banned tokens
    rows[2::5] -= 1e4  # far from zero
    return rows


@pytest.mark.parametrize("skip", [False, True], ids=["masked", "skipped"])
def test_filters(many_logits, skip):
    """Every combination of filters is a row of one batch."""
    params = [SamplingParams(top_k=k, top_p=p, min_p=m, temperature=t) for k, p, m, t in FILTERS]
    got = np.asarray(filtered_scores(many_logits, sampling_rows(*params), skip_unused=skip))
    assert not np.isnan(got).any()
    for row, logits, one in zip(got, many_logits, params, strict=True):
        np.testing.assert_array_equal(row > -np.inf, reference_keep(logits, one), err_msg=str(one))
        kept = row > -np.inf
        want = (logits - logits.max())[kept] / np.float32(one.temperature)
        np.testing.assert_allclose(row[kept], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("logits", "params", "kept"),
    [
        ([5, 5, 5, 1], {"top_k": 1}, [0, 1, 2]),
        ([5, 4, 4, 4, 1], {"top_k": 2}, [0, 1, 2, 3]),
        ([5, 4, 4, 4, 1], {"top_k": 5}, [0, 1, 2, 3, 4]),
        ([0, 0, 0, 0], {"top_p": 0.25}, [0, 1, 2, 3]),
        ([0, 0, 0, 0], {"top_p": 1e-6}, [0, 1, 2, 3]),
        ([3, 0, 0, 0], {"top_p": 0.5}, [0]),
        ([1, 1, 0, 0], {"top_k": 2, "top_p": 0.4}, [0, 1]),
        ([2, 1, 0, -1], {"min_p": 1.0}, [0]),
        ([2, 2, 0, -1], {"min_p": 1.0}, [0, 1]),
        ([2, 1, 0, -1], {"min_p": 0.3}, [0, 1]),
        ([2, -np.inf, 0, -np.inf], {}, [0, 2]),
        ([2, -np.inf, 0, -np.inf], {"top_k": 3}, [0, 2]),
        ([-np.inf, -np.inf, 0, -np.inf], {"top_k": 3, "top_p": 0.9, "min_p": 0.1}, [2]),
        ([1e30, 1e30, -1e30, 0], {"top_p": 0.9}, [0, 1]),
        ([3, 1, 2, 0], {"top_k": 100}, [0, 1, 2, 3]),
    ],
)
def test_kept_tokens(logits, params, kept):
    assert np.flatnonzero(keep_mask(logits, SamplingParams(**params))[0]).tolist() == kept


def test_top_k_is_applied_before_top_p():
    """As in transformers: the probability that top_p counts is that of the tokens top_k left."""
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert keep_mask(logits, SamplingParams(top_p=0.5))[0].sum() == 2
    assert keep_mask(logits, SamplingParams(top_p=0.5, top_k=2))[0].sum() == 1  # 0.4 of 0.7 is more than half


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-6, 1e-5, 1e-4, 1e30])
@pytest.mark.parametrize("mode", ["auto", "full"])
def test_extreme_temperatures(temperature, mode):
    """Below 1e-5 it is the argmax, above it a draw that at 1e-4 can only be the best; never NaN."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((64, VOCAB)).astype(np.float32) * 100
    logits[:, 10] = -np.inf
    rows = sampling_rows(*[SamplingParams(temperature=temperature, top_p=0.9, seed=s) for s in range(64)])
    rows = dataclasses.replace(rows, temperature=np.full(64, temperature, np.float32))
    assert not np.isnan(filtered_scores(logits, rows)).any()
    got = np.asarray(sample(logits, rows, jnp.zeros(64, int), mode=mode))
    assert ((0 <= got) & (got < VOCAB) & (got != 10)).all()
    if temperature < 1:
        assert got.tolist() == logits.argmax(-1).tolist()
    else:
        assert len(set(got.tolist())) > 20


def test_greedy_ties_go_to_the_lowest_id():
    logits = np.zeros((1, 7), np.float32)
    logits[0, [2, 5]] = 3
    assert sample(logits, sampling_rows(SamplingParams(temperature=0)), jnp.zeros(1, int)).tolist() == [2]


DRAWS = 20_000
# Quantile 0.9999 of chi-square by degrees of freedom; seeds are fixed, so this is no lottery.
CHI2 = {2: 18.42, 6: 27.86, 9: 33.72, 19: 50.80, 49: 94.09}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 2.5},
        {"top_k": 20},
        {"top_k": 10, "temperature": 0.7},
        {"top_k": 20, "top_p": 0.9999, "min_p": 1e-6},
        {"min_p": 0.35},
        {"top_p": 0.4, "temperature": 1.5},
        {"top_k": 3},
    ],
    ids=str,
)
def test_draws_have_the_exact_probabilities(params):
    """One request's stream over 20,000 output positions."""
    logits = np.sort(np.random.default_rng(5).standard_normal(VOCAB).astype(np.float32))[::-1].copy()
    one = SamplingParams(seed=11, **params)
    keep = reference_keep(logits, one)
    p = np.where(keep, np.exp(logits.astype(np.float64) / one.temperature), 0)
    p /= p.sum()
    draw = jax.jit(
        jax.vmap(
            lambda at: sample(logits[None], sampling_rows(one), at[None], mode="full")[0],
        )
    )
    counts = np.bincount(np.asarray(draw(jnp.arange(DRAWS))), minlength=VOCAB)
    assert counts[~keep].sum() == 0
    df = int(keep.sum()) - 1
    expected = p[keep] * DRAWS
    assert expected.min() >= 5, "too few for the statistic"
    chi2 = float(((counts[keep] - expected) ** 2 / expected).sum())
    assert chi2 < CHI2[df], f"chi-square {chi2:.1f} with {df} degrees of freedom"


def test_seeds_and_positions_give_independent_streams():
    """Pairs of draws from neighbouring positions and from neighbouring seeds are uniform over all pairs."""
    logits = np.zeros((DRAWS, 5), np.float32)
    for seeds, at in (
        (np.full(DRAWS, 3), np.arange(DRAWS)),
        (np.arange(DRAWS), np.zeros(DRAWS, int)),
        (np.arange(DRAWS) << 32, np.zeros(DRAWS, int)),
    ):
        rows = sampling_rows(*[SamplingParams(seed=int(s)) for s in seeds])
        got = np.asarray(sample(logits, rows, jnp.asarray(at), mode="full"))
        pairs = np.bincount(got[:-1] * 5 + got[1:], minlength=25)
        chi2 = float(((pairs - pairs.mean()) ** 2 / pairs.mean()).sum())
        assert chi2 < 58.61, (
            chi2
        )  # quantile 0.9999 with 24 degrees of freedom, pairs that overlap a bit wider


def test_a_draw_depends_on_nothing_but_its_row():
    """Any batch, any neighbours, any mode: the same token."""
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((12, VOCAB)).astype(np.float32) * 2
    params = [
        SamplingParams(temperature=0),
        *[SamplingParams(seed=int(s), top_k=int(k), top_p=float(p), min_p=float(m), temperature=float(t))
          for s, k, p, m, t in zip(rng.integers(0, 2**63, 11), rng.integers(0, 20, 11), rng.uniform(0.3, 1, 11),
                                   rng.uniform(0, 0.2, 11), rng.uniform(0.2, 2, 11), strict=True)],
    ]  # fmt: skip
    at = rng.integers(0, 1000, 12)

    def draw(which, mode):
        rows = sampling_rows(*[params[i] for i in which])
        return np.asarray(sample(logits[which], rows, jnp.asarray(at[which]), mode=mode)).tolist()

    want = draw(list(range(12)), "full")
    for mode in ("full", "auto"):
        assert [draw([i], mode)[0] for i in range(12)] == want
        shuffled = rng.permutation(12).tolist()
        assert draw(shuffled, mode) == [want[i] for i in shuffled]
    assert draw([0, 0], "greedy") == draw([0, 0], "auto") == [want[0]] * 2


def test_searches_by_one_bit_and_by_four_agree():
    """The two forms of the threshold search, with weights whose sums are exact in any order."""
    rng = np.random.default_rng(2)
    keys = rng.integers(0, 2**32, (40, 96), dtype=np.uint32)
    keys[:8] &= 7  # many ties, small values
    keys[8] = 2**32 - 1
    keys[9] = 0
    weights = rng.integers(0, 64, keys.shape).astype(np.float32)
    target = np.floor(weights.sum(-1) * rng.uniform(0, 1.1, 40)).astype(np.float32)
    target[10] = 0
    one, four = (np.asarray(_search(keys, target, weigh=lambda _: weights, bits=bits)) for bits in (1, 4))
    np.testing.assert_array_equal(one, four)
    for k, w, t, low in zip(keys.astype(np.int64), weights, target, one, strict=True):
        candidates = [c for c in {*k.tolist(), 0, 2**32 - 1} if w[k >= c].sum() >= t]
        best = max(candidates, default=0)
        # Above the largest key the sum is 0: only a target of 0 gets there.
        assert int(low) == best

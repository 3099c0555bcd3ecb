"""The kernel that finds the thresholds of the filters keeps the tokens that the searches in XLA keep."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness import sampling_rows
from jaxsched import SamplingParams
from jaxsched.pallas_kernels.triton.sample import SampleConfig, filter_thresholds
from jaxsched.step.sampling import _kernel_in_sight, _kernel_scores, filtered_scores

searched = jax.jit(filtered_scores)
VOCABULARIES = [
    (50, None),
    (1, None),
    (64, SampleConfig(16, 2)),
    (1000, SampleConfig(256, 4)),
    (3001, SampleConfig(512)),
]


def batch(vocab):
    """Logits [R, V] and their filters: all combinations, ties, impossible tokens, rows far from zero, a row of -inf."""
    filters = [
        *itertools.product((0, 1, 3, vocab - 1, vocab, vocab + 5), (1.0, 0.9, 1e-6), (0.0, 0.3, 1.0), (1.0, 0.3, 1e30)),
        *itertools.product((0, 20), (0.99, 1 - 6e-8, 0.5), (0.0,), (1e-5, 4.0)),
    ]  # fmt: skip
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((len(filters), vocab)) * 3).astype(np.float32)
    logits[::5] = np.round(logits[::5])
    logits[1::5, : vocab * 3 // 5] = -np.inf
    logits[2::5] -= 1e4
    logits[-1] = -np.inf
    params = [SamplingParams(top_k=max(k, 0), top_p=p, min_p=m, temperature=t) for k, p, m, t in filters]
    return jnp.asarray(logits), jax.tree.map(jnp.asarray, sampling_rows(*params))


@pytest.mark.parametrize(("vocab", "config"), VOCABULARIES)
def test_the_kernel_keeps_what_the_searches_keep(vocab, config, monkeypatch):
    from jaxsched.pallas_kernels.triton import sample

    monkeypatch.setattr(sample, "filter_thresholds", partial(filter_thresholds, config=config))
    logits, rows = batch(vocab)
    best, got = jax.jit(partial(_kernel_scores, interpret=True))(logits, rows)
    want = np.asarray(searched(logits, rows))
    assert (want[:, : vocab // 2] == -np.inf).any() or vocab == 1
    np.testing.assert_array_equal(np.asarray(got), want)
    np.testing.assert_array_equal(best, jnp.argmax(logits, -1))


def test_blocks_and_bits_do_not_matter():
    """Other blocks and other bits per pass: the same thresholds, where no sum is near its target."""
    logits, rows = batch(60)
    found = [
        filter_thresholds(logits, rows.temperature, rows.top_k, rows.top_p, config=config, interpret=True)
        for config in (SampleConfig(), SampleConfig(16, 1), SampleConfig(32, 5))
    ]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_scores_that_are_equal_stay_together():
    """Logits that differ, but not once the best is taken away; and weights that differ in score only."""
    logits = jnp.array([[5, 1e-9, 2e-9, -1, -np.inf]] * 3, jnp.float32)
    params = [
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.996),
        SamplingParams(top_k=2, temperature=1e30, top_p=0.5),
    ]
    rows = jax.tree.map(jnp.asarray, sampling_rows(*params))
    _, got = _kernel_scores(logits, rows, interpret=True)
    np.testing.assert_array_equal(got, searched(logits, rows))
    assert (np.asarray(got) > -np.inf).sum(-1).tolist() == [3, 3, 3]


def test_a_row_of_nan_stays_in_the_vocabulary():
    logits = jnp.full((2, 50), jnp.nan)
    best, *_ = filter_thresholds(
        logits, jnp.ones(2), jnp.array([0, 3]), jnp.array([1.0, 0.5]), interpret=True
    )
    assert ((best >= 0) & (best < 50)).all()


def test_a_cpu_traces_no_kernel():
    logits, rows = batch(50)
    assert not _kernel_in_sight()
    assert "pallas_call" not in str(jax.make_jaxpr(filtered_scores)(logits, rows))


@pytest.mark.parametrize(
    ("kind", "kernel"), [("NVIDIA H200", True), ("NVIDIA L4", True), ("Tesla T4", False)]
)
def test_a_gpu_takes_the_kernel_if_triton_knows_it(kind, kernel):
    logits, rows = batch(50)
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(filtered_scores).trace(logits, rows).lower(lowering_platforms=("cuda",)).as_text()
    assert ("filter_thresholds" in lowered) == kernel
    assert ("stablehlo.while" in lowered) != kernel

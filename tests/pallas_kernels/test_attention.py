"""Every implementation of paged attention against the float32 reference, on shapes drawn at random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.pallas_kernels import IMPLEMENTATIONS, paged_decode, paged_prefill, write_kv
from jaxsched.pallas_kernels.ops import page_of

BACKENDS = [name for name in IMPLEMENTATIONS if name != "reference"]
TOLERANCE = 2e-5  # float32 sums of up to 200 terms of size 1 in different orders


def pool(rng, lengths, page_size, kv_heads, dim, spare=3):
    """Pages filled with NaN except the live positions; block tables with garbage behind each length."""
    slots = len(lengths)
    need = [-(-int(n) // page_size) for n in lengths]
    width = max(need) + 2
    total = sum(need) + spare
    k = np.full((total, page_size, kv_heads, dim), np.nan, np.float32)
    v = k.copy()
    table = rng.integers(-5, total + 1000, (slots, width)).astype(np.int32)
    free = list(rng.permutation(total))
    for s, n in enumerate(lengths):
        table[s, : need[s]] = [free.pop() for _ in range(need[s])]
        for p in range(n):
            page = table[s, p // page_size]
            k[page, p % page_size] = rng.standard_normal((kv_heads, dim))
            v[page, p % page_size] = rng.standard_normal((kv_heads, dim))
    return jnp.asarray(k), jnp.asarray(v), jnp.asarray(table)


CASES = [
    # page size, query heads, KV heads, head_dim
    (16, 4, 4, 16),
    (16, 9, 3, 64),
    (8, 8, 1, 32),
    (32, 6, 2, 80),
    (4, 4, 2, 16),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_matches_reference(backend, case):
    page_size, heads, kv_heads, dim = case
    rng = np.random.default_rng(0)
    lengths = [0, 1, page_size - 1, page_size, page_size + 1, 7 * page_size + 3, 0, 3 * page_size]
    k, v, table = pool(rng, lengths, page_size, kv_heads, dim)
    q = jnp.asarray(rng.standard_normal((len(lengths), heads, dim)).astype(np.float32))
    args = (q, k, v, table, jnp.asarray(lengths, jnp.int32))
    want = paged_decode(*args, scale=dim**-0.5, implementation="reference")
    got = paged_decode(*args, scale=dim**-0.5, implementation=backend)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, atol=TOLERANCE)
    assert (np.asarray(got)[[0, 6]] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_prefill_matches_reference(backend, case, seed):
    page_size, heads, kv_heads, dim = case
    rng = np.random.default_rng(seed)
    slots, rows = 6, 160
    # Runs of consecutive positions, each of one slot, in random order, with padding at the end.
    lengths, slot, position = np.zeros(slots, int), [], []
    for s in rng.permutation(slots)[: rng.integers(1, slots)]:
        start, run = int(rng.integers(0, 3 * page_size)), int(rng.integers(1, 70))
        run = min(run, rows - len(slot))
        slot += [s] * run
        position += range(start, start + run)
        lengths[s] = start + run
    pad = rows - len(slot)
    slot, position = np.array(slot + [slots] * pad, np.int32), np.array(position + [0] * pad, np.int32)
    k, v, table = pool(rng, lengths, page_size, kv_heads, dim)
    q = jnp.asarray(rng.standard_normal((rows, heads, dim)).astype(np.float32))
    args = (q, k, v, table, jnp.asarray(slot), jnp.asarray(position))
    want = paged_prefill(*args, scale=dim**-0.5, implementation="reference")
    got = paged_prefill(*args, scale=dim**-0.5, implementation=backend)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, atol=TOLERANCE)
    assert (np.asarray(got)[rows - pad :] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_neighbours(backend):
    """Bit for bit: a longer neighbour adds iterations, and they must change nothing."""
    rng = np.random.default_rng(1)
    k, v, table = pool(rng, [20, 300], 16, 2, 16)
    q = jnp.asarray(rng.standard_normal((2, 4, 16)).astype(np.float32))

    def run(lengths):
        return paged_decode(
            q, k, v, table, jnp.asarray(lengths, jnp.int32), scale=0.25, implementation=backend
        )

    assert (np.asarray(run([20, 300]))[0] == np.asarray(run([20, 0]))[0]).all()


def test_write_kv_drops_rows_out_of_range():
    pages = jnp.zeros((3, 4, 1, 2))
    rows = jnp.arange(8.0).reshape(4, 1, 2) + 1
    got = write_kv(pages, rows, jnp.array([0, 3, 2, 1000]), jnp.array([1, 0, 3, 2]))
    want = np.zeros((3, 4, 1, 2))
    want[0, 1], want[2, 3] = [[1, 2]], [[5, 6]]
    np.testing.assert_array_equal(got, want)


def test_page_of():
    table = jnp.array([[5, 6], [7, 8]])
    got = page_of(table, jnp.array([0, 1, 1]), jnp.array([3, 4, 7]), page_size=4)
    np.testing.assert_array_equal(got, [5, 8, 8])


def test_unknown_implementation_is_refused():
    x = jnp.zeros((1, 1, 2))
    with pytest.raises(ValueError, match=r"'triton9' is unknown; known: reference, xla"):
        jax.eval_shape(
            lambda: paged_decode(
                x,
                x[None],
                x[None],
                jnp.zeros((1, 1), int),
                jnp.zeros(1, int),
                scale=1.0,
                implementation="triton9",
            )
        )

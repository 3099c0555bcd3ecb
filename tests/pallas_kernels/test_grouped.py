"""Grouped products: every implementation against a loop in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.pallas_kernels.grouped import grouped_matmul, make_tiles, tile_size


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
@pytest.mark.parametrize(
    "rows, groups, width, wide, outside",
    [(40, 5, 48, 80, 3), (3, 8, 32, 16, 0), (200, 3, 100, 130, 0), (1, 1, 16, 16, 0), (7, 4, 16, 24, 7)],
)
def test_every_row_meets_its_own_matrix(implementation, rows, groups, width, wide, outside):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    kernel = rng.standard_normal((groups, width, wide)).astype(np.float32)
    group = np.sort(rng.integers(0, groups, rows)).astype(np.int32)
    group[rows - outside :] = groups
    if rows == 40:  # a group without rows
        group[group == 2] = 1
    got = grouped_matmul(
        jnp.asarray(x), jnp.asarray(kernel), jnp.asarray(group), implementation=implementation
    )
    want = np.stack([x[r] @ kernel[g] if g < groups else np.zeros(wide) for r, g in enumerate(group)])
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-5)


def test_tiles_cover_each_row_once():
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows, groups = int(rng.integers(1, 90)), int(rng.integers(1, 12))
        group = np.sort(rng.integers(0, groups + 1, rows)).astype(np.int32)
        size = tile_size(rows, groups)
        tiles = make_tiles(jnp.asarray(group), groups, size)
        seen = np.zeros(rows, int)
        for t in range(int(tiles.count)):
            first, count = int(tiles.row[t]), int(tiles.rows[t])
            assert 0 < count <= size
            assert set(group[first : first + count]) == {int(tiles.group[t])}
            seen[first : first + count] += 1
        assert not np.asarray(tiles.rows)[int(tiles.count) :].any()
        np.testing.assert_array_equal(seen, group < groups)


def test_unknown_and_impossible_are_refused():
    x, kernel, group = jnp.ones((2, 4)), jnp.ones((1, 4, 4), jnp.bfloat16), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="implementation 'cuda' is unknown; known: reference, xla, triton"):
        grouped_matmul(x, jnp.ones((1, 4, 4)), group, implementation="cuda")
    with pytest.raises(ValueError, match="'triton' cannot do this: rows are float32 and matrices bfloat16"):
        grouped_matmul(x, kernel, group, implementation="triton")

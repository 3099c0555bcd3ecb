"""Writing K and V: rotating and writing at once, and quantising into pages with scales."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.models.decoder import rotate
from jaxsched.pallas_kernels import rotary, write_kv
from jaxsched.pallas_kernels.quantized import SMALLEST, dequantize, write_kv_quantized
from jaxsched.pallas_kernels.shapes import AttentionShape
from jaxsched.pallas_kernels.triton import write

PAGES, SIZE = 7, 4
DTYPES = ["int8", "float8_e4m3fn"]
WRITERS = {
    "xla": jax.jit(write_kv_quantized),
    "triton": jax.jit(partial(write.write_kv_quantized, interpret=True)),
}
# What a float8_e4m3fn that is no subnormal is off by at most: half of the last of its 3 bits.
FLOAT8 = 2.0**-4


# -- plain pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        (4, 2, 16, "float32"),
        (3, 1, 24, "float32"),
        (6, 2, 80, "bfloat16"),
        (1, 1, 16, "bfloat16"),
        (32, 8, 16, "float16"),
    ],
)
def test_rotate_and_write_is_rotate_then_write(heads, kv_heads, dim, dtype):
    rng = np.random.default_rng(heads)
    rows = 6
    packed = jnp.asarray(rng.standard_normal((rows, heads + 2 * kv_heads, dim)), dtype)
    angles = rng.uniform(0, 7, (rows, 1, dim // 2)).astype(np.float32)
    cos, sin = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    page = jnp.array([2, PAGES, 0, 2, PAGES + 9, 6], jnp.int32)  # two rows are dropped
    offset = jnp.array([0, 1, 3, 1, 2, 3], jnp.int32)
    old = [jnp.asarray(rng.standard_normal((PAGES, SIZE, kv_heads, dim)), dtype) for _ in range(2)]
    q, k, v = jnp.split(packed, (heads, heads + kv_heads), axis=1)
    want = (
        rotate(q, cos, sin),
        write_kv(old[0], rotate(k, cos, sin), page, offset),
        write_kv(old[1], v, page, offset),
    )
    for mine, theirs in zip(rotary.rotate_and_write(packed, cos, sin, *old, page, offset), want, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    got = write.rotate_and_write(packed, cos, sin, *old, page, offset, interpret=True)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        # A product and a sum may be one operation or two: the last bit.
        tolerance = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (mine, theirs)), tolerance, tolerance)
    untouched = np.ones((PAGES, SIZE), bool)
    untouched[[2, 0, 2, 6], [0, 3, 1, 3]] = False
    for mine, before in zip(got[1:], old, strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[untouched], np.asarray(before)[untouched])


def test_pages_that_cannot_be_written_are_refused():
    shape = partial(AttentionShape, 4, 4, 8, 2)
    fits = shape(64, 16, 8, 100, "bfloat16", "bfloat16", "sm_90")
    assert write.rotate_refusal(fits) is None and write.write_refusal(fits) is None
    huge = shape(128, 16, 8, 2**19, "bfloat16", "int8", "sm_90")
    assert "2147483648 elements" in write.write_refusal(huge)
    assert "scales" in write.rotate_refusal(shape(64, 16, 8, 100, "bfloat16", "int8"))
    assert "odd" in write.rotate_refusal(shape(65, 16, 8, 100, "bfloat16", "bfloat16"))
    old_card = shape(64, 16, 8, 100, "bfloat16", "float8_e4m3fn", "sm_80")
    assert "sm_89" in write.write_refusal(old_card)


# -- quantised pages ---------------------------------------------------------------------------------------------------


def pool(dtype, kv_heads=2, dim=6, seed=0):
    """Pages and scales as earlier owners left them: anything."""
    rng = np.random.default_rng(seed)
    pages = rng.integers(0, 256, (PAGES, SIZE, kv_heads, dim), np.uint8).view(jnp.dtype(dtype))
    scales = (2.0 ** rng.integers(-30, 30, (PAGES, kv_heads))).astype(np.float32)
    scales[::3] = np.nan
    return jnp.asarray(pages), jnp.asarray(scales)


def bits(x):
    return np.asarray(x).view({1: np.uint8, 4: np.uint32}[np.asarray(x).dtype.itemsize])


def same_bits(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


def runs(lengths, start=0):
    """Page and offset of rows of several sequences: each begins at offset ``start`` of a page and runs over pages."""
    page, offset, free = [], [], iter(np.random.default_rng(1).permutation(PAGES))
    for length in lengths:
        for at in range(start, start + length):
            if at % SIZE == 0 or not page or at == start:
                current = next(free)
            page.append(current)
            offset.append(at % SIZE)
    return np.array(page, np.int32), np.array(offset, np.int32)


def random_rows(count, kv_heads=2, dim=6, seed=0):
    """Rows of very different sizes, some of zeros."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, kv_heads, dim)) * 2.0 ** rng.integers(-12, 12, (count, kv_heads, 1))
    rows[rng.random((count, kv_heads)) < 0.1] = 0
    return rows.astype(np.float32)


def bound(rows, scales, page, dtype, steps=0.5):
    """How far a dequantised value may be off: ``steps`` of the scale, or of what float8 can tell apart there."""
    scale = np.asarray(scales)[page][:, :, None]
    if dtype == "int8":
        return np.broadcast_to(steps * scale, rows.shape)
    return np.maximum(
        2 * steps * FLOAT8 * np.abs(rows), 2 * steps * 2.0**-10 * scale
    )  # subnormals: 2**-9 apart


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("writer", WRITERS)
def test_values_at_once_are_off_by_half_a_step(writer, dtype):
    page, offset = runs([6, 1, 4, 2])
    for seed in range(5):
        rows = random_rows(len(page), seed=seed)
        pages, scales = WRITERS[writer](*pool(dtype, seed=seed), rows, page, offset)
        got = np.asarray(dequantize(pages, scales))[page, offset]
        assert (np.abs(got - rows) <= bound(rows, scales, page, dtype)).all()
        used = np.asarray(scales)[page]
        assert (np.log2(used) % 1 == 0).all()
        largest = np.zeros((PAGES, 2))
        np.maximum.at(largest, page, np.abs(rows).max(-1))
        limit = {"int8": 127, "float8_e4m3fn": 448}[dtype]
        tight = (largest[page] <= limit * used) & ((largest[page] > limit * used / 2) | (used == SMALLEST))
        assert tight.all(), "the smallest power of two that holds the page"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("writer", WRITERS)
def test_one_by_one_is_as_good_as_at_once(writer, dtype):
    """The scales are the same. int8 values are rounded again when they grow: off by less than one step, not half."""
    page, offset = runs([7, 1, 5])
    for seed in range(4):
        rows = random_rows(len(page), seed=seed)
        if seed == 0:
            rows = np.sort(np.abs(rows), axis=0)  # each row makes the scale grow
        whole = WRITERS[writer](*pool(dtype), rows, page, offset)
        pages, scales = pool(dtype)
        for t in range(len(page)):
            pages, scales = WRITERS[writer](
                pages, scales, rows[t : t + 1], page[t : t + 1], offset[t : t + 1]
            )
        used = np.unique(page)
        np.testing.assert_array_equal(np.asarray(scales)[used], np.asarray(whole[1])[used])
        one, many = (np.asarray(dequantize(*x))[page, offset] for x in ((pages, scales), whole))
        assert (np.abs(one - rows) <= bound(rows, scales, page, dtype, 1.0)).all()
        if dtype == "int8":
            assert (np.abs(one - many) <= np.asarray(scales)[page][:, :, None]).all()
        else:  # a float8 only changes where it becomes subnormal
            normal = np.abs(rows) >= 2.0**-6 * np.asarray(scales)[page][:, :, None]
            np.testing.assert_array_equal(one[normal], many[normal])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kv_heads", "dim", "rows_dtype"), [(1, 16, "bfloat16"), (3, 20, "float32"), (2, 6, "float32")]
)
def test_both_writers_write_the_same_bits(dtype, kv_heads, dim, rows_dtype):
    """In the whole pool: parts of pages, several pages, single rows, dropped rows, calls that follow each other."""
    state = {name: pool(dtype, kv_heads, dim) for name in WRITERS}
    calls = [runs([3, 1]), runs([6, 3], start=2), runs([1, 1, 1, 1]), runs([4, 9]), runs([2, 2], start=1)]
    for i, (page, offset) in enumerate(calls):
        page[i::4] = PAGES + 3 * i
        page = np.pad(page, (0, 13 - len(page)), constant_values=PAGES)  # one shape compiles once
        offset = np.pad(offset, (0, 13 - len(offset)))
        rows = jnp.asarray(random_rows(len(page), kv_heads, dim, seed=i), rows_dtype)
        state = {name: fn(*state[name], rows, page, offset) for name, fn in WRITERS.items()}
        same_bits(state["xla"], state["triton"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("writer", WRITERS)
def test_dropped_rows_and_other_pages_stay(writer, dtype):
    before = pool(dtype)
    rows = np.full((3, 2, 6), 1e9, np.float32)
    after = WRITERS[writer](
        *before, rows, np.array([PAGES, PAGES + 1, 2**30], np.int32), np.array([0, 1, 2], np.int32)
    )
    same_bits(before, after)
    page, offset = np.array([PAGES, 3, 3, PAGES], np.int32), np.array([1, 0, 1, 2], np.int32)
    after = WRITERS[writer](*before, np.concatenate((rows, rows[:1])), page, offset)
    others = np.arange(PAGES) != 3
    same_bits([x[others] for x in before], [x[others] for x in after])
    same_bits([before[0][3, 2:]], [after[0][3, 2:]])
    assert (np.asarray(after[1])[3] != np.asarray(before[1])[3]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_new_owner_does_not_see_the_last_one(writer, dtype):
    """A page whose earlier owner had huge values is as good as any other."""
    page, offset = runs([3])
    want = WRITERS[writer](*pool(dtype, seed=1), random_rows(3), page, offset)
    pages, scales = pool(dtype, seed=2)
    huge = np.full((3, 2, 6), 1e30, np.float32)
    used = WRITERS[writer](*WRITERS[writer](pages, scales, huge, page, offset), random_rows(3), page, offset)
    same_bits([x[page[0]][:3] for x in want], [x[page[0]][:3] for x in used])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("writer", WRITERS)
def test_zeros_and_what_is_no_number(writer, dtype):
    """Zeros, NaN and infinities change no scale; NaN becomes 0, infinities the largest that the page holds."""
    rows = np.zeros((4, 1, 4), np.float32)
    rows[1] = [np.nan, np.inf, -np.inf, 3.0]
    rows[2] = np.nan
    page, offset = np.full(4, 5, np.int32), np.arange(4, dtype=np.int32)
    pages, scales = WRITERS[writer](*pool(dtype, 1, 4), rows, page, offset)
    got, scale = np.asarray(dequantize(pages, scales))[5, :, 0], float(scales[5, 0])
    limit = {"int8": 127, "float8_e4m3fn": 448}[dtype] * scale
    assert limit / 2 < 3 <= limit
    np.testing.assert_allclose(got[1], [0, limit, -limit, 3], atol=scale / 2)
    assert not got[[0, 2, 3]].any()
    zeros = WRITERS[writer](*pool(dtype, 1, 4), rows[:1], page[:1], offset[:1])
    assert float(zeros[1][5, 0]) == SMALLEST
    # The next row sets the scale as if the zeros were not there.
    pages, scales = WRITERS[writer](*zeros, np.full((1, 1, 4), 3.0, np.float32), page[1:2], offset[1:2])
    assert float(scales[5, 0]) == scale and not np.asarray(pages, np.float32)[5, 0].any()
    # Also where the step from the one scale to the other is wider than float32 has powers.
    pages, scales = WRITERS[writer](*zeros, np.full((1, 1, 4), 3e38, np.float32), page[1:2], offset[1:2])
    np.testing.assert_allclose(np.asarray(dequantize(pages, scales))[5, 1], 3e38, rtol=FLOAT8)


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127), ("float8_e4m3fn", 448)])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_scale_is_the_smallest_that_fits(writer, dtype, largest):
    """Up to the last float32: what is stored never saturates."""
    beyond = np.nextafter(np.float32(largest), np.float32(np.inf))
    for value, scale in ((largest, 1), (beyond, 2), (2 * largest, 2), (2 * beyond, 4), (largest / 2, 0.5)):
        rows = np.full((1, 1, 8), value, np.float32)
        _, scales = WRITERS[writer](
            *pool(dtype, 1, 8), rows, np.array([4], np.int32), np.array([0], np.int32)
        )
        assert float(scales[4, 0]) == scale, value


def test_halves_round_to_even():
    """At scale 1 (a value of 127 sees to that), and when values are shifted: 1 and 3 become 0 and 2 at scale 2."""
    rows = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, 3, 1], np.float32).reshape(1, 1, 8)
    for fn in WRITERS.values():
        pages, scales = fn(*pool("int8", 1, 8), rows, np.array([4], np.int32), np.array([0], np.int32))
        assert np.asarray(pages)[4, 0, 0].tolist() == [127, 0, 2, 2, 0, -2, 3, 1]
        wide = np.full((1, 1, 8), 254, np.float32)
        pages, scales = fn(pages, scales, wide, np.array([4], np.int32), np.array([1], np.int32))
        assert np.asarray(pages)[4, 0, 0].tolist() == [64, 0, 1, 1, 0, -1, 2, 0]
        assert float(scales[4, 0]) == 2

"""Rounding kernels, and joining rounded kernels."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from jaxsched.models.quantized import FP8, KernelFormat
from jaxsched.weights.quantize import FLOAT8, Kernel, common_format, join, quantize

INT8, INT4 = KernelFormat("int8"), KernelFormat("int4", 64)

FORMATS = [
    INT8,
    INT4,
    FLOAT8,
    KernelFormat("int4"),
    KernelFormat("int8", 32),
    KernelFormat("int4", 32, offset=True),
    KernelFormat("int8", offset=True),
]


def values(kernel: Kernel) -> np.ndarray:
    stored, scale, offset = kernel
    repeat = len(stored) // len(scale)
    result = stored.astype(np.float64) * np.repeat(scale, repeat, axis=0)
    return result if offset is None else result + np.repeat(offset, repeat, axis=0)


def weights(rows: int = 128, columns: int = 50, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def error(kernel: np.ndarray, fmt: KernelFormat) -> np.ndarray:
    """Squared error of each group and column."""
    squares = (values(quantize(kernel, fmt)) - kernel) ** 2
    return squares.reshape(fmt.groups(len(kernel)), -1, kernel.shape[1]).sum(1)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_numbers_are_near_and_of_the_format(fmt: KernelFormat) -> None:
    kernel = weights()
    stored, scale, offset = quantize(kernel, fmt)
    assert (stored.shape, stored.dtype.name) == (kernel.shape, fmt.storage)
    assert scale.shape == (fmt.groups(128), 50) and scale.dtype == np.float32
    assert (offset is not None) == fmt.offset
    largest = {"int8": 2e-4, "int4": 2e-2, FP8: 1e-3}[fmt.storage]  # share of the variance
    assert error(kernel, fmt).sum() < largest * (kernel**2).sum()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_what_the_format_can_hold_comes_back(fmt: KernelFormat) -> None:
    low, high = {"int8": (-127, 127), "int4": (-8, 7), FP8: (-448, 448)}[fmt.storage]
    numbers = np.random.default_rng(0).integers(low, high, (128, 5), endpoint=True).astype(np.float32)
    if fmt.storage == FP8:
        numbers = numbers.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    numbers[::32], numbers[1::32] = low, high  # both ends in every group
    if fmt.offset and fmt.storage == "int8":
        numbers[::32] = -128
    kernel = numbers * 0.25 + (0.75 if fmt.offset else 0)
    np.testing.assert_allclose(
        values(quantize(kernel.astype(np.float32), fmt)), kernel, atol=1e-4
    )  # steps of 0.25


def test_each_format_gains_by_what_it_adds() -> None:
    kernel = weights(256, 64)
    blocks = kernel.reshape(4, 64, 64)
    step = np.abs(blocks).max(1, keepdims=True) / 7
    plain = ((np.rint(blocks / step) * step - blocks) ** 2).sum(1)  # without search, fit and sign
    found = error(kernel, INT4)
    assert (found <= plain * 1.02).mean() > 0.95 and found.sum() < 0.8 * plain.sum()
    assert error(kernel, KernelFormat("int4", 64, offset=True)).sum() < 0.95 * found.sum()
    assert found.sum() < error(kernel, KernelFormat("int4")).sum()
    assert error(kernel, INT8).sum() < error(kernel, FLOAT8).sum() < found.sum()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_unusual_numbers(fmt: KernelFormat) -> None:
    kernel = weights()
    kernel[:, 0] = 0
    kernel[:, 1] = 0.3  # without spread
    kernel[:, 2] *= 1e-42
    kernel[:, 3] *= 1e37
    kernel[:, 4] = 0
    kernel[5, 4] = -7.0  # alone
    with np.errstate(all="raise", under="ignore"):
        found = values(quantize(kernel, fmt))
    np.testing.assert_array_equal(found[:, 0], 0)
    np.testing.assert_allclose(found[:, 1], 0.3, rtol=1e-6)
    assert np.abs(found[:, 2]).max() < 1e-41
    assert np.abs(found[:, 3] - kernel[:, 3]).max() < 0.2 * np.abs(kernel[:, 3]).max()
    np.testing.assert_allclose(found[5, 4], -7, rtol=1e-5)
    np.testing.assert_array_equal(quantize(kernel.astype(ml_dtypes.bfloat16), fmt)[0].shape, kernel.shape)
    for bad in (np.nan, np.inf, -np.inf):
        kernel[77, 7] = bad
        with pytest.raises(ValueError, match="not finite"):
            quantize(kernel, fmt)


def test_chunks_do_not_show() -> None:
    kernel = weights(4096, 70)
    for fmt in (INT8, INT4, KernelFormat("int4")):
        whole = quantize(kernel, fmt)
        for column in (0, 15, 16, 69):
            alone = quantize(kernel[:, column : column + 1], fmt)
            np.testing.assert_array_equal(alone[0][:, 0], whole[0][:, column])
            np.testing.assert_allclose(alone[1][:, 0], whole[1][:, column], rtol=1e-5)


def test_groups_must_fill_the_rows() -> None:
    with pytest.raises(ValueError, match="100 input rows are not made of groups of 64"):
        quantize(weights(100), INT4)


WEIGHT_ONLY = KernelFormat(FP8)


@pytest.mark.parametrize(
    ("formats", "expected"),
    [
        ([INT4, INT4], INT4),
        ([FLOAT8, FLOAT8], FLOAT8),
        ([INT4, INT8], KernelFormat("int8", 64)),
        ([KernelFormat("int4", 32, True), KernelFormat("int8", 32)], KernelFormat("int8", 32, True)),
        ([KernelFormat("int8", 96), KernelFormat("int8", 64)], KernelFormat("int8", 32)),
        ([INT8, KernelFormat("int8", offset=True)], KernelFormat("int8", offset=True)),
        ([INT8, KernelFormat("int8", 192)], INT8),
        ([FLOAT8, WEIGHT_ONLY], WEIGHT_ONLY),
        ([FLOAT8, KernelFormat(FP8, 64)], KernelFormat(FP8, 64)),
    ],
)
def test_joined_kernels_keep_their_values(formats: list[KernelFormat], expected: KernelFormat) -> None:
    kernels = [quantize(weights(192, 20 + i, seed=i), fmt) for i, fmt in enumerate(formats)]
    for order in itertools.permutations(range(len(formats))):
        parts, their = [kernels[i] for i in order], [formats[i] for i in order]
        joined, fmt = join(parts, their)
        assert fmt == expected and joined[0].dtype.name == fmt.storage
        assert len(joined[1]) == fmt.groups(192) and (joined[2] is not None) == fmt.offset
        np.testing.assert_array_equal(values(joined), np.concatenate([values(p) for p in parts], axis=1))


def test_what_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="kernels of float8_e4m3fn and int8 have no common form"):
        common_format([FLOAT8, INT8], 64)
    with pytest.raises(ValueError, match="groups of 12 and 64 rows have no common size"):
        common_format([KernelFormat("int8", 12), INT4], 192)

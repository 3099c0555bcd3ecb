"""Products with quantised kernels are those with the dequantised kernel, whichever way they are computed."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.models import quantized
from jaxsched.models.quantized import FP8, KernelFormat, dequantize, matmul, multiplies_fp8

WIDTH_IN, WIDTH_OUT = 24, 10
FORMATS = [
    KernelFormat("int8"),
    KernelFormat("int8", offset=True),
    KernelFormat("int8", group=8),
    KernelFormat("int4"),
    KernelFormat("int4", group=8),
    KernelFormat("int4", group=8, offset=True),
    KernelFormat(FP8),
    KernelFormat(FP8, group=12),
]


def make(fmt: KernelFormat, outer: tuple[int, ...] = ()) -> tuple[np.ndarray, Any, Any, Any]:
    """Values computed in float64 by loops over groups, and kernel, scale and offset."""
    rng = np.random.default_rng(1)
    low, high = {"int8": (-128, 128), "int4": (-8, 8), FP8: (-300, 300)}[fmt.storage]
    stored = rng.integers(low, high, (*outer, WIDTH_IN, WIDTH_OUT)).astype(jnp.dtype(fmt.storage))
    groups = fmt.groups(WIDTH_IN)
    scale, offset = rng.standard_normal((2, *outer, groups, WIDTH_OUT)).astype(np.float32)
    values = stored.astype(np.float64)
    for g in range(groups):
        rows = slice(g * WIDTH_IN // groups, (g + 1) * WIDTH_IN // groups)
        values[..., rows, :] *= scale[..., g : g + 1, :]
        if fmt.offset:
            values[..., rows, :] += offset[..., g : g + 1, :]
    return values, jnp.asarray(stored), jnp.asarray(scale), jnp.asarray(offset) if fmt.offset else None


def inputs(rows: int) -> np.ndarray:
    x = np.random.default_rng(2).standard_normal((rows, WIDTH_IN)).astype(np.float32)
    x[-1, 0] = 100.0  # an outlier, as models have them
    return x


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_values(fmt: KernelFormat) -> None:
    for outer in ((), (3,)):
        values, *arrays = make(fmt, outer)
        np.testing.assert_allclose(dequantize(*arrays, fmt, jnp.float32), values, rtol=2e-7, atol=1e-5)
    rounded = dequantize(*arrays, fmt, jnp.bfloat16)
    assert rounded.dtype == jnp.bfloat16
    exact = dequantize(*arrays, fmt, jnp.float32).astype(jnp.bfloat16)  # rounded once
    np.testing.assert_array_equal(rounded, exact)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_product_is_that_with_the_values(fmt: KernelFormat, rows: int) -> None:
    values, *arrays = make(fmt)
    x = inputs(rows)
    expected = x.astype(np.float64) @ values
    largest = np.abs(x) @ np.abs(values)  # what rounding is relative to
    # On a CPU the inputs are cut 23 bits below the largest of their row.
    cut = 2.0**-23 * np.abs(x).max(1, keepdims=True) * np.abs(values).sum(0)
    y = matmul(jnp.asarray(x), *arrays, fmt)
    assert y.dtype == jnp.float32 and np.all(np.abs(y - expected) < 1e-6 * largest + cut)
    y = matmul(jnp.asarray(x, jnp.bfloat16), *arrays, fmt, dtype=jnp.float32)
    assert y.dtype == jnp.float32 and np.all(np.abs(y - expected) < 1e-2 * largest)
    assert matmul(jnp.asarray(x, jnp.bfloat16), *arrays, fmt).dtype == jnp.bfloat16


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.group], ids=str)
def test_partial_sums_of_a_gpu(fmt: KernelFormat, rows: int) -> None:
    values, *arrays = make(fmt)
    x = inputs(rows)
    y = quantized._partial_sums(jnp.asarray(x), *arrays)
    assert np.all(np.abs(y - x.astype(np.float64) @ values) < 1e-6 * (np.abs(x) @ np.abs(values)))


def test_what_is_not_finite_stays_visible_and_rows_are_apart() -> None:
    _, *arrays = make(FORMATS[0])
    x = inputs(4)
    alone = matmul(jnp.asarray(x), *arrays, FORMATS[0])
    x[1, 2], x[2, 3], x[3] = np.nan, np.inf, 0
    y = np.asarray(matmul(jnp.asarray(x), *arrays, FORMATS[0]))
    assert not np.isfinite(y[1:3]).any()
    np.testing.assert_array_equal(y[0], alone[0])
    np.testing.assert_array_equal(matmul(jnp.asarray(x[:1]), *arrays, FORMATS[0])[0], alone[0])
    np.testing.assert_array_equal(y[3], 0)


def test_float8_activations() -> None:
    fmt = KernelFormat(FP8, activations=FP8)
    values, *arrays = make(KernelFormat(FP8))
    x = inputs(3)
    x[1] = 0
    step = np.abs(x).max(1, keepdims=True) / 448
    step[1] = 1
    rounded = (x / step).astype(jnp.dtype(FP8)).astype(np.float64) * step
    y = matmul(jnp.asarray(x), *arrays, fmt)
    assert np.all(np.abs(y - rounded @ values) <= 1e-6 * (np.abs(rounded) @ np.abs(values)))
    assert not np.allclose(y, x @ values, rtol=1e-3)  # the inputs were rounded


def test_which_devices_multiply_float8() -> None:
    def device(platform: str, capability: str | None = None) -> Any:
        return SimpleNamespace(platform=platform, compute_capability=capability)

    assert not multiplies_fp8(jax.devices("cpu")[0])
    found = {
        c: multiplies_fp8(device("gpu", c)) for c in ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "gfx942")
    }
    assert [c for c, yes in found.items() if yes] == ["8.9", "9.0", "10.0", "12.0"]


def test_sizes() -> None:
    assert KernelFormat("int4", group=64, offset=True).nbytes(128, 3) == 128 * 3 // 2 + 2 * 2 * 3 * 4
    assert KernelFormat("int8").nbytes(128, 3) == 128 * 3 + 3 * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": "int3"}, "'int3' is not one of int8"),
        ({"storage": "int8", "group": -1}, "must be 0 .all rows. or a number"),
        ({"storage": "int8", "activations": "int8"}, "activations 'int8' are not supported"),
        ({"storage": FP8, "offset": True}, "offsets go with integers"),
        ({"storage": "int8", "activations": FP8}, "go with float8_e4m3fn kernels"),
        ({"storage": FP8, "group": 128, "activations": FP8}, "one scale per output column"),
    ],
)
def test_formats_without_meaning(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KernelFormat(**options)


def test_arrays_that_are_not_of_the_format() -> None:
    fmt = KernelFormat("int8", group=8)
    _, kernel, scale, _ = make(fmt)
    x = jnp.asarray(inputs(2))
    with pytest.raises(ValueError, match=r"24 input rows are not made of groups of 7"):
        matmul(x, kernel, scale, None, KernelFormat("int8", group=7))
    with pytest.raises(ValueError, match=r"scales \(3, 10\), not int8 and \(2, 10\)"):
        matmul(x, kernel, scale[:2], None, fmt)
    with pytest.raises(ValueError, match="dtype int4"):
        matmul(x, kernel, scale, None, dataclasses.replace(fmt, storage="int4"))
    with pytest.raises(ValueError, match=r"offsets \(3, 10\), not None"):
        matmul(x, kernel, scale, None, dataclasses.replace(fmt, offset=True))
    with pytest.raises(ValueError, match=r"needs a kernel \[I, O\]"):
        matmul(x, kernel[None], scale[None], None, fmt)

"""Kernels kept in GGUF's blocks have the values that GGUF's library gives."""

from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.models.quantized import dequantize
from jaxsched.weights import open_checkpoint
from jaxsched.weights.gguf_blocks import FORMATS, read_blocks
from toy_gguf import write_toy_gguf
from toys import write_toy


def blocks_of(kind: str, values: np.ndarray) -> np.ndarray:
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


def values_of(kind: str, rows: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", FORMATS)
def test_values_are_those_of_the_library(kind: str) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((37, 96)).astype(np.float32) * 10.0 ** rng.integers(-3, 3, (37, 1))
    values[5, :32], values[6] = 0, np.abs(values[6])  # a block of zeros; no sign change
    rows = blocks_of(kind, values.astype(np.float32))
    stored, scale, offset = read_blocks(kind, rows)
    assert (stored.shape, stored.dtype.name, scale.shape) == ((96, 37), FORMATS[kind].storage, (3, 37))
    assert scale.dtype == np.float32 and (offset is not None) == FORMATS[kind].offset
    arrays = [None if a is None else jnp.asarray(a) for a in (stored, scale, offset)]
    found = dequantize(*arrays, FORMATS[kind], jnp.float32)
    np.testing.assert_array_equal(found, values_of(kind, rows).T)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_bit_pattern(kind: str) -> None:
    """Random bytes, but for the scales: all numbers, signs and fifth bits, in the library's order."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (8, blocks_of(kind, np.ones((1, 64), np.float32)).shape[1]), dtype=np.uint8)
    head = np.array([0.75, -0.5], "<f2").view(np.uint8)[: 4 if FORMATS[kind].offset else 2]
    rows.reshape(8, 2, -1)[..., : len(head)] = head
    stored, scale, offset = read_blocks(kind, rows)
    values = stored.astype(np.float32) * np.repeat(scale, 32, axis=0)
    if offset is not None:
        values += np.repeat(offset, 32, axis=0)
    np.testing.assert_array_equal(values, values_of(kind, rows).T)


def test_what_is_refused() -> None:
    rows = np.zeros((2, 34), np.uint8)
    with pytest.raises(ValueError, match=r"Q4_K cannot be kept quantised; these can: Q8_0, Q4_0"):
        read_blocks("Q4_K", rows)
    with pytest.raises(ValueError, match=r"uint8 \(2, 33\) is not rows of Q8_0 blocks of 34 bytes"):
        read_blocks("Q8_0", rows[:, 1:])


@pytest.mark.parametrize("kind", FORMATS)
def test_matrices_of_a_file(tmp_path: Path, kind: str) -> None:
    """Also those whose rows the converter has permuted."""
    folder = write_toy(tmp_path / "toy", num_layers=1)
    source = open_checkpoint(write_toy_gguf(tmp_path / "toy.gguf", folder, quantize=kind)).source
    formats = source.formats()
    matrices = {name.removesuffix(".weight") for name, shape in source.shapes().items() if len(shape) == 2}
    assert set(formats) == matrices and set(formats.values()) == {FORMATS[kind]}
    for name in formats:
        stored, scale, offset = source.read_quantized(name)
        values = stored.astype(np.float32) * np.repeat(scale, 32, axis=0)
        if offset is not None:
            values += np.repeat(offset, 32, axis=0)
        np.testing.assert_array_equal(values, source.read(name + ".weight").T)

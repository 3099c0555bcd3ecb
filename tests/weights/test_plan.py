"""Kernels quantised when they are loaded: which, in what format, and that the model still computes the same."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from families import write_family_toy
from harness import dense_forward
from jaxsched import EngineConfig
from jaxsched.config import QUANTIZATIONS
from jaxsched.models.parts import Kernel
from jaxsched.models.quantized import dequantize
from jaxsched.weights import CheckpointError, load_model, open_checkpoint
from jaxsched.weights import plan as plans
from toy_gguf import write_toy_gguf
from toys import write_toy

TOKENS = np.arange(20, dtype=np.int32)


def values(graph, params):
    """The same parameters with every kernel dequantised."""
    model = nnx.merge(graph, params)
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Kernel) and module.fmt is not None:
            kernel, scale, offset = module.arrays()
            module.kernel = nnx.Param(dequantize(kernel, scale, offset, module.fmt, jnp.float32))
            module.fmt = module.scale = module.offset = None
    return nnx.split(model)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["base", "qwen2_moe", "phi3"])
def test_a_quantised_model_computes_what_its_values_say(name, quantization, tmp_path):
    path = write_toy(tmp_path) if name == "base" else write_family_toy(tmp_path, name)
    checkpoint = open_checkpoint(path)
    graph, params = load_model(checkpoint, jnp.dtype("float32"), quantization=quantization)
    stored = {x.dtype.name for x in jax.tree.leaves(params)}
    assert plans.METHODS[quantization].storage in stored
    _, exact = dense_forward(*values(graph, params), TOKENS)
    _, logits = dense_forward(graph, params, TOKENS)
    np.testing.assert_allclose(logits, exact, atol=2e-4)
    _, full = dense_forward(*load_model(checkpoint, jnp.dtype("float32")), TOKENS)
    share = np.std(logits - full) / np.std(
        full
    )  # random weights: rounding errors add up, nothing averages out
    assert 1e-3 < share < {"int8": 0.1, "fp8": 0.4, "int4": 0.8}[quantization]


def test_groups_are_smaller_where_they_must_be(tmp_path):
    checkpoint = open_checkpoint(write_toy(tmp_path, intermediate_size=96, num_layers=1))
    _, params = load_model(checkpoint, jnp.dtype("float32"), quantization="int4")
    mlp = params["layers"][0]["mlp"]
    assert [mlp[k]["scale"].shape[0] for k in ("gate_up", "down")] == [1, 3]  # 64 rows in 64s, 96 in 32s
    checkpoint = open_checkpoint(write_toy(tmp_path / "odd", intermediate_size=100, num_layers=1))
    with pytest.raises(
        CheckpointError, match=r"mlp.down has 100 input rows, which no groups of 64, 32 or 16 fill"
    ):
        load_model(checkpoint, jnp.dtype("float32"), quantization="int4")


def test_what_cannot_be_is_refused(tmp_path):
    checkpoint = open_checkpoint(write_toy(tmp_path))
    with pytest.raises(CheckpointError, match="no kernels in a format that can be kept; drop it"):
        load_model(checkpoint, jnp.dtype("float32"), quantization="keep")
    with pytest.raises(ValueError, match="quantization is 'int3'; it must be None or one of int8, int4, fp8"):
        EngineConfig(quantization="int3")
    with pytest.raises(ValueError, match="quantization 'int3' is unknown"):
        load_model(checkpoint, jnp.dtype("float32"), quantization="int3")
    assert QUANTIZATIONS == plans.QUANTIZATIONS


# -- kernels that were quantised before ------------------------------------------------------------------------------


def prequantize(folder, kind):
    """Rewrites a toy's layers as a compressed-tensors (int4, groups of 32) or fp8 checkpoint."""
    tensors, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    result = {}
    for name, tensor in tensors.items():
        if "_proj.weight" not in name:
            result[name] = tensor
        elif kind == "fp8":
            scale = np.float32(np.abs(tensor).max() / 448)
            result[name] = (tensor / scale).astype(ml_dtypes.float8_e4m3fn)
            result[name + "_scale"] = np.array(scale, np.float32)
        else:
            groups = tensor.reshape(tensor.shape[0], -1, 32)
            scale = np.abs(groups).max(-1) / 7
            digits = np.rint(groups / scale[..., None]).reshape(tensor.shape).astype(np.int64) + 8
            shifts = 4 * np.arange(8)
            words = np.bitwise_or.reduce(digits.reshape(tensor.shape[0], -1, 8) << shifts, axis=-1)
            result[name + "_packed"] = words.astype(np.uint32).view(np.int32)
            result[name + "_scale"] = scale.astype(np.float32)
            result[name + "_shape"] = np.array(tensor.shape, np.int64)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    config["quantization_config"] = {"quant_method": "fp8"} if kind == "fp8" else {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(result, folder / "model.safetensors")
    return open_checkpoint(folder)


@pytest.mark.parametrize("kind", ["fp8", "compressed-tensors"])
def test_a_quantised_checkpoint_stays_as_it_is(kind, tmp_path):
    checkpoint = prequantize(write_toy(tmp_path, num_layers=1), kind)
    graph, params = load_model(checkpoint, jnp.dtype("float32"))
    stored = {x.dtype.name for x in jax.tree.leaves(params["layers"])}
    assert stored == {"float32", "float8_e4m3fn" if kind == "fp8" else "int4"}
    _, logits = dense_forward(graph, params, TOKENS)
    plain = load_model(checkpoint, jnp.dtype("float32"), quantization="dequantize")
    assert {x.dtype.name for x in jax.tree.leaves(plain[1])} == {"float32"}
    np.testing.assert_allclose(logits, dense_forward(*plain, TOKENS)[1], atol=2e-4)
    with pytest.raises(CheckpointError, match="'int8' was asked for a checkpoint that is quantised already"):
        load_model(checkpoint, jnp.dtype("float32"), quantization="int8")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_blocks_can_be_kept(kind, tmp_path):
    pytest.importorskip("gguf")
    folder = write_toy(tmp_path, num_layers=1)
    checkpoint = open_checkpoint(write_toy_gguf(tmp_path / "toy.gguf", folder, quantize=kind))
    graph, params = load_model(checkpoint, jnp.dtype("float32"), quantization="keep")
    plain = load_model(checkpoint, jnp.dtype("float32"))
    assert {x.dtype.name for x in jax.tree.leaves(plain[1])} == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {
        "float32",
        "int8" if kind == "Q8_0" else "int4",
    }
    np.testing.assert_allclose(
        dense_forward(graph, params, TOKENS)[1], dense_forward(*plain, TOKENS)[1], atol=2e-4
    )

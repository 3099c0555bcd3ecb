"""Kernels quantised when they are loaded: which, in what format, and that the model still computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from families import write_family_toy
from harness import dense_forward
from jaxsched import EngineConfig
from jaxsched.config import QUANTIZATIONS
from jaxsched.models.quantized import dequantize
from jaxsched.weights import CheckpointError, load_model, open_checkpoint
from jaxsched.weights import plan as plans
from toys import write_toy

TOKENS = np.arange(20, dtype=np.int32)


def values(graph, params):
    """The same parameters with every kernel dequantised."""
    from flax import nnx

    from jaxsched.models.parts import Kernel

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

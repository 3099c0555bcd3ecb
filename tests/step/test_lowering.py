"""The programs lower for CUDA on a machine without a GPU: no primitive that the platform lacks, no host callback."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxsched.models import Decoder, ModelConfig
from jaxsched.step import Chunks, Features, decode_steps, init_controls, init_state, prefill_chunk
from jaxsched.step.sampling import _searched_scores

RICH = [
    Features("full", controls=True, logprobs=20),
    Features("greedy", controls=True, logprobs=5),
    Features("full", controls=True, logprobs=20, prompt="both"),
]
CONFIG = ModelConfig("LlamaForCausalLM", 300, 64, 2, 4, 2, 16, 128, 256)


@pytest.fixture(autouse=True, scope="module")
def h200():
    """What a GPU's program consists of depends on the GPU: kernels are for what is known to take them."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", None, "gpu"))):
        yield


@pytest.fixture(scope="module")
def shapes():
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, jnp.dtype("bfloat16"))))
    state = jax.eval_shape(lambda: init_state(CONFIG, num_slots=8, num_pages=64, dtype="bfloat16"))
    return graph, nnx.as_pure(params), state


@pytest.mark.parametrize("sampling", ["greedy", "full"])
def test_decode_lowers_for_cuda(shapes, sampling):
    traced = decode_steps.trace(*shapes, steps=4, slots=8, features=Features(sampling))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "callback" not in text and "triton" in text
    assert not dynamic_cases(text), "a conditional would make the GPU wait for the host in each step"


def dynamic_cases(text: str) -> list[str]:
    """Operands of conditionals that are not known when the program is compiled (choices of platform are)."""
    known = set(re.findall(r"(%\w+) = stablehlo.constant", text))
    cases = re.findall(r'(%\w+) = "stablehlo.(?:case|if)"\((%\w+)\)', text)
    known |= {result for result, operand in cases if operand in known}
    return [operand for _, operand in cases if operand not in known]


def test_auto_decides_on_the_device(shapes):
    traced = decode_steps.trace(*shapes, steps=1, slots=8, features=Features("auto"))
    assert dynamic_cases(traced.lower(lowering_platforms=("cpu",)).as_text())


def test_a_mixed_step_lowers_for_cuda(shapes):
    traced = prefill_chunk.trace(*shapes, Chunks.empty(1, 32, 8), slots=8, features=Features("full"))
    assert "callback" not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("sampling", ["greedy", "full", "auto"])
def test_no_step_sorts_the_vocabulary(shapes, sampling):
    traced = decode_steps.trace(*shapes, steps=1, slots=8, features=Features(sampling))
    for platform in ("cpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo.sort" not in text and "chlo.top_k" not in text


@pytest.mark.parametrize("features", RICH, ids=str)
def test_features_lower_for_cuda(features):
    """Penalties, constraints and log-probabilities: no host callback, no conditional, and nothing sorts a whole row."""
    config = dataclasses.replace(CONFIG, vocab_size=32768)
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, jnp.dtype("bfloat16"))))
    state = jax.eval_shape(
        lambda: dataclasses.replace(
            init_state(config, num_slots=8, num_pages=64, dtype="bfloat16"),
            controls=init_controls(8, 32768, (2,)),
        )
    )
    if features.prompt:
        traced = prefill_chunk.trace(
            graph, nnx.as_pure(params), state, Chunks.empty(1, 32, 8), slots=8, features=features
        )
    else:
        traced = decode_steps.trace(graph, nnx.as_pure(params), state, steps=2, slots=8, features=features)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "callback" not in text and not dynamic_cases(text)
    operands = sorted_shapes(text)
    assert operands and not [shape for shape in operands if "32768" in shape.split("x")]


def sorted_shapes(text: str) -> list[str]:
    """Shapes, as "8x256", of what a program sorts or takes the top of."""
    found = re.findall(r"chlo\.top_k\([^:]*: tensor<([\dx]+)x\w+>", text)
    return found + re.findall(r'"stablehlo\.sort"\(.*?\}\) : \(tensor<([\dx]+)x\w+>', text, re.DOTALL)


def test_sorting_would_be_found():
    wide = jax.ShapeDtypeStruct((8, 32768), jnp.float32)
    for sorts in (jnp.sort, lambda x: jax.lax.top_k(x, 5)):
        assert "8x32768" in sorted_shapes(
            jax.jit(sorts).trace(wide).lower(lowering_platforms=("cuda",)).as_text()
        )


def test_the_searches_pass_over_the_vocabulary_few_times_on_a_gpu(shapes):
    """Top-k: 32 bits, 4 per pass; top-p: 30 bits, 5 per pass. The loops' trip counts are constants in the program."""
    rows = shapes[2].slots.sampling
    logits = jax.ShapeDtypeStruct((8, CONFIG.vocab_size), jnp.float32)
    searches = jax.jit(lambda logits, rows: _searched_scores(logits, rows, False))
    text = searches.trace(logits, rows).lower(lowering_platforms=("cuda",)).as_text()
    assert "dense<8> : tensor<i32>" in text and "dense<6> : tensor<i32>" in text
    assert "dense<32> : tensor<i32>" not in text and "dense<30> : tensor<i32>" not in text

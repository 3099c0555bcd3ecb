"""The programs lower for CUDA on a machine without a GPU: no primitive that the platform lacks, no host callback."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxsched.models import Decoder, ModelConfig
from jaxsched.step import Chunks, Features, decode_steps, init_state, prefill_chunk
from jaxsched.step.sampling import filtered_scores

CONFIG = ModelConfig("LlamaForCausalLM", 300, 64, 2, 4, 2, 16, 128, 256)


@pytest.fixture(scope="module")
def shapes():
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(CONFIG, jnp.dtype("bfloat16"))))
    state = jax.eval_shape(lambda: init_state(CONFIG, num_slots=8, num_pages=64, dtype="bfloat16"))
    return graph, nnx.as_pure(params), state


@pytest.mark.parametrize("sampling", ["greedy", "full"])
def test_decode_lowers_for_cuda(shapes, sampling):
    traced = decode_steps.trace(*shapes, steps=4, slots=8, features=Features(sampling))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "callback" not in text
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


def test_the_search_passes_over_the_vocabulary_eight_times_on_a_gpu(shapes):
    """4 bits per pass. The loop's trip count is a constant in the program."""
    rows = shapes[2].slots.sampling
    logits = jax.ShapeDtypeStruct((8, CONFIG.vocab_size), jnp.float32)
    text = jax.jit(filtered_scores).trace(logits, rows).lower(lowering_platforms=("cuda",)).as_text()
    assert "dense<8> : tensor<i32>" in text and "dense<32> : tensor<i32>" not in text

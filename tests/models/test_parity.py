"""The decoder against what transformers computes for the same checkpoints (tests/goldens/toys.npz)."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from harness import GREEDY, admit, dense_forward, put_chunk
from jaxsched.pallas_kernels import paged_prefill, write_kv
from jaxsched.step import Features, RoundInputs, RoundShape, init_state, run_round
from toys import TOYS

GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "toys.npz")
# Hidden states are of size 1 to 10 and logits of size 3: a wrong formula is off by far more, another order of the
# float32 sums by less.
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", TOYS)
def test_hidden_states_and_logits(name, toy):
    model = toy(name)
    hidden, logits = dense_forward(model.graph, model.params, GOLDENS[f"{name}/ids_0"])
    np.testing.assert_allclose(hidden, GOLDENS[f"{name}/hidden"], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(logits, GOLDENS[f"{name}/logits"], atol=TOLERANCE, rtol=0)
    _, logits = dense_forward(model.graph, model.params, GOLDENS[f"{name}/ids_2"])
    np.testing.assert_allclose(logits[-1], GOLDENS[f"{name}/last_logits_2"], atol=TOLERANCE, rtol=0)


def paged_attend(context, q, k, v, pages, options):
    table, position, page, offset = context
    pages = tuple(write_kv(old, new, page, offset) for old, new in zip(pages, (k, v), strict=True))
    slot = jnp.zeros_like(position)
    return paged_prefill(q, *pages, table, slot, position, **dataclasses.asdict(options)), pages


@pytest.mark.parametrize("name", TOYS)
def test_hidden_states_and_logits_in_chunks(name, toy):
    """Two chunks of 12 tokens over scattered pages of 4."""
    model, ids = toy(name), GOLDENS[f"{name}/ids_0"]
    c, page_size, chunk = model.config, 4, 12
    table = np.array([[7, 2, 9, 0, 5, 3]], np.int32)
    empty = jnp.zeros((10, page_size, c.num_kv_heads, c.head_dim))

    @jax.jit
    def forward(params, tokens, position, pages):
        decoder, trace = nnx.merge(model.graph, params), []
        context = (table, position, jnp.asarray(table)[0, position // page_size], position % page_size)
        hidden, pages = decoder(tokens, position, paged_attend, context, pages, trace)
        return jnp.stack(trace), decoder.logits(hidden), pages

    pages, parts = [(empty, empty)] * c.num_layers, []
    for start in range(0, 24, chunk):
        position = np.arange(start, start + chunk, dtype=np.int32)
        *part, pages = forward(model.params, ids[start : start + chunk], position, pages)
        parts.append(part)
    hidden, logits = (np.concatenate(p, axis=-2) for p in zip(*parts, strict=True))
    np.testing.assert_allclose(hidden, GOLDENS[f"{name}/hidden"], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(logits, GOLDENS[f"{name}/logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["base", "gqa3", "yarn"])
def test_greedy_tokens_of_one_round(name, toy):
    """Three prompts in one round: two end in the first mixed step, the third in the second."""
    model = toy(name)
    prompts = [GOLDENS[f"{name}/ids_{i}"].tolist() for i in range(3)]
    state = init_state(model.config, num_slots=3, num_pages=40, page_size=16, pages_per_seq=8)
    inputs = RoundInputs.empty(state, mixed_steps=2, chunk_tokens=64)
    free = list(np.random.RandomState(0).permutation(40))
    for slot in range(3):
        admit(inputs, slot, [free.pop() for _ in range(8)], max_tokens=32, params=GREEDY)
    for slot in (0, 1):
        put_chunk(inputs, 0, slot, prompts[slot], 0, ends=True)
    room = 64 - len(prompts[0]) - len(prompts[1])
    put_chunk(inputs, 0, 2, prompts[2][:room], 0, ends=False)
    put_chunk(inputs, 1, 2, prompts[2][room:], room, ends=True)
    shape = RoundShape(steps=33, mixed_steps=2, chunk_tokens=64, slots=3)
    _, out = run_round(
        model.graph, model.params, state, inputs, shape=shape, features=Features(sampling="greedy")
    )
    tokens, valid = np.asarray(out.tokens), np.asarray(out.valid)
    for slot in range(3):
        assert tokens[valid[:, slot], slot].tolist() == GOLDENS[f"{name}/greedy_{slot}"].tolist()
    assert [np.flatnonzero(valid[:, slot])[0] for slot in range(3)] == [0, 0, 1]

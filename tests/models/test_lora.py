"""Adapters of every kind of family against checkpoints into which they were merged."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from families import FAMILIES
from harness import dense_attend, dense_forward, load, random_prompt
from jaxsched.engine.adapters import Adapters
from jaxsched.weights import adapter_targets, load_model, read_adapter
from lora import ALL, merged, write_lora

FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
TARGETS = {
    "phi3": FUSED,
    "phi3_short": FUSED,
    "phi3_plain": FUSED,
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "starcoder2": ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"],
    "qwen2_moe": ["q_proj", "v_proj", "shared_expert.gate_proj", "shared_expert.down_proj"],
    **dict.fromkeys(["mixtral", "qwen3_moe", "olmoe"], ALL[:4]),
}
TARGETS["gpt_neox_serial"] = TARGETS["gpt_neox"]
OPTIONS = {
    "rank_pattern": {"0.self_attn.k_proj": 2},
    "alpha_pattern": {"o_proj": 3},
    "layers_to_transform": [1],
}


@partial(jax.jit, static_argnames=("graph",))
def forward(graph, params, tokens, adapter):
    """Logits ``[T, V]`` of a sequence that goes through ``adapter``."""
    at = jnp.arange(tokens.shape[0])
    decoder = nnx.merge(graph, params)
    hidden, _ = decoder(tokens, at, dense_attend, at, [None] * len(decoder.layers), adapter=adapter + 0 * at)
    return decoder.logits(hidden)


class Stub:
    """As much of an engine as adapters need."""

    def __init__(self, params):
        self.executor, self.requests = self, self
        self.params, self.by_id = params, {}


def check(model, tmp_path, loras):
    """Adapters 1, 2, ... together, each against the checkpoint that it was merged into; and none."""
    targets = adapter_targets(model.checkpoint, len(loras), 4, "float32")
    graph, params = load_model(model.checkpoint, jnp.dtype("float32"), adapters=targets.shapes)
    pool = Adapters(Stub(params), targets)
    params = pool._engine.params
    for place, lora in enumerate(loras, 1):
        params = pool._written(params, read_adapter(lora, targets), place)
    ids = jnp.array(random_prompt(np.random.default_rng(0), 16))
    want = [
        model.params,
        *(load(merged(tmp_path / f"merged{i}", model.path, x)).params for i, x in enumerate(loras)),
    ]
    logits = []
    for adapter, merged_params in enumerate(want):
        got = forward(graph, params, ids, adapter)
        logits.append(dense_forward(model.graph, merged_params, ids)[1])
        np.testing.assert_allclose(got, logits[-1], atol=1e-4, rtol=0)
    for adapter in range(1, len(want)):  # they are not all the same
        assert np.abs(logits[adapter] - logits[adapter - 1]).max() > 0.5


def test_llama(toy, tmp_path):
    model = toy("base")
    loras = [
        write_lora(tmp_path / "a", model.path, seed=1),
        write_lora(tmp_path / "b", model.path, seed=2, r=3, use_rslora=True, targets=ALL[:4], **OPTIONS),
    ]
    check(model, tmp_path, loras)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("phi3", "gpt_neox", "gpt2", "qwen2") else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_families(name, family_toy, tmp_path):
    """Fused tensors, rows in another order for partial rotation, tensors stored the other way round."""
    model = family_toy(name)
    options = {"targets": TARGETS.get(name, ALL), "fan_in_fan_out": name == "gpt2"}
    if name in ("qwen2_moe",):
        options["layers_to_transform"] = [1, 2]
    loras = [write_lora(tmp_path / f"lora{seed}", model.path, seed=seed, **options) for seed in (1, 2)]
    check(model, tmp_path, loras)


def test_a_row_does_not_see_the_adapters_of_others(toy):
    """Not even what is infinite in them."""
    model = toy("base")
    targets = adapter_targets(model.checkpoint, 2, 4, "float32")
    graph, params = load_model(model.checkpoint, jnp.dtype("float32"), adapters=targets.shapes)
    ids = jnp.array(random_prompt(np.random.default_rng(0), 16))
    broken = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.full_like(leaf, jnp.inf) if "lora_a" in str(path) else leaf, params
    )
    np.testing.assert_array_equal(forward(graph, params, ids, 0), forward(graph, broken, ids, 0))
    assert not np.isfinite(forward(graph, broken, ids, 1)).all()

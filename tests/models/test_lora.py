"""Adapters of every kind of family against checkpoints into which they were merged."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from families import FAMILIES
from harness import dense_attend, dense_forward, load, random_prompt
from jaxsched.engine.adapters import Adapters
from jaxsched.step import init_state
from jaxsched.weights import adapter_targets, load_model, read_adapter
from lora import ALL, CONV, FUSED, NEOX, PATTERNS, PEFT_CASES, merged, write_lora
from toys import TOYS

GOLDENS = Path(__file__).parents[1] / "goldens" / "lora.npz"
TARGETS = {
    **dict.fromkeys(["phi3", "phi3_short", "phi3_plain"], FUSED),
    **dict.fromkeys(["gpt_neox", "gpt_neox_serial"], NEOX),
    **dict.fromkeys(["mixtral", "qwen3_moe", "olmoe"], ALL[:4]),
    "gpt2": CONV,
    "starcoder2": ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"],
    "qwen2_moe": ["q_proj", "v_proj", "shared_expert.gate_proj", "shared_expert.down_proj"],
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


def load_with(model, loras, **options):
    """The model with room for two adapters of rank 4, and these in it."""
    targets = adapter_targets(model.checkpoint, 2, 4, "float32")
    graph, params = load_model(model.checkpoint, jnp.dtype("float32"), adapters=targets.shapes, **options)
    pool = Adapters(Stub(params), targets)
    for place, lora in enumerate(loras, 1):
        params = pool._written(params, read_adapter(lora, targets), place)
    return graph, params


def check(model, tmp_path, loras):
    """Two adapters together, each against the checkpoint that it was merged into; and none."""
    graph, params = load_with(model, loras)
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
        write_lora(
            tmp_path / "b",
            model.path,
            seed=2,
            r=3,
            use_rslora=True,
            targets=ALL[:4],
            layers_to_transform=[1],
            **PATTERNS,
        ),
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


@pytest.mark.parametrize("name", PEFT_CASES)
def test_what_peft_computes(name, toy, family_toy, tmp_path):
    """Names, patterns, layers and scales as PEFT understands them."""
    goldens = np.load(GOLDENS)
    model = toy(name) if name in TOYS else family_toy(name)
    lora = write_lora(tmp_path, model.path, **PEFT_CASES[name])
    graph, params = load_with(model, [lora])
    ids = jnp.array(goldens[f"{name}/ids"])
    np.testing.assert_allclose(forward(graph, params, ids, 1), goldens[f"{name}/logits"], atol=1e-4, rtol=0)
    assert np.abs(forward(graph, params, ids, 0) - goldens[f"{name}/logits"]).max() > 0.5


def test_beside_a_quantised_kernel(toy, tmp_path):
    """What an adapter adds is exact, whatever the kernel is."""
    model = toy("base")
    lora = write_lora(tmp_path / "lora", model.path, seed=1)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, model.config.hidden_size)), jnp.float32)
    kernels = []
    for path in (model.path, merged(tmp_path / "merged", model.path, lora)):
        kernels.append(nnx.merge(model.graph, load(path).params).layers[1].attention.qkv(x))
    decoder = nnx.merge(*load_with(model, [lora], quantization="int8"))
    qkv = decoder.layers[1].attention.qkv
    assert qkv.fmt is not None
    added = qkv(x, jnp.array([1, 1, 2, 0])) - qkv(x)
    np.testing.assert_allclose(added[:2], (kernels[1] - kernels[0])[:2], atol=1e-4)
    np.testing.assert_array_equal(added[2:], 0)


def test_without_room_nothing_changes(toy):
    """Neither a parameter nor a column in the slot table, so no argument of a program."""
    model = toy("base")
    assert not [p for p, _ in jax.tree_util.tree_leaves_with_path(model.params) if "lora" in str(p)]
    leaves = jax.tree.leaves(init_state(model.config, num_slots=2, num_pages=4))
    assert (
        len(jax.tree.leaves(init_state(model.config, num_slots=2, num_pages=4, adapters=True)))
        == len(leaves) + 1
    )


def test_a_row_does_not_see_the_adapters_of_others(toy):
    """Not even what is infinite in them."""
    model = toy("base")
    graph, params = load_with(model, [])
    ids = jnp.array(random_prompt(np.random.default_rng(0), 16))
    broken = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.full_like(leaf, jnp.inf) if "lora_a" in str(path) else leaf, params
    )
    np.testing.assert_array_equal(forward(graph, params, ids, 0), forward(graph, broken, ids, 0))
    assert not np.isfinite(forward(graph, broken, ids, 1)).all()

"""Every number and switch of every family's config.json changes what comes out, or is refused, or is known not to."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from families import FAMILIES, FAMILY_GOLDENS, MAX_LEN, write_family_toy
from harness import dense_attend
from jaxsched.models import Decoder, experts, family_of
from jaxsched.models.fields import NEUTRAL
from jaxsched.pallas_kernels import grouped_matmul
from toy_gguf import tensors_of
from toys import TOYS, write_toy

TOKENS = np.random.RandomState(3).randint(0, 256, 64).astype(np.int32)
LLAMAS = ("base", "linear", "llama3", "yarn", "all_biases")

# Fields of a toy that another of its fields switches off; the family's other toys have them on.
OFF: dict[str, set[str]] = {
    "qwen2": {"sliding_window", "max_window_layers", "use_sliding_window"},
    "qwen3": {"max_window_layers", "use_sliding_window"},
    "phi3_plain": {"original_max_position_embeddings"},
    "phi3": {"short_factor"},
    "phi3_short": {"long_factor"},
}
HF = json.loads(
    FAMILY_GOLDENS.read_text()
)  # the same configurations with all defaults, as transformers writes them
KINDS = ["full_attention", "sliding_attention"]
LIMIT = {"max_position_embeddings", "n_positions"}  # how long sequences may be; not part of the formula


def leaves(config: dict[str, Any]) -> dict[str, Any]:
    """Dotted path -> value of what can be changed: numbers, switches, and lists of them."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in NEUTRAL or key.startswith("_"):
            continue
        if isinstance(value, dict):
            found |= {f"{key}.{inner}": v for inner, v in leaves(value).items()}
        elif isinstance(value, bool | int | float | list):
            found[key] = value
    return found


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [changed(value[0]), *value[1:]] if value else [1]
    if isinstance(value, str):
        return KINDS[1 - KINDS.index(value)]
    if isinstance(value, int):
        return value + 1 if value % 2 or value < 4 else value // 2
    return value * 1.5 if value < 0.5 or value > 1 else value * 0.6


def with_value(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {**config, head: with_value(config[head], rest, value) if rest else value}


def outcome(name: str, config: dict[str, Any], tensors: Any) -> np.ndarray | str:
    """Logits of the toy's weights under this configuration, or why there are none."""
    try:
        family = family_of(config)
        model = family.read_config(config).at_length(MAX_LEN.get(name))
        table = family.weight_table(model)
    except (ValueError, TypeError, ArithmeticError) as error:
        return f"refused: {error}"
    for rule in table.values():
        for source, shape in zip(rule.sources, rule.shapes, strict=True):
            if source not in tensors or tensors[source].shape != shape:
                return f"the loader refuses {source}"
    unused = tensors.keys() - {source for rule in table.values() for source in rule.sources}
    if unused:
        return f"the loader refuses {min(unused)}"
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(model)))
    built = {path: rule.build([tensors[s] for s in rule.sources]) for path, rule in table.items()}
    params = jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(built[jax.tree_util.keystr(path, simple=True, separator=".")]),
        nnx.as_pure(state),
    )
    decoder, at = nnx.merge(graph, params), jnp.arange(len(TOKENS))
    hidden, _ = decoder(jnp.asarray(TOKENS), at, dense_attend, at, [None] * model.num_layers)
    return np.asarray(decoder.logits(hidden))


@pytest.mark.parametrize("name", [*FAMILIES, *LLAMAS])
def test_no_field_is_passed_over(name, tmp_path, monkeypatch):
    # Without jit, so that nothing is compiled for each value; the loops of the other implementations need it.
    monkeypatch.setattr(experts, "grouped_matmul", partial(grouped_matmul, implementation="reference"))
    family = name in FAMILIES
    folder: Path = write_family_toy(tmp_path, name) if family else write_toy(tmp_path, **TOYS[name])
    config = json.loads((folder / "config.json").read_text())
    tensors = tensors_of(folder)
    configs = [config, HF[name]["config"]] if family else [config]
    seen, effective = set(), LIMIT | OFF.get(name, set())
    with jax.disable_jit():
        before = outcome(name, config, tensors)
        assert isinstance(before, np.ndarray), before
        for one in configs:  # a field may be overruled by another that says the same, but not in both
            np.testing.assert_array_equal(outcome(name, one, tensors), before)
            for path, value in leaves(one).items():
                field = path.rpartition(".")[2]
                seen.add(field)
                if field in effective:
                    continue
                after = outcome(name, with_value(one, path, changed(value)), tensors)
                if isinstance(after, str) or np.abs(after - before).max() > 1e-6:
                    effective.add(field)
    assert seen - effective == set()


def test_an_unknown_field_is_refused_unless_it_says_nothing(tmp_path):
    config = json.loads((write_toy(tmp_path) / "config.json").read_text())
    read = family_of(config).read_config
    assert read({**config, "new_idea": None, "other": False, "list": [], "_private": 3}) == read(config)
    message = (
        r"has new_idea = 2, which is not known for Llama .* drop it with hf_overrides=\{'new_idea': None\}"
    )
    with pytest.raises(ValueError, match=message):
        read({**config, "new_idea": 2})
    with pytest.raises(ValueError, match="rope_scaling has the key 'mrope_section', which is not supported"):
        read({**config, "rope_scaling": {"rope_type": "default", "mrope_section": [1]}})


@pytest.mark.parametrize("bad", [math.nan, math.inf, "1e-5", True, [1]])
def test_numbers_must_be_numbers(bad, tmp_path):
    config = json.loads((write_toy(tmp_path) / "config.json").read_text())
    with pytest.raises(ValueError, match=r"rms_norm_eps is .* it must be a number"):
        family_of(config).read_config({**config, "rms_norm_eps": bad})

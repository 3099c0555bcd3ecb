"""Checkpoints that say the same model in other words: without the head's prefix, inside one with a vision tower."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from families import write_family_toy
from jaxsched.weights import CheckpointError, load_model, open_checkpoint

FLOAT32 = jnp.dtype("float32")


def rename(folder: Path, new: Callable[[str], str], extra: dict[str, np.ndarray]) -> None:
    file = folder / "model.safetensors"
    save_file({**{new(name): t for name, t in load_file(file).items()}, **extra}, file)


def same_model(one: Path, other: Path) -> None:
    (graph, params), (other_graph, others) = (load_model(open_checkpoint(p), FLOAT32) for p in (one, other))
    jax.tree.map(np.testing.assert_array_equal, params, others)
    del graph, other_graph


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "qwen3"])
def test_a_checkpoint_of_the_bare_model(name: str, tmp_path: Path) -> None:
    """As the published GPT-2 is, with the causal masks that older files have."""
    plain, bare = write_family_toy(tmp_path / "plain", name), write_family_toy(tmp_path / "bare", name)
    prefix = {"gpt2": "transformer.", "gpt_neox": "gpt_neox.", "qwen3": "model."}[name]
    masks = {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32)} if name == "gpt2" else {}
    rename(bare, lambda tensor: tensor.removeprefix(prefix), masks)
    same_model(plain, bare)


def test_the_text_model_of_a_multimodal_gemma(tmp_path: Path) -> None:
    plain, whole = (write_family_toy(tmp_path / n, "gemma3") for n in ("plain", "whole"))
    config = json.loads((whole / "config.json").read_text())
    outer: dict[str, Any] = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "vision_config": {"hidden_size": 8}, "text_config": config, "mm_tokens_per_image": 256,
        "eos_token_id": [1, 106],
    }  # fmt: skip
    (whole / "config.json").write_text(json.dumps(outer))
    vision = {"vision_tower.embed.weight": np.ones((2, 2), np.float32)}
    rename(whole, lambda tensor: "language_model." + tensor, vision)
    same_model(plain, whole)
    rename(whole, lambda tensor: tensor, {"somewhere.else.weight": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"somewhere.else.weight: unexpected"):
        load_model(open_checkpoint(whole), FLOAT32)

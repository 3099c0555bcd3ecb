"""Adapters as PEFT saves them, and checkpoints with the same adapters merged into their weights. Depends on numpy and
safetensors only: the oracle for what adapters do is W + scale B A.
"""

import json
import math
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

CONV = ["c_attn", "c_proj", "c_fc"]
NEOX = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PREFIX = "base_model.model."
PATTERNS = {"rank_pattern": {"0.self_attn.k_proj": 2}, "alpha_pattern": {"o_proj": 3}}
# Toy -> an adapter for it, for the goldens that PEFT computes (tests/goldens/lora.npz).
PEFT_CASES: dict[str, dict[str, Any]] = {
    "base": {
        "seed": 1,
        "r": 3,
        "targets": ALL[:4],
        "use_rslora": True,
        "layers_to_transform": [1, 0],
        **PATTERNS,
    },
    "phi3": {"seed": 2, "targets": FUSED, "layers_to_transform": [1]},
    "gpt_neox": {"seed": 3, "targets": NEOX},
    "gpt2": {"seed": 4, "targets": CONV, "fan_in_fan_out": True},
}


def write_lora(
    path: Path,
    model: Path,
    *,
    targets: list[str] = ALL,
    r: int = 4,
    seed: int = 0,
    strength: float = 0.6,
    **config: Any,
) -> Path:
    """A random adapter for the checkpoint in ``model``. ``strength``: what it adds, in sizes of the weights.

    ``config``: more fields of adapter_config.json, as PEFT understands them.
    """
    config = {
        "peft_type": "LORA",
        "r": r,
        "lora_alpha": 2 * r,
        "target_modules": targets,
        "bias": "none",
        **config,
    }
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not covers(config, module) or weight.ndim != 2:
            continue
        rank, scale = rank_and_scale(config, module)
        width_out, width_in = weight.shape[::-1] if config.get("fan_in_fan_out") else weight.shape
        draw = np.random.RandomState(zlib.crc32(f"{seed}/{name}".encode()))
        size = math.sqrt(strength * float(weight.std()) / abs(scale)) * rank**-0.25
        shapes = {"A": (rank, width_in), "B": (width_out, rank)}
        for side, shape in shapes.items():
            tensors[f"{PREFIX}{module}.lora_{side}.weight"] = (size * draw.standard_normal(shape)).astype(
                np.float32
            )
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def merged(path: Path, model: Path, lora: Path) -> Path:
    """The checkpoint with the adapter merged into its weights, in a new folder."""
    shutil.copytree(model, path)
    config, parts = (
        json.loads((lora / "adapter_config.json").read_text()),
        load_file(lora / "adapter_model.safetensors"),
    )
    tensors, used = load_file(model / "model.safetensors"), set()
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        keys = [f"{PREFIX}{module}.lora_{side}.weight" for side in "BA"]
        if keys[0] in parts:
            used.update(keys)
            _, scale = rank_and_scale(config, module)
            delta = scale * parts[keys[0]].astype(np.float64) @ parts[keys[1]].astype(np.float64)
            tensors[name] = (weight + (delta.T if config.get("fan_in_fan_out") else delta)).astype(np.float32)
    assert used == set(parts) and used
    save_file(tensors, path / "model.safetensors")
    return path


def covers(config: dict[str, Any], module: str) -> bool:
    layers = config.get("layers_to_transform")
    numbers = re.findall(r"\.(\d+)\.", module)
    ends = any(module.endswith(f".{target}") for target in config["target_modules"])
    return ends and (layers is None or (bool(numbers) and int(numbers[0]) in layers))


def rank_and_scale(config: dict[str, Any], module: str) -> tuple[int, float]:
    def of(table: str, default: float) -> float:
        return next((v for k, v in config.get(table, {}).items() if module.endswith(k)), default)

    rank, alpha = int(of("rank_pattern", config["r"])), of("alpha_pattern", config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

"""GGUF files of every family give the configuration and the parameters that the safetensors files give."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from families import FAMILIES, FAMILY_GOLDENS, MAX_LEN, write_family_toy
from harness import dense_forward, load
from jaxsched.models import ModelConfig
from jaxsched.weights import CheckpointError, load_params, open_checkpoint
from jaxsched.weights.gguf_config import ARCHITECTURES
from toy_gguf import GGUF_ARCHITECTURES, tensors_of, write_family_gguf

FLOAT32 = jnp.dtype("float32")
GOLDENS = json.loads(FAMILY_GOLDENS.read_text())
LOGITS = np.load(FAMILY_GOLDENS.with_suffix(".npz"))

# Changes to a toy whose configuration a GGUF file cannot say, and why; then keys that the converter does not write.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Every fourth layer is not rotated, and there are no windows.
    "smollm3": (
        {"num_hidden_layers": 5, "no_rope_layer_interval": 4, "use_sliding_window": None, "sliding_window": None}, {},
    ),
    # A llama file has no window; one that says so must be Mistral's.
    "mistral": ({}, {"attention.sliding_window": 12}),
    "qwen2_window": ({"use_sliding_window": False}, {}),
    # The scale of attention is that of the head width, but for the largest models.
    "gemma2": ({"query_pre_attn_scalar": 24}, {}),
    # Every sixth layer sees everything, and the others have RoPE base 10000; both may be left out.
    "gemma3": (
        {"query_pre_attn_scalar": 24, "num_hidden_layers": 7, "sliding_window_pattern": 6, "rope_local_base_freq": 1e4},
        {"rope.freq_base_swa": None},
    ),
    "gpt2": ({"scale_attn_by_inverse_layer_idx": False}, {}),
    # The window follows from the number of positions.
    "starcoder2": ({"max_position_embeddings": 16384, "sliding_window": 4096}, {}),
    "gpt_neox": ({"rotary_emb_base": 10_000}, {}),
    "olmoe": ({}, {"attention.clamp_kqv": 1.5}),
    # All layers are routed, and there are no windows.
    "qwen2_moe": ({"mlp_only_layers": [], "num_hidden_layers": 3, "use_sliding_window": False}, {}),
    "qwen3_moe": ({"decoder_sparse_step": 1, "num_hidden_layers": 2, "use_sliding_window": False}, {}),
}  # fmt: skip


def alike_layers(name: str, count: int) -> dict[str, list[int]]:
    """Shapes of the toy ``name`` with ``count`` layers like its second."""
    shapes: dict[str, list[int]] = {}
    for key, shape in GOLDENS[name]["tensors"].items():
        if match := re.fullmatch(r"(.*\.layers\.)(\d+)(\..*)", key):
            shapes |= {f"{match[1]}{i}{match[3]}": shape for i in range(count) if match[2] == "1"}
        else:
            shapes[key] = shape
    return shapes


def write_both(path: Path, name: str, quantize: str | None = None, **changes: Any) -> tuple[Path, Path]:
    """The toy ``name`` as safetensors and as GGUF."""
    more, metadata = CHANGES.get(name, ({}, {}))
    changes = {**more, **changes}
    shapes = None
    if count := changes.get("num_hidden_layers"):
        shapes = alike_layers(name, count)
    folder = write_family_toy(path / "toy", name, shapes=shapes, **changes)
    return folder, write_family_gguf(path / "toy.gguf", folder, quantize=quantize, metadata=metadata)


def same_numbers(one: Any, other: Any, where: str = "") -> None:
    """Equal up to the rounding of floats to float32 and back."""
    if isinstance(one, float) and isinstance(other, float):
        assert math.isclose(one, other, rel_tol=1e-7), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            same_numbers(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for a, b in zip(one, other, strict=True):
            same_numbers(a, b, where)
    else:
        assert one == other, where


def same_config(found: ModelConfig, wanted: ModelConfig) -> None:
    same_numbers(dataclasses.asdict(found), dataclasses.asdict(wanted))


def same_parameters(found: Path, wanted: Path, offset: float = 0.0) -> None:
    """Equal to the last bit; norms, to which the converter adds ``offset``, as far as a float32 of the sum has them."""

    def compare(path: Any, a: jax.Array, b: jax.Array) -> None:
        if "norm" in jax.tree_util.keystr(path):
            one = np.float32(offset)
            np.testing.assert_array_equal(np.asarray(a) + one, np.asarray(b) + one)
        else:
            np.testing.assert_array_equal(a, b, strict=True)

    params = (load_params(open_checkpoint(p), dtype=FLOAT32) for p in (found, wanted))
    jax.tree_util.tree_map_with_path(compare, *params)


@pytest.mark.parametrize("name", FAMILIES)
def test_same_as_safetensors(tmp_path: Path, name: str) -> None:
    folder, file = write_both(tmp_path, name)
    found, wanted = (open_checkpoint(p).model_config for p in (file, folder))
    if name == "mistral_full":  # Llama by another name
        wanted = dataclasses.replace(wanted, architecture="LlamaForCausalLM")
    same_config(found, wanted)
    same_parameters(file, folder, offset=found.norm_offset)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in CHANGES])
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    _, file = write_both(tmp_path, name)
    model = load(file, max_model_len=MAX_LEN.get(name))
    _, logits = dense_forward(model.graph, model.params, LOGITS[f"{name}/ids_0"])
    np.testing.assert_allclose(logits, LOGITS[f"{name}/logits"], atol=1e-4, rtol=0)


def test_every_architecture_has_a_toy() -> None:
    assert set(ARCHITECTURES) == set(GGUF_ARCHITECTURES.values())
    toys = {GGUF_ARCHITECTURES[row["architectures"][0]] for row in FAMILIES.values()}
    assert toys == set(ARCHITECTURES)


def test_gemma3_with_the_newer_keys(tmp_path: Path) -> None:
    folder = write_family_toy(tmp_path / "toy", "gemma3", query_pre_attn_scalar=24)
    wanted = open_checkpoint(folder).model_config
    for pattern in (3, [True, True, False]):
        file = write_family_gguf(
            tmp_path / "toy.gguf", folder, metadata={"attention.sliding_window_pattern": pattern}
        )
        same_config(open_checkpoint(file).model_config, wanted)
    file = write_family_gguf(tmp_path / "toy.gguf", folder, metadata={"attention.sliding_window": None})
    found = open_checkpoint(file).model_config
    assert {(layer.window, layer.rope) for layer in found.layers} == {(None, 0)}


@pytest.mark.parametrize(
    ("name", "layers", "scalar"), [("gemma2", 46, 64 // 4), ("gemma2", 45, 24), ("gemma3", 62, 64 // 4)]
)
def test_scale_of_the_largest_gemmas(tmp_path: Path, name: str, layers: int, scalar: int) -> None:
    """The models of 27 billion weights divide by the root of width / heads, which is not the head width."""
    folder = write_family_toy(tmp_path / "toy", name)
    file = write_family_gguf(tmp_path / "toy.gguf", folder, metadata={"block_count": layers})
    assert open_checkpoint(file).model_config.attention_scale == pytest.approx(scalar**-0.5)


def with_parts_joined(tensors: dict[str, np.ndarray], joined: str, parts: tuple[str, ...], axis: int) -> None:
    for layer in range(2):
        for kind in ("weight", "bias"):
            names = [f"blk.{layer}.{part}.{kind}" for part in parts]
            if names[0] in tensors:
                tensors[f"blk.{layer}.{joined}.{kind}"] = np.concatenate(
                    [tensors.pop(n) for n in names], axis
                )


def split_into_experts(tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if name.endswith("_exps.weight")]:
        stack = tensors.pop(name)
        for i, matrix in enumerate(stack):
            tensors[name.replace("_exps.", f".{i}.")] = matrix


@pytest.mark.parametrize("name", ["qwen2", "mistral_full", "olmoe", "mixtral"])
def test_other_ways_to_store_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Newer files may fuse q, k and v, or gate and up; older ones have a tensor for each expert."""
    import toy_gguf

    convert, written = toy_gguf.family_tensors, set()

    def other(*args: Any) -> dict[str, np.ndarray]:
        tensors = convert(*args)
        with_parts_joined(tensors, "attn_qkv", ("attn_q", "attn_k", "attn_v"), 0)
        if name == "olmoe":
            with_parts_joined(tensors, "ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps"), 1)
        if name == "mixtral":
            split_into_experts(tensors)
        written.update(tensors)
        return tensors

    monkeypatch.setattr(toy_gguf, "family_tensors", other)
    folder, file = write_both(tmp_path, name)
    expected = {"olmoe": "ffn_gate_up_exps", "mixtral": "ffn_gate.3"}.get(name, "attn_qkv")
    assert f"blk.1.{expected}.weight" in written
    same_parameters(file, folder)


@pytest.mark.parametrize(("name", "kind"), [("mixtral", "Q8_0"), ("gpt2", "Q4_0"), ("gpt_neox", "Q4_0")])
def test_quantized(tmp_path: Path, name: str, kind: str) -> None:
    """Rows are quantized one by one: undoing the converter's orders afterwards loses nothing more."""
    folder, file = write_both(tmp_path, name, quantize=kind)
    source, qtype = open_checkpoint(file).source, getattr(gguf.GGMLQuantizationType, kind)
    formats = source.formats()
    for key, tensor in tensors_of(folder).items():
        read = source.read(key)
        if tensor.ndim == 1:
            np.testing.assert_array_equal(read, tensor)
            continue
        turned = name == "gpt2" and ".h." in key  # stored [in, out] in safetensors, [out, in] in GGUF
        rows = np.ascontiguousarray(tensor.T) if turned else tensor
        wanted = gguf.quants.dequantize(gguf.quants.quantize(rows, qtype), qtype)
        np.testing.assert_array_equal(read, wanted.T if turned else wanted)
        assert key.removesuffix(".weight") in formats
        numbers, scale, offset = source.read_quantized(key.removesuffix(".weight"))
        assert offset is None
        np.testing.assert_array_equal(numbers.astype(np.float32) * np.repeat(scale, 32, axis=0), wanted.T)
    load_params(open_checkpoint(file), dtype=FLOAT32, quantization="keep")


def test_an_expert_is_read_alone(tmp_path: Path) -> None:
    """Plain numbers are a view of the mapped file, not a copy."""
    _, file = write_both(tmp_path, "mixtral")
    read = open_checkpoint(file).source.read("model.layers.1.block_sparse_moe.experts.2.w1.weight")
    assert not read.flags.owndata and not read.flags.writeable


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "window": ("qwen2", {"attention.sliding_window": 64}, r"qwen2\.attention\.sliding_window is 64, which is not"),
    "OLMo 3": ("olmo2", {"attention.sliding_window": 64}, r"olmo2\.attention\.sliding_window is 64, which is not"),
    "anything new": ("qwen3", {"attention.key_value_gate": True}, r"gguf: qwen3\.attention\.key_value_gate is True"),
    "router": ("qwen3_moe", {"expert_gating_func": 2}, r"qwen3moe\.expert_gating_func is 2; supported: 1"),
    "normalized": ("olmoe", {"expert_weights_norm": True}, r"olmoe\.expert_weights_norm is True; supported: False"),
    "scaled": ("qwen2_moe", {"expert_weights_scale": 2.5}, r"expert_weights_scale is 2\.5; supported: 1\.0"),
    "groups": ("qwen2_moe", {"expert_group_count": 4}, r"expert_group_count is 4; supported: 1"),
    "no rotation": ("granite", {"rope.scaling.finetuned": False}, r"scaling\.finetuned is False; supported: True"),
    "not causal": ("gemma3", {"attention.causal": False}, r"gemma3\.attention\.causal is False; supported: True"),
    "pattern": ("gemma2", {"attention.sliding_window_pattern": [True]}, r"sliding_window_pattern is \[True\]; it must"),
    "local base": ("gemma2", {"rope.freq_base_swa": 1e6}, r"gemma2\.rope\.freq_base_swa is 1000000\.0; supported"),
    "old phi3": ("phi3_plain", {"attention.sliding_window": None}, r"lacks the metadata 'phi3\.attention\.sliding_w"),
    "longrope": ("phi3", {"rope.scaling.original_context_length": None}, r"toy\.gguf lacks .*, which longrope needs"),
    "attn factor": ("qwen2", {"rope.scaling.attn_factor": 1.5}, r"attn_factor other than 1 is not supported"),
    "yarn attn factor": (
        "qwen2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_attn_factor": 1.0},
        r"yarn_attn_factor is 1\.0; supported: 1\.138629",
    ),
    "yarn log": (
        "qwen2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1},
        r"yarn_log_multiplier is 0\.1, which is not known",
    ),
    "rotary": ("gpt_neox", {"rope.dimension_count": 32}, r"rope\.dimension_count is 32; supported: the head width, 16"),
    "layers differ": ("qwen3", {"attention.head_count_kv": [2, 4]}, r"head_count_kv is \[2, 4\]; supported: one"),
    "epsilon": ("starcoder2", {"attention.layer_norm_epsilon": None}, r"lacks the metadata 'starcoder2\.attention\."),
    "infinite": ("gemma2", {"final_logit_softcapping": math.inf}, r"final_logit_softcapping is inf, not a finite"),
    "layers": ("gemma2", {"block_count": 1 << 31}, r"gemma2\.block_count is 2147483648; it must be an integer from 1"),
    "gpt2 rope": ("gpt2", {"rope.freq_base": 1e4}, r"gpt2\.rope\.freq_base is 10000\.0, which is not known"),
    "gpt2 kv": ("gpt2", {"attention.head_count_kv": 2}, r"head_count_kv differs from head_count"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(tmp_path: Path, what: str) -> None:
    name, metadata, message = REFUSED[what]
    changes = CHANGES.get(name, ({}, {}))[0]
    layers = changes.get("num_hidden_layers")
    shapes = alike_layers(name, layers) if layers else None
    folder = write_family_toy(tmp_path / "toy", name, shapes=shapes, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_family_gguf(tmp_path / "toy.gguf", folder, metadata=metadata))


@pytest.mark.parametrize(
    "metadata", [{"rope.scaling.finetuned": False}, {"pooling_type": 3}, {"attention.causal": True}]
)
def test_what_changes_nothing(tmp_path: Path, metadata: dict[str, Any]) -> None:
    folder = write_family_toy(tmp_path / "toy", "qwen3")
    found = open_checkpoint(write_family_gguf(tmp_path / "toy.gguf", folder, metadata=metadata)).model_config
    same_config(found, open_checkpoint(folder).model_config)


def test_yarn(tmp_path: Path) -> None:
    """Qwen 2.5 with the extension that its model card describes."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    folder = write_family_toy(tmp_path / "toy", "qwen2", rope_scaling=scaling)
    keys = {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 128,
        "yarn_attn_factor": 0.1 * math.log(4) + 1,
    }
    metadata = {f"rope.scaling.{key}": value for key, value in keys.items()}
    found = open_checkpoint(write_family_gguf(tmp_path / "toy.gguf", folder, metadata=metadata)).model_config
    same_config(found, open_checkpoint(folder).model_config)


def test_phi3_of_old_files(tmp_path: Path) -> None:
    """Files that say nothing of windows: Phi-3 mini and medium of 4096 tokens have one of 2047, those of 128k none."""
    folder = write_family_toy(tmp_path / "toy", "phi3_plain")
    for context, window in ((4096, 2047), (131072, None)):
        metadata = {"attention.sliding_window": None, "block_count": 32, "context_length": context}
        file = write_family_gguf(tmp_path / "toy.gguf", folder, metadata=metadata)
        assert {layer.window for layer in open_checkpoint(file).model_config.layers} == {window}


@pytest.mark.parametrize("name", ["granite", "mixtral", "gemma3", "phi3"])
def test_flipped_bytes_never_raise_anything_else(tmp_path: Path, name: str) -> None:
    _, file = write_both(tmp_path, name)
    data, random = file.read_bytes(), np.random.default_rng(0)
    header, opened = data.index(b"token_embd.weight"), 0
    for _ in range(100):
        flipped = bytearray(data)
        for position in random.integers(24, header, 2):
            flipped[position] = random.integers(256)
        file.write_bytes(flipped)
        try:
            open_checkpoint(file)
            opened += 1
        except CheckpointError as error:
            assert "toy.gguf" in str(error)
    assert 0 < opened < 100


def test_no_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_type("mmproj")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match=r"mmproj\.gguf is of type 'mmproj' \(general\.type\), so it holds no model"
    ):
        open_checkpoint(tmp_path / "mmproj.gguf")

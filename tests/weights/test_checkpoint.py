"""Opening checkpoints: what is read, and what is refused with which words."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import load_file, save_file

from jaxsched.weights import CheckpointError, load_params, open_checkpoint
from toys import BOS, EOS, IM_END, TOYS, write_toy

FILE = "model.safetensors"


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_tensors(path: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    edit(header)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


def cut(path: Path, drop: int) -> None:
    path.write_bytes(path.read_bytes()[:-drop])


def duplicate(folder: Path) -> None:
    second = folder / "model-00002-of-00002.safetensors"
    first = load_file(folder / "model-00001-of-00002.safetensors")
    edit_tensors(
        second, lambda t: t.update({"model.embed_tokens.weight": first["model.embed_tokens.weight"]})
    )


def lose_shard_tensor(folder: Path) -> None:
    edit_tensors(folder / "model-00001-of-00002.safetensors", lambda t: t.pop("model.embed_tokens.weight"))


def poison(path: Path, name: str, value: float, dtype: Any = np.float32) -> None:
    """Stores the tensor as ``dtype``, with ``value`` for its last number."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensor = tensors[name].astype(dtype)
        tensor.reshape(-1)[-1] = value
        tensors[name] = tensor

    edit_tensors(path, edit)


def edit_index(folder: Path, name: str, file: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = file
    path.write_text(json.dumps(index))


def write_index(folder: Path, text: str) -> None:
    (folder / FILE).unlink()
    (folder / "model.safetensors.index.json").write_text(text)


def only_bin(folder: Path) -> None:
    (folder / FILE).rename(folder / "pytorch_model.bin")


Break = Callable[[Path], Any]
# What is wrong -> (options of the toy, how to break it, what the error says)
BROKEN: dict[str, tuple[dict[str, Any], Break, str]] = {
    "truncated data": ({}, lambda f: cut(f / FILE, 5), r"safetensors is truncated: tensor '[\w.]+' ends at byte"),
    "empty file": ({}, lambda f: (f / FILE).write_bytes(b""), r"is not a safetensors file: it has 0 bytes"),
    "header length": (
        {},
        lambda f: (f / FILE).write_bytes(struct.pack("<Q", 1 << 60) + bytes(99)),
        r"model\.safetensors is truncated or not a safetensors file: its header claims 1152921504606846976 bytes",
    ),
    "header is not JSON": (
        {},
        lambda f: (f / FILE).write_bytes(struct.pack("<Q", 8) + b"{garbage"),
        r"model\.safetensors has a corrupt safetensors header",
    ),
    "header repeats a tensor": (
        {},
        lambda f: (f / FILE).write_bytes(struct.pack("<Q", 15) + b'{"a":{},"a":{}}'),
        r"corrupt safetensors header \('a' appears twice\)",
    ),
    "header entry": (
        {},
        lambda f: edit_header(f / FILE, lambda h: h["lm_head.weight"].pop("shape")),
        r"the description of tensor 'lm_head\.weight' is corrupt",
    ),
    "negative offset": (
        {},
        lambda f: edit_header(f / FILE, lambda h: h["lm_head.weight"].update(data_offsets=[-4, 0])),
        r"the description of tensor 'lm_head\.weight' is corrupt",
    ),
    "span and shape": (
        {},
        lambda f: edit_header(f / FILE, lambda h: h["model.norm.weight"].update(shape=[63])),
        r"tensor 'model\.norm\.weight' of shape \(63,\) and dtype F32 takes 252 bytes, its entry spans 256",
    ),
    "unknown dtype": (
        {},
        lambda f: edit_header(f / FILE, lambda h: h["lm_head.weight"].update(dtype="F4")),
        r"tensor 'lm_head\.weight' has dtype 'F4'; supported: F64, F32,",
    ),
    "missing shard": (
        {"shards": 2},
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        r"lacks model-00002-of-00002\.safetensors \(1 of 2 shards\) named in model\.safetensors\.index\.json",
    ),
    "shard lacks a tensor": (
        {"shards": 2},
        lose_shard_tensor,
        r"tensor 'model\.embed_tokens\.weight' is in model-00001-of-00002\.safetensors, but it is not",
    ),
    "tensor in two shards": (
        {"shards": 2},
        duplicate,
        r"tensor 'model\.embed_tokens\.weight' is in both .*model-00001-of-00002\.saf.* and model-00002-of-00002\.saf",
    ),
    "index is not JSON": ({}, lambda f: write_index(f, "{"), r"index\.json is not a safetensors index"),
    "index without map": ({}, lambda f: write_index(f, "{}"), r"index\.json is not a safetensors index"),
    "no weights": ({}, lambda f: (f / FILE).unlink(), r"neither model\.safetensors nor .*; download the weights"),
    "pickled weights": ({}, only_bin, r"convert the PyTorch weights to safetensors"),
    "config is not JSON": ({}, lambda f: (f / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    "config is a list": ({}, lambda f: (f / "config.json").write_text("[]"), r"config\.json holds a JSON list"),
    "no config": (
        {},
        lambda f: (f / "config.json").unlink(),
        r"has no config\.json and 0 \.gguf files; a checkpoint folder holds config\.json and safetensors files",
    ),
    "architecture": (
        {},
        lambda f: edit_json(f / "config.json", architectures=["FooForCausalLM"]),
        r"architecture FooForCausalLM is not supported; supported: .*LlamaForCausalLM",
    ),
    "config field": (
        {},
        lambda f: edit_json(f / "config.json", hidden_size=None),
        r"config\.json lacks 'hidden_size'",
    ),
    "config value": (
        {},
        lambda f: edit_json(f / "config.json", num_attention_heads=0),
        "num_attention_heads is 0; it must be an integer from 1 to 64",
    ),
    "config kind": (
        {},
        lambda f: edit_json(f / "config.json", num_attention_heads="4"),
        "num_attention_heads is '4'; it must be an integer",
    ),
    "eos out of range": (
        {},
        lambda f: edit_json(f / "generation_config.json", eos_token_id=[EOS, 272]),
        r"eos_token_id in generation_config\.json is 272; it must be a token id from 0 to 271",
    ),
    "eos is a string": (
        {},
        lambda f: edit_json(f / "config.json", eos_token_id="</s>"),
        r"eos_token_id in config is '</s>'; it must be a token id",
    ),
    "missing tensor": (
        {},
        lambda f: edit_tensors(f / FILE, lambda t: t.pop("model.norm.weight")),
        r"\(1 differ\):\n  model\.norm\.weight: missing, expected \(64,\)\n",
    ),
    "extra tensor": (
        {},
        lambda f: edit_tensors(f / FILE, lambda t: t.update(adapter=np.zeros((3, 2), np.float32))),
        r"\(1 differ\):\n  adapter: unexpected, found \(3, 2\)\n",
    ),
    "wrong shape": (
        {},
        lambda f: edit_tensors(f / FILE, lambda t: t.update({"model.norm.weight": np.zeros(65, np.float32)})),
        r"\(1 differ\):\n  model\.norm\.weight: expected \(64,\), found \(65,\)\n",
    ),
    "many differ": (
        {},
        lambda f: edit_json(f / "config.json", num_hidden_layers=1),
        r"\(9 differ\):\n(  model\.layers\.1\.[\w.]+: unexpected, found \(.*\)\n){9}use the config\.json",
    ),
    "more than ten differ": (
        {},
        lambda f: edit_json(f / "config.json", num_hidden_layers=4),
        r"\(18 differ\):\n(  model\.layers\.2[\w.]+: missing, expected \(.*\)\n){9}.*\n  \.\.\. and 8 more\n",
    ),
    "NaN": (
        {"shards": 2},
        lambda f: poison(f / "model-00002-of-00002.safetensors", "model.norm.weight", np.nan),
        r"model-00002-of-00002\.safetensors: tensor 'model\.norm\.weight' has numbers that are NaN or infinite",
    ),
    "infinity in float16": (
        {},
        lambda f: poison(f / FILE, "model.layers.1.mlp.up_proj.weight", -np.inf, np.float16),
        r"model\.safetensors: tensor 'model\.layers\.1\.mlp\.up_proj\.weight' has numbers that are NaN or infinite",
    ),
    "NaN in bfloat16": (
        {},
        lambda f: poison(f / FILE, "lm_head.weight", np.nan, ml_dtypes.bfloat16),
        r"model\.safetensors: tensor 'lm_head\.weight' has numbers that are NaN or infinite",
    ),
    "float64 beyond float32": (
        {},
        lambda f: poison(f / FILE, "model.norm.weight", 1e300, np.float64),
        r"tensor 'model\.norm\.weight' has numbers up to 1e\+300, which float32 cannot hold",
    ),
    "overlapping tensors": (
        {},
        lambda f: edit_header(
            f / FILE,
            lambda h: h["model.norm.weight"].update(
                data_offsets=[h["lm_head.weight"]["data_offsets"][0] + 8, h["lm_head.weight"]["data_offsets"][0] + 264]
            ),
        ),
        r"tensor 'model\.norm\.weight' begins at byte \d+, inside tensor 'lm_head\.weight', which ends at \d+",
    ),
    "shard is truncated": (
        {"shards": 2},
        lambda f: cut(f / "model-00002-of-00002.safetensors", 100),
        r"model-00002-of-00002\.safetensors is truncated: tensor '",
    ),
    "index names another shard": (
        {"shards": 2},
        lambda f: edit_index(f, "model.norm.weight", "model-00001-of-00002.safetensors"),
        r"tensor 'model\.norm\.weight' is in model-00001-of-00002\.safetensors, but it is not; it is in model-00002",
    ),
    "index names an unknown tensor": (
        {"shards": 2},
        lambda f: edit_index(f, "model.norm.bias", "model-00001-of-00002.safetensors"),
        r"tensor 'model\.norm\.bias' is in model-00001-of-00002\.safetensors, but it is not; download",
    ),
    "index leaves its folder": (
        {"shards": 2},
        lambda f: edit_index(f, "model.norm.weight", "../secret.safetensors"),
        r"index\.json names '\.\./secret\.safetensors', which is not a file of its folder",
    ),
    "empty folder": (
        {},
        lambda f: [file.unlink() for file in f.iterdir()],
        r"has no config\.json and 0 \.gguf files",
    ),
    "empty config": ({}, lambda f: (f / "config.json").write_bytes(b""), r"config\.json is not valid JSON"),
    "config of a wider model": (
        {},
        lambda f: edit_json(f / "config.json", hidden_size=128),
        r"describes 272 tokens of width 128, but 'model\.embed_tokens\.weight' in model\.safetensors has the shape "
        r"\(272, 64\)",
    ),
    "config of another family": (
        {},
        lambda f: edit_json(f / "config.json", architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
        r"\(6 differ\):\n(  model\.layers\.\d\.self_attn\.\w_proj\.bias: missing, expected \(\d+,\)\n){6}",
    ),
    "many layers": (
        {},
        lambda f: edit_json(f / "config.json", num_hidden_layers=4000),
        r"describes 4000 layers, but there are only 21 tensors",
    ),
    "10^9 layers": (
        {},
        lambda f: edit_json(f / "config.json", num_hidden_layers=10**9),
        r"num_hidden_layers is 1000000000; it must be an integer from 1 to 4096",
    ),
    "10^9 wide": (
        {},
        lambda f: edit_json(f / "config.json", hidden_size=10**9, num_attention_heads=10**7, head_dim=100,
                            num_key_value_heads=10**7, intermediate_size=10**9),
        r"describes 272 tokens of width 1000000000, but 'model\.embed_tokens\.weight'",
    ),
    "10^9 heads": (
        {},
        lambda f: edit_json(f / "config.json", num_key_value_heads=10**9),
        r"num_attention_heads 4 is not a multiple of num_key_value_heads 1000000000",
    ),
    "10^9 in the MLP": (
        {},
        lambda f: edit_json(f / "config.json", intermediate_size=10**9),
        r"model\.layers\.0\.mlp\.gate_proj\.weight: expected \(1000000000, 64\), found \(128, 64\)",
    ),
    "integer weights": (
        {},
        lambda f: edit_tensors(f / FILE, lambda t: t.update({"model.norm.weight": np.ones(64, np.int32)})),
        r"tensor 'model\.norm\.weight' has dtype int32; supported: float16, bfloat16, float32, float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_checkpoints_are_refused_by_name(tmp_path: Path, what: str) -> None:
    options, damage, message = BROKEN[what]
    folder = write_toy(tmp_path / "toy", **options)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as info:
        load_params(open_checkpoint(folder), dtype="float32")
    if "tensor '" not in message:
        assert str(folder) in str(info.value)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_embeddings_and_a_stored_head(tmp_path: Path, tied: bool, head: str) -> None:
    folder = write_toy(tmp_path / "toy", tied=tied)

    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors.pop("lm_head.weight", None)
        if head != "absent":
            table = tensors["model.embed_tokens.weight"]
            tensors["lm_head.weight"] = table.copy() if head == "equal" else table + 1

    edit_tensors(folder / FILE, edit)
    refused = {
        (False, "absent"): r"tie_word_embeddings is false, but the checkpoint has no 'lm_head\.weight'",
        (
            True,
            "different",
        ): r"tie_word_embeddings is true, but 'lm_head\.weight' differs from 'model\.embed_tok",
    }
    if message := refused.get((tied, head)):
        with pytest.raises(CheckpointError, match=message):
            load_params(open_checkpoint(folder), dtype="float32")
    else:
        params = load_params(open_checkpoint(folder), dtype="float32")
        assert ("head" in params) is not tied


def test_derived_tensors_are_ignored(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder / FILE, lambda t: t.update({name: np.zeros(8, np.float32)}))
    load_params(open_checkpoint(folder), dtype="float32")


@pytest.mark.parametrize("name", TOYS)
def test_configuration(tmp_path: Path, name: str) -> None:
    checkpoint = open_checkpoint(str(write_toy(tmp_path / "toy", **TOYS[name])))
    config = json.loads((tmp_path / "toy" / "config.json").read_text())
    assert checkpoint.config == config and checkpoint.path == tmp_path / "toy"
    assert checkpoint.model_config.num_heads == config["num_attention_heads"]
    assert checkpoint.model_config.tie_word_embeddings == config["tie_word_embeddings"]
    assert checkpoint.eos_token_ids == (EOS, IM_END) and checkpoint.bos_token_id == BOS
    assert checkpoint.generation_config["eos_token_id"] == [EOS, IM_END]


def test_eos_of_both_files_in_order_without_repeats(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy")
    edit_json(folder / "generation_config.json", eos_token_id=7)
    edit_json(folder / "config.json", eos_token_id=[9, 7], bos_token_id=None)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.eos_token_ids == (7, 9)
    assert checkpoint.bos_token_id == BOS  # generation_config's
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).eos_token_ids == (9, 7)


@pytest.mark.parametrize(
    "model", ["/no/such", "./no", "~/no/such/model", "a/b/c", "no/such.gguf", "nothing", ""]
)
def test_paths_that_do_not_exist(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    if model == "":
        with pytest.raises(FileNotFoundError, match="an empty name"):
            open_checkpoint(model)
        return
    with pytest.raises(
        FileNotFoundError, match=r"no such file or folder \(looked for /.*\); give a folder"
    ) as info:
        open_checkpoint(model)
    assert repr(model) in str(info.value)


def test_files_and_revisions_that_make_no_sense(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy")
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is a file, but not a \.gguf file; pass the folder"
    ):
        open_checkpoint(folder / FILE)
    with pytest.raises(CheckpointError, match="revision 'main' applies to Hugging Face ids"):
        open_checkpoint(folder, revision="main")


def hub_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)  # their constructors want an HTTP response
    error.args = ("the reason",)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError, "'org/name' is gated; accept its terms at https://huggingface.co/org/name"),
        (errors.RepositoryNotFoundError, "'org/name at revision v1' was not found"),
        (errors.RevisionNotFoundError, "'org/name at revision v1' was not found"),
        (errors.LocalEntryNotFoundError, "'org/name' could not be downloaded and is not in the local cache"),
        (errors.OfflineModeIsEnabled, r"'org/name' could not be downloaded .*\(the reason\); check the connection"),
        (ConnectionError, r"'org/name' could not be downloaded"),
    ],
)  # fmt: skip
def test_hub_failures(monkeypatch: pytest.MonkeyPatch, error: type[Exception], message: str) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        raise hub_error(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint("org/name", revision="v1")


def test_hub_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    folder = write_toy(tmp_path / "toy")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: calls.append((a, k)) or str(folder)
    )
    assert open_checkpoint("org/name", revision="v1").path == folder
    [((repo,), options)] = calls
    assert repo == "org/name" and options["revision"] == "v1" and "*.safetensors" in options["allow_patterns"]
    (folder / "config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"'org/name' has no config\.json; for a repository of GGUF files"
    ):
        open_checkpoint("org/name")
    broken = tmp_path / "x.gguf"
    broken.write_bytes(b"nothing")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: calls.append(a) or str(broken))
    with pytest.raises(CheckpointError, match=re.escape(f"{broken} is not a GGUF file")):
        open_checkpoint("org/name:x.gguf")
    assert calls[-1] == ("org/name", "x.gguf")


def test_fields_of_the_configuration_can_be_overridden(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy")
    edit_json(folder / "config.json", new_idea=1)
    with pytest.raises(CheckpointError, match="has new_idea = 1, which is not known for Llama"):
        open_checkpoint(folder)
    changed = open_checkpoint(folder, hf_overrides={"new_idea": None, "rms_norm_eps": 0.25}).model_config
    assert changed.norm_eps == 0.25

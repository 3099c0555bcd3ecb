"""Models on the hub: what is downloaded, and what works from the local cache alone. The hub itself is a fake."""

import fnmatch
import io
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo
from typer.testing import CliRunner

from jaxsched import EngineConfig, cli, info
from jaxsched.weights import CheckpointError, RemoteTensors, load_params, open_checkpoint, open_description
from toy_gguf import write_toy_gguf
from toys import write_toy


def header(file: Path) -> SafetensorsFileMetadata:
    data = file.read_bytes()
    content = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    metadata = content.pop("__metadata__", {})
    tensors = {n: TensorInfo(t["dtype"], t["shape"], tuple(t["data_offsets"])) for n, t in content.items()}
    return SafetensorsFileMetadata(metadata, tensors)


class Hub:
    """Repositories in folders. ``taken`` lists the files that were downloaded, ``bytes`` what was read in parts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, cache: Path):
        self.folder, self.cache = folder, cache
        self.taken: list[str] = []
        self.revisions: list[str | None] = []
        self.bytes = 0
        for name in ("snapshot_download", "get_safetensors_metadata", "hf_hub_download", "HfFileSystem"):
            monkeypatch.setattr(huggingface_hub, name, getattr(self, name))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))  # for what asks the cache itself

    def snapshot_download(
        self, repo: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        if repo != "org/name":
            error = errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)
            error.args = ("404",)
            raise error
        self.revisions.append(revision)
        self.cache.mkdir(exist_ok=True)
        for file in sorted(self.folder.iterdir()):
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                self.taken.append(file.name)
                shutil.copy(file, self.cache / file.name)
        return str(self.cache)

    def get_safetensors_metadata(self, repo: str, *, revision: str | None) -> SafetensorsRepoMetadata:
        self.revisions.append(revision)
        files = {file.name: header(file) for file in sorted(self.folder.glob("*.safetensors"))}
        if not files:
            raise errors.NotASafetensorsRepoError("none here")
        weight_map = {name: file for file, found in files.items() for name in found.tensors}
        return SafetensorsRepoMetadata(None, len(files) > 1, weight_map, files)

    def hf_hub_download(self, repo: str, file: str, *, revision: str | None) -> str:
        self.taken.append(file)
        return str(self.folder / file)

    def HfFileSystem(self) -> Any:
        hub = self

        class Counted(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                data = super().read(size)
                hub.bytes += len(data)
                return data

        class Files:
            def open(self, path: str, mode: str, *, revision: str | None) -> io.BytesIO:
                hub.revisions.append(revision)
                return Counted((hub.folder / path.removeprefix("org/name/")).read_bytes())

        return Files()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.chdir(tmp_path)
    return Hub(monkeypatch, write_toy(tmp_path / "repo", shards=2), tmp_path / "cache")


def test_a_description_downloads_no_weights(hub: Hub) -> None:
    """And says what the whole checkpoint would say."""
    remote = info.inspect_model("org/name", revision="v2")
    assert set(hub.taken) == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        "model.safetensors.index.json",
    }
    assert hub.revisions == ["v2", "v2"]
    local = info.inspect_model(hub.folder)
    assert remote.needs == local.needs and remote.fits == local.fits
    assert 0 < local.file_bytes - remote.file_bytes < 5000  # the headers
    with open_description("org/name") as checkpoint:
        assert isinstance(checkpoint.source, RemoteTensors)
        assert checkpoint.source.shapes() == open_checkpoint(hub.folder).source.shapes()
        assert checkpoint.source.file_of("lm_head.weight").name.startswith("model-0000")
        with pytest.raises(
            CheckpointError, match=r"of Hugging Face model 'org/name' has not been downloaded"
        ):
            load_params(checkpoint, dtype="float32")


def test_weights_that_are_here_are_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    open_checkpoint("org/name")
    monkeypatch.setattr(
        huggingface_hub, "get_safetensors_metadata", lambda *a, **k: pytest.fail("asked again")
    )
    with open_description("org/name") as checkpoint:
        load_params(checkpoint, dtype="float32")


def test_a_configuration_that_does_not_fit_is_found_before_the_download(hub: Hub) -> None:
    config = json.loads((hub.folder / "config.json").read_text()) | {"hidden_size": 1024}
    (hub.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"width 1024, but 'model\.embed_tokens\.weight' in model-0000"):
        info.inspect_model("org/name")


def test_repositories_without_safetensors(hub: Hub) -> None:
    for file in hub.folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"'org/name' has no safetensors files; a GGUF file is named so"
    ):
        info.inspect_model("org/name")
    with pytest.raises(CheckpointError, match=r"'org/other' was not found"):
        info.inspect_model("org/other")


def test_quantised_weights_count_as_they_are_stored(hub: Hub) -> None:
    config = json.loads((hub.folder / "config.json").read_text())
    (hub.folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq"}})
    )
    found = info.inspect_model("org/name")
    assert {need.weight_bytes for need in found.needs} == {found.file_bytes}


@pytest.mark.parametrize("rope", ["base", "llama3"])
def test_of_a_gguf_file_only_the_header_is_read(hub: Hub, rope: str) -> None:
    """A small file is read whole; of one that is longer than its header, the rest is not."""
    import numpy as np

    from toys import TOYS

    extra = {}
    if rope == "llama3":
        theta, dim = 500000.0, 16
        wavelength = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
        smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
        extra["rope_freqs.weight"] = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    options = {k: v for k, v in TOYS["base"].items()} | ({"rope_theta": 500000.0} if extra else {})
    source = write_toy(hub.folder.parent / "plain", num_layers=1, **options)
    path = write_toy_gguf(hub.folder / "x.gguf", source, extra=extra)
    with open(path, "ab") as file:
        file.truncate(64 << 20)
    remote = info.inspect_model("org/name:x.gguf", revision="main")
    assert hub.bytes < 10 << 20 and hub.taken == [] and hub.revisions == ["main"]
    local = info.inspect_model(path)
    assert info.dataclasses.replace(remote, model=str(path)) == local
    assert remote.model == "org/name:x.gguf" and remote.file_bytes == 64 << 20
    assert remote.rope.startswith("llama3" if extra else "default")


def test_a_damaged_gguf_header_is_refused(hub: Hub) -> None:
    (hub.folder / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 5, 5))
    with pytest.raises(CheckpointError, match=r"Hugging Face model org/name:x\.gguf is truncated"):
        info.inspect_model("org/name:x.gguf")


# -- offline ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache as the hub's own library leaves it, and no network. Returns the snapshot."""
    commit = "a" * 40
    repo = tmp_path / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "refs" / "v1").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return write_toy(repo / "snapshots" / commit)


@pytest.mark.parametrize("revision", [None, "v1", "a" * 40])
def test_offline_the_cache_is_used(offline: Path, revision: str | None) -> None:
    checkpoint = open_checkpoint("org/name", revision=revision)
    assert checkpoint.path == offline
    load_params(checkpoint, dtype="float32")
    assert info.inspect_model("org/name", revision=revision).file_bytes > 100_000


def test_offline_what_is_not_cached_is_refused(offline: Path) -> None:
    for name, revision in (("org/name", "v2"), ("org/other", None), ("org/name:x.gguf", None)):
        with pytest.raises(CheckpointError, match="could not be downloaded and is not in the local cache"):
            open_checkpoint(name, revision=revision)
        with pytest.raises(CheckpointError, match="could not be downloaded and is not in the local cache"):
            info.inspect_model(name, revision=revision)
    (offline / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor|not in the local cache"):
        open_checkpoint("org/name")


# -- predictions for a GPU --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H100 80GB", ("H100 80GB", 80.0)),
        ("NVIDIA H100-80GB", ("H100 80GB", 80.0)),
        ("h200", ("H200 (141 GB)", 141.0)),
        ("GeForce RTX 4090", ("RTX 4090 (24 GB)", 24.0)),
        ("a100 40gb", ("A100 40GB", 40.0)),
    ],
)
def test_gpus_by_name(name: str, found: tuple[str, float]) -> None:
    assert info.find_card(name, None) == found


def test_gpus_that_cannot_be() -> None:
    assert info.find_card(None, None) is None
    assert info.find_card(None, 12.5) == ("12.5 GB", 12.5) and info.find_card("mine", 30) == ("mine", 30)
    with pytest.raises(ValueError, match=r"GPU 'H1000' is not known; known: .*H100 80GB"):
        info.find_card("H1000", None)
    with pytest.raises(ValueError, match="the memory of a GPU is -1"):
        info.find_card(None, -1)


def test_settings_change_the_prediction(tmp_path: Path) -> None:
    path = write_toy(tmp_path)

    def on(**settings: Any) -> tuple[info.Needs, info.Fit]:
        found = info.inspect_model(path, config=EngineConfig(**settings), card=("small", 1.0))
        return found.needs[1], found.fits[0]

    need, fit = on()
    assert (
        fit.device == "small"
        and fit.pages == (int(0.9e9) - need.weight_bytes - (512 << 20)) // need.page_bytes
    )
    wide, few = on(dtype="float32")
    assert wide.weight_bytes == 2 * need.weight_bytes and few.pages < 0.6 * fit.pages
    assert on(kv_cache_dtype="int8")[1].pages > 1.8 * fit.pages
    assert on(quantization="int8")[0].weight_bytes < 0.8 * need.weight_bytes
    assert on(max_model_len=64)[1].full_sequences > 4 * fit.full_sequences
    assert on(max_num_seqs=3)[0].max_num_seqs == 3


def test_on_the_command_line(tmp_path: Path) -> None:
    path = write_toy(tmp_path)
    words = ["info", str(path), "--gpu", "H100 80GB", "--kv-cache-dtype", "fp8", "--max-model-len", "128"]
    done = CliRunner().invoke(cli.app, [*words, "--dtype", "bfloat16", "--max-num-seqs", "8"])
    assert done.exit_code == 0, done.output
    assert "H100 80GB" in done.stdout and "float8_e4m3fn" in done.stdout and "seqs of 128" in done.stdout
    assert "192 GB" not in done.stdout
    done = CliRunner().invoke(cli.app, ["info", str(path), "--memory", "16", "--json"])
    assert [fit["device"] for fit in json.loads(done.stdout)["fits"]] == ["16 GB", "CPU"]
    done = CliRunner().invoke(cli.app, ["info", str(path), "--gpu", "abacus"])
    assert done.exit_code == 2 and "GPU 'abacus' is not known" in done.stderr

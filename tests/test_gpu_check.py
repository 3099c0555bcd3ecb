"""scripts/gpu_check and scripts/tune_kernels on a CPU: their dry runs go through everything that needs no GPU."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.profiler import ProfileData

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu" / script), *arguments],
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip


@pytest.fixture
def module(monkeypatch):
    """A module of scripts/gpu by name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu"))
    return importlib.import_module


def test_facts_of_this_machine(tmp_path):
    done = run("check.py", "--dry-run", "--only", "facts", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "copy bandwidth" in done.stdout and "the rates below say nothing" in done.stdout
    assert json.loads((tmp_path / "gpu_check.json").read_text())


def test_it_needs_a_gpu_or_a_dry_run(tmp_path):
    done = run("check.py", "--only", "facts", "--out", str(tmp_path))
    assert done.returncode == 2 and "--dry-run" in done.stdout + done.stderr


def test_unknown_sections_are_refused():
    done = run("check.py", "--dry-run", "--only", "fact")
    assert done.returncode == 2 and "facts" in done.stderr


@pytest.mark.slow
def test_the_whole_dry_run(tmp_path):
    done = run("check.py", "--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (
        "kernels triton",
        "kernels mosaic",
        "kernels write",
        "answers",
        "Rounds, ms/step",
        "checks passed",
    ):
        assert text in done.stdout


@pytest.mark.slow
def test_tuning_prints_rows():
    done = run("tune.py", "--dry-run", "--operation", "decode", "--backend", "triton")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Row(" in done.stdout and '"paged_decode"' in done.stdout


# -- parts -----------------------------------------------------------------------------------------------------------


def test_what_breaks_costs_only_itself(tmp_path, monkeypatch, module, capsys):
    """A section that hangs and one that dies keep their earlier rows, fail, and the others run."""
    check = module("check")
    lines = {"hangs": "import time; time.sleep(60)", "dies": "import os; os.abort()", "works": "pass"}
    for name, line in lines.items():
        begin = "def run(job):\n    job.emit('begun', ok=True, note='yes')\n"
        (tmp_path / f"{name}.py").write_text(f"{begin}    {line}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(check, "GRACE", 0.5)
    monkeypatch.setattr(check, "SECTIONS", tuple(lines))
    monkeypatch.setattr(check, "PARTS", tuple(check.Part(name, "", 2) for name in lines))
    assert check.main(["--out", str(tmp_path / "out")]) == 1
    rows = json.loads((tmp_path / "out" / "gpu_check.json").read_text())["rows"]
    assert [(row["section"], row["name"], row["ok"]) for row in rows] == [
        ("hangs", "begun", True), ("hangs", "process", False), ("dies", "begun", True), ("dies", "process", False),
        ("works", "begun", True),
    ]  # fmt: skip
    assert "3 of 5 checks passed" in capsys.readouterr().out
    # Without time, everything is left out, and that is no failure.
    assert check.main(["--out", str(tmp_path / "none"), "--seconds", "0"]) == 0
    assert capsys.readouterr().out.count("no time left") == 3


def test_a_missed_target_fails_only_if_asked(tmp_path, monkeypatch, module, capsys):
    check = module("check")
    line = "job.emit('speed', value=1.0, unit='GB/s', share=0.1, of='x', target='85 %', met=False)"
    (tmp_path / "slow.py").write_text(f"def run(job):\n    {line}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(check, "SECTIONS", ("slow",))
    monkeypatch.setattr(check, "PARTS", (check.Part("slow", "", 5),))
    assert check.main(["--out", str(tmp_path)]) == 0
    assert "10 % of x  target 85 %: missed" in capsys.readouterr().out
    assert check.main(["--out", str(tmp_path), "--strict"]) == 1


def test_busy_time_of_a_profile(module):
    """Overlapping kernels count once; lines that repeat the streams by name, and the host, do not count."""
    events = "events { metadata_id: 1 offset_ps: %d duration_ps: %d }"
    stream = [events % (at * 1000, length * 1000) for at, length in ((0, 10), (5, 10), (40, 1))]
    other = events % (0, 900_000)
    text = f"""
    planes {{ name: "/device:GPU:0" event_metadata {{ key: 1 value {{ id: 1 name: "k" }} }}
      lines {{ name: "Stream #7(Compute)" {" ".join(stream[:2])} }}
      lines {{ name: "Stream #8(MemcpyD2H)" {stream[2]} }}
      lines {{ name: "XLA Ops" {other} }} }}
    planes {{ name: "/host:CPU" lines {{ name: "Stream of thoughts" {other} }} }}
    """
    data = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))
    assert module("clock").busy_seconds(data.planes) == pytest.approx(16e-9)
    assert module("clock").busy_seconds([]) is None


def test_a_difference_is_forgiven_only_at_a_close_call(module):
    agreeing = module("answers").agreeing
    assert agreeing([1, 2, 3], [1, 2, 3], [9, 9, 9], 0.1) == (3, True)
    assert agreeing([1, 5, 3], [1, 2, 3], [9, 0.05, 9], 0.1) == (1, True)
    assert agreeing([1, 5, 3], [1, 2, 3], [0.05, 9, 0.05], 0.1) == (1, False)


@dataclasses.dataclass(frozen=True)
class Sizes:
    block: int = 64
    num_stages: int = 2
    flag: bool = True


def test_the_tuner_walks_to_the_best(module):
    tune = module("tune")

    def seconds(sizes):
        if sizes.block > 256:
            return None  # does not compile
        return 1 + abs(sizes.block - 256) / 256 + abs(sizes.num_stages - 4) / 4

    best, found, tries = tune.walk(Sizes(), seconds, lambda: 1.0)
    assert (best, found) == (Sizes(256, 4), 1.0) and tries < 20
    assert tune.differing(best, Sizes()) == {"block": 256, "num_stages": 4}
    # What helps less than the noise is no reason to move, and what never runs has no time.
    assert tune.walk(Sizes(), lambda sizes: 1 - sizes.block / 1e5, lambda: 1.0)[0] == Sizes()
    assert tune.walk(Sizes(), lambda sizes: None, lambda: 1.0) == (Sizes(), None, 1)
    assert tune.walk(Sizes(), seconds, lambda: 0.0)[0] == Sizes()


def test_poison_is_everywhere_but_in_use(module):
    """The inputs of the checks: a kernel that reads one position too many, or a stranger's page, is found out."""
    inputs = module("inputs")
    for kind in ("float32", "int8", "float8_e4m3fn"):
        case = inputs.Case(4, 2, 16, 8, "float32", kind)
        k, _, table, scales, _ = inputs.poisoned_pool(np.random.default_rng(0), [0, 3, 8], case, 4, 6)
        used = table[1, 0], table[2, 0]
        poison = k == 127 if kind == "int8" else np.isnan(k.astype(np.float32))
        assert poison[used[0], 3:].all() and not poison[used[1]].all()
        unused = [page for page in range(6) if page not in used]
        assert poison[unused].all()
        assert scales is None or (np.isnan(scales[unused]).all() and np.isfinite(scales[list(used)]).all())
        assert ((table < 0) | (table >= 6)).any()

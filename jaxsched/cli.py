"""The command line: ``jaxsched generate`` and ``jaxsched info``.

Results go to stdout, everything else to stderr. Exit codes: 0 all went well; 1 some prompt was refused, or generation
failed; 2 the command cannot be run as asked; 130 interrupted. What takes long to import is imported by the commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxsched import __version__

if TYPE_CHECKING:
    from jaxsched.llm import LLM

REFUSED, UNUSABLE, INTERRUPTED = 1, 2, 130  # exit codes
_SETTINGS = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_scheduler_steps", "page_size",
             "prefill_chunk_size", "num_pages", "gpu_memory_utilization", "executor", "scheduling_policy",
             "target_ttft_ms", "target_itl_ms")  # fmt: skip

app = typer.Typer(
    name="jaxsched",
    help="LLM inference in JAX: multi-step scheduling and chunked prefill.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point."""
    app(prog_name="jaxsched")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jaxsched {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=True)


_Model = Annotated[
    str | None, _option("Folder, .gguf file or Hugging Face id; default: the embedded SmolLM2.")
]
_Revision = Annotated[str | None, _option("Branch, tag or commit of a Hugging Face id.")]
_Prompt = Annotated[list[str] | None, _option("A prompt; may be given several times.")]
_File = Annotated[
    str | None,
    _option(
        'Prompts: text, one per line; .jsonl, objects with "prompt" or "messages"; - for stdin, either of them.'
    ),
]
_Chat = Annotated[bool, _option("Send prompts as user messages through the model's chat template.", "--chat")]
_System = Annotated[str | None, _option("System message; with --chat or messages.")]
_MaxTokens = Annotated[int, _option("Tokens to generate at most, per prompt.")]
_Temperature = Annotated[float, _option("0 takes the most likely token each time.")]
_TopP = Annotated[float, _option("Sample from the most likely tokens with this probability.")]
_TopK = Annotated[int, _option("Sample from this many tokens; 0 for all.")]
_MinP = Annotated[float, _option("Sample from tokens at least this likely relative to the best.")]
_Seed = Annotated[int | None, _option("Seed of every prompt; default: different ones, the same in each run.")]
_StopIds = Annotated[list[str] | None, _option("Token ids that end a text; commas or several times.")]
_IgnoreEos = Annotated[bool, _option("Do not end at the model's end-of-sequence tokens.", "--ignore-eos")]
_Dtype = Annotated[str | None, _option("auto, float32, bfloat16 or float16.")]
_MaxLen = Annotated[int | None, _option("Tokens of prompt and output; default: the model's.")]
_MaxSeqs = Annotated[int | None, _option("Sequences that run at once.")]
_MaxBatched = Annotated[int | None, _option("Token rows of one step at most.")]
_Steps = Annotated[str | None, _option("Steps that the host plans at once; auto: chosen each time.")]
_Chunk = Annotated[
    str | None, _option("Prompt tokens read per step; 0 or none: whole prompts; auto: chosen each time.")
]
_Policy = Annotated[str | None, _option("Who is served next, such as stall-free, fcfs or srpf.")]
_Ttft = Annotated[float | None, _option("Wanted milliseconds to the first token.")]
_Itl = Annotated[float | None, _option("Wanted milliseconds between tokens.")]
_NoCache = Annotated[bool, _option("Read every prompt anew, also what begins alike.", "--no-prefix-caching")]
_Log = Annotated[str | None, _option("Append every round to this file, as JSON lines.")]
_Timeline = Annotated[str | None, _option("Draw the last rounds: .png, or .json for Perfetto.")]
_PageSize = Annotated[int | None, _option("Tokens per page of the KV cache.")]
_Pages = Annotated[int | None, _option("Pages of the KV cache; default: what fits.")]
_Memory = Annotated[float | None, _option("Share of a GPU's memory to use.")]
_Executor = Annotated[str | None, _option("auto, scan or dispatch.")]
_NoChunks = Annotated[bool, _option("Read each prompt whole in one step.", "--no-chunked-prefill")]
_Json = Annotated[bool, _option("Print JSON.", "--json")]
_NoProgress = Annotated[bool, _option("Show no progress on stderr.", "--no-progress")]
_Debug = Annotated[bool, _option("Show the traceback of an error.", "--debug")]


@app.command()
def generate(
    model: _Model = None,
    revision: _Revision = None,
    prompt: _Prompt = None,
    prompts_file: _File = None,
    chat: _Chat = False,
    system: _System = None,
    max_tokens: _MaxTokens = 128,
    temperature: _Temperature = 0.0,
    top_p: _TopP = 1.0,
    top_k: _TopK = 0,
    min_p: _MinP = 0.0,
    seed: _Seed = None,
    stop_token_ids: _StopIds = None,
    ignore_eos: _IgnoreEos = False,
    dtype: _Dtype = None,
    max_model_len: _MaxLen = None,
    max_num_seqs: _MaxSeqs = None,
    max_num_batched_tokens: _MaxBatched = None,
    num_scheduler_steps: _Steps = None,
    prefill_chunk_size: _Chunk = None,
    page_size: _PageSize = None,
    num_pages: _Pages = None,
    gpu_memory_utilization: _Memory = None,
    executor: _Executor = None,
    scheduling_policy: _Policy = None,
    target_ttft_ms: _Ttft = None,
    target_itl_ms: _Itl = None,
    no_chunked_prefill: _NoChunks = False,
    no_prefix_caching: _NoCache = False,
    round_log: _Log = None,
    timeline: _Timeline = None,
    as_json: _Json = False,
    no_progress: _NoProgress = False,
    debug: _Debug = False,
) -> None:
    """Complete prompts. Greedy unless --temperature is given.

    One prompt streams to stdout as it is generated; several are printed in their order. With --json each becomes one
    line: an object with prompt, text, token_ids, finish_reason, prompt_tokens, output_tokens, time_to_first_token_s,
    and error where it was refused.
    """
    given = {name: value for name, value in locals().items() if name in _SETTINGS and value is not None}
    with _one_line_errors(debug, UNUSABLE):
        from jaxsched.metrics.save import check_timeline_path
        from jaxsched.prompt_file import questions
        from jaxsched.request import SamplingParams

        asked = questions(prompt or [], prompts_file, chat, system)
        params = SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, max_tokens=max_tokens,
            stop_token_ids=tuple(_token_ids(stop_token_ids or [])), ignore_eos=ignore_eos,
        )  # fmt: skip
        if timeline is not None:
            check_timeline_path(timeline)
        show = not no_progress and sys.stderr.isatty()
        llm = _load(model, revision, _settings(given, no_chunked_prefill, no_prefix_caching), show)
        if round_log is not None:
            llm.record_rounds(round_log)
        if any(question.messages for question in asked):
            _check_chat(llm)
    with _one_line_errors(debug, REFUSED), llm:
        from jaxsched.answers import JsonPrinter, TextPrinter, answer_all

        printer = JsonPrinter() if as_json else TextPrinter(len(asked))
        refused = answer_all(llm, asked, params, printer, bar=show and len(asked) > 1, complain=_say)
        if timeline is not None:
            llm.timeline(timeline)
    raise typer.Exit(REFUSED if refused else 0)


@app.command()
def info(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder, .gguf file or Hugging Face id; default: the embedded SmolLM2."),
    ] = None,
    revision: _Revision = None,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Describe a model and the memory it takes. Reads no weights, but downloads what is named by a hub id."""
    with _one_line_errors(debug, UNUSABLE):
        from jaxsched.info import inspect_model, render
        from jaxsched.startup import default_model

        found = inspect_model(default_model() if model is None else model, revision=revision)
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2) if as_json else render(found))


# -- errors ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _one_line_errors(debug: bool, code: int) -> Iterator[None]:
    """Turns what a user can cause into one line on stderr and an exit code, and warnings into lines."""
    show_warning = warnings.showwarning
    warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
    try:
        yield
    except BrokenPipeError:
        raise  # click ends the program quietly
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        if debug or isinstance(error, typer.Exit):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        hint = " (--debug shows the traceback)" if isinstance(error, (RuntimeError, MemoryError)) else ""
        _say(f"error: {lines[0]}{hint}")
        raise typer.Exit(code) from None
    finally:
        warnings.showwarning = show_warning


def _say(message: str) -> None:
    typer.echo(f"jaxsched: {message}", err=True)


# -- arguments -------------------------------------------------------------------------------------------------------


def _settings(given: dict[str, Any], no_chunked_prefill: bool, no_prefix_caching: bool) -> dict[str, Any]:
    """The engine settings that the command line names, as arguments of LLM."""
    for name, words, what in (
        ("prefill_chunk_size", ("none", "auto"), "a number of tokens, none or auto"),
        ("num_scheduler_steps", ("auto",), "a number of steps or auto"),
    ):
        value = given.get(name)
        if value is not None:
            text = value.strip().lower()
            if text not in words and not (text.isascii() and text.isdigit()):
                raise ValueError(f"--{name.replace('_', '-')} is {value!r}; give {what}")
            given[name] = text if text == "auto" else None if text == "none" else int(text)
    if given.get("prefill_chunk_size") == 0:
        given["prefill_chunk_size"] = None
    if no_chunked_prefill:
        given["enable_chunked_prefill"] = False
    if no_prefix_caching:
        given["enable_prefix_caching"] = False
    return given


def _token_ids(values: list[str]) -> Iterator[int]:
    for text in (part.strip() for value in values for part in value.split(",")):
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"--stop-token-ids has {text!r}; give token ids, such as 1,2")
        yield int(text)


def _load(model: str | None, revision: str | None, settings: dict[str, Any], show: bool) -> LLM:
    if revision is not None and model is None:
        raise ValueError("--revision is given without --model; name the Hugging Face id too")
    from jaxsched.llm import LLM

    return LLM(model, revision=revision, use_tqdm_on_load=show, **settings)


def _check_chat(llm: LLM) -> None:
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        what = "tokenizer" if llm.tokenizer is None else "chat template"
        raise ValueError(f"this checkpoint has no {what}, so it cannot chat; leave --chat and messages out")

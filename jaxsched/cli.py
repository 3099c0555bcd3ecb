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
from jaxsched import cli_sampling as sampling
from jaxsched.cli_sampling import option, sampling_params

if TYPE_CHECKING:
    from jaxsched.llm import LLM

REFUSED, UNUSABLE, INTERRUPTED = 1, 2, 130  # exit codes
_SETTINGS = ("dtype", "quantization", "kv_cache_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
             "num_scheduler_steps", "page_size", "prefill_chunk_size", "num_pages", "gpu_memory_utilization",
             "executor", "scheduling_policy", "target_ttft_ms", "target_itl_ms")  # fmt: skip

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


_Model = Annotated[
    str | None, option("Folder, .gguf file or Hugging Face id; default: the embedded SmolLM2.")
]
_Revision = Annotated[str | None, option("Branch, tag or commit of a Hugging Face id.")]
_Prompt = Annotated[list[str] | None, option("A prompt; may be given several times.")]
_File = Annotated[
    str | None,
    option(
        'Prompts: text, one per line; .jsonl, objects with "prompt" or "messages"; - for stdin, either of them.'
    ),
]
_Chat = Annotated[bool, option("Send prompts as user messages through the model's chat template.", "--chat")]
_System = Annotated[str | None, option("System message; with --chat or messages.")]
_Dtype = Annotated[str | None, option("auto, float32, bfloat16 or float16.")]
_Quantization = Annotated[
    str | None,
    option("int8, int4 or fp8: kernels are quantised when they are loaded; keep: as GGUF has them."),
]
_Overrides = Annotated[str | None, option("JSON object whose fields replace those of config.json.")]
_KvDtype = Annotated[str | None, option("Of the KV cache: auto (as --dtype), a dtype of these, int8 or fp8.")]
_MaxLen = Annotated[int | None, option("Tokens of prompt and output; default: the model's.")]
_MaxSeqs = Annotated[int | None, option("Sequences that run at once.")]
_MaxBatched = Annotated[int | None, option("Token rows of one step at most.")]
_Steps = Annotated[str | None, option("Steps that the host plans at once; auto: chosen each time.")]
_Chunk = Annotated[
    str | None, option("Prompt tokens read per step; 0 or none: whole prompts; auto: chosen each time.")
]
_Policy = Annotated[str | None, option("Who is served next, such as stall-free, fcfs or srpf.")]
_Ttft = Annotated[float | None, option("Wanted milliseconds to the first token.")]
_Itl = Annotated[float | None, option("Wanted milliseconds between tokens.")]
_NoCache = Annotated[bool, option("Read every prompt anew, also what begins alike.", "--no-prefix-caching")]
_Log = Annotated[str | None, option("Append every round to this file, as JSON lines.")]
_Timeline = Annotated[str | None, option("Draw the last rounds: .png, or .json for Perfetto.")]
_PageSize = Annotated[int | None, option("Tokens per page of the KV cache.")]
_Pages = Annotated[int | None, option("Pages of the KV cache; default: what fits.")]
_Memory = Annotated[float | None, option("Share of a GPU's memory to use.")]
_Executor = Annotated[str | None, option("auto, scan or dispatch.")]
_NoChunks = Annotated[bool, option("Read each prompt whole in one step.", "--no-chunked-prefill")]
_Json = Annotated[bool, option("Print JSON.", "--json")]
_NoProgress = Annotated[bool, option("Show no progress on stderr.", "--no-progress")]
_Debug = Annotated[bool, option("Show the traceback of an error.", "--debug")]


@app.command()
def generate(
    model: _Model = None,
    revision: _Revision = None,
    prompt: _Prompt = None,
    prompts_file: _File = None,
    chat: _Chat = False,
    system: _System = None,
    n: sampling.N = 1,
    max_tokens: sampling.MaxTokens = 128,
    min_tokens: sampling.MinTokens = 0,
    temperature: sampling.Temperature = 0.0,
    top_p: sampling.TopP = 1.0,
    top_k: sampling.TopK = 0,
    min_p: sampling.MinP = 0.0,
    seed: sampling.Seed = None,
    presence_penalty: sampling.Presence = 0.0,
    frequency_penalty: sampling.Frequency = 0.0,
    repetition_penalty: sampling.Repetition = 1.0,
    stop_token_ids: sampling.StopIds = None,
    stop: sampling.Stop = None,
    ignore_eos: sampling.IgnoreEos = False,
    logprobs: sampling.Logprobs = None,
    regex: sampling.Regex = None,
    json_schema: sampling.JsonSchema = None,
    choice: sampling.Choice = None,
    grammar: sampling.Grammar = None,
    json_object: sampling.JsonObject = False,
    dtype: _Dtype = None,
    quantization: _Quantization = None,
    hf_overrides: _Overrides = None,
    kv_cache_dtype: _KvDtype = None,
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
    and error where it was refused. Where it applies there are stop_reason, constraint (who enforces a structure: device
    or host), cumulative_logprob and logprobs; with --n, each answer has a line and an index.
    """
    options = dict(locals())
    given = {name: options[name] for name in _SETTINGS if options[name] is not None}
    with _one_line_errors(debug, UNUSABLE):
        from jaxsched.metrics.save import check_timeline_path
        from jaxsched.prompt_file import questions

        asked = questions(prompt or [], prompts_file, chat, system)
        params = sampling_params(options)
        if timeline is not None:
            check_timeline_path(timeline)
        show = not no_progress and sys.stderr.isatty()
        given = _settings(given, no_chunked_prefill, no_prefix_caching)
        llm = _load(model, revision, given | {"hf_overrides": _object(hf_overrides)}, show)
        if round_log is not None:
            llm.record_rounds(round_log)
        if any(question.messages for question in asked):
            _check_chat(llm)
    with _one_line_errors(debug, REFUSED), llm:
        from jaxsched.cli_answers import JsonPrinter, TextPrinter, answer_all

        printer = JsonPrinter() if as_json else TextPrinter(len(asked), n)
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
    gpu: Annotated[str | None, option('Say what fits on this GPU, such as "H100 80GB".')] = None,
    memory: Annotated[float | None, option("Say what fits on a GPU of so many GB (10^9 bytes).")] = None,
    dtype: _Dtype = None,
    quantization: _Quantization = None,
    kv_cache_dtype: _KvDtype = None,
    max_model_len: _MaxLen = None,
    max_num_seqs: _MaxSeqs = None,
    page_size: _PageSize = None,
    gpu_memory_utilization: _Memory = None,
    as_json: _Json = False,
    debug: _Debug = False,
) -> None:
    """Describe a model and the memory it takes. Reads no weights and downloads none, also of a hub id."""
    options = dict(locals())
    with _one_line_errors(debug, UNUSABLE):
        from jaxsched.config import EngineConfig
        from jaxsched.info import find_card, inspect_model, render
        from jaxsched.startup import default_model

        config = EngineConfig(**{n: v for n in _SETTINGS if (v := options.get(n)) is not None})
        card, name = find_card(gpu, memory), default_model() if model is None else model
        found = inspect_model(name, revision=revision, config=config, card=card)
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


def _object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--hf-overrides is not valid JSON ({error}): {text!r:.80}") from error
    if not isinstance(value, dict):
        raise ValueError(f"--hf-overrides is {text!r:.80}; it must be a JSON object")
    return value


def _load(model: str | None, revision: str | None, settings: dict[str, Any], show: bool) -> LLM:
    if revision is not None and model is None:
        raise ValueError("--revision is given without --model; name the Hugging Face id too")
    from jaxsched.llm import LLM

    return LLM(model, revision=revision, use_tqdm_on_load=show, **settings)


def _check_chat(llm: LLM) -> None:
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        what = "tokenizer" if llm.tokenizer is None else "chat template"
        raise ValueError(f"this checkpoint has no {what}, so it cannot chat; leave --chat and messages out")

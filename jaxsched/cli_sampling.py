"""The options of ``jaxsched generate`` that become SamplingParams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from jaxsched.sampling_params import SamplingParams


def option(text: str, *names: str) -> Any:
    """An option with its help; ``names`` where the parameter's does not do."""
    return typer.Option(*names, help=text, show_default=True)


N = Annotated[int, option("Answers per prompt; more than one needs --temperature.", "--n")]
MaxTokens = Annotated[int, option("Tokens to generate at most, per prompt.")]
MinTokens = Annotated[int, option("Tokens before which no answer ends.")]
Temperature = Annotated[float, option("0 takes the most likely token each time.")]
TopP = Annotated[float, option("Sample from the most likely tokens with this probability.")]
TopK = Annotated[int, option("Sample from this many tokens; 0 for all.")]
MinP = Annotated[float, option("Sample from tokens at least this likely relative to the best.")]
Seed = Annotated[int | None, option("Seed of every prompt; default: different ones, the same in each run.")]
Presence = Annotated[float, option("-2 to 2: makes tokens that are in the answer less likely.")]
Frequency = Annotated[float, option("-2 to 2: the same, for each time that they are in it.")]
Repetition = Annotated[float, option("Above 1 makes tokens of prompt and answer less likely.")]
StopIds = Annotated[list[str] | None, option("Token ids that end a text; commas or several times.")]
Stop = Annotated[list[str] | None, option("A text that ends the answer before it; several times.")]
IgnoreEos = Annotated[bool, option("Do not end at the model's end-of-sequence tokens.", "--ignore-eos")]
Logprobs = Annotated[
    int | None, option("Show each token's log-probability, and those of this many likeliest tokens.")
]
Regex = Annotated[str | None, option("The answer matches this regular expression.")]
JsonSchema = Annotated[str | None, option("The answer is JSON of this schema: {...}, a file, or @file.")]
Choice = Annotated[list[str] | None, option("The answer is one of these; several times.")]
Grammar = Annotated[str | None, option("The answer follows this grammar (Lark or GBNF): text, or @file.")]
JsonObject = Annotated[bool, option("The answer is a JSON object.", "--json-object")]

# Named alike in SamplingParams.
_SAME = ("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
         "frequency_penalty", "repetition_penalty", "stop", "ignore_eos", "logprobs")  # fmt: skip
_KINDS = ("regex", "json_schema", "choice", "grammar", "json_object")


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """The options by their parameters' names -> params. Raises ValueError for what is wrong with them."""
    from jaxsched.sampling_params import SamplingParams

    return SamplingParams(
        **{name: options[name] for name in _SAME},
        stop_token_ids=tuple(_token_ids(options["stop_token_ids"] or [])),
        structured_outputs=_structured(options),
    )


def _structured(options: Mapping[str, Any]) -> Any:
    """Fields of StructuredOutputsParams, or None."""
    given = {name: options[name] for name in _KINDS if options[name] not in (None, False, [])}
    if len(given) > 1:
        both = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{both} are given; an answer can be held to one of them")
    if "json_schema" in given:
        schema = given["json_schema"]
        inline = schema.lstrip().startswith("{")
        return {"json": schema if inline else _read("--json-schema", schema.removeprefix("@"))}
    if given.get("grammar", "").startswith("@"):
        return {"grammar": _read("--grammar", given["grammar"][1:])}
    return given or None


def _read(what: str, file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(
            f"{what} {file}: {error.strerror}; give the text itself or a file that can be read"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {file} is not UTF-8 (byte {error.start}); convert it") from None


def _token_ids(values: list[str]) -> Iterator[int]:
    for text in (part.strip() for value in values for part in value.split(",")):
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"--stop-token-ids has {text!r}; give token ids, such as 1,2")
        yield int(text)

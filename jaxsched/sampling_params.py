"""What users ask of a request: SamplingParams, StructuredOutputsParams, BeamSearchParams. Names as in vLLM."""

from __future__ import annotations

import dataclasses
import functools
import json
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxsched.checks import (
    advised,
    check_count,
    check_flag,
    check_ids,
    check_integer,
    check_number,
    check_some_ids,
    check_text,
    check_texts,
    shown,
)

MAX_SAMPLES = 1024  # of one request
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BIAS = 100.0

# -- structured outputs ------------------------------------------------------------------------------------------------

KINDS = ("json", "regex", "choice", "grammar", "json_object")


_OTHER_KINDS = {
    "json_schema": "the name is json",
    "structural_tag": "it is not supported; give a grammar",
    "disable_additional_properties": 'put "additionalProperties": false into the schema',
}


@advised(_OTHER_KINDS)
@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """What the text of an answer has to be. Exactly one of the first five; ValueError otherwise.

    Whether a schema, pattern or grammar means something is checked when the request is queued.
    """

    json: str | Mapping[str, Any] | None = (
        None  # a JSON schema; kept as text, its properties in the order given
    )
    regex: str | None = None  # the whole text matches it
    choice: Sequence[str] | None = None  # the text is one of these
    grammar: str | None = None  # in Lark's syntax, or GBNF
    json_object: bool | None = None  # True: any JSON object
    disable_any_whitespace: bool = False  # JSON without spaces and line breaks between its parts
    whitespace_pattern: str | None = None  # regex of what may stand between the parts of JSON

    def __post_init__(self) -> None:
        values: dict[str, Any] = {name: getattr(self, name) for name in KINDS}
        if values["json_object"] is not None:
            values["json_object"] = check_flag("json_object", values["json_object"]) or None
        chosen = [name for name in KINDS if values[name] is not None]
        if len(chosen) != 1:
            raise ValueError(
                f"structured outputs are given by {' and '.join(chosen) or 'nothing'}; give exactly one of "
                f"{', '.join(KINDS)}"
            )
        (kind,) = chosen
        if kind == "json":
            values["json"] = _schema(self.json)
        elif kind == "choice":
            values["choice"] = check_texts("choice", self.choice)
            if not values["choice"]:
                raise ValueError("choice is empty; give at least one string")
        elif kind != "json_object":
            values[kind] = check_text(kind, values[kind])
        values["disable_any_whitespace"] = check_flag("disable_any_whitespace", self.disable_any_whitespace)
        if self.whitespace_pattern is not None:
            values["whitespace_pattern"] = check_text("whitespace_pattern", self.whitespace_pattern)
            if values["disable_any_whitespace"]:
                raise ValueError("disable_any_whitespace and whitespace_pattern are both given; drop one")
        spaces = values["disable_any_whitespace"] or self.whitespace_pattern is not None
        if spaces and kind not in ("json", "json_object"):
            raise ValueError(
                "disable_any_whitespace and whitespace_pattern are about JSON, and have no effect on "
                f"{kind}; leave them out"
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def kind(self) -> str:
        """The one of the first five fields that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @functools.cached_property
    def key(self) -> str:
        """Equal for params that mean the same: a JSON array of kind, value and the two fields about whitespace."""
        value: Any = getattr(self, self.kind)
        if self.kind == "json":
            value = json.loads(value)  # not sorted: the order of properties means something
        elif self.kind == "choice":
            value = sorted(set(value))
        return json.dumps([self.kind, value, self.disable_any_whitespace, self.whitespace_pattern])


def _schema(given: Any) -> str:
    remedy = "give a JSON schema as a dict or as a string"
    try:
        text = json.dumps(dict(given), ensure_ascii=False) if _is_map(given) else given
        schema = json.loads(check_text("json", text, "a JSON schema")) if isinstance(text, str) else None
        json.dumps(schema, allow_nan=False)  # ``key`` does the same
    except json.JSONDecodeError as error:
        raise ValueError(f"json is {shown(given)}, which does not parse ({error}); {remedy}") from None
    except (TypeError, ValueError, RecursionError) as error:
        why = "it is too deep" if isinstance(error, RecursionError) else error
        raise ValueError(f"json cannot be used ({why}); {remedy}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"json is {shown(given)}; it must be a schema, a JSON object; {remedy}")
    return str(text)


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _structured(value: Any) -> StructuredOutputsParams | None:
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not _is_map(value) or not all(isinstance(name, str) for name in value):
        raise ValueError(
            f"structured_outputs is {shown(value)}; it must be StructuredOutputsParams or a dict of its fields"
        )
    try:
        return StructuredOutputsParams(**value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"structured_outputs: {error}") from None


# -- sampling ----------------------------------------------------------------------------------------------------------


class TokenBias(Mapping[int, float]):
    """What to add to the logits of tokens, by id in rising order. Like a dict, but hashable and read-only."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, float]):
        self._values = dict(sorted(values.items()))

    def __getitem__(self, token: int) -> float:
        return self._values[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


def _bias(value: Any) -> TokenBias | None:
    """None for no bias at all. Ids may be strings of digits, as they are in JSON."""
    if value is None:
        return None
    if not _is_map(value):
        raise ValueError(f"logit_bias is {shown(value)}; it must be a dict of token ids and numbers")
    found: dict[int, float] = {}
    for key, number in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token = check_integer("a key of logit_bias", int(key) if digits else key, 0)
        if token in found:
            raise ValueError(f"logit_bias has token id {token} twice; leave one out")
        found[token] = check_number(f"logit_bias[{token}]", number, -MAX_BIAS, MAX_BIAS)
    return TokenBias(found) if found else None


_BEAM = "beam search is a method: LLM.beam_search(prompts, BeamSearchParams(...))"
_STRUCTURED = (
    "give structured_outputs=StructuredOutputsParams(...) with json, regex, choice, grammar or json_object"
)
_PIECES = "what comes in pieces is a matter of the method: LLM.generate gives wholes, LLM.stream gives pieces"
_OTHER_NAMES = {
    **dict.fromkeys(("best_of",), "give n and choose by cumulative_logprob, with logprobs=0"),
    **dict.fromkeys(
        ("use_beam_search", "beam_width", "num_beams", "length_penalty", "early_stopping"), _BEAM
    ),
    **dict.fromkeys(("guided_decoding", "guided_json", "guided_regex", "guided_choice"), _STRUCTURED),
    **dict.fromkeys(("guided_grammar", "guided_json_object", "response_format", "json_schema"), _STRUCTURED),
    **dict.fromkeys(("json", "regex", "choice", "grammar", "json_object"), _STRUCTURED),
    **dict.fromkeys(("output_kind", "stream", "stream_interval"), _PIECES),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_length"), "the name is max_tokens"),
    **dict.fromkeys(("min_new_tokens", "min_length"), "the name is min_tokens"),
    **dict.fromkeys(("stop_strings", "stop_sequences"), "the name is stop"),
    "logits_processors": "no functions of the user's run within a step; there are logit_bias, allowed_token_ids, "
    "bad_words and structured_outputs",
    "bad_words_ids": "give bad_words, as strings; single ids can be forbidden by logit_bias",
    "eos_token_id": "give stop_token_ids, and ignore_eos=True if the model's own shall not count",
    "do_sample": "give temperature=0 for the most likely token each time, more for sampling",
    "top_logprobs": "the name is logprobs",
    "flat_logprobs": "logprobs are a list with a dict for each token",
    "prompt_logprob_token_ids": "LLM.score gives the log-probabilities of a given continuation",
    "prompt_logprob_start": "prompt_logprobs are of the whole prompt",
    "thinking_token_budget": "the limit is max_tokens, for all tokens",
    "repetition_detection": "there are repetition_penalty, frequency_penalty and presence_penalty",
    "skip_reading_prefix_cache": "give the request a cache_salt of its own, or the engine "
    "enable_prefix_caching=False",
    "priority": "it is an argument of generate",
    "echo": "RequestOutput has prompt and prompt_token_ids",
}


@advised(_OTHER_NAMES)
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    The order on the device: logit_bias, repetition, frequency and presence penalties, what is forbidden, temperature,
    top_k, top_p, min_p. Lists become tuples. Raises ValueError naming field, value and range. What depends on the model
    or the engine (ids within the vocabulary, ``max_logprobs``) is checked when the request is queued.
    """

    n: int = 1  # samples of one prompt; they share its KV pages and differ in their seeds
    temperature: float = 1.0  # >= 0; below 1e-5 it means argmax, ties to the lowest id
    top_k: int = 0  # keep the k best tokens; 0 or -1 = off; more than the vocabulary = off
    top_p: float = 1.0  # in (0, 1]; keep the smallest set of best tokens with this probability
    min_p: float = 0.0  # in [0, 1]; keep tokens at least this likely relative to the best
    seed: int | None = None  # 64 bits; equal seeds give equal tokens; None = drawn from the engine's seed
    max_tokens: int | None = 16  # tokens to generate; None = as many as the context allows; 0 = none
    stop_token_ids: Sequence[int] = ()  # sampling one of these ends the request; it stays in the output
    ignore_eos: bool = False  # do not end at the model's end-of-sequence tokens
    skip_special_tokens: bool = True  # leave special tokens out of the text
    detokenize: bool = True  # False: token ids only, text stays empty
    presence_penalty: float = 0.0  # in [-2, 2]; subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # in [-2, 2]; the same, for each time that the token stands there
    repetition_penalty: float = (
        1.0  # > 0; divides logits > 0 of tokens in prompt or output, multiplies the others
    )
    logit_bias: Mapping[int, float] | None = None  # token id -> number in [-100, 100] to add to its logit
    allowed_token_ids: Sequence[int] | None = None  # no others; list an id that may end the text
    bad_words: Sequence[str] = ()  # strings that must not be completed
    min_tokens: int = 0  # <= max_tokens; before only a complete constraint ends it
    stop: Sequence[str] = ()  # a string or several; the text ends before the first that appears in it
    include_stop_str_in_output: bool = False  # the text ends behind it
    spaces_between_special_tokens: bool = True  # matters when special tokens are not skipped
    logprobs: int | None = None  # the k best of each token besides the token itself; -1 = the vocabulary
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    logprob_token_ids: Sequence[int] | None = None  # at most 128, whose logprobs are wanted for each token
    truncate_prompt_tokens: int | None = (
        None  # keep the prompt's last k tokens; -1 = what max_model_len allows
    )
    structured_outputs: StructuredOutputsParams | None = None  # or a dict of its fields

    def __post_init__(self) -> None:
        values = {**self._sampling(), **self._controls(), **self._ends_and_extras()}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.n > 1 and self.greedy:
            raise ValueError(
                f"n is {self.n}, but temperature {self.temperature:g} is greedy, so all samples would be equal; "
                "raise temperature or leave n at 1"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}; raise that"
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                f"stop is {shown(self.stop)}, but detokenize is False and there is no text to find it in; "
                "leave detokenize at True, or give stop_token_ids"
            )

    def _sampling(self) -> dict[str, Any]:
        n = check_integer("n", self.n, 1)
        if n > MAX_SAMPLES:
            raise ValueError(f"n is {n}; it must be at most {MAX_SAMPLES}")
        greedy = "; 1 turns it off, and for the most likely token use temperature=0"
        off = "; 0 or -1 turns it off"
        is_off = isinstance(self.top_k, numbers.Integral) and self.top_k == -1
        seed = self.seed
        return {
            "n": n,
            "temperature": check_number("temperature", self.temperature, 0.0),
            "top_k": 0 if is_off else check_integer("top_k", self.top_k, 0, remedy=off),
            "top_p": check_number("top_p", self.top_p, 0.0, 1.0, greedy, above=True),
            "min_p": check_number("min_p", self.min_p, 0.0, 1.0),
            "seed": None if seed is None else check_integer("seed", seed, -(1 << 63), (1 << 64) - 1),
        }

    def _controls(self) -> dict[str, Any]:
        off = "; 1 turns it off"
        return {
            "presence_penalty": check_number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": check_number(
                "repetition_penalty", self.repetition_penalty, 0.0, remedy=off, above=True
            ),
            "logit_bias": _bias(self.logit_bias),
            "allowed_token_ids": check_some_ids("allowed_token_ids", self.allowed_token_ids),
            "bad_words": () if self.bad_words is None else check_texts("bad_words", self.bad_words),
            "structured_outputs": _structured(self.structured_outputs),
        }

    def _ends_and_extras(self) -> dict[str, Any]:
        stop: Any = (self.stop,) if isinstance(self.stop, str) else self.stop
        ids, most = self.stop_token_ids, self.max_tokens
        whole, room = "for the whole vocabulary", "for as many as max_model_len allows"
        flags = [
            "ignore_eos",
            "skip_special_tokens",
            "detokenize",
            "include_stop_str_in_output",
            "spaces_between_special_tokens",
        ]
        return {
            "max_tokens": None if most is None else check_integer("max_tokens", most, 0),
            "min_tokens": check_integer("min_tokens", self.min_tokens, 0),
            "stop_token_ids": () if ids is None else check_ids("stop_token_ids", ids),
            "stop": () if stop is None else check_texts("stop", stop),
            "logprobs": check_count("logprobs", self.logprobs, 0, whole),
            "prompt_logprobs": check_count("prompt_logprobs", self.prompt_logprobs, 0, whole),
            "logprob_token_ids": check_some_ids(
                "logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS
            ),
            "truncate_prompt_tokens": check_count(
                "truncate_prompt_tokens", self.truncate_prompt_tokens, 1, room
            ),
            **{name: check_flag(name, getattr(self, name)) for name in flags},
        }

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature < 1e-5


@advised({"temperature": "beams are ranked by the model's own log-probabilities, which it does not change"})
@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """How ``LLM.beam_search`` searches. Raises ValueError naming field, value and range."""

    beam_width: int  # >= 1; beams kept at each token, and returned
    max_tokens: int  # >= 1; of each beam
    ignore_eos: bool = False  # do not end beams at the model's end-of-sequence tokens
    length_penalty: float = 1.0  # in [-10, 10]; beams are ordered by logprob / tokens ** length_penalty
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        values = {
            "beam_width": check_integer("beam_width", self.beam_width, 1),
            "max_tokens": check_integer("max_tokens", self.max_tokens, 1),
            "ignore_eos": check_flag("ignore_eos", self.ignore_eos),
            # Within this range no context is so long that the power overflows.
            "length_penalty": check_number("length_penalty", self.length_penalty, -10.0, 10.0),
            "include_stop_str_in_output": check_flag(
                "include_stop_str_in_output", self.include_stop_str_in_output
            ),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

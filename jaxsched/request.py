"""What users get back: RequestOutput, CompletionOutput and their kin. Names as in vLLM.

What they hand in is defined in ``sampling_params.py`` and can be imported from here too.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxsched.checks import refuse_unknown
from jaxsched.sampling_params import (
    MAX_SAMPLES,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
)

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "MAX_SAMPLES",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "Logprob",
    "OutputBuilder",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "StructuredOutputsParams",
    "refuse_unknown",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """What is known of one token at one place of a text."""

    logprob: float  # natural logarithm; what of is the engine's ``logprobs_mode``
    rank: int | None = None  # 1 = the most likely
    decoded_token: str | None = None  # None without a tokenizer


@dataclasses.dataclass
class CompletionOutput:
    """One generated continuation."""

    index: int = 0  # which of the n samples
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)  # includes the token that ended it
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None while it runs
    stop_reason: int | str | None = None  # which of stop_token_ids or stop ended it; None for end-of-sequence
    cumulative_logprob: float | None = None  # sum over the tokens so far; None unless logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None = None  # for each token: itself and the most likely, by id

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestMetrics:
    """When things happened, in seconds of the engine's clock (``time.monotonic`` unless another was passed in)."""

    arrival: float = 0.0
    first_scheduled: float | None = None  # it got a slot
    first_token: float | None = None  # the host saw it
    last_token: float | None = None  # the host saw the latest one
    finished: float | None = None
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, found in the prefix cache
    generation_tokens: int = 0  # of all samples

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival until the host saw the first token."""
        return None if self.first_token is None else self.first_token - self.arrival


@dataclasses.dataclass
class RequestOutput:
    """A request's result. ``outputs`` has one element for each of its n samples. A refused request has ``error`` and
    no tokens.

    From ``LLM.stream`` it is a piece: it has the samples for which there is something new, and their ``text``,
    ``token_ids`` and ``logprobs`` hold only that. ``prompt_logprobs`` are whole, in one piece only.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    error: Exception | None = None
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = (
        None  # for each prompt token; None for the first
    )
    constraint: str | None = None  # where structured outputs are enforced: "device" or "host"
    embedding: list[float] | None = None  # of ``LLM.embed``: pooled hidden state of the prompt

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return self.metrics.cached_tokens


@dataclasses.dataclass
class ScoreOutput:
    """How likely a continuation is after a prompt. A refused request has ``error`` and no numbers."""

    prompt_token_ids: list[int]
    token_ids: list[int]  # of the continuation
    logprob: float = 0.0  # sum of the next
    token_logprobs: list[float] = dataclasses.field(default_factory=list)  # one for each of token_ids
    is_greedy: bool = False  # each token was the most likely one
    error: Exception | None = None


@dataclasses.dataclass(eq=False)
class EmbeddingOutput:
    """A prompt as a vector. A refused request has ``error``, and an embedding of no numbers."""

    prompt_token_ids: list[int]
    embedding: np.ndarray  # float32 [E]
    error: Exception | None = None


class OutputBuilder:
    """Puts the pieces of one request together: text and lists grow, of everything else the newest counts."""

    def __init__(self) -> None:
        self._whole: RequestOutput | None = None
        self._samples: dict[int, CompletionOutput] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, piece: RequestOutput) -> None:
        """The next piece. It stays as it is."""
        if self._whole is None:
            self._whole = _copy(piece)
        else:
            _renew(self._whole, piece)
        for new in piece.outputs:
            if new.index in self._samples:
                self._texts[new.index].append(new.text)
                _append(self._samples[new.index], new)
            else:
                self._texts[new.index] = [new.text]
                self._samples[new.index] = _copy(new)

    def output(self) -> RequestOutput:
        """The whole, its samples in order."""
        assert self._whole is not None, "a request got lost"
        for index, texts in self._texts.items():
            self._samples[index].text = "".join(texts)
        return dataclasses.replace(self._whole, outputs=[self._samples[i] for i in sorted(self._samples)])


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _copy[T: (CompletionOutput, RequestOutput)](output: T) -> T:
    """A copy with lists of its own."""
    fields = dataclasses.fields(output)
    return type(output)(**{field.name: _copied(getattr(output, field.name)) for field in fields})


def _renew(whole: RequestOutput, piece: RequestOutput) -> None:
    """All but the samples. What was said once need not be said again; its lists are said at once."""
    for field in dataclasses.fields(piece):
        before, value = getattr(whole, field.name), getattr(piece, field.name)
        said = before if isinstance(before, list) else None
        if field.name != "outputs" and not said and (value or before is None):
            setattr(whole, field.name, _copied(value))


def _append(whole: CompletionOutput, new: CompletionOutput) -> None:
    """All but the text."""
    for field in dataclasses.fields(new):
        before, value = getattr(whole, field.name), getattr(new, field.name)
        if isinstance(before, list) and isinstance(value, list):
            before.extend(value)
        elif value is not None and field.name != "text":
            setattr(whole, field.name, _copied(value))

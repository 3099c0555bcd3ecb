"""What users hand in and get back: SamplingParams, RequestOutput, CompletionOutput. Names as in vLLM."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
from collections.abc import Iterable
from typing import Any

MAX_SAMPLES = 1024  # of one request


def _number(
    name: str, value: Any, low: float, high: float, remedy: str = "", *, positive: bool = False
) -> float:
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not low <= number <= high or (positive and number == 0):
        bound = f"a finite number of at least {low:g}"
        if math.isfinite(high):
            bound = f"in {'(' if positive else '['}{low:g}, {high:g}]"
        raise ValueError(f"{name} is {value!r}; it must be {bound}{remedy}")
    if math.isinf(number):
        raise ValueError(f"{name} is {value!r:.40}; it must be finite{remedy}")
    return number


def _integer(name: str, value: Any, low: int, high: int | None = None, remedy: str = "") -> int:
    fits = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not fits or value < low or (high is not None and value > high):
        bound = f"an integer of at least {low}" if high is None else f"an integer in {low}..{high}"
        raise ValueError(f"{name} is {value!r}; it must be {bound}{remedy}")
    return int(value)


def refuse_unknown(owner: str, given: Iterable[str], known: list[str]) -> None:
    """Raises TypeError for a name that is not known, with the nearest known one or all of them."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise TypeError(f"{owner} has no argument {name!r}; {hint}")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Filters apply in this order: temperature, top_k, top_p, min_p. Raises ValueError naming field, value and range.
    """

    n: int = 1  # samples of one prompt; they share its KV pages and differ in their seeds
    temperature: float = 1.0  # >= 0; below 1e-5 it means argmax, ties to the lowest id
    top_k: int = 0  # keep the k best tokens; 0 or -1 = off; more than the vocabulary = off
    top_p: float = 1.0  # in (0, 1]; keep the smallest set of best tokens with this probability
    min_p: float = 0.0  # in [0, 1]; keep tokens at least this likely relative to the best
    seed: int | None = None  # 64 bits; equal seeds give equal tokens; None = drawn from the engine's seed
    max_tokens: int | None = 16  # tokens to generate; None = as many as the context allows; 0 = none
    stop_token_ids: tuple[int, ...] = ()  # sampling one of these ends the request; it stays in the output
    ignore_eos: bool = False  # do not end at the model's end-of-sequence tokens
    skip_special_tokens: bool = True  # leave special tokens out of the text
    detokenize: bool = True  # False: token ids only, text stays empty

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("n", _integer("n", self.n, 1))
        if self.n > MAX_SAMPLES:
            raise ValueError(f"n is {self.n}; it must be at most {MAX_SAMPLES}")
        put("temperature", _number("temperature", self.temperature, 0.0, math.inf))
        if self.n > 1 and self.greedy:
            raise ValueError(
                f"n is {self.n}, but temperature {self.temperature:g} is greedy, so all samples would be equal; "
                "raise temperature or leave n at 1"
            )
        put(
            "top_k",
            0 if self.top_k == -1 else _integer("top_k", self.top_k, 0, remedy="; 0 or -1 turns it off"),
        )
        greedy = "; 1 turns it off, and for the most likely token use temperature=0"
        put("top_p", _number("top_p", self.top_p, 0.0, 1.0, greedy, positive=True))
        put("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1))
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens, 0))
        try:
            ids = () if self.stop_token_ids is None else tuple(self.stop_token_ids)
        except TypeError:
            raise ValueError(
                f"stop_token_ids is {self.stop_token_ids!r}; it must be a list of token ids"
            ) from None
        put("stop_token_ids", tuple(_integer("stop_token_ids", i, 0) for i in ids))
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature < 1e-5


def _with_hints(cls: type) -> None:
    """Lets the constructor of a dataclass refuse unknown names helpfully."""
    original: Any = cls.__init__  # type: ignore[misc]
    known = [field.name for field in dataclasses.fields(cls)]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, known)
        original(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[misc]


_with_hints(SamplingParams)


@dataclasses.dataclass
class CompletionOutput:
    """One generated continuation."""

    index: int = 0  # which of the n samples
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)  # includes the token that ended it
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None while it runs
    stop_reason: int | None = None  # the id out of stop_token_ids that ended it; None for end-of-sequence

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

    From ``LLM.stream`` it is a piece: it has the samples for which there is something new, and their ``text`` and
    ``token_ids`` hold only that.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    error: Exception | None = None
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return self.metrics.cached_tokens


class OutputBuilder:
    """Puts the pieces of one request together: text and lists grow, of everything else the newest counts."""

    def __init__(self) -> None:
        self._whole: RequestOutput | None = None
        self._samples: dict[int, CompletionOutput] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, piece: RequestOutput) -> None:
        """The next piece. It stays as it is."""
        before, fields = self._whole, dataclasses.fields(piece)
        # What was said once need not be said again.
        said = {f.name: getattr(piece, f.name) or getattr(before or piece, f.name) for f in fields}
        self._whole = RequestOutput(**said)
        for new in piece.outputs:
            if new.index in self._samples:
                self._texts[new.index].append(new.text)
                _append(self._samples[new.index], new)
            else:
                self._texts[new.index] = [new.text]
                copies = {f.name: _copied(getattr(new, f.name)) for f in dataclasses.fields(new)}
                self._samples[new.index] = CompletionOutput(**copies)

    def output(self) -> RequestOutput:
        """The whole, its samples in order."""
        assert self._whole is not None, "a request got lost"
        for index, texts in self._texts.items():
            self._samples[index].text = "".join(texts)
        return dataclasses.replace(self._whole, outputs=[self._samples[i] for i in sorted(self._samples)])


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _append(whole: CompletionOutput, new: CompletionOutput) -> None:
    """All but the text."""
    for field in dataclasses.fields(new):
        value = getattr(new, field.name)
        if isinstance(value, list):
            getattr(whole, field.name).extend(value)
        elif value is not None and field.name != "text":
            setattr(whole, field.name, value)

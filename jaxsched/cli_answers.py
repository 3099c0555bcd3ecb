"""Generates and prints the answers of ``jaxsched generate``."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tqdm import tqdm

from jaxsched.llm import LLM
from jaxsched.prompt_file import Question
from jaxsched.request import CompletionOutput, Logprob, OutputBuilder, RequestOutput, SamplingParams

TITLE_WIDTH = 70  # characters of a prompt shown above its answer


@dataclasses.dataclass
class Answer:
    """What has come for one question."""

    prompt: str | None  # as it was given; of a conversation the rendered text
    last: RequestOutput | None = None  # the latest piece
    error: Exception | None = None  # why it was refused
    pieces: OutputBuilder = dataclasses.field(default_factory=OutputBuilder)

    def add(self, piece: RequestOutput) -> str:
        """Takes a piece in. Returns its text, of all samples that it has."""
        self.pieces.add(piece)
        self.last, self.error = piece, piece.error
        return "".join(output.text for output in piece.outputs)

    @property
    def done(self) -> bool:
        return self.error is not None or (self.last is not None and self.last.finished)

    @property
    def samples(self) -> list[CompletionOutput]:
        """All that has come, one for each sample."""
        return [] if self.last is None else self.pieces.output().outputs

    def records(self) -> list[dict[str, Any]]:
        """The JSON objects of --json, one for each sample; one for a question that was refused."""
        samples = self.samples or [CompletionOutput(finish_reason="error")]
        return [self._record(sample, len(samples) > 1) for sample in samples]

    def _record(self, sample: CompletionOutput, several: bool) -> dict[str, Any]:
        last = self.last
        record = {
            "prompt": self.prompt,
            "text": sample.text,
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason,
            "prompt_tokens": 0 if last is None else len(last.prompt_token_ids),
            "output_tokens": len(sample.token_ids),
            "time_to_first_token_s": None if last is None else last.metrics.time_to_first_token,
        }
        constraint = None if last is None else self.pieces.output().constraint
        more = {
            "index": sample.index if several else None,
            "stop_reason": sample.stop_reason,
            "constraint": constraint,
            "cumulative_logprob": _finite(sample.cumulative_logprob),
            "logprobs": None if sample.logprobs is None else _places(sample),
            "error": None if self.error is None else str(self.error),
        }
        return record | {name: value for name, value in more.items() if value is not None}


def _finite(number: float | None) -> float | None:
    """JSON has no infinity."""
    return number if number is not None and math.isfinite(number) else None


def _by_logprob(known: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    """Tokens and what is known of them, the most likely first."""
    return sorted(known.items(), key=lambda item: -item[1].logprob)


def _places(sample: CompletionOutput) -> list[dict[str, Any]]:
    """The log-probabilities of a sample for JSON: an object for each token, with its likeliest alternatives."""

    def entry(token: int, known: Logprob) -> dict[str, Any]:
        number = _finite(known.logprob)
        return {"token_id": token, "token": known.decoded_token, "logprob": number, "rank": known.rank}

    return [
        {**entry(token, known[token]), "top_logprobs": [entry(*item) for item in _by_logprob(known)]}
        for token, known in zip(sample.token_ids, sample.logprobs or [], strict=True)
    ]


def logprob_table(sample: CompletionOutput) -> str:
    """The log-probabilities of a sample for readers, a line for each token; empty if none were asked for."""

    def name(token: int, known: Logprob) -> str:
        return str(token) if known.decoded_token is None else repr(known.decoded_token)

    lines = []
    for token, known in zip(sample.token_ids, sample.logprobs or [], strict=sample.logprobs is not None):
        own = known[token]
        others = [f"{name(*item)} {item[1].logprob:.3f}" for item in _by_logprob(known) if item[0] != token]
        lines.append(
            f"{own.logprob:9.3f}  {own.rank or '-':>6}  {name(token, own):<16}  {', '.join(others)}".rstrip()
        )
    return "\n".join(["  logprob    rank  token             others", *lines, ""]) if lines else ""


class Printer(Protocol):
    """Where answers go. Both methods return the text to print now."""

    def piece(self, text: str) -> str:
        """New text of some answer."""
        ...

    def answer(self, index: int, answer: Answer) -> str:
        """The whole of answer ``index``; called once for each, in their order."""
        ...


class TextPrinter:
    """A single answer as it comes, several of them whole, with titles."""

    def __init__(self, prompts: int, samples: int = 1):
        self.prompts, self.samples = prompts, samples
        self.streams = prompts * samples == 1

    def piece(self, text: str) -> str:
        return text if self.streams else ""

    def answer(self, index: int, answer: Answer) -> str:
        if answer.error is not None:
            return ""
        if self.streams:
            (sample,) = answer.samples
            return ("" if sample.text.endswith("\n") else "\n") + logprob_table(sample)
        title = " ".join((answer.prompt or "").split())
        if len(title) > TITLE_WIDTH:
            title = title[: TITLE_WIDTH - 1] + "…"
        shown = []
        for sample in answer.samples:
            which = f" [{sample.index + 1}/{self.samples}]" if self.samples > 1 else ""
            shown.append(f"### {index + 1}/{self.prompts}{which}: {title}\n{sample.text.strip()}\n")
            shown.append(logprob_table(sample) + "\n")
        return "".join(shown)


class JsonPrinter:
    """One line per answer, in ASCII so that no terminal or pipe can spoil it."""

    def piece(self, text: str) -> str:
        return ""

    def answer(self, index: int, answer: Answer) -> str:
        return "".join(json.dumps(record) + "\n" for record in answer.records())


def answer_all(
    llm: LLM,
    asked: list[Question],
    params: SamplingParams,
    printer: Printer,
    *,
    bar: bool,
    complain: Callable[[str], None],
) -> int:
    """Answers every question, printing each as soon as it and all before it are done; returns how many were refused.

    ``complain`` gets a line for each that was. Raises KeyboardInterrupt when interrupted.
    """
    answers, printed = [Answer(question.prompt) for question in asked], 0
    if sys.stdout is None:
        raise OSError("there is nowhere to print: stdout is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks is no reason to stop
    with tqdm(
        total=len(asked), unit="prompt", dynamic_ncols=True, disable=not bar, file=sys.stderr
    ) as progress:

        def write(text: str) -> None:
            if text:
                with progress.external_write_mode(file=sys.stdout):
                    sys.stdout.write(text)
                    sys.stdout.flush()

        for index, new in _advance(llm, asked, answers, params):
            write(printer.piece(new))
            progress.update(answers[index].done)
            while printed < len(answers) and answers[printed].done:
                if (error := answers[printed].error) is not None:
                    complain(f"prompt {printed + 1} of {len(answers)} was refused: {error}")
                write(printer.answer(printed, answers[printed]))
                printed += 1
    assert printed == len(answers), f"{printed} of {len(answers)} questions were answered"
    return sum(answer.error is not None for answer in answers)


def _advance(
    llm: LLM, asked: list[Question], answers: list[Answer], params: SamplingParams
) -> Iterator[tuple[int, str]]:
    """Fills ``answers``; yields the index of each that has changed, and its new text."""
    prompts, index_of = [], []
    for index, question in enumerate(asked):
        try:
            prompt: Any = question.prompt
            if question.messages is not None:
                prompt = llm.chat_prompts(question.messages)[0]
                if question.prompt is None:
                    answers[index].prompt = prompt["prompt"]
        except ValueError as error:
            answers[index].error = error
            yield index, ""
        else:
            prompts.append(prompt)
            index_of.append(index)
    if not prompts:
        return
    with _interruptible() as interrupted, contextlib.closing(llm.stream(prompts, params)) as pieces:
        try:
            for position, piece in pieces:
                yield index_of[position], answers[index_of[position]].add(piece)
                if interrupted():
                    raise KeyboardInterrupt
        except ValueError as error:
            if len(index_of) != 1:
                raise
            answers[index_of[0]].error = error  # a refusal is raised when the prompt is the only one
            yield index_of[0], ""


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks to stop after the round that runs, so that the engine is left in order; a second one stops now."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)

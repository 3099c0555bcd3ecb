"""Generates and prints the answers of ``jaxsched generate``."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tqdm import tqdm

from jaxsched.llm import LLM
from jaxsched.prompt_file import Question
from jaxsched.request import RequestOutput, SamplingParams

TITLE_WIDTH = 70  # characters of a prompt shown above its answer


@dataclasses.dataclass
class Answer:
    """What has come for one question."""

    prompt: str | None  # as it was given; of a conversation the rendered text
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    last: RequestOutput | None = None  # the latest piece
    error: Exception | None = None  # why it was refused

    def add(self, piece: RequestOutput) -> None:
        """Takes a piece in."""
        self.text += piece.outputs[0].text
        self.token_ids += piece.outputs[0].token_ids
        self.last, self.error = piece, piece.error

    @property
    def done(self) -> bool:
        return self.error is not None or (self.last is not None and self.last.finished)

    def record(self) -> dict[str, Any]:
        """The JSON object of --json."""
        last = self.last
        record = {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": "error" if last is None else last.outputs[0].finish_reason,
            "prompt_tokens": 0 if last is None else len(last.prompt_token_ids),
            "output_tokens": len(self.token_ids),
            "time_to_first_token_s": None if last is None else last.metrics.time_to_first_token,
        }
        return record if self.error is None else {**record, "error": str(self.error)}


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

    def __init__(self, total: int):
        self.total = total

    def piece(self, text: str) -> str:
        return text if self.total == 1 else ""

    def answer(self, index: int, answer: Answer) -> str:
        if answer.error is not None:
            return ""
        if self.total == 1:
            return "" if answer.text.endswith("\n") else "\n"
        title = " ".join((answer.prompt or "").split())
        if len(title) > TITLE_WIDTH:
            title = title[: TITLE_WIDTH - 1] + "…"
        return f"### {index + 1}/{self.total}: {title}\n{answer.text.strip()}\n\n"


class JsonPrinter:
    """One line per answer, in ASCII so that no terminal or pipe can spoil it."""

    def piece(self, text: str) -> str:
        return ""

    def answer(self, index: int, answer: Answer) -> str:
        return json.dumps(answer.record()) + "\n"


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
                answers[index_of[position]].add(piece)
                yield index_of[position], piece.outputs[0].text
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

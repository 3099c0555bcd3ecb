"""Prompts for the command line, from its arguments or from a file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from jaxsched.request import SamplingParams

JSON_SUFFIXES = (".jsonl", ".ndjson")


@dataclasses.dataclass(frozen=True)
class Question:
    """One thing to answer."""

    prompt: str | None  # as it was given; None for a conversation
    messages: list[Any] | None = None  # what goes through the chat template; None: the prompt goes as it is


def questions(prompts: list[str], file: str | None, chat: bool, system: str | None) -> list[Question]:
    """What the options --prompt, --prompts-file, --chat and --system ask for, in order.

    A system message goes before each user message, and before each conversation that has none of its own.
    Raises ValueError for options that contradict each other and for a file that cannot be read.
    """
    if prompts and file is not None:
        raise ValueError("both --prompt and --prompts-file are given; leave one out")
    if not prompts and file is None:
        raise ValueError("there is nothing to answer; give --prompt TEXT or --prompts-file FILE")
    items = [Question(text) for text in prompts] if file is None else read_prompts(file)
    if system is not None and not chat and not any(item.messages for item in items):
        raise ValueError("--system is given without a chat; add --chat")
    before = [] if system is None else [{"role": "system", "content": system}]
    return [_with_messages(item, before, chat) for item in items]


def _with_messages(item: Question, before: list[Any], chat: bool) -> Question:
    if item.messages is not None:
        first = item.messages[0]
        own = isinstance(first, dict) and first.get("role") == "system"
        return item if own else Question(None, [*before, *item.messages])
    return Question(item.prompt, [*before, {"role": "user", "content": item.prompt}]) if chat else item


def read_prompts(file: str) -> list[Question]:
    """The prompts of a UTF-8 file, or of stdin for "-"; blank lines are skipped.

    A .jsonl file has one object per line, with "prompt" or "messages"; other keys are ignored, except names of
    SamplingParams, which are refused. Any other file has one prompt per line. Stdin is either, as its first line shows.
    Raises ValueError naming file and line.
    """
    where = "stdin" if file == "-" else file
    if file == "-" and sys.stdin is None:
        raise ValueError("the prompts are to come from stdin, but it is closed; name a file instead")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except OSError as error:
        raise ValueError(
            f"--prompts-file {where}: {error.strerror}; give a file that can be read, or -"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts-file {where} is not UTF-8 (byte {error.start}); convert it") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"--prompts-file {where} has no prompts; write one per line")
    is_json = Path(file).suffix.lower() in JSON_SUFFIXES if file != "-" else _is_record(numbered[0][1])
    if not is_json:
        return [Question(line) for _, line in numbered]
    return [_question(f"--prompts-file {where}, line {number}", line) for number, line in numbered]


def _is_record(line: str) -> bool:
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        return isinstance(record, dict) and bool(record.keys() & {"prompt", "messages"})
    return False


def _question(where: str, line: str) -> Question:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON ({error}); write one object per line") from error
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise ValueError(f'{where} must be an object with one of "prompt" and "messages"; it is {line:.60}')
    ignored = sorted(record.keys() & {field.name for field in dataclasses.fields(SamplingParams)})
    if ignored:
        raise ValueError(f"{where} has {ignored[0]!r}; settings are the same for all lines: give an option")
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"{where}: messages is {messages!r:.60}; give a list of messages")
        return Question(None, messages)
    if not isinstance(record["prompt"], str):
        raise ValueError(f"{where}: prompt is {record['prompt']!r:.60}; give a string")
    return Question(record["prompt"])

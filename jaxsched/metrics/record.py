"""What one round did, as a value: for metrics, logs and timelines."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

# Why a planned row-step sampled nothing.
STOPPED, RUN_AHEAD, ABORTED, PREEMPTED = "stopped", "run_ahead", "aborted", "preempted"
PREFILL, DECODE = "prefill", "decode"  # kinds of work
PHASES = (
    "plan",
    "dispatch",
    "wait",
    "commit",
    "emit",
)  # of the host, in the order in which a round meets them


class Segment(NamedTuple):
    """A part of a round that one program ran on the device. Times in clock seconds."""

    first: int  # step of the round
    steps: int
    chunk: int  # chunk bucket of each step; 0: decode steps
    slots: int  # slot bucket
    start: float
    end: float


class Work(NamedTuple):
    """What one slot did in consecutive steps of a round.

    Decode work is the steps that may sample, from the step that reads a prompt's last tokens on: in that step prefill
    and decode of a slot overlap. Its ``tokens`` are those sampled, in its first steps; the other steps were wasted.
    Those of prefill work are prompt tokens read, and none is wasted.
    """

    slot: int
    request_id: str
    kind: str  # "prefill" or "decode"
    first: int  # step of the round
    steps: int
    tokens: int

    @property
    def wasted(self) -> int:
        """Row-steps that sampled nothing."""
        return max(0, self.steps - self.tokens) if self.kind == DECODE else 0


@dataclasses.dataclass(slots=True)
class RoundRecord:
    """One round. Made when it is planned; what only its end can tell is filled in when it is committed."""

    round: int  # counts from 0
    time: float  # clock seconds when it was planned
    steps: int  # N
    mixed: int  # M, how many of the steps also read prompts
    chunk: int  # largest chunk bucket used; 0: none
    slots: int  # slot bucket of the decode steps
    running: int  # sequences that hold a slot after planning
    waiting: int  # sequences in the queue after planning
    live: int  # sequences that may sample in the round
    prefill_tokens: int  # prompt tokens read
    cached_tokens: int  # prompt tokens that admissions of this round found in the prefix cache
    decode_tokens: int = 0  # tokens sampled
    # Row-steps that were planned and sampled nothing, by reason: "stopped" (ended in an earlier step of the round),
    # "run_ahead" (ended in an earlier round, not yet known when this one was planned), "aborted", "preempted".
    wasted: dict[str, int] = dataclasses.field(default_factory=dict)
    pages_used: int = 0
    pages_cached: int = 0
    preempted: int = 0
    host_us: dict[str, float] = dataclasses.field(default_factory=dict)  # microseconds by phase, see PHASES
    device_us: float = 0.0  # microseconds the device took
    idle_us: float = 0.0  # microseconds it stood idle before or in this round, waiting for the host
    reason: str = ""  # why this many steps and this chunk
    segments: list[Segment] = dataclasses.field(default_factory=list)
    work: list[Work] = dataclasses.field(default_factory=list)

    def tokens_per_step(self) -> tuple[list[int], list[int]]:
        """Prompt tokens read and tokens sampled, of each step. Read off ``work``.

        A piece of prefill that goes over several steps counts in equal parts.
        """
        prompt, change = [0] * self.steps, [0] * (self.steps + 1)
        for _, _, kind, first, steps, tokens in self.work:
            stop = min(first + steps, self.steps)
            if kind == DECODE:
                change[first] += 1
                change[min(first + tokens, stop)] -= 1
                continue
            share, rest = divmod(tokens, steps)
            for step in range(first, stop):
                prompt[step] += share + (step - first < rest)
        return prompt, list(itertools.accumulate(change[:-1]))

    def to_json(self) -> str:
        """The record as one line of JSON, without the line's end. Segments and work are arrays, fields in order."""
        values = {name: getattr(self, name) for name in _FIELDS}
        return json.dumps(values, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """The record that ``to_json`` wrote. Raises ValueError that says what is wrong with the line."""
        try:
            values = json.loads(line)
        except ValueError as error:  # a JSON error or bytes that are not UTF-8
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"a round record is a JSON object, not {values!r:.40}")
        unknown = values.keys() - _FIELDS.keys()
        if unknown:
            raise ValueError(f"a round record has no field {min(unknown)!r}; is it of another version?")
        missing = _REQUIRED - values.keys()
        if missing:
            raise ValueError(f"the round record lacks the field {min(missing)!r}")
        return cls(**{name: _read(name, _FIELDS[name], value) for name, value in values.items()})


def _is(kind: str, value: Any) -> bool:
    if kind == "str":
        return isinstance(value, str)
    number = isinstance(value, int if kind == "int" else int | float)
    return number and not isinstance(value, bool)


def _read(name: str, kind: str, value: Any) -> Any:
    """A field's value out of JSON; ``kind`` is its annotation. Raises ValueError."""
    if kind.startswith("dict"):
        item = kind.removeprefix("dict[str, ").removesuffix("]")
        if isinstance(value, dict) and all(_is(item, v) for v in value.values()):
            return value
    elif kind.startswith("list"):
        row: type[Segment] | type[Work] = Segment if kind == "list[Segment]" else Work
        if isinstance(value, list) and all(_fits(row, v) for v in value):
            return [row(*v) for v in value]
    elif _is(kind, value):
        return value
    raise ValueError(f"the field {name!r} of the round record is {value!r:.60}; it must be {_ENGLISH[kind]}")


def _fits(row: type, value: Any) -> bool:
    kinds = list(row.__annotations__.values())
    kinds = [getattr(kind, "__forward_arg__", kind) for kind in kinds]
    return isinstance(value, list) and len(value) == len(kinds) and all(map(_is, kinds, value))


_FIELDS: dict[str, str] = {field.name: str(field.type) for field in dataclasses.fields(RoundRecord)}
_REQUIRED = {
    field.name
    for field in dataclasses.fields(RoundRecord)
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
}
_ENGLISH = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "dict[str, int]": "an object of integers",
    "dict[str, float]": "an object of numbers",
    "list[Segment]": f"an array of arrays {list(Segment._fields)}",
    "list[Work]": f"an array of arrays {list(Work._fields)}",
}


class RoundLog:
    """A file that round records are appended to, one line each; every line is written at once.

    Raises OSError that names path and remedy when it cannot write.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            self._file = self.path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise self._refusal(error) from error

    def append(self, record: RoundRecord) -> None:
        """Writes one record. Raises ValueError when the log is closed."""
        if self._file.closed:
            raise ValueError(f"the round log {self.path} is closed; open a new RoundLog to go on")
        try:
            self._file.write(record.to_json() + "\n")
        except OSError as error:
            raise self._refusal(error) from error

    def close(self) -> None:
        """Closes the file. Again: nothing happens."""
        try:
            self._file.close()
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> OSError:
        text = (
            f"cannot write the round log {self.path}: {error.strerror or error}; give a path in a folder that exists "
            "and can be written to, on a disk with room"
        )
        return type(error)(error.errno, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_round_log(path: str | os.PathLike[str]) -> Iterator[RoundRecord]:
    """The records of a log, read as they are asked for.

    Raises OSError if the file cannot be read, ValueError that says file and line if a line is broken.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = RoundRecord.from_json(line)
            except ValueError as error:
                raise ValueError(
                    f"{os.fspath(path)}, line {number}: {error}; delete the line to read the others"
                ) from None
            yield record

"""Round records laid out in time: when each step ran, and what each slot did when."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from .record import DECODE, PREFILL, RoundRecord, Work

WASTED = "wasted"  # decode steps that sampled nothing; beside the two kinds of work
RESOLUTION = 1e-9  # seconds; what is shorter is an error of rounding


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step on the device. Inside a segment of several steps the times are interpolated."""

    index: int  # in its round
    start: float  # clock seconds
    end: float
    chunk: int  # chunk bucket; 0: a decode step
    slots: int


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """What a slot did without a break: a piece of work, or the wasted rest of one."""

    slot: int
    request_id: str
    kind: str  # "prefill", "decode" or "wasted"
    start: float
    end: float
    steps: int
    tokens: int


def steps_of(record: RoundRecord) -> list[Step]:
    """The steps of a round in order, as far as its segments tell."""
    steps = []
    for first, count, chunk, slots, start, end in record.segments:
        each = (end - start) / count if count else 0.0
        for i in range(min(count, record.steps - first)):
            steps.append(Step(first + i, start + i * each, start + (i + 1) * each, chunk, slots))
    return steps


def spans_of(record: RoundRecord) -> Iterator[Span]:
    """The work of a round, what was wasted apart. Work in steps without a time is left out.

    The spans of a slot do not overlap: a step that reads a prompt's last tokens and samples belongs to the prefill.
    """
    times = {step.index: step for step in steps_of(record)}
    reads = {(w.slot, w.first + i) for w in record.work if w.kind == PREFILL for i in range(w.steps)}

    def span(piece: Work, kind: str, first: int, stop: int, tokens: int) -> Iterator[Span]:
        if first < stop and first in times and stop - 1 in times:
            start, end = times[first].start, times[stop - 1].end
            yield Span(piece.slot, piece.request_id, kind, start, end, stop - first, tokens)

    for piece in record.work:
        first, stop = piece.first, piece.first + piece.steps
        if piece.kind == PREFILL:
            yield from span(piece, PREFILL, first, stop, piece.tokens)
            continue
        alone = first + ((piece.slot, first) in reads)
        sampled = stop - piece.wasted
        yield from span(piece, DECODE, alone, sampled, sampled - alone)
        yield from span(piece, WASTED, max(alone, sampled), stop, 0)


def idle_of(record: RoundRecord, before: float) -> list[tuple[float, float]]:
    """When the device waited for the host since ``before``, when the round before had ended.

    What is idle is the pauses in the round and, as long as ``idle_us`` says, the time right before it: for the rest of
    that there was nothing to do.
    """
    pauses = [(a.end, b.start) for a, b in itertools.pairwise(record.segments) if b.start > a.end]
    rest = record.idle_us / 1e6 - sum(end - start for start, end in pauses)
    start = start_of(record)
    if rest > RESOLUTION and start > before:
        pauses.insert(0, (max(before, start - rest), start))
    return pauses if record.idle_us > 0 else []


def timed(records: Iterable[RoundRecord], wanted: str) -> list[RoundRecord]:
    """The rounds that have run on the device, in order. Raises ValueError when there are none."""
    rounds = sorted((record for record in records if record.segments), key=lambda record: record.round)
    if not rounds:
        raise ValueError(
            f"no round to put into {wanted}: none of the records has device times; give records of rounds that were "
            "committed, such as Engine.rounds after the engine has worked, or those of a round log"
        )
    return rounds


def start_of(record: RoundRecord) -> float:
    """When the device began with the round, in clock seconds."""
    return record.segments[0].start


def end_of(record: RoundRecord) -> float:
    """When the device was done with the round, in clock seconds."""
    return record.segments[-1].end

"""Round records as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, in the Trace Event Format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from .record import PHASES, RoundRecord
from .spans import end_of, idle_of, spans_of, start_of, steps_of, timed

DEVICE, HOST, SLOTS = 1, 2, 3  # process ids
ROUNDS, STEPS = (
    1,
    2,
)  # threads of the device; slot s is thread s + 1, since some viewers keep 0 for themselves

Event = dict[str, Any]


def write_trace(records: Iterable[RoundRecord], path: str | os.PathLike[str]) -> None:
    """Writes the rounds' trace as JSON; times count from the first round.

    The process "device" has rounds and steps, "host" its phases, "slots" a thread for each slot. Records say how long
    the host's phases took but not when the later ones began: "wait" is drawn to end with the round on the device,
    "commit" and "emit" after it, and all of them one after the other. Raises ValueError when no record has device
    times, OSError when the file cannot be written.
    """
    rounds = timed(records, "a trace")
    origin = min(start_of(rounds[0]), *(record.time for record in rounds))
    events: list[Event] = []
    before = origin
    for record in rounds:
        events += _device(record, origin, before)
        before = end_of(record)
        events += _slots(record, origin)
        events += _counters(record, origin)
    events += _host(rounds, origin)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))  # what contains others comes first
    slots = sorted({event["tid"] - 1 for event in events if event["pid"] == SLOTS})
    trace = {"displayTimeUnit": "ms", "traceEvents": [*_names(slots), *events]}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(trace, file, separators=(",", ":"), ensure_ascii=False)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _piece(pid: int, tid: int, name: str, start: float, end: float, origin: float, args: Event) -> Event:
    """A complete event. Both ends are rounded, so that pieces which touch do not overlap."""
    ts = _microseconds(start - origin)
    duration = round(max(0.0, _microseconds(end - origin) - ts), 3)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": name,
        "ts": ts,
        "dur": duration,
        "args": args,
    }


def _device(record: RoundRecord, origin: float, before: float) -> Iterator[Event]:
    """A round, its steps, and the idle time since ``before``, when the round before it ended."""
    start = start_of(record)
    args = {
        **{name: getattr(record, name) for name in ("round", "steps", "mixed", "chunk", "slots", "live")},
        **{name: getattr(record, name) for name in ("prefill_tokens", "cached_tokens", "decode_tokens")},
        **{"wasted": record.wasted, "preempted": record.preempted, "reason": record.reason},
    }
    yield _piece(DEVICE, ROUNDS, f"round {record.round}", start, end_of(record), origin, args)
    for waits, works in idle_of(record, before):
        yield _piece(DEVICE, STEPS, "idle", waits, works, origin, {"round": record.round})
    prompt, sampled = record.tokens_per_step()
    for step in steps_of(record):
        details = {"round": record.round, "step": step.index, "slots": step.slots}
        details |= {"prompt_tokens": prompt[step.index], "decode_tokens": sampled[step.index]}
        name = f"mixed {step.chunk}" if step.chunk else "decode"
        yield _piece(DEVICE, STEPS, name, step.start, step.end, origin, details)


def _slots(record: RoundRecord, origin: float) -> Iterator[Event]:
    for span in spans_of(record):
        args = {"request": span.request_id, "tokens": span.tokens, "steps": span.steps, "round": record.round}
        yield _piece(SLOTS, span.slot + 1, span.kind, span.start, span.end, origin, args)


def _counters(record: RoundRecord, origin: float) -> Iterator[Event]:
    tracks: dict[str, Event] = {
        "pages": {"used": record.pages_used, "cached": record.pages_cached},
        "waiting": {"waiting": record.waiting},
        "running": {"running": record.running},
    }
    ts = _microseconds(record.time - origin)
    for name, args in tracks.items():
        yield {"ph": "C", "pid": HOST, "tid": 0, "name": name, "ts": ts, "args": args}


def _host(rounds: list[RoundRecord], origin: float) -> Iterator[Event]:
    """The phases, as two blocks a round: before the device has it and after. The host does one thing at a time."""
    blocks: list[tuple[float, RoundRecord, tuple[str, ...]]] = []
    for record in rounds:
        wait = record.host_us.get("wait", 0.0) / 1e6
        blocks.append((record.time, record, PHASES[:2]))
        blocks.append((end_of(record) - wait, record, PHASES[2:]))
    now = origin
    for start, record, phases in sorted(blocks, key=lambda block: block[0]):
        now = max(now, start)
        for phase in phases:
            duration = record.host_us.get(phase, 0.0) / 1e6
            if duration > 0:
                yield _piece(HOST, 1, phase, now, now + duration, origin, {"round": record.round})
                now += duration


def _names(slots: list[int]) -> Iterator[Event]:
    """Metadata: names and order of processes and threads."""

    def name(kind: str, pid: int, tid: int, value: Any) -> Event:
        key = "sort_index" if kind.endswith("sort_index") else "name"
        return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": kind, "args": {key: value}}

    for pid, process in ((DEVICE, "device"), (HOST, "host"), (SLOTS, "slots")):
        yield name("process_name", pid, 0, process)
        yield name("process_sort_index", pid, 0, pid)
    yield name("thread_name", DEVICE, ROUNDS, "rounds")
    yield name("thread_name", DEVICE, STEPS, "steps")
    yield name("thread_name", HOST, 1, "phases")
    for slot in slots:
        yield name("thread_name", SLOTS, slot + 1, f"slot {slot}")
        yield name("thread_sort_index", SLOTS, slot + 1, slot)

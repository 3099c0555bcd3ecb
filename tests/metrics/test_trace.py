"""The trace: the rules of the Trace Event Format, and what is in it."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from jaxsched.metrics import RoundRecord, write_trace

Event = dict[str, Any]


@pytest.fixture
def trace(tmp_path: Path, rounds: list[RoundRecord]) -> list[Event]:
    path = tmp_path / "trace.json"
    write_trace(iter(rounds), path)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert set(document) == {"displayTimeUnit", "traceEvents"} and document["displayTimeUnit"] == "ms"
    return document["traceEvents"]


def names(trace: list[Event], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == kind}


def thread(trace: list[Event], process: str, name: str) -> list[Event]:
    """The complete events of a thread, by their names in the metadata."""
    pids = {pid for (pid, _), value in names(trace, "process_name").items() if value == process}
    (key,) = [k for k, value in names(trace, "thread_name").items() if value == name and k[0] in pids]
    return [e for e in trace if e["ph"] == "X" and (e["pid"], e["tid"]) == key]


def short(events: list[Event], *args: str) -> list[tuple[Any, ...]]:
    return [(e["name"], e["ts"], e["dur"], *(e["args"][a] for a in args)) for e in events]


def test_events_have_what_the_format_asks_for(trace: list[Event]) -> None:
    needed = {"X": {"cat", "dur"}, "C": set(), "M": set()}
    for event in trace:
        assert set(event) == {"ph", "pid", "tid", "ts", "name", "args"} | needed[event["ph"]]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(v, int) for v in event["args"].values())
    times = [e["ts"] for e in trace if e["ph"] != "M"]
    assert times == sorted(times)


def test_everything_has_a_name(trace: list[Event]) -> None:
    processes, threads = names(trace, "process_name"), names(trace, "thread_name")
    assert sorted(processes.values()) == ["device", "host", "slots"]
    assert {e["pid"] for e in trace} == {pid for pid, _ in processes}
    assert {(e["pid"], e["tid"]) for e in trace if e["ph"] == "X"} == set(threads)


def test_pieces_of_a_thread_do_not_overlap(trace: list[Event]) -> None:
    pieces = sorted((e["pid"], e["tid"], e["ts"], e["dur"]) for e in trace if e["ph"] == "X")
    for a, b in itertools.pairwise(pieces):
        assert a[:2] != b[:2] or round(a[2] + a[3], 3) <= b[2], (a, b)


def test_device(trace: list[Event]) -> None:
    """Times count from the planning of the first round, 1 ms before the device began."""
    assert short(thread(trace, "device", "rounds")) == [
        ("round 0", 1000.0, 12000.0),
        ("round 1", 15000.0, 2000.0),
    ]
    steps = thread(trace, "device", "steps")
    assert short([steps.pop(4)], "round") == [("idle", 13000.0, 2000.0, 1)]
    assert short(steps, "step", "prompt_tokens", "decode_tokens") == [
        ("mixed 64", 1000.0, 4000.0, 0, 46, 1),
        ("mixed 64", 5000.0, 4000.0, 1, 54, 3),
        ("decode", 9000.0, 2000.0, 2, 0, 2),
        ("decode", 11000.0, 2000.0, 3, 0, 2),
        ("decode", 15000.0, 1000.0, 0, 0, 1),
        ("decode", 16000.0, 1000.0, 1, 0, 1),
    ]
    first = thread(trace, "device", "rounds")[0]["args"]
    assert (first["reason"], first["wasted"], first["decode_tokens"]) == ("ramp", {"stopped": 2}, 8)


def test_slots(trace: list[Event]) -> None:
    wanted = ("request", "tokens", "round")
    assert short(thread(trace, "slots", "slot 0"), *wanted) == [
        ("prefill", 1000.0, 8000.0, "a", 91, 0),
        ("decode", 9000.0, 4000.0, "a", 2, 0),
        ("decode", 15000.0, 2000.0, "a", 2, 1),
    ]
    assert short(thread(trace, "slots", "slot 1"), *wanted) == [
        ("prefill", 5000.0, 4000.0, "é", 9, 0),
        ("decode", 9000.0, 4000.0, "é", 2, 0),
    ]
    assert short(thread(trace, "slots", "slot 2"), *wanted) == [
        ("decode", 1000.0, 8000.0, "c", 2, 0),
        ("wasted", 9000.0, 4000.0, "c", 0, 0),
        ("wasted", 15000.0, 2000.0, "c", 0, 1),
    ]


def test_host(trace: list[Event]) -> None:
    assert short(thread(trace, "host", "phases"), "round") == [
        ("plan", 0.0, 200.0, 0),
        ("dispatch", 200.0, 300.0, 0),
        ("wait", 4000.0, 9000.0, 0),
        ("commit", 13000.0, 100.0, 0),
        ("emit", 13100.0, 400.0, 0),
        ("plan", 13500.0, 100.0, 1),
        ("dispatch", 13600.0, 100.0, 1),
        ("wait", 16000.0, 1000.0, 1),
        ("commit", 17000.0, 50.0, 1),
        ("emit", 17050.0, 250.0, 1),
    ]


def test_counters(trace: list[Event]) -> None:
    counters = [(e["name"], e["ts"], e["args"]) for e in trace if e["ph"] == "C"]
    assert [c for c in counters if c[0] == "pages"] == [
        ("pages", 0.0, {"used": 12, "cached": 3}),
        ("pages", 7000.0, {"used": 13, "cached": 0}),
    ]
    assert [c[2] for c in counters if c[0] == "waiting"] == [{"waiting": 1}, {"waiting": 0}]
    assert [c[2] for c in counters if c[0] == "running"] == [{"running": 3}, {"running": 2}]


def test_a_viewer_never_sees_time_before_the_origin(tmp_path: Path, rounds: list[RoundRecord]) -> None:
    rounds[1].idle_us = 5e6  # longer than since the round before
    rounds[0].idle_us = 3000.0
    write_trace(rounds, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    idle = [(e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["name"] == "idle"]
    assert idle == [(0.0, 1000.0), (13000.0, 2000.0)]


def test_nothing_to_write(tmp_path: Path, rounds: list[RoundRecord]) -> None:
    rounds[0].segments = []
    with pytest.raises(ValueError, match=r"no round to put into a trace.*Engine\.rounds"):
        write_trace(rounds[:1], tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


def test_a_path_that_cannot_be_written(tmp_path: Path, rounds: list[RoundRecord]) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        write_trace(rounds, tmp_path / "missing" / "t.json")

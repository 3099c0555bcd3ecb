"""Round records as values, as JSON and in log files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxsched.metrics import RoundLog, RoundRecord, Segment, Work, read_round_log

PLAIN: dict[str, Any] = {
    **{"round": 7, "time": 1.5, "steps": 4, "mixed": 0, "chunk": 0, "slots": 2, "running": 2, "waiting": 0},
    **{"live": 2, "prefill_tokens": 0, "cached_tokens": 0},
}


def test_json_round_trip(rounds: list[RoundRecord]) -> None:
    for record in [*rounds, RoundRecord(**PLAIN)]:
        line = record.to_json()
        assert "\n" not in line and ": " not in line and ", " not in line
        back = RoundRecord.from_json(line)
        assert back == record
        assert all(isinstance(s, Segment) for s in back.segments) and all(
            isinstance(w, Work) for w in back.work
        )
        assert RoundRecord.from_json(line.encode()) == record


def test_json_has_every_field_in_order(rounds: list[RoundRecord]) -> None:
    values = json.loads(rounds[0].to_json())
    assert list(values) == [field.name for field in dataclasses.fields(RoundRecord)]
    assert values["segments"][0] == [0, 1, 64, 4, 10.0, 10.004]
    assert values["work"][1] == [1, "é", "prefill", 1, 1, 9]


def test_optional_fields_may_lack() -> None:
    assert RoundRecord.from_json(json.dumps(PLAIN)) == RoundRecord(**PLAIN)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        (b"\xff", "not JSON"),
        ("[1]", "is a JSON object, not [1]"),
        (json.dumps({**PLAIN, "colour": 1}), "no field 'colour'"),
        (json.dumps({k: v for k, v in PLAIN.items() if k != "live"}), "lacks the field 'live'"),
        (json.dumps({**PLAIN, "steps": 1.5}), "'steps' of the round record is 1.5; it must be an integer"),
        (json.dumps({**PLAIN, "steps": True}), "must be an integer"),
        (json.dumps({**PLAIN, "time": "now"}), "must be a number"),
        (json.dumps({**PLAIN, "reason": None}), "must be a string"),
        (json.dumps({**PLAIN, "wasted": {"stopped": 0.5}}), "must be an object of integers"),
        (json.dumps({**PLAIN, "host_us": []}), "must be an object of numbers"),
        (json.dumps({**PLAIN, "segments": [[0, 1, 0, 4, 1.0]]}), "array of arrays ['first', 'steps'"),
        (json.dumps({**PLAIN, "work": [[0, 1, "decode", 0, 1, 1]]}), "array of arrays ['slot', 'request_id'"),
        (json.dumps({**PLAIN, "work": {}}), "array of arrays"),
    ],
)
def test_broken_lines(line: str | bytes, says: str) -> None:
    with pytest.raises(ValueError) as error:
        RoundRecord.from_json(line)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("work", "prompt", "sampled"),
    [
        ([], [0, 0, 0, 0], [0, 0, 0, 0]),
        ([Work(0, "a", "decode", 0, 4, 4)], [0, 0, 0, 0], [1, 1, 1, 1]),
        ([Work(0, "a", "decode", 1, 3, 2)], [0, 0, 0, 0], [0, 1, 1, 0]),
        ([Work(0, "a", "decode", 0, 4, 0)], [0, 0, 0, 0], [0, 0, 0, 0]),
        ([Work(0, "a", "decode", 2, 2, 9)], [0, 0, 0, 0], [0, 0, 1, 1]),  # at most one token per step
        ([Work(0, "a", "prefill", 0, 3, 8)], [3, 3, 2, 0], [0, 0, 0, 0]),
        ([Work(0, "a", "prefill", 0, 1, 8), Work(0, "a", "decode", 0, 4, 3)], [8, 0, 0, 0], [1, 1, 1, 0]),
        ([Work(0, "a", "prefill", 1, 1, 8), Work(1, "b", "prefill", 1, 1, 5)], [0, 13, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_tokens_per_step(work: list[Work], prompt: list[int], sampled: list[int]) -> None:
    record = RoundRecord(**PLAIN, work=work)
    assert record.tokens_per_step() == (prompt, sampled)


@pytest.mark.parametrize(
    ("kind", "steps", "tokens", "wasted"),
    [
        ("decode", 4, 4, 0),
        ("decode", 4, 1, 3),
        ("decode", 4, 0, 4),
        ("prefill", 4, 1, 0),
        ("decode", 1, 2, 0),
    ],
)
def test_wasted(kind: str, steps: int, tokens: int, wasted: int) -> None:
    assert Work(0, "a", kind, 0, steps, tokens).wasted == wasted


def test_log_appends_and_is_readable_at_once(tmp_path: Path, rounds: list[RoundRecord]) -> None:
    path = tmp_path / "rounds.jsonl"
    with RoundLog(path) as log:
        log.append(rounds[0])
        assert list(read_round_log(path)) == rounds[:1]  # before the log is closed
    with RoundLog(str(path)) as log:
        log.append(rounds[1])
    assert list(read_round_log(str(path))) == rounds
    log.close()  # a second time: nothing
    with pytest.raises(ValueError, match=r"rounds\.jsonl is closed; open a new RoundLog"):
        log.append(rounds[0])


def test_log_that_cannot_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "rounds.jsonl"
    with pytest.raises(FileNotFoundError) as error:
        RoundLog(path)
    assert str(path) in str(error.value) and "give a path in a folder that exists" in str(error.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_log_on_a_full_disk(rounds: list[RoundRecord]) -> None:
    log = RoundLog("/dev/full")
    with pytest.raises(OSError, match=r"cannot write the round log /dev/full: .*a disk with room"):
        log.append(rounds[0])
    with pytest.raises(OSError, match="cannot write the round log"):
        log.close()
    log.close()


def test_broken_log_says_file_and_line(tmp_path: Path, rounds: list[RoundRecord]) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text(f"{rounds[0].to_json()}\n{rounds[1].to_json()[:40]}\n", encoding="utf-8")
    reading = read_round_log(path)
    assert next(reading) == rounds[0]
    with pytest.raises(ValueError) as error:
        next(reading)
    assert str(error.value).startswith(f"{path}, line 2: not JSON") and "delete the line" in str(error.value)


def test_reading_a_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(read_round_log(tmp_path / "nowhere"))

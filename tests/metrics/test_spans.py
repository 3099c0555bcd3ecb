"""Work and pauses laid out in time. Every step takes 1 s."""

from typing import Any

import pytest

from jaxsched.metrics import RoundRecord, Segment, Work
from jaxsched.metrics.spans import idle_of, spans_of, steps_of


def record(work: list[Work], *segments: Segment, **more: Any) -> RoundRecord:
    plain = {
        "round": 0,
        "time": 0.0,
        "steps": 4,
        "mixed": 0,
        "chunk": 0,
        "slots": 1,
        "running": 1,
        "waiting": 0,
    }
    plain |= {"live": 1, "prefill_tokens": 0, "cached_tokens": 0, **more}
    return RoundRecord(**plain, segments=list(segments), work=work)


@pytest.mark.parametrize(
    ("work", "spans"),
    [
        (["decode", 0, 4, 4], [("decode", 0, 4, 4)]),
        (["decode", 1, 3, 1], [("decode", 1, 2, 1), ("wasted", 2, 4, 0)]),
        (["decode", 0, 4, 0], [("wasted", 0, 4, 0)]),
        (["prefill", 1, 2, 99], [("prefill", 1, 3, 99)]),
        # The step that reads the last of a prompt samples too; it is drawn as prefill.
        (["prefill", 0, 2, 99, "decode", 1, 3, 3], [("prefill", 0, 2, 99), ("decode", 2, 4, 2)]),
        (["prefill", 0, 2, 99, "decode", 1, 3, 1], [("prefill", 0, 2, 99), ("wasted", 2, 4, 0)]),
        (["prefill", 0, 2, 99, "decode", 1, 3, 0], [("prefill", 0, 2, 99), ("wasted", 2, 4, 0)]),
        (["prefill", 3, 1, 99, "decode", 3, 1, 1], [("prefill", 3, 4, 99)]),
        (["decode", 2, 9, 1], [("decode", 2, 3, 1)]),  # beyond the round: there is no time for it
    ],
)
def test_spans(work: list[Any], spans: list[tuple[str, int, int, int]]) -> None:
    pieces = [Work(0, "a", *work[i : i + 4]) for i in range(0, len(work), 4)]
    found = list(spans_of(record(pieces, Segment(0, 4, 0, 1, 0.0, 4.0))))
    assert [(s.kind, s.start, s.end, s.tokens) for s in found] == spans
    assert all(s.steps == s.end - s.start and (s.slot, s.request_id) == (0, "a") for s in found)


def test_another_slots_prefill_does_not_matter() -> None:
    work = [Work(0, "a", "prefill", 0, 1, 9), Work(1, "b", "decode", 0, 4, 4)]
    spans = list(spans_of(record(work, Segment(0, 4, 0, 2, 0.0, 4.0))))
    assert [(s.slot, s.start, s.end) for s in spans] == [(0, 0, 1), (1, 0, 4)]


def test_steps() -> None:
    steps = steps_of(record([], Segment(0, 1, 64, 8, 0.0, 3.0), Segment(1, 2, 0, 4, 3.0, 4.0)))
    assert [(s.index, s.start, s.end, s.chunk, s.slots) for s in steps] == [
        (0, 0.0, 3.0, 64, 8),
        (1, 3.0, 3.5, 0, 4),
        (2, 3.5, 4.0, 0, 4),
    ]


@pytest.mark.parametrize(
    ("idle_s", "before", "pauses"),
    [
        (0.0, 0.0, []),
        (2.0, 0.0, [(8.0, 10.0)]),  # right before the round: what was earlier was lack of work
        (20.0, 7.0, [(7.0, 10.0)]),
        (1.0, 10.0, []),
    ],
)
def test_idle_before_a_round(idle_s: float, before: float, pauses: list[tuple[float, float]]) -> None:
    segments = Segment(0, 2, 0, 1, 10.0, 12.0), Segment(2, 2, 0, 1, 12.0, 14.0)
    assert idle_of(record([], *segments, idle_us=idle_s * 1e6), before) == pauses


@pytest.mark.parametrize(
    ("idle_s", "pauses"), [(1.0, [(12.0, 13.0)]), (3.0, [(8.0, 10.0), (12.0, 13.0)]), (0.0, [])]
)
def test_idle_in_a_round(idle_s: float, pauses: list[tuple[float, float]]) -> None:
    segments = Segment(0, 2, 0, 1, 10.0, 12.0), Segment(2, 2, 0, 1, 13.0, 15.0)
    assert idle_of(record([], *segments, idle_us=idle_s * 1e6), 5.0) == pauses

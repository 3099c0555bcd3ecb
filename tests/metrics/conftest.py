"""Two rounds with everything in them that a record can say. The device starts at 10 s; a step takes 1, 2 or 4 ms."""

import pytest

from jaxsched.metrics import RoundRecord, Segment, Work


@pytest.fixture
def rounds() -> list[RoundRecord]:
    first = RoundRecord(
        round=0,
        time=9.999,
        steps=4,
        mixed=2,
        chunk=64,
        slots=4,
        running=3,
        waiting=1,
        live=2,
        prefill_tokens=100,
        cached_tokens=16,
        decode_tokens=8,
        wasted={"stopped": 2},
        pages_used=12,
        pages_cached=3,
        preempted=0,
        host_us={"plan": 200.0, "dispatch": 300.0, "wait": 9000.0, "commit": 100.0, "emit": 400.0},
        device_us=12000.0,
        idle_us=0.0,
        reason="ramp",
        segments=[
            Segment(0, 1, 64, 4, 10.000, 10.004),
            Segment(1, 1, 64, 4, 10.004, 10.008),
            Segment(2, 2, 0, 4, 10.008, 10.012),
        ],
        work=[
            Work(0, "a", "prefill", 0, 2, 91),
            Work(1, "é", "prefill", 1, 1, 9),
            Work(0, "a", "decode", 1, 3, 3),
            Work(2, "c", "decode", 0, 4, 2),
            Work(1, "é", "decode", 1, 3, 3),
        ],
    )
    second = RoundRecord(
        round=1,
        time=10.006,
        steps=2,
        mixed=0,
        chunk=0,
        slots=4,
        running=2,
        waiting=0,
        live=2,
        prefill_tokens=0,
        cached_tokens=0,
        decode_tokens=2,
        wasted={"run_ahead": 2, "aborted": 0},
        pages_used=13,
        preempted=1,
        host_us={"plan": 100.0, "dispatch": 100.0, "wait": 1000.0, "commit": 50.0, "emit": 250.0},
        device_us=2000.0,
        idle_us=2000.0,
        segments=[Segment(0, 2, 0, 4, 10.014, 10.016)],
        work=[Work(0, "a", "decode", 0, 2, 2), Work(2, "c", "decode", 0, 2, 0)],
    )
    return [first, second]

"""Rounds in flight: what leaves when, when the next round is planned, and how the device's time is accounted for."""

import dataclasses
import itertools
import time

import pytest

from harness import GREEDY, Result, assert_idle, collect, drain, make_engine
from jaxsched.engine.executor import Part
from jaxsched.engine.timing import DeviceClock

LONG = dataclasses.replace(GREEDY, max_tokens=40)
AUTO = {"num_scheduler_steps": "auto", "prefill_chunk_size": "auto"}


# -- pieces ------------------------------------------------------------------------------------------------------------


def pieces_of(engine, *, stream, count=1):
    ids = [engine.add_request([5 + i, 6, 7], LONG, stream=stream) for i in range(count)]
    sizes = {request_id: [] for request_id in ids}
    while engine.has_work:
        for piece in engine.step():
            sizes[piece.request_id].append(len(piece.outputs[0].token_ids))
    assert all(sum(s) == 40 for s in sizes.values())
    assert_idle(engine)
    return list(sizes.values())


def test_dispatch_streams_every_step(toy):
    engine = make_engine(toy("base"), executor="dispatch")
    [sizes] = pieces_of(engine, stream=True)
    assert len(sizes) >= 35 and max(sizes) <= 2  # a piece has more than a token only if the device was ahead
    assert engine.stats.rounds == 10


def test_pieces_are_rounds_when_nobody_streams(toy):
    engine = make_engine(toy("base"), executor="dispatch")
    [sizes] = pieces_of(engine, stream=False)
    assert sizes == [4] * 10


def test_one_listener_is_enough(toy):
    engine = make_engine(toy("base"), executor="dispatch")
    first = engine.add_request([1, 2], LONG, stream=False)
    second = engine.add_request([3, 4], dataclasses.replace(LONG, max_tokens=8), stream=True)
    results = drain(engine)
    assert results[second].pieces >= 6
    assert results[first].pieces > 10  # while somebody listened its tokens left one by one, too
    assert engine.scheduler.num_streaming == 0


def test_stream_interval_bounds_the_rounds(toy):
    engine = make_engine(toy("base"), **AUTO, stream_interval=2)
    controller = engine.scheduler.controller

    def sizes_and_steps(stream):
        controller.host_seconds, controller._stop_share = 1.0, 0.0  # rounds would be as long as they can
        engine.rounds.clear()
        [sizes] = pieces_of(engine, stream=stream)
        return max(sizes), max(record.steps for record in engine.rounds)

    pieces_of(engine, stream=True)  # learns what a step takes
    pieces_of(engine, stream=True)
    assert controller.cost.known
    size, steps = sizes_and_steps(stream=True)
    assert size <= 2 and steps == 2
    assert sizes_and_steps(stream=False)[1] > 2


def test_a_device_that_nobody_has_to_wait_for_is_measured_too(toy, monkeypatch):
    """Each result is there before the host asks: rounds must not stay at one step for that."""
    monkeypatch.setattr(Part, "ready", lambda part: True)
    engine = make_engine(toy("base"), **AUTO)
    controller = engine.scheduler.controller
    pieces_of(engine, stream=False)
    assert controller.cost.known
    controller.host_seconds, controller._stop_share = 1.0, 0.0
    engine.rounds.clear()
    pieces_of(engine, stream=False)
    assert max(record.steps for record in engine.rounds) > 2


# -- just in time ------------------------------------------------------------------------------------------------------


def slow_device(engine, seconds):
    """Makes each program take longer, on the device's side: its result is not there before its time."""
    submit, free_at = engine.executor.submit, [0.0]

    class SlowPart:
        def __init__(self, part):
            self.segment, self.launched, self._part = part.segment, part.launched, part
            free_at[0] = self.ready_at = max(free_at[0], time.monotonic()) + seconds * part.segment.key.steps

        def ready(self):
            return time.monotonic() >= self.ready_at

        def land(self, num_slots):
            time.sleep(max(0.0, self.ready_at - time.monotonic()))
            return self._part.land(num_slots)

    engine.executor.submit = lambda plan: [SlowPart(part) for part in submit(plan)]


@pytest.mark.parametrize("just_in_time", [True, False])
def test_what_arrives_while_a_round_runs_is_in_the_next(toy, just_in_time):
    """Just in time the next round is planned late, so it has whoever came meanwhile; otherwise it is too late."""
    settings = AUTO if just_in_time else {"num_scheduler_steps": 1}
    engine = make_engine(toy("base"), **settings)
    slow_device(engine, 0.03)
    results: dict[str, Result] = {}
    engine.add_request([1, 2, 3], dataclasses.replace(LONG, max_tokens=60))
    for _ in range(30):
        collect(engine, results)  # learns how long a step takes
    waits = []
    for _ in range(6):
        late = engine.add_request([4, 5, 6], dataclasses.replace(LONG, max_tokens=2))
        rounds = engine.stats.rounds
        while late not in results:
            collect(engine, results)
        waits.append(engine.stats.rounds - rounds)
    drain(engine, results)
    if just_in_time:
        assert sorted(waits)[3] <= 2, waits
    assert engine.pipeline.just_in_time is just_in_time
    assert_idle(engine)


def test_just_in_time_does_not_keep_the_device_waiting(toy):
    engine = make_engine(toy("base"), **AUTO)
    slow_device(engine, 0.02)
    engine.add_request([1, 2, 3], dataclasses.replace(LONG, max_tokens=100))
    results: dict[str, Result] = {}
    for _ in range(20):
        collect(engine, results)
    engine.rounds.clear()
    planned_late = []
    while engine.has_work:
        collect(engine, results)
    rounds = list(engine.rounds)[:-1]
    device = sum(r.device_us for r in rounds)
    assert sum(r.idle_us for r in rounds) < 0.2 * device  # a busy machine may be late now and then
    for record, after in itertools.pairwise(rounds):
        start, end = record.segments[0].start, record.segments[-1].end
        planned_late.append((after.time - start) / (end - start))
    assert sorted(planned_late)[len(planned_late) // 2] > 0.3  # in the later part of the round before


def test_before_plan_is_called_before_each_plan(toy):
    engine, calls = make_engine(toy("base")), []

    def hook():
        calls.append(engine.stats.rounds)
        if len(calls) == 2:
            engine.add_request([9, 9], GREEDY, request_id="from the hook")

    engine.before_plan = hook
    engine.add_request([1], LONG)
    results = drain(engine)
    assert results["from the hook"].finish_reason == "length"
    assert calls == sorted(calls) and set(range(engine.stats.rounds)) <= set(calls)


# -- the device's time -------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_device_clock():
    clock = Clock()
    device = DeviceClock(clock)

    def finish(at, launched, waited=True, predicted=0.0):
        clock.now = at
        return dataclasses.astuple(device.finished(launched, waited, predicted))

    assert finish(2.0, 1.0) == (
        1.0,
        2.0,
        0.0,
        True,
    )  # nothing before it: the device did not wait for the host
    assert finish(3.0, 1.5) == (2.0, 3.0, 0.0, True)  # launched while the one before it ran
    assert finish(5.0, 3.5) == (3.5, 5.0, 0.5, True)  # half a second with nothing to do
    assert finish(9.0, 4.0, waited=False, predicted=1.5) == (
        5.0,
        6.5,
        0.0,
        False,
    )  # ended unseen: as predicted
    assert finish(10.0, 9.0, waited=False) == (9.0, 10.0, 2.5, False)  # no prediction: as late as it may be
    assert finish(11.0, 9.5) == (10.0, 11.0, 0.0, False)  # it starts where an unseen end was
    device.out_of_work()
    assert finish(30.0, 29.0) == (29.0, 30.0, 0.0, True)  # nobody had work for it
    assert finish(31.0, 30.5) == (30.5, 31.0, 0.5, True)


def test_idle_time_is_reported(toy):
    """A host that dawdles between rounds keeps the device waiting; without work nobody waits."""
    engine = make_engine(toy("base"), run_ahead=0)
    for pause, count in ((0.0, 1), (0.02, 6)):
        engine.rounds.clear()
        engine.add_request([1, 2, 3], dataclasses.replace(LONG, max_tokens=4 * count))
        while engine.has_work:
            engine.step()
            time.sleep(pause)
        idle = sum(record.idle_us for record in engine.rounds)
        assert 0.02e6 * (count - 1) * bool(pause) <= idle <= 0.02e6 * count * 3
    time.sleep(0.3)
    engine.rounds.clear()
    engine.add_request([1], dataclasses.replace(GREEDY, max_tokens=1))
    drain(engine)
    assert engine.rounds[0].idle_us == 0
    assert engine.stats.idle_seconds > 0.1


def test_records_add_up(toy):
    engine = make_engine(toy("base"), num_pages=40)
    for i in range(9):
        engine.add_request([i] * (3 + 7 * i), dataclasses.replace(GREEDY, max_tokens=5 + i))
    drain(engine)
    rounds, stats = list(engine.rounds), engine.stats
    assert [r.round for r in rounds] == list(range(stats.rounds))
    assert sum(r.steps for r in rounds) == stats.steps and sum(r.mixed for r in rounds) == stats.mixed_steps
    assert sum(r.prefill_tokens for r in rounds) == stats.prompt_tokens
    assert sum(r.decode_tokens for r in rounds) == stats.generation_tokens == sum(5 + i for i in range(9))
    for record in rounds:
        assert {"plan", "dispatch", "wait", "commit", "emit"} == set(record.host_us)
        assert sum(segment.steps for segment in record.segments) == record.steps
        assert sum(w.tokens for w in record.work if w.kind == "decode") == record.decode_tokens
        assert sum(w.tokens for w in record.work if w.kind == "prefill") == record.prefill_tokens
        waste = sum(w.steps - w.tokens for w in record.work if w.kind == "decode")
        assert waste == sum(record.wasted.values())

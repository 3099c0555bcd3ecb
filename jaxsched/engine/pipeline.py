"""The rounds on their way: launching in time, reading in order, and what each of them took."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable

from jaxsched.metrics import RoundRecord, Work
from jaxsched.metrics import Segment as DeviceSegment
from jaxsched.schedule import RoundPlan, Scheduler

from .executor import Landed, Part
from .timing import DeviceClock

NAP = 5e-3  # seconds between looks at the device while the host has nothing else to do
MARGIN = 1.5e-3  # seconds before the expected end of a round at which the next one is planned, at least


@dataclasses.dataclass(slots=True)
class Flight:
    """A round that was launched. ``parts`` are those not read yet."""

    plan: RoundPlan
    parts: deque[Part]
    record: RoundRecord

    @property
    def hosted(self) -> bool:
        """Whether tokens are on their way that the host must see before it can plan on."""
        return self.parts[0].segment.first < self.plan.hosted


def new_record(
    number: int, now: float, plan: RoundPlan, scheduler: Scheduler, parts: list[Part]
) -> RoundRecord:
    """The record of a round, as far as planning knows it."""
    pool = scheduler.memory.pool
    return RoundRecord(
        round=number,
        time=now,
        steps=plan.steps,
        mixed=len(plan.mixed),
        chunk=max(part.segment.key.chunk_tokens for part in parts),
        slots=plan.slots,
        running=plan.running,
        waiting=plan.waiting,
        live=len(plan.entries),
        prefill_tokens=sum(step.tokens for step in plan.mixed),
        cached_tokens=plan.hits,
        pages_used=pool.used,
        pages_cached=pool.cached,
        preempted=plan.preempted,
        reason=plan.reason,
    )


def complete_record(record: RoundRecord, plan: RoundPlan) -> None:
    """Fills in what only the commit of the last step knows."""
    record.decode_tokens = sum(entry.sampled for entry in plan.entries)
    record.wasted = plan.wasted
    work = [
        Work(piece.slot, piece.sequence.id, "prefill", step, 1, piece.length)
        for step, mixed in enumerate(plan.mixed)
        for piece in mixed.pieces
    ]
    work += [Work(e.slot, e.sequence.id, "decode", e.first, e.steps, e.sampled) for e in plan.entries]
    record.work = work


class Pipeline:
    """Rounds in flight, oldest first, and when to launch the next.

    Up to ``run_ahead`` rounds are queued behind the one that the device works on. *Just in time*: the last of these is
    planned only when the round before it is about to end, by the cost model; so what arrives, or ends, in the meantime
    still counts, and the device is not kept waiting.
    """

    def __init__(self, clock: Callable[[], float], run_ahead: int, just_in_time: bool):
        self.clock, self.run_ahead, self.just_in_time = clock, run_ahead, just_in_time
        self.flights: deque[Flight] = deque()
        self.device = DeviceClock(clock)

    def full(self, scheduler: Scheduler) -> bool:
        """Whether no further round should be launched yet."""
        if self.flights[-1].hosted:
            return True
        if len(self.flights) <= self.run_ahead - self.just_in_time:
            return False
        return len(self.flights) > self.run_ahead or self.due_in(scheduler) > 0

    def due_in(self, scheduler: Scheduler) -> float:
        """Seconds until the next round should be planned; 0 when the device's time cannot be foreseen."""
        cost = scheduler.controller.cost
        at = self.device.expected_start(self.flights[0].parts[0].launched)
        last = 0.0
        for flight in self.flights:
            for part in flight.parts:
                key = part.segment.key
                each = cost.predict(key.chunk_tokens, key.slots, flight.plan.context)
                if not each or cost.error(key.chunk_tokens, key.slots) > 0.5:
                    return 0.0
                last = each * key.steps
                at += last
        key = self.flights[-1].parts[-1].segment.key
        host = scheduler.controller.host_seconds
        # Too early costs an arrival now and then its place in this round, too late costs everybody the difference.
        margin = max(MARGIN, 2 * host + (0.1 + 2 * cost.error(key.chunk_tokens, key.slots)) * last)
        return at - margin - self.clock()

    def group(self, streaming: bool) -> int:
        """How many parts of the oldest round to read at once: all of it when nobody reads along."""
        return 1 if streaming or self.flights[0].plan.hosted else len(self.flights[0].parts)

    def sleep_until_due(self, scheduler: Scheduler) -> None:
        """Sleeps until the next round should be planned, but not longer than the device is busy."""
        last, due = self.flights[-1].parts[-1], self.due_in(scheduler)
        until = self.clock() + due
        while due > 0 and not last.ready():
            time.sleep(min(due, NAP))
            due = until - self.clock()

    def wait(self, num_slots: int) -> tuple[bool, float, Landed]:
        """Waits for the oldest part and changes nothing: an interrupt loses nothing.

        Returns whether its result was not there yet, the seconds waited, and what it brought.
        """
        part, begin = self.flights[0].parts[0], self.clock()
        waited = not part.ready()
        landed = part.land(num_slots)
        return waited, self.clock() - begin, landed

    def landed(self, scheduler: Scheduler, waited: bool, seconds: float) -> int:
        """Takes the oldest part out, notes its times and teaches the cost model; returns its first step."""
        flight = self.flights[0]
        part, record, plan = flight.parts.popleft(), flight.record, flight.plan
        first, key, controller = part.segment.first, part.segment.key, scheduler.controller
        chunk, slots = key.chunk_tokens, key.slots
        predicted = key.steps * controller.cost.predict(chunk, slots, plan.context)
        span = self.device.finished(part.launched, waited, predicted)
        record.host_us["wait"] = record.host_us.get("wait", 0.0) + seconds * 1e6
        record.device_us += (span.end - span.start) * 1e6
        record.idle_us += span.idle * 1e6
        record.segments.append(DeviceSegment(first, key.steps, chunk, slots, span.start, span.end))
        # As long as nothing is known a bound will do: a device that is always done before it is asked would never be
        # measured, and rounds would stay short where the host matters most.
        if span.exact or not predicted:
            seconds = span.end - span.start
            controller.measured(chunk, slots, plan.context, key.steps, seconds, plan.decoding)
        return first

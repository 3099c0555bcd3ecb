"""What the host spends per round: planning, packing, committing. No device is involved."""

import statistics
import time

import numpy as np
import pytest

from fake_device import make_limits, make_sequence
from jaxsched.engine.pack import SamplingRow, pack_chunks, pack_updates
from jaxsched.schedule import Scheduler

LIMIT = {64: 1.2, 256: 5}  # yardsticks; about 0.45 and 1.7 are usual
STEPS, PROMPT = 8, 150
ROW = SamplingRow(0.7, 40, 0.9, 0.0, 1 << 40, (2, 3), False)


class Bench:
    """A queue that never gets shorter; in each round of a full slot table some end and some begin.

    Prompts are half alike (the prefix of a system prompt); outputs of 60 to 260 tokens fill pages, which are hashed.
    """

    def __init__(self, slots, waiting, policy="stall-free"):
        self.limits = make_limits(
            num_slots=slots, num_pages=slots * 40, page_size=16, max_model_len=512, num_steps=STEPS,
            chunk_tokens=4 * slots, slot_buckets=(slots // 16, slots // 4, slots),
        )  # fmt: skip
        self.scheduler, self.wanted, self.made = Scheduler(self.limits, policy), waiting, 0
        self.rng = np.random.default_rng(0)
        self.refill()

    def refill(self):
        while self.scheduler.num_waiting < self.wanted:
            prompt = [5] * (PROMPT // 2) + self.rng.integers(0, 49152, PROMPT - PROMPT // 2).tolist()
            client = str(self.made % 50)
            sequence = make_sequence(
                "x", prompt, 60 + 7 * self.made % 200, (2, 3), client=client, priority=self.made % 3
            )
            sequence.row = ROW
            self.scheduler.add(sequence)
            self.made += 1

    def round(self):
        """Seconds of host work (of this thread's processor time), and the plan."""
        start = time.thread_time()
        plan = self.scheduler.plan()
        if plan.changes_slots:
            pack_updates(plan, self.limits.num_slots, 8, self.limits.max_new_pages)
        for step in plan.mixed:  # as the executor does it
            pack_chunks([step], self.limits.chunk_tokens, self.limits.num_slots)
        spent = time.thread_time() - start
        table = np.full((plan.steps, self.limits.num_slots), -1, np.int32)
        for entry in plan.entries:
            table[entry.first : entry.first + entry.steps, entry.slot] = 7 + self.made % 1000
        tokens = table.T.tolist()
        start = time.thread_time()
        self.scheduler.commit(plan, tokens)
        return spent + time.thread_time() - start, plan

    def fill_slots(self):
        """Plays until the slot table is as full as it gets."""
        for _ in range(100):
            self.round()
            self.refill()

    def median(self, rounds=40):
        costs, busy = [], 0
        for _ in range(rounds):
            seconds, plan = self.round()
            costs.append(seconds)
            busy += len(plan.entries) > self.limits.num_slots * 0.6 and bool(plan.mixed)
            self.refill()
        assert busy > rounds // 2, "most rounds should be full"
        return statistics.median(costs)


def yardstick():
    """Seconds of work like the scheduler's: dictionaries, tuples, small objects. About 1 ms on a quiet machine."""
    start = time.thread_time()
    table: dict[int, list[int]] = {i: [i] for i in range(100)}
    for i in range(6000):
        table[i % 97].append(i)
        table[i % 3 + 97] = table[i % 31][-4:]
    return time.thread_time() - start


@pytest.mark.parametrize("slots", [64, 256])
def test_a_round_costs_little(slots):
    """The machine may be slow or busy: what a round costs is compared with other Python at the same moment."""
    bench = Bench(slots, 20_000 if slots == 256 else 500)
    bench.fill_slots()
    ratios = []
    for _ in range(5):
        before, median = min(yardstick() for _ in range(20)), bench.median()
        ratios.append(median / max(before, min(yardstick() for _ in range(20))))
        print(
            f"planning, packing and committing {slots} slots: {median * 1e3:.2f} ms, {ratios[-1]:.2f} yardsticks"
        )
    assert min(ratios) < LIMIT[slots]


@pytest.mark.parametrize("policy", ["stall-free", "priority", "hrrn", "fair"])
def test_cost_does_not_depend_on_how_many_wait(policy):
    few, many = Bench(64, 200, policy), Bench(64, 20_000, policy)
    few.fill_slots()
    many.fill_slots()
    ratios = []
    for _ in range(5):
        ratios.append(many.median() / few.median())
        if ratios[-1] < 1.5:
            break
    print(f"{policy}, 20,000 waiting against 200: {ratios}")
    assert min(ratios) < 2

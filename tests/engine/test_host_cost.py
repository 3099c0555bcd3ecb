"""What the host spends per round: planning, packing, committing. No device is involved."""

import statistics
import time

import numpy as np
import pytest

from fake_device import make_limits, make_sequence
from jaxsched.engine.pack import SamplingRow, pack_chunks, pack_updates
from jaxsched.schedule import Scheduler

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
        """Seconds of host work, and the plan."""
        start = time.perf_counter()
        plan = self.scheduler.plan()
        if plan.changes_slots:
            pack_updates(plan, self.limits.num_slots, 8, self.limits.max_new_pages)
        for step in plan.mixed:  # as the executor does it
            pack_chunks([step], self.limits.chunk_tokens, self.limits.num_slots)
        spent = time.perf_counter() - start
        table = np.full((plan.steps, self.limits.num_slots), -1, np.int32)
        for entry in plan.entries:
            table[entry.first : entry.first + entry.steps, entry.slot] = 7 + self.made % 1000
        tokens = table.T.tolist()
        start = time.perf_counter()
        self.scheduler.commit(plan, tokens)
        return spent + time.perf_counter() - start, plan

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


@pytest.mark.parametrize("slots", [64, 256])
def test_a_round_costs_little(slots):
    """At 256 slots under 1.5 ms on a quiet machine; the bound leaves room for a busy one."""
    bench = Bench(slots, 20_000 if slots == 256 else 500)
    bench.fill_slots()
    best = min(bench.median() for _ in range(3))
    print(f"planning, packing and committing a round of {slots} slots: {best * 1e3:.2f} ms")
    assert best < (2e-3 if slots == 64 else 5e-3)


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

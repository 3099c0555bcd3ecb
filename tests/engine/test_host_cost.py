"""What the host spends per round: planning, packing, committing. No device is involved."""

import statistics
import time

import numpy as np

from fake_device import make_limits, make_sequence
from jaxsched.engine.pack import SamplingRow, pack_chunks, pack_updates
from jaxsched.schedule import Scheduler

SLOTS, STEPS, CHUNK = 64, 8, 256
LIMITS = make_limits(
    num_slots=SLOTS, num_pages=64 * 40, page_size=16, max_model_len=512, num_steps=STEPS, chunk_tokens=CHUNK,
    slot_buckets=(4, 16, 64),
)  # fmt: skip
ROW = SamplingRow(0.7, 40, 0.9, 0.0, 1 << 40, (2, 3), False)


def busy_scheduler(waiting):
    """Requests with prompts of 150 and outputs of 20 to 60 tokens: in each round some end and some begin."""
    scheduler = Scheduler(LIMITS)
    for i in range(waiting):
        sequence = make_sequence("x", 1, 20 + i % 40, (2, 3))
        sequence.prompt, sequence.row = [5] * 150, ROW
        scheduler.add(sequence)
    return scheduler


def one_round(scheduler):
    """Seconds of host work, and the plan."""
    start = time.perf_counter()
    plan = scheduler.plan()
    if plan.changes_slots:
        pack_updates(plan, SLOTS, 8, LIMITS.max_new_pages)
    if plan.mixed:
        pack_chunks(plan.mixed, CHUNK, SLOTS)
    spent = time.perf_counter() - start
    table = np.full((plan.steps, SLOTS), -1, np.int32)
    for entry in plan.entries:
        table[: entry.steps, entry.slot] = 7
    start = time.perf_counter()
    scheduler.commit(plan, table.T.tolist())
    return spent + time.perf_counter() - start, plan


def median_cost(waiting, rounds=40):
    scheduler = busy_scheduler(waiting)
    costs, busy = [], 0
    for _ in range(rounds):
        seconds, plan = one_round(scheduler)
        costs.append(seconds)
        busy += len(plan.entries) > 40 and bool(plan.mixed)
        while scheduler.num_waiting < waiting - SLOTS:  # keep the queue as long as it was
            sequence = make_sequence("y", 1, 40, (2, 3))
            sequence.prompt, sequence.row = [5] * 150, ROW
            scheduler.add(sequence)
    assert busy > rounds // 2, "most rounds should be full"
    return statistics.median(costs)


def test_a_round_costs_little():
    """Under 1 ms on a quiet machine; the bound leaves room for a busy one."""
    best = min(median_cost(200) for _ in range(3))
    print(f"planning, packing and committing a round of {SLOTS} slots: {best * 1e3:.2f} ms")
    assert best < 3e-3


def test_cost_does_not_depend_on_how_many_wait():
    ratios = []
    for _ in range(3):
        few, many = median_cost(100 + SLOTS), median_cost(20_000)
        ratios.append(many / few)
        if ratios[-1] < 2:
            break
    print(f"20,000 waiting against 100: {ratios}")
    assert min(ratios) < 2

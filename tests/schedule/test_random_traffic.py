"""Random limits, arrivals and aborts. The fake device checks who owns each page at every read and write."""

import random

import pytest

from fake_device import VOCAB, Loop, expected_output, make_limits, make_sequence
from jaxsched.schedule import Finish, Status


def random_limits(rng):
    page_size, max_len = rng.choice([1, 2, 4, 8, 16]), rng.choice([24, 48, 96])
    split = rng.random() < 0.8
    whole = -(-max_len // page_size)
    # From a pool that holds one longest sequence, which keeps preempting, to one that never runs short.
    pages = rng.choice([whole, whole + 1, whole * 2, whole * 8])
    slots = rng.choice([1, 2, 3, 5, 8])
    return make_limits(
        num_slots=slots,
        num_pages=pages,
        page_size=page_size,
        max_model_len=max_len,
        num_steps=rng.choice([1, 2, 3, 4, 8]),
        chunk_tokens=rng.choice([1, 3, 8, 16, max_len]),
        split_prompts=split,
    )


def random_sequence(rng, name, limits):
    prompt = rng.randint(1, limits.max_model_len - 1)
    if rng.random() < 0.6:
        prompt = min(prompt, rng.randint(1, 12))
    room = limits.max_model_len - prompt
    tokens = room if rng.random() < 0.2 else rng.randint(1, min(room, 40))
    stop = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 0, 1, 4]))]
    return make_sequence(name, prompt, tokens, stop, greedy=rng.random() < 0.5)


def check_plan(loop, plan, running_before, limits):
    scheduler = loop.scheduler
    assert 1 <= plan.steps <= limits.num_steps and len(plan.mixed) <= plan.steps
    assert all(0 < step.tokens <= limits.chunk_tokens for step in plan.mixed)
    assert len(plan.pages) <= limits.max_new_pages
    assert plan.slots in limits.slot_buckets and len(plan.entries) <= limits.num_slots
    if not scheduler.num_waiting and not plan.admits:
        need = max(1, len(scheduler.running))
        assert plan.slots == min(b for b in limits.slot_buckets if b >= need), "a smaller bucket would do"
    entered = {e.sequence for e in plan.entries}
    for sequence, status in running_before.items():
        if status is Status.DECODE and sequence.status is Status.DECODE and sequence.slot >= 0:
            assert sequence in entered, "a running decode was left out"
    if plan.preempted:
        assert scheduler.in_flight == 1 and not plan.admits
        gone = [s for s in running_before if s.status is Status.WAITING]
        assert len(gone) == plan.preempted
        stay = [s.arrival for s in running_before if s.slot >= 0]
        assert min(s.arrival for s in gone) > max(stay, default=-1)
    waiting = [s.arrival for s in scheduler._waiting if s.status is Status.WAITING]
    assert waiting == sorted(waiting)
    assert all(s.arrival < min(waiting, default=1 << 30) for _, s in plan.admits)
    whole = not limits.split_prompts
    assert not whole or all(p.ends and p.start == 0 for step in plan.mixed for p in step.pieces)


def simulate(seed):
    """Returns how many preemptions, aborts and slot moves there were."""
    rng = random.Random(seed)
    limits = random_limits(rng)
    loop = Loop(limits, run_ahead=rng.choice([0, 0, 1, 2]))
    scheduler, pending = loop.scheduler, rng.randint(1, 40)
    abort_rate = rng.choice([0, 0, 0.1, 0.5])
    everything, given_up = [], {}
    for _ in range(4000):
        if not pending and not scheduler.has_work:
            break
        while pending and rng.random() < 0.4:
            pending -= 1
            everything.append(random_sequence(rng, f"{seed}.{pending}", limits))
            loop.add(everything[-1])
        if everything and rng.random() < abort_rate:
            victim = rng.choice(everything)
            if victim.status is not Status.FINISHED:
                given_up[victim] = list(victim.output)
            scheduler.abort(victim)
        while len(loop.in_flight) <= loop.run_ahead:
            before = {s: s.status for s in scheduler.running}
            plan = loop.plan()
            if plan is None:
                break
            check_plan(loop, plan, before, limits)
        if loop.in_flight:
            for sequence, new in loop.commit():
                assert new and sequence not in given_up
    else:
        raise AssertionError("traffic does not come to an end")
    assert scheduler.pool.free == limits.num_pages and len(scheduler._free_slots) == limits.num_slots
    for sequence in everything:
        want = expected_output(sequence)
        if sequence in given_up:
            assert sequence.finish is Finish.ABORT and sequence.output == given_up[sequence]
        else:
            assert sequence.output == want
            stopped = want[-1] in sequence.stop_ids
            assert sequence.finish is (Finish.STOP if stopped else Finish.LENGTH)
    return scheduler.num_preemptions, len(given_up), sum(len(plan.moves) for plan in loop.plans)


@pytest.mark.parametrize("block", range(8))
def test_random_traffic(block):
    totals = [simulate(seed) for seed in range(block * 100, block * 100 + 100)]
    preemptions, aborts, moves = (sum(column) for column in zip(*totals, strict=True))
    assert preemptions > 100 and aborts > 100 and moves > 20, "the traffic is too tame"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(50))
def test_much_random_traffic(block):
    for seed in range(1000 + block * 200, 1200 + block * 200):
        simulate(seed)

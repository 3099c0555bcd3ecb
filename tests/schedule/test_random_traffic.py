"""Random limits, policies, controllers, arrivals and aborts. The fake device checks who owns each page at every read
and write, and that a shared page holds what its readers' prompts say."""

import dataclasses
import random
from collections import Counter

import pytest

from fake_device import VOCAB, Loop, expected_output, make_limits, make_sequence
from jaxsched.schedule import Finish, Status
from jaxsched.schedule.policies import POLICIES, Edf, Hrrn, Priority, Srpf
from jaxsched.schedule.rounds import AdaptiveRounds, FixedRounds

BY_ARRIVAL = ("stall-free", "fcfs", "prefill-first", "decode-first")


def random_limits(rng):
    page_size, max_len = rng.choice([1, 2, 4, 8, 16]), rng.choice([24, 48, 96])
    split = rng.random() < 0.8
    whole = -(-max_len // page_size)
    window = rng.choice([None, 1, page_size, 7, 20, 40])
    # From a pool that holds one longest sequence, which keeps preempting, to one that never runs short.
    pages = rng.choice([whole, whole + 1, whole * 2, whole * 8])
    slots, chunk = rng.choice([1, 2, 3, 5, 8]), rng.choice([1, 3, 8, 16, max_len])
    limits = make_limits(
        num_slots=slots,
        num_pages=pages,
        page_size=page_size,
        max_model_len=max_len,
        num_steps=rng.choice([1, 2, 3, 4, 8, 16]),
        chunk_tokens=chunk,
        whole_pages=(not split or chunk >= page_size) and rng.random() < 0.3,
        split_prompts=split,
        prefix_caching=rng.random() < 0.7,
        window=window,
    )
    if window is not None and pages == whole:  # then the least is what one sequence owns at a time
        limits = dataclasses.replace(limits, num_pages=limits.need(max_len))
    return limits


def some_policy(rng, seed):
    """All of them in turn, with the defaults or with numbers that matter in a short time."""
    name = [*POLICIES][seed % len(POLICIES)]
    tuned = {"priority": Priority(None), "edf": Edf(0.05), "srpf": Srpf(None), "hrrn": Hrrn(0.5)}
    return tuned[name] if name in tuned and rng.random() < 0.5 else name


def random_controller(rng, limits, run_ahead):
    """The adaptive one may have any targets, reachable or not."""
    if rng.random() < 0.4:
        return FixedRounds(limits.num_steps, limits.chunk_tokens)
    sizes = tuple(size for size in (1, 4, 16) if size <= limits.num_steps)
    chunks = {size for size in (1, 4, 16) if size < limits.chunk_tokens and limits.split_prompts}
    low, high = sorted((rng.random(), rng.random()))
    return AdaptiveRounds(
        step_sizes=sizes if rng.random() < 0.8 else (limits.num_steps,),
        chunk_sizes=tuple(sorted({*chunks, limits.chunk_tokens})),
        slot_buckets=limits.slot_buckets,
        target_ttft=rng.choice([None, 1e-3, 0.1, 10.0]),
        target_itl=rng.choice([None, 1e-3, 0.01, 1.0]),
        prefill_share=rng.choice([(0.3, 0.5), (0.0, 0.0), (1.0, 1.0), (low, high)]),
        stream_interval=rng.choice([1, 3, 8, 100]),
        run_ahead=run_ahead,
    )


def random_times(rng):
    """Seconds of a step, which mean nothing in particular."""
    base, row, token, noise = (
        rng.choice([1e-4, 1e-3, 0.1]),
        rng.choice([0, 1e-5]),
        rng.choice([1e-6, 1e-4]),
        rng.random(),
    )

    def step_time(chunk, slots, context):
        hiccup = 50 if rng.random() < 0.02 else 1
        return (base + row * slots + token * (chunk + context / 100)) * (1 + noise * rng.random()) * hiccup

    return step_time


class Traffic:
    """Requests that come one by one: n samples of prompts that often begin alike, or go on where another ended."""

    def __init__(self, rng, seed, limits):
        self.rng, self.seed, self.limits, self.count = rng, seed, limits, 0
        self.finished = []  # outputs that a next turn may take up
        self.prefixes = [
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, limits.max_model_len // 2))] for _ in range(3)
        ]
        self.shared = rng.choice([0.0, 0.5, 0.9])
        self.ids = rng.choice([0.0, 0.3])  # share of prompts that are exactly a prefix

    def prompt(self):
        rng, longest = self.rng, self.limits.max_model_len - 1
        if rng.random() < self.shared:
            begin = list(rng.choice(self.prefixes + self.finished[-4:]))
            own = 0 if rng.random() < self.ids else rng.randint(0, 10)
        else:
            begin, own = [], rng.randint(1, longest if rng.random() < 0.4 else min(longest, 12))
        return ([*begin, *(rng.randrange(VOCAB) for _ in range(own))] or [0])[:longest]

    def request(self, now):
        """The sequences of one request."""
        rng, prompt = self.rng, self.prompt()
        self.count += 1
        room = self.limits.max_model_len - len(prompt)
        samples = rng.choice([1, 1, 1, 2, 4])
        salt = rng.choice([b"", b"", b"", b"x", None])
        if not self.limits.prefix_caching:
            salt = f"request {self.count}".encode() if samples > 1 else None
        fields = {
            "salt": salt,
            "request_id": f"{self.seed}.{self.count}",
            "priority": rng.randint(-1, 2),
            "client": rng.choice("abc"),
            "deadline": rng.choice([None, now, now + rng.random()]),
            "streaming": rng.random() < 0.5,
        }
        tokens = room if rng.random() < 0.2 else rng.randint(1, min(room, 40))
        stop = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 0, 1, 4]))]
        greedy = rng.random() < 0.5
        name = f"{self.seed}.{self.count}"
        return [
            make_sequence(f"{name}#{i}", list(prompt), tokens, stop, greedy, index=i, **fields)
            for i in range(samples)
        ]


def check_plan(loop, plan, running_before):
    scheduler, limits, policy = loop.scheduler, loop.scheduler.limits, loop.scheduler.policy
    assert 1 <= plan.steps <= limits.num_steps and len(plan.mixed) <= plan.steps
    assert all(0 < step.tokens <= limits.chunk_tokens for step in plan.mixed)
    assert len(plan.pages) <= limits.max_new_pages
    assert plan.slots in limits.slot_buckets and len(plan.entries) <= limits.num_slots
    if not scheduler.num_waiting and not plan.admits and plan.decode:
        need = max(1, len(scheduler.running))
        assert plan.slots <= min(b for b in limits.slot_buckets if b >= need), "a smaller bucket would do"
    assert plan.decode or (plan.steps == len(plan.mixed) == 1)
    if policy.name == "stall-free":
        assert plan.decode
    entered = {e.sequence for e in plan.entries}
    for sequence, status in running_before.items():
        if status is Status.DECODE and sequence.status is Status.DECODE and sequence.slot >= 0:
            assert (sequence in entered) is plan.decode, "a running decode was left out"
    if plan.preempted:
        assert scheduler.in_flight == 1
        gone = [s for s in running_before if s.status is Status.WAITING]
        if plan.decoding:
            assert not plan.admits and len(gone) == plan.preempted
        else:  # nobody was left to decode, so the pool has room for those who wait
            assert len(gone) <= plan.preempted
    if policy.name in BY_ARRIVAL:
        stay = [s.arrival for s in scheduler.running]
        first = policy.first(loop.now)
        assert all(s.arrival > max(stay, default=-1) for s in running_before if s.status is Status.WAITING)
        assert first is None or all(s.arrival < first.arrival for _, s in plan.admits)
    assert sum(s.status is Status.PREFILL for s in scheduler.running) <= 1, "two prompts are half read"
    parts = [p for step in plan.mixed for p in step.pieces]
    if limits.whole_pages:
        assert all(p.start % limits.page_size == 0 for p in parts), "a page is not written whole"
    whole = not limits.split_prompts
    assert not whole or all(p.ends and p.start == p.sequence.prefilled - p.length for p in parts)  # fmt: skip


def simulate(seed):
    """Plays one random case; returns how often what happened."""
    rng = random.Random(seed)
    limits, run_ahead = random_limits(rng), rng.choice([0, 0, 1, 2])
    loop = Loop(
        limits,
        run_ahead,
        some_policy(rng, seed),
        random_controller(rng, limits, run_ahead),
        random_times(rng),
        rng.choice([1e-4, 2e-3]),
    )
    scheduler, traffic, seen = loop.scheduler, Traffic(rng, seed, limits), Counter()
    pending, burst, in_parts = rng.randint(1, 25), rng.choice([0.1, 0.4, 0.9]), rng.random() < 0.5
    abort_rate, evict_rate, reset_rate = (
        rng.choice([0, 0, 0.1, 0.5]),
        rng.choice([0, 0, 0.2]),
        rng.choice([0, 0.05]),
    )
    everything, given_up, evictions = [], {}, 30
    for _ in range(6000):
        if not pending and not scheduler.has_work:
            break
        while pending and rng.random() < burst:
            pending -= 1
            new = traffic.request(loop.now)
            everything += new
            loop.add(*new)
        if everything and rng.random() < abort_rate:
            victim = rng.choice(everything)
            if victim.status is not Status.FINISHED:
                given_up[victim] = list(victim.output)
            scheduler.abort(victim)
        if scheduler.running and evictions and rng.random() < evict_rate:
            evictions -= 1
            scheduler.evict(rng.choice([*scheduler.running]), loop.now)
        if rng.random() < reset_rate:
            scheduler.memory.pool.reset()
        while len(loop.in_flight) <= run_ahead:
            before = {s: s.status for s in scheduler.running}
            plan = loop.plan()
            if plan is None:
                break
            check_plan(loop, plan, before)
            seen["hits"] += plan.hits
            seen["moves"] += len(plan.moves)
            seen["paused"] += not plan.decode
        while loop.in_flight:
            plan = loop.in_flight[0][0]
            for sequence, new in loop.commit(rng.randint(1, plan.steps) if in_parts else None):
                assert new and sequence not in given_up
                if sequence.finish:
                    traffic.finished.append([*sequence.prompt, *sequence.output])
            if not loop.in_flight or loop.in_flight[0][0] is not plan:
                check_waste(plan)
                break
            if rng.random() < 0.3:
                break  # arrivals and plans come between the parts
    else:
        raise AssertionError("traffic does not come to an end")
    check_end(loop, everything, given_up)
    return seen + Counter(preemptions=scheduler.num_preemptions, aborts=len(given_up), cases=1)


def check_waste(plan):
    """Every row-step of the plan has sampled a token or is in the books."""
    assert sum(plan.wasted.values()) == sum(e.steps - e.sampled for e in plan.entries)
    assert plan.wasted.keys() <= {"stopped", "run_ahead", "aborted", "preempted"}


def check_end(loop, everything, given_up):
    scheduler, pool, limits = loop.scheduler, loop.scheduler.memory.pool, loop.scheduler.limits
    assert pool.free == limits.num_pages and len(scheduler._free_slots) == limits.num_slots
    assert (scheduler.num_streaming, scheduler._waiting_tokens, scheduler.num_waiting) == (0, 0, 0)
    for sequence in everything:
        want = expected_output(sequence)
        assert sequence.pages == [] and sequence.slot == -1 and sequence.pending >= 0
        if sequence in given_up:
            assert sequence.finish is Finish.ABORT and sequence.output == given_up[sequence]
        else:
            assert sequence.output == want
            stopped = want[-1] in sequence.stop_ids
            assert sequence.finish is (Finish.STOP if stopped else Finish.LENGTH)
    read = sum(step.tokens for plan in loop.plans for step in plan.mixed)
    assert read == loop.device.prompt_tokens


@pytest.mark.parametrize("block", range(4))
def test_random_traffic(block):
    seen = sum((simulate(seed) for seed in range(block * 36, block * 36 + 36)), Counter())
    assert seen["preemptions"] > 40 and seen["aborts"] > 25 and seen["moves"] > 2, (
        f"the traffic is too tame: {seen}"
    )
    assert seen["hits"] > 500 and seen["paused"] > 0, f"the traffic is too tame: {seen}"


@pytest.mark.slow
@pytest.mark.parametrize("block", range(50))
def test_much_random_traffic(block):
    for seed in range(1000 + block * 180, 1180 + block * 180):
        simulate(seed)

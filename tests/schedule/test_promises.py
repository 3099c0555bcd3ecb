"""What a user may rely on under load: bounded waste, no starvation, few preemptions, fair shares, quick aborts."""

import itertools
import random
import time

import pytest

from fake_device import Loop, expected_output, make_limits, make_sequence
from jaxsched.schedule import Finish, Scheduler, Status
from jaxsched.schedule.policies import POLICIES, Edf, Fair, Hrrn, Priority, Srpf
from jaxsched.schedule.rounds import AdaptiveRounds

EVERY = pytest.mark.parametrize("policy", POLICIES)


# -- waste -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 4, 8])
def test_an_end_at_any_step_of_a_round(steps, run_ahead):
    """The text is right, and what was planned behind the end is at most the rest of the rounds on their way."""
    for at in range(1, 2 * steps + 3):
        loop = Loop(make_limits(num_steps=steps, num_slots=2), run_ahead)
        ends, other = make_sequence("a", 5, 60, stops_at=at), make_sequence("b", 5, 2 * steps + 9)
        loop.add(ends, other)
        loop.finish()
        assert (ends.output, ends.finish, len(ends.output)) == (expected_output(ends), Finish.STOP, at)
        assert (other.output, other.finish) == (expected_output(other), Finish.LENGTH)
        wasted = sum(e.steps - e.sampled for plan in loop.plans for e in plan.entries)
        assert wasted == sum(sum(plan.wasted.values()) for plan in loop.plans)
        assert wasted <= steps * (1 + run_ahead) - 1
        assert (
            sum(e.steps - e.sampled for plan in loop.plans for e in plan.entries if e.sequence is other) == 0
        )


@pytest.mark.parametrize("host", [0.5e-3, 2e-3])
@pytest.mark.parametrize("step", [1e-3, 10e-3, 100e-3])
def test_adaptive_rounds_waste_little(step, host):
    """Lengths like those of ShareGPT's answers (lognormal, mean 200), whose ends no plan can foresee."""
    rng = random.Random(7)
    limits = make_limits(
        num_slots=8, num_pages=8 * 90, page_size=16, max_model_len=1440, num_steps=16, chunk_tokens=256
    )
    controller = AdaptiveRounds(
        step_sizes=(1, 4, 16), chunk_sizes=(16, 64, 256), slot_buckets=limits.slot_buckets
    )
    loop = Loop(limits, 1, controller=controller, host_time=host, checks=False,
                step_time=lambda chunk, slots, context: step * (1 + chunk / 128 + context / 1e5))  # fmt: skip
    for i in range(60):
        length = max(1, min(1300, round(rng.lognormvariate(4.8, 1.0))))
        loop.add(make_sequence(i, rng.randint(4, 120), 1312, stops_at=length))
    loop.finish(100_000)
    planned = sum(e.steps for plan in loop.plans for e in plan.entries)
    wasted = sum(sum(plan.wasted.values()) for plan in loop.plans)
    mean = sum(e.sampled for plan in loop.plans for e in plan.entries) / 60
    print(f"{wasted / planned:.2%} wasted; mean length {mean:.0f}, {len(loop.plans)} rounds")
    assert 120 < mean < 280 and wasted / planned < 0.03


# -- no starvation ---------------------------------------------------------------------------------------------------

STEP = 0.05  # seconds
SMALL, LARGE = 4, 46  # prompt tokens; the large one needs 12 of the 20 pages


def endless_stream(policy, rounds=4000, **wants):
    """Small requests never stop to wait; then comes a large one. Returns it and all others in order of admission.

    Small ones are as urgent as can be: priority 0, a deadline that is over, a client of their own.
    """
    limits = make_limits(
        num_slots=8, num_pages=20, page_size=4, max_model_len=64, num_steps=4, chunk_tokens=16
    )
    loop = Loop(limits, 1, policy, step_time=lambda chunk, slots, context: STEP)
    numbers, rng, admitted = itertools.count(), random.Random(3), []
    large = make_sequence("large", LARGE, 3, **wants)
    for round_number in range(rounds):
        while loop.scheduler.num_waiting < 12:
            loop.add(
                make_sequence(next(numbers), SMALL, rng.randint(1, 12), client="small", deadline=loop.now)
            )
        if round_number == 20:
            loop.add(large)
        seen = len(loop.plans)
        loop.step()
        admitted += [sequence for plan in loop.plans[seen:] for _, sequence in plan.admits]
        if large.scheduled is not None:
            return loop, large, [s for s in admitted[: admitted.index(large)] if s.arrival > large.arrival]
    raise AssertionError(
        f"{policy} starves it: {loop.now - large.arrived:.0f} s, {len(admitted)} others were served"
    )


# Policy -> what the large request brings, and how many seconds of later arrivals may overtake it (see the classes).
BOUNDS = {
    "stall-free": ({}, 0.0),
    "fcfs": ({}, 0.0),
    "prefill-first": ({}, 0.0),
    "decode-first": ({}, 0.0),
    "priority": ({"priority": 2}, 2 * 10.0),
    "edf": ({}, 10.0),
    "srpf": ({}, (LARGE - SMALL) / 1000),
    "hrrn": ({}, 30.0),
}


@pytest.mark.parametrize("policy", BOUNDS)
def test_nobody_starves(policy):
    """A request that needs 60 % of the pool is served in an endless stream of small ones, within the stated bound."""
    wants, seconds = BOUNDS[policy]
    loop, large, overtakers = endless_stream(policy, **wants)
    assert all(s.arrived <= large.arrived + seconds + 1e-9 for s in overtakers)
    # Those that wait when it comes, those that may overtake it, and those that hold its pages: all are short.
    assert large.scheduled - large.arrived < seconds + 40 * STEP * 4
    if seconds >= 10:
        assert len(overtakers) > 20, "nobody has overtaken it, so nothing is tested"
    while large.status is not Status.FINISHED:
        loop.step()
    assert large.output == expected_output(large)


def test_nobody_starves_under_fair():
    """The large request's client has had no service, so it is next as soon as it comes."""
    _, large, overtakers = endless_stream("fair", client="large")
    assert not overtakers and large.scheduled - large.arrived < 40 * STEP * 4
    _, large, overtakers = endless_stream("fair", client="small")
    assert not overtakers


def test_pure_srpf_does_starve():
    """The counterexample: without ageing there is no bound, as the policy says."""
    with pytest.raises(AssertionError, match="starves"):
        endless_stream(Srpf(None), rounds=600)


@EVERY
@pytest.mark.parametrize("caching", [True, False])
def test_everybody_is_served_in_a_crowd(policy, caching):
    """Twice as many as there is room for, of all sizes; nobody is left and every output is right."""
    rng = random.Random(5)
    limits = make_limits(num_slots=6, num_pages=26, page_size=4, max_model_len=96, prefix_caching=caching)
    loop = Loop(limits, 1, policy, step_time=lambda *_: STEP)
    sequences = []
    for i in range(40):
        prompt = rng.randint(1, 60)
        sequences.append(make_sequence(i, prompt, rng.randint(1, 96 - prompt), client=rng.choice("ab"),
                                       priority=rng.randint(0, 3)))  # fmt: skip
    loop.add(*sequences)
    loop.finish(5000)
    assert [s.output for s in sequences] == [expected_output(s) for s in sequences]
    assert loop.device.prompt_tokens <= 3 * sum(len(s.prompt) for s in sequences)


# -- preemption ------------------------------------------------------------------------------------------------------

SHAPES = {
    "long prompts": ((300, 400), (1, 20)),
    "long outputs": ((20, 60), (200, 400)),
    "mixed": ((1, 400), (1, 400)),
}


def storm(shape, ends, caching, run_ahead, seed=0):
    """50 requests in a pool of 1.2 times the largest. Returns tokens read over prompt tokens, and preemptions."""
    rng, sequences = random.Random(seed), []
    for i in range(50):
        prompt, limit = (rng.randint(*bounds) for bounds in SHAPES[shape])
        early = ends == "never" or (ends == "some" and rng.random() < 0.5)
        sequences.append(
            make_sequence(i, prompt, limit, stops_at=rng.randint(1, 1 + limit // 4) if early else None)
        )
    most = max(len(s.prompt) + s.max_tokens for s in sequences) // 16 + 1
    loop = Loop(make_limits(num_slots=16, num_pages=int(1.2 * most), page_size=16, max_model_len=1024,
                            chunk_tokens=64, prefix_caching=caching), run_ahead)  # fmt: skip
    loop.add(*sequences)
    loop.finish(20_000)
    assert [s.output for s in sequences] == [expected_output(s) for s in sequences]
    return loop.device.prompt_tokens / sum(len(s.prompt) for s in sequences), loop.scheduler.num_preemptions


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("ends", ["always", "never", "some"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_crowd_does_not_read_its_prompts_again_and_again(shape, ends, caching):
    """``ends``: whether max_tokens is reached always, never or by some."""
    for run_ahead in (0, 1):
        again, preemptions = storm(shape, ends, caching, run_ahead, seed=run_ahead)
        print(f"{shape}, limit {ends} reached: {again:.2f} times the prompts read, {preemptions} preemptions")
        assert again <= 2 and preemptions <= 12


@pytest.mark.parametrize("caching", [True, False])
def test_who_expects_the_worst_preempts_nobody(caching):
    """With ``expected`` at 1 pages are there for all that is admitted, to its last token, also when they are shared."""
    rng = random.Random(11)
    loop = Loop(
        make_limits(num_slots=8, num_pages=40, page_size=4, max_model_len=96, prefix_caching=caching), 1
    )
    loop.scheduler.memory.expected = 1.0
    loop.scheduler.memory.ended = lambda sequence: None
    prefix, most = [rng.randrange(40) for _ in range(30)], 0
    for i in range(60):
        prompt = [*prefix[: rng.randint(0, 30)], *(rng.randrange(40) for _ in range(rng.randint(1, 20)))]
        loop.add(make_sequence(i, prompt, rng.randint(1, 40)))
    while loop.scheduler.has_work:
        loop.step()
        most = max(most, len(loop.scheduler.running))
    assert loop.scheduler.num_preemptions == 0 and most >= 3


@pytest.mark.slow
def test_storms_at_length():
    for shape, ends, caching in itertools.product(SHAPES, ("always", "never", "some"), (True, False)):
        for seed in range(20):
            assert storm(shape, ends, caching, seed % 3, seed)[0] <= 2


# -- order and shares ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_priority_under_load(run_ahead):
    """Admissions follow priority, then arrival; an urgent late-comer passes all that wait."""
    loop = Loop(make_limits(num_slots=2, num_steps=4), run_ahead, Priority(None))
    rng = random.Random(1)
    early = [make_sequence(i, 6, 9, priority=rng.randint(0, 4)) for i in range(20)]
    loop.add(*early)
    for _ in range(4):
        loop.step()
    waiting = [s for s in early if s.status is Status.WAITING]
    urgent = make_sequence("urgent", 6, 9, priority=-1)
    loop.add(urgent)
    seen = sum(len(plan.admits) for plan in loop.plans)
    loop.finish()
    admitted = [sequence for plan in loop.plans for _, sequence in plan.admits]
    assert admitted[:2] == sorted(early, key=lambda s: (s.priority, s.arrival))[:2]
    assert admitted[seen:] == [urgent, *sorted(waiting, key=lambda s: (s.priority, s.arrival))]


def test_deadlines_are_met_in_their_order():
    loop = Loop(make_limits(num_slots=1, num_steps=4), 0, Edf())
    rng = random.Random(2)
    sequences = [make_sequence(i, 6, 9, deadline=rng.random()) for i in range(12)]
    loop.add(*sequences)
    loop.finish()
    admitted = [sequence for plan in loop.plans for _, sequence in plan.admits]
    assert admitted == sorted(sequences, key=lambda s: s.deadline)


def test_short_ones_do_not_wait_for_long_ones_under_hrrn():
    loop = Loop(make_limits(num_slots=1, num_steps=4), 0, Hrrn(), step_time=lambda *_: 1e-3)
    long, short = make_sequence("long", 60, 40), make_sequence("short", 3, 3)
    loop.add(make_sequence("first", 3, 9), long, short)
    loop.finish()
    assert [s.id for plan in loop.plans for _, s in plan.admits] == ["first", "short", "long"] or (
        loop.plans[0].admits[0][1] is short
    )


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_clients_of_unequal_rate_get_equal_service(run_ahead):
    """One keeps twelve requests waiting, the other forty, with other lengths: their services stay within the bound."""
    longest, outputs, slots = 40, 24, 4
    policy = Fair()
    loop = Loop(make_limits(num_slots=slots, num_steps=4), run_ahead, policy)
    numbers, rng, alive = itertools.count(), random.Random(4), []

    def service(client):
        mine = [s for s in alive if s.client == client and s.scheduled is not None]
        return sum(policy.prompt_weight * len(s.prompt) + policy.output_weight * len(s.output) for s in mine)

    worst = 0.0
    for _ in range(400):
        for client, backlog, prompt in (("modest", 12, 12), ("greedy", 40, longest)):
            while sum(s.client == client and s.status is Status.WAITING for s in alive) < backlog:
                alive.append(
                    make_sequence(
                        next(numbers), rng.randint(1, prompt), rng.randint(1, outputs), client=client
                    )
                )
                loop.add(alive[-1])
        loop.step()
        worst = max(worst, abs(service("modest") - service("greedy")))
    bound = 2 * (policy.prompt_weight * longest + policy.output_weight * slots * outputs)
    total = service("modest") + service("greedy")
    print(f"services differ by {worst:.0f} at most, bound {bound:.0f}, of {total:.0f}")
    assert worst <= bound < total / 20


# -- a long queue ----------------------------------------------------------------------------------------------------


@EVERY
def test_aborting_a_long_queue_is_quick(policy):
    scheduler = Scheduler(make_limits(), policy)
    sequences = [make_sequence(i, [1, 2, 3], 4, client=str(i % 100), priority=i % 7) for i in range(20_000)]
    for sequence in sequences:
        scheduler.add(sequence)
    random.Random(0).shuffle(sequences)
    begin = time.perf_counter()
    for sequence in sequences:
        scheduler.abort(sequence)
    assert time.perf_counter() - begin < 1
    assert (scheduler.num_waiting, scheduler._waiting_tokens) == (0, 0) and scheduler.plan() is None

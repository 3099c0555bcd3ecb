"""What the scheduler promises, one promise a test. The device is made of Python lists (fake_device)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fake_device import Loop, expected_output, make_limits, make_sequence
from jaxsched.schedule import Finish, Status
from jaxsched.schedule.rounds import FixedRounds

ROOT = Path(__file__).resolve().parents[2]


def pieces(plan):
    """``[[(id, start, length, ends), ...] per mixed step]``."""
    return [[(p.sequence.id, p.start, p.length, p.ends) for p in step.pieces] for step in plan.mixed]


def entries(plan):
    return {e.sequence.id: e.steps for e in plan.entries}


def loop_of(run_ahead=0, **limits):
    return Loop(make_limits(**limits), run_ahead)


def waiting(loop):
    """Those that wait, in their order."""
    queue = loop.scheduler.policy._queue
    return [
        sequence
        for _, arrival, ticket, sequence in sorted(queue._heap)
        if queue._tickets.get(arrival) == ticket
    ]


# -- order and budgets ---------------------------------------------------------------------------------------------


def test_a_short_prompt_decodes_in_its_first_round():
    loop = loop_of()
    loop.add(make_sequence("a", 5, 20))
    plan = loop.plan()
    assert pieces(plan) == [[("a", 0, 5, True)]]
    assert (plan.steps, entries(plan), plan.decode_steps) == (8, {"a": 8}, 7)


def test_prompts_are_packed_and_split():
    """16 tokens a step: the second prompt is cut, the third shares a step with its rest."""
    loop = loop_of(chunk_tokens=16)
    loop.add(make_sequence("a", 10, 9), make_sequence("b", 30, 9), make_sequence("c", 3, 9))
    plan = loop.plan()
    assert pieces(plan) == [
        [("a", 0, 10, True), ("b", 0, 6, False)],
        [("b", 6, 16, False)],
        [("b", 22, 8, True), ("c", 0, 3, True)],
    ]
    assert entries(plan) == {"a": 8, "b": 6, "c": 6}
    assert [step.tokens for step in plan.mixed] == [16, 16, 11]


def test_prompts_are_cut_between_pages():
    """Pages of 4 and 14 tokens a step: what is left of a step is not given to a part of a page."""
    loop = loop_of(chunk_tokens=14, whole_pages=True)
    loop.add(make_sequence("a", 9, 9), make_sequence("b", 31, 9), make_sequence("c", 3, 9))
    assert pieces(loop.plan()) == [
        [("a", 0, 9, True), ("b", 0, 4, False)],
        [("b", 4, 12, False)],
        [("b", 16, 12, False)],
        [("b", 28, 3, True), ("c", 0, 3, True)],
    ]


@pytest.mark.parametrize("chunk", [1, 6])
def test_a_page_is_the_least_that_is_read_whole(chunk):
    """Whatever a controller or policy wants: less would never come to an end."""
    loop = Loop(make_limits(page_size=8, whole_pages=True), controller=FixedRounds(2, chunk))
    loop.add(make_sequence("a", 20, 3))
    assert pieces(loop.plan()) == [[("a", 0, 8, False)], [("a", 8, 8, False)]]
    loop.commit()
    loop.finish()


def test_running_decodes_are_in_every_round():
    """A long prompt stalls nobody: it is read in chunks beside the decode that runs."""
    loop = loop_of(num_steps=2, max_model_len=256, num_pages=100)
    loop.add(make_sequence("old", 4, 60))
    loop.plan()
    loop.commit()
    loop.add(make_sequence("long", 150, 4))
    while loop.scheduler.running and loop.scheduler.num_waiting + len(loop.scheduler.running) > 1:
        plan = loop.plan()
        assert entries(plan)["old"] == 2
        assert sum(step.tokens for step in plan.mixed) <= 2 * 16
        loop.commit()


def test_unfinished_prefills_come_before_new_requests():
    loop = loop_of(num_steps=1, chunk_tokens=8)
    loop.add(make_sequence("long", 20, 5))
    assert pieces(loop.plan()) == [[("long", 0, 8, False)]]
    loop.commit()
    loop.add(make_sequence("new", 6, 5))
    assert pieces(loop.plan()) == [[("long", 8, 8, False)]]
    loop.commit()
    assert pieces(loop.plan()) == [[("long", 16, 4, True), ("new", 0, 4, False)]]


def test_first_come_first_served():
    """A request that does not fit is not overtaken by a smaller one behind it."""
    loop = loop_of(num_pages=10, page_size=4)
    loop.add(make_sequence("a", 20, 4), make_sequence("big", 28, 4), make_sequence("small", 2, 2))
    assert [sequence.id for _, sequence in loop.plan().admits] == ["a"]
    loop.finish()
    order = [sequence.id for plan in loop.plans for _, sequence in plan.admits]
    assert order == ["a", "big", "small"]


def test_slots_bound_the_number_that_run():
    loop = loop_of(num_slots=2)
    loop.add(*(make_sequence(i, 3, 12) for i in range(5)))
    plan = loop.plan()
    assert [slot for slot, _ in plan.admits] == [0, 1]
    assert loop.scheduler.num_waiting == 3
    loop.finish()
    assert max(len(plan.entries) for plan in loop.plans) == 2


@pytest.mark.parametrize(("running", "bucket"), [(1, 2), (2, 2), (3, 8), (8, 8)])
def test_the_smallest_slot_bucket_that_holds_all(running, bucket):
    loop = loop_of(num_slots=8, slot_buckets=(2, 8))
    loop.add(*(make_sequence(i, 2, 20) for i in range(running)))
    assert loop.plan().slots == bucket


def test_a_round_is_no_longer_than_someone_can_use():
    loop = loop_of(num_steps=8)
    loop.add(make_sequence("a", 3, 2), make_sequence("b", 3, 5))
    plan = loop.plan()
    assert (plan.steps, entries(plan)) == (5, {"a": 2, "b": 5})


def test_slots_move_down_when_nothing_waits():
    """When the sequences in low slots have ended, those above them move so that a smaller bucket is enough."""
    loop = loop_of(num_slots=8, slot_buckets=(2, 4, 8), num_steps=4, num_pages=200)
    lengths = [3, 40, 3, 3, 3, 3, 20, 3]
    sequences = [make_sequence(i, 4, n) for i, n in enumerate(lengths)]
    loop.add(*sequences)
    assert loop.plan().slots == 8
    loop.commit()
    plan = loop.plan()
    assert (plan.moves, plan.slots, plan.drops) == ([(6, 0)], 2, [6])
    assert {e.sequence.id: e.slot for e in plan.entries} == {"1": 1, "6": 0}
    loop.finish()
    assert [s.output for s in sequences] == [expected_output(s) for s in sequences]
    assert not any(plan.moves for plan in loop.plans[2:])


def test_slots_do_not_move_while_someone_waits_for_them():
    loop = loop_of(num_slots=4, slot_buckets=(1, 4), num_steps=4, num_pages=20, page_size=4)
    loop.add(make_sequence("a", 4, 3), make_sequence("b", 4, 30), make_sequence("big", 60, 20))
    loop.step()
    assert loop.scheduler.num_waiting == 1
    assert loop.plan().moves == []


@pytest.mark.parametrize("greedy", [True, False])
def test_a_round_is_greedy_when_all_of_it_is(greedy):
    loop = loop_of()
    loop.add(make_sequence("a", 3, 9), make_sequence("b", 3, 9, greedy=greedy))
    assert loop.plan().sampling is (not greedy)


def test_whole_prompts():
    """Without chunked prefill each prompt is read in one step; one that does not fit beside others waits."""
    loop = loop_of(split_prompts=False, max_model_len=64, num_steps=4, max_new_pages=100)
    for name, length in (("a", 30), ("b", 30), ("c", 50), ("d", 10)):
        loop.add(make_sequence(name, length, 5))
    assert pieces(loop.plan()) == [
        [("a", 0, 30, True), ("b", 0, 30, True)],
        [("c", 0, 50, True), ("d", 0, 10, True)],
    ]


def test_the_page_table_changes_fit_their_budget():
    """Admission stops where the round's page updates would overflow; the next round goes on."""
    loop = loop_of(num_slots=4, max_new_pages=12, page_size=4, num_steps=1, chunk_tokens=64)
    loop.add(*(make_sequence(i, 20, 3) for i in range(4)))
    assert len(loop.plan().admits) == 2
    loop.commit()
    loop.finish()
    assert max(len(plan.pages) for plan in loop.plans) <= 12


def test_nothing_to_do():
    loop = loop_of()
    assert loop.plan() is None and not loop.scheduler.has_work


# -- short of pages ------------------------------------------------------------------------------------------------


def crowded(run_ahead=0, num_pages=12, **limits):
    """Two sequences, each will need 8 pages of 4 in the end; the pool has fewer than 16, but lets both begin."""
    loop = loop_of(run_ahead, num_pages=num_pages, page_size=4, num_steps=8, **limits)
    loop.add(make_sequence("old", 8, 25), make_sequence("young", 8, 25))
    return loop


def test_rounds_get_shorter_before_anyone_is_preempted():
    loop = crowded()
    steps, preemptions = [], []
    while loop.scheduler.num_preemptions == 0:
        plan = loop.plan()
        steps.append(plan.steps)
        preemptions.append(plan.preempted)
        loop.commit()
    assert steps[0] == 8 and set(steps[:-1]) <= {8, 4, 2, 1} and 1 in steps
    assert steps[:-1] == sorted(steps[:-1], reverse=True)
    assert not any(preemptions[:-1]) and preemptions[-1] == 1


def test_rounds_in_flight_are_waited_for_before_anyone_is_preempted():
    loop = crowded(run_ahead=1)
    while True:
        plan = loop.plan()
        if plan is None:
            assert loop.in_flight and loop.scheduler.num_preemptions == 0
            loop.commit()
        elif plan.preempted:
            break
        elif len(loop.in_flight) > 1:
            loop.commit()
    assert len(loop.in_flight) == 1, "preempted with a round in flight"


def test_the_youngest_is_preempted_and_comes_back_first():
    loop = crowded(num_slots=3)
    loop.add(make_sequence("waiting", 4, 4))
    old, young = waiting(loop)[:2]
    loop.finish()
    assert (old.preemptions, young.preemptions >= 1) == (0, True)
    order = [sequence.id for plan in loop.plans for _, sequence in plan.admits]
    assert order[:2] == ["old", "young"] and order.index("young", 2) < order.index("waiting")
    assert young.output == expected_output(young)


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_output_is_read_again_as_prompt(caching):
    """With prefix caching only what somebody else has needed the pages for."""
    loop = crowded(prefix_caching=caching)
    young = waiting(loop)[1]
    while not young.preemptions:
        loop.step()
    known = young.length
    assert young.status is Status.WAITING and known > 8 and young.pages == []
    while young.status is Status.WAITING:
        loop.step()
    read = [p for plan in loop.plans for step in plan.mixed for p in step.pieces if p.sequence is young]
    again = known - (sum(p.length for p in read) - 8)
    assert (read[1].start, read[-1].ends) == (again, True)
    assert again % 4 == 0 and (4 <= again < known if caching else again == 0)
    loop.finish()
    assert young.output == expected_output(young) and young.cached == 0


def test_a_sequence_may_use_the_whole_pool():
    """One token more than there are positions: the last one sampled is never read."""
    limits = make_limits(num_pages=5, page_size=4)
    loop = Loop(limits)
    whole = make_sequence("a", 8, limits.longest - 8)
    loop.add(whole)
    loop.finish()
    assert len(whole.output) == 13 and whole.preemptions == 0


# -- leaving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_stop_and_length(run_ahead):
    loop = loop_of(run_ahead)
    stops = make_sequence("s", 3, 40)
    stops.stop_ids = frozenset([expected_output(stops)[11]])
    lengths = make_sequence("l", 3, 13)
    loop.add(stops, lengths)
    loop.finish()
    assert (stops.finish, stops.output) == (Finish.STOP, expected_output(stops)) and len(stops.output) <= 12
    assert (lengths.finish, len(lengths.output)) == (Finish.LENGTH, 13)


def test_a_stop_id_as_last_token_counts_as_stop():
    loop = loop_of()
    sequence = make_sequence("s", 3, 4)
    sequence.stop_ids = frozenset([expected_output(sequence)[-1]])
    loop.add(sequence)
    loop.finish()
    assert sequence.finish is Finish.STOP


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_abort_while_waiting(run_ahead):
    loop = loop_of(run_ahead, num_slots=1)
    first, second, third = (make_sequence(i, 4, 30) for i in range(3))
    loop.add(first, second, third)
    loop.step()
    loop.scheduler.abort(second)
    loop.scheduler.abort(second)  # idempotent
    assert (second.finish, loop.scheduler.num_waiting) == (Finish.ABORT, 1)
    loop.finish()
    assert (first.output, second.output, third.output) == (expected_output(first), [], expected_output(third))


def test_abort_while_its_prompt_is_read():
    loop = loop_of(num_steps=1, chunk_tokens=8)
    long, other = make_sequence("long", 40, 3), make_sequence("other", 4, 3)
    loop.add(long, other)
    loop.step()
    assert long.status is Status.PREFILL
    loop.scheduler.abort(long)
    loop.finish()
    assert long.output == [] and other.output == expected_output(other)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
def test_tokens_in_flight_of_an_aborted_sequence_are_dropped(run_ahead):
    """Its slot and pages go to the next one at once, whose tokens are its own."""
    loop = loop_of(run_ahead, num_slots=1, num_steps=2)
    first, second = make_sequence("first", 4, 30), make_sequence("second", 4, 9)
    loop.add(first, second)
    while len(loop.in_flight) <= run_ahead:
        loop.plan()
    known = list(first.output)
    loop.scheduler.abort(first)
    assert loop.scheduler.memory.pool.used == 0
    plan = loop.plan()
    assert [s.id for _, s in plan.admits] == ["second"] and plan.drops == []  # the admission resets the slot
    loop.finish()
    assert first.output == known and second.output == expected_output(second)


def test_an_aborted_slot_is_told_to_stop():
    loop = loop_of(slot_buckets=(4,))
    first, second = make_sequence("first", 4, 30), make_sequence("second", 4, 30)
    loop.add(first, second)
    loop.step()
    loop.scheduler.abort(first)
    assert loop.plan().drops == [0]
    loop.commit()
    assert loop.plan().drops == []


def test_run_ahead_frees_what_is_certain_to_be_over():
    """A sequence whose limit lies in a round in flight makes room before the host has seen its end."""
    loop = loop_of(1, num_slots=1)
    first, second = make_sequence("first", 4, 8), make_sequence("second", 4, 8)
    loop.add(first, second)
    assert loop.plan().steps == 8
    plan = loop.plan()
    assert len(loop.in_flight) == 2 and [s.id for _, s in plan.admits] == ["second"]
    loop.finish()
    assert (first.output, second.output) == (expected_output(first), expected_output(second))


# -- what it is made of --------------------------------------------------------------------------------------------


def test_scheduling_needs_no_jax(tmp_path):
    code = (
        "import sys, jaxsched.schedule\n"
        "from fake_device import Loop, make_limits, make_sequence\n"
        "loop = Loop(make_limits())\nloop.add(make_sequence('a', 5, 9))\nloop.finish()\n"
        "bad = {'jax', 'jaxlib', 'flax', 'torch'} & set(sys.modules)\nassert not bad, bad"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    run = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_planning_is_deterministic():
    def record():
        loop = loop_of(1, num_pages=14)
        loop.add(*(make_sequence(i, 5 + 3 * i, 15, stop_ids=(7,)) for i in range(6)))
        loop.finish()
        return [(p.steps, pieces(p), p.pages, p.drops, entries(p)) for p in loop.plans]

    assert record() == record()

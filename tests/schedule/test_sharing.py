"""Sequences that begin alike share pages: what is found, what is read again, what is forgotten, and when."""

import pytest

from fake_device import Loop, expected_output, make_limits, make_sequence
from jaxsched.schedule import Choice, Finish, Status
from jaxsched.schedule.rounds import FixedRounds

PREFIX = [1 + i % 40 for i in range(20)]  # five pages of 4


def loop_of(run_ahead=0, **limits):
    return Loop(make_limits(**limits), run_ahead)


def read(loop, sequence):
    """Tokens of a sequence that were read as prompt."""
    steps = [step for plan in loop.plans for step in plan.mixed]
    return sum(piece.length for step in steps for piece in step.pieces if piece.sequence is sequence)


def play(loop, *sequences):
    loop.add(*sequences)
    loop.finish()
    for sequence in sequences:
        assert sequence.output == expected_output(sequence)


# -- what is found ---------------------------------------------------------------------------------------------------


def test_a_later_prompt_reads_on_from_the_last_full_page_that_is_known():
    loop = loop_of()
    first, second = make_sequence("a", [*PREFIX, 7, 7], 3), make_sequence("b", [*PREFIX[:18], 9, 9, 9], 3)
    play(loop, first)
    play(loop, second)
    assert (first.cached, second.cached, read(loop, second)) == (0, 16, 5)
    assert (loop.plans[0].queries, loop.plans[0].hits) == (22, 0)
    assert [(p.queries, p.hits) for p in loop.plans if p.admits][1] == (21, 16)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 20])
def test_the_last_token_is_always_read(length):
    """A prompt that is known to its end still needs its last token's logits."""
    loop = loop_of()
    for name in "abc":
        play(loop, make_sequence(name, PREFIX[:length], 2))
    again = make_sequence("again", PREFIX[:length], 2)
    play(loop, again)
    assert again.cached == (length - 1) // 4 * 4 and read(loop, again) == length - again.cached >= 1


def test_live_sequences_share():
    """Six pages for each alone; the later ones need one of their own."""
    loop = loop_of(num_pages=64)
    loop.add(make_sequence("first", [*PREFIX, 1], 40))
    loop.step()
    loop.add(*(make_sequence(i, [*PREFIX, 2 + i], 3) for i in range(3)))
    before = loop.scheduler.memory.pool.used
    plan = loop.plan()
    assert len(plan.admits) == 3 and plan.hits == 3 * 20
    growth = len([page for slot, _, page in plan.pages if slot == 0])
    assert loop.scheduler.memory.pool.used - before == growth + 3
    loop.commit()
    loop.finish()


def test_one_mixed_step_is_enough():
    """All that is written in a step is written before anything is read, so even its own pages can be shared."""
    loop = loop_of(chunk_tokens=64)
    a, b = make_sequence("a", [*PREFIX, 1], 5), make_sequence("b", [*PREFIX, 2], 5)
    loop.add(a, b)
    plan = loop.plan()
    [step] = plan.mixed
    assert [(p.start, p.length, p.ends) for p in step.pieces] == [(0, 21, True), (20, 1, True)]
    assert b.pages[:5] == a.pages[:5] and b.pages[5] != a.pages[5]
    loop.commit()
    loop.finish()
    assert [s.output for s in (a, b)] == [expected_output(s) for s in (a, b)]


def test_a_prompt_that_is_half_read_can_be_followed():
    loop = loop_of(num_steps=1, chunk_tokens=8)
    a = make_sequence("a", [*PREFIX, 1], 5)
    loop.add(a)
    loop.step()
    assert (a.prefilled, a.status) == (8, Status.PREFILL)
    b = make_sequence("b", [*PREFIX, 2], 5)
    loop.add(b)
    loop.finish()
    assert b.cached >= 8 and [s.output for s in (a, b)] == [expected_output(s) for s in (a, b)]


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("stop", [True, False])
def test_the_next_turn_finds_the_answer(run_ahead, stop):
    """Output pages are known as soon as the host has seen their tokens and the last one's successor."""
    loop = loop_of(run_ahead, num_steps=2)
    first = make_sequence("a", PREFIX, 40)
    if stop:
        first.stop_ids = frozenset([expected_output(first)[17]])
    play(loop, first)
    assert (first.finish is Finish.STOP) is stop
    history = [*first.prompt, *first.output]
    second = make_sequence("b", [*history, 3, 3, 3], 4)
    play(loop, second)
    full = (len(history) - 1) // 4 * 4
    # A limit is foreseen: the pages go back before the tokens of the rounds in flight are known.
    unseen = 0 if stop or not run_ahead else 4
    assert full - unseen <= second.cached <= full


# -- what is not -----------------------------------------------------------------------------------------------------


def test_salts_separate():
    loop = loop_of()
    for salt, cached in ((b"", 0), (b"x", 0), (b"", 16), (b"x", 16), (b"y", 0), (None, 0), (None, 0)):
        sequence = make_sequence(f"{salt}/{cached}", PREFIX, 3, salt=salt)
        play(loop, sequence)
        assert sequence.cached == cached


def test_nothing_is_shared_when_the_prefix_differs():
    """Equal tokens behind another beginning are other content."""
    loop = loop_of()
    play(loop, make_sequence("a", PREFIX, 2))
    other = make_sequence("b", [0, *PREFIX[1:]], 2)
    play(loop, other)
    assert other.cached == 0


def test_without_prefix_caching_only_live_sequences_share():
    """Samples of one request have one salt."""
    loop = loop_of(prefix_caching=False)
    play(loop, make_sequence("a", PREFIX, 3, salt=b"r1"))
    assert loop.scheduler.memory.pool.cached == 0
    samples = [make_sequence(f"b{i}", PREFIX, 3, salt=b"r1") for i in range(3)]
    play(loop, *samples)
    assert [s.cached for s in samples] == [0, 16, 16]


def test_the_pages_unused_longest_are_forgotten_first():
    """And of one sequence the last ones, which fewer prompts share."""
    loop = loop_of(num_pages=12, num_steps=1)
    prompts = {name: [ord(name), *PREFIX[:12]] for name in "abc"}  # four pages each, three of them full
    for name in "aba":
        play(loop, make_sequence(f"{name}{loop.device.prompt_tokens}", prompts[name], 1))
    assert loop.scheduler.memory.pool.cached == 6
    play(loop, make_sequence("c", prompts["c"], 1))  # 6 blank pages are enough
    assert loop.scheduler.memory.pool.cached == 9
    play(loop, make_sequence("d", 20, 1))  # needs 5: the 3 blank ones and 2 of b's
    assert [len(known(loop, prompts[name])) for name in "abc"] == [3, 1, 3]
    play(loop, make_sequence("b again", prompts["b"], 1))  # its first page is used, the next in line are a's
    assert [len(known(loop, prompts[name])) for name in "abc"] == [0, 3, 3]


def known(loop, prompt):
    return loop.scheduler.memory._known(make_sequence("probe", prompt, 1))


def test_reset():
    """What is known is forgotten; who runs goes on, and shares nothing of before with those who come."""
    loop = loop_of(num_steps=2)
    play(loop, make_sequence("a", PREFIX, 2))
    running = make_sequence("b", [*PREFIX, 5], 20)
    loop.add(running)
    loop.step()
    assert running.cached == 20
    loop.scheduler.memory.pool.reset()
    assert loop.scheduler.memory.pool.cached == 0
    late = make_sequence("c", [*PREFIX, 5], 20)
    loop.add(late)
    loop.finish()
    assert late.cached == 0
    assert [s.output for s in (running, late)] == [expected_output(s) for s in (running, late)]


# -- rounds in parts, paused decodes, odd controllers ----------------------------------------------------------------


def test_a_round_may_be_committed_in_parts():
    loop = loop_of(num_steps=8)
    a, b = make_sequence("a", 5, 20), make_sequence("b", 20, 20)
    a.stop_ids = frozenset([expected_output(a)[3]])
    want = expected_output(a)
    loop.add(a, b)
    plan = loop.plan()
    assert (plan.steps, len(plan.mixed)) == (8, 2)
    seen = []
    for steps in (1, 1, 4, 2):
        assert loop.scheduler.in_flight == 1
        seen.append({sequence.id: len(new) for sequence, new in loop.commit(steps)})
    assert loop.scheduler.in_flight == 0
    stop = len(want)
    assert a.output == want and a.finish is Finish.STOP and plan.wasted == {"stopped": 8 - stop}
    assert [part.get("b", 0) for part in seen] == [0, 1, 4, 2]
    assert sum(entry.sampled for entry in plan.entries) == stop + 7
    loop.finish()
    assert b.output == expected_output(b)


def test_waste_is_counted_by_reason():
    loop = loop_of(run_ahead=1, num_steps=4)
    stops, goes, leaves = (make_sequence(name, 4, 30) for name in ("s", "g", "l"))
    stops.stop_ids = frozenset([expected_output(stops)[1]])
    loop.add(stops, goes, leaves)
    first, second = loop.plan(), loop.plan()
    loop.commit()
    loop.scheduler.abort(leaves)
    loop.commit()
    length = len(expected_output(stops))
    assert first.wasted == {"stopped": 4 - length} and second.wasted == {"run_ahead": 4, "aborted": 4}


class Pausing(FixedRounds):
    """Prompts are read in rounds of one step in which nobody decodes."""

    def choose(self, load):
        return Choice(self.steps, self.steps, self.chunk, decode=not (load.waiting or load.unread_tokens))


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_decodes_pause(run_ahead):
    loop = Loop(make_limits(num_steps=4, chunk_tokens=8), run_ahead, "fcfs", Pausing(4, 8))
    old, new = make_sequence("old", 3, 30), make_sequence("new", 30, 9)
    loop.add(old)
    loop.step()
    loop.add(new)
    while new.status in (Status.WAITING, Status.PREFILL):
        plan = loop.plan()
        assert (plan.steps, len(plan.mixed), plan.decode) == (1, 1, False)
        assert old not in [e.sequence for e in plan.entries]
        loop.commit()
    plan = loop.plan()
    assert plan.decode and {e.sequence for e in plan.entries} == {old, new}
    loop.commit()
    loop.finish()
    assert [s.output for s in (old, new)] == [expected_output(s) for s in (old, new)]


class Mean(FixedRounds):
    """Wants nothing to happen."""

    def choose(self, load):
        return Choice(0, 0, 0, admit=False)


def test_a_controller_cannot_bring_everything_to_a_halt():
    loop = Loop(make_limits(), controller=Mean(1, 1))
    play(loop, *(make_sequence(i, 5, 5) for i in range(6)))
    assert max(plan.steps for plan in loop.plans) == 1

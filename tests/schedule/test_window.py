"""Sliding windows: pages that every query from now on has behind it go back, and nothing else does.

The device is made of Python lists (fake_device): it checks that what each query sees is what its prefix has written.
"""

import pytest

from fake_device import Loop, expected_output, make_limits, make_sequence
from jaxsched.schedule import Status
from jaxsched.schedule.memory import GONE

PREFIX = [1 + i % 40 for i in range(40)]  # ten pages of 4


def loop_of(run_ahead=0, **limits):
    return Loop(make_limits(**{"max_model_len": 512, "window": 16, **limits}), run_ahead)


def play(loop, *sequences):
    loop.add(*sequences)
    loop.finish()
    for sequence in sequences:
        assert sequence.output == expected_output(sequence)


def peak(loop, *sequences):
    """The most pages in use, after any plan or commit, until all is done."""
    loop.add(*sequences)
    most = 0
    while loop.scheduler.has_work:
        while len(loop.in_flight) <= loop.run_ahead and loop.plan() is not None:
            most = max(most, loop.scheduler.memory.pool.used)
        loop.commit()
    for sequence in sequences:
        assert sequence.output == expected_output(sequence)
    return most


# -- how much is kept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "behind"), [(0, 0), (15, 0), (18, 0), (19, 1), (22, 1), (23, 2), (115, 25)]
)
def test_behind(position, behind):
    """Window 16 and pages of 4: a query at 19 sees 4..19, so page 0 is behind it and page 1 is not."""
    assert make_limits(window=16).behind(position) == behind
    assert make_limits(window=None).behind(position) == 0


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("window", [1, 4, 7, 16])
def test_a_long_answer_wraps_often(window, steps, run_ahead):
    """Pages in use stay at what the window and one round need, whatever the length."""
    loop = loop_of(run_ahead, window=window, num_steps=steps, chunk_tokens=8)
    limits = loop.scheduler.limits
    most = peak(loop, make_sequence("a", 5, 400))
    assert most <= limits.pages_at_once == limits.pages_for(window + 8 + steps) + 1
    assert most < 405 / 4 / 4


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("chunk", [1, 3, 4, 8, 13])
def test_a_prompt_longer_than_the_pool(chunk, steps):
    """It is read in chunks, over borders of pages and of the window, with pages that it gives back on the way."""
    limits = make_limits(max_model_len=512, window=16, chunk_tokens=chunk, num_steps=steps)
    loop = loop_of(num_pages=limits.pages_at_once, chunk_tokens=chunk, num_steps=steps)
    long = make_sequence("a", 400, 60)
    assert peak(loop, long) <= limits.pages_at_once < 400 / 4 / 4
    assert loop.scheduler.num_preemptions == 0
    pieces = [p for plan in loop.plans for step in plan.mixed for p in step.pieces]
    assert sum(p.length for p in pieces) == 400, "something was read twice"


def test_a_prompt_that_is_read_whole_needs_all_its_pages():
    loop = loop_of(num_pages=64, max_model_len=128, split_prompts=False)
    long = make_sequence("a", 100, 28)
    loop.add(long)
    loop.plan()
    assert loop.scheduler.memory.pool.used >= 25
    loop.commit()
    loop.plan()
    assert loop.scheduler.memory.pool.used <= 16 / 4 + 8 / 4 + 2
    loop.commit()
    loop.finish()
    assert long.output == expected_output(long)


def test_many_run_where_without_a_window_one_would():
    loop = loop_of(num_pages=48, num_steps=4, chunk_tokens=8)
    assert peak(loop, *(make_sequence(i, 80, 100) for i in range(8))) <= 48
    assert max(len(plan.entries) for plan in loop.plans) == 4 and loop.scheduler.num_preemptions == 0


def test_without_a_window_nothing_goes_back():
    loop = loop_of(window=None, num_pages=128)
    sequence = make_sequence("a", 40, 200)
    loop.add(sequence)
    while sequence.status is not Status.FINISHED:
        loop.plan()
        assert sequence.gone == 0 and GONE not in sequence.pages
        loop.commit()


# -- sharing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_what_was_given_back_can_be_found(run_ahead):
    """Prompt and output: the next turn reads on where the last one stood."""
    loop = loop_of(run_ahead, num_pages=256, num_steps=2)
    first = make_sequence("a", PREFIX, 100, stops_at=90)
    play(loop, first)
    history = [*first.prompt, *first.output]
    for length in (41, 60, 100, len(history)):
        again = make_sequence(f"b{length}", [*history[:length], 45], 3)
        play(loop, again)
        assert again.cached == min(length, len(history) - 1) // 4 * 4


def test_a_hit_needs_only_what_the_window_sees():
    """The beginning of the text was forgotten; what a query at 80 sees, positions 65..79, is known."""
    loop = loop_of(num_pages=256)
    text = [i % 50 for i in range(81)]
    play(loop, make_sequence("a", text, 1))
    pool = loop.scheduler.memory.pool
    taken = pool.take(pool.free - pool.cached + 16)  # all blank pages, and the 16 that were unused longest
    pool.give(taken)
    again = make_sequence("b", text, 2)
    loop.add(again)
    plan = loop.plan()
    assert again.cached == 80 and plan.hits == 80
    assert (again.gone, again.pages[:16]) == (16, [GONE] * 16) and GONE not in again.pages[16:]
    assert sorted(index for _, index, _ in plan.pages)[0] == 16, "the table gets no page that is not there"
    loop.commit()
    loop.finish()
    assert again.output == expected_output(again)


def test_a_gap_in_the_window_is_no_hit():
    """Page 18 is forgotten, so a query at 80 would miss positions 72..75; one at 72 sees 57..71, which are known."""
    loop = loop_of(num_pages=256)
    text = [i % 50 for i in range(81)]
    first = make_sequence("a", text, 1)
    play(loop, first)
    pool = loop.scheduler.memory.pool
    loop.scheduler.memory._extend_keys(first, 20)
    gap = pool.get(first.keys[18])
    pool._cached.move_to_end(gap, last=False)
    pool.give(pool.take(pool.free - pool.cached + 1))
    assert pool.get(first.keys[18]) is None
    again = make_sequence("b", text, 2)
    play(loop, again)
    assert again.cached == 72


def test_shared_pages_stay_with_those_who_need_them():
    """b is at the prefix's end while a has long left it behind; c, later, finds it all the same."""
    loop = loop_of(num_pages=256, num_steps=1, window=40)
    a, b = make_sequence("a", [*PREFIX, 1], 120), make_sequence("b", [*PREFIX, 2], 3)
    loop.add(a)
    while a.status is not Status.DECODE:
        loop.step()
    loop.add(b)
    plan = loop.plan()
    assert b.pages[:10] == a.pages[:10] and plan.hits == 40
    loop.commit()
    play(loop, c := make_sequence("c", [*PREFIX, 3], 3))
    assert c.cached == 40


def test_pages_that_others_share_come_back_late():
    """A prompt that leaves shared pages behind gets none for them. It waits while the decode holds them."""
    loop = loop_of(num_pages=15, num_steps=1, chunk_tokens=4, window=40)
    a, b = make_sequence("a", [*PREFIX, 1], 12), make_sequence("b", [*PREFIX, *range(60)], 3)
    loop.add(a)
    while a.status is not Status.DECODE:
        loop.step()
    loop.scheduler.memory.expected = 0.0  # admits as if nobody would grow
    loop.add(b)
    waited = 0
    while loop.scheduler.has_work:
        plan = loop.plan()
        waited += b.status is Status.PREFILL and not plan.mixed
        loop.commit()
    assert waited > 0 and [s.output for s in (a, b)] == [expected_output(s) for s in (a, b)]


@pytest.mark.parametrize("caching", [True, False])
def test_samples_of_a_request(caching):
    loop = loop_of(prefix_caching=caching)
    samples = [make_sequence(f"s{i}", [*PREFIX, 7], 60, salt=b"r") for i in range(3)]
    play(loop, *samples)
    assert [s.cached for s in samples] == [0, 40, 40]
    assert bool(loop.scheduler.memory.pool.cached) is caching


# -- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("after", [1, 3, 6, 11])
def test_preemption_at_any_time(after, run_ahead):
    """Half read or decoding, its window behind it or not: it goes on and ends as if nothing had happened."""
    loop = loop_of(run_ahead, num_pages=40, num_steps=2, chunk_tokens=8)
    a, b = make_sequence("a", 70, 60), make_sequence("b", 30, 90)
    loop.add(a, b)
    for _ in range(after):
        loop.step()
    for sequence in list(loop.scheduler.running):
        loop.scheduler.evict(sequence)
        assert (sequence.pages, sequence.gone) == ([], 0)
    loop.finish()
    assert [s.output for s in (a, b)] == [expected_output(s) for s in (a, b)]
    assert loop.scheduler.num_preemptions > 0


def test_a_preempted_sequence_reads_only_what_its_window_has_lost():
    loop = loop_of(num_pages=64, num_steps=1)
    a = make_sequence("a", 100, 40)
    loop.add(a)
    for _ in range(20):
        loop.step()
    before, length = loop.device.prompt_tokens, a.length
    loop.scheduler.evict(a)
    loop.step()
    assert loop.device.prompt_tokens - before == length - (length - 1) // 4 * 4
    loop.finish()
    assert a.output == expected_output(a)


def test_longest():
    """With a window the pool bounds no length, if it holds what one sequence owns at a time."""
    limits = make_limits(window=16, num_pages=64, max_model_len=1024)
    assert limits.pages_at_once == (16 + 16 + 8) // 4 + 1 == 11
    assert (limits.longest, limits.need(1023), limits.need(9)) == (1024, 11, 3)
    small = make_limits(window=16, num_pages=10, max_model_len=1024)
    assert small.longest == 41

"""The rules of AdaptiveRounds, one by one, and the cost model behind them."""

import dataclasses
import math
import pickle

import numpy as np
import pytest

from jaxsched.schedule.cost import StepCost
from jaxsched.schedule.load import Load
from jaxsched.schedule.rounds import AdaptiveRounds, FixedRounds

CHUNKS, SLOTS, STEPS = (16, 64, 128, 256), (4, 8, 32), (1, 2, 4, 8, 16)
IDLE = Load(
    now=0.0, waiting=0, waiting_tokens=0, first_tokens=0, first_wait=0.0, blocked=False, decoding=0, unread_tokens=0,
    free_slots=32, free_pages=1000, ends=(), context=0, streaming=False, in_flight=0,
)  # fmt: skip
BUSY = dataclasses.replace(IDLE, decoding=8, free_slots=24, context=800)
FULL = dataclasses.replace(BUSY, decoding=32, free_slots=0, waiting=5, waiting_tokens=500, blocked=True)


def seconds(chunk, slots, context=0):
    """A device: 10 ms a step, 0.1 ms per chunk row, 0.05 ms per slot, 1 µs per KV position."""
    return 0.010 + 1e-4 * chunk + 5e-5 * slots + 1e-6 * context


def teach(rounds, device=seconds, host=0.0005, times=20):
    for _ in range(times):
        for chunk in (0, *CHUNKS):
            for slots in SLOTS if not chunk else SLOTS[-1:]:
                rounds.cost.observe(chunk, slots, 800, 1, device(chunk, slots, 800))
        rounds.host_time(host)
    return rounds


def make(host=0.0005, device=seconds, **options):
    rounds = AdaptiveRounds(step_sizes=STEPS, chunk_sizes=CHUNKS, slot_buckets=SLOTS, **options)
    return teach(rounds, device, host)


def fast(chunk, slots, context=0):
    return seconds(chunk, slots, context) / 20


# -- C -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "chunk"), [(1, 16), (16, 16), (17, 64), (100, 128), (256, 256), (5000, 256)]
)
def test_rule_1_the_smallest_chunk_that_holds_all(tokens, chunk):
    choice = make().choose(dataclasses.replace(BUSY, unread_tokens=tokens))
    assert choice.chunk == chunk and choice.mixed >= 1
    assert ("C all" if chunk >= tokens else "C largest") in choice.reason


@pytest.mark.parametrize(
    ("target_ms", "chunk"), [(1, 16), (13, 16), (20, 64), (26, 128), (36, 128), (40, 256), (1000, 256)]
)
def test_rule_2_the_largest_chunk_that_keeps_the_target(target_ms, chunk):
    rounds = make(target_itl=target_ms / 1e3)
    rounds.prefill_share = (0.0, 1.0)
    load = dataclasses.replace(BUSY, unread_tokens=1000)
    choice = rounds.choose(load)
    assert choice.chunk == chunk
    assert chunk == 16 or rounds.cost.predict(chunk, 32, 800) <= target_ms / 1e3
    assert ("C target_itl" in choice.reason) == (chunk < 256)
    assert rounds.choose(dataclasses.replace(load, decoding=0)).chunk == 256  # nobody is kept waiting


def test_rule_3_prompts_get_their_least_share():
    rounds = make(target_itl=0.02)
    load = dataclasses.replace(BUSY, unread_tokens=1000)
    assert rounds.prompt_share == 0 and rounds.choose(load).chunk == 128  # one more than rule 2 says
    for _ in range(50):
        rounds.measured(256, 32, 800, 1, seconds(256, 32, 800), 8)
    assert rounds.prompt_share > 0.5 and rounds.choose(dataclasses.replace(load, decoding=0)).chunk == 256
    rounds.prefill_share = (0.3, 1.0)
    assert rounds.choose(load).chunk == 64


# -- M -----------------------------------------------------------------------------------------------------------------


def test_rule_4_all_there_is_to_read():
    rounds = make(device=fast, host=0.0015)  # long rounds
    for tokens, mixed in ((0, 0), (10, 1), (300, 2), (1000, 4), (10**6, 16)):
        choice = rounds.choose(
            dataclasses.replace(IDLE, waiting=1, waiting_tokens=tokens, first_tokens=tokens)
        )
        assert (choice.mixed, choice.mixed <= choice.steps) == (min(mixed, choice.steps), True)
        assert choice.mixed == min(mixed, choice.steps) and bool(choice.mixed) == bool(tokens)
    assert (
        rounds.choose(dataclasses.replace(FULL, unread_tokens=0)).mixed == 0
    )  # no slot: nobody can be admitted


def test_rule_5_decodes_keep_their_share():
    rounds = make(target_itl=0.03)
    load = dataclasses.replace(BUSY, unread_tokens=10_000)
    for _ in range(30):
        rounds.measured(256, 32, 800, 1, seconds(256, 32, 800), 8)
    assert rounds.prompt_share > 0.5
    choice = rounds.choose(load)
    assert choice.mixed == 0 and "N " in choice.reason
    assert "C none: prefill_share" in choice.reason
    assert rounds.choose(dataclasses.replace(load, decoding=0)).mixed > 0
    rounds.target_itl = None
    assert rounds.choose(load).mixed > 0  # throughput goes first
    rounds.target_itl = 0.05  # so loose that it holds nothing down
    assert rounds.choose(load).mixed > 0
    rounds.target_itl = 0.03
    reads = 0
    for _ in range(2000):  # in the long run half of the time is theirs
        choice = rounds.choose(load)
        reads += bool(choice.mixed)
        chunk = choice.chunk if choice.mixed else 0
        rounds.measured(chunk, 32 if chunk else 8, 800, 1, seconds(chunk, 32 if chunk else 8, 800), 8)
    assert 0.45 < rounds.prompt_share < 0.55 and 0 < reads < 2000


def test_rule_5_gives_way_to_the_first_token_target():
    rounds = make(target_ttft=0.5, target_itl=0.03)
    for _ in range(30):
        rounds.measured(256, 32, 800, 1, seconds(256, 32, 800), 8)
    load = dataclasses.replace(BUSY, waiting=1, waiting_tokens=500, first_tokens=500)
    assert rounds.choose(load).mixed == 0
    late = rounds.choose(dataclasses.replace(load, first_wait=0.49))
    assert late.mixed > 0 and late.chunk == 256 and "C target_ttft" in late.reason
    assert rounds.choose(dataclasses.replace(load, waiting_tokens=5000, first_tokens=5000)).mixed > 0


def test_alone_prompts_and_decodes_have_no_share():
    """Only the time in which both want the device counts."""
    rounds = make()
    for _ in range(30):
        rounds.measured(256, 32, 0, 1, 0.04, 0)
        rounds.measured(0, 8, 800, 1, 0.01, 8)
    assert rounds.prompt_share == 0


# -- N -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host_ms", "free", "full"), [(0.4, 1, 1), (0.8, 1, 2), (5.0, 2, 16), (20.0, 8, 16), (500.0, 16, 16)]
)
def test_rule_6_as_long_as_the_host_needs(host_ms, free, full):
    rounds = make(host=host_ms / 1e3)
    rounds._stop_share = 0.0
    assert rounds.choose(BUSY).steps == free
    choice = rounds.choose(dataclasses.replace(BUSY, free_slots=0))
    assert (choice.steps, choice.reason) == (full, "N host")


@pytest.mark.parametrize(
    ("host_ms", "beside", "ends", "steps"),
    [
        (0.4, False, (), 1),  # nobody ends: rule 6 alone
        (20, False, (), 16),
        (20, False, (9, 12), 16),  # a few empty slots cost less than another round
        (20, False, (2,) * 30, 2),  # nearly all end in two steps
        (20, False, (1, 1, 2, 3, 5, 5, 7), 16),
        (4, False, (1,) * 12, 1),
        (20, True, (3, 3, 5), 2),  # the host has its own time: no further than the nearest end
        (20, True, (4, 9), 2),
        (40, True, (1,), 4),  # but the device shall not wait
    ],
)
def test_rule_7_tokens_per_second_while_somebody_waits(host_ms, beside, ends, steps):
    rounds = make(host=host_ms / 1e3, host_beside=beside)
    rounds._stop_share = 0.0
    load = dataclasses.replace(FULL, ends=ends)
    choice = rounds.choose(load)
    assert choice.steps == steps
    free = dataclasses.replace(load, blocked=False, waiting=0, waiting_tokens=0)
    assert rounds.choose(free).steps >= steps and "ends" not in rounds.choose(free).reason


def test_rule_8_streams_are_smooth():
    rounds = make(host=0.05, stream_interval=5)
    rounds._stop_share = 0.0
    assert rounds.choose(BUSY).steps == 16
    choice = rounds.choose(dataclasses.replace(BUSY, streaming=True))
    assert (choice.steps, choice.reason) == (4, "N stream_interval")


@pytest.mark.parametrize(("target_ms", "steps"), [(5, 1), (12, 1), (25, 2), (50, 4), (10_000, 16)])
def test_rule_9_decode_steps_keep_the_target(target_ms, steps):
    rounds = make(host=0.1, target_itl=target_ms / 1e3)
    rounds._stop_share = 0.0
    assert rounds.choose(BUSY).steps == steps


@pytest.mark.parametrize(("run_ahead", "mean", "stops", "steps"), [
    (1, 200, 1.0, 2), (1, 2000, 1.0, 16), (0, 200, 1.0, 8), (1, 200, 0.1, 16), (1, 200, 0.0, 16), (3, 1000, 1.0, 4),
])  # fmt: skip
def test_rule_10_little_waste(run_ahead, mean, stops, steps):
    rounds = make(host=0.02, run_ahead=run_ahead)
    rounds._mean_output, rounds._stop_share = mean, stops
    choice = rounds.choose(dataclasses.replace(BUSY, free_slots=0))
    assert choice.steps == steps
    assert steps == 16 or "waste" in choice.reason
    assert steps * (0.5 + run_ahead) * stops / mean <= 0.026


def test_rule_10_does_not_let_the_device_wait():
    rounds = make(host=0.05)
    rounds._mean_output, rounds._stop_share = 10, 1.0
    assert rounds.choose(BUSY).steps == 8  # 8 steps of 11 ms are more than 50 ms


def test_ends_are_learned():
    rounds = make()
    for _ in range(200):
        rounds.ended(300, True)
    assert rounds._mean_output == pytest.approx(300, rel=0.05) and rounds._stop_share > 0.99
    for _ in range(200):
        rounds.ended(20, False)
    assert rounds._mean_output == pytest.approx(20, rel=0.1) and rounds._stop_share < 0.01


def test_unmeasured_rounds_are_short():
    rounds = AdaptiveRounds(step_sizes=STEPS, chunk_sizes=CHUNKS, slot_buckets=SLOTS)
    assert rounds.choose(BUSY).steps == 1 and "unmeasured" in rounds.choose(BUSY).reason
    assert rounds.choose(dataclasses.replace(BUSY, unread_tokens=1000)).mixed == 1


def test_fixed_numbers_are_fixed():
    for load in (IDLE, BUSY, FULL):
        choice = FixedRounds(8, 64).choose(load)
        assert (choice.steps, choice.mixed, choice.chunk) == (8, 8, 64)
    half = teach(AdaptiveRounds(step_sizes=(8,), chunk_sizes=CHUNKS, slot_buckets=SLOTS))
    assert half.choose(FULL).steps == half.choose(BUSY).steps == 8
    half = teach(AdaptiveRounds(step_sizes=STEPS, chunk_sizes=(96,), slot_buckets=SLOTS))
    assert half.choose(dataclasses.replace(BUSY, unread_tokens=5)).chunk == 96


def test_a_controller_pickles():
    rounds = make(target_itl=0.02)
    load = dataclasses.replace(BUSY, unread_tokens=1000)
    assert pickle.loads(pickle.dumps(rounds)).choose(load) == rounds.choose(load)


# -- the cost model ----------------------------------------------------------------------------------------------------


def test_the_model_learns_a_line_and_goes_beyond_it():
    cost = StepCost()
    assert (cost.predict(64, 8, 100), cost.known) == (0.0, False)
    rng = np.random.default_rng(0)
    for _ in range(400):
        chunk, slots = int(rng.choice((0, 64, 128))), int(rng.choice(SLOTS))
        context = int(rng.integers(0, 5000))
        cost.observe(chunk, slots, context, 1, seconds(chunk, slots, context) * rng.normal(1, 0.02))
    for chunk, slots, context in (
        (0, 8, 100),
        (128, 32, 4000),
        (256, 32, 1000),
        (16, 4, 0),
    ):  # the last two: never seen
        assert cost.predict(chunk, slots, context) == pytest.approx(seconds(chunk, slots, context), rel=0.1)
    assert cost.error(128, 32) < 0.05 and cost.error(256, 32) == 1.0


def test_what_is_no_line_is_learned_too():
    """A program that takes three times as long as its size says."""
    cost = StepCost()
    for _ in range(60):
        for chunk in (0, *CHUNKS):
            cost.observe(chunk, 32, 0, 1, seconds(chunk, 32) * (3 if chunk == 64 else 1))
    assert cost.predict(64, 32, 0) == pytest.approx(3 * seconds(64, 32), rel=0.1)
    assert cost.predict(128, 32, 0) == pytest.approx(seconds(128, 32), rel=0.1)


def test_the_model_follows_a_device_that_changes():
    cost = StepCost()
    for factor in (1.0, 2.5, 0.7):
        for _ in range(150):
            for chunk in (0, 64):
                cost.observe(chunk, 8, 500, 1, factor * seconds(chunk, 8, 500))
        assert cost.predict(64, 8, 500) == pytest.approx(factor * seconds(64, 8, 500), rel=0.15)


def test_the_first_run_of_a_program_and_hiccups_count_little():
    cost = StepCost()
    cost.observe(0, 8, 0, 4, 99.0)  # the first run of this program
    assert not cost.known
    for i in range(50):
        cost.observe(0, 8, 0, 4, 4 * seconds(0, 8) if i != 40 else 5.0)
    assert cost.predict(0, 8, 0) == pytest.approx(seconds(0, 8), rel=0.3)


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_times_that_cannot_be_are_ignored(bad):
    cost = StepCost()
    for _ in range(5):
        cost.observe(0, 8, 0, 1, bad)
    assert cost.predict(0, 8, 0) == 0.0


def test_constant_traffic_does_not_blow_the_model_up():
    cost = StepCost()
    for _ in range(20_000):
        cost.observe(0, 8, 100, 1, 0.01)
    assert math.isclose(cost.predict(0, 8, 100), 0.01, rel_tol=0.01)
    assert 0.009 < cost.predict(0, 8, 200) < 0.02 and cost.predict(256, 8, 100) < 1.0

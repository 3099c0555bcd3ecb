"""What each policy promises: its order, its bound, and a queue that is exact, small and fast."""

import dataclasses
import pickle
import random
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsched.schedule.load import Choice, Load
from jaxsched.schedule.policies import (
    POLICIES,
    DecodeFirst,
    Edf,
    Fair,
    Fcfs,
    Hrrn,
    Policy,
    PrefillFirst,
    Priority,
    Srpf,
    StallFree,
    make_policy,
)
from jaxsched.schedule.sequence import Status

EVERY = pytest.mark.parametrize("name", POLICIES)


def request(
    arrival, arrived=0.0, length=1, *, priority=0, client="", deadline=None, max_tokens=0
) -> SimpleNamespace:
    """What a policy may see of a sequence."""
    return SimpleNamespace(id=str(arrival), request_id=str(arrival), prompt=range(length), output=[], length=length,
                           max_tokens=max_tokens, arrival=arrival, arrived=arrived, priority=priority, client=client,
                           deadline=deadline, status=Status.WAITING, preemptions=0)  # fmt: skip


def random_request(rng: random.Random, arrival: int, arrived: float) -> SimpleNamespace:
    deadline = rng.choice([None, arrived + rng.uniform(-5, 40)])
    return request(arrival, arrived, rng.randint(1, 3000), priority=rng.randint(-2, 4), deadline=deadline,
                   client=rng.choice("abcd"), max_tokens=rng.randint(1, 500))  # fmt: skip


def queue(policy, *requests):
    for item in requests:
        policy.push(item, item.arrived)
    return policy


def drain(policy, now=100.0) -> list[int]:
    """The order in which all that wait are served."""
    return [policy.pop(now).arrival for _ in range(len(policy))]


def serve_stream(policy, rng: random.Random, count=150, on_pop=None) -> list[SimpleNamespace]:
    """Random arrivals and services, arrivals a little faster; returns the order of service."""
    now, arrived, served = 50.0, 0, []
    while len(served) < count:
        now += rng.choice([0.0, rng.expovariate(2), rng.expovariate(0.2)])
        if arrived < count and (not len(policy) or rng.random() < 0.6):
            policy.push(random_request(rng, arrived, now), now)
            arrived += 1
        else:
            if on_pop:
                on_pop(policy, now)
            served.append(policy.pop(now))
    return served


def overtakings(served):
    """All pairs (overtaken, overtaker): the second arrived later and was served sooner."""
    for i, sooner in enumerate(served):
        for later in served[i + 1 :]:
            if sooner.arrival > later.arrival:
                yield later, sooner


# -- order ---------------------------------------------------------------------------------------------------------


ORDERS = {
    "fcfs": (Fcfs(), [request(0, length=9), request(1, priority=-5), request(2, deadline=0.0)], [0, 1, 2]),
    "priority": (Priority(), [request(0, priority=1), request(1), request(2), request(3, priority=-1)], [3, 1, 2, 0]),
    "ageing": (Priority(5.0), [request(0, 0.0, priority=2), request(1, 9.0), request(2, 10.0), request(3, 11.0)],
               [1, 0, 2, 3]),
    "strict": (Priority(None), [request(0, 0.0, priority=1), request(1, 1e6)], [1, 0]),
    "edf": (Edf(10.0), [request(0), request(1, deadline=9.0), request(2, deadline=20.0), request(3, 0.5)],
            [1, 0, 3, 2]),
    "late": (Edf(), [request(0, 5.0, deadline=1.0), request(1, 5.0, deadline=0.0)], [0, 1]),
    "srpf": (Srpf(), [request(0, length=30), request(1, length=10), request(2, length=20), request(3, length=10)],
             [1, 3, 2, 0]),
    "srpf ageing": (Srpf(10.0), [request(0, 0.0, 30), request(1, 1.0, 19), request(2, 2.0, 10), request(3, 2.1, 10)],
                    [1, 0, 2, 3]),
    "hrrn, same wait": (Hrrn(1e9), [request(0, length=30), request(1, length=10), request(2, length=20)], [1, 2, 0]),
    "hrrn, same length": (Hrrn(1e9), [request(i, float(i)) for i in range(4)], [0, 1, 2, 3]),
    "hrrn, ratios 1, 2, 1.5": (Hrrn(1e9), [request(0, 0.0, 100), request(1, 60.0, 20), request(2, 70.0, 20)],
                               [1, 2, 0]),
    "hrrn counts output": (Hrrn(1e9, 0.5), [request(0, max_tokens=100), request(1, length=20)], [1, 0]),
    "hrrn, patience": (Hrrn(30.0), [request(0, 60.0, 500), request(1, 65.0, 2), request(2, 71.0, 1)], [0, 1, 2]),
    "fair": (Fair(), [*(request(i, length=10, client="a") for i in range(3)), request(3, length=10, client="b"),
                      request(4, length=10, client="b")], [0, 3, 1, 4, 2]),
    "fair by size": (Fair(), [*(request(i, length=30, client="a") for i in range(2)),
                              *(request(2 + i, length=10, client="b") for i in range(4))], [0, 2, 3, 4, 1, 5]),
}  # fmt: skip


@pytest.mark.parametrize("case", ORDERS)
def test_order(case):
    policy, requests, order = pickle.loads(pickle.dumps(ORDERS[case]))
    assert drain(queue(policy, *requests)) == order


def test_those_that_serve_by_arrival():
    for policy in (StallFree(), PrefillFirst(), DecodeFirst(), Policy()):
        assert drain(queue(policy, request(0, length=9), request(1, priority=-5), request(2))) == [0, 1, 2]


# -- bounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_priority_bound(seed):
    served = serve_stream(Priority(3.0), random.Random(seed))
    pairs = list(overtakings(served))
    assert pairs
    for later, sooner in pairs:
        assert sooner.priority < later.priority
        assert sooner.arrived - later.arrived < (later.priority - sooner.priority) * 3.0 + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_deadline_bound(seed):
    """Only who arrives before my deadline can overtake me."""
    served = serve_stream(Edf(4.0), random.Random(seed))
    pairs = list(overtakings(served))
    assert pairs
    for later, sooner in pairs:
        due = later.arrived + 4.0 if later.deadline is None else later.deadline
        assert sooner.arrived < due


@pytest.mark.parametrize("seed", range(5))
def test_shortest_prefill_bound(seed):
    served = serve_stream(Srpf(100.0), random.Random(seed))
    pairs = list(overtakings(served))
    assert pairs
    for later, sooner in pairs:
        assert sooner.arrived - later.arrived < (later.length - sooner.length) / 100.0 + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_response_ratio_bounds(seed):
    """The chosen one's ratio is near the best, but for those out of patience; nobody overtakes by more than that."""
    policy, waiting = Hrrn(20.0), {}
    inner = policy.push

    def push(sequence, now):
        waiting[sequence.arrival] = sequence
        inner(sequence, now)

    def check(policy, now):
        chosen = policy.first(now)
        best = max((now - s.arrived) / policy.service(s) for s in waiting.values())
        oldest = min(waiting.values(), key=lambda s: s.arrival)
        if now - oldest.arrived > 20.0:
            assert chosen is oldest
        else:
            assert (now - chosen.arrived) / policy.service(chosen) >= best / 1.25 - 1e-12
        del waiting[chosen.arrival]

    policy.push = push
    pairs = list(overtakings(serve_stream(policy, random.Random(seed), on_pop=check)))
    assert pairs
    for later, sooner in pairs:
        assert sooner.arrived - later.arrived <= 20.0


LONG_FIRST = {
    "priority": (Priority(), True),
    "strict priority": (Priority(None), False),
    "edf": (Edf(), True),
    "srpf": (Srpf(), True),
    "pure srpf": (Srpf(None), False),
    "hrrn": (Hrrn(), True),
    "hrrn without patience": (Hrrn(float("inf")), False),  # the waits of short ones grow as well
    "fair": (Fair(), True),
    "fcfs": (Fcfs(), True),
}


@pytest.mark.parametrize("case", LONG_FIRST)
def test_starvation(case):
    """A request that each rule dislikes against a permanent overload of those that it likes."""
    policy, bounded = pickle.loads(pickle.dumps(LONG_FIRST[case]))
    policy.push(request(0, 0.0, 3000, priority=3, client="z", deadline=9.0, max_tokens=10), 0.0)
    policy.push(request(1, 0.0, 10, priority=0, client="a", deadline=0.0), 0.0)
    served = []
    for i in range(2, 20_000):
        now = i * 0.01
        policy.push(request(i, now, 10, priority=0, client="a", deadline=now), now)
        if i % 2:
            served.append(policy.pop(now).arrival)
    assert (0 in served) is bounded


# -- the queue -----------------------------------------------------------------------------------------------------


@EVERY
@given(st.integers(0, 10**6), st.lists(st.sampled_from("push push pop pop discard preempt serve first".split()),
                                       max_size=120))  # fmt: skip
def test_the_queue_against_a_set(name, seed, operations):
    """Whatever happens, the length is exact, ``first`` is repeatable, and each sequence comes out once."""
    rng, policy, now, arrivals = random.Random(seed), make_policy(name), 0.0, 0
    waiting, running = {}, {}
    for operation in operations:
        now += rng.choice([0.0, 0.1, 7.0])
        if operation == "push":
            sequence = random_request(rng, arrivals, now)
            arrivals += 1
            policy.push(sequence, now)
            waiting[sequence.arrival] = sequence
        elif operation == "pop" and waiting:
            expected = policy.first(now)
            sequence = policy.pop(now)
            assert sequence is expected and waiting.pop(sequence.arrival) is sequence
            running[sequence.arrival] = sequence
        elif operation == "discard" and waiting:
            sequence = waiting.pop(rng.choice(sorted(waiting)))
            if rng.random() < 0.5:  # the order of the two does not matter
                sequence.status = Status.FINISHED
            policy.discard(sequence)
            policy.discard(sequence)
            sequence.status = Status.FINISHED
        elif operation == "preempt" and running:
            sequence = policy.victim(list(running.values()))
            del running[sequence.arrival]
            sequence.preemptions += 1
            policy.push(sequence, now)
            waiting[sequence.arrival] = sequence
        elif operation == "serve" and running:
            sequence = running[rng.choice(sorted(running))]
            sequence.output = [*sequence.output, 1]
            sequence.length += 1
            policy.served(sequence, 5, 1)
        first = policy.first(now)
        assert len(policy) == len(waiting) and policy.first(now) is first
        assert (first is None) is (not waiting)
        assert first is None or waiting[first.arrival] is first
    assert sorted(drain(policy, now)) == sorted(waiting)
    with pytest.raises(IndexError, match="first"):
        policy.pop(now)


@EVERY
def test_a_preempted_sequence_comes_back_in_front(name):
    """It keeps its arrival, so it stands before its equals that came later."""
    policy = queue(make_policy(name), *(request(i, float(i), 10, max_tokens=5) for i in range(4)))
    first = policy.pop(3.0)
    assert first.arrival == 0
    first.preemptions, first.status = 1, Status.WAITING
    policy.push(first, 3.5)
    assert len(policy) == 4 and drain(policy, 4.0) == [0, 1, 2, 3]


@EVERY
def test_discarded_and_pushed_again(name):
    """Entries that are dead but not yet swept out do not come to life again."""
    policy = make_policy(name)
    requests = [request(i, float(i), 10) for i in range(5)]
    queue(policy, *requests)
    policy.discard(requests[3])
    policy.push(requests[3], 9.0)
    policy.discard(requests[1])
    policy.discard(request(77))
    assert len(policy) == 4 and drain(policy, 9.0) == [0, 2, 3, 4] and policy.first(9.0) is None


@EVERY
def test_memory_follows_the_number_that_waits(name):
    """20,000 arrivals and abortions in every position, from as many clients, behind one that stays."""
    policy, rng = make_policy(name), random.Random(0)
    policy.push(request(0, 0.0, 5, client="stays"), 0.0)
    for i in range(1, 20_001):
        sequence = random_request(rng, i, i * 0.001)
        sequence.client = f"client {i}"
        policy.push(sequence, sequence.arrived)
        policy.discard(sequence)
    assert len(policy) == 1
    assert len(pickle.dumps(policy)) < 100_000


@EVERY
def test_deterministic_and_picklable(name):
    """A copy made in the middle goes on like the original."""
    order = serve_stream(make_policy(name), random.Random(3))
    again = serve_stream(make_policy(name), random.Random(3))
    assert [s.arrival for s in order] == [s.arrival for s in again]

    policy, rng = make_policy(name), random.Random(4)
    for i in range(200):
        policy.push(random_request(rng, i, i * 0.1), i * 0.1)
        if i % 3 == 0:
            policy.served(policy.pop(i * 0.1), 10, 7)
    copy = pickle.loads(pickle.dumps(policy))
    for other in (policy, copy):
        queue(other, *(random_request(random.Random(i), i, 20.0) for i in range(200, 260)))
    assert drain(copy, 25.0) == drain(policy, 25.0)


@EVERY
def test_cost_with_20000_waiting(name):
    """Limits far above what it takes (the discards about 0.03 s), far below what a scan of all would take."""

    def measure():
        rng, policy = random.Random(0), make_policy(name)
        requests = [random_request(rng, i, i * 0.001) for i in range(20_000)]
        for sequence in requests:
            sequence.client = f"client {rng.randint(0, 3000)}"
        start = time.process_time()
        queue(policy, *requests)
        pushed = time.process_time()
        for _ in range(1000):
            policy.first(25.0)
            policy.served(policy.pop(25.0), 5, 5)
        popped = time.process_time()
        for sequence in rng.sample(requests, len(requests)):
            policy.discard(sequence)
        discarded = time.process_time()
        assert len(policy) == 0
        return pushed - start, popped - pushed, discarded - popped

    push, pop, discard = (min(times) for times in zip(*(measure() for _ in range(3)), strict=True))
    assert push < 0.5 and pop < 0.2 and discard < 0.2, (push, pop, discard)


# -- rounds and victims --------------------------------------------------------------------------------------------


def load_of(**values) -> Load:
    return Load(**{**{field.name: 0 for field in dataclasses.fields(Load)}, **values})


CHOICE = Choice(steps=8, mixed=2, chunk=16)
WAITS = {"waiting": 3, "first_tokens": 10, "free_slots": 1, "free_pages": 1}


@pytest.mark.parametrize("load", [{}, {"decoding": 2}, {"decoding": 2, **WAITS}, {"unread_tokens": 5}])
def test_most_leave_the_round_alone(load):
    for name in set(POLICIES) - {"prefill-first", "decode-first"}:
        assert make_policy(name).shape(load_of(**load), CHOICE) is CHOICE


def test_what_stall_free_adds_to_fcfs():
    paused = dataclasses.replace(CHOICE, decode=False)
    assert Fcfs().shape(load_of(decoding=1), paused).decode is False
    assert StallFree().shape(load_of(decoding=1), paused) == CHOICE


@pytest.mark.parametrize(
    ("load", "pauses"),
    [
        ({"decoding": 2}, False),
        ({"decoding": 2, "unread_tokens": 5}, True),
        ({"decoding": 2, **WAITS}, True),
        ({"decoding": 2, **WAITS, "free_slots": 0}, False),
        ({"decoding": 2, **WAITS, "free_pages": 0}, False),
    ],
)
def test_prefill_first(load, pauses):
    choice = PrefillFirst().shape(load_of(**load), CHOICE)
    if pauses:
        assert (choice.steps, choice.mixed, choice.chunk) == (8, 8, 16)
        assert not choice.decode and choice.admit and choice.reason
    else:
        assert choice is CHOICE


@pytest.mark.parametrize(
    "load", [{"decoding": 1}, {"decoding": 1, **WAITS}, {}, {"unread_tokens": 5, **WAITS}]
)
def test_decode_first(load):
    choice = DecodeFirst().shape(load_of(**load), CHOICE)
    assert choice.admit is ("decoding" not in load) and choice.decode
    assert (choice.steps, choice.mixed, choice.chunk) == (8, 2, 16)


@pytest.mark.parametrize(
    ("name", "victim"),
    [("stall-free", 3), ("fcfs", 3), ("prefill-first", 3), ("decode-first", 3), ("priority", 0), ("edf", 2),
     ("srpf", 1), ("hrrn", 3), ("fair", 3)],
)  # fmt: skip
def test_victims(name, victim):
    """The last in the policy's own order."""
    running = [request(0, 0.0, 10, priority=2), request(1, 1.0, 9000), request(2, 2.0, 10, deadline=99.0),
               request(3, 3.0, 10)]  # fmt: skip
    assert make_policy(name).victim(running).arrival == victim


# -- fair ----------------------------------------------------------------------------------------------------------


class Server:
    """Slots that serve one output token a step, under a fair policy. Counts the service that each client got."""

    def __init__(self, slots, policy=None):
        self.policy, self.slots, self.running, self.arrivals, self.now = policy or Fair(), slots, [], 0, 0.0
        self.service = {}

    def add(self, client, length, max_tokens):
        sequence = request(self.arrivals, self.now, length, client=client, max_tokens=max_tokens)
        self.arrivals += 1
        self.policy.push(sequence, self.now)
        return sequence

    def step(self):
        self.now += 0.1
        while len(self.running) < self.slots and len(self.policy):
            sequence = self.policy.pop(self.now)
            if not sequence.preemptions:
                self._count(sequence, len(sequence.prompt))
            self.running.append(sequence)
        for sequence in self.running:
            sequence.output.append(1)
            sequence.length += 1
            self.policy.served(sequence, 0, 1)
            self._count(sequence, 2)
            if len(sequence.output) == sequence.max_tokens:
                sequence.status = Status.FINISHED
        self.running = [s for s in self.running if s.status is not Status.FINISHED]

    def preempt(self):
        sequence = self.policy.victim(self.running)
        self.running.remove(sequence)
        sequence.preemptions += 1
        self.policy.push(sequence, self.now)

    def _count(self, sequence, amount):
        self.service[sequence.client] = self.service.get(sequence.client, 0) + amount

    def waits(self, client):
        return client in self.policy._queues


@pytest.mark.parametrize("seed", range(4))
def test_clients_of_unequal_rates_get_the_same(seed):
    """One client asks four times as often, with longer prompts; both have more than they can get."""
    rng, server = random.Random(seed), Server(slots=4)
    longest, most = 60, 20
    server.add("slow", 10, 5)
    start = {}
    for step in range(3000):
        for client, rate in (("fast", 1.2), ("slow", 0.3)):
            for _ in range(4):
                if rng.random() < rate / 4:
                    size = rng.randint(1, longest if client == "fast" else longest // 3)
                    server.add(client, size, rng.randint(1, most))
        if step % 200 == 150 and server.running:
            server.preempt()
        server.step()
        if step == 500:
            start = dict(server.service)
        if step > 500:
            assert server.waits("fast") and server.waits("slow")
            got = [server.service[client] - start[client] for client in ("fast", "slow")]
            assert abs(got[0] - got[1]) <= 2 * (longest + 2 * 4 * most)
    assert got[0] > 10 * (longest + 2 * 4 * most)  # the bound is small beside what they got


def test_what_a_client_does_not_use_goes_to_others():
    server = Server(slots=2)
    for step in range(2000):
        server.add("greedy", 10, 10)
        if step % 100 == 0:
            modest = server.add("modest", 10, 10)
        server.step()
        if step % 100 == 40:
            assert (
                modest.status is Status.FINISHED
            )  # who asks for less than a share waits for nobody's backlog
    assert server.service["greedy"] > 4 * server.service["modest"]


def test_idle_clients_save_nothing_up():
    """The lift: a client that comes after a long time starts level with the one that was served meanwhile."""
    policy = queue(Fair(), *(request(i, length=100, client="a") for i in range(20)))
    for _ in range(10):
        policy.pop(1.0)
    queue(policy, *(request(100 + i, length=100, client="b") for i in range(10)))
    order = [policy.pop(1.0).client for _ in range(8)]
    assert policy.counter("b") >= 1000 and order.count("a") == order.count("b") == 4


def test_the_lift_when_nobody_waits():
    """Then the level is the counter of the client that was the last to wait (algorithm 2, line 9)."""
    policy = queue(Fair(), request(0, length=500, client="a"))
    served = policy.pop(0.0)
    policy.served(served, 500, 10)
    queue(policy, request(1, length=7, client="b"))
    assert policy.counter("a") == policy.counter("b") == 520


def test_service_while_nothing_waits_counts():
    policy = queue(Fair(), *(request(i, length=10, client=c) for i, c in enumerate("ab")))
    a, b = policy.pop(0.0), policy.pop(0.0)
    policy.served(a, 0, 50)
    policy.served(b, 0, 5)
    queue(policy, *(request(2 + i, length=10, client=c) for i, c in enumerate("bbaa")))
    assert [policy.counter(c) for c in "ab"] == [110, 20]
    assert [policy.pop(0.0).client for _ in range(4)] == ["b", "b", "a", "a"]


def test_reading_again_is_not_charged():
    policy = queue(Fair(), request(0, length=100, client="a"))
    for preemptions in range(3):
        sequence = policy.pop(0.0)
        policy.served(sequence, 100, 1)
        sequence.preemptions = preemptions + 1
        policy.push(sequence, 0.0)
    assert policy.counter("a") == 100 + 3 * 2


@given(st.integers(0, 10**6))
def test_forgetting_changes_nothing(seed):
    """Against algorithm 2 of the paper written down plainly, with counters that are kept for ever."""
    rng, policy = random.Random(seed), Fair()
    policy._sweep_counters_at = policy._sweep_running_at = 0
    counters, waiting, running, last = {}, {}, [], None
    for i in range(150):
        policy._sweep_counters_at = policy._sweep_running_at = 0  # forget whenever it is allowed
        action = rng.choice("aapps")
        if action == "a":
            sequence = request(i, float(i), rng.randint(1, 50), client=f"c{rng.randint(0, 12)}")
            client = sequence.client
            if client not in waiting:
                level = min(counters[c] for c in waiting) if waiting else counters.get(last, 0)
                counters[client] = max(counters.get(client, 0), level)
            waiting.setdefault(client, []).append(sequence)
            policy.push(sequence, float(i))
        elif action == "p" and waiting:
            sequence = policy.pop(float(i))
            client = sequence.client
            assert counters[client] == min(counters[c] for c in waiting)
            assert waiting[client].pop(0) is sequence
            counters[client] += sequence.length
            if not waiting[client]:
                del waiting[client]
                last = client
            running.append(sequence)
        elif action == "s" and running:
            sequence = rng.choice(running)
            counters[sequence.client] += 2 * 9
            policy.served(sequence, 0, 9)
            if rng.random() < 0.5:
                sequence.status = Status.FINISHED
                running.remove(sequence)
        for client in [*waiting, *(s.client for s in running)]:
            assert policy.counter(client) == counters[client]


def test_old_clients_are_forgotten():
    """30,000 clients of one request each, beside one that stays."""
    server = Server(slots=4)
    policy = server.policy
    for i in range(30_000):
        server.add(f"passing {i}", 3, 1)
        if i % 4 == 0:
            server.add("stays", 20, 2)
        server.step()
    kept = [
        len(x) for x in (policy._counters, policy._heap, policy._queues, policy._running, policy._in_heap)
    ]
    assert max(kept) <= 2 * 1024 + len(policy)


def test_no_more_clients_are_remembered_than_asked_for():
    """50 newcomers wait at any time, so nobody's counter sinks below the level: the highest 100 are kept."""
    policy = queue(Fair(remembered=100), *(request(i, client=f"client {i}") for i in range(50)))
    for i in range(50, 20_000):
        policy.push(request(i, length=i % 7 + 1, client=f"client {i}"), 0.0)
        policy.pop(0.0).status = Status.FINISHED
    assert len(policy) == 50 and len(policy._counters) <= 1024 + 1
    policy._sweep_counters_at = 0
    policy.push(request(20_000, client="new"), 0.0)
    assert len(policy._counters) <= 50 + 100 + 2


def test_preempted_is_the_client_with_most_service():
    running = [request(0, client="a"), request(1, client="b"), request(2, client="b"), request(3, client="c")]
    policy = queue(Fair(), *running)
    policy.served(running[1], 0, 10)
    assert policy.victim(running).arrival == 2


# -- choosing one --------------------------------------------------------------------------------------------------


@EVERY
def test_by_name(name):
    policy = make_policy(name)
    assert type(policy) is POLICIES[name] and policy.name == name and policy.__doc__
    assert make_policy(name) is not policy and policy.counts_service is (name == "fair")


def test_an_unknown_name():
    with pytest.raises(
        ValueError, match=r"'lifo' is unknown; choose one of stall-free, fcfs, .*, fair, or pass an obj"
    ):
        make_policy("lifo")


def test_objects():
    mine = Priority(ageing_s=1.0)
    assert make_policy(mine) is mine and not len(mine)
    with pytest.raises(ValueError, match=r"the class Priority; pass an object of it: Priority\(\)"):
        make_policy(Priority)
    half = SimpleNamespace(name="x", push=print, pop=print, first=None)
    with pytest.raises(
        ValueError, match="lacks first, discard, __len__, victim, shape, served, counts_service; cho"
    ):
        make_policy(half)
    with pytest.raises(ValueError, match="NoneType, which lacks push"):
        make_policy(None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Priority(0), "ageing_s is 0; .* None"),
        (lambda: Priority(float("nan")), "ageing_s"),
        (lambda: Edf(-1), "default_s is -1"),
        (lambda: Srpf(0), "ageing_tokens_per_s is 0; .* None"),
        (lambda: Hrrn(-1), "patience_s"),
        (lambda: Hrrn(output_share=2), "output_share is 2"),
        (lambda: Hrrn(ratio=1), "ratio is 1"),
        (lambda: Fair(prompt_weight=-1), "prompt_weight is -1"),
        (lambda: Fair(output_weight=float("inf")), "output_weight"),
        (lambda: Fair(remembered=-1), "remembered"),
    ],
)
def test_bad_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class LongestFirst(Policy):
    """A policy of one's own: long prompts first, five minutes of patience, and short rounds while somebody waits."""

    name = "longest-first"

    def key(self, sequence):
        return sequence.arrived - min(sequence.length / 10, 300.0)

    def shape(self, load, choice):
        if load.waiting:
            return dataclasses.replace(
                choice, steps=min(choice.steps, 4), reason="longest-first: somebody waits"
            )
        return choice


def test_a_policy_of_ones_own():
    policy = make_policy(LongestFirst())
    requests = [
        request(0, length=10),
        request(1, length=3000),
        request(2, length=500),
        request(3, 400.0, 9000),
    ]
    queue(policy, *requests)
    assert policy.victim(requests).arrival == 3
    policy.discard(requests[2])
    assert drain(pickle.loads(pickle.dumps(policy))) == [1, 0, 3] and len(policy) == 3
    assert policy.shape(load_of(waiting=1), CHOICE).steps == 4 and policy.shape(load_of(), CHOICE) is CHOICE


class ByPlainMethods:
    """No subclass of anything."""

    name, counts_service = "plain", False

    def __init__(self):
        self.waiting = []

    def push(self, sequence, now):
        self.waiting.append(sequence)

    def first(self, now):
        return self.waiting[-1] if self.waiting else None

    def pop(self, now):
        return self.waiting.pop()

    def discard(self, sequence):
        self.waiting.remove(sequence)

    def __len__(self):
        return len(self.waiting)

    def victim(self, running):
        return running[0]

    def shape(self, load, choice):
        return choice

    def served(self, sequence, prompt_tokens, output_tokens):
        pass


def test_an_object_without_the_base_class():
    policy = ByPlainMethods()
    assert make_policy(policy) is policy and drain(queue(policy, request(0), request(1))) == [1, 0]

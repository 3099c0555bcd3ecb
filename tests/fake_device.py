"""A device made of Python lists, for tests of the scheduler. It does what the step functions do with a plan, and
checks every read and every write. Imports no jax."""

import itertools
import zlib
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace

from jaxsched.schedule import Limits, RoundPlan, Scheduler, Sequence, Status
from jaxsched.schedule.memory import GONE
from jaxsched.schedule.policies import Policy
from jaxsched.schedule.rounds import RoundController

NO_TOKEN = -1
VOCAB = 50
STOP = VOCAB  # a token that comes only where a sequence is made to stop
PLAIN = {"controls": False, "logprobs": -1}
GREEDY_ROW, SAMPLED_ROW = SimpleNamespace(greedy=True, **PLAIN), SimpleNamespace(greedy=False, **PLAIN)


def make_limits(**changes) -> Limits:
    """Limits for tests; ``max_new_pages`` and ``slot_buckets`` follow as in EngineConfig.resolve."""
    values = {"num_slots": 4, "num_pages": 64, "page_size": 4, "max_model_len": 128, "num_steps": 8, "chunk_tokens": 16,
              "split_prompts": True, **changes}  # fmt: skip
    slots, size = values["num_slots"], values["page_size"]
    if not values["split_prompts"]:
        values["chunk_tokens"] = values["max_model_len"]
    values.setdefault("slot_buckets", tuple(sorted({max(1, slots // 4), slots})))
    per_seq = -(-values["max_model_len"] // size)
    values.setdefault("max_new_pages", per_seq + slots * (2 + values["num_steps"] // size))
    return Limits(**values)


def make_sequence(name, prompt, max_tokens, stop_ids=(), greedy=True, stops_at=None, **fields) -> Sequence:
    """``prompt``: its tokens, or how many tokens of its own it has. ``fields`` are more of Sequence's.

    ``stops_at``: the length of output at which it ends with STOP.
    """
    if isinstance(prompt, int):
        prompt = [zlib.crc32(f"{name}/prompt/{i}".encode()) % VOCAB for i in range(prompt)]
    row = GREEDY_ROW if greedy else SAMPLED_ROW
    if stops_at is not None:
        row, stop_ids = SimpleNamespace(greedy=greedy, stops_at=stops_at, **PLAIN), (*stop_ids, STOP)
    return Sequence(str(name), prompt, max_tokens, frozenset(stop_ids), row, **fields)


def answer(sequence: Sequence, position: int) -> int:
    """The token that the fake model gives a sequence at a position of its output."""
    if position + 1 == getattr(sequence.row, "stops_at", None):
        return STOP
    return zlib.crc32(f"{sequence.id}/{position}".encode()) % VOCAB


def expected_output(sequence: Sequence) -> list[int]:
    out = []
    while len(out) < sequence.max_tokens:
        out.append(answer(sequence, len(out)))
        if out[-1] in sequence.stop_ids:
            break
    return out


class _Slot:
    """A row of the slot table. ``context`` positions of it are written; ``chain[i]`` is what position i must hold."""

    def __init__(self):
        self.sequence, self.table, self.chain = None, {}, []
        self.context, self.live, self.left, self.position = 0, False, 0, 0
        self.reading = False  # its prompt has been begun and not ended
        self.query = 0  # position of its first query in the step

    def admit(self, sequence: Sequence) -> None:
        self.__init__()
        self.sequence = sequence
        self.left, self.position = sequence.max_tokens - len(sequence.output), len(sequence.output)
        for token in [*sequence.prompt, *sequence.output]:
            self.extend(token)

    def extend(self, token: int) -> None:
        """Content is named by everything from the first token on, and by the salt: equal hash, equal K and V."""
        salt = self.sequence.salt
        parent = self.chain[-1] if self.chain else (self.sequence.id if salt is None else salt)
        self.chain.append(hash((parent, token)))

    def moved(self) -> "_Slot":
        copy = _Slot()
        copy.__dict__.update(self.__dict__)
        copy.table, copy.chain = dict(self.table), list(self.chain)
        return copy


class FakeDevice:
    """Runs plans in the order in which they were made.

    A write must go to a page that the host has given to this sequence, and that nobody else has begun to use; a read
    must find what this very prefix, under this salt, put there.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self.slots = [_Slot() for _ in range(limits.num_slots)]
        self.pages: list[list] = [[None] * limits.page_size for _ in range(limits.num_pages)]
        self.users: Counter = Counter()  # page -> rows that have written or read it and go on
        self.prompt_tokens = 0  # read so far

    def run(self, plan: RoundPlan) -> list[list[int]]:
        """The round's tokens, ``[slot][step]``."""
        before = list(self.slots)
        for old, new in plan.moves:
            self.slots[new] = before[old].moved()
        for slot in plan.drops:
            self.slots[slot].live = self.slots[slot].reading = False
        for slot, sequence in plan.admits:
            self.slots[slot].admit(sequence)
        for slot, index, page in plan.pages:
            self.slots[slot].table[index] = page
        self._count_users()
        table = [[NO_TOKEN] * plan.steps for _ in self.slots]
        for step in range(plan.steps):
            if step < len(plan.mixed):
                self._step(step, plan.mixed[step].pieces, plan.slots, table, decode=plan.decode)
            else:
                self._step(step, (), plan.slots, table)
        self._check_entries(plan, table)
        return table

    def _count_users(self):
        """Who goes on has written or read its pages, and will read them again as far as its window reaches back."""
        limits = self.limits
        self.users = Counter(
            row.table[index]
            for row in self.slots
            if row.live or row.reading
            for index in range(limits.behind(row.context), limits.pages_for(row.context))
        )

    def _step(self, step, pieces, bucket, table, decode=True):
        if self.limits.window is not None:  # within a round windows leave pages, which others may write then
            self._count_users()
        assert not decode or not any(r.live for r in self.slots[bucket:]), "a live slot is out of the bucket"
        samples, begun = [], []
        for slot, row in enumerate(self.slots[:bucket]):
            if row.live and decode:
                self._write(row, row.context, row.context + 1)
                row.query = row.context
                row.context += 1
                samples.append((slot, row))
        for piece in pieces:
            row = self.slots[piece.slot]
            assert piece.slot < bucket and row.sequence is piece.sequence and not row.live
            if not row.reading:
                shared, rest = divmod(piece.start, self.limits.page_size)
                assert rest == 0, "a prefix is shared to the middle of a page"
                row.context, row.reading = piece.start, True
                begun += [row.table[index] for index in range(self.limits.behind(piece.start), shared)]
            assert piece.start == row.context and piece.length > 0, "a chunk does not follow the last one"
            self._write(row, piece.start, piece.start + piece.length)
            row.query = piece.start
            row.context += piece.length
            self.prompt_tokens += piece.length
            assert piece.ends == (row.context == len(row.chain)), "the prompt ends before or after its end"
            if piece.ends:
                samples.append((piece.slot, row))
                row.reading = False
        # All rows of a step write before any of them reads, so pages that this step fills can be shared in it.
        self.users.update(begun)
        for row in {
            id(r): r for r in [r for _, r in samples] + [self.slots[p.slot] for p in pieces]
        }.values():
            self._read(row)
        for slot, row in samples:
            token = answer(row.sequence, row.position)
            row.extend(token)
            row.position += 1
            row.left -= 1
            row.live = row.left > 0 and token not in row.sequence.stop_ids
            table[slot][step] = token

    def _write(self, row, start, stop):
        assert stop <= self.limits.max_model_len
        size, name = self.limits.page_size, row.sequence.id
        for position in range(start, stop):
            index, offset = divmod(position, size)
            assert index in row.table, f"{name} has no page for position {position}"
            page, own = row.table[index], row.sequence.pages
            left = index < row.sequence.gone  # by the window, later in the round
            assert index < len(own) and (own[index] == page or left), (
                f"{name} writes page {page}, which it does not own"
            )
            if position == start or offset == 0:
                mine = offset > 0  # then it has counted as a user since its last write
                assert self.users[page] == mine, f"{name} writes page {page}, which others read"
                self.users[page] = 1
            self.pages[page][offset] = row.chain[position]

    def _read(self, row):
        """All that attention sees must be what this prefix has put there."""
        size, window = self.limits.page_size, self.limits.window
        low = 0 if window is None else max(row.query - window + 1, 0)
        for start in range(low // size * size, row.context, size):
            first, stop = max(start, low), min(start + size, row.context)
            found = self.pages[row.table[start // size]][first - start : stop - start]
            assert found == row.chain[first:stop], f"{row.sequence.id}/{first}.. was overwritten"

    def _check_entries(self, plan, table):
        """The plan has an entry for every token that comes out of the round."""
        spans = {e.slot: (e.sequence, e.first, e.first + e.steps) for e in plan.entries}
        assert len(spans) == len(plan.entries), "a slot has two entries"
        for slot, tokens in enumerate(table):
            at = [step for step, token in enumerate(tokens) if token != NO_TOKEN]
            if at:
                sequence, first, stop = spans[slot]
                assert sequence is self.slots[slot].sequence and first == at[0] and at[-1] < stop


def check_ownership(scheduler: Scheduler) -> None:
    """Each page has as many owners as running sequences list it, each slot has one, and nothing is lost."""
    pool, running = scheduler.memory.pool, scheduler.running
    limits = scheduler.limits
    owners = Counter(itertools.chain.from_iterable(s.pages[s.gone :] for s in running))
    assert pool._owners == [owners[page] for page in range(pool.num_pages)]
    assert sorted([*owners, *pool._blank, *pool._cached]) == list(range(pool.num_pages))
    known = {page: key for page, key in enumerate(pool._key_of) if key is not None}
    assert pool._page_of == {key: page for page, key in known.items()}
    assert known.keys() >= set(pool._cached) and not known.keys() & set(pool._blank)
    assert pool.keep or not pool._cached
    assert sorted([*(s.slot for s in running), *scheduler._free_slots]) == list(
        range(scheduler.limits.num_slots)
    )
    growth = 0
    for sequence in running:
        assert sequence.status in (Status.PREFILL, Status.DECODE) and sequence.pending >= 0
        gone, own = sequence.gone, sequence.pages[sequence.gone :]
        assert sequence.pages[:gone] == [GONE] * gone and GONE not in own and len(set(own)) == len(own)
        at_end = limits.pages_for(len(sequence.prompt) + max(sequence.max_tokens, 1) - 1)
        if limits.window is not None:
            assert len(own) <= limits.pages_at_once
            at_end = min(at_end, gone + limits.pages_at_once)
        growth += at_end - len(sequence.pages)
    assert scheduler.memory._growth == growth >= 0


class Loop:
    """Scheduler and device together, with ``run_ahead`` rounds in flight beyond the one to be committed next.

    The clock stands still unless there is a ``step_time(chunk, slots, context)``: seconds that a step takes. Then it
    goes on with each round that is committed, and the controller is told, as the engine would do it; ``host_time`` is
    what each round costs the host. ``checks``: whether ownership is checked after each plan and commit.
    """

    def __init__(
        self,
        limits: Limits,
        run_ahead: int = 0,
        policy: str | Policy = "stall-free",
        controller: RoundController | None = None,
        step_time: Callable[[int, int, int], float] | None = None,
        host_time: float = 0.0,
        checks: bool = True,
    ):
        self.scheduler, self.device = Scheduler(limits, policy, controller), FakeDevice(limits)
        self.run_ahead, self.step_time, self.host_time, self.now = run_ahead, step_time, host_time, 0.0
        self.checks = checks
        self.in_flight: deque[list] = deque()  # [plan, its tokens, steps that were committed]
        self.plans: list[RoundPlan] = []

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence, self.now)

    def plan(self) -> RoundPlan | None:
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append([plan, self.device.run(plan), 0])
        if self.checks:
            check_ownership(self.scheduler)
        return plan

    def commit(self, steps: int | None = None) -> list[tuple[Sequence, list[int]]]:
        """Commits the oldest round, or its next ``steps`` steps."""
        plan, table, first = flight = self.in_flight[0]
        stop = plan.steps if steps is None else min(first + steps, plan.steps)
        if self.step_time is not None:
            self._measure(plan, first, stop)
        changed = self.scheduler.commit(plan, [tokens[first:stop] for tokens in table], first)
        flight[2] = stop
        if stop == plan.steps:
            self.in_flight.popleft()
            self.scheduler.controller.host_time(self.host_time)
        if self.checks:
            check_ownership(self.scheduler)
        return [(taken.sequence, taken.tokens) for taken in changed]

    def _measure(self, plan: RoundPlan, first: int, stop: int) -> None:
        """Tells the controller what the steps of a part took: mixed steps one by one, decode steps together."""
        assert self.step_time is not None
        mixed = len(plan.mixed)
        spans = [(i, i + 1) for i in range(first, min(stop, mixed))]
        spans += [(max(first, mixed), stop)] if stop > mixed else []
        full = self.scheduler.limits.slot_buckets[-1]
        for begin, end in spans:
            chunk, slots = (
                (self.chunk_bucket(plan.mixed[begin].tokens), full) if begin < mixed else (0, plan.slots)
            )
            seconds = self.step_time(chunk, slots, plan.context) * (end - begin)
            self.now += seconds
            self.scheduler.controller.measured(
                chunk, slots, plan.context, end - begin, seconds, len(plan.entries)
            )

    def chunk_bucket(self, tokens: int) -> int:
        sizes = getattr(self.scheduler.controller, "chunk_sizes", (self.scheduler.limits.chunk_tokens,))
        return next(size for size in sizes if size >= tokens)

    def step(self) -> None:
        while len(self.in_flight) <= self.run_ahead and self.plan() is not None:
            pass
        if self.in_flight:
            self.commit()

    def finish(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"not done after {limit} rounds")

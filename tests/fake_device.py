"""A device made of Python lists, for tests of the scheduler. It does what the step functions do with a plan, and
checks every read and every write. Imports no jax."""

import copy
import itertools
import zlib
from collections import deque
from types import SimpleNamespace

from jaxsched.schedule import Limits, RoundPlan, Scheduler, Sequence, Status

NO_TOKEN = -1
VOCAB = 50
GREEDY_ROW = SimpleNamespace(greedy=True)


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


def make_sequence(name, prompt_len, max_tokens, stop_ids=(), greedy=True) -> Sequence:
    prompt = [zlib.crc32(f"{name}/prompt/{i}".encode()) % VOCAB for i in range(prompt_len)]
    row = GREEDY_ROW if greedy else SimpleNamespace(greedy=False)
    return Sequence(str(name), prompt, max_tokens, frozenset(stop_ids), row)


def answer(name: str, position: int) -> int:
    """The token that the fake model gives a sequence at a position of its output."""
    return zlib.crc32(f"{name}/{position}".encode()) % VOCAB


def expected_output(sequence: Sequence) -> list[int]:
    out = []
    while len(out) < sequence.max_tokens:
        out.append(answer(sequence.id, len(out)))
        if out[-1] in sequence.stop_ids:
            break
    return out


class _Slot:
    def __init__(self):
        self.sequence, self.table, self.context, self.live, self.left, self.position = (
            None,
            {},
            0,
            False,
            0,
            0,
        )


class FakeDevice:
    """Runs plans in the order in which they were made."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.slots = [_Slot() for _ in range(limits.num_slots)]
        self.cells: dict[tuple[int, int], tuple[str, int]] = {}  # (page, offset) -> (sequence, position)

    def run(self, plan: RoundPlan) -> list[list[int]]:
        """The round's tokens, ``[slot][step]``."""
        before = list(self.slots)
        for old, new in plan.moves:
            self.slots[new] = copy.copy(before[old])
            self.slots[new].table = dict(before[old].table)
        for slot in plan.drops:
            self.slots[slot].live = False
        for slot, sequence in plan.admits:
            row = self.slots[slot]
            row.sequence, row.live, row.context = sequence, False, 0
            row.left, row.position = sequence.max_tokens - len(sequence.output), len(sequence.output)
        for slot, index, page in plan.pages:
            self.slots[slot].table[index] = page
        table = [[NO_TOKEN] * plan.steps for _ in self.slots]
        for step in range(plan.steps):
            mixed = plan.mixed[step] if step < len(plan.mixed) else None
            self._step(step, mixed.pieces if mixed else (), plan.slots, table)
        return table

    def _step(self, step, pieces, bucket, table):
        assert not any(row.live for row in self.slots[bucket:]), "a live slot is outside the slot bucket"
        samples = []
        for slot, row in enumerate(self.slots[:bucket]):
            if row.live:
                self._write(row, row.context)
                samples.append((slot, row))
        for piece in pieces:
            row = self.slots[piece.slot]
            assert piece.slot < bucket and row.sequence is piece.sequence and not row.live
            assert piece.start == row.context, "a chunk does not follow the last one"
            for position in range(piece.start, piece.start + piece.length):
                self._write(row, position)
            row.context = piece.start + piece.length
            if piece.ends:
                known = len(row.sequence.prompt) + row.position
                assert row.context == known, "the prompt ends before or after its end"
                samples.append((piece.slot, row))
        for slot, row in samples:
            row.context += row.live
            self._read(row)
            token = answer(row.sequence.id, row.position)
            row.position += 1
            row.left -= 1
            row.live = row.left > 0 and token not in row.sequence.stop_ids
            table[slot][step] = token

    def _cell(self, row, position):
        index, offset = divmod(position, self.limits.page_size)
        assert index in row.table, f"{row.sequence.id} has no page for position {position}"
        return row.table[index], offset

    def _write(self, row, position):
        assert position < self.limits.max_model_len
        self.cells[self._cell(row, position)] = (row.sequence.id, position)

    def _read(self, row):
        """All that attention sees must be this sequence's own."""
        for position in range(row.context):
            found = self.cells.get(self._cell(row, position))
            assert found == (row.sequence.id, position), (
                f"{row.sequence.id}/{position} was overwritten: {found}"
            )


def check_ownership(scheduler: Scheduler) -> None:
    """Each page is owned once, each slot too, and nothing is lost."""
    pool = scheduler.pool
    owned = list(itertools.chain.from_iterable(s.pages for s in scheduler.running))
    assert sorted([*owned, *pool._free]) == list(range(pool.num_pages))
    slots = [s.slot for s in scheduler.running]
    assert sorted([*slots, *scheduler._free_slots]) == list(range(scheduler.limits.num_slots))
    for sequence in scheduler.running:
        assert sequence.status in (Status.PREFILL, Status.DECODE)
        assert len(sequence.pages) <= scheduler.limits.pages_for(scheduler.limits.max_model_len)
    waiting = [s for s in scheduler._waiting if s.status is Status.WAITING]
    assert len(waiting) == scheduler.num_waiting
    assert all(s.slot == -1 and not s.pages and not s.pending for s in waiting)


class Loop:
    """Scheduler and device together, with ``run_ahead`` rounds in flight beyond the one to be committed next."""

    def __init__(self, limits: Limits, run_ahead: int = 0):
        self.scheduler, self.device, self.run_ahead = Scheduler(limits), FakeDevice(limits), run_ahead
        self.in_flight: deque = deque()
        self.plans: list[RoundPlan] = []

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def plan(self) -> RoundPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.run(plan)))
        check_ownership(self.scheduler)
        return plan

    def commit(self) -> list:
        changed = self.scheduler.commit(*self.in_flight.popleft())
        check_ownership(self.scheduler)
        return changed

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

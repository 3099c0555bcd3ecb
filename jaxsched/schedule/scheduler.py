"""The host scheduler: plain Python, no JAX, no clock. ``plan`` decides a round, ``commit`` takes its tokens back."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable

from .limits import Limits
from .pages import PagePool
from .plan import ChunkPiece, Entry, MixedStep, RoundPlan
from .sequence import Finish, Sequence, Status


class Scheduler:
    """Stall-free scheduling of multi-step rounds (order as in Sarathi-Serve, Agrawal et al. 2024).

    Order of service: running decodes, unfinished prefills, new requests, under the budgets of ``Limits``. Pages for
    all N tokens of a round are reserved before it; when they are short, N is halved before anyone is preempted, and
    rounds in flight are waited for before that, since they may free pages. Preemption drops the youngest sequence's
    pages; its output is read again as if it were prompt.

    ``plan`` may be called before earlier rounds are committed (run-ahead): it counts with the most tokens that those
    can add. Cost per round depends on the number of slots, not on the number of waiting sequences.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self.pool = PagePool(limits.num_pages)
        self.running: list[Sequence] = []  # hold a slot, in order of admission
        self.num_waiting = 0
        self.in_flight = 0  # rounds planned and not committed
        self.num_preemptions = 0
        self._waiting: deque[Sequence] = deque()  # may hold aborted sequences, skipped when met
        self._free_slots = list(range(limits.num_slots))
        self._drops: set[int] = set()
        self._arrivals = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. The caller has checked that it fits (``check``)."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._waiting.append(sequence)
        self.num_waiting += 1

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence now, wherever it is. Tokens of rounds in flight are discarded. Idempotent."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self.num_waiting -= 1
            if self.num_waiting == 0:
                self._waiting.clear()
        elif sequence.slot >= 0:
            self._drops.add(sequence.slot)
            self._release(sequence)
        self._end(sequence, Finish.ABORT)

    @property
    def has_work(self) -> bool:
        """Whether something waits, runs, or is in flight."""
        return bool(self.num_waiting or self.running or self.in_flight)

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self) -> RoundPlan | None:
        """The next round, or None when there is nothing to do before rounds in flight are committed."""
        self._release_ended()
        plan = RoundPlan()
        steps = self._reserve(plan)
        if steps == 0:
            return None
        self._compact(plan)
        decoding = [s for s in self.running if s.status is Status.DECODE]
        self._plan_mixed(plan, steps)
        for sequence in decoding:
            self._enter(plan, sequence, 0, steps)
        if plan.steps == 0:
            return None
        plan.drops = sorted(self._drops - {slot for slot, _ in plan.admits})
        self._drops.clear()
        top = max([e.slot for e in plan.entries] + [p.slot for step in plan.mixed for p in step.pieces])
        plan.slots = self.limits.slot_buckets[bisect_right(self.limits.slot_buckets, top)]
        self.in_flight += 1
        return plan

    def _release_ended(self) -> None:
        """Frees what is certain to be over once the rounds in flight are done, without waiting to see it.

        Such a slot is dead on the device after those rounds, and pages are only reused by later ones.
        """
        for sequence in [s for s in self.running if s.status is Status.DECODE and s.left <= 0]:
            self._release(sequence)

    def _compact(self, plan: RoundPlan) -> None:
        """Moves the highest slots down when nothing waits to fill the gaps, so that a smaller slot bucket will do."""
        if self.num_waiting or not self.running:
            return
        bucket = self.limits.slot_buckets[bisect_left(self.limits.slot_buckets, len(self.running))]
        for sequence in self.running:
            if sequence.slot >= bucket:
                old, new = sequence.slot, heapq.heappop(self._free_slots)
                heapq.heappush(self._free_slots, old)
                sequence.slot = new
                plan.moves.append((old, new))
                self._drops.discard(new)
                self._drops.add(old)
        moved = dict(plan.moves)
        plan.pages = [(moved.get(slot, slot), index, page) for slot, index, page in plan.pages]

    def _reserve(self, plan: RoundPlan) -> int:
        """Pages for the running decodes. Returns N for this round; 0 = wait for the rounds in flight."""
        steps = self.limits.num_steps
        while True:
            decoding = [s for s in self.running if s.status is Status.DECODE]
            needs = [(s, self._pages_short(s, min(steps, s.left))) for s in decoding]
            if sum(need for _, need in needs) <= min(self.pool.free, self.limits.max_new_pages):
                for sequence, need in needs:
                    self._grow(plan, sequence, need)
                return steps
            if steps > 1:
                steps //= 2
            elif self.in_flight:
                return 0
            else:
                self._preempt(plan, max(self.running, key=lambda s: s.arrival))
                steps = self.limits.num_steps

    def _pages_short(self, sequence: Sequence, new_tokens: int) -> int:
        """Pages that a decoding sequence lacks to sample ``new_tokens`` more. The last token sampled needs none."""
        positions = sequence.length + sequence.pending + new_tokens - 1
        return max(0, self.limits.pages_for(positions) - len(sequence.pages))

    def _grow(self, plan: RoundPlan, sequence: Sequence, count: int) -> None:
        first = len(sequence.pages)
        pages = self.pool.take(count)
        sequence.pages += pages
        plan.pages += [(sequence.slot, first + i, page) for i, page in enumerate(pages)]

    def _plan_mixed(self, plan: RoundPlan, steps: int) -> None:
        """Fills up to ``steps`` mixed steps with prompt tokens, unfinished prefills first, then new requests."""
        unfinished = deque(s for s in self.running if s.status is Status.PREFILL)
        for step in range(steps):
            room, pieces = self.limits.chunk_tokens, []
            while room > 0 and (unfinished or self._admit(plan, room, unfinished)):
                sequence = unfinished[0]
                rest = sequence.prefill_target - sequence.prefilled
                if rest > room and not self.limits.split_prompts:
                    break
                length = min(rest, room)
                pieces.append(
                    ChunkPiece(sequence, sequence.slot, sequence.prefilled, length, ends=length == rest)
                )
                sequence.prefilled += length
                room -= length
                if length == rest:
                    unfinished.popleft()
                    sequence.status = Status.DECODE
                    self._enter(plan, sequence, step, steps)
            if not pieces:
                break
            plan.mixed.append(MixedStep(tuple(pieces)))
            plan.steps = max(plan.steps, len(plan.mixed))

    def _enter(self, plan: RoundPlan, sequence: Sequence, first: int, steps: int) -> None:
        """The sequence samples in steps ``first .. steps-1``; the round is as long as somebody can use it."""
        count = min(steps - first, sequence.left)
        plan.entries.append(Entry(sequence, sequence.slot, sequence.epoch, count))
        plan.steps = max(plan.steps, first + count)
        plan.sampling |= not sequence.row.greedy
        sequence.pending += count

    def _admit(self, plan: RoundPlan, room: int, unfinished: deque[Sequence]) -> bool:
        """Gives the next waiting sequence a slot and the pages of its prompt and its first N tokens, if it can."""
        limits = self.limits
        while self._waiting and self._waiting[0].status is Status.FINISHED:
            self._waiting.popleft()
        if not self._waiting or not self._free_slots or plan.preempted:
            return False
        sequence = self._waiting[0]
        if sequence.length > room and not limits.split_prompts:
            return False
        need = limits.pages_for(sequence.length + min(limits.num_steps, sequence.left) - 1)
        # Leave each running sequence a page to grow into, or admissions and preemptions would chase each other.
        if need > self.pool.free - len(self.running) or len(plan.pages) + need > limits.max_new_pages:
            return False
        self._waiting.popleft()
        self.num_waiting -= 1
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.epoch += 1
        sequence.status = Status.PREFILL
        sequence.prefill_target, sequence.prefilled = sequence.length, 0
        self.running.append(sequence)
        plan.admits.append((sequence.slot, sequence))
        self._grow(plan, sequence, need)
        unfinished.append(sequence)
        return True

    # -- leaving -------------------------------------------------------------------------------------------------

    def _preempt(self, plan: RoundPlan, sequence: Sequence) -> None:
        assert sequence.pending == 0, "preempted with rounds in flight"
        self._drops.add(sequence.slot)
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        self.num_preemptions += 1
        plan.preempted += 1
        self._waiting.appendleft(sequence)
        self.num_waiting += 1

    def _release(self, sequence: Sequence) -> None:
        """Gives back slot and pages."""
        heapq.heappush(self._free_slots, sequence.slot)
        self.pool.give(sequence.pages)
        sequence.pages, sequence.slot = [], -1
        self.running.remove(sequence)

    def _end(self, sequence: Sequence, reason: Finish) -> None:
        sequence.status, sequence.finish = Status.FINISHED, reason

    # -- commit --------------------------------------------------------------------------------------------------

    def commit(self, plan: RoundPlan, tokens: Iterable[list[int]]) -> list[tuple[Sequence, list[int]]]:
        """Takes the tokens of a round, ``tokens[slot]`` a list of N ids with -1 where nothing was sampled.

        Returns the sequences that got tokens or ended, with their new tokens. Rounds are committed in order.
        """
        columns = list(tokens)
        self.in_flight -= 1
        changed = []
        for entry in plan.entries:
            sequence = entry.sequence
            sequence.pending -= entry.steps
            if sequence.status is Status.FINISHED or sequence.epoch != entry.epoch:
                continue
            new = [token for token in columns[entry.slot] if token >= 0]
            if not new:
                continue
            sequence.output += new
            assert len(sequence.output) <= sequence.max_tokens, (
                f"{sequence.id} got more tokens than its limit"
            )
            if new[-1] in sequence.stop_ids:
                self._finish(sequence, Finish.STOP)
            elif len(sequence.output) == sequence.max_tokens:
                self._finish(sequence, Finish.LENGTH)
            changed.append((sequence, new))
        return changed

    def _finish(self, sequence: Sequence, reason: Finish) -> None:
        if sequence.slot >= 0:
            self._release(sequence)
        self._end(sequence, reason)

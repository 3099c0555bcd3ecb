"""The host scheduler: plain Python, no JAX, no clock. ``plan`` decides a round, ``commit`` takes its tokens back."""

from __future__ import annotations

import dataclasses
import heapq
from bisect import bisect_left, bisect_right
from collections import deque

from .books import Books
from .load import Choice, Load
from .plan import ChunkPiece, Entry, MixedStep, RoundPlan
from .sequence import Sequence, Status


class Scheduler(Books):
    """Multi-step rounds with chunked prefill over a paged pool.

    Three objects decide: the *policy* who is next (``policies/``), the *controller* how long a round is and how many
    prompt tokens it reads (``rounds.py``), the *memory* who gets pages (``memory.py``). The scheduler puts a round
    together: running decodes, unfinished prefills, new requests, under the budgets of ``Limits``. Pages for all N
    tokens of a round are reserved before it; when they are short, N is halved before anyone is preempted, and rounds
    in flight are waited for before that, since they may free pages. Preemption drops a sequence's pages (full ones
    stay in the prefix cache as long as nobody needs them); its output is read again as if it were prompt.

    ``plan`` may be called before earlier rounds are committed (run-ahead): it counts with the most tokens that those
    can add. Cost per round depends on the number of slots, not on the number of waiting sequences.
    """

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, now: float = 0.0) -> RoundPlan | None:
        """The next round, or None when there is nothing to do before rounds in flight are committed."""
        plan = RoundPlan()
        load, decoding = self._load(now)
        choice = self._choose(load)
        if self.limits.window is not None:
            for sequence in decoding:  # rounds in flight may read what goes back, but run before this one
                self.memory.give_back(sequence, sequence.length + sequence.pending - 1)
        steps = self._reserve(plan, decoding, choice.steps, now)
        if steps == 0:
            return None
        reads = choice.mixed > 0 and any(s.status is Status.PREFILL for s in self.running)
        if decoding or reads:  # otherwise nothing may come of this plan, and the moves would be lost
            self._compact(plan)
        self._plan_mixed(plan, choice, steps, now)
        plan.decode = choice.decode or not plan.mixed
        if plan.decode:
            for sequence in decoding:
                self._enter(plan, sequence, 0, steps)
        if plan.steps == 0:
            if plan.preempted and not self.in_flight:  # who was to decode waits now, and the pool has room
                again = self.plan(now)
                if again is not None:
                    again.preempted += plan.preempted
                return again
            if self.num_waiting and not self.in_flight:
                raise RuntimeError(f"policy {self.policy.name!r} serves nobody, but {self.num_waiting} wait")
            return None
        plan.drops = sorted(self._drops - {slot for slot, _ in plan.admits})
        self._drops.clear()
        top = max([e.slot for e in plan.entries] + [p.slot for step in plan.mixed for p in step.pieces])
        plan.slots = self.limits.slot_buckets[bisect_right(self.limits.slot_buckets, top)]
        plan.decoding = len(decoding) if plan.decode else 0
        plan.reason, plan.context = choice.reason, load.context
        plan.running, plan.waiting = len(self.running), self.num_waiting
        for sequence in self.running:
            plan.controls |= sequence.row.controls
            if sequence.row.logprobs > plan.logprobs:
                plan.logprobs = sequence.row.logprobs
        self.in_flight += 1
        return plan

    def _choose(self, load: Load) -> Choice:
        """The size of the round as controller and policy want it; but nobody waits for nothing."""
        choice = self.policy.shape(load, self.controller.choose(load))
        idle = not load.decoding and not load.in_flight
        steps = min(max(choice.steps, 1), self.limits.num_steps)
        mixed = max(choice.mixed, 1) if idle else choice.mixed
        chunk = max(choice.chunk, 1) if self.limits.split_prompts else self.limits.chunk_tokens
        return dataclasses.replace(choice, steps=steps, mixed=mixed, chunk=chunk, admit=choice.admit or idle)

    def _load(self, now: float) -> tuple[Load, list[Sequence]]:
        """The state in numbers, and the sequences that decode. Frees what is certain to be over after the rounds in
        flight, without waiting to see it: such a slot is dead on the device then, and pages are only reused later.
        """
        decoding, ended, ends, unread, context = [], [], [], 0, 0
        longest = self.limits.num_steps
        for sequence in self.running:
            if sequence.status is Status.PREFILL:
                unread += sequence.prefill_target - sequence.prefilled
                continue
            ahead = len(sequence.output) + sequence.pending
            left = sequence.max_tokens - ahead
            if left <= 0:
                ended.append(sequence)
                continue
            if sequence.hosted and sequence.pending:
                continue  # until the host has seen what is in flight
            decoding.append(sequence)
            context += len(sequence.prompt) + ahead
            if left < longest:
                ends.append(left)
        for sequence in ended:
            kept = sequence.epoch, sequence.pending
            self._release(sequence)
            sequence.epoch, sequence.pending = kept  # what is in flight still counts
        first = self.policy.first(now)
        load = Load(
            now=now,
            waiting=self.num_waiting,
            waiting_tokens=self._waiting_tokens,
            first_tokens=0 if first is None else first.length,
            first_wait=0.0 if first is None else now - first.arrived,
            blocked=first is not None and (self._refused or not self._free_slots),
            decoding=len(decoding),
            unread_tokens=unread,
            free_slots=len(self._free_slots),
            free_pages=self.memory.pool.free,
            ends=tuple(ends),
            context=context,
            streaming=self.num_streaming > 0,
            in_flight=self.in_flight,
        )
        return load, decoding

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
        if plan.moves:
            moved = dict(plan.moves)
            plan.pages = [(moved.get(slot, slot), index, page) for slot, index, page in plan.pages]

    def _reserve(self, plan: RoundPlan, decoding: list[Sequence], wanted: int, now: float) -> int:
        """Pages for the running decodes. Returns N for this round; 0 = wait for the rounds in flight.

        Who is preempted is taken out of ``decoding``.
        """
        steps, memory = wanted, self.memory
        while True:
            lacking = memory.short(decoding, steps)
            count = sum(need for _, need in lacking)
            if count <= min(memory.pool.free, self.limits.max_new_pages):
                plan.pages += memory.grow(lacking, count)
                return steps
            if steps > 1:
                steps //= 2
            elif self.in_flight:
                return 0
            else:
                victim = self.policy.victim(list(self.running))
                if victim not in self.running:
                    raise RuntimeError(f"policy {self.policy.name!r} preempts somebody who does not run")
                self.evict(victim, now)
                if victim in decoding:
                    decoding.remove(victim)
                memory.overcommitted()
                plan.preempted += 1
                steps = wanted

    def _plan_mixed(self, plan: RoundPlan, choice: Choice, steps: int, now: float) -> None:
        """Fills up to ``choice.mixed`` mixed steps with prompt tokens: unfinished prefills, then new requests."""
        unfinished = deque(s for s in self.running if s.status is Status.PREFILL)
        if not choice.decode:
            steps = 1
        for step in range(min(steps, choice.mixed)):
            room, pieces = self._chunk_room(choice), []
            while room > 0 and (unfinished or self._admit(plan, choice, room, unfinished, now)):
                sequence = unfinished[0]
                rest = sequence.prefill_target - sequence.prefilled
                if rest > room and not self.limits.split_prompts:
                    break
                length = self._piece(rest, room)
                if length and self.limits.window is not None:
                    length = self._with_pages(plan, sequence, length, steps - step)
                if length == 0:
                    break
                start, ends = sequence.prefilled, length == rest and sequence.samples
                pieces.append(ChunkPiece(sequence, sequence.slot, start, length, ends, sequence.epoch))
                sequence.prefilled += length
                room -= length
                # Steps run in order and write before they read: whoever finds these pages reads what is written here.
                self.memory.publish(sequence, sequence.prefilled)
                if self.policy.counts_service:
                    self.policy.served(sequence, length, 0)
                if length == rest:
                    unfinished.popleft()
                    sequence.status = Status.DECODE
                    self._enter(plan, sequence, step, steps)
            if not pieces:
                break
            plan.mixed.append(MixedStep(tuple(pieces)))
            plan.steps = max(plan.steps, len(plan.mixed))

    def _chunk_room(self, choice: Choice) -> int:
        """Prompt tokens that the next mixed step reads at most."""
        least = self.limits.page_size if self.limits.whole_pages else 1
        return min(max(choice.chunk, least), self.limits.chunk_tokens)

    def _piece(self, rest: int, room: int) -> int:
        """How many of the ``rest`` tokens of a prompt go into ``room``. What has been read ends a page, if it must."""
        if rest <= room or not self.limits.whole_pages:
            return min(rest, room)
        return room - room % self.limits.page_size

    def _with_pages(self, plan: RoundPlan, sequence: Sequence, length: int, steps: int) -> int:
        """Gives a prompt back what its window has left and the pages of its next ``length`` tokens.

        Returns how many there are pages for. Pages are short only while decodes hold them: what is alone fits, and no
        second prompt is begun before the first is read.
        """
        memory = self.memory
        memory.give_back(sequence, sequence.prefilled)
        length = memory.readable(sequence, length, steps, self.limits.max_new_pages - len(plan.pages))
        if length:
            plan.pages += memory.read_on(sequence, length, steps)
        return length

    def _enter(self, plan: RoundPlan, sequence: Sequence, first: int, steps: int) -> None:
        """The sequence samples in steps ``first .. steps-1``; the round is as long as somebody can use it."""
        count, left = steps - first, sequence.left
        if left < count:
            count = left
        if sequence.hosted:
            count = min(count, 1)
            plan.hosted = max(plan.hosted, first + 1)
        if count == 0:
            return
        plan.entries.append(Entry(sequence, sequence.slot, sequence.epoch, first, count))
        if first + count > plan.steps:
            plan.steps = first + count
        if not sequence.row.greedy:
            plan.sampling = True
        sequence.pending += count

    def _admit(
        self,
        plan: RoundPlan,
        choice: Choice,
        room: int,
        unfinished: deque[Sequence],
        now: float,
    ) -> bool:
        """Gives the next waiting sequence a slot and the pages of its prompt and its first N tokens, if it can."""
        if not self._free_slots or plan.preempted or not choice.admit:
            return False
        sequence = self.policy.first(now)
        if sequence is None:
            return False
        if not self.limits.split_prompts and not self.memory.fits_in(sequence, room):
            return False
        budget = self.limits.max_new_pages - len(plan.pages)
        # N may be larger in the round that ends its prompt.
        self._refused = not self.memory.admit(sequence, self.limits.num_steps, budget, len(self.running))
        if self._refused:
            return False
        if sequence.guide is not None:
            sequence.hosted = not sequence.guide.on_device()
        popped = self.policy.pop(now)
        assert popped is sequence, "the policy's pop() gave another sequence than its first()"
        self._waiting_tokens -= sequence.length
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.epoch += 1
        sequence.status = Status.PREFILL
        if sequence.scheduled is None:
            sequence.scheduled, sequence.cached = now, sequence.prefilled
            plan.queries += sequence.length
            plan.hits += sequence.prefilled
        self.running[sequence] = None
        plan.admits.append((sequence.slot, sequence))
        gone = sequence.gone
        plan.pages += [(sequence.slot, i, page) for i, page in enumerate(sequence.pages[gone:], gone)]
        unfinished.append(sequence)
        return True

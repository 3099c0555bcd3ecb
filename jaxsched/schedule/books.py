"""The books of the scheduler: what waits, runs and ends, and the tokens that came."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from .limits import Limits
from .memory import Memory
from .plan import ChunkPiece, Entry, RoundPlan
from .policies import Policy, make_policy
from .rounds import FixedRounds, RoundController
from .sequence import Finish, Sequence, Status

OTHER_ENDS = {
    3: Finish.STOP,
    4: Finish.ERROR,
}  # by the device's finish code: a constraint is complete; a dead end


class Taken(NamedTuple):
    """What one sequence got of a part of a round. Empty tokens: only an end."""

    sequence: Sequence
    tokens: list[int]
    slot: int
    step: int  # of the part, in which the first of the tokens was sampled
    entry: Entry


class Books:
    """The sequences of a scheduler, wherever they are, and how they end. ``Scheduler`` adds the planning."""

    def __init__(
        self,
        limits: Limits,
        policy: str | Policy = "stall-free",
        controller: RoundController | None = None,
    ):
        self.limits = limits
        self.policy = make_policy(policy)
        self.controller = controller or FixedRounds(limits.num_steps, limits.chunk_tokens)
        self.memory = Memory(limits)
        self.running: dict[Sequence, None] = {}  # hold a slot, in order of admission
        self.in_flight = 0  # rounds planned and not committed
        self.num_preemptions = 0
        self.num_streaming = 0  # unfinished sequences that somebody reads as they come
        self._waiting_tokens = 0
        self._refused = False  # the last round had no pages for the next in line
        self._free_slots = list(range(limits.num_slots))
        self._drops: set[int] = set()
        self._arrivals = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, now: float = 0.0) -> None:
        """Queues a sequence. The caller has checked that it fits."""
        sequence.arrival, sequence.arrived = self._arrivals, now
        self._arrivals += 1
        self._enqueue(sequence, now)
        self.num_streaming += sequence.streaming

    def _enqueue(self, sequence: Sequence, now: float) -> None:
        self.policy.push(sequence, now)
        sequence.status = Status.WAITING
        self._waiting_tokens += sequence.length

    def abort(self, sequence: Sequence, reason: Finish = Finish.ABORT) -> None:
        """Ends a sequence now, wherever it is. Tokens of rounds in flight are discarded. Idempotent."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.WAITING:
            self._waiting_tokens -= sequence.length
            self.policy.discard(sequence)
        elif sequence.slot >= 0:
            self._drops.add(sequence.slot)
            self._release(sequence)
        self._end(sequence, reason)

    def evict(self, sequence: Sequence, now: float = 0.0) -> None:
        """Preempts a running sequence: slot and pages go back, it waits again. What is in flight is computed anew."""
        if sequence.slot >= 0:
            self._drops.add(sequence.slot)
            self._release(sequence)
            sequence.preemptions += 1
            self.num_preemptions += 1
            self._enqueue(sequence, now)

    def reset_prefix_cache(self) -> None:
        """Forgets what the pages hold. Running sequences keep theirs to themselves from now on."""
        self.memory.reset(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.policy)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def has_work(self) -> bool:
        """Whether something waits, runs, or is in flight."""
        return bool(self.running or self.in_flight or self.num_waiting)

    # -- leaving -------------------------------------------------------------------------------------------------

    def _release(self, sequence: Sequence) -> None:
        """Gives back slot and pages. Rounds in flight no longer concern the sequence."""
        heapq.heappush(self._free_slots, sequence.slot)
        if sequence.status is Status.DECODE and self.limits.prefix_caching:
            # Whoever continues this text will find it. The last token's K and V are written by the step that reads it.
            self.memory.publish(sequence, sequence.length - 1)
        self.memory.release(sequence)
        sequence.slot, sequence.pending = -1, 0
        sequence.epoch += 1
        del self.running[sequence]

    def _end(self, sequence: Sequence, reason: Finish) -> None:
        sequence.status, sequence.finish = Status.FINISHED, reason
        sequence.epoch += 1
        self.num_streaming -= sequence.streaming

    # -- commit --------------------------------------------------------------------------------------------------

    def commit(
        self, plan: RoundPlan, tokens: list[list[int]], first: int = 0, ends: list[list[int]] | None = None
    ) -> list[Taken]:
        """Takes the tokens of a round or, from step ``first`` on, of a part of it.

        ``tokens[slot]`` is a list of ids, one per step, with -1 where nothing was sampled; ``ends``, likewise, has
        OTHER_ENDS where a constraint ended the sequence. Returns the sequences that got tokens or ended. Rounds, and
        the parts of a round, are committed in order.
        """
        stop, changed = first + len(tokens[0]), []
        self.in_flight -= stop == plan.steps
        for entry in plan.entries:
            begin, end = entry.first, entry.first + entry.steps
            if begin < first:
                begin = first
            if end > stop:
                end = stop
            if begin >= end:
                continue
            sequence, new = entry.sequence, []
            if sequence.epoch == entry.epoch:
                sequence.pending -= end - begin
                new, at = tokens[entry.slot][begin - first : end - first], begin - first
                reason = None if ends is None else OTHER_ENDS.get(max(ends[entry.slot]))
                if new[-1] < 0:
                    at += next((i for i, token in enumerate(new) if token >= 0), 0)
                    new = [token for token in new if token >= 0]
                if new or reason:
                    entry.sampled += len(new)
                    self._append(plan, sequence, new, reason)
                    changed.append(Taken(sequence, new, entry.slot, at, entry))
            if len(new) < end - begin:
                self._count_waste(plan, sequence, end - begin - len(new))
        return changed

    def cut(self, plan: RoundPlan, taken: Taken, keep: int, reason: Finish = Finish.STOP) -> list[int]:
        """Ends a sequence that has just got tokens after the first ``keep`` of these; returns the ones that stay."""
        sequence, drop = taken.sequence, len(taken.tokens) - keep
        if drop:
            del sequence.output[-drop:]
            taken.entry.sampled -= drop
            plan.wasted["stopped"] = plan.wasted.get("stopped", 0) + drop
        if sequence.finish is None:
            if sequence.slot >= 0:
                self._drops.add(sequence.slot)
            self._finish(plan, sequence, reason)
        else:
            sequence.finish = reason
        return taken.tokens[:keep]

    def read(self, plan: RoundPlan, first: int, stop: int) -> Iterator[tuple[int, int, ChunkPiece]]:
        """The pieces of prompts in steps ``first .. stop-1`` whose rows are reported or that nothing follows.

        Yields (step, row of the step's chunk, piece), in order, and ends what nothing follows.
        """
        for step in range(first, min(stop, len(plan.mixed))):
            row = 0
            for piece in plan.mixed[step].pieces:
                sequence = piece.sequence
                wanted = sequence.reads_from is not None and piece.start < len(sequence.prompt)
                if wanted and piece.epoch == sequence.epoch:
                    yield step, row, piece
                    sequence.reads_from = piece.start + piece.length
                    if not sequence.samples and piece.start + piece.length == len(sequence.prompt):
                        self._finish(plan, sequence, Finish.LENGTH)
                row += piece.length

    def _append(self, plan: RoundPlan, sequence: Sequence, new: list[int], reason: Finish | None) -> None:
        sequence.output += new
        length = len(sequence.output)
        assert length <= sequence.max_tokens, f"{sequence.id} got more tokens than its limit"
        if self.policy.counts_service:
            self.policy.served(sequence, 0, len(new))
        if reason is not None:
            self._finish(plan, sequence, reason)
        elif new[-1] in sequence.stop_ids:
            self._finish(plan, sequence, Finish.STOP)
        elif length == sequence.max_tokens:
            self._finish(plan, sequence, Finish.LENGTH)

    def _finish(self, plan: RoundPlan, sequence: Sequence, reason: Finish) -> None:
        if sequence.slot >= 0:
            self._release(sequence)
        self._end(sequence, reason)
        plan.ended.add(sequence)
        self.memory.ended(sequence)
        self.controller.ended(len(sequence.output), reason is Finish.STOP)

    def _count_waste(self, plan: RoundPlan, sequence: Sequence, steps: int) -> None:
        if sequence in plan.ended:
            reason = "stopped"
        elif sequence.finish in (Finish.STOP, Finish.LENGTH):
            reason = "run_ahead"
        else:
            reason = "aborted" if sequence.finish else "preempted"
        plan.wasted[reason] = plan.wasted.get(reason, 0) + steps

"""Who is served next: the interface, and the queue that most policies need."""

from __future__ import annotations

from typing import Any, Self

from ..load import Choice, Load
from ..sequence import Sequence
from .waiting import WaitingQueue


class Policy:
    """Serves in the order of ``key``: smallest first, ties by arrival. The base class serves by arrival.

    To make your own, override ``key`` (``victim`` follows it) and pass an object of your class; override ``shape``
    for a say in what a round does. An object of any other class with the same public names will do too. An object
    serves one engine.

    A policy is asked by the scheduler only. It must be deterministic, pickle, read no clock (``now`` and
    ``sequence.arrived`` are seconds of the scheduler's clock) and cost O(log n) per call. Of a sequence it may read
    ``id``, ``request_id``, ``prompt``, ``output``, ``length``, ``max_tokens``, ``arrival``, ``arrived``,
    ``priority``, ``client``, ``deadline``, ``status`` and ``preemptions``, and it must write nothing.
    """

    name: str = "custom"  # shown in logs
    counts_service: bool = False  # True: ``served`` is called

    _queue: WaitingQueue

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Not in __init__, which a user's class may replace.
        self = super().__new__(cls)
        self._queue = WaitingQueue()
        return self

    def key(self, sequence: Sequence) -> Any:
        """Where a sequence stands in the order. Computed when it is queued; anything that compares, such as a tuple."""
        return sequence.arrival

    def push(self, sequence: Sequence, now: float) -> None:
        """Queues a new sequence, or a preempted one again, which has kept ``arrival`` and ``arrived``."""
        self._queue.push(self.key(sequence), sequence)

    def first(self, now: float) -> Sequence | None:
        """Who is next; None when nobody waits. The same ``now`` gives the same answer until something changes."""
        return self._queue.first()

    def pop(self, now: float) -> Sequence:
        """Removes what ``first(now)`` gives. IndexError when nobody waits."""
        return self._queue.pop()

    def discard(self, sequence: Sequence) -> None:
        """A waiting sequence leaves, since it was aborted. Nothing happens when it does not wait here."""
        self._queue.discard(sequence)

    def __len__(self) -> int:
        """Sequences that wait; those discarded do not count."""
        return len(self._queue)

    def victim(self, running: list[Sequence]) -> Sequence:
        """Which of the running sequences (at least one) loses its pages when they are short: the last in the order."""
        return max(running, key=lambda sequence: (self.key(sequence), sequence.arrival))

    def shape(self, load: Load, choice: Choice) -> Choice:
        """The last word on a round: ``choice``, or ``dataclasses.replace(choice, ...)``."""
        return choice

    def served(self, sequence: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        """Prompt tokens read and output tokens sampled for a sequence. Called only if ``counts_service`` is true."""

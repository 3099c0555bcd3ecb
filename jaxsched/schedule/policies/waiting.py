"""A priority queue of waiting sequences whose members may leave at any time."""

from __future__ import annotations

import heapq
from typing import Any

from ..sequence import Sequence


class WaitingQueue:
    """A heap with lazy deletion: smallest key first, ties by arrival.

    ``push`` and ``pop`` take O(log n), ``first`` and ``discard`` amortised O(log n). What was discarded is skipped
    when it comes to the front and swept out when it is more than half of the heap, so memory follows the number of
    waiting sequences. Sequences are told apart by ``arrival``, which is unique.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, int, Sequence]] = []  # (key, arrival, ticket, sequence)
        self._tickets: dict[int, int] = {}  # arrival -> ticket of its live entry
        self._pushed = 0

    def push(self, key: Any, sequence: Sequence) -> None:
        """Queues a sequence. The key is fixed until it is pushed again."""
        assert sequence.arrival not in self._tickets, f"{sequence.id} is queued twice"
        try:
            heapq.heappush(self._heap, (key, sequence.arrival, self._pushed, sequence))
        except BaseException:  # a key that does not compare must not stay in the heap
            self._heap = [entry for entry in self._heap if entry[2] != self._pushed]
            heapq.heapify(self._heap)
            raise
        self._tickets[sequence.arrival] = self._pushed
        self._pushed += 1

    def first(self) -> Sequence | None:
        """The member with the smallest key; None when there is none."""
        heap = self._heap
        while heap and self._tickets.get(heap[0][1]) != heap[0][2]:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def pop(self) -> Sequence:
        """Removes what ``first`` gives. IndexError when there is none."""
        sequence = self.first()
        if sequence is None:
            raise IndexError("pop from an empty queue of waiting sequences; look at first() before")
        heapq.heappop(self._heap)
        del self._tickets[sequence.arrival]
        self._sweep()
        return sequence

    def discard(self, sequence: Sequence) -> bool:
        """Removes a member wherever it stands; False when it is none."""
        if self._tickets.pop(sequence.arrival, None) is None:
            return False
        self._sweep()
        return True

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.arrival in self._tickets

    def __len__(self) -> int:
        return len(self._tickets)

    def _sweep(self) -> None:
        """Drops the dead entries once they are more than half: each is paid for by the discard that made it."""
        if len(self._heap) > 2 * len(self._tickets):
            self._heap = [entry for entry in self._heap if self._tickets.get(entry[1]) == entry[2]]
            heapq.heapify(self._heap)

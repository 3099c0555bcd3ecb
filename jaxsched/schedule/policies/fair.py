"""Fair shares for clients."""

from __future__ import annotations

import heapq
from typing import Any

from ..sequence import Sequence, Status
from .base import Policy
from .waiting import WaitingQueue


class Fair(Policy):
    """The waiting client that has had the least service is next; within a client, first come, first served.

    Virtual token counter (Sheng et al. 2024, "Fairness in Serving Large Language Models", algorithm 2). A client's
    counter grows by ``prompt_weight`` per prompt token when a request is admitted and by ``output_weight`` per output
    token when that is counted, one round late. A client that has nothing waiting saves up nothing: when it comes
    back, its counter is lifted to the smallest of the waiting clients, or, if nobody waits, to that of the client that
    was the last to wait. As in the paper cached prompt tokens count in full; what a preempted request reads again
    does not count, since the client has no part in it.

    Bound: while two clients both have requests waiting, the services they get differ by at most 2 (w_p L + w_q M), with
    L the longest prompt and M the output tokens that the requests running at once may sample. (The paper's bound is
    2 max(w_p L, w_q M) with M the size of the KV pool, for a batch whose pages are reserved at admission.)
    The bound is per client name: who can invent names is held back by no fair queue.

    Counters of clients that neither wait nor run are forgotten as soon as they are no higher than what a lift would
    give, which changes nothing. Of the others the ``remembered`` highest are kept.
    """

    name = "fair"
    counts_service = True

    def __init__(self, prompt_weight: float = 1, output_weight: float = 2, remembered: int = 65536) -> None:
        super().__init__()
        for field, weight in (("prompt_weight", prompt_weight), ("output_weight", output_weight)):
            if not 0 <= weight < float("inf"):
                raise ValueError(f"{field} is {weight}; it must be a number, 0 or more")
        if remembered < 0:
            raise ValueError(f"remembered is {remembered}; it must be 0 or more clients")
        self.prompt_weight, self.output_weight, self.remembered = prompt_weight, output_weight, remembered
        self._queues: dict[str, WaitingQueue] = {}  # by client, without empty ones
        self._counters: dict[str, float] = {}  # by client; of those that wait or run, and of some others
        # One entry (counter, turn, client) per waiting client. Counters only grow, so an entry that is out of date
        # stands too far in front, where it is seen and put right. Clients that left may still have one.
        self._heap: list[tuple[float, int, str]] = []
        self._in_heap: set[str] = set()
        self._turn = 0  # among equal counters the client that had its turn longest ago is next
        self._waiting = 0
        self._last: str | None = None  # the client that was the last to have nothing waiting any more
        self._running: dict[int, Sequence] = {}  # by arrival; those that ended are swept out now and then
        self._sweep_running_at = self._sweep_counters_at = 1024

    # -- the queue -----------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence, now: float) -> None:
        client = sequence.client
        if client not in self._queues:
            self._come_back(client)
            self._queues[client] = WaitingQueue()
        self._queues[client].push(sequence.arrival, sequence)
        self._running.pop(sequence.arrival, None)
        self._waiting += 1

    def first(self, now: float) -> Sequence | None:
        client = self._next_client()
        return None if client is None else self._queues[client].first()

    def pop(self, now: float) -> Sequence:
        sequence = self.first(now)
        if sequence is None:
            return super().pop(now)  # raises
        self._leave(sequence)
        if sequence.preemptions == 0:
            self._counters[sequence.client] += self.prompt_weight * len(sequence.prompt)
        self._running[sequence.arrival] = sequence
        self._sweep_running()
        return sequence

    def discard(self, sequence: Sequence) -> None:
        if sequence.client in self._queues and sequence in self._queues[sequence.client]:
            self._leave(sequence)

    def __len__(self) -> int:
        return self._waiting

    def victim(self, running: list[Sequence]) -> Sequence:
        """The youngest of the client that has had most service."""
        return max(running, key=self.key)

    def key(self, sequence: Sequence) -> Any:
        return self._counters.get(sequence.client, 0), sequence.arrival

    def _leave(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.client]
        queue.discard(sequence)
        self._waiting -= 1
        if not queue:
            del self._queues[sequence.client]
            self._last = sequence.client
            self._sweep_heap()

    # -- counters ------------------------------------------------------------------------------------------------

    def served(self, sequence: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        """Counts output tokens. Prompt tokens were counted at admission, or one client would fill a whole round."""
        if output_tokens:
            grown = self._counters.get(sequence.client, 0) + self.output_weight * output_tokens
            self._counters[sequence.client] = grown

    def counter(self, client: str) -> float:
        """The service that a client has had, as far as it counts: 0 for one that is unknown or was forgotten."""
        return self._counters.get(client, 0)

    def _next_client(self) -> str | None:
        """The waiting client with the smallest counter."""
        while self._heap:
            counter, _, client = self._heap[0]
            if client not in self._queues:
                heapq.heappop(self._heap)
                self._in_heap.discard(client)
            elif counter != self._counters[client]:
                heapq.heapreplace(self._heap, self._entry(client))
            else:
                return client
        return None

    def _entry(self, client: str) -> tuple[float, int, str]:
        self._turn += 1
        return self._counters[client], self._turn, client

    def _come_back(self, client: str) -> None:
        """A client without waiting requests gets one: the lift."""
        level = self._level()
        self._counters[client] = max(self._counters.get(client, 0), level)
        if client not in self._in_heap:
            self._in_heap.add(client)
            heapq.heappush(self._heap, self._entry(client))
        if len(self._counters) > self._sweep_counters_at:
            self._forget(level, client)

    def _level(self) -> float:
        """What the counter of a client that comes back is lifted to. It never sinks."""
        client = self._next_client()
        if client is None:
            client = self._last
        return 0 if client is None else self._counters[client]

    # -- memory --------------------------------------------------------------------------------------------------

    def _sweep_heap(self) -> None:
        if len(self._heap) > 2 * len(self._queues) + 16:
            self._heap = [entry for entry in self._heap if entry[2] in self._queues]
            heapq.heapify(self._heap)
            self._in_heap = set(self._queues)

    def _sweep_running(self) -> None:
        if len(self._running) > self._sweep_running_at:
            running = self._running.items()
            self._running = {a: s for a, s in running if s.status is not Status.FINISHED}
            self._sweep_running_at = max(1024, 2 * len(self._running))

    def _forget(self, level: float, coming: str) -> None:
        """Drops the counters that a lift to ``level`` would replace anyhow, and the lowest of the rest if too many."""
        active = {s.client for s in self._running.values() if s.status is not Status.FINISHED}
        active |= {coming, *self._queues}
        if self._last is not None:
            active.add(self._last)
        idle = [(c, client) for client, c in self._counters.items() if client not in active and c > level]
        if len(idle) > self.remembered:
            idle = heapq.nlargest(self.remembered, idle)
        keep = active.union(client for _, client in idle)
        self._counters = {client: c for client, c in self._counters.items() if client in keep}
        self._sweep_counters_at = max(1024, 2 * len(self._counters))

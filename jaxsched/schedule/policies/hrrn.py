"""Highest response ratio next."""

from __future__ import annotations

import math

from ..sequence import Sequence
from .base import Policy
from .waiting import WaitingQueue


class Hrrn(Policy):
    """The highest (wait + service) / service first: short requests soon, long ones once they have waited long enough.

    Brinch Hansen 1971, "An analysis of response ratio scheduling". Service is estimated in tokens: those to read plus
    ``output_share`` of those that may still be sampled. The order is that of wait / service, so the speed of the
    machine does not matter. Equal ratios: the shorter, then the earlier.

    Ratios change with time, and nobody scans 20,000 of them: requests are sorted into classes whose services differ by
    less than ``ratio``, each in order of arrival, and only the heads are compared. Approximation: the chosen one's
    wait / service is at least 1 / ``ratio`` of the greatest.

    Bound: a request is overtaken only by requests that arrive within ``patience_s`` seconds after it, since those who
    have waited longer than that go first, in order of arrival. Ratios alone give no bound under permanent overload:
    with ``patience_s=float("inf")`` the waits of short requests grow too, and a long one may starve. Under overload
    most are out of patience and the order is that of arrival.

    Preempted is the youngest.
    """

    name = "hrrn"

    def __init__(self, patience_s: float = 30.0, output_share: float = 0.5, ratio: float = 1.25) -> None:
        super().__init__()  # its queue holds everybody in order of arrival
        if not patience_s >= 0:
            raise ValueError(f"patience_s is {patience_s}; it must be a number of seconds, 0 or more")
        if not 0 <= output_share <= 1:
            raise ValueError(f"output_share is {output_share}; it must be between 0 and 1")
        if not 1 < ratio < float("inf"):
            raise ValueError(
                f"ratio is {ratio}; classes of service need a number greater than 1, such as 1.25"
            )
        self.patience_s, self.output_share, self.ratio = patience_s, output_share, ratio
        self._classes: dict[int, WaitingQueue] = {}  # without empty ones
        self._class_of: dict[int, int] = {}  # by arrival, for those that wait

    def service(self, sequence: Sequence) -> float:
        """Tokens that a request is expected to cost, 1 at least."""
        unsampled = sequence.max_tokens - len(sequence.output)
        return max(1.0, sequence.length + self.output_share * unsampled)

    def push(self, sequence: Sequence, now: float) -> None:
        super().push(sequence, now)
        number = math.floor(math.log(self.service(sequence), self.ratio))
        self._class_of[sequence.arrival] = number
        self._classes.setdefault(number, WaitingQueue()).push(sequence.arrival, sequence)

    def first(self, now: float) -> Sequence | None:
        oldest = super().first(now)
        if oldest is None or now - oldest.arrived > self.patience_s:
            return oldest
        heads = [head for queue in self._classes.values() if (head := queue.first()) is not None]
        return min(heads, key=lambda head: self._rank(head, now))

    def _rank(self, sequence: Sequence, now: float) -> tuple[float, float, int]:
        service = self.service(sequence)
        return -(now - sequence.arrived) / service, service, sequence.arrival

    def pop(self, now: float) -> Sequence:
        sequence = self.first(now)
        if sequence is None:
            return super().pop(now)  # raises
        self.discard(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        super().discard(sequence)
        number = self._class_of.pop(sequence.arrival, None)
        if number is None:
            return
        self._classes[number].discard(sequence)
        if not self._classes[number]:
            del self._classes[number]

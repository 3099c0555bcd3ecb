"""When the device worked and when it waited, as seen from the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(slots=True)
class Span:
    """One program on the device, in clock seconds."""

    start: float
    end: float
    idle: float  # seconds the device waited before it for the host
    exact: bool  # both ends were seen, or it was at least this much faster than predicted


class DeviceClock:
    """Reconstructs the device's time line from what the host sees: when it launches a program and when it waits for
    its result. Programs run in the order of their launch.

    The end of a program is exact when the host was there waiting; otherwise it was earlier, and the prediction of the
    cost model stands in for it.
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self._free_at = 0.0  # when the last program that was read ended
        self._exact = False
        self._idle_counts = False  # the device stands idle because of the host, not for lack of work

    def out_of_work(self) -> None:
        """Nothing is left to do: until the next launch the device does not wait for the host."""
        self._idle_counts = False

    def expected_start(self, launched: float) -> float:
        """When a program launched at ``launched`` started or will start, if all before it have been read."""
        return max(launched, self._free_at)

    def finished(self, launched: float, waited: bool, predicted: float) -> Span:
        """The next program in order has ended. ``waited``: its result was not there yet when the host asked for it."""
        now = self.clock()
        self._free_at = min(self._free_at, now)  # a clock may be set back
        start = max(launched, self._free_at)
        early = 0.0 < now - start < predicted  # not seen, but it was over before it was expected to be
        exact = (waited or early) and (self._exact or launched >= self._free_at)
        end = now if waited or not predicted else min(now, start + predicted)
        end = max(end, start)
        idle = max(0.0, launched - self._free_at) if self._idle_counts else 0.0
        self._free_at, self._exact, self._idle_counts = end, waited or early, True
        return Span(start, end, idle, exact)

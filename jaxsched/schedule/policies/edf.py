"""Earliest deadline first."""

from __future__ import annotations

from typing import Any

from ..sequence import Sequence
from .base import Policy


class Edf(Policy):
    """By the time at which the first token is wanted; a request without one gets ``default_s`` seconds.

    Liu and Layland 1973, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", section 7.
    If the work can be done in time at all, on one server that may be interrupted, this order does it; under overload
    many deadlines may be missed by a little. A deadline that is over at arrival counts as the time of arrival.

    Bound: a request is overtaken only by requests that arrive before its deadline: without a deadline of its own, only
    by those that arrive less than ``default_s`` seconds after it.
    """

    name = "edf"

    def __init__(self, default_s: float = 10.0) -> None:
        super().__init__()
        if not 0 <= default_s < float("inf"):
            raise ValueError(f"default_s is {default_s}; it must be a number of seconds, 0 or more")
        self.default_s = default_s

    def key(self, sequence: Sequence) -> Any:
        if sequence.deadline is None:
            return sequence.arrived + self.default_s
        return max(sequence.deadline, sequence.arrived)

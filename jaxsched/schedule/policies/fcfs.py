"""First come, first served."""

from __future__ import annotations

from typing import Any

from ..sequence import Sequence
from .base import Policy


class Fcfs(Policy):
    """By arrival. A round is what its controller chose.

    Nobody is overtaken: a request that does not fit keeps those behind it waiting, and prompts are read one after the
    other, each to its end.
    """

    name = "fcfs"

    def key(self, sequence: Sequence) -> Any:
        return sequence.arrival

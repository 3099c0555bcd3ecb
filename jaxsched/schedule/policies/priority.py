"""By priority, with ageing."""

from __future__ import annotations

from typing import Any

from ..sequence import Sequence
from .base import Policy


class Priority(Policy):
    """Lower ``priority`` first, as in vLLM; whoever waits ``ageing_s`` seconds gains one level.

    Ageing is linear and the same for all (Jackson 1960, "Some Problems in Queueing with Dynamic Priorities"), so the
    order of two requests never changes and the key ``priority * ageing_s + arrived`` is fixed at arrival.

    Bound: a request is overtaken only by requests of lower ``priority`` that arrive less than (difference of
    priorities) * ``ageing_s`` seconds after it. With ``ageing_s=None`` the order is strict: equals by arrival, and no
    bound, as traffic of a lower number may keep a request waiting for ever.
    """

    name = "priority"

    def __init__(self, ageing_s: float | None = 10.0) -> None:
        super().__init__()
        if ageing_s is not None and not 0 < ageing_s < float("inf"):
            raise ValueError(
                f"ageing_s is {ageing_s}; it must be a positive number of seconds per level, or None for no ageing"
            )
        self.ageing_s = ageing_s

    def key(self, sequence: Sequence) -> Any:
        if self.ageing_s is None:
            return sequence.priority
        return sequence.priority * self.ageing_s + sequence.arrived

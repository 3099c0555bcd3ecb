"""Shortest remaining prefill first."""

from __future__ import annotations

from typing import Any

from ..sequence import Sequence
from .base import Policy


class Srpf(Policy):
    """By the number of tokens to read before the first new token; waiting is worth ``ageing_tokens_per_s``.

    Shortest remaining processing time (Schrage 1968, "A Proof of the Optimality of the Shortest Remaining Processing
    Time Discipline"), counted in prompt tokens: the least mean time to the first token. The key is
    ``length + ageing_tokens_per_s * arrived``. What a preempted sequence has to read again counts as unread. Parts of a
    prompt that are cached count too. A prompt that is being read is not put back for a shorter one.

    Bound: a request is overtaken only by shorter ones that arrive less than (difference of lengths) /
    ``ageing_tokens_per_s`` seconds after it. With ``ageing_tokens_per_s=None`` (pure) there is none: a long prompt
    starves as long as enough short ones arrive.
    """

    name = "srpf"

    def __init__(self, ageing_tokens_per_s: float | None = 1000.0) -> None:
        super().__init__()
        if ageing_tokens_per_s is not None and not 0 < ageing_tokens_per_s < float("inf"):
            raise ValueError(
                f"ageing_tokens_per_s is {ageing_tokens_per_s}; it must be a positive number, or None for no ageing"
            )
        self.ageing_tokens_per_s = ageing_tokens_per_s

    def key(self, sequence: Sequence) -> Any:
        if self.ageing_tokens_per_s is None:
            return sequence.length
        return sequence.length + self.ageing_tokens_per_s * sequence.arrived

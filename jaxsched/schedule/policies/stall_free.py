"""First come, first served, and decodes never pause: the default."""

from __future__ import annotations

import dataclasses

from ..load import Choice, Load
from .fcfs import Fcfs


class StallFree(Fcfs):
    """The order of ``fcfs``; prompts ride along in mixed steps and no running decode waits for them.

    After Sarathi-Serve (Agrawal et al. 2024, "Taming Throughput-Latency Tradeoff in LLM Inference with
    Sarathi-Serve", stall-free batching). Who is next is decided as in ``fcfs``. The one difference:
    ``fcfs`` leaves it to the round's controller whether decodes pause while prompts are read, this policy forbids it.
    Under a controller that never pauses them the two do the same.
    """

    name = "stall-free"

    def shape(self, load: Load, choice: Choice) -> Choice:
        return choice if choice.decode else dataclasses.replace(choice, decode=True)

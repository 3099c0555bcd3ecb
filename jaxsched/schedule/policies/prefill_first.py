"""Prompts before decodes, for comparison."""

from __future__ import annotations

import dataclasses

from ..load import Choice, Load
from .fcfs import Fcfs


class PrefillFirst(Fcfs):
    """While there are prompts to read, running decodes pause.

    As in vLLM before chunked prefill (Agrawal et al. 2024, Sarathi-Serve, on prefill-prioritising schedulers): a
    short time to the first token, and running decodes stall for as long as prompts keep coming, without a bound.
    Requests are taken by arrival. Every step of such a round may read prompts. When no slot or no page is free and
    every admitted prompt is read, decodes go on, since only their ending makes room.
    """

    name = "prefill-first"

    def shape(self, load: Load, choice: Choice) -> Choice:
        can_admit = load.waiting > 0 and load.free_slots > 0 and load.free_pages > 0
        if not (load.unread_tokens or can_admit):
            return choice
        return dataclasses.replace(
            choice, mixed=choice.steps, decode=False, admit=True, reason="prefill-first: decodes pause"
        )

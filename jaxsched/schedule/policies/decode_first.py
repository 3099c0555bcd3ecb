"""Decodes before prompts, for comparison."""

from __future__ import annotations

import dataclasses

from ..load import Choice, Load
from .fcfs import Fcfs


class DecodeFirst(Fcfs):
    """No request is admitted while another decodes.

    Request-level batching as in FasterTransformer (Agrawal et al. 2024, Sarathi-Serve, on decode-prioritising
    schedulers): a batch runs until its last member ends, so no new prompt disturbs its decodes, and slots stand empty
    meanwhile. Requests are taken by arrival; a batch is what one round can admit,
    and prompts that were admitted are read to their end. A preempted sequence comes back with the next batch.
    """

    name = "decode-first"

    def shape(self, load: Load, choice: Choice) -> Choice:
        if load.decoding == 0:
            return choice
        return dataclasses.replace(choice, admit=False, reason="decode-first: a batch is running")

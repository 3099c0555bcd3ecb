"""Runs planned rounds on the device, asynchronously."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxsched.config import Resolved
from jaxsched.schedule import RoundPlan
from jaxsched.step import NO_TOKEN, EngineState
from jaxsched.step.programs import Programs, Segment

from .pack import pack_chunks, pack_updates


@dataclasses.dataclass(frozen=True)
class RoundHandle:
    """A round on its way. ``parts`` are the tokens of its segments, still on the device."""

    parts: list[tuple[Segment, jax.Array]]
    steps: int
    num_slots: int

    def tokens(self) -> list[list[int]]:
        """Waits for the round; ``[slot][step]`` token ids, NO_TOKEN where nothing was sampled."""
        table = np.full((self.steps, self.num_slots), NO_TOKEN, np.int32)
        for segment, tokens in self.parts:
            table[segment.first : segment.first + segment.key.steps, : segment.key.slots] = np.asarray(tokens)
        return table.T.tolist()


class Executor:
    """Holds parameters and state; turns a plan into dispatched programs. Both executors are this class:

    with the programs of "scan" a round is a few compiled scans, with those of "dispatch" it is one program per step.
    """

    def __init__(self, programs: Programs, params: Any, state: EngineState, resolved: Resolved):
        self.programs, self.params, self.state, self.resolved = programs, params, state, resolved

    def submit(self, plan: RoundPlan) -> RoundHandle:
        """Packs and dispatches a round without waiting for it, and starts copying its tokens to the host."""
        limits, slots = self.resolved.limits, self.resolved.limits.num_slots
        if plan.changes_slots:
            stop_ids = self.state.slots.stop_ids.shape[1]
            updates = pack_updates(plan, slots, stop_ids, limits.max_new_pages)
            self.state = self.programs.update(self.state, updates)
        variants = self.resolved.variants
        sampling = variants[0] if plan.sampling or len(variants) == 1 else variants[1]
        sizes = [step.tokens for step in plan.mixed]
        parts = []
        for segment in self.programs.segments(sizes, plan.steps, plan.slots, sampling):
            key, chunks = segment.key, None
            if key.chunk_tokens:
                chunks = pack_chunks(
                    plan.mixed[segment.first : segment.first + key.steps], key.chunk_tokens, slots
                )
            self.state, tokens = self.programs.run(key, self.params, self.state, chunks)
            tokens.copy_to_host_async()
            parts.append((segment, tokens))
        return RoundHandle(parts, plan.steps, slots)

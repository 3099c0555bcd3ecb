"""Runs planned rounds on the device, asynchronously."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxsched.config import Resolved
from jaxsched.schedule import RoundPlan
from jaxsched.step import NO_TOKEN, EngineState
from jaxsched.step.programs import Programs, Segment

from .pack import pack_chunks, pack_updates


@dataclasses.dataclass(slots=True)
class Part:
    """One segment of a round on its way."""

    segment: Segment
    launched: float  # clock seconds
    result: jax.Array  # tokens [steps, slots], still on the device

    def ready(self) -> bool:
        """Whether ``tokens`` would return at once."""
        return self.result.is_ready()  # type: ignore[attr-defined]

    def tokens(self, num_slots: int) -> list[list[int]]:
        """Waits for the segment; ``[slot][step]`` token ids, NO_TOKEN where nothing was sampled."""
        key = self.segment.key
        table = np.full((num_slots, key.steps), NO_TOKEN, np.int32)
        table[: key.slots] = np.asarray(self.result).T
        return table.tolist()


class Executor:
    """Holds parameters and state; turns a plan into dispatched programs. Both executors are this class:

    with the programs of "scan" a round is a few compiled scans, with those of "dispatch" it is one program per step.
    """

    def __init__(
        self,
        programs: Programs,
        params: Any,
        state: EngineState,
        resolved: Resolved,
        clock: Callable[[], float],
    ):
        self.programs, self.params, self.state = programs, params, state
        self.resolved, self.clock = resolved, clock

    def submit(self, plan: RoundPlan) -> list[Part]:
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
                steps = plan.mixed[segment.first : segment.first + key.steps]
                chunks = pack_chunks(steps, key.chunk_tokens, slots, decode=plan.decode)
            self.state, tokens = self.programs.run(key, self.params, self.state, chunks)
            tokens.copy_to_host_async()
            parts.append(Part(segment, self.clock(), tokens))
        return parts

"""Counters of a running engine."""

from __future__ import annotations

import dataclasses

from jaxsched.schedule import RoundPlan


@dataclasses.dataclass
class EngineStats:
    """Sums since the engine was made."""

    rounds: int = 0
    steps: int = 0
    mixed_steps: int = 0
    chunks: int = 0  # pieces of prompts read
    prompt_tokens: int = 0  # prompt tokens read, replays after preemption included
    generation_tokens: int = 0
    preemptions: int = 0
    peak_pages: int = 0  # KV pages in use at most
    host_seconds: float = 0.0  # planning, packing, dispatching and committing

    def planned(self, plan: RoundPlan, seconds: float, pages: int) -> None:
        """Counts a round that was dispatched."""
        self.rounds += 1
        self.steps += plan.steps
        self.mixed_steps += len(plan.mixed)
        self.chunks += sum(len(step.pieces) for step in plan.mixed)
        self.prompt_tokens += sum(step.tokens for step in plan.mixed)
        self.preemptions += plan.preempted
        self.peak_pages = max(self.peak_pages, pages)
        self.host_seconds += seconds

    def committed(self, plan: RoundPlan, tokens: int, seconds: float) -> None:
        """Counts the tokens of a round that has come back."""
        self.generation_tokens += tokens
        self.host_seconds += seconds

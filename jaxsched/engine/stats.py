"""Counters of a running engine."""

from __future__ import annotations

import dataclasses

from jaxsched.metrics import RoundRecord
from jaxsched.schedule import RoundPlan


@dataclasses.dataclass
class EngineStats:
    """Sums since the engine was made. ``EngineMetrics`` has these and much more, under vLLM's names."""

    rounds: int = 0
    steps: int = 0
    mixed_steps: int = 0
    chunks: int = 0  # pieces of prompts read
    prompt_tokens: int = 0  # prompt tokens read, replays after preemption included, cached ones not
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    generation_tokens: int = 0
    wasted_tokens: int = 0  # row-steps planned for a sequence that had ended
    preemptions: int = 0
    peak_pages: int = 0  # KV pages in use at most
    host_seconds: float = 0.0  # planning, packing, dispatching, committing and handing out
    device_seconds: float = 0.0  # what the device took
    idle_seconds: float = 0.0  # how long it waited for the host while there was work

    def planned(self, plan: RoundPlan, record: RoundRecord) -> None:
        """Counts a round that was dispatched."""
        self.rounds += 1
        self.steps += plan.steps
        self.mixed_steps += len(plan.mixed)
        self.chunks += sum(len(step.pieces) for step in plan.mixed)
        self.prompt_tokens += record.prefill_tokens
        self.cached_tokens += plan.hits
        self.preemptions += plan.preempted
        self.peak_pages = max(self.peak_pages, record.pages_used)

    def committed(self, record: RoundRecord) -> None:
        """Counts the tokens and times of a round that has come back."""
        self.generation_tokens += record.decode_tokens
        self.wasted_tokens += sum(record.wasted.values())
        self.host_seconds += sum(us for phase, us in record.host_us.items() if phase != "wait") / 1e6
        self.device_seconds += record.device_us / 1e6
        self.idle_seconds += record.idle_us / 1e6

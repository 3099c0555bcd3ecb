"""The budgets of the scheduler."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Derived by ``EngineConfig.resolve``; every number the scheduler obeys."""

    num_slots: int  # S
    num_pages: int  # P
    page_size: int  # Z, positions per page
    max_model_len: int  # tokens of prompt and output together
    num_steps: int  # N, steps per round
    chunk_tokens: int  # C, prompt tokens per mixed step at most
    slot_buckets: tuple[int, ...]  # rising; the last one is num_slots
    split_prompts: bool  # chunked prefill; False: a prompt is read whole in one step
    max_new_pages: int  # page-table entries that one round may change
    prefix_caching: bool = True  # full pages are kept and found by their content
    whole_pages: bool = False  # prompts are cut between pages only; chunk_tokens holds a page then

    def pages_for(self, positions: int) -> int:
        """Pages that hold ``positions`` KV positions."""
        return -(-positions // self.page_size)

    @property
    def longest(self) -> int:
        """Tokens of prompt and output that one sequence can have with the whole pool to itself.

        The last sampled token needs no KV position.
        """
        return min(self.max_model_len, self.num_pages * self.page_size + 1)

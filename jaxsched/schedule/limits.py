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
    window: int | None = None  # positions that a query sees, its own among them, in every layer; None: all

    def pages_for(self, positions: int) -> int:
        """Pages that hold ``positions`` KV positions."""
        return -(-positions // self.page_size)

    def behind(self, position: int) -> int:
        """Pages at the beginning of a sequence of which no query at ``position`` or later sees anything."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.page_size

    @property
    def pages_at_once(self) -> int | None:
        """Pages that one sequence owns at a time, at most, however long it is; None without a window.

        What a step's first query sees, the chunk, and what a round adds; the window begins within a page.
        """
        if self.window is None:
            return None
        return self.pages_for(self.window + self.chunk_tokens + self.num_steps) + 1

    def need(self, positions: int) -> int:
        """Pages that a sequence of ``positions`` KV positions must be able to own at a time."""
        pages, most = self.pages_for(positions), self.pages_at_once
        return pages if most is None else min(pages, most)

    @property
    def longest(self) -> int:
        """Tokens of prompt and output that one sequence can have with the whole pool to itself.

        The last sampled token needs no KV position.
        """
        most = self.pages_at_once
        if most is not None and most <= self.num_pages:
            return self.max_model_len
        return min(self.max_model_len, self.num_pages * self.page_size + 1)

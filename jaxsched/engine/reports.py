"""What a request wants to know beside its tokens: log-probabilities, prompt log-probabilities, pooled hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxsched.request import Logprob

Decode = Callable[[int], str | None]
Entry = dict[int, Logprob]


def entries_of(
    found: Any,
    at: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    width: int,
    listed: Sequence[int],
    decode: Decode,
) -> list[Entry]:
    """A dict for each token: itself, then the ``width`` best, then the ``listed`` ids.

    ``found``: ``step.Logprobs`` as numpy arrays with two leading axes, of which ``at`` names the places.
    """
    rows, columns = np.array(at, np.intp).reshape(-1, 2).T
    chosen, rank = found.chosen[rows, columns].tolist(), found.rank[rows, columns].tolist()
    ids, top = found.top_ids[rows, columns, :width].tolist(), found.top[rows, columns, :width].tolist()
    more = found.listed[rows, columns, : len(listed)].tolist() if listed else [()] * len(tokens)
    entries = []
    for i, token in enumerate(tokens):
        entry = {token: Logprob(chosen[i], rank[i], decode(token))}
        for place, (other, value) in enumerate(zip(ids[i], top[i], strict=True), 1):
            if other != token:
                entry[other] = Logprob(value, place, decode(other))
        for other, value in zip(listed, more[i], strict=True):
            if other not in entry:
                entry[other] = Logprob(value, None, decode(other))
        entries.append(entry)
    return entries


@dataclasses.dataclass
class PromptReport:
    """What is reported of a prompt, as its rows come in. ``pooling``: "last", "mean", or "" for none.

    Log-probabilities are reported of the tokens behind row ``start`` and later; before there is None.
    """

    prompt: list[int]
    width: int = -1  # of the log-probabilities; -1 = none
    pooling: str = ""
    start: int = 0
    logprobs: list[Entry | None] = dataclasses.field(default_factory=list)
    total: Any = None  # float64 [E], sum of the hidden states
    rows: int = 0  # prompt rows that have been taken in, or are not needed

    def __post_init__(self) -> None:
        if self.pooling:
            self.start = len(self.prompt) - 1 if self.pooling == "last" and self.width < 0 else 0
        self.start = self.rows = min(self.start, len(self.prompt) - 1)
        self.logprobs = [None] * (self.start + 1)

    def add(self, outputs: Any, step: int, row: int, start: int, length: int, decode: Decode) -> None:
        """Rows ``start .. start+length-1`` of the prompt are rows ``row ...`` of the outputs of a mixed step.

        Rows that came before (they are read again after a preemption) are passed over.
        """
        skip = max(self.rows - start, 0)
        stop = min(start + length, len(self.prompt))
        first, row = start + skip, row + skip
        if stop <= first:
            return
        if self.width >= 0:
            targets = self.prompt[first + 1 : stop + 1]
            places = [(step, row + i) for i in range(len(targets))]
            self.logprobs += entries_of(outputs.prompt_logprobs, places, targets, self.width, (), decode)
        if self.pooling:
            hidden = outputs.prompt_hidden[step, row : row + stop - first]
            if self.pooling == "last":
                self.total = hidden[-1].astype(np.float64)
            else:
                added = hidden.sum(axis=0, dtype=np.float64)
                self.total = added if self.total is None else self.total + added
        self.rows = stop

    @property
    def complete(self) -> bool:
        return self.rows >= len(self.prompt)

    def embedding(self) -> list[float] | None:
        """The pooled hidden state ``[E]``; None if none was asked for."""
        if self.total is None:
            return None
        embedding: list[float] = (self.total / (len(self.prompt) if self.pooling == "mean" else 1)).tolist()
        return embedding

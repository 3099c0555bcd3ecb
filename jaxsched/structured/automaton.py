"""A constraint as tables over token ids, for the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """A finite automaton whose letters are tokens. States are 0..Q-1, 0 is the start; from each, an end can be reached.

    A token t of a state q is allowed if its bit in ``mask[mask_of[q]]`` is set. It leads to the state that the edge
    (q, t) names or, without such an edge, to ``default[q]``.
    """

    mask: np.ndarray  # uint32 [R, ceil(V / 32)]: distinct sets of allowed tokens, bit t % 32 of word t // 32
    mask_of: np.ndarray  # int32 [Q]: the row of mask
    accepting: (
        np.ndarray
    )  # bool [Q]: the text so far is complete; an end-of-sequence token (in no mask) may follow
    final: np.ndarray  # bool [Q]: accepting, and no token is allowed
    default: np.ndarray  # int32 [Q]: next state of allowed tokens without an edge; -1 where there are none
    edge_start: np.ndarray  # int32 [Q + 1]: edges of q are edge_start[q] : edge_start[q + 1]
    edge_token: np.ndarray  # int32 [E], rising within a state
    edge_next: np.ndarray  # int32 [E]
    vocab_size: int  # V
    key: str  # hash of constraint and vocabulary

    @property
    def num_states(self) -> int:
        return len(self.mask_of)

    @property
    def num_edges(self) -> int:
        return len(self.edge_token)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        tables = (self.mask, self.mask_of, self.accepting, self.final, self.default)
        return sum(t.nbytes for t in (*tables, self.edge_start, self.edge_token, self.edge_next))

    def allows(self, state: int, token: int) -> bool:
        """Whether ``token`` may follow in ``state``; False for ids that are not in the vocabulary."""
        if not 0 <= token < self.vocab_size:
            return False
        return bool(int(self.mask[self.mask_of[state], token // 32]) >> (token % 32) & 1)

    def next(self, state: int, token: int) -> int:
        """The state after ``token``; -1 if it is not allowed."""
        if not self.allows(state, token):
            return -1
        start, end = int(self.edge_start[state]), int(self.edge_start[state + 1])
        at = start + int(np.searchsorted(self.edge_token[start:end], token))
        if at < end and self.edge_token[at] == token:
            return int(self.edge_next[at])
        return int(self.default[state])

    def run(self, tokens: Iterable[int], state: int = 0) -> int:
        """The state after ``tokens``; -1 if one of them is not allowed."""
        for token in tokens:
            state = self.next(state, token)
            if state < 0:
                return -1
        return state

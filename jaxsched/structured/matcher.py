"""A constraint along one sequence, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .automaton import TokenAutomaton


class Matcher(Protocol):
    """Follows one sequence. Not safe to use from several threads at once."""

    @property
    def accepting(self) -> bool:
        """The text so far is complete: an end-of-sequence token may follow."""
        ...

    @property
    def final(self) -> bool:
        """Accepting, and nothing else may follow."""
        ...

    def allowed(self, out: np.ndarray) -> None:
        """Fills ``out`` (uint32 [ceil(V / 32)]) with the tokens that may follow, without those that end a sequence.

        Bit t % 32 of word t // 32 is token t. All zeros while not accepting means that the sequence cannot go on
        (only a grammar can get there; see ``GrammarMatcher.error``).
        """
        ...

    def push(self, token: int) -> bool:
        """Takes a sampled token. False if it is not allowed; then nothing has changed."""
        ...


class AutomatonMatcher:
    """A Matcher over a TokenAutomaton."""

    def __init__(self, automaton: TokenAutomaton, state: int = 0):
        self._automaton = automaton
        self.state = state

    @property
    def accepting(self) -> bool:
        return bool(self._automaton.accepting[self.state])

    @property
    def final(self) -> bool:
        return bool(self._automaton.final[self.state])

    def allowed(self, out: np.ndarray) -> None:
        out[:] = self._automaton.mask[self._automaton.mask_of[self.state]]

    def push(self, token: int) -> bool:
        following = self._automaton.next(self.state, token)
        if following >= 0:
            self.state = following
        return following >= 0


@dataclass(frozen=True, eq=False)
class GrammarTables:
    """What the matchers of one grammar share."""

    tokens: tuple[bytes, ...]  # by token id, b"" for those without text; see vocabulary.py
    first: tuple[bytes, ...]
    ids: Mapping[bytes, int]  # the library's id of each piece, single bytes included
    twins: (
        np.ndarray
    )  # int64 [2, n]: tokens that the library does not have, and those of equal bytes that it has
    start: np.ndarray  # uint32 [ceil(V / 32)]: the tokens that may come first


class GrammarMatcher:
    """A Matcher over llguidance.

    A first token with other bytes than later on (a stripped space) is looked up in ``GrammarTables.start`` and taken
    byte by byte.
    """

    def __init__(self, inner: Any, tables: GrammarTables):
        """``inner``: an LLMatcher at its start."""
        self._inner, self._tables = inner, tables
        self._begun = False

    @property
    def accepting(self) -> bool:
        return not self._inner.is_error() and bool(self._inner.is_accepting())

    @property
    def final(self) -> bool:
        return self.accepting and bool(self._inner.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on, such as a limit of the parser; None as long as it can."""
        return str(self._inner.get_error()) if self._inner.is_error() else None

    def allowed(self, out: np.ndarray) -> None:
        if self._begun:
            fill(self._inner, out, self._tables.twins)
        else:
            out[:] = self._tables.start

    def push(self, token: int) -> bool:
        tables = self._tables
        known = tables.tokens if self._begun else tables.first
        if self._inner.is_error() or not 0 <= token < len(known) or not known[token]:
            return False
        piece = known[token]
        path = [tables.ids[piece]] if piece in tables.ids else [tables.ids[bytes([byte])] for byte in piece]
        taken = self._inner.validate_tokens(path) == len(path) and bool(self._inner.consume_tokens(path))
        self._begun = self._begun or taken
        return taken


def fill(inner: Any, out: np.ndarray, twins: np.ndarray) -> None:
    """The mask of an LLMatcher, in ``out`` (uint32 [W]), and the ``twins`` of its tokens; zeros if it has stopped."""
    if inner.is_error() or inner.is_stopped():
        out[:] = 0
        return
    out[:] = np.frombuffer(inner.compute_bitmask(), np.uint32, len(out))
    copy, original = twins
    bit = out[original // 32] >> (original % 32).astype(np.uint32) & np.uint32(1)
    np.bitwise_or.at(out, copy // 32, bit << (copy % 32).astype(np.uint32))

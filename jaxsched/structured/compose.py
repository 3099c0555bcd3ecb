"""Bytes to tokens: walks the trie of a vocabulary from the states of an automaton over bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from .automaton import TokenAutomaton
from .dfa import ByteDfa, Trie, build_trie, ranges, spread
from .vocabulary import Vocabulary

MAX_EDGES = 8_000_000  # 64 MB
MAX_MASK_BYTES = 256 << 20
_WIDE = 64  # a state with so many possible bytes walks most of the trie
_WIDE_BATCH, _NARROW_BATCH = 4, 128  # states walked at once


class TooLarge(Exception):
    """A limit is exceeded; the message says which."""


@dataclass(eq=False)
class Composer:
    """Makes token automata for one vocabulary. Safe to use from several threads."""

    vocabulary: Vocabulary
    _inner: Trie = field(init=False)
    _first: Trie = field(init=False)

    def __post_init__(self) -> None:
        self._inner = build_trie(self.vocabulary.tokens)
        self._first = build_trie(self.vocabulary.first) if self.vocabulary.strips else self._inner

    def compose(self, dfa: ByteDfa, key: str, deadline: float) -> TokenAutomaton | None:
        """The automaton of the token sequences whose text ``dfa`` accepts; None if there are none.

        ``deadline`` is a time of time.monotonic(). Raises TooLarge.
        """
        dead = np.zeros(len(dfa.step) + 1, bool)
        while True:
            # States of the walk: those of the DFA, and a last one which is its start as the first token sees it.
            walk = _Walk(self, dfa, dead, deadline)
            walk.run()
            alive = walk.alive()
            if not alive[walk.start]:
                return None
            if alive[walk.seen].all():
                return walk.tables(key)
            # Rare: bytes that no token spells lead to a dead end. Once more, without what leads there.
            dead |= ~alive


def _sorted(key: np.ndarray, items: np.ndarray, size: int) -> np.ndarray:
    """``items`` by rising key. Keys are distinct and below ``size``."""
    if len(items) * 8 < size:
        return items[np.argsort(key[items])]
    place = np.full(size, -1, np.int64)  # faster when most keys are there
    place[key[items]] = items
    return place[place >= 0]


class _Walk:
    def __init__(self, composer: Composer, dfa: ByteDfa, dead: np.ndarray, deadline: float):
        self._composer, self._dfa, self._dead, self._deadline = composer, dfa, dead, deadline
        self.size = composer.vocabulary.size
        self._words = -(-self.size // 32)
        self.start = len(dfa.step) if composer.vocabulary.strips else 0
        self.seen = np.zeros(len(dfa.step) + 1, bool)
        self._step = np.concatenate([dfa.step, dfa.step[:1]])
        self._wide = (self._step >= 0).sum(1) >= _WIDE
        self._rows: dict[bytes, int] = {}
        self._mask_of = np.zeros(len(dfa.step) + 1, np.int32)
        self._default = np.full(len(dfa.step) + 1, -1, np.int32)
        self._edges: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # state, token, next
        self._num_edges = 0
        self._graph: list[tuple[np.ndarray, np.ndarray]] = []  # state, next: each pair once

    def run(self) -> None:
        """Visits all states that can be reached at the end of a token."""
        waiting = np.array([self.start])
        self.seen[self.start] = True
        while len(waiting):
            wide = waiting[self._wide[waiting]]
            narrow = waiting[~self._wide[waiting]]
            batches = [wide[i : i + _WIDE_BATCH] for i in range(0, len(wide), _WIDE_BATCH)]
            batches += [narrow[i : i + _NARROW_BATCH] for i in range(0, len(narrow), _NARROW_BATCH)]
            found = np.unique(np.concatenate([self._visit(batch) for batch in batches]))
            waiting = found[~self.seen[found]]
            self.seen[waiting] = True

    def alive(self) -> np.ndarray:
        """bool [Q + 1]: tokens can lead to an accepting state."""
        reached = np.append(self._dfa.accepting, self._dfa.accepting[0])
        pairs = [np.concatenate(column) for column in zip(*self._graph, strict=True)]
        spread(reached, pairs[1], pairs[0])
        return reached

    def _visit(self, states: np.ndarray) -> np.ndarray:
        """Walks from ``states``, notes their tables, and returns the states that their tokens lead to."""
        if time.monotonic() > self._deadline:
            raise TooLarge("the time limit")
        start = states == self.start
        parts = []
        if start.any():
            parts.append(self._walk(np.flatnonzero(start), states, self._composer._first))
        if not start.all():
            parts.append(self._walk(np.flatnonzero(~start), states, self._composer._inner))
        origin, token, target = (np.concatenate(column) for column in zip(*parts, strict=True))
        allowed = ~self._dead[target]
        order = _sorted(origin * self.size + token, np.flatnonzero(allowed), len(states) * self.size)
        origin, token, target = origin[order], token[order], target[order]
        self._note_masks(states, origin, token)
        return self._note_edges(states, origin, token, target)

    def _walk(self, origins: np.ndarray, states: np.ndarray, trie: Trie) -> tuple[np.ndarray, ...]:
        """(origin: index in ``states``, token, state after it) of every token that can follow."""
        origin, state = origins, states[origins].astype(np.int64)
        node = np.zeros(len(origins), np.int64)
        out: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        while len(node):
            first, last = trie.child_start[node], trie.child_start[node + 1]
            child = ranges(first, last)
            count = last - first
            target = self._step[np.repeat(state, count), trie.byte[child]]
            keep = np.flatnonzero(target >= 0)
            node, state, origin = child[keep], target[keep], np.repeat(origin, count)[keep]
            first, last = trie.token_start[node], trie.token_start[node + 1]
            count = last - first
            out.append((np.repeat(origin, count), trie.token[ranges(first, last)], np.repeat(state, count)))
        return tuple(np.concatenate(column) for column in zip(*out, strict=True))

    def _note_masks(self, states: np.ndarray, origin: np.ndarray, token: np.ndarray) -> None:
        bounds = np.searchsorted(origin, np.arange(len(states) + 1))
        for i, state in enumerate(states):
            bits = np.zeros(self._words * 32, bool)
            bits[token[bounds[i] : bounds[i + 1]]] = True
            row = np.packbits(bits, bitorder="little").tobytes()
            self._mask_of[state] = self._rows.setdefault(row, len(self._rows))
        if len(self._rows) * self._words * 4 > MAX_MASK_BYTES:
            raise TooLarge(f"{MAX_MASK_BYTES >> 20} MiB of masks")

    def _note_edges(
        self, states: np.ndarray, origin: np.ndarray, token: np.ndarray, target: np.ndarray
    ) -> np.ndarray:
        pair, count = np.unique(origin * (len(self._dead) + 1) + target, return_counts=True)
        source, to = np.divmod(pair, len(self._dead) + 1)
        common = np.full(len(states), -1, np.int64)
        rising = np.argsort(count, kind="stable")
        common[source[rising]] = to[rising]  # the last write, with the largest count, stays
        self._default[states] = common
        self._graph.append((states[source], to))
        other = np.flatnonzero(target != common[origin])
        self._num_edges += len(other)
        if self._num_edges > MAX_EDGES:
            raise TooLarge(f"{MAX_EDGES:,} edges")
        self._edges.append((states[origin[other]], token[other], target[other]))
        return np.unique(to)

    def tables(self, key: str) -> TokenAutomaton:
        """The automaton of the states seen, numbered from the start."""
        rest = np.setdiff1d(np.flatnonzero(self.seen), [self.start])
        order = np.concatenate([[self.start], rest])
        number = np.full(len(self._dead) + 1, -1, np.int32)
        number[order] = np.arange(len(order))
        source, token, target = (np.concatenate(column) for column in zip(*self._edges, strict=True))
        by_state = np.argsort(number[source], kind="stable")  # tokens rise within a state already
        accepting = np.append(self._dfa.accepting, self._dfa.accepting[0])[order]
        default = number[self._default[order]]
        return TokenAutomaton(
            mask=np.frombuffer(b"".join(self._rows), np.uint32).reshape(-1, self._words),
            mask_of=self._mask_of[order],
            accepting=accepting,
            final=accepting & (default < 0),
            default=default,
            edge_start=np.searchsorted(number[source][by_state], np.arange(len(order) + 1)).astype(np.int32),
            edge_token=token[by_state].astype(np.int32),
            edge_next=number[target[by_state]],
            vocab_size=self.size,
            key=key,
        )

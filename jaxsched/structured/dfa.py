"""Automata over bytes, and the trie of a vocabulary: what a TokenAutomaton is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# U+10FFFF, which is no character and stands for the end of the text; see ``cut_at_end``.
END = "\U0010ffff".encode()


@dataclass(frozen=True, eq=False)
class ByteDfa:
    """State 0 is the start. From every state (but possibly the start) an accepting one can be reached."""

    step: np.ndarray  # int32 [Q, 256]: next state, -1 if the byte is not allowed
    accepting: np.ndarray  # bool [Q]

    @property
    def empty(self) -> bool:
        """No text is accepted."""
        return not self.accepting.any()


def cut_at_end(step: np.ndarray, start: int, matched: np.ndarray) -> ByteDfa:
    """The automaton of R, from one of "R, then END" whose matching states are ``matched`` (bool [Q]).

    The regex library looks for the first of several alternatives and drops the others where a shorter one matches
    (a|ab never gives "ab"). An end mark makes all alternatives equally long. Accepting are then the states from which
    END leads to a match. Texts with that character inside may be lost, no others.
    """
    after = np.arange(len(step))
    for byte in END:
        after = np.where(after >= 0, step[after, byte], -1)
    return trim(step, start, (after >= 0) & matched[after])


def trim(step: np.ndarray, start: int, accepting: np.ndarray) -> ByteDfa:
    """Keeps the states that lie on a way from the start to an accepting state, and renumbers them from the start."""
    source, byte = np.nonzero(step >= 0)
    target = step[source, byte]
    forward, backward = np.zeros(len(step), bool), accepting.copy()
    forward[start] = True
    spread(forward, source, target)
    spread(backward, target, source)
    keep = forward & backward
    keep[start] = True
    order = np.concatenate([[start], np.setdiff1d(np.flatnonzero(keep), [start])])
    number = np.full(len(step) + 1, -1, np.int32)  # one more, so that -1 stays -1
    number[order] = np.arange(len(order))
    return ByteDfa(number[step[order]], accepting[order])


def spread(reached: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
    """Marks in ``reached`` (bool [Q]) all that the edges source -> target lead to from there."""
    by_source = np.argsort(source, kind="stable")
    target = target[by_source]
    start = np.searchsorted(source[by_source], np.arange(len(reached) + 1))
    frontier = np.flatnonzero(reached)
    while len(frontier):
        found = np.unique(target[ranges(start[frontier], start[frontier + 1])])
        frontier = found[~reached[found]]
        reached[frontier] = True


def ranges(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """start[0]..end[0]-1, start[1]..end[1]-1, ... in one array."""
    count = end - start
    shift = np.repeat(start - np.concatenate([[0], np.cumsum(count)[:-1]]), count) if len(count) else 0
    return np.arange(int(count.sum())) + shift


def from_words(words: Sequence[bytes], max_states: int) -> ByteDfa | None:
    """Accepts exactly ``words``: their trie. None if it has more than ``max_states`` states."""
    table: list[dict[int, int]] = [{}]
    ends = set()
    for word in words:
        state = 0
        for byte in word:
            state = table[state].setdefault(byte, len(table))
            if state == len(table):
                table.append({})
                if len(table) > max_states:
                    return None
        ends.add(state)
    step = np.full((len(table), 256), -1, np.int32)
    for state, row in enumerate(table):
        for byte, target in row.items():
            step[state, byte] = target
    accepting = np.zeros(len(table), bool)
    accepting[list(ends)] = True
    return ByteDfa(step, accepting)


@dataclass(frozen=True, eq=False)
class Trie:
    """All tokens by their bytes. Node 0 is the root; a node's children are consecutive."""

    byte: np.ndarray  # uint8 [N]: the last byte of the node
    child_start: np.ndarray  # int64 [N + 1]: children of n are child_start[n] : child_start[n + 1]
    token_start: (
        np.ndarray
    )  # int64 [N + 1]: tokens that end in n are token[token_start[n] : token_start[n + 1]]
    token: np.ndarray  # int32


def build_trie(pieces: Sequence[bytes]) -> Trie:
    """The trie of ``pieces``, by token id; ids with b"" are left out."""
    length = np.array([len(piece) for piece in pieces], np.int64)
    offset = np.cumsum(length) - length
    flat = np.frombuffer(b"".join(pieces), np.uint8)
    node = np.zeros(len(pieces), np.int64)  # where each token is so far
    active = np.flatnonzero(length > 0)
    bytes_, parents, total, depth = [np.zeros(1, np.uint8)], [np.zeros(0, np.int64)], 1, 0
    while len(active):
        steps = node[active] * 256 + flat[offset[active] + depth]
        unique, inverse = np.unique(steps, return_inverse=True)
        node[active] = total + inverse
        bytes_.append((unique % 256).astype(np.uint8))
        parents.append(unique // 256)
        total, depth = total + len(unique), depth + 1
        active = active[length[active] > depth]
    # Nodes are numbered level by level and by parent within a level, so parents rise.
    child_start = 1 + np.searchsorted(np.concatenate(parents), np.arange(total + 1))
    tokens = np.flatnonzero(length > 0)
    order = tokens[np.argsort(node[tokens], kind="stable")]
    token_start = np.searchsorted(node[order], np.arange(total + 1))
    return Trie(np.concatenate(bytes_), child_start, token_start, order.astype(np.int32))

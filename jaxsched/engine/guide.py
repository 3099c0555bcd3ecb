"""The constraint of one sequence, and where the automata of all of them lie on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxsched.schedule import Finish
from jaxsched.step.controls import EDGES, STATES, mask_rows, mask_words, token_mask


class Region:
    """Rows of a table, given out in runs, first fit."""

    def __init__(self, first: int, stop: int):
        self.stop = stop
        self._free = [(first, stop)]  # rising, never adjacent

    def take(self, count: int) -> int | None:
        """The first row of ``count`` free ones, or None."""
        for i, (first, stop) in enumerate(self._free):
            if stop - first >= count:
                self._free[i : i + 1] = [(first + count, stop)] if stop - first > count else []
                return first
        return None

    def give(self, first: int, count: int) -> None:
        """Takes a run back."""
        joined: list[tuple[int, int]] = []
        for begin, stop in sorted([*self._free, (first, first + count)] if count else self._free):
            if joined and joined[-1][1] == begin:
                begin = joined.pop()[0]
            joined.append((begin, stop))
        self._free = joined


@dataclasses.dataclass
class Place:
    """Where an automaton lies in the pool: first mask, first state, first edge."""

    automaton: Any
    at: tuple[int, int, int]
    uploaded: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        return sizes_of(self.automaton)


def sizes_of(automaton: Any) -> tuple[int, int, int]:
    """Masks, states and edges of an automaton."""
    return len(automaton.mask), len(automaton.mask_of), len(automaton.edge_token)


class Places:
    """The pool of automata as the host sees it. Those of running sequences stay, the others go when room is needed."""

    def __init__(
        self, num_slots: int, vocab: int, eos_token_ids: Iterable[int], running: Callable[[], Iterable[Any]]
    ):
        self.vocab, self.eos_token_ids, self.words = vocab, tuple(eos_token_ids), mask_words(vocab)
        self._regions = [
            Region(num_slots + 1, mask_rows(num_slots, vocab)),
            Region(num_slots + 1, num_slots + 1 + STATES),
            Region(0, EDGES),
        ]
        self._room = tuple(region.stop - region._free[0][0] for region in self._regions)
        self._places: dict[str, Place] = {}  # least recently used first
        self._running = running
        self.eos = token_mask(self.eos_token_ids, vocab)

    def fits(self, automaton: Any) -> bool:
        """Whether the automaton fits into an empty pool."""
        return all(size <= room for size, room in zip(sizes_of(automaton), self._room, strict=True))

    def __getitem__(self, key: str) -> Place:
        return self._places[key]

    def reserve(self, automaton: Any) -> bool:
        """Finds room for an automaton, if need be by forgetting some that nobody runs with. False: there is none."""
        if automaton.key in self._places:
            self._places[automaton.key] = self._places.pop(automaton.key)
            return True
        if not self.fits(automaton):
            return False
        place = self._take(automaton)
        if place is None:
            used = {s.guide.key for s in self._running() if s.guide is not None}
            for key in [key for key in self._places if key not in used]:
                self._forget(key)
                place = self._take(automaton)
                if place is not None:
                    break
        if place is not None:
            self._places[automaton.key] = place
        return place is not None

    def _take(self, automaton: Any) -> Place | None:
        taken: list[int] = []
        for region, size in zip(self._regions, sizes_of(automaton), strict=True):
            at = region.take(size) if size else 0
            if at is None:
                for other, first, count in zip(self._regions, taken, sizes_of(automaton), strict=False):
                    other.give(first, count)
                return None
            taken.append(at)
        return Place(automaton, (taken[0], taken[1], taken[2]))

    def _forget(self, key: str) -> None:
        place = self._places.pop(key)
        for region, first, count in zip(self._regions, place.at, place.sizes, strict=True):
            region.give(first, count)

    def clear_device(self) -> None:
        """The device has forgotten everything."""
        for place in self._places.values():
            place.uploaded = False


class Guide:
    """What one sequence may generate: a constraint and how far it has been followed.

    ``prefix``: tokens that the constraint has seen before the sequence's own output (of a fork's parent).
    """

    def __init__(self, constraint: Any, places: Places, eos_allowed: bool, prefix: tuple[int, ...] = ()):
        self.constraint, self.prefix, self.eos_allowed = constraint, prefix, eos_allowed
        self._places: Places | None = places
        self._matcher: Any = None
        self._followed = 0  # tokens of prefix and output that the matcher has seen
        self._words: np.ndarray | None = None  # what is allowed next

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_places": None, "_matcher": None, "_followed": 0, "_words": None}

    def attach(self, places: Places, compile: Callable[[Any], Any]) -> None:
        """After unpickling: tables and matchers of a constraint do not travel, so it is compiled again."""
        self._places, self.constraint = places, compile(self.constraint.spec)

    @property
    def places(self) -> Places:
        assert self._places is not None, "attach() comes first"
        return self._places

    @property
    def key(self) -> str:
        """Of the automaton; empty where there is none."""
        automaton = self.constraint.automaton
        return "" if automaton is None else automaton.key

    @property
    def level(self) -> str:
        """Where the output is constrained: on the "device", or on the "host" where the tables are too large for it."""
        automaton = self.constraint.automaton
        return "device" if automaton is not None and self.places.fits(automaton) else "host"

    def on_device(self) -> bool:
        """Whether the sequence, which is about to get a slot, can be followed on the device."""
        automaton = self.constraint.automaton
        return automaton is not None and self.places.reserve(automaton)

    def device_state(self, output: list[int]) -> int:
        """The state after ``output`` in the pool on the device."""
        automaton = self.constraint.automaton
        state = automaton.run([*self.prefix, *output])
        assert state >= 0, "the output does not follow the constraint"
        return self.places[automaton.key].at[1] + state

    def follow(self, output: list[int]) -> Finish | None:
        """Takes what is new in ``output`` and prepares the next mask.

        STOP when nothing can follow any more, ERROR when the matcher gives up (a parser has limits of its own).
        """
        if self._matcher is None:
            self._matcher = self.constraint.matcher()
        self._words = np.zeros(self.places.words, np.uint32)
        tokens = (*self.prefix, *output) if self.prefix else output
        for token in tokens[self._followed :]:
            if not self._matcher.push(token):
                return Finish.ERROR
        self._followed = len(tokens)
        if self._matcher.final:
            return Finish.STOP
        self._matcher.allowed(self._words)
        if self.eos_allowed and self._matcher.accepting:
            self._words |= self.places.eos
        return None

    def words(self, output: list[int]) -> np.ndarray:
        """The mask of what may follow ``output``, ``[U]``; empty where nothing may, which the device finds out."""
        if self._words is None or self._followed != len(self.prefix) + len(output):
            self.follow(output)
        assert self._words is not None
        return self._words

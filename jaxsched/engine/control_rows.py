"""Controls of requests on their way to the device: dense rows, automata, masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxsched.schedule import RoundPlan, Sequence
from jaxsched.step import ControlRows, Controls, init_controls
from jaxsched.step.control_updates import (
    GRANTS,
    grant_step,
    load_bias,
    load_counts,
    load_row,
    load_tables,
    move_tables,
    table_blocks,
    update_rows,
)
from jaxsched.step.controls import FREE, IN_PROMPT, MAX_BAD_WORD_TOKENS, neutral_rows

from .guide import Places

REPETITION = (1e-30, 1e30)  # beyond, float32 would make infinities of logits


@dataclasses.dataclass(frozen=True, slots=True)
class ControlSpec:
    """The controls of a sequence beside its constraint, checked, in numbers."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    min_tokens: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None  # None = all
    bad_words: tuple[tuple[int, ...], ...] = ()  # of two and more tokens
    listed: tuple[int, ...] = ()

    @property
    def counted(self) -> bool:
        """Whether it matters which tokens have been seen."""
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)

    @property
    def biased(self) -> bool:
        return bool(self.bias) or self.allowed is not None


def control_row(spec: ControlSpec, sequence: Sequence, vocab: int) -> ControlRows:
    """The small fields of a sequence that is about to go on; no slot axis."""
    row = jax.tree.map(lambda x: x[0], neutral_rows(1, vocab))
    size, guide = MAX_BAD_WORD_TOKENS, sequence.guide
    recent = sequence.tokens(max(sequence.length - size, 0), sequence.length)
    row.recent[size - len(recent) :] = recent
    for i, word in enumerate(spec.bad_words):
        row.bad_prefix[i, size - len(word) + 1 :] = word[:-1]
        row.bad_last[i] = word[-1]
    row.listed[: len(spec.listed)] = spec.listed
    state, grant = FREE, row.grant
    if guide is not None and sequence.hosted:
        grant = np.int32(0)
    elif guide is not None:
        state = guide.device_state(sequence.output)
    return dataclasses.replace(
        row,
        repetition=np.float32(np.clip(spec.repetition, *REPETITION)),
        frequency=np.float32(spec.frequency),
        presence=np.float32(spec.presence),
        biased=np.bool_(spec.biased),
        min_tokens=np.int32(spec.min_tokens),
        state=np.int32(state),
        eos_allowed=np.bool_(guide is None or guide.eos_allowed),
        grant=grant,
    )


def token_counts(sequence: Sequence, vocab: int) -> np.ndarray:
    """``Controls.counts`` of one sequence, ``[V]``."""
    counts = np.bincount(sequence.output, minlength=vocab).astype(np.int32)
    counts[np.unique(sequence.prompt)] += IN_PROMPT
    return counts


def bias_row(spec: ControlSpec, vocab: int) -> np.ndarray:
    """``Controls.bias`` of one sequence, ``[V]``."""
    bias = np.zeros(vocab, np.float32)
    if spec.allowed is not None:
        bias[:] = -np.inf
        bias[list(spec.allowed)] = 0
    for token, value in spec.bias:
        bias[token] += value
    return bias


class ControlLoader:
    """Keeps the controls on the device in step with the plans.

    ``stale``: slots changed hands while nobody had controls, so what the rows say belongs to nobody.
    """

    def __init__(self, num_slots: int, places: Places):
        self.num_slots, self.vocab, self.places = num_slots, places.vocab, places
        self.stale = True

    def new(self) -> Controls:
        """Controls on the device, in which nothing runs."""
        self.stale = True
        self.places.clear_device()
        return init_controls(self.num_slots, self.vocab, self.places.eos_token_ids)

    def update(self, controls: Controls, plan: RoundPlan, reload: Iterable[Sequence]) -> Controls:
        """The controls before a round: rows move with their slots, new owners get theirs, masks are granted.

        ``reload``: running sequences whose rows the device does not have.
        """
        loads = {sequence: slot for slot, sequence in plan.admits} | {
            s: s.slot for s in reload if s.slot >= 0
        }
        if plan.moves or loads or self.stale:
            source = np.arange(self.num_slots, dtype=np.int32)
            for old, new in plan.moves:
                source[new] = old
            clear = np.full(self.num_slots, self.stale)
            clear[list(loads.values())] = True
            controls = update_rows(controls, source, clear)
            if plan.moves:
                controls = move_tables(controls, source)
            self.stale = False
        for sequence, slot in loads.items():
            if sequence.row.controls:
                controls = self._load(controls, slot, sequence)
        return self._grant(controls, plan)

    def _load(self, controls: Controls, slot: int, sequence: Sequence) -> Controls:
        at, spec = np.int32(slot), sequence.row.spec
        if sequence.guide is not None and not sequence.hosted:
            controls = self._upload(controls, sequence.guide.key)
        controls = load_row(controls, at, control_row(spec, sequence, self.vocab))
        if spec.counted:
            controls = load_counts(controls, at, token_counts(sequence, self.vocab))
        if spec.biased:
            controls = load_bias(controls, at, bias_row(spec, self.vocab))
        return controls

    def _upload(self, controls: Controls, key: str) -> Controls:
        place = self.places[key]
        if not place.uploaded:
            for at, tables in table_blocks(place.automaton, *place.at, controls.automata):
                controls = load_tables(controls, at, tables)
            place.uploaded = True
        return controls

    def _grant(self, controls: Controls, plan: RoundPlan) -> Controls:
        """Masks for the sequences that the host follows: one token each in this round."""
        entries = [entry for entry in plan.entries if entry.sequence.hosted] if plan.hosted else []
        for i in range(0, len(entries), GRANTS):
            slots = np.full(GRANTS, self.num_slots, np.int32)
            masks = np.zeros((GRANTS, self.places.words), np.uint32)
            for j, entry in enumerate(entries[i : i + GRANTS]):
                slots[j] = entry.slot
                masks[j] = entry.sequence.guide.words(entry.sequence.output)
            controls = grant_step(controls, slots, masks)
        return controls

    def warm_up(self, controls: Controls) -> Controls:
        """Calls each program once, without effect."""
        slots, words = self.num_slots, self.places.words
        source = np.arange(slots, dtype=np.int32)
        row: Any = jax.tree.map(lambda x: x[0], neutral_rows(1, self.vocab))
        controls = move_tables(update_rows(controls, source, np.ones(slots, bool)), source)
        controls = load_row(controls, np.int32(0), row)
        controls = load_counts(controls, np.int32(0), np.zeros(self.vocab, np.int32))
        controls = load_bias(controls, np.int32(0), np.zeros(self.vocab, np.float32))
        controls = grant_step(
            controls, np.full(GRANTS, slots, np.int32), np.zeros((GRANTS, words), np.uint32)
        )
        pool = controls.automata
        end = (pool.masks.shape[0], pool.mask_of.shape[0], pool.edge_token.shape[0])
        for at, tables in table_blocks(_NoAutomaton(words), *end, pool):
            controls = load_tables(controls, at, tables)
        return controls


class _NoAutomaton:
    """An automaton without states."""

    def __init__(self, words: int):
        self.mask = np.zeros((0, words), np.uint32)
        self.mask_of = self.default = self.edge_token = self.edge_next = np.zeros(0, np.int32)
        self.accepting = self.final = np.zeros(0, bool)
        self.edge_start = np.zeros(1, np.int32)

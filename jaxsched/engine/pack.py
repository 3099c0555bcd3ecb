"""A round plan as arrays of fixed shape."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxsched.schedule import MixedStep, RoundPlan
from jaxsched.step import Chunks, SlotUpdates

from .control_rows import ControlSpec

NO_CONTROLS = ControlSpec()


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingRow:
    """The sampling parameters of a sequence as they go into the slot table."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int  # 64 bits
    stop_ids: tuple[int, ...]
    greedy: bool
    controls: bool = False  # it needs the programs with controls
    width: int = -1  # log-probabilities that are reported of each token; -1 = none
    logprobs: int = -1  # the most that it needs of the device, prompt included
    prompt: str = ""  # what is reported of its prompt rows, as in Features
    spec: ControlSpec = NO_CONTROLS
    adapter: int = 0  # place of its adapter on the device; 0 = none


def pack_updates(
    plan: RoundPlan, num_slots: int, max_stop_ids: int, max_new_pages: int, adapters: bool = False
) -> SlotUpdates:
    """Slot updates of a plan. New arrays each time: the device may still read those of the last round."""
    updates = SlotUpdates.empty(num_slots, max_stop_ids, max_new_pages, adapters)
    for old, new in plan.moves:
        updates.source[new] = old
    updates.drop[plan.drops] = True
    for slot, sequence in plan.admits:
        row: SamplingRow = sequence.row
        updates.admit[slot] = True
        updates.tokens_left[slot] = sequence.max_tokens - len(sequence.output)
        updates.output_pos[slot] = len(sequence.output)
        updates.stop_ids[slot, : len(row.stop_ids)] = row.stop_ids
        if updates.adapter is not None:
            updates.adapter[slot] = row.adapter
        sampling = updates.sampling
        sampling.temperature[slot] = row.temperature
        sampling.top_k[slot] = row.top_k
        sampling.top_p[slot] = row.top_p
        sampling.min_p[slot] = row.min_p
        sampling.seed[slot] = (row.seed >> 32, row.seed & 0xFFFF_FFFF)
    count = len(plan.pages)
    if count:
        table = np.array(plan.pages, np.int32)
        updates.page_slot[:count], updates.page_index[:count], updates.page_id[:count] = table.T
    return updates


def pack_chunks(steps: list[MixedStep], chunk_tokens: int, num_slots: int, *, decode: bool = True) -> Chunks:
    """The chunks of consecutive mixed steps, each padded to ``chunk_tokens``; live slots ``decode`` or pause."""
    chunks = Chunks.empty(len(steps), chunk_tokens, num_slots)
    chunks.pause[:] = not decode
    for i, step in enumerate(steps):
        row = 0
        for piece in step.pieces:
            stop, sequence = row + piece.length, piece.sequence
            chunks.tokens[i, row:stop] = sequence.tokens(piece.start, piece.start + piece.length)
            chunks.positions[i, row:stop] = np.arange(piece.start, piece.start + piece.length)
            chunks.slots[i, row:stop] = piece.slot
            if sequence.row.prompt:
                targets = sequence.tokens(piece.start + 1, piece.start + piece.length + 1)
                chunks.targets[i, row : row + len(targets)] = targets
            if piece.ends:
                chunks.end_row[i, piece.slot] = stop - 1
            row = stop
    return chunks

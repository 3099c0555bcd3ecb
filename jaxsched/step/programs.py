"""The bounded set of compiled programs, and how a round is put together from them.

A round is a chain of segments: mixed steps one by one (each is long enough to hide its dispatch), then runs of decode
steps, each a compiled scan. Segments are dispatched one after the other without waiting, so the host is not involved
between them. Programs:

* one that changes the slot table,
* decode: scans of some lengths, 1 among them, for the full slot table, and of fewer lengths for smaller slot buckets,
* mixed: for the full slot table, and for one smaller slot bucket (``mixed_slots``), each chunk bucket,

each with as many sampling variants as the platform needs. So the number is a sum over buckets, not a product. The
dispatch executor has only the programs of one step.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from flax import nnx

from .inputs import Chunks, Features, SlotUpdates
from .round import decode_steps, prefill_chunk, update_slots
from .state import EngineState


@dataclasses.dataclass(frozen=True, order=True)
class ProgramKey:
    """Which program: ``chunk_tokens`` 0 means decode steps; ``steps`` 0 means the slot-table update."""

    steps: int
    chunk_tokens: int
    slots: int
    sampling: str  # as in Features

    @property
    def rows(self) -> int:
        """Token rows of one step."""
        return self.slots + self.chunk_tokens


UPDATE = ProgramKey(0, 0, 0, "")


def program_keys(
    *,
    lengths: tuple[int, ...],
    small_lengths: tuple[int, ...],
    slot_buckets: tuple[int, ...],
    mixed_slots: tuple[int, ...],
    chunk_buckets: tuple[int, ...],
    variants: tuple[str, ...],
) -> list[ProgramKey]:
    """All programs an engine may ever run, see the module's text. ``small_lengths``: for smaller slot buckets."""
    slots = slot_buckets[-1]
    sizes = {(steps, 0, slots) for steps in lengths}
    sizes |= {(steps, 0, small) for small in slot_buckets[:-1] for steps in small_lengths}
    sizes |= {(1, chunk, rows) for chunk in chunk_buckets for rows in mixed_slots}
    return [UPDATE, *sorted(ProgramKey(*size, variant) for size in sizes for variant in variants)]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Steps ``first .. first + key.steps - 1`` of a round, run by one program."""

    key: ProgramKey
    first: int


class Programs:
    """Compiled programs by key. Calling one never traces and never compiles."""

    def __init__(self, keys: Iterable[ProgramKey]):
        self.keys = tuple(keys)
        self._compiled: dict[ProgramKey, Any] = {}

    def compile(
        self,
        model: nnx.GraphDef,
        params: Any,
        state: EngineState,
        max_new_pages: int,
        *,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compiles everything, in ``threads`` threads (default: one per core, at most 8).

        ``params`` and ``state`` may be arrays or their shapes. ``progress`` is called with the number of programs done
        and their total.
        """
        params, state = jax.tree.map(_shape_of, (params, state))

        def build(key: ProgramKey) -> None:
            self._compiled[key] = _lower(key, model, params, state, max_new_pages).compile()

        with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
            jobs = [pool.submit(build, key) for key in sorted(self.keys, key=lambda k: -k.rows)]
            try:
                for done, job in enumerate(jobs, 1):
                    job.result()
                    if progress is not None:
                        progress(done, len(jobs))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def update(self, state: EngineState, updates: SlotUpdates) -> EngineState:
        """The state after the host's changes to the slot table."""
        return self._compiled[UPDATE](state, updates)

    def run(
        self, key: ProgramKey, params: Any, state: EngineState, chunks: Chunks | None
    ) -> tuple[EngineState, jax.Array]:
        """Runs one segment; returns the state and tokens ``[key.steps, key.slots]``."""
        args = (params, state) if chunks is None else (params, state, chunks)
        return self._compiled[key](*args)

    def segments(self, chunk_sizes: list[int], steps: int, slots: int, sampling: str) -> Iterator[Segment]:
        """Cuts a round into segments: mixed steps that read ``chunk_sizes`` tokens, then decode steps up to ``steps``.

        A mixed step takes the program with the fewest rows that holds it; equal neighbours are joined.
        """
        wanted = [self._narrowest(size, slots, sampling) for size in chunk_sizes]
        wanted += [(0, self._narrowest(0, slots, sampling)[1])] * (steps - len(chunk_sizes))
        first = 0
        while first < steps:
            run = 1
            while first + run < steps and wanted[first + run] == wanted[first]:
                run += 1
            chunk, rows = wanted[first]
            fitting = (
                k for k in self.keys if k.sampling == sampling and (k.chunk_tokens, k.slots) == (chunk, rows)
            )
            key = max((k for k in fitting if 1 <= k.steps <= run), key=lambda k: k.steps)
            yield Segment(key, first)
            first += key.steps

    def _narrowest(self, chunk: int, slots: int, sampling: str) -> tuple[int, int]:
        fitting = (
            k
            for k in self.keys
            if k.sampling == sampling
            and k.slots >= slots
            and k.chunk_tokens >= chunk
            and (k.chunk_tokens > 0) == (chunk > 0)
        )
        best = min(fitting, key=lambda k: (k.rows, k.chunk_tokens))
        return best.chunk_tokens, best.slots


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _lower(key: ProgramKey, model: nnx.GraphDef, params: Any, state: EngineState, max_new_pages: int) -> Any:
    num_slots, stop_ids = state.slots.stop_ids.shape
    if key == UPDATE:
        return update_slots.lower(state, SlotUpdates.empty(num_slots, stop_ids, max_new_pages))
    features = Features(sampling=key.sampling)
    if key.chunk_tokens == 0:
        return decode_steps.lower(model, params, state, steps=key.steps, slots=key.slots, features=features)
    chunks = Chunks.empty(key.steps, key.chunk_tokens, num_slots)
    return prefill_chunk.lower(model, params, state, chunks, slots=key.slots, features=features)

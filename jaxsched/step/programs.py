"""The bounded set of compiled programs, and how a round is put together from them.

A round is a chain of segments: mixed steps one by one (each is long enough to hide its dispatch), then runs of decode
steps, each a compiled scan. Segments are dispatched one after the other without waiting, so the host is not involved
between them. Programs:

* one that changes the slot table,
* decode: scans of some lengths, 1 among them, for the full slot table, and of fewer lengths for smaller slot buckets,
* mixed: for the full slot table, and for one smaller slot bucket (``mixed_slots``), each chunk bucket,

each with as many sampling variants as the platform needs. So the number is a sum over buckets, not a product. The
dispatch executor has only the programs of one step. Each exists once more for each set of features that requests ask
for (controls, log-probabilities); those are compiled at the start or on first use.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from flax import nnx

from .inputs import PROMPT_OUTPUTS, Chunks, Features, SlotUpdates, StepOutputs
from .round import decode_steps, prefill_chunk, update_slots
from .state import EngineState

PLAIN = Features()
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, order=True)
class ProgramKey:
    """Which program: ``chunk_tokens`` 0 means decode steps; ``steps`` 0 means the slot-table update."""

    steps: int
    chunk_tokens: int
    slots: int
    features: Features = PLAIN

    @property
    def rows(self) -> int:
        """Token rows of one step."""
        return self.slots + self.chunk_tokens

    @property
    def size(self) -> tuple[int, int, int]:
        """The key without its features."""
        return self.steps, self.chunk_tokens, self.slots


UPDATE = ProgramKey(0, 0, 0)


def program_keys(
    *,
    lengths: tuple[int, ...],
    small_lengths: tuple[int, ...],
    slot_buckets: tuple[int, ...],
    mixed_slots: tuple[int, ...],
    chunk_buckets: tuple[int, ...],
    features: tuple[Features, ...],
) -> list[ProgramKey]:
    """All programs of the given features, see the module's text. ``small_lengths``: for smaller slot buckets.

    What is reported of prompt rows concerns mixed steps only.
    """
    slots = slot_buckets[-1]
    sizes = {(steps, 0, slots) for steps in lengths}
    sizes |= {(steps, 0, small) for small in slot_buckets[:-1] for steps in small_lengths}
    sizes |= {(1, chunk, rows) for chunk in chunk_buckets for rows in mixed_slots}
    return [UPDATE, *sorted(ProgramKey(*s, f) for s in sizes for f in features if s[1] or not f.prompt)]


def feature_sets(
    samplings: tuple[str, ...], logprobs: tuple[int, ...], mode: str, attention: str
) -> tuple[Features, ...]:
    """Every combination of features that a round can need; ``logprobs`` are the widths that are reported."""
    return tuple(
        Features(sampling, controls, width, prompt, mode, attention)
        for sampling in samplings
        for controls in (False, True)
        for width in (-1, *logprobs)
        for prompt in PROMPT_OUTPUTS
        if width >= 0 or prompt in ("", "hidden")
    )


@dataclasses.dataclass(frozen=True)
class Segment:
    """Steps ``first .. first + key.steps - 1`` of a round, run by one program."""

    key: ProgramKey
    first: int


class Programs:
    """Compiled programs by key. Those that were asked for at the start never trace and never compile when called.

    Programs of the same sizes with other features are compiled when they are first called, which is logged.
    """

    def __init__(self, keys: Iterable[ProgramKey]):
        self.keys = tuple(keys)
        self._sizes = sorted({key.size for key in self.keys if key != UPDATE})
        self._compiled: dict[ProgramKey, Any] = {}
        self.late_seconds = 0.0  # spent on compiling what was called for the first time
        self._lower: Callable[[ProgramKey], Any] | None = None

    def compile(
        self,
        model: nnx.GraphDef,
        params: Any,
        state: EngineState,
        max_new_pages: int,
        *,
        controls: Any = None,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compiles everything, in ``threads`` threads (default: one per core, at most 8).

        ``params``, ``state`` and ``controls`` (of the programs whose features say so) may be arrays or their shapes.
        ``progress`` is called with the number of programs done and their total.
        """
        params, state, controls = jax.tree.map(_shape_of, (params, state, controls))

        def lower(key: ProgramKey) -> Any:
            return _lower(key, model, params, state, controls, max_new_pages)

        def build(key: ProgramKey) -> None:
            self._compiled[key] = lower(key).compile()

        self._lower = lower
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
        """The state after the host's changes to the slot table. Controls are left alone."""
        controls, state = state.controls, dataclasses.replace(state, controls=None)
        state = self._compiled[UPDATE](state, updates)
        return dataclasses.replace(state, controls=controls)

    def run(
        self, key: ProgramKey, params: Any, state: EngineState, chunks: Chunks | None
    ) -> tuple[EngineState, StepOutputs]:
        """Runs one segment; returns the state and what ``key.steps`` steps of ``key.slots`` slots produced."""
        program = self._compiled.get(key) or self._compile_late(key)
        controls = state.controls
        if not key.features.controls:
            state = dataclasses.replace(state, controls=None)
        args = (params, state) if chunks is None else (params, state, chunks)
        state, outputs = program(*args)
        if not key.features.controls:
            state = dataclasses.replace(state, controls=controls)
        return state, outputs

    def _compile_late(self, key: ProgramKey) -> Any:
        assert self._lower is not None, "compile() comes first"
        begin = time.monotonic()
        program = self._compiled[key] = self._lower(key).compile()
        seconds = time.monotonic() - begin
        self.late_seconds += seconds
        logger.info("compiled %s in %.1f s on first use", key, seconds)
        return program

    def segments(
        self, chunk_sizes: list[int], steps: int, slots: int, features: Features, *, alone: int = 0
    ) -> Iterator[Segment]:
        """Cuts a round into segments: mixed steps that read ``chunk_sizes`` tokens, then decode steps up to ``steps``.

        A mixed step takes the program with the fewest rows that holds it; equal neighbours are joined, but the first
        ``alone`` steps stay by themselves, so that their results come early.
        """
        wanted = [self._narrowest(size, slots) for size in chunk_sizes]
        wanted += [(0, self._narrowest(0, slots)[1])] * (steps - len(chunk_sizes))
        first = 0
        while first < steps:
            run = 1
            while first + run < steps and first >= alone and wanted[first + run] == wanted[first]:
                run += 1
            fitting = (length for length, *rest in self._sizes if tuple(rest) == wanted[first])
            key = ProgramKey(max(n for n in fitting if n <= run), *wanted[first], features)
            yield Segment(key, first)
            first += key.steps

    def _narrowest(self, chunk: int, slots: int) -> tuple[int, int]:
        fitting = (
            (size, rows)
            for _, size, rows in self._sizes
            if rows >= slots and size >= chunk and (size > 0) == (chunk > 0)
        )
        return min(fitting, key=lambda s: (sum(s), s[0]))


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _lower(
    key: ProgramKey, model: nnx.GraphDef, params: Any, state: EngineState, controls: Any, max_new_pages: int
) -> Any:
    num_slots, stop_ids = state.slots.stop_ids.shape
    if key == UPDATE:
        adapters = state.slots.adapter is not None
        return update_slots.lower(state, SlotUpdates.empty(num_slots, stop_ids, max_new_pages, adapters))
    if key.features.controls:
        state = dataclasses.replace(state, controls=controls)
    options: Any = {"slots": key.slots, "features": key.features}
    if key.chunk_tokens == 0:
        return decode_steps.lower(model, params, state, steps=key.steps, **options)
    chunks = Chunks.empty(key.steps, key.chunk_tokens, num_slots)
    return prefill_chunk.lower(model, params, state, chunks, **options)

"""Runs planned rounds on the device, asynchronously."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxsched.config import Resolved
from jaxsched.schedule import MixedStep, RoundPlan, Sequence
from jaxsched.step import NO_TOKEN, EngineState, Features, StepOutputs, init_controls
from jaxsched.step.programs import Programs, Segment, feature_sets, program_keys

from .control_rows import ControlLoader
from .guide import Places
from .pack import pack_chunks, pack_updates

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Landed:
    """What one segment produced, on the host."""

    tokens: list[list[int]]  # [slot][step], NO_TOKEN where nothing was sampled
    ends: list[list[int]] | None  # [slot][step] finish codes, with controls
    outputs: StepOutputs  # numpy arrays


@dataclasses.dataclass(slots=True)
class Part:
    """One segment of a round on its way."""

    segment: Segment
    launched: float  # clock seconds
    result: StepOutputs  # still on the device

    def ready(self) -> bool:
        """Whether ``land`` would return at once."""
        return self.result.tokens.is_ready()  # type: ignore[attr-defined]

    def land(self, num_slots: int) -> Landed:
        """Waits for the segment."""
        outputs: StepOutputs = jax.tree.map(np.asarray, self.result)
        ends = None if outputs.ends is None else self._by_slot(outputs.ends, num_slots, 0)
        return Landed(self._by_slot(outputs.tokens, num_slots, NO_TOKEN), ends, outputs)

    def _by_slot(self, values: Any, num_slots: int, nothing: int) -> list[list[int]]:
        key = self.segment.key
        table = np.full((num_slots, key.steps), nothing, np.int32)
        table[: key.slots] = values.T
        return table.tolist()


class Executor:
    """Holds parameters and state; turns a plan into dispatched programs. Both executors are this class:

    with the programs of "scan" a round is a few compiled scans, with those of "dispatch" it is one program per step.
    """

    def __init__(
        self,
        programs: Programs,
        params: Any,
        state: EngineState,
        resolved: Resolved,
        controls: ControlLoader,
        clock: Callable[[], float],
    ):
        self.programs, self.params, self.state = programs, params, state
        self.resolved, self.clock = resolved, clock
        self.controls = controls
        self._reload: list[Sequence] = []  # running sequences whose controls the device does not have
        self._noticed: set[Features] = set(key.features for key in programs.keys)

    def submit(self, plan: RoundPlan) -> list[Part]:
        """Packs and dispatches a round without waiting for it, and starts copying its outputs to the host."""
        self._update(plan)
        slots = self.resolved.limits.num_slots
        features = self._features(plan)
        sizes = [step.tokens for step in plan.mixed]
        parts = []
        for segment in self.programs.segments(sizes, plan.steps, plan.slots, features, alone=plan.hosted):
            key, chunks = segment.key, None
            if key.chunk_tokens:
                steps = plan.mixed[segment.first : segment.first + key.steps]
                chunks = pack_chunks(steps, key.chunk_tokens, slots, decode=plan.decode)
                key = dataclasses.replace(key, features=_with_prompt(features, steps))
            self._notice(key.features)
            self.state, outputs = self.programs.run(key, self.params, self.state, chunks)
            for array in jax.tree.leaves(outputs):
                array.copy_to_host_async()
            parts.append(Part(segment, self.clock(), outputs))
        return parts

    def _update(self, plan: RoundPlan) -> None:
        limits, slots = self.resolved.limits, self.resolved.limits.num_slots
        if plan.changes_slots:
            stop_ids, adapters = self.state.slots.stop_ids.shape[1], self.state.slots.adapter is not None
            updates = pack_updates(plan, slots, stop_ids, limits.max_new_pages, adapters)
            self.state = self.programs.update(self.state, updates)
        if plan.controls:
            controls = self.state.controls
            if controls is None:
                controls = self.controls.new()
            controls = self.controls.update(controls, plan, self._reload)
            self.state = dataclasses.replace(self.state, controls=controls)
            self._reload = []
        elif plan.moves or plan.admits:
            self.controls.stale = True

    def _features(self, plan: RoundPlan) -> Features:
        """The least that serves everybody who runs."""
        resolved = self.resolved
        variants = resolved.variants
        sampling = variants[0] if plan.sampling or len(variants) == 1 else variants[1]
        width = -1
        if plan.logprobs >= 0:
            width = min(w for w in resolved.logprob_widths if w >= plan.logprobs)
        return Features(sampling, plan.controls, width, "", resolved.logprobs_mode, resolved.attention)

    def _notice(self, features: Features) -> None:
        if features not in self._noticed:
            self._noticed.add(features)
            logger.warning(
                "compiling programs for what a request asks for the first time: %s; this takes some seconds per "
                'program, less with a warm disk cache; warm_up="all" does it when the engine is made',
                _described(features),
            )

    def reload_controls(self, running: Iterable[Sequence]) -> None:
        """The state was replaced by one without controls: those of ``running`` must be loaded anew."""
        self.controls.stale = True
        self._reload = [sequence for sequence in running if sequence.row.controls]

    def warm_up_controls(self) -> None:
        """Makes the controls and calls the programs that change them, so that nothing compiles later."""
        controls = self.controls.new()
        for _ in range(2):  # the second time with arrays that such programs have made
            controls = self.controls.warm_up(controls)
        self.state = dataclasses.replace(self.state, controls=controls)


def new_executor(
    graph: nnx.GraphDef,
    params: Any,
    state: EngineState,
    resolved: Resolved,
    places: Places,
    clock: Callable[[], float],
    progress: Callable[[int, int], None] | None = None,
) -> Executor:
    """Compiles the programs and puts the device side of an engine together."""
    limits, vocab = resolved.limits, places.vocab
    features = feature_sets(
        resolved.variants, resolved.logprob_widths, resolved.logprobs_mode, resolved.attention
    )
    warm = resolved.warm_up == "all"
    programs = Programs(
        program_keys(
            lengths=resolved.lengths,
            small_lengths=resolved.small_lengths,
            slot_buckets=limits.slot_buckets,
            mixed_slots=resolved.mixed_slots,
            chunk_buckets=resolved.chunk_buckets,
            features=features if warm else tuple(f for f in features if f.plain),
        )
    )
    controls = jax.eval_shape(partial(init_controls, limits.num_slots, vocab, places.eos_token_ids))
    programs.compile(graph, params, state, limits.max_new_pages, controls=controls, progress=progress)
    executor = Executor(programs, params, state, resolved, ControlLoader(limits.num_slots, places), clock)
    if warm:
        executor.warm_up_controls()
    return executor


def _described(features: Features) -> str:
    """What a request must ask for to need these programs."""
    prompt = {
        "logprobs": ["prompt_logprobs"],
        "hidden": ["embeddings"],
        "both": ["prompt_logprobs and embeddings"],
    }
    parts = ["penalties, bias, stop conditions or structured output"] if features.controls else []
    parts += [f"logprobs (up to {features.logprobs})"] if features.logprobs >= 0 else []
    return " with ".join([*parts, *prompt.get(features.prompt, [])]) or "another way of sampling"


def _with_prompt(features: Features, steps: list[MixedStep]) -> Features:
    """``features`` with what these mixed steps report of their prompt rows."""
    wanted = {
        piece.sequence.row.prompt
        for step in steps
        for piece in step.pieces
        if piece.sequence.reads_from is not None and piece.start < len(piece.sequence.prompt)
    } - {""}
    if not wanted:
        return features
    prompt = "both" if len(wanted) > 1 else wanted.pop()
    return dataclasses.replace(features, prompt=prompt)

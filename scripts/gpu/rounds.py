"""Whole rounds of an 8B-shaped model with random weights, run by the project's own compiled programs.

Nothing is scheduled here: all slots decode from a fixed context. A round of N steps is one program of N (scan) or N
programs of one (dispatch). Rounds follow each other without waiting, and the tokens of a round are read while the next
one runs, as the engine does it.

Idle share, two ways. By ratio, in the table: 1 - (the best time per step of the load) / (time per step), what the
device waits beyond the best that was seen. By profile, for two rows: 1 - (time in which a kernel ran, per step, under
the profiler) / (time per step without it). Profiling turns CUDA graphs off, so there kernels are timed outside
graphs.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clock import busy_seconds
from facts import COPY, memory_limit, the_device
from flax import nnx
from job import Job

from jaxsched.models import Decoder, ModelConfig, RopeConfig
from jaxsched.pallas_kernels import AttentionShape, tuning
from jaxsched.pallas_kernels.ops import choose
from jaxsched.step import Chunks, EngineState, Features
from jaxsched.step.programs import ProgramKey, Programs
from jaxsched.step.state import init_slots

PAGE = 16
GREEDY = Features(sampling="greedy")
STEPS = (1, 4, 8, 16)  # N
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of the whole section. ``loads`` are (live slots, context)."""

    model: ModelConfig
    loads: tuple[tuple[int, int], ...]
    chunk: int
    timed: int  # steps per timing, at least
    note: str

    @property
    def margin(self) -> int:
        """Positions that a sequence may grow by."""
        return 4 * max(self.timed, STEPS[-1])

    def pages(self, slots: int, context: int) -> int:
        """Pages that a load takes."""
        return slots * -(-(context + self.margin) // PAGE)


def llama_8b(layers: int = 32) -> ModelConfig:
    """The shape of Llama 3 8B."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        max_position_embeddings=8192,
        ropes=(RopeConfig(theta=500_000.0),),
        dtype="bfloat16",
    )


def choose_scale(limit: int | None, *, dry_run: bool, layers: int = 32) -> Scale:
    """All 32 layers if weights and the largest cache fit into ``limit`` bytes, else fewer layers, then fewer slots."""
    if dry_run:
        small = dataclasses.replace(
            llama_8b(2),
            vocab_size=256,
            hidden_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=96,
        )
        return Scale(small, ((2, 24), (4, 16)), 16, 4, "dry run: 2 tiny layers")
    loads: tuple[tuple[int, int], ...] = ((64, 2048), (1, 2048), (256, 1024), (16, 2048))
    while True:
        for count in (n for n in (layers, 16, 8, 4) if n <= layers):
            scale = Scale(llama_8b(count), loads, 256, 32, f"{count} layers")
            pages = max(scale.pages(*load) for load in loads)
            cache = pages * PAGE * scale.model.kv_bytes_per_token(2)
            if limit is None or 2 * scale.model.num_parameters + cache < 0.8 * limit:
                return scale
        if len(loads) == 1:
            raise MemoryError(f"{limit} bytes are not enough for 4 layers and {loads[0]}")
        largest = max(loads, key=lambda load: load[0] * load[1])
        loads = tuple(load for load in loads if load != largest)


def random_model(config: ModelConfig) -> tuple[nnx.GraphDef, Any]:
    """Graph and bfloat16 parameters, made on the device."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, jnp.dtype("bfloat16"))))

    @partial(jax.jit, static_argnames=("shape", "std"))
    def normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(std)

    keys = iter(jax.random.split(jax.random.key(0), 1 + len(jax.tree.leaves(abstract))))

    def fill(leaf: Any) -> jax.Array:
        if len(leaf.shape) == 1:  # norm scales
            return jnp.ones(leaf.shape, leaf.dtype)
        return normal(next(keys), leaf.shape, leaf.shape[0] ** -0.5)

    return graph, jax.tree.map(fill, nnx.as_pure(abstract))


def random_state(scale: Scale) -> EngineState:
    """Pages full of random numbers and a slot table for the largest load, in which nothing runs."""
    model = scale.model
    pages = max(scale.pages(*load) for load in scale.loads)
    width = max(-(-(context + scale.margin) // PAGE) for _, context in scale.loads)
    shape = (pages, PAGE, model.num_kv_heads, model.head_dim)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    keys = jax.random.split(jax.random.key(1), 2 * model.num_layers)
    slots = init_slots(max(slots for slots, _ in scale.loads), pages, width, 1)
    return EngineState([make(k) for k in keys[::2]], [make(k) for k in keys[1::2]], slots)


def occupied(state: EngineState, slots: int, context: int, margin: int) -> EngineState:
    """``state`` with ``slots`` live slots of ``context`` positions, each with pages of its own in random order."""
    rng, table = np.random.default_rng(slots), state.slots
    count, width = table.block_table.shape
    need = -(-(context + margin) // PAGE)
    blocks = np.full((count, width), state.num_pages, np.int32)
    blocks[:slots, :need] = rng.permutation(state.num_pages)[: slots * need].reshape(slots, need)
    live = np.arange(count) < slots
    rows = dataclasses.replace(
        table,
        block_table=jnp.asarray(blocks),
        context_len=jnp.asarray(np.where(live, context, 0).astype(np.int32)),
        live=jnp.asarray(live),
        tokens_left=jnp.full((count,), 1 << 30, jnp.int32),
        last_token=jnp.asarray(rng.integers(0, 250, count).astype(np.int32)),
    )
    return dataclasses.replace(state, slots=rows)


def _title(key: ProgramKey) -> str:
    return f"{key.slots} slots N={key.steps}" + (f" C={key.chunk_tokens}" if key.chunk_tokens else "")


class Runner:
    """Model, state and programs of the section."""

    def __init__(self, job: Job, scale: Scale):
        self.job, self.scale = job, scale
        begin = time.perf_counter()
        self.graph, self.params = random_model(scale.model)
        self.state = random_state(scale)
        jax.block_until_ready((self.params, self.state))
        self.made = time.perf_counter() - begin
        self.programs: dict[ProgramKey, Programs] = {}
        self.each = 0.0  # seconds that a program takes to compile, from the latest batch
        self.found: dict[tuple[int, str, int], float] = {}  # (slots, executor, N) -> seconds per step

    def compile(self, keys: list[ProgramKey]) -> bool:
        """Compiles several programs at a time, as many as there is time for, in order; whether any was compiled."""
        keys = [key for key in keys if key not in self.programs]
        fitting = len(keys) if not self.each else max(0, int((self.job.left() - 3) / (1.3 * self.each)))
        for key in keys[fitting:]:
            self.job.left_out(_title(key), f"no time to compile it: about {self.each:.0f} s")
        if not (keys := keys[:fitting]):
            return False
        begin = time.perf_counter()
        programs = Programs(keys)
        programs.compile(self.graph, self.params, self.state, 1)
        seconds = time.perf_counter() - begin
        self.each = seconds / len(keys)
        self.programs |= dict.fromkeys(keys, programs)
        self.job.emit("compile " + "; ".join(map(_title, keys)), compiled=seconds, programs=len(keys))
        return True

    def rounds(self, key: ProgramKey, segments: int, count: int) -> None:
        """``count`` rounds of ``segments`` programs each."""
        programs = self.programs[key]
        previous: list[Any] = []
        for _ in range(count):
            tokens = []
            for _ in range(segments):
                self.state, outputs = programs.run(key, self.params, self.state, None)
                outputs.tokens.copy_to_host_async()
                tokens.append(outputs.tokens)
            for array in previous:
                np.asarray(array)
            previous = tokens
        for array in previous:
            assert (np.asarray(array) >= 0).all(), "a live slot sampled nothing"

    def per_step(self, slots: int, context: int, length: int, segments: int) -> float:
        """Seconds per step of rounds of ``segments`` programs of ``length`` steps; median of REPEATS."""
        key, steps = ProgramKey(length, 0, slots, GREEDY), length * segments
        count = -(-self.scale.timed // steps)
        times = []
        for number in range(1 + REPEATS):
            self.state = occupied(self.state, slots, context, self.scale.margin)
            jax.block_until_ready(self.state)
            begin = time.perf_counter()
            self.rounds(key, segments, 1 if number == 0 else count)  # the first is warm-up
            times.append((time.perf_counter() - begin) / (count * steps))
        return statistics.median(times[1:])

    def busy_per_step(self, slots: int, context: int, length: int, segments: int) -> float | None:
        """Seconds per step in which a kernel ran, from one profiled round; None if the profile has no GPU."""
        key, count = ProgramKey(length, 0, slots, GREEDY), max(1, 8 // (length * segments))
        self.state = occupied(self.state, slots, context, self.scale.margin)
        jax.block_until_ready(self.state)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.rounds(key, segments, count)
            files = sorted(Path(folder).rglob("*.xplane.pb"))
            busy = busy_seconds(jax.profiler.ProfileData.from_file(str(files[-1])).planes) if files else None
        return None if busy is None else busy / (count * length * segments)

    def mixed(self, slots: int, context: int) -> float:
        """Seconds of a step that reads a chunk beside ``slots`` decodes."""
        key = ProgramKey(1, self.scale.chunk, slots, GREEDY)
        chunks, times = self._chunk(key, slots, context), []
        for number in range(1 + 2 * REPEATS):
            self.state = occupied(self.state, slots, context, self.scale.margin)
            jax.block_until_ready(self.state)
            begin = time.perf_counter()
            self.state, outputs = self.programs[key].run(key, self.params, self.state, chunks)
            jax.block_until_ready(outputs)
            times += [time.perf_counter() - begin] if number else []
        return statistics.median(times)

    def _chunk(self, key: ProgramKey, slots: int, context: int) -> Chunks:
        # The chunk's rows overwrite the end of the last slot's context, so it needs no pages of its own.
        chunks = Chunks.empty(1, key.chunk_tokens, self.state.num_slots)
        rows = min(key.chunk_tokens, context)
        chunks.slots[0, :rows] = slots - 1
        chunks.positions[0, :rows] = np.arange(context - rows, context)
        chunks.tokens[0, :rows] = np.arange(rows) % 250
        return chunks


def least_bytes(scale: Scale, slots: int, context: int) -> int:
    """Bytes a decode step must read: every weight but the embedding table once, and the live cache."""
    model = scale.model
    return 2 * (
        model.num_parameters - model.vocab_size * model.hidden_size
    ) + slots * context * model.kv_bytes_per_token(2)


def report(runner: Runner, slots: int, context: int, executor: str, n: int, seconds: float) -> None:
    """One row of a timed load."""
    job, copy = runner.job, runner.job.fact(COPY)
    load = f"{slots} x {context}"
    fields: dict[str, Any] = {"value": slots / seconds, "unit": "tokens/s", "ms_per_step": 1e3 * seconds}
    fields |= {"load": load, "executor": executor, "n": n, "layers": runner.scale.model.num_layers}
    if copy:
        fields |= {"share": least_bytes(runner.scale, slots, context) / seconds / 1e9 / copy, "of": COPY}
    job.emit(f"{load}, {executor} N={n}", **fields)


def measure(runner: Runner) -> None:
    """Scan and dispatch for each load and N that is compiled and not measured yet."""
    for slots, context in runner.scale.loads:
        known = {key.steps for key in runner.programs if key.slots == slots and not key.chunk_tokens}
        for n in STEPS:
            for executor, length, segments in (("scan", n, 1), ("dispatch", 1, n)):
                key = (slots, executor, n)
                if length in known and key not in runner.found and runner.job.left() > 2:
                    runner.found[key] = runner.per_step(slots, context, length, segments)
                    report(runner, slots, context, executor, n, runner.found[key])


def profiled(runner: Runner, slots: int, context: int, length: int) -> None:
    """Idle share of one load from a profile."""
    name = f"{slots} x {context}, {'scan' if length > 1 else 'dispatch'} N=8, idle by profile"
    if not runner.job.enough(name, 5):
        return
    with runner.job.guarded(name):
        wall = runner.per_step(slots, context, length, 8 // length)
        busy = runner.busy_per_step(slots, context, length, 8 // length)
        if busy is None:
            runner.job.left_out(name, "the profile has no GPU in it")
            return
        note = f"kernels {1e3 * busy:.2f} of {1e3 * wall:.2f} ms/step"
        runner.job.emit(name, value=100 * max(0.0, 1 - busy / wall), unit="%", note=note)


def with_chunk(runner: Runner, slots: int, context: int) -> None:
    """A mixed step."""
    name = f"{slots} x {context} and a chunk of {runner.scale.chunk}"
    with runner.job.guarded(name):
        seconds = runner.mixed(slots, context)
        runner.job.emit(name, value=1e3 * seconds, unit="ms/step", note="waited for, host included")


def graphs(job: Job, device: jax.Device) -> None:
    """One load under one setting of XLA's CUDA graphs, with fewer layers so that it compiles quickly."""
    scale = choose_scale(memory_limit(device), dry_run=job.dry_run, layers=8)
    scale = dataclasses.replace(scale, loads=scale.loads[:1])
    runner, (slots, context) = Runner(job, scale), scale.loads[0]
    keys = [ProgramKey(n, 0, slots, GREEDY) for n in (1, 8)]
    if runner.compile(keys) and keys[1] in runner.programs:
        for executor, length, segments in (("scan", 8, 1), ("dispatch", 1, 8)):
            report(runner, slots, context, executor, 8, runner.per_step(slots, context, length, segments))


def chosen_kernels(runner: Runner) -> str:
    """Which implementation of attention the programs have."""
    scale, (slots, _) = runner.scale, runner.scale.loads[0]
    model, state = scale.model, runner.state
    sizes = (
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        PAGE,
        state.slots.block_table.shape[1],
        state.num_pages,
    )
    family = tuning.device_family()
    names = []
    for operation, rows in (("paged_decode", slots), ("paged_prefill", scale.chunk)):
        shape = AttentionShape(rows, state.num_slots, *sizes, "bfloat16", "bfloat16", family)
        names.append(f"{operation}: {choose(operation, shape)}")
    return ", ".join(names)


def run(job: Job) -> None:
    """Section "rounds": everything, or one setting of CUDA graphs."""
    device = the_device(job)
    if job.part.startswith("graphs"):
        graphs(job, device)
        return
    scale = choose_scale(memory_limit(device), dry_run=job.dry_run)
    runner = Runner(job, scale)
    note = f"{scale.note}; {chosen_kernels(runner)}"
    job.emit("weights and cache made on the device", value=runner.made, unit="s", note=note)
    (slots, context), others = scale.loads[0], [slots for slots, _ in scale.loads[1:]]

    def keys(steps: tuple[int, ...], counts: list[int]) -> list[ProgramKey]:
        return [ProgramKey(n, 0, count, GREEDY) for count in counts for n in steps]

    mixed = ProgramKey(1, scale.chunk, slots, GREEDY)
    batches = [
        keys((1,), [slots]),  # alone: it says how long the others will take
        [*keys((8,), [slots]), mixed],
        keys((1, 8), others),
        keys((4, 16), [slots]),
        keys((4, 16), others),
    ]
    for number, batch in enumerate(batches):
        with job.guarded(f"rounds, batch {number}"):
            if runner.compile(batch):
                measure(runner)
        if number == 1 and mixed in runner.programs:
            with_chunk(runner, slots, context)
            for length in (8, 1):
                profiled(runner, slots, context, length)

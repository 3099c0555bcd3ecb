"""Kernels alone: the bytes or FLOPs that cannot be avoided over the time, beside the card's own measured rates."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from clock import REPEATS, Timing, calls_for, time_calls
from facts import COPY, HOPED, MATMUL, family, rates, the_device
from inputs import Case, large_pool
from job import Job
from kernels import chosen_config, kernel

from jaxsched.pallas_kernels.shapes import AttentionShape

WORKING_SET = (
    1 << 30
)  # bytes of KV that timing goes through before it reads anything twice: far more than any L2
MOST_SETS = 8


@dataclasses.dataclass(frozen=True)
class Load:
    """What is timed. A decode has ``slots`` rows of ``context``; a prefill has ``rows`` at the end of each context."""

    name: str
    case: Case
    slots: int
    context: int
    rows: int = 0  # per slot; 0 = decode
    target: float | None = None  # share of copy bandwidth or matmul rate

    @property
    def operation(self) -> str:
        return "prefill" if self.rows else "decode"

    @property
    def kv_bytes(self) -> int:
        """Live K and V, read once, with their scales."""
        case, pages = self.case, -(-self.context // self.case.page_size)
        scales = 2 * 4 * self.slots * pages * case.kv_heads if case.pages != case.dtype else 0
        width = jnp.dtype(case.pages).itemsize
        return 2 * self.slots * self.context * case.kv_heads * case.head_dim * width + scales

    @property
    def bytes(self) -> int:
        """The least bytes of a decode: KV, queries, results."""
        rows = self.slots * self.case.heads * self.case.head_dim
        return self.kv_bytes + 2 * rows * jnp.dtype(self.case.dtype).itemsize

    @property
    def flops(self) -> int:
        """Two products for every pair of a query and a position that it sees."""
        first, last = self.context - self.rows + 1, self.context
        pairs = self.slots * (first + last) * self.rows // 2
        return 4 * pairs * self.case.heads * self.case.head_dim


LLAMA = Case(32, 8, 128, 16)  # attention of an 8B Llama
LOADS = (
    Load("decode 64 x 2k", LLAMA, 64, 2048, target=0.85),
    Load("decode 1 x 32k", LLAMA, 1, 32768, target=0.70),
    Load("prefill 2k x 2k", LLAMA, 1, 2048, rows=2048, target=0.55),
    Load("prefill 256 at 8k", LLAMA, 1, 8192, rows=256),
    Load("decode 256 x 1k", LLAMA, 256, 1024),
    Load("decode 64 x 2k int8", dataclasses.replace(LLAMA, kv_dtype="int8"), 64, 2048),
    Load("prefill 4 x 64 at 2k", LLAMA, 4, 2048, rows=64),
    Load("decode 16 x 8k", LLAMA, 16, 8192),
    Load("decode 64 x 2k D64", Case(24, 8, 64, 16), 64, 2048),
)
TINY = Case(4, 2, 64, 16)
DRY = (Load("decode 2 x 40", TINY, 2, 40, target=0.85), Load("prefill 20 at 40", TINY, 2, 40, rows=20))


@dataclasses.dataclass(frozen=True)
class Bench:
    """A load with its arrays on the device, so that several configurations can be timed on one."""

    load: Load
    shape: AttentionShape
    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    tables: list[jax.Array]
    scales: tuple[Any, Any]
    rest: tuple[jax.Array, ...]  # context_len, or slot and position

    def time(self, backend: str, config: Any, *, interpret: bool, repeats: int = REPEATS) -> Timing:
        """Seconds of one call; what a backend raises passes through."""
        function, _ = kernel(backend, self.load.operation)
        options, dry = self.load.case.options, interpret

        def step(q: Any, k: Any, v: Any, scales: Any, rest: Any, *tables: Any) -> Any:
            more = {"k_scales": scales[0], "v_scales": scales[1], "config": config, "interpret": interpret}
            for table in tables:
                q = function(q, k, v, table, *rest, options=options, **more)
            return q

        floor = max(
            self.load.bytes / HOPED["bytes"], self.load.flops / HOPED["flops"] if self.load.rows else 0
        )
        calls = calls_for(floor, dry_run=dry)
        operands = (self.k_pages, self.v_pages, self.scales, self.rest, *self.tables)
        return time_calls(
            step, self.q, *operands, calls=calls, repeats=1 if dry else repeats, per_step=len(self.tables)
        )


def prepare(load: Load, device: jax.Device, *, dry_run: bool = False) -> Bench:
    """Makes the arrays of a load."""
    case = load.case
    # A prefill is bound by arithmetic: one set of pages will do.
    sets = 1 if load.rows else max(1, min(MOST_SETS, math.ceil(WORKING_SET / load.kv_bytes)))
    sets = min(2, sets) if dry_run else sets
    k, v, tables, scales = large_pool(case, load.slots, load.context, sets)
    rows = load.slots * max(1, load.rows)
    q = jax.random.normal(jax.random.key(2), (rows, case.heads, case.head_dim), case.dtype)
    if load.rows:
        slot = np.repeat(np.arange(load.slots, dtype=np.int32), load.rows)
        position = np.tile(np.arange(load.context - load.rows, load.context, dtype=np.int32), load.slots)
        rest: tuple[jax.Array, ...] = (jnp.asarray(slot), jnp.asarray(position))
    else:
        rest = (jnp.full((load.slots,), load.context, jnp.int32),)
    shape = AttentionShape.of(q, k, tables[0], family(device))
    return Bench(load, shape, q, k, v, tables, scales, rest)


def report(job: Job, load: Load, timing: Timing, copy: float, matmul: float, note: str) -> None:
    """One row: the rate, its share of the card's, and the target if there is one."""
    if load.rows:
        value, unit, of, top = load.flops / timing.seconds / 1e12, "TFLOP/s", MATMUL, matmul
    else:
        value, unit, of, top = load.bytes / timing.seconds / 1e9, "GB/s", COPY, copy
    share = value / top
    fields: dict[str, Any] = {"value": value, "unit": unit, "share": share, "of": of, "spread": timing.spread}
    if load.target is not None:
        fields |= {"target": f"{100 * load.target:.0f} %", "met": share >= load.target}
    microseconds = timing.seconds * 1e6
    job.emit(load.name, **fields, microseconds=microseconds, note=f"{microseconds:.0f} µs; {note}")


def small_kernels(job: Job, copy: float) -> None:
    """The other kernels of a step, beside what they replace in XLA where that can be called."""
    from jaxsched.pallas_kernels import rotary
    from jaxsched.pallas_kernels.triton import sample, write

    rows, vocab, dry = (3, 500, True) if job.dry_run else (64, 128256, False)
    rng, case = np.random.default_rng(0), TINY if dry else LLAMA
    k, v, *_ = large_pool(case, rows, 16, 1)
    width = case.heads + 2 * case.kv_heads
    packed = jax.random.normal(jax.random.key(3), (rows, width, case.head_dim), case.dtype)
    turn = jnp.ones((rows, 1, case.head_dim // 2), jnp.float32)
    page, offset = jnp.arange(rows, dtype=jnp.int32), jnp.asarray(rng.integers(0, 16, rows), jnp.int32)
    writers = {
        "triton": lambda *a: write.rotate_and_write(*a, interpret=dry),
        "XLA": rotary.rotate_and_write,
    }
    for name, writer in writers.items():
        with job.guarded(f"rotate and write, {name}"):

            def put(pages: Any, *args: Any, writer: Any = writer) -> Any:
                _, *pages = writer(args[0], turn, turn, *pages, page, offset)
                return tuple(pages)

            timing = time_calls(put, (k, v), packed, calls=calls_for(1e-5, dry_run=dry))
            moved = 2 * packed.nbytes / timing.seconds / 1e9
            note = f"{1e6 * timing.seconds:.1f} µs"
            job.emit(f"rotate and write {rows} rows, {name}", value=moved, unit="GB/s", note=note)
    with job.guarded("filter_thresholds"):
        logits = jax.random.normal(jax.random.key(4), (rows, vocab), jnp.float32) * 3
        settings = (jnp.ones(rows), jnp.full(rows, 50, jnp.int32), jnp.full(rows, 0.9))

        def search(logits: Any, *settings: Any) -> Any:
            *_, least = sample.filter_thresholds(logits, *settings, interpret=dry)
            return logits.at[:, 0].set(1e-3 * least)

        timing = time_calls(search, logits, *settings, calls=calls_for(2e-5, dry_run=dry))
        value = logits.nbytes / timing.seconds / 1e9
        note = f"{1e6 * timing.seconds:.0f} µs; logits counted once, they fit the L2"
        name = f"filter_thresholds {rows} x {vocab}"
        job.emit(name, value=value, unit="GB/s", share=value / copy, of=COPY, note=note)


def run(job: Job) -> None:
    """Section "speed" of one backend."""
    device = the_device(job)
    copy, matmul = rates(job, device)
    for load in DRY if job.dry_run else LOADS:
        if not job.enough(load.name, 3.0):
            continue
        with job.guarded(load.name):
            bench = prepare(load, device, dry_run=job.dry_run)
            refusal = kernel(job.part, load.operation)[1](bench.shape)
            if refusal is not None:
                job.left_out(load.name, f"{job.part} refuses: {refusal}")
                continue
            config = chosen_config(job.part, load.operation, bench.shape)
            timing = bench.time(job.part, config, interpret=job.dry_run)
            report(job, load, timing, copy, matmul, f"compiled in {timing.compile_seconds:.1f} s")
    if job.part == "triton" and job.enough("other kernels", 4.0):
        small_kernels(job, copy)

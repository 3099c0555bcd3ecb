"""Every attention kernel against the float32 reference, which runs on the CPU.

Inputs are drawn at random; unused pages and positions are NaN, block tables hold garbage behind each length. A check
passes if |got - want| <= bound * (1 + |want|) everywhere and dead rows are exactly zero.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from facts import family, the_device
from inputs import Case, needed, poisoned_pool
from job import Job

from jaxsched.pallas_kernels import reference
from jaxsched.pallas_kernels.ops import sizes
from jaxsched.pallas_kernels.shapes import AttentionOptions, AttentionShape

# float32: sums of up to 2,000 terms of size 1 in another order, and the GPU's exp. bfloat16 and float16: the weights
# are rounded before they meet V, and the result is rounded: two and a half units in the last place of 1.
BOUNDS = {"float32": 3e-5, "float16": 2.5 * 2**-10, "bfloat16": 2.5 * 2**-7}

F32, BF16, F16, INT8, FP8 = "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"
CASES = (
    Case(32, 8, 128, 16),
    Case(32, 8, 128, 16, F32),
    Case(9, 3, 64, 16, F32),
    Case(9, 3, 64, 16),
    Case(32, 8, 128, 64, window=100),
    Case(8, 4, 256, 16, soft_cap=30.0),
    Case(8, 8, 80, 32),
    Case(8, 1, 96, 16, F32, window=20, soft_cap=5.0),
    Case(16, 1, 128, 128),
    Case(32, 8, 128, 32, BF16, INT8),
    Case(32, 8, 128, 32, BF16, FP8),
    Case(8, 2, 64, 16, F32, INT8),
    Case(8, 2, 64, 16, F16),
    Case(4, 2, 16, 8, F32),
    Case(12, 4, 128, 16, F32, window=1),
    Case(8, 2, 256, 32, F32),
)
# The cases of a dry run, cut to the same head_dim and page size but few heads.
DRY = (Case(4, 2, 64, 16), Case(6, 2, 16, 8, F32, window=20), Case(4, 2, 32, 16, F32, INT8, soft_cap=5.0))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs of one call as numpy arrays, in the order of the entry point, and which rows must be zero."""

    args: tuple[np.ndarray, ...]
    scales: tuple[Any, Any]
    dead: np.ndarray  # [rows] bool


def decode_problem(case: Case, seed: int, longest: int) -> Problem:
    """Lengths around a page's border, dead slots between live ones, one long context."""
    rng, z = np.random.default_rng(seed), case.page_size
    lengths = [
        0,
        1,
        z - 1,
        z,
        z + 1,
        min(7 * z + 3, longest),
        0,
        *map(int, rng.integers(1, longest, 3)),
        longest,
    ]
    # The widest any seed can need, so that all seeds of a case share one compiled program.
    width, total = -(-longest // z) + 2, sum(needed([longest] * len(lengths), z)) + 3
    k, v, table, *scales = poisoned_pool(rng, lengths, case, width, total)
    q = rng.standard_normal((len(lengths), case.heads, case.head_dim), np.float32)
    context = np.array(lengths, np.int32)
    return Problem(
        (q.astype(jnp.dtype(case.dtype)), k, v, table, context), (scales[0], scales[1]), context == 0
    )


def prefill_problem(case: Case, seed: int, longest: int, rows: int = 160, slots: int = 5) -> Problem:
    """Runs of several slots in random order, at random starts, with padding inside and behind."""
    rng, z = np.random.default_rng(seed), case.page_size
    lengths, slot, position = [0] * slots, np.full(rows, slots, np.int32), np.zeros(rows, np.int32)
    at = 0
    for s in rng.permutation(slots)[:4]:
        run = int(min(rng.integers(1, rows // 3), rows - at, longest))
        starts = (0, z - 1, z, int(rng.integers(0, longest)))
        start = min(starts[int(rng.integers(len(starts)))], longest - run)
        slot[at : at + run], position[at : at + run] = s, np.arange(start, start + run)
        lengths[s] = start + run
        at = min(rows, at + run + int(rng.integers(0, 3)))
    width, total = -(-longest // z) + 2, slots * -(-longest // z) + 3
    k, v, table, *scales = poisoned_pool(rng, lengths, case, width, total)
    q = rng.standard_normal((rows, case.heads, case.head_dim), np.float32).astype(jnp.dtype(case.dtype))
    return Problem((q, k, v, table, slot, position), (scales[0], scales[1]), slot == slots)


PROBLEMS: dict[str, Callable[..., Problem]] = {"decode": decode_problem, "prefill": prefill_problem}


def kernel(backend: str, operation: str) -> tuple[Callable[..., Any], Callable[[AttentionShape], str | None]]:
    """The function of a backend for "decode" or "prefill", and what says why it cannot do a shape."""
    module = import_module(f"jaxsched.pallas_kernels.{backend}.{operation}")
    return getattr(module, f"paged_{operation}"), getattr(module, f"{operation}_refusal")


def kernel_default(backend: str, operation: str, shape: AttentionShape) -> Any:
    """The configuration that a kernel chooses itself."""
    return import_module(f"jaxsched.pallas_kernels.{backend}.{operation}").default_config(shape)


def chosen_config(backend: str, operation: str, shape: AttentionShape) -> Any:
    """The configuration that a call without one gets: the kernel's own choice, changed by the tuning table."""
    return sizes(f"paged_{operation}", backend, shape)


def shape_of(problem: Problem, device: jax.Device) -> AttentionShape:
    """What a backend decides by."""
    q, k, _, table = problem.args[:4]
    return AttentionShape.of(q, k, table, family(device))


def compile_kernel(
    backend: str, operation: str, case: Case, problem: Problem, config: Any, *, interpret: bool
) -> Any:
    """The kernel for this problem's sizes, to be called with ``problem.args`` and ``problem.scales``."""
    function, _ = kernel(backend, operation)

    def call(args: Any, scales: Any) -> Any:
        more = {"k_scales": scales[0], "v_scales": scales[1], "config": config, "interpret": interpret}
        return function(*args, options=case.options, **more)

    with jax.default_matmul_precision("highest"):
        return jax.jit(call).lower(problem.args, problem.scales).compile()


@functools.cache
def _reference(operation: str, options: AttentionOptions) -> Callable[..., Any]:
    return jax.jit(partial(getattr(reference, f"paged_{operation}"), options=options))


def expected(operation: str, case: Case, problem: Problem) -> np.ndarray:
    """The reference's answer in float32, for the same (rounded) inputs."""
    q, k, v, *rest = problem.args
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        wide = [x if x.dtype == np.int8 else x.astype(np.float32) for x in (q, k, v)]
        scales = dict(zip(("k_scales", "v_scales"), problem.scales, strict=True))
        return np.asarray(_reference(operation, case.options)(*wide, *rest, **scales))


def error_of(got: np.ndarray, want: np.ndarray, dead: np.ndarray) -> float:
    """Largest |got - want| / (1 + |want|); infinite if anything is not finite or a dead row is not zero."""
    got = got.astype(np.float32)
    if not np.isfinite(got).all() or (got[dead] != 0).any():
        return float("inf")
    return float((np.abs(got - want) / (1 + np.abs(want))).max())


def check(
    job: Job, operation: str, case: Case, compiled: Any, problems: list[Problem], wants: list[np.ndarray]
) -> None:
    """One row: the worst error over the problems."""
    got = [np.asarray(compiled(p.args, p.scales)) for p in problems]
    errors = [error_of(*three) for three in zip(got, wants, (p.dead for p in problems), strict=True)]
    bound, worst = BOUNDS[case.dtype], max(errors)
    job.emit(
        f"{operation} {case}",
        group=f"{operation} {case.dtype}",
        ok=worst <= bound,
        error=min(worst, 1e9),
        bound=bound,
        note=f"error {worst:.2e}, bound {bound:.2e}",
    )


def neighbours(job: Job, operation: str, case: Case, compiled: Any, problem: Problem) -> None:
    """Rows are the same bit for bit when the rows of all other slots die."""
    name = f"{operation}: a row does not depend on others"
    with job.guarded(name):
        *first, last = problem.args
        whole = np.asarray(compiled(problem.args, problem.scales))
        if operation == "decode":
            alone = last.copy()
            alone[:-1] = 0
            rows, args = last == last[-1], (*first, alone)
            rows[:-1] = False
        else:
            slots, mine = problem.args[3].shape[0], first[-1]
            rows = mine == mine[0]
            args = (*first[:-1], np.where(rows, mine, slots).astype(np.int32), last)
        part = np.asarray(compiled(args, problem.scales))
        same = bool((whole[rows] == part[rows]).all() and rows.any())
        job.emit(name, ok=same, note=f"bit for bit, {case}")


def attention(job: Job, device: jax.Device, backend: str) -> None:
    """All cases of one backend. They are compiled, and the reference is computed, in threads ahead of their turn."""
    longest, seeds = (70, 1) if job.dry_run else (1500, 3)
    lengths = {"decode": (longest,), "prefill": (min(longest, 400), 48 if job.dry_run else 160)}

    def build(
        operation: str, case: Case, problems: list[Problem], config: Any
    ) -> tuple[Any, list[np.ndarray]]:
        compiled = compile_kernel(backend, operation, case, problems[0], config, interpret=job.dry_run)
        return compiled, [expected(operation, case, problem) for problem in problems]

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        waiting: list[tuple[str, Case, list[Problem], Future[Any]]] = []
        for case in DRY if job.dry_run else CASES:
            for operation, make in PROBLEMS.items():
                problems = [make(case, seed, *lengths[operation]) for seed in range(seeds)]
                shape = shape_of(problems[0], device)
                why = kernel(backend, operation)[1](shape)
                if why is not None:
                    job.left_out(f"{operation} {case}", f"{backend} refuses: {why}")
                    continue
                config = chosen_config(backend, operation, shape)
                future = pool.submit(build, operation, case, problems, config)
                waiting.append((operation, case, problems, future))
        for number, (operation, case, problems, future) in enumerate(waiting):
            with job.guarded(f"{operation} {case}"):
                try:
                    compiled, wants = future.result(timeout=max(0.0, job.left() - 1))
                except TimeoutError:
                    for left, other, *_ in waiting[number:]:
                        job.left_out(f"{left} {other}", "no time left")
                    pool.shutdown(wait=False, cancel_futures=True)
                    return
                check(job, operation, case, compiled, problems, wants)
                if number < 2:
                    neighbours(job, operation, case, compiled, problems[0])


def run(job: Job) -> None:
    """Section "kernels": one backend's attention, or the writes and the sampling pass."""
    device = the_device(job)
    if job.part == "write":
        import_module("writes").run(job, device)
    else:
        attention(job, device, job.part)

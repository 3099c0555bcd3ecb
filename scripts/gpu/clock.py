"""How things are timed: many calls in one compiled loop, each fed with the result of the one before.

So nothing can be hoisted or dropped, the host is out of the way, and the loop's own start is spread over all calls. The
loop's length is static: with a dynamic one a GPU would wait for the host in each iteration.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import lax

LOOP_SECONDS = 0.03  # what one timed loop should last at the speed that is hoped for
REPEATS = 7


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: the median of ``repeats`` loops; ``spread`` is (slowest - fastest) / median."""

    seconds: float
    spread: float
    calls: int
    repeats: int
    compile_seconds: float


def calls_for(floor_seconds: float, *, dry_run: bool) -> int:
    """Calls per loop so that it lasts LOOP_SECONDS if each takes ``floor_seconds``."""
    return 2 if dry_run else max(4, min(1000, math.ceil(LOOP_SECONDS / floor_seconds)))


def time_calls(
    step: Callable[..., Any],
    carry: Any,
    *operands: Any,
    calls: int,
    repeats: int = REPEATS,
    per_step: int = 1,
) -> Timing:
    """Times ``carry = step(carry, *operands)``, which makes ``per_step`` calls of what is timed."""
    loops = max(1, calls // per_step)

    def run(carry: Any, *operands: Any) -> Any:
        return lax.fori_loop(0, loops, lambda _, c: step(c, *operands), carry)

    begin = time.perf_counter()
    compiled = jax.jit(run).lower(carry, *operands).compile()
    compile_seconds = time.perf_counter() - begin
    jax.block_until_ready(compiled(carry, *operands))  # warm: modules are loaded, autotuning is done
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(carry, *operands))
        times.append((time.perf_counter() - begin) / (loops * per_step))
    middle = statistics.median(times)
    return Timing(middle, (max(times) - min(times)) / middle, loops * per_step, repeats, compile_seconds)


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of ``(start, end)`` intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def busy_seconds(planes: Iterable[Any]) -> float | None:
    """Time in which a GPU ran at least one kernel, from the planes of ``jax.profiler.ProfileData``; None without one.

    Only the lines of streams are read: other lines repeat the same time by module, step or name.
    """
    intervals: list[tuple[float, float]] = []
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                intervals += [(e.start_ns, e.start_ns + e.duration_ns) for e in line.events]
    return union_seconds(intervals) / 1e9 if intervals else None

"""Work in a few threads with a bound on the memory that it takes meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from typing import Any

Job = tuple[int, Callable[[], Any]]
"""Bytes of memory that the work takes while it runs, and the work."""


class Stop:
    """Tells work that runs in other threads to end. May be set in any thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.asked = False

    def set(self) -> None:
        with self.changed:
            self.asked = True
            self.changed.notify_all()


def in_parallel(
    jobs: Sequence[Job], *, limit: int, threads: int | None = None, stop: Stop | None = None
) -> list[Any]:
    """The results of all jobs, in their order. Runs the largest first, in threads (default: one per core, at most 8).

    Jobs that run together take at most ``limit`` bytes; a larger one runs alone. The first error, an interrupt and
    ``stop`` (which raises CancelledError) end it: jobs that have begun are waited for, the others dropped.
    """
    stop, free = stop or Stop(), limit

    def run(size: int, work: Callable[[], Any]) -> Any:
        nonlocal free
        size = min(size, limit)
        with stop.changed:
            stop.changed.wait_for(lambda: stop.asked or free >= size)
            if stop.asked:
                raise CancelledError("loading was stopped")
            free -= size
        try:
            return work()
        finally:
            with stop.changed:
                free += size
                stop.changed.notify_all()

    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), "jaxsched-load") as pool:
        order = sorted(range(len(jobs)), key=lambda i: -jobs[i][0])
        futures = {i: pool.submit(run, *jobs[i]) for i in order}
        try:
            done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [futures[i].result() for i in range(len(jobs))]

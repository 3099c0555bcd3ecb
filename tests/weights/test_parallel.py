"""Jobs in threads: results in order, bounded memory, and a clean end after an error."""

import threading
import time
from concurrent.futures import CancelledError

import pytest

from jaxsched.weights.parallel import Stop, in_parallel


def test_results_are_in_order_and_the_largest_start_first() -> None:
    started = []
    jobs = [(size, lambda size=size: started.append(size) or size) for size in (1, 5, 3, 9)]
    assert in_parallel(jobs, limit=100, threads=1) == [1, 5, 3, 9]
    assert started == [9, 5, 3, 1]
    assert in_parallel([], limit=1) == []


def test_what_runs_together_stays_under_the_limit() -> None:
    lock, now, most = threading.Lock(), [0], [0]

    def work(size: int) -> None:
        with lock:
            now[0] += size
            most[0] = max(most[0], now[0])
        time.sleep(0.002)
        with lock:
            now[0] -= size

    sizes = [30, 7, 7, 7, 3, 3, 1, 1, 1, 1]  # the first is too large and runs alone
    in_parallel([(size, lambda size=size: work(size)) for size in sizes], limit=10, threads=4)
    assert most[0] == 30 and now[0] == 0
    in_parallel([(size, lambda size=size: work(size)) for size in sizes[1:]], limit=10, threads=4)


def test_an_error_comes_out_and_what_has_not_begun_is_dropped() -> None:
    ran = []

    def fail() -> None:
        raise ValueError("broken")

    jobs = [(9, fail), *((1, lambda i=i: ran.append(i) or time.sleep(0.01)) for i in range(100))]
    before = threading.active_count()
    with pytest.raises(ValueError, match="broken"):
        in_parallel(jobs, limit=9, threads=2)
    assert len(ran) < 50 and threading.active_count() == before


def test_it_can_be_stopped() -> None:
    stop, ran = Stop(), []

    def work(i: int) -> None:
        ran.append(i)
        stop.set()

    with pytest.raises(CancelledError):
        in_parallel([(1, lambda i=i: work(i)) for i in range(50)], limit=2, threads=2, stop=stop)
    assert len(ran) <= 2


def test_an_interrupt_ends_it() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_parallel([(1, interrupted), (1, lambda: None)], limit=2, threads=2)

"""What the tests of AsyncLLM share."""

import asyncio
import contextlib
import threading
import time

from harness import Result
from jaxsched import SamplingParams
from jaxsched.async_llm import AsyncLLM

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=20, seed=7, ignore_eos=True)
# One short step per round: a prompt of 100 tokens takes many rounds, so that there is time to abort it.
SLOW = {"num_scheduler_steps": 1, "prefill_chunk_size": 16, "max_num_seqs": 2}


def calm(engine):
    """The engine, a little slower: on a busy machine too a consumer sees a request before it has finished."""
    step = engine.step

    def calm_step():
        pieces = step()
        time.sleep(0.003)
        return pieces

    engine.step = calm_step
    return engine


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "jaxsched-engine"]


def run(coroutine, timeout=120):
    async def limited():
        async with asyncio.timeout(timeout):
            return await coroutine

    return asyncio.run(limited())


@contextlib.asynccontextmanager
async def serving(engine, **options):
    """An AsyncLLM that must leave nothing behind."""
    async with AsyncLLM.from_engine(engine, **options) as llm:
        yield llm
    check_clean(llm)


def check_clean(llm):
    desk = llm._desk
    assert (desk._names, desk._routes, desk._deferred, desk._coming) == ({}, {}, [], 0)
    assert not llm.is_running


async def result_of(stream) -> Result:
    result = Result()
    async for piece in stream:
        assert piece.finished == (piece.outputs[0].finish_reason is not None) and piece.error is None
        result.add(piece.outputs[0])
    assert result.finish_reason is not None
    return result


async def until(condition, timeout=20.0):
    """Waits for a condition that another thread brings about."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.001)


class Gate:
    """Holds the engine's thread before each step until it is opened, or let through a number of times."""

    def __init__(self, engine, monkeypatch):
        self.steps, self.waiting = threading.Semaphore(0), threading.Event()
        self.is_open = False
        step = engine.step

        def gated():
            if not self.is_open:
                self.waiting.set()
                assert self.steps.acquire(timeout=60), "the gate was never opened"
                self.waiting.clear()
            return step()

        monkeypatch.setattr(engine, "step", gated)

    def open(self):
        self.is_open = True
        self.steps.release(1000)

    def close(self):
        while self.steps.acquire(blocking=False):
            pass
        self.waiting.clear()
        self.is_open = False

    async def let(self, count=1):
        """Lets steps through and waits until the thread stands at the gate again."""
        for _ in range(count):
            await until(self.waiting.is_set)
            self.waiting.clear()
            self.steps.release()
        await until(self.waiting.is_set)

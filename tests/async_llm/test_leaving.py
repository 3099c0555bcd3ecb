"""AsyncLLM: consumers that leave early, in every way and at every phase."""

import asyncio
import contextlib
import dataclasses
import gc
import weakref

import numpy as np
import pytest

from async_harness import (
    LONG,
    SHORT,
    Gate,
    check_clean,
    result_of,
    run,
    serving,
    until,
)
from harness import assert_idle, oracle, random_prompt
from jaxsched.async_llm import AsyncLLM

# -- leaving early -------------------------------------------------------------------------------------------------

PHASES = ["opened", "queued", "prefilling", "decoding", "between pieces"]


class Consumer:
    """A task that reads a request's pieces. With ``holds`` it does something else after the first one."""

    def __init__(self, stream, holds):
        self.stream, self.pieces, self.go, self.holds = stream, [], asyncio.Event(), holds
        self.task = asyncio.create_task(self.read())

    async def read(self):
        async with contextlib.aclosing(self.stream):
            async for piece in self.stream:
                self.pieces.append(piece)
                if self.holds:
                    await self.go.wait()

    async def leave(self, how, llm):
        """Ends the request in one of the ways; returns when the consumer is done."""
        if how == "abort":
            await llm.abort(self.stream.request_id)
            self.go.set()
            await self.task
            assert self.pieces[-1].finished and self.pieces[-1].outputs[0].finish_reason == "abort"
        elif how == "cancel":
            self.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await self.task
            assert not any(piece.finished for piece in self.pieces)
        elif how == "close":  # somebody else closes the stream, then the consumer comes back for more
            self.stream.close()
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        with pytest.raises(StopAsyncIteration):
            await anext(self.stream)


async def reach(llm, gate, phase, consumer):
    """Lets the engine go on until the request is in a phase."""
    if phase == "opened":
        await asyncio.sleep(0)  # the first of many awaits
        return
    sequence = None
    for _ in range(50):
        await gate.let()
        request = llm.engine.requests.by_id.get(consumer.stream.request_id)
        sequence = request and request.sequences[0]
        status = sequence and sequence.status.value
        if phase == "queued" and status == "waiting":
            return
        if phase == "prefilling" and status == "prefill" and 0 < sequence.prefilled < sequence.prefill_target:
            return
        if status == "decode" and len(sequence.output) > 2:
            assert phase in ("decoding", "between pieces")
            await until(lambda: consumer.pieces and not consumer.task.done())
            return
    raise AssertionError(f"the request never was {phase}: {sequence}")


async def departures(llm, gate, how, phase, times):
    rng = np.random.default_rng(llm.engine.count)
    for i in range(times):
        blockers = []
        if phase == "queued":
            blockers = [asyncio.create_task(result_of(llm.generate([1, i], LONG))) for i in range(2)]
            await gate.let(2)
        prompt = "z" * 3000 if phase == "opened" and i % 2 else random_prompt(rng, 100)  # never cached
        stream = llm.generate(prompt, dataclasses.replace(LONG, max_tokens=25))
        consumer = Consumer(stream, holds=phase == "between pieces")
        await reach(llm, gate, phase, consumer)
        gate.open()
        await consumer.leave(how, llm)
        for blocker in blockers:
            blocker.cancel()
        await asyncio.gather(*blockers, return_exceptions=True)
        await until(lambda: not llm._desk._names and not llm.engine.has_work)
        await llm.check_health()
        assert_idle(llm.engine)
        gate.close()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["abort", "cancel", "close"])
def test_leaving_at_every_phase(slow_engine, monkeypatch, how, phase):
    gate = Gate(slow_engine, monkeypatch)

    async def main():
        async with serving(slow_engine) as llm:
            await departures(llm, gate, how, phase, times=4)
            gate.open()

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["abort", "cancel", "close"])
def test_leaving_a_thousand_times(slow_engine, monkeypatch, how):
    gate = Gate(slow_engine, monkeypatch)

    async def main():
        async with serving(slow_engine) as llm:
            for phase in PHASES:
                await departures(llm, gate, how, phase, times=200)
            gate.open()

    run(main(), timeout=600)


def test_many_leave_at_random_moments(engine, model):
    """Hundreds at once, each ends in its own way at its own time; those that stay get all of their tokens."""
    rng = np.random.default_rng(0)

    async def one(llm, i):
        stream = llm.generate([i % 250, 1], dataclasses.replace(LONG, max_tokens=30), request_id=f"r{i}")
        how = i % 5
        if how == 0:
            return (await result_of(stream)).ids == oracle_of[i % 250]
        task = asyncio.create_task(result_of(stream))
        del stream
        await asyncio.sleep(rng.random() * 0.3)
        if how == 1:
            await llm.abort(f"r{i}")
            return (await task).finish_reason in ("abort", "length")
        if how == 2:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(task, rng.random() * 0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True

    params = dataclasses.replace(LONG, max_tokens=30)
    oracle_of = {k: oracle(model, [k, 1], params)[0] for k in range(0, 250, 5)}

    async def main():
        async with serving(engine) as llm:
            assert all(await asyncio.gather(*(one(llm, i) for i in range(300))))
            await until(lambda: not llm._desk._names and not engine.has_work)

    run(main())


def test_breaking_out_of_the_loop(engine):
    """Nobody holds the generator then, so it is gone at once, without the event loop's help."""

    async def main():
        async with serving(engine) as llm:
            for _ in range(10):
                async for piece in llm.generate([1], LONG):
                    assert not piece.finished
                    break
                await llm.check_health()  # the abort went first
                await until(lambda: not engine.has_work)
            with pytest.raises(ZeroDivisionError):
                async for _ in llm.generate([1], LONG):
                    1 / 0  # noqa: B018
            gc.collect()
            await until(lambda: not llm._desk._names)

    run(main())


def test_generators_that_the_garbage_collector_finds(engine):
    """In a cycle, in any thread, at any moment."""

    async def main():
        async with serving(engine) as llm:
            for began in (False, True):
                stream = llm.generate([1], LONG)
                if began:
                    await anext(stream)
                stream.cycle = [stream]
                gone = weakref.ref(stream)
                del stream
                await asyncio.to_thread(gc.collect)
                assert gone() is None
                await until(lambda: not llm._desk._names and not engine.has_work)

    run(main())


def test_the_collector_in_the_engine_thread(engine, monkeypatch):
    """It may strike there too, also while a lock is held."""
    step = engine.step

    async def main():
        async with serving(engine) as llm:
            monkeypatch.setattr(engine, "step", lambda: (gc.collect(), step())[1])
            for _ in range(4):
                stream = llm.generate([1], LONG)
                await anext(stream)
                stream.cycle = [stream]
                del stream
                await result_of(llm.generate([2], SHORT))
            monkeypatch.undo()
            gc.collect()

    run(main())


def test_a_generator_that_never_began(engine):
    llm = AsyncLLM.from_engine(engine)
    streams = [llm.generate([1], LONG) for _ in range(5)]
    streams[0].close()
    del streams
    run(llm.shutdown())
    check_clean(llm)


def test_the_generator_protocol(engine):
    async def main():
        async with serving(engine) as llm:
            stream = llm.generate([1], LONG)
            assert (await stream.asend(None)).outputs[0].token_ids
            with pytest.raises(ZeroDivisionError):
                await stream.athrow(ZeroDivisionError("mine"))
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            stream = llm.generate([1], LONG)
            task = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="two tasks wait for the next piece"):
                await anext(stream)
            assert not (await task).finished
            await stream.aclose()

    run(main())

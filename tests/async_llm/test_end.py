"""AsyncLLM: failures inside the engine, the end, event loops and threads."""

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import pytest

from async_harness import (
    LONG,
    SAMPLED,
    SHORT,
    Gate,
    calm,
    check_clean,
    engine_threads,
    result_of,
    run,
    serving,
    until,
)
from harness import GREEDY, SMALL, Result, assert_idle, make_engine, oracle
from jaxsched.async_llm import AsyncLLM, EngineClosedError, EngineDeadError
from jaxsched.engine.executor import Part

# -- when the engine fails -----------------------------------------------------------------------------------------


class Boom(Exception):
    pass


class Bang(BaseException):
    pass


def fail(error):
    def failing(*args, **kwargs):
        raise error

    return failing


def causes(error):
    """The error and all that it came from."""
    while error is not None:
        yield error
        error = error.__cause__


FAILURES = {
    "dispatch": lambda engine, patch, error: patch.setattr(engine.executor, "submit", fail(error)),
    "read": lambda engine, patch, error: patch.setattr(Part, "land", fail(error)),
    "plan": lambda engine, patch, error: patch.setattr(engine.scheduler, "plan", fail(error)),
    "commit": lambda engine, patch, error: patch.setattr(engine.scheduler, "commit", fail(error)),
    "step": lambda engine, patch, error: patch.setattr(engine, "step", fail(error)),
    "has_work": lambda engine, patch, error: patch.setattr(type(engine), "has_work", property(fail(error))),
}


@pytest.mark.parametrize("kind", [Boom, Bang])
@pytest.mark.parametrize("where", FAILURES)
def test_everyone_hears_of_a_failure(model, monkeypatch, where, kind):
    """Within a second: who waits for a piece, who is queued, who holds a piece, who drains, and who comes later."""
    engine, error = calm(make_engine(model)), kind("the device is on fire")

    async def main():
        llm = AsyncLLM.from_engine(engine)
        held = llm.generate([1], LONG)
        first = await anext(held)
        streams = [llm.generate([i, 1], LONG) for i in range(50)]
        waiting = [asyncio.create_task(result_of(stream)) for stream in streams]
        waiting.append(asyncio.create_task(anext(llm.generate("q" * 20, LONG))))
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(llm.drain()))
        FAILURES[where](engine, monkeypatch, error)
        start = time.monotonic()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert time.monotonic() - start < 1.0
        late = [
            anext(llm.generate([1], LONG)),
            llm.abort("x"),
            llm.drain(),
            llm.check_health(),
            llm.reset_prefix_cache(),
        ]
        late += [llm.sleep(), llm.wake_up(), llm.fork("x")]
        outcomes += await asyncio.gather(*late, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, EngineDeadError) and "the device is on fire" in str(outcome)
            assert error in causes(outcome) and outcome.__cause__ is not None
        with pytest.raises(EngineDeadError):  # perhaps after what had come before
            while True:
                first = await anext(held)
        assert not first.finished
        assert llm.errored and not llm.is_running and error in causes(llm.dead_error)
        monkeypatch.undo()
        await llm.shutdown()
        await llm.shutdown(drain=True)
        assert llm.errored and "dead" in repr(llm)

    run(main())


def test_a_failure_among_many(model, monkeypatch):
    """Consumers in three event loops, a thousand in all."""
    engine, error = calm(make_engine(model)), Boom()
    llm = AsyncLLM.from_engine(engine)
    told = []

    async def main():
        streams = [llm.generate([i % 200], LONG) for i in range(333)]
        told.append(await asyncio.gather(*(result_of(s) for s in streams), return_exceptions=True))

    threads = [threading.Thread(target=run, args=(main(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    monkeypatch.setattr(engine.executor, "submit", fail(error))
    for thread in threads:
        thread.join(60)
    outcomes = [outcome for each in told for outcome in each]
    assert len(outcomes) == 999
    failed = [outcome for outcome in outcomes if not isinstance(outcome, Result)]
    assert failed and all(isinstance(o, EngineDeadError) and error in causes(o) for o in failed)
    run(llm.shutdown())


def test_a_bug_in_delivering_is_not_silent(model, monkeypatch):
    engine = calm(make_engine(model))

    async def main():
        async with AsyncLLM.from_engine(engine) as llm:
            monkeypatch.setattr(llm._desk, "_post", fail(Boom()))
            stream = llm.generate([1], LONG)
            task = asyncio.create_task(anext(stream))
            await until(lambda: llm.errored)
            monkeypatch.undo()
            with pytest.raises(EngineDeadError):
                await llm.check_health()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(main())


def test_a_request_that_the_engine_lost(engine):
    """Somebody restored the engine behind our back: the request is gone, and nobody waits for it for ever."""

    async def main():
        async with serving(engine) as llm:
            empty = await llm._call(lambda engine: engine.snapshot())
            stream = llm.generate([1], LONG)
            await anext(stream)
            await llm._call(lambda engine: engine.restore(empty))
            other = result_of(llm.generate([2], SHORT))
            with pytest.raises(
                RuntimeError, match=f"request '{stream.request_id}' is gone: the engine was restored"
            ):
                await result_of(stream)
            assert len((await other).ids) == 3

    run(main())


# -- the end -------------------------------------------------------------------------------------------------------


def test_drain(engine, monkeypatch):
    gate = Gate(engine, monkeypatch)

    async def main():
        async with serving(engine) as llm:
            tasks = [asyncio.create_task(result_of(llm.generate([i], LONG))) for i in range(10)]
            unread = llm.generate([1], LONG)
            tasks.append(asyncio.create_task(anext(unread)))
            await asyncio.sleep(0)
            drains = [asyncio.create_task(llm.drain()) for _ in range(2)]
            await asyncio.sleep(0.01)
            with pytest.raises(EngineClosedError, match="is being drained and takes no new requests"):
                await anext(llm.generate([1], LONG))
            assert llm.is_running and not any(drain.done() for drain in drains)
            gate.open()
            await asyncio.gather(*drains)
            assert_idle(engine)
            assert [len(r.ids) for r in await asyncio.gather(*tasks[:-1])] == [100] * 10
            first = await tasks[-1]
            rest = [] if first.finished else (await result_of(unread)).ids
            assert len(first.outputs[0].token_ids) + len(rest) == 100
            await llm.drain()

    run(main())


def test_draining_waits_for_nobody_who_left(engine):
    async def main():
        async with serving(engine) as llm:
            stream = llm.generate([1], LONG)
            await anext(stream)
            drain = asyncio.create_task(llm.drain())
            await asyncio.sleep(0)
            stream.close()
            await drain

    run(main())


@pytest.mark.parametrize("drain", [False, True])
def test_shutdown_while_busy(engine, drain):
    async def main():
        llm = AsyncLLM.from_engine(engine)
        tasks = [asyncio.create_task(result_of(llm.generate([i], LONG))) for i in range(20)]
        tasks.append(asyncio.create_task(result_of(llm.generate("y" * 100, SHORT))))
        await asyncio.sleep(0.02)
        await asyncio.gather(llm.shutdown(drain=drain), llm.shutdown(drain=drain), llm.shutdown())
        assert_idle(engine)
        check_clean(llm)
        assert not engine_threads() and "closed" in repr(llm)
        reasons = {r.finish_reason for r in await asyncio.gather(*tasks)}
        assert reasons <= {"abort", "length"}
        assert "abort" in reasons
        for late in (anext(llm.generate([1])), llm.check_health(), llm.abort("x"), llm.drain()):
            with pytest.raises(EngineClosedError, match="this engine was shut down; make a new one"):
                await late
        assert not llm.errored and llm.dead_error is None
        await llm.shutdown()

    run(main())


def test_shutdown_with_drain_finishes_everything(engine):
    async def main():
        llm = AsyncLLM.from_engine(engine)
        tasks = [asyncio.create_task(result_of(llm.generate([i], LONG))) for i in range(10)]
        await asyncio.sleep(0)
        await llm.shutdown(drain=True)
        assert {r.finish_reason for r in await asyncio.gather(*tasks)} == {"length"}

    run(main())


def test_shutdown_while_texts_are_tokenized(engine, monkeypatch):
    """Those requests never come to the engine, and their consumers hear why."""
    gate = threading.Event()
    encode = type(engine.tokenizer).encode

    def slow(self, text, **options):
        gate.wait(10)
        return encode(self, text, **options)

    monkeypatch.setattr(type(engine.tokenizer), "encode", slow)

    async def main():
        llm = AsyncLLM.from_engine(engine)
        tasks = [asyncio.create_task(anext(llm.generate("y" * 2000, LONG))) for _ in range(3)]
        await asyncio.sleep(0.01)
        await llm.shutdown()
        gate.set()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineClosedError)
        check_clean(llm)

    run(main())


def test_forgotten(model):
    """Without a shutdown: the thread ends and the memory is freed when nobody holds the object."""
    gc.collect()
    before = {id(a) for a in jax.live_arrays()}

    async def main():
        llm = AsyncLLM(model.path, **SMALL)
        assert len((await result_of(llm.generate("hello", GREEDY))).ids) == 12
        async for _ in llm.generate([1], LONG):
            break

    run(main())
    gc.collect()
    for thread in engine_threads():
        thread.join(20)
    gc.collect()
    assert not engine_threads()
    assert [a for a in jax.live_arrays() if id(a) not in before and not a.is_deleted()] == []


def test_a_stream_keeps_its_engine(engine):
    async def main():
        stream = AsyncLLM.from_engine(engine).generate([1], GREEDY)
        gc.collect()
        assert len((await result_of(stream)).ids) == 12
        del stream
        gc.collect()
        await until(lambda: not engine_threads())

    run(main())


def test_shutdown_frees_device_memory(model):
    gc.collect()
    before = {id(a) for a in jax.live_arrays()}

    async def main():
        async with AsyncLLM(model.path, **SMALL) as llm:
            assert len((await result_of(llm.generate("hello", GREEDY))).ids) == 12
            assert llm.config.page_size == 8 and llm.get_tokenizer() is llm.tokenizer
        assert [a for a in jax.live_arrays() if id(a) not in before and not a.is_deleted()] == []
        return llm

    run(main())


def test_wrong_settings():
    with pytest.raises(
        TypeError, match="AsyncLLM has no argument 'max_model_length'; did you mean 'max_model_len'"
    ):
        AsyncLLM("nowhere", max_model_length=5)
    with pytest.raises(ValueError, match="max_waiting is 0"):
        AsyncLLM("nowhere", max_waiting=0)


def test_the_interpreter_ends_quietly(model):
    """Without a shutdown, in the middle of a generation."""
    code = textwrap.dedent(f"""
        import asyncio, faulthandler
        faulthandler.dump_traceback_later(100, exit=True)  # if it hangs, say where
        from jaxsched import CompletionOutput, RequestOutput, SamplingParams
        from jaxsched.async_llm import AsyncLLM
        llm = AsyncLLM({str(model.path)!r}, **{SMALL!r})
        loop = asyncio.new_event_loop()
        stream = llm.generate([1], SamplingParams(max_tokens=100, ignore_eos=True))
        other = llm.generate([1], SamplingParams(max_tokens=100, ignore_eos=True))
        loop.run_until_complete(anext(other))
        piece = loop.run_until_complete(anext(stream))
        loop.close()
        print(len(piece.outputs[0].token_ids) > 0)
    """)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "True\n", "")


# -- event loops and threads ---------------------------------------------------------------------------------------


def test_several_event_loops(engine, model):
    """One AsyncLLM, made outside of any loop, used in four threads with loops of their own."""
    llm = AsyncLLM.from_engine(engine)
    results, errors = {}, []

    def work(t):
        async def main():
            for _ in range(3):
                requests = [([10 * t + i] * (1 + 9 * i), SAMPLED) for i in range(5)]
                results[t] = [
                    r.ids for r in await asyncio.gather(*(result_of(llm.generate(*r)) for r in requests))
                ]
                async for _ in llm.generate([t], LONG):
                    break

        try:
            run(main())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    want = {t: [oracle(model, [10 * t + i] * (1 + 9 * i), SAMPLED)[0] for i in range(5)] for t in range(4)}
    assert results == want
    run(llm.shutdown())
    check_clean(llm)


def test_aborted_from_another_loop(engine):
    llm = AsyncLLM.from_engine(engine)

    async def main():
        stream = llm.generate([1], LONG, request_id="a")
        await anext(stream)
        await asyncio.to_thread(run, llm.abort("a"))
        assert (await result_of(stream)).finish_reason == "abort"
        with pytest.raises(RuntimeError, match="was begun in another event loop"):
            stream = llm.generate([1], LONG)
            await anext(stream)
            await asyncio.to_thread(run, result_of(stream))

    run(main())
    run(llm.shutdown())
    check_clean(llm)


def test_a_loop_that_is_closed_with_requests_in_it(engine):
    """Nobody can be woken there: the requests are aborted, and others do not notice."""
    llm = AsyncLLM.from_engine(engine)
    loop = asyncio.new_event_loop()
    streams = [llm.generate([i], LONG) for i in range(3)]
    for stream in streams:
        loop.run_until_complete(anext(stream))
    loop.close()

    async def main():
        assert len((await result_of(llm.generate([1], GREEDY))).ids) == 12
        await until(lambda: not llm._desk._names)
        await llm.shutdown()

    run(main())
    check_clean(llm)
    del streams


def test_one_loop_after_another(engine):
    """As in a script that calls asyncio.run for each question."""
    llm = AsyncLLM.from_engine(engine)
    for _ in range(5):
        assert len(run(result_of(llm.generate([1], GREEDY))).ids) == 12
    run(llm.shutdown())

"""AsyncLLM: tokens, slow consumers, bad requests, limits, and calls that go to the engine."""

import asyncio
import contextlib
import dataclasses
import threading
import time

import numpy as np
import pytest

from async_harness import (
    LONG,
    SAMPLED,
    SHORT,
    Gate,
    result_of,
    run,
    serving,
    until,
)
from harness import GREEDY, oracle, run_all
from jaxsched import CompletionOutput, RequestOutput, SamplingParams
from jaxsched.async_llm import AsyncLLM, QueueFullError
from jaxsched.engine import control
from jaxsched.request import OutputBuilder
from toys import BOS

# -- tokens --------------------------------------------------------------------------------------------------------


def test_equal_to_a_synchronous_run(engine, model):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n).tolist() for n in (60, 2, 30, 5, 1, 44, 8, 100)]
    params = [dataclasses.replace(SAMPLED, max_tokens=n, seed=n) for n in (3, 40, 1, 20, 0, 7, 27, 20)]
    requests = list(zip(prompts, params, strict=True))
    want = run_all(engine, requests)

    async def main():
        async with serving(engine) as llm:
            return await asyncio.gather(*(result_of(llm.generate(*r)) for r in requests))

    got = run(main())
    assert [(r.ids, r.text, r.finish_reason) for r in got] == [(r.ids, r.text, r.finish_reason) for r in want]


def test_kinds_of_prompts(engine, model):
    ids = [BOS, *b"hello"]
    kinds = ["hello", ids, tuple(ids), np.array(ids), {"prompt": "hello"}, {"prompt_token_ids": ids}]
    kinds += [
        {"prompt": "shown", "prompt_token_ids": ids, "cache_salt": "a"},
        {"prompt": "hello", "cache_salt": None},
    ]

    async def main():
        async with serving(engine) as llm:
            for prompt in kinds:
                pieces = [piece async for piece in llm.generate(prompt, GREEDY)]
                assert pieces[0].prompt_token_ids == ids
                shown = (
                    prompt
                    if isinstance(prompt, str)
                    else prompt.get("prompt")
                    if isinstance(prompt, dict)
                    else None
                )
                assert {piece.prompt for piece in pieces} == {shown}
                assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
                ids_got = [token for piece in pieces for token in piece.outputs[0].token_ids]
                assert ids_got == oracle(model, ids, GREEDY)[0]

    run(main())


def test_default_parameters_and_scheduling_arguments(engine):
    async def main():
        async with serving(engine) as llm:
            assert len((await result_of(llm.generate([1, 2]))).ids) <= 16
            stream = llm.generate([1], GREEDY, priority=-3, client="c", deadline_ms=5.5)
            assert len((await result_of(stream)).ids) == 12

    run(main())


def test_the_caller_may_change_its_list(engine, model):
    async def main():
        async with serving(engine) as llm:
            prompt = [1, 2, 3]
            task = asyncio.create_task(result_of(llm.generate(prompt, GREEDY)))
            await asyncio.sleep(0)
            prompt.clear()
            assert (await task).ids == oracle(model, [1, 2, 3], GREEDY)[0]

    run(main())


def test_thousands_at_once(engine):
    count = 2000
    prompts = [[i % 251, i % 13] for i in range(count)]

    async def main():
        async with serving(engine) as llm:
            results = await asyncio.gather(*(result_of(llm.generate(p, SHORT)) for p in prompts))
        return [tuple(r.ids) for r in results]

    got = run(main(), timeout=300)
    seen = {}
    for prompt, ids in zip(prompts, got, strict=True):
        assert len(ids) == 3 and seen.setdefault(tuple(prompt), ids) == ids


def test_one_wake_up_per_loop_and_step(engine, monkeypatch):
    """However many pieces there are."""
    calls, steps = [], []

    async def main():
        loop = asyncio.get_running_loop()
        plain = loop.call_soon_threadsafe
        async with serving(engine) as llm:
            monkeypatch.setattr(
                loop, "call_soon_threadsafe", lambda *a, **k: (calls.append(a), plain(*a, **k))[1]
            )
            step = engine.step
            monkeypatch.setattr(engine, "step", lambda: (steps.append(1), step())[1])
            await asyncio.gather(*(result_of(llm.generate([i], LONG)) for i in range(4)))
            monkeypatch.undo()

    run(main())
    assert 0 < len(calls) <= len(steps)


def test_long_texts_are_tokenized_elsewhere(engine, monkeypatch):
    threads = []
    encode = type(engine.tokenizer).encode
    monkeypatch.setattr(
        type(engine.tokenizer),
        "encode",
        lambda self, text, **options: (
            threads.append(threading.current_thread()),
            encode(self, text, **options),
        )[1],
    )

    async def main():
        async with serving(engine) as llm:
            with pytest.raises(ValueError, match="max_model_len is 128"):
                await anext(llm.generate("x" * 2000, GREEDY))
            await result_of(llm.generate("x", GREEDY))

    run(main())
    assert threads[0] is not threading.main_thread() and threads[1] is threading.main_thread()


# -- slow consumers, bad requests, limits --------------------------------------------------------------------------


def test_a_slow_consumer_gets_what_was_merged(engine, model):
    async def main():
        async with serving(engine) as llm:
            stream = llm.generate([1, 2], dataclasses.replace(LONG, max_tokens=60))
            first = await anext(stream)
            await until(lambda: not llm._desk._routes)  # the engine is done with it
            rest = [piece async for piece in stream]
            assert len(rest) == 1 and rest[0].finished and not first.finished
            ids = first.outputs[0].token_ids + rest[0].outputs[0].token_ids
            text = first.outputs[0].text + rest[0].outputs[0].text
            assert ids == oracle(model, [1, 2], dataclasses.replace(LONG, max_tokens=60))[0]
            assert text == engine.tokenizer.decode(ids)
            assert rest[0].outputs[0].finish_reason == "length" and rest[0].prompt_token_ids == [1, 2]

    run(main())


def test_a_blocked_event_loop_costs_no_memory(engine):
    """Pieces are merged also while the loop does not turn."""

    async def main():
        async with serving(engine) as llm:
            stream = llm.generate([1, 2], LONG)
            await anext(stream)
            end = time.monotonic() + 20
            while llm._desk._routes:
                time.sleep(0.001)
                assert time.monotonic() < end
            assert len([piece async for piece in stream]) == 1

    run(main())


BAD = {
    "too long": ({"prompt": [1] * 129}, ValueError, "the prompt has 129 tokens, but max_model_len is 128"),
    "out of range": ({"prompt": [1, 272]}, ValueError, "prompt token id 272 is out of range"),
    "floats": ({"prompt": [1.0]}, ValueError, "prompt_token_ids must be a list of integers"),
    "nothing": ({"prompt": None}, ValueError, "prompt_token_ids must be a list of integers, not None"),
    "empty dict": ({"prompt": {}}, ValueError, "a prompt dict has 'prompt' or 'prompt_token_ids', not nothing"),
    "only salt": ({"prompt": {"cache_salt": "a"}}, ValueError, "a prompt dict has 'prompt' or 'prompt_token_ids'"),
    "unknown key": ({"prompt": {"prompt": "a", "image": 1}}, ValueError, "not 'image'"),
    "salt": ({"prompt": {"prompt": "a", "cache_salt": 5}}, ValueError, "cache_salt is 5; it must be a string"),
    "half a character": ({"prompt": "\ud800"}, ValueError, "half of a surrogate pair"),
    "half, long": ({"prompt": "\ud800" * 2000}, ValueError, "half of a surrogate pair"),
    "stop ids": ({"sampling_params": SamplingParams(stop_token_ids=(272,))}, ValueError, "stop_token_ids has 272"),
    "params": ({"sampling_params": {"temperature": 0}}, TypeError, "sampling_params must be SamplingParams, not dict"),
    "priority": ({"priority": "high"}, ValueError, "priority is 'high'; it must be an integer"),
    "client": ({"client": None}, ValueError, "client is None; it must be a string"),
    "deadline": ({"deadline_ms": 0}, ValueError, "deadline_ms is 0; it must be a positive number of milliseconds"),
    "late": ({"deadline_ms": float("nan")}, ValueError, "deadline_ms is nan"),
    "id": ({"request_id": 5}, ValueError, "request_id is 5; it must be a string that is not empty"),
    "no id": ({"request_id": ""}, ValueError, "request_id is ''"),
}  # fmt: skip


def test_bad_requests_fail_alone(engine, model):
    async def main():
        async with serving(engine) as llm:
            others = [asyncio.create_task(result_of(llm.generate([i], LONG))) for i in range(5)]
            for arguments, kind, message in BAD.values():
                stream = llm.generate(**{"prompt": [1], "sampling_params": GREEDY, **arguments})
                with pytest.raises(kind, match=message):
                    await anext(stream)
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            for i, other in enumerate(others):
                assert (await other).ids == oracle(model, [i], LONG)[0]

    run(main())


def test_request_ids(engine):
    """Any text is an id. One that is in use is refused, one that was in use is not."""

    async def main():
        async with serving(engine) as llm:
            for name in ("Grüße 世界 🙂", "a\nb\0", " ", "x" * 5000, "0", "1"):
                stream = llm.generate([1], LONG, request_id=name)
                assert stream.request_id == name and (await anext(stream)).request_id == name
                with pytest.raises(
                    ValueError, match="is already running; use another or wait until it has finished"
                ):
                    await anext(llm.generate([2], LONG, request_id=name))
                await llm.abort(name)
                assert (await result_of(stream)).finish_reason == "abort"
                assert len((await result_of(llm.generate([2], GREEDY, request_id=name))).ids) == 12
            ids = {llm.generate([1]).request_id for _ in range(100)}
            assert len(ids) == 100

    run(main())


def test_an_id_is_free_as_soon_as_its_request_is_aborted(engine, model):
    """Although the engine has still to report the end of the first: it must not end the second."""

    async def main():
        async with serving(engine) as llm:
            for _ in range(20):
                first = llm.generate([1], LONG, request_id="a")
                await anext(first)
                first.close()
                second = llm.generate([2], LONG, request_id="a")
                await anext(second)
                abort = asyncio.create_task(llm.abort("a"))
                await asyncio.sleep(0)
                third = asyncio.create_task(result_of(llm.generate([3], GREEDY, request_id="a")))
                assert (await result_of(second)).finish_reason == "abort"
                await abort
                assert (await third).ids == oracle(model, [3], GREEDY)[0]

    run(main())


def test_max_waiting(slow_engine, monkeypatch):
    """Two run and three wait; then nobody else may, until one of those has left."""
    gate = Gate(slow_engine, monkeypatch)

    async def main():
        async with serving(slow_engine, max_waiting=3) as llm:
            running = [asyncio.create_task(result_of(llm.generate([i], LONG))) for i in range(2)]
            await gate.let()
            await until(lambda: len(slow_engine.scheduler.running) == 2)
            await gate.let()
            waiting = [asyncio.create_task(result_of(llm.generate([i], SHORT))) for i in range(3)]
            await asyncio.sleep(0)
            for _ in range(2):
                with pytest.raises(
                    QueueFullError, match=r"3 requests are waiting and max_waiting is 3; try again later"
                ):
                    await anext(llm.generate([9], SHORT))
                await gate.let()  # from the inbox into the engine's queue: they still count, and once
                await until(lambda: slow_engine.num_waiting == 3)
            waiting[-1].cancel()
            await asyncio.gather(waiting.pop(), return_exceptions=True)
            await gate.let()
            waiting.append(asyncio.create_task(result_of(llm.generate([5], SHORT))))
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await anext(llm.generate([9], SHORT))
            gate.open()
            assert [len(r.ids) for r in await asyncio.gather(*running, *waiting)] == [100, 100, 3, 3, 3]

    run(main())


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3"])
def test_max_waiting_out_of_range(engine, value):
    with pytest.raises(
        ValueError, match=r"max_waiting is .*; it must be an integer of at least 1, or None for no limit"
    ):
        AsyncLLM.from_engine(engine, max_waiting=value)


def test_places_are_given_back(engine):
    """Whatever becomes of a request, it does not count among the waiting for ever."""

    async def main():
        async with serving(engine, max_waiting=2) as llm:
            for i in range(30):
                with contextlib.suppress(ValueError):
                    await anext(llm.generate([272], GREEDY))
                task = asyncio.create_task(result_of(llm.generate("y" * 3000 if i % 2 else [1], GREEDY)))
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ValueError):
                    await task
                await llm.check_health()
            assert len((await result_of(llm.generate([1], GREEDY))).ids) == 12

    run(main())


def test_a_poisoned_detokenizer_fails_one_request(engine, model, monkeypatch):
    async def main():
        async with serving(engine) as llm:
            streams = [llm.generate([i], LONG) for i in range(3)]
            for stream in streams:
                await anext(stream)
            poisoned = engine.requests.by_id[streams[1].request_id].readers[0]
            monkeypatch.setattr(poisoned, "push", lambda new: 1 / 0)
            pieces = [piece async for piece in streams[1]]
            assert isinstance(pieces[-1].error, ZeroDivisionError) and pieces[-1].finished
            assert pieces[-1].outputs[0].finish_reason == "error"
            assert not llm.errored
            assert len((await result_of(llm.generate([5], GREEDY))).ids) == 12
            for stream in (streams[0], streams[2]):
                assert (await result_of(stream)).finish_reason == "length"

    run(main())


# -- the rest ------------------------------------------------------------------------------------------------------


def test_fork(engine, model):
    async def main():
        async with serving(engine) as llm:
            parent = llm.generate([1, 2], LONG, request_id="parent")
            await anext(parent)
            child = await llm.fork("parent", GREEDY, new_request_id="child")
            assert child.request_id == "child"
            ids, want = (await result_of(child)).ids, oracle(model, [1, 2], LONG)[0]
            assert any(want[i : i + 12] == ids for i in range(1, 89))
            with pytest.raises(ValueError, match="nobody"):
                await llm.fork("nobody", GREEDY)
            for how in ("closed", "cancelled"):
                parent = llm.generate([1, 2], LONG)
                await anext(parent)
                task = asyncio.create_task(llm.fork(parent.request_id, LONG))
                await asyncio.sleep(0)
                if how == "cancelled":
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                else:
                    (await task).close()
                parent.close()
                await until(lambda: not llm._desk._names)

    run(main())


def test_calls_that_go_to_the_engine(engine):
    async def main():
        async with serving(engine) as llm:
            await llm.reset_prefix_cache()
            await llm.sleep()
            await llm.wake_up()
            await llm.check_health()
            assert llm.get_metrics() == engine.metrics.snapshot() != [] and llm.is_running
            assert "running" in repr(llm)
            assert len((await result_of(llm.generate([1], GREEDY))).ids) == 12

    run(main())


def test_sleeping_with_requests(engine, model):
    """They wait and go on; those that are aborted end in their sleep, and so does the engine."""

    async def main():
        async with serving(engine) as llm:
            streams = [llm.generate([i], LONG) for i in range(6)]
            first = [(await anext(stream)).outputs[0].token_ids for stream in streams[:3]]
            await llm.sleep()
            await until(lambda: not engine.has_work)
            late = [asyncio.create_task(result_of(stream)) for stream in streams[3:]]
            await llm.check_health()
            await llm.abort(streams[1].request_id)
            assert (await result_of(streams[1])).finish_reason == "abort"
            await llm.wake_up()
            for i in (0, 2):
                assert first[i] + (await result_of(streams[i])).ids == oracle(model, [i], LONG)[0]
            assert [len((await task).ids) for task in late] == [100] * 3
            stream = llm.generate([1], LONG)
            await anext(stream)
            await llm.sleep()
        assert (await result_of(stream)).finish_reason == "abort"

    run(main())
    engine.wake_up()
    control.set_gauges(engine)


def test_samples_of_a_slow_consumer(engine):
    """With n samples a merged piece has each of them once."""
    params = SamplingParams(temperature=1, n=3, seed=1, max_tokens=40, ignore_eos=True)
    engine.add_request([1, 2], params)
    want = [[], [], []]
    while engine.has_work:
        for piece in engine.step():
            for output in piece.outputs:
                want[output.index] += output.token_ids

    async def main():
        async with serving(engine) as llm:
            stream = llm.generate([1, 2], params)
            first = await anext(stream)
            await until(lambda: not llm._desk._routes)
            [rest] = [piece async for piece in stream]
            assert rest.finished and [output.index for output in rest.outputs] == [0, 1, 2]
            for output in first.outputs:
                rest.outputs[output.index].token_ids[:0] = output.token_ids
                rest.outputs[output.index].text = output.text + rest.outputs[output.index].text
            assert [output.token_ids for output in rest.outputs] == want
            assert [output.finish_reason for output in rest.outputs] == ["length"] * 3
            for output in rest.outputs:
                assert output.text == engine.tokenizer.decode(output.token_ids)

    run(main())


def merge(*pieces):
    builder = OutputBuilder()
    for piece in pieces:
        builder.add(piece)
    return builder.output()


def test_merge():
    """Text and lists grow, the newest of everything else counts, samples keep their order."""

    def piece(*outputs, **rest):
        return RequestOutput("a", "prompt", [1, 2], list(outputs), **rest)

    first = piece(CompletionOutput(2, "x", [1]), CompletionOutput(0, "a", [5], "stop", 5))
    second = piece(CompletionOutput(1, "m", [7]), CompletionOutput(2, "yz", [2, 3], "length"), finished=True)
    whole = merge(first, second)
    assert whole.outputs == [
        CompletionOutput(0, "a", [5], "stop", 5),
        CompletionOutput(1, "m", [7]),
        CompletionOutput(2, "xyz", [1, 2, 3], "length"),
    ]
    assert whole.finished and whole.prompt_token_ids == [1, 2] and whole.prompt == "prompt"
    error = ValueError()
    assert merge(piece(), piece(finished=True, error=error)).error is error


def test_health_of_an_engine_that_hangs(engine, monkeypatch):
    gate = Gate(engine, monkeypatch)

    async def main():
        async with serving(engine) as llm:
            task = asyncio.create_task(result_of(llm.generate([1], GREEDY)))
            await until(gate.waiting.is_set)
            with pytest.raises(TimeoutError, match=r"thread has not answered for 0\.05 s"):
                await llm.check_health(timeout=0.05)
            gate.open()
            await llm.check_health()
            await task

    run(main())

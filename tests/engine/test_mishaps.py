"""What goes wrong in the middle of something: interrupts, policies that raise, restores under readers."""

import pickle
import signal

import pytest

from harness import GREEDY, assert_idle, drain, make_engine, oracle, run_all
from jaxsched import LLM, SamplingParams
from jaxsched.schedule.policies import Policy

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SMALL = {"max_num_seqs": 4, "num_pages": 64, "page_size": 8, "max_model_len": 128, "num_scheduler_steps": 4,
         "prefill_chunk_size": 32, "use_tqdm_on_load": False}  # fmt: skip


@pytest.mark.parametrize("what", ["close", "sleep", "fork"])
def test_an_interrupt_inside_the_scheduler_waits(toy, monkeypatch, what):
    """Ctrl-C between two lines of the bookkeeping: it comes afterwards, and nothing is half done."""
    model = toy("base")
    with LLM(model.path, **SMALL) as llm:
        stream = llm.stream([[1, 2, 3]], LONG)
        _, piece = next(stream)
        memory = llm.engine.scheduler.memory
        for name in ("release", "publish"):
            original = getattr(memory, name)

            def interrupted(*args, original=original):
                signal.raise_signal(signal.SIGINT)
                return original(*args)

            monkeypatch.setattr(memory, name, interrupted)
        act = {"close": stream.close, "sleep": llm.sleep, "fork": lambda: llm.fork(piece.request_id).close()}[
            what
        ]
        with pytest.raises(KeyboardInterrupt):
            act()
        monkeypatch.undo()
        if what == "sleep":
            llm.wake_up()
        stream.close()
        del act
        prompts = [[i, 7] for i in range(6)]
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            assert output.outputs[0].token_ids == oracle(model, prompt, GREEDY)[0]
        assert_idle(llm.engine)


class Bad(Policy):
    """Raises for one length of prompt; for another its key does not compare."""

    name = "bad"

    def key(self, sequence):
        if len(sequence.prompt) == 5:
            raise KeyError("no key")
        return "text" if len(sequence.prompt) == 6 else sequence.arrival


@pytest.mark.parametrize(("length", "error"), [(5, KeyError), (6, TypeError)])
def test_a_key_that_raises_fails_one_request(toy, length, error):
    model = toy("base")
    engine = make_engine(model, scheduling_policy=Bad(), max_num_seqs=1)
    first = [engine.add_request([i], GREEDY) for i in range(3)]
    with pytest.raises(error):
        engine.add_request([1] * length, GREEDY, request_id="bad")
    last = engine.add_request([9], GREEDY, request_id="good")
    assert not engine.knows("bad")
    results = drain(engine)
    assert {*first, last} == set(results)
    assert results["good"].ids == oracle(model, [9], GREEDY)[0]
    assert_idle(engine)


class Wrong(Policy):
    """Does whatever it is told that a policy must not do."""

    name = "wrong"

    def __init__(self, how):
        self.how = how

    def first(self, now):
        return None if self.how == "nobody" else super().first(now)

    def victim(self, running):
        return object() if self.how == "victim" else super().victim(running)


def test_a_policy_that_serves_nobody_ends_the_engine_with_the_cause(toy):
    engine = make_engine(toy("base"), scheduling_policy=Wrong("nobody"))
    engine.add_request([1], GREEDY)
    for message in ("policy 'wrong' serves nobody, but 1 wait", "this engine stopped at .*serves nobody"):
        with pytest.raises(RuntimeError, match=message):
            engine.step()


def test_a_policy_that_preempts_nobody_ends_the_engine_with_the_cause(toy):
    engine = make_engine(toy("base"), scheduling_policy=Wrong("victim"), num_pages=17, page_size=8)
    engine.scheduler.memory.expected = 0.0
    for i in range(4):
        engine.add_request([i] * 20, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    engine.scheduler.memory.expected = 0.0
    with pytest.raises(RuntimeError, match="policy 'wrong' preempts somebody who does not run"):
        drain(engine)


def test_whoever_read_before_a_restore_does_not_read_others_tokens(toy):
    with LLM(toy("base").path, **SMALL) as llm:
        snapshot = llm.engine.snapshot()
        old = llm.stream([[1, 2]], LONG)
        next(old)
        llm.engine.restore(snapshot)
        new = llm.stream([[5, 6]], LONG)
        ids = list(next(new)[1].outputs[0].token_ids)
        with pytest.raises(RuntimeError, match="are gone: the engine was restored meanwhile"):
            next(old)
        for _, piece in new:
            ids += piece.outputs[0].token_ids
        assert ids == oracle(toy("base"), [5, 6], LONG)[0]
        assert_idle(llm.engine)


def test_a_restore_that_fails_leaves_the_engine_as_it_was(toy):
    import dataclasses

    engine = make_engine(toy("base"))
    snapshot = dataclasses.replace(engine.snapshot(), host=b"not a pickle")
    engine.add_request([3, 4], LONG)
    engine.step()
    with pytest.raises(pickle.UnpicklingError):
        engine.restore(snapshot)
    assert len(drain(engine)) == 1
    assert_idle(engine)


def test_times_move_to_the_clock_of_the_restoring_engine(toy):
    now = [1000.0]
    engine = make_engine(toy("base"), clock=lambda: now[0], scheduling_policy="priority", max_num_seqs=1)
    for i in range(3):
        engine.add_request([i], GREEDY, request_id=f"old {i}")
    now[0] = 1010.0
    snapshot = engine.snapshot()
    later = [5.0]
    other = make_engine(toy("base"), clock=lambda: later[0], scheduling_policy="priority", max_num_seqs=1)
    other.restore(snapshot)
    later[0] = 6.0
    other.add_request([9], GREEDY, request_id="new")
    order, waits = [], []
    while other.has_work:
        for piece in other.step():
            if piece.finished:
                order.append(piece.request_id)
                waits.append(piece.metrics.time_to_first_token)
    assert order == ["old 0", "old 1", "old 2", "new"]
    assert waits[0] == pytest.approx(11.0) and min(waits) >= 0


def test_samples_fail_together(toy):
    """A text that cannot be made of one sample: the request ends once, with the error, whatever the others did."""
    engine = make_engine(toy("base"))
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=4, ignore_eos=True)
    bad = engine.add_request([1, 2], params)
    good = engine.add_request([3, 4], GREEDY)

    def broken(ids):
        raise UnicodeError("no text")

    engine.requests.by_id[bad].readers[1].push = broken
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    last = [piece for piece in pieces if piece.request_id == bad][-1]
    assert isinstance(last.error, UnicodeError) and last.finished
    assert {output.finish_reason for output in last.outputs} == {"error"}
    assert [p.request_id for p in pieces if p.finished].count(bad) == 1
    assert [p for p in pieces if p.request_id == good][-1].outputs[0].finish_reason == "length"
    assert_idle(engine)


def test_a_full_disk_does_not_stop_the_engine(toy, tmp_path):
    """Not even where warnings are errors, as in these tests."""
    engine = make_engine(toy("base"))

    class Full:
        def append(self, record):
            raise OSError("no space left on device")

    engine.round_log = Full()
    [result] = run_all(engine, [([1], GREEDY)])
    assert len(result.ids) == 12 and engine.round_log is None

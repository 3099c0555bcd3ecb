"""The engine's thread: order of commands, idling, what ends it, and that nobody is left waiting. No model needed."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest

from jaxsched.engine.runner import EngineClosedError, EngineDeadError, EngineRunner


class FakeEngine:
    """Has as many steps of work as commands have given it; calls ``before_plan`` in each, as the real one does."""

    def __init__(self):
        self.before_plan, self.work, self.steps, self.log = None, 0, 0, []
        self.in_step = threading.Event()
        self.go = threading.Event()
        self.go.set()

    @property
    def has_work(self):
        return self.work > 0

    def step(self):
        self.in_step.set()
        self.go.wait(10)
        self.in_step.clear()
        self.log.append("step")
        self.before_plan()
        self.log.append("planned")
        self.work -= 1
        self.steps += 1
        return [self.steps]


class Answers:
    """A ``done`` that remembers, and a way to wait for it."""

    def __init__(self):
        self.got, self.event = [], threading.Event()

    def __call__(self, result, error):
        self.got.append((result, error))
        self.event.set()

    def wait(self):
        assert self.event.wait(10), "no answer"
        return self.got[0]


@pytest.fixture
def made():
    """``made(engine)`` -> runner, pieces, ends; stopped at the end of the test."""
    runners = []

    def make(engine=None, start=True, **options):
        pieces, ends = [], []
        settings = {"on_pieces": pieces.extend, "on_end": ends.append, **options}
        runner = EngineRunner(engine or FakeEngine(), **settings)
        runners.append(runner)
        if start:
            runner.start()
        return runner, pieces, ends

    yield make
    for runner in runners:
        if runner._thread.ident is not None:
            runner.engine.go.set()
            runner.stop()
            assert runner.join(10)


def give(work):
    def run(engine):
        engine.work += work

    return run


def ask(runner, run, **options):
    answer = Answers()
    runner.submit(run, answer, **options)
    return answer.wait()


def test_commands_are_answered_and_steps_made(made):
    runner, pieces, ends = made()
    assert runner.running
    assert ask(runner, lambda engine: "hello") == ("hello", None)
    ask(runner, give(3))
    while runner.engine.work:
        time.sleep(0.001)
    runner.stop()
    assert runner.join(10) and not runner.running and runner.error is None
    assert pieces == [1, 2, 3] and ends == [None]
    assert runner.engine.before_plan is None


def test_an_error_of_a_command_is_its_own(made):
    runner, _, _ = made()
    result, error = ask(runner, lambda engine: 1 / 0)
    assert result is None and isinstance(error, ZeroDivisionError)
    assert runner.running and ask(runner, lambda engine: 5) == (5, None)


def test_an_error_that_nobody_is_told_of_ends_the_thread(made):
    runner, _, ends = made()
    runner.submit(lambda engine: 1 / 0)
    assert runner.join(10)
    assert [type(e) for e in ends] == [ZeroDivisionError] and runner.error is ends[0]


def test_order(made):
    """Quick commands run just before a planning, others between steps, and none overtakes another."""
    runner, _, _ = made()
    engine = runner.engine
    engine.go.clear()
    ask(runner, give(2))
    assert engine.in_step.wait(10)
    for name, between in [("a", False), ("b", False), ("C", True), ("d", False)]:
        runner.submit(lambda engine, name=name: engine.log.append(name), between_steps=between)
    engine.go.set()
    ask(runner, lambda engine: None, between_steps=True)
    assert engine.log[:7] == ["step", "a", "b", "planned", "C", "d", "step"]


def test_stop_lets_the_work_be_finished(made):
    runner, pieces, _ = made(start=False)
    runner.submit(give(5))
    runner.stop()
    runner.stop()
    runner.start()
    assert runner.join(10) and pieces == [1, 2, 3, 4, 5]


def test_idle_means_asleep(made):
    """No polling: an idle thread uses no processor time."""
    runner, _, _ = made()
    ask(runner, give(1))
    before = ask(runner, lambda engine: time.thread_time())[0]
    time.sleep(0.3)
    assert ask(runner, lambda engine: time.thread_time())[0] - before < 0.02


class Stopped(BaseException):
    """Nothing that ``except Exception`` catches."""


@pytest.mark.parametrize("where", ["step", "on_pieces", "command", "has_work"])
@pytest.mark.parametrize("error", [ZeroDivisionError("boom"), Stopped("boom"), SystemExit(3), MemoryError()])
def test_whatever_ends_the_thread_everyone_is_told(made, where, error):
    def fail(*args):
        raise error

    engine = FakeEngine()
    options = {"on_pieces": fail} if where == "on_pieces" else {}
    if where == "has_work":
        engine = type("Bad", (FakeEngine,), {"has_work": property(lambda self: self.work and fail())})()
    runner, _, ends = made(engine, **options)
    engine.go.clear()
    if where == "step":
        engine.before_plan = engine.step = fail
    answers = [Answers() for _ in range(20)]
    runner.submit(fail if where == "command" else give(2))
    for i, answer in enumerate(answers):
        runner.submit(lambda engine: engine.go.wait(10) and None, answer, between_steps=i % 2 == 1)
    engine.go.set()
    assert runner.join(10)
    assert ends == [error] and runner.error is error and not runner.running
    late = Answers()
    runner.submit(lambda engine: 1, late)
    for _, told in [a.wait() for a in answers if not a.got or a.got[0][1] is not None] + [late.wait()]:
        assert isinstance(told, EngineDeadError) and told.__cause__ is error
        assert repr(error) in str(told) and "make a new one" in str(told)
    assert all(len(a.got) == 1 for a in answers)


def test_an_error_in_on_end_is_not_lost(made):
    def fail(error):
        raise ZeroDivisionError

    runner, _, _ = made(on_end=fail)
    runner.stop()
    assert runner.join(10) and isinstance(runner.error, ZeroDivisionError)


def test_after_the_end(made):
    runner, _, _ = made()
    runner.stop()
    assert runner.join(10)
    result, error = ask(runner, lambda engine: 1)
    assert result is None and isinstance(error, EngineClosedError)
    runner.stop()


def test_every_command_is_answered_once_whenever_the_end_comes(made):
    """Threads submit while the runner stops: each command is run or refused, exactly once."""
    for _ in range(30):
        runner, _, _ = made()
        answers = [[] for _ in range(4)]

        def work(mine, runner=runner):
            for _ in range(50):
                mine.append(answer := Answers())
                runner.submit(lambda engine: "ran", answer)

        threads = [threading.Thread(target=work, args=(mine,)) for mine in answers]
        for thread in threads:
            thread.start()
        runner.stop()
        for thread in threads:
            thread.join(10)
        assert runner.join(10)
        for answer in [a for mine in answers for a in mine]:
            result, error = answer.wait()
            assert len(answer.got) == 1
            assert result == "ran" or isinstance(error, EngineClosedError)


def test_nothing_is_kept_alive_after_the_end(made):
    engine = FakeEngine()
    runner = EngineRunner(engine, on_pieces=lambda pieces: None, on_end=lambda error: None)
    runner.start()
    ask(runner, give(3))
    runner.stop()
    assert runner.join(10)
    gone = weakref.ref(engine)
    del runner, engine
    gc.collect()
    assert gone() is None


def test_the_interpreter_ends_quietly():
    """Also in the middle of a step, without a stop."""
    code = textwrap.dedent("""
        import time
        from jaxsched.engine.runner import EngineRunner
        class Engine:
            before_plan = None
            has_work = True
            def step(self):
                self.before_plan()
                time.sleep(0.01)
                return []
        for _ in range(3):
            EngineRunner(Engine(), on_pieces=lambda p: None, on_end=lambda e: print("end", e)).start()
        time.sleep(0.05)
    """)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "end None\n" * 3, "")

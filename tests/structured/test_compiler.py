"""The compiler: cache, threads, the process behind it, levels."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxsched.structured import AutomatonMatcher, ConstraintCompiler, GrammarMatcher
from jaxsched.structured.regex import checked_regex
from jaxsched.structured.schema import NotFinite, lower
from jaxsched.text import Tokenizer
from structured.suite import PERSON, SUITE, TREE, params
from toys import EOS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fresh(byte_level: Tokenizer):
    made = ConstraintCompiler(byte_level, byte_level.vocab_size, [EOS], cache_size=4)
    yield made
    made.close()


def test_levels_and_reasons(fresh: ConstraintCompiler) -> None:
    device = fresh.compile(params(regex="ab"))
    assert (device.level, device.why) == ("device", "regex, 3 states")
    assert isinstance(device.matcher(), AutomatonMatcher)
    host = fresh.compile(params(json=TREE))
    assert (host.level, host.why, host.automaton) == ("host", "recursive schema", None)
    assert isinstance(host.matcher(), GrammarMatcher)
    assert device.matcher() is not device.matcher()


def test_equal_specs_are_compiled_once(fresh: ConstraintCompiler) -> None:
    first = fresh.compile(params(json=PERSON))
    assert fresh.compile(params(json=dict(PERSON))) is first
    assert fresh.compile(params(json=PERSON, disable_any_whitespace=True)) is not first
    assert fresh.compile(params(choice=["a", "b"])) is fresh.compile(params(choice=("a", "b", "a")))
    a, b = (fresh.compile(params(choice=words)).automaton for words in (["a", "b"], ["b", "a"]))
    assert a is not None and b is not None and a.key != b.key


def test_the_cache_forgets_the_least_recent(fresh: ConstraintCompiler) -> None:
    first = fresh.compile(params(regex="a"))
    for word in "bcd":
        fresh.compile(params(regex=word))
    assert fresh.compile(params(regex="a")) is first
    fresh.compile(params(regex="e"))  # drops b
    fresh.compile(params(regex="f"))  # drops c
    assert fresh.compile(params(regex="a")) is first
    for word in "ghij":
        fresh.compile(params(regex=word))
    assert fresh.compile(params(regex="a")) is not first


def test_threads(byte_level: Tokenizer) -> None:
    """Many threads ask for the same few constraints; each is built once, and all get the same object."""
    compiler = ConstraintCompiler(byte_level, byte_level.vocab_size, [EOS])
    built: list[object] = []
    build = compiler._build
    compiler._build = lambda spec: (built.append(spec), build(spec))[1]  # type: ignore[method-assign]
    cases = SUITE[:8] + [case for case in SUITE if case.level == "host"][:4]
    barrier = threading.Barrier(8)

    def ask(index: int) -> list[int]:
        barrier.wait()
        return [id(compiler.compile(params(**case.spec))) for case in cases]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert all(answer == answers[0] for answer in answers)
    assert len(built) == len(cases)
    compiler.close()


def test_errors_of_one_are_errors_of_all_that_wait(fresh: ConstraintCompiler) -> None:
    def ask(_: int) -> str:
        with pytest.raises(ValueError) as caught:
            fresh.compile(params(regex="a{30000}"))
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 1


def test_closing_ends_the_process_and_may_be_followed_by_more(fresh: ConstraintCompiler) -> None:
    fresh.compile(params(regex="a"))
    process = fresh._worker._process
    assert process is not None and process.poll() is None
    fresh.close()
    assert process.poll() is not None
    assert fresh.compile(params(regex="a")).level == "device"
    fresh.close()
    fresh.close()


def test_the_process_may_die(fresh: ConstraintCompiler) -> None:
    fresh.compile(params(regex="a"))
    process = fresh._worker._process
    assert process is not None
    process.kill()
    process.wait()
    assert fresh.compile(params(regex="b")).level == "device"


@pytest.mark.skipif(os.name != "posix", reason="looks for a process by its number")
def test_the_process_ends_with_its_parent() -> None:
    code = (
        "import os\nfrom jaxsched.structured.worker import DfaWorker\nw = DfaWorker(100, 5, 1 << 30)\nw.regex('a')\n"
        "print(w._process.pid, flush=True)\nos._exit(1)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    pid, end = int(run.stdout), time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").exists() and " Z " in Path(f"/proc/{pid}/stat").read_text():
            return  # ended, and nobody has asked how
        time.sleep(0.05)
    raise AssertionError("still running")


@pytest.mark.parametrize(
    ("missing", "fields"), [("outlines_core", {"regex": "a"}), ("llguidance", {"json_object": True})]
)
def test_missing_packages(
    fresh: ConstraintCompiler, monkeypatch, missing: str, fields: dict[str, object]
) -> None:
    if missing == "outlines_core":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    else:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf'{missing}.*pip install "jaxsched\[structured\]"'):
        fresh.compile(params(**fields))
    monkeypatch.undo()
    assert fresh.compile(params(**fields)) is not None  # not remembered


def test_importing_loads_no_library() -> None:
    heavy = {"jax", "llguidance", "outlines_core"}
    code = f"import sys, jaxsched.structured.compiler\nassert not {heavy} & set(sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


SLOW = r"(a|b)*a(a|b){20}x"  # takes until the limit


def test_closing_ends_what_is_being_compiled(byte_level):
    """Nobody waits for compilations that nobody wants any more."""
    compiler = ConstraintCompiler(byte_level, byte_level.vocab_size, [EOS], time_limit=60.0)
    errors = []

    def compile_(number):
        try:
            compiler.compile(params(regex=SLOW + str(number)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=compile_, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while compiler._worker._process is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    began = time.monotonic()
    compiler.close()
    for thread in threads:
        thread.join(20)
    assert time.monotonic() - began < 5 and len(errors) == 3
    assert all(isinstance(error, RuntimeError) and "closed" in str(error) for error in errors)
    assert compiler.compile(params(regex="ab")).level == "device"  # it can be used again
    compiler.close()


def test_known_constraints_need_no_waiting(byte_level):
    compiler = ConstraintCompiler(byte_level, byte_level.vocab_size, [EOS])
    assert compiler.known(params(regex="ab")) is None
    made = compiler.compile(params(regex="ab"))
    assert compiler.known(params(regex="ab")) is made
    with pytest.raises(ValueError, match="regex"):
        compiler.compile(params(regex="(a"))
    with pytest.raises(ValueError, match="regex"):
        compiler.known(params(regex="(a"))
    compiler.close()


def test_an_interrupt_of_the_terminal_is_not_for_the_worker(byte_level):
    compiler = ConstraintCompiler(byte_level, byte_level.vocab_size, [EOS])
    compiler.compile(params(regex="ab"))
    assert os.getsid(compiler._worker._process.pid) != os.getsid(0)
    compiler.close()


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"enum": [*range(60000)]}, {"enum": [*range(100000, 160000)]}]},
        {"oneOf": [{"const": i} for i in range(4900)]},
    ],
    ids=["values", "branches"],
)
def test_comparing_is_bounded(schema):
    with pytest.raises(NotFinite):
        lower(schema)


def test_long_regexes_are_checked_in_one_pass():
    began = time.monotonic()
    checked_regex("(a)" * 100_000 + "[b]" * 100_000)
    assert time.monotonic() - began < 5

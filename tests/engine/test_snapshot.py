"""A running engine is a value: it can be copied, pickled, saved with orbax and continued elsewhere, token for token."""

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from harness import GREEDY, assert_idle, collect, drain, make_engine, oracle
from jaxsched import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"num_pages": 17}  # some of the requests wait or are preempted

REQUESTS = [
    ([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=40)),
    ([7] * 50, SamplingParams(temperature=1.2, seed=3, top_k=50, max_tokens=30)),
    (list(range(70, 110)), SamplingParams(temperature=0.8, seed=4, top_p=0.9, max_tokens=45, ignore_eos=True)),
    ([9, 8], SamplingParams(temperature=0, max_tokens=17, stop_token_ids=[271])),
    ([65, 66, 67], SamplingParams(temperature=2.0, max_tokens=25, skip_special_tokens=False)),
    ([5] * 33, SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)),
]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(toy):
    engine = make_engine(toy("base"), **SETTINGS)
    add_all(engine)
    return drain(engine)


def add_all(engine):
    for prompt, params in REQUESTS:
        engine.add_request(prompt, params)


def halfway(model, steps, **settings):
    """An engine after some steps, and what it has given out so far."""
    engine, results = make_engine(model, **{**SETTINGS, **settings}), {}
    add_all(engine)
    for _ in range(steps):
        collect(engine, results)
    return engine, results


def test_the_uninterrupted_run(toy, uninterrupted):
    for (prompt, params), result in zip(REQUESTS[:4], uninterrupted.values(), strict=False):
        assert (result.ids, result.finish_reason) == oracle(toy("base"), prompt, params)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 4, 9])
def test_continue_in_another_engine(toy, uninterrupted, steps, run_ahead):
    """The engine that was copied goes on too, and neither disturbs the other or the copy."""
    engine, results = halfway(toy("base"), steps, run_ahead=run_ahead)
    snapshot = engine.snapshot()
    kept = pickle.dumps(snapshot)
    before = pickle.loads(pickle.dumps(results))
    assert drain(engine, results) == uninterrupted
    assert_idle(engine)

    other = make_engine(toy("base"), **SETTINGS, run_ahead=run_ahead, seed=99)
    other.add_request([1], GREEDY)  # what it was doing is dropped
    other.step()
    for _ in range(2):
        other.restore(snapshot)
        assert drain(other, pickle.loads(pickle.dumps(before))) == uninterrupted
        assert_idle(other)
    a, b = jax.tree.leaves(snapshot.state), jax.tree.leaves(pickle.loads(kept).state)
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(left, right, err_msg="the snapshot was written to")


CONTINUE = """
import pickle, sys
from pathlib import Path
from harness import drain, load, make_engine
from jaxsched.startup import use_compilation_cache
use_compilation_cache()
folder = Path(sys.argv[1])
snapshot, results, settings = pickle.loads((folder / "running.pickle").read_bytes())
engine = make_engine(load(Path(sys.argv[2])), **settings)
engine.restore(snapshot)
(folder / "done.pickle").write_bytes(pickle.dumps(drain(engine, results)))
"""


def test_continue_in_another_process(toy, uninterrupted, tmp_path):
    model = toy("base")
    engine, results = halfway(model, 4)
    saved = pickle.dumps((engine.snapshot(), results, SETTINGS))
    (tmp_path / "running.pickle").write_bytes(saved)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-W", "error", "-c", CONTINUE, str(tmp_path), str(model.path)]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert pickle.loads((tmp_path / "done.pickle").read_bytes()) == uninterrupted


def test_new_requests_after_restoring(toy):
    """Ids and seeds go on where the copied engine was: both give the next request the same."""
    engine, _ = halfway(toy("base"), 2)
    other = make_engine(toy("base"), **SETTINGS, seed=5)
    other.restore(engine.snapshot())
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    ids = [e.add_request([4, 4], params) for e in (engine, other)]
    assert ids == [str(len(REQUESTS))] * 2
    assert drain(engine)[ids[0]].ids == drain(other)[ids[1]].ids


def test_the_state_with_orbax(toy, tmp_path):
    engine, _ = halfway(toy("base"), 4)
    state = engine.snapshot().state
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), engine.executor.state)
        restored = checkpointer.restore(tmp_path / "state", shapes)
    assert type(restored) is type(state) and jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_continue_from_orbax(toy, uninterrupted, tmp_path):
    """The device's part by orbax, the host's part as the bytes that it is."""
    engine, results = halfway(toy("base"), 4)
    snapshot = engine.snapshot()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", snapshot.state)
        checkpointer.wait_until_finished()
        state = checkpointer.restore(tmp_path / "state", snapshot.state)
    other = make_engine(toy("base"), **SETTINGS)
    other.restore(dataclasses.replace(snapshot, state=state))
    assert drain(other, results) == uninterrupted


def with_limits(snapshot, **changes):
    limits = dataclasses.replace(snapshot.resolved.limits, **changes)
    return dataclasses.replace(snapshot, resolved=dataclasses.replace(snapshot.resolved, limits=limits))


def with_slots(snapshot, **changes):
    slots = dataclasses.replace(snapshot.state.slots, **changes)
    return dataclasses.replace(snapshot, state=dataclasses.replace(snapshot.state, slots=slots))


OTHERS = {
    "num_pages": (lambda s: with_limits(s, num_pages=18), "another resolved: .*num_pages=18.*num_pages=17"),
    "num_slots": (lambda s: with_limits(s, num_slots=5), "another resolved: .*num_slots=5.*num_slots=4"),
    "page_size": (lambda s: with_limits(s, page_size=16), "another resolved: .*page_size=16.*page_size=8"),
    "model": (
        lambda s: dataclasses.replace(s, model=dataclasses.replace(s.model, num_kv_heads=1)),
        "another model: .*num_kv_heads=1.*num_kv_heads=2.*; restore into an engine with equal settings",
    ),
    "max_stop_ids": (
        lambda s: with_slots(s, stop_ids=s.state.slots.stop_ids[:, :4]),
        "max_stop_ids 4, this engine has 8; restore into an engine with equal settings",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_snapshot_of_other_sizes_is_refused(toy, name):
    change, message = OTHERS[name]
    snapshot = change(halfway(toy("base"), 1)[0].snapshot())
    engine = make_engine(toy("base"), **SETTINGS)
    with pytest.raises(ValueError, match=f"the snapshot is of {message}"):
        engine.restore(snapshot)
    engine.add_request([1, 2], GREEDY)
    assert len(drain(engine)["0"].ids) == GREEDY.max_tokens, "it must be as it was"

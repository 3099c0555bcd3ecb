"""Engines that an AsyncLLM serves for a test, and must leave as they were."""

import gc

import pytest

from async_harness import SLOW, calm, engine_threads
from harness import assert_idle, make_engine


@pytest.fixture(scope="module")
def model(toy):
    return toy("base", add_bos=True)


@pytest.fixture(scope="module")
def engine(model):
    """One engine for most tests. Each AsyncLLM serves it for a while and must leave it as it was."""
    return calm(make_engine(model))


@pytest.fixture(scope="module")
def slow_engine(model):
    return make_engine(model, **SLOW)


@pytest.fixture(autouse=True)
def nothing_left(request):
    """No thread of the engine and no request outlives a test."""
    yield
    gc.collect()
    assert not engine_threads()
    for name in {"engine", "slow_engine"} & set(request.fixturenames):
        assert_idle(request.getfixturevalue(name))

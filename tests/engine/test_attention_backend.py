"""Which attention an engine runs: by default that of its device, or the one that was asked for."""

import numpy as np
import pytest

from harness import assert_idle, make_engine, oracle, random_prompt, run_all
from jaxsched import EngineConfig, SamplingParams

FEW_PROGRAMS = {"num_scheduler_steps": 2, "max_num_seqs": 2, "prefill_chunk_size": 16, "executor": "dispatch"}


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_an_engine_runs_what_was_asked_for(toy, backend):
    """The tokens are those of the oracle. A Triton kernel runs in Pallas's interpreter on a CPU."""
    model, rng = toy("base", num_layers=1), np.random.default_rng(0)
    engine = make_engine(model, **FEW_PROGRAMS, attention_backend=backend)
    assert {key.features.attention for key in engine.executor.programs.keys if key.steps} == {backend}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requests = [(random_prompt(rng, length), params) for length in (1, 40, 17, 5)]
    for result, request in zip(run_all(engine, requests), requests, strict=True):
        assert result.ids == oracle(model, *request)[0]
    assert_idle(engine)


@pytest.mark.parametrize(("platform", "want"), [("cpu", "xla"), ("gpu", "auto")])
def test_the_default(toy, platform, want):
    """On a GPU it is decided where the program is lowered, see jaxsched.pallas_kernels."""
    free = None if platform == "cpu" else 1 << 34
    assert EngineConfig().resolve(toy("base").config, platform, free).attention == want


def test_what_cannot_run_is_refused_when_the_engine_is_made(toy):
    with pytest.raises(
        ValueError, match=r"attention_backend is 'flash'; it must be one of auto, reference, xla"
    ):
        EngineConfig(attention_backend="flash")
    with pytest.raises(
        ValueError, match=r"attention_backend 'mosaic' cannot run this model: .*leave it at \"auto\""
    ):
        make_engine(toy("base"), attention_backend="mosaic")

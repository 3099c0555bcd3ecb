"""Any SamplingParams: a clear ValueError, or a request that completes. Never a dead engine, nothing left behind."""

import functools
import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import Result, assert_idle, drain, make_engine
from jaxsched import SamplingParams

EDGES = st.sampled_from(
    [0, 1, -1, 2, 255, 267, 268, 10**6, 2**31, 2**63, 10**30, 1e-45, 1e-5, 0.5, 1e30, -0.0]
)
ODD = st.sampled_from([None, True, "x", b"x", [], {}, math.nan, math.inf, -math.inf, 1 + 0j, object()])
IDS = st.lists(st.integers(-2, 270), max_size=5)
TEXTS = st.lists(st.text(max_size=4), max_size=3)
SPECS = st.sampled_from(
    [
        {"regex": "[a-c]{2,5}"},
        {"regex": "(a"},
        {"choice": ["é", "b\n"]},
        {"choice": []},
        {"json": {"type": "integer", "minimum": 3}},
        {"json": "{"},
        {"json_object": True},
        {"grammar": 'start: "a" start | "b"'},
        {"regex": "a", "choice": ["b"]},
    ]
)
LIKELY = {
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 3),
    "top_k": st.integers(-1, 300),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-5, 5),
    "max_tokens": st.integers(0, 12),
    "min_tokens": st.integers(0, 5),
    "stop_token_ids": IDS,
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "detokenize": st.booleans(),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 3),
    "logit_bias": st.dictionaries(st.integers(-1, 269), st.floats(-100, 100), max_size=4),
    "allowed_token_ids": IDS,
    "bad_words": TEXTS,
    "stop": TEXTS,
    "include_stop_str_in_output": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "logprobs": st.integers(-1, 25),
    "prompt_logprobs": st.integers(-1, 25),
    "logprob_token_ids": IDS,
    "truncate_prompt_tokens": st.integers(-1, 200),
    "structured_outputs": SPECS,
}
FIELDS = {name: st.one_of(usual, usual, usual, EDGES, ODD) for name, usual in LIKELY.items()}
SOME = st.lists(st.sampled_from(sorted(FIELDS)), max_size=9, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)


@functools.cache
def engine_of(model):
    return make_engine(model, num_pages=34, max_num_seqs=3, num_scheduler_steps=1, executor="dispatch")


def served(engine, fields, prompt) -> bool:
    """Whether the request was taken; if so it has been completed."""
    try:
        params = SamplingParams(**fields)
        request_id = engine.add_request(prompt, params)
    except ValueError as error:
        assert str(error)
        return False
    results: dict[str, Result] = drain(engine)
    for index in range(params.n):
        result = results[request_id if index == 0 else f"{request_id}#{index}"]
        assert result.finish_reason in ("stop", "length") or "no token is allowed" in result.stop_reason
        assert params.max_tokens is None or len(result.ids) <= params.max_tokens
        if params.logprobs is not None:
            assert len(result.logprobs) == len(result.ids)
    return True


def test_any_parameters(toy):
    engine, taken = engine_of(toy("base", num_layers=1)), []

    @settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(SOME, st.lists(st.integers(0, 267), min_size=1, max_size=40))
    def check(fields, prompt):
        taken.append(served(engine, fields, prompt))
        assert_idle(engine)

    check()
    assert 15 < sum(taken) < len(taken) - 15
    assert served(engine, {"temperature": 0.0, "max_tokens": 3}, [1, 2])

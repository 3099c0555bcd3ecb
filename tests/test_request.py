"""SamplingParams: what is accepted, what is refused, and that the error says it all."""

import dataclasses
import math
import pickle
import re

import numpy as np
import pytest

from jaxsched import SamplingParams

FINITE = "it must be a finite number of at least 0"
REFUSED = [
    # field, value, message after "{field} is {value!r}; "
    *[("temperature", v, FINITE) for v in (-0.1, math.nan, -math.inf, "1", True, None, [1.0])],
    ("temperature", math.inf, "it must be finite"),
    *[("top_p", v, r"it must be in (0, 1]; 1 turns it off, and for the most likely token use temperature=0")
      for v in (-0.1, 1.1, math.nan, math.inf, "0.9", True, None)],
    *[("min_p", v, "it must be in [0, 1]") for v in (-0.1, 1.01, math.nan, math.inf, "0", False, None)],
    *[("top_k", v, "it must be an integer of at least 0; 0 or -1 turns it off")
      for v in (-2, 1.5, math.nan, math.inf, "3", True, None)],
    *[("max_tokens", v, "it must be an integer of at least 0") for v in (-1, 2.0, math.nan, math.inf, "16", True)],
    *[("seed", v, f"it must be an integer in {-2**63}..{2**64 - 1}")
      for v in (2**64, -(2**63) - 1, 1.0, math.nan, "7", True)],
    *[("stop_token_ids", v, "it must be a list of token ids") for v in (5, 1.5, True)],
    *[(name, v, "it must be True or False")
      for name in ("ignore_eos", "skip_special_tokens", "detokenize") for v in (1, 0, "yes", None)],
]  # fmt: skip


@pytest.mark.parametrize(("field", "value", "message"), REFUSED, ids=lambda v: str(v)[:24])
def test_refused(field, value, message):
    with pytest.raises(ValueError, match="^" + re.escape(f"{field} is {value!r}; {message}")):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("value", [0, 0.0, -0.0])
def test_top_p_zero(value):
    with pytest.raises(
        ValueError,
        match=r"top_p is -?0(\.0)?; it must be in \(0, 1\]; 1 turns it off, and for the most likely",
    ):
        SamplingParams(top_p=value)


@pytest.mark.parametrize(
    ("ids", "culprit"),
    [([1, -2], "-2"), ([1.5], "1.5"), (["a"], "'a'"), ("12", "'1'"), ([True], "True"), ([None], "None")],
)  # fmt: skip
def test_bad_stop_ids(ids, culprit):
    message = f"stop_token_ids is {culprit}; it must be an integer of at least 0"
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(stop_token_ids=ids)


def test_unknown_names():
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=1)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": np.int64(5), "max_tokens": np.uint8(3)}, {"top_k": 5, "max_tokens": 3}),
        ({"temperature": 1, "top_p": np.float32(0.5)}, {"temperature": 1.0, "top_p": 0.5}),
        (
            {"max_tokens": None, "seed": None, "stop_token_ids": None},
            {"max_tokens": None, "stop_token_ids": ()},
        ),
        ({"stop_token_ids": [3, 4]}, {"stop_token_ids": (3, 4)}),
        ({"stop_token_ids": np.array([3, 4])}, {"stop_token_ids": (3, 4)}),
        ({"stop_token_ids": {9}}, {"stop_token_ids": (9,)}),
        ({"seed": -1, "max_tokens": 0}, {"seed": -1, "max_tokens": 0}),
        ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
    ],
    ids=str,
)
def test_accepted(given, stored):
    params = SamplingParams(**given)
    for name, value in stored.items():
        assert getattr(params, name) == value and type(getattr(params, name)) is type(value)
    assert hash(params) == hash(dataclasses.replace(params))
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-6, True), (9.9e-6, True), (1e-5, False), (1, False)]
)
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_params_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]

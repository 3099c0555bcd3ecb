"""What users hand in: what is accepted, what is refused, that errors say it all."""

import dataclasses
import json
import math
import pickle
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsched import BeamSearchParams, SamplingParams
from jaxsched import StructuredOutputsParams as Structured
from jaxsched.sampling_params import _OTHER_NAMES, TokenBias

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
    *[(name, v, "it must be a list of token ids")
      for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids") for v in (5, 1.5, True)],
    *[(name, v, "it must be in [-2, 2]")
      for name in ("presence_penalty", "frequency_penalty") for v in (-2.01, 2.1, math.nan, math.inf, "0", None, True)],
    *[("repetition_penalty", v, "it must be a finite number above 0; 1 turns it off")
      for v in (0, 0.0, -1.0, math.nan, -math.inf, "1", None, True)],
    ("repetition_penalty", math.inf, "it must be finite; 1 turns it off"),
    *[("logit_bias", v, "it must be a dict of token ids and numbers") for v in (5, "1", [(1, 2.0)], True)],
    *[("min_tokens", v, "it must be an integer of at least 0") for v in (-1, 1.0, math.nan, "1", None, True)],
    ("min_tokens", 17, "it must be at most max_tokens, 16; raise that"),
    *[(name, v, "it must be an integer of at least 0, None, or -1 for the whole vocabulary")
      for name in ("logprobs", "prompt_logprobs") for v in (-2, 1.0, "1", True, math.nan)],
    *[("truncate_prompt_tokens", v, "it must be an integer of at least 1, None, or -1 for as many as")
      for v in (0, -2, 1.5, "1", True)],
    *[("bad_words", v, "it must be a list of strings") for v in (5, "word", b"word", {"a": 1})],
    *[("stop", v, "it must be a list of strings") for v in (5, b"x", {"a": 1}, True)],
    *[("structured_outputs", v, "it must be StructuredOutputsParams or a dict of its fields")
      for v in (5, "[0-9]", [1], {1: 2}, True)],
    *[(name, v, "it must be True or False")
      for name in ("ignore_eos", "skip_special_tokens", "detokenize", "include_stop_str_in_output",
                   "spaces_between_special_tokens")
      for v in (1, 0, "yes", None)],
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


# What goes together, and what lists are made of.
REFUSED_TOO = [
    ({"stop": ""}, "one of stop is ''; it must be a string that is not empty"),
    ({"stop": ["a", ""]}, "one of stop is ''"),
    ({"stop": ["a", 5]}, "one of stop is 5"),
    ({"stop": ["\udc80"]}, r"one of stop is '\udc80'; it must be a string without lone surrogates"),
    ({"stop": "x", "detokenize": False}, "stop is ('x',), but detokenize is False and there is no text"),
    ({"bad_words": ["a", ""]}, "one of bad_words is ''"),
    ({"bad_words": [None]}, "one of bad_words is None"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty; give at least one token id, or None"),
    ({"allowed_token_ids": [1, -1]}, "allowed_token_ids is -1"),
    ({"logprob_token_ids": ()}, "logprob_token_ids is empty"),
    ({"logprob_token_ids": range(129)}, "logprob_token_ids has 129 token ids; it must have at most 128"),
    ({"logprob_token_ids": ["1"]}, "logprob_token_ids is '1'"),
    ({"logit_bias": {-1: 0}}, "a key of logit_bias is -1; it must be an integer of at least 0"),
    ({"logit_bias": {"a": 0}}, "a key of logit_bias is 'a'"),
    ({"logit_bias": {"\u0663": 0}}, "a key of logit_bias is '\u0663'"),
    ({"logit_bias": {True: 0}}, "a key of logit_bias is True"),
    ({"logit_bias": {1.0: 0}}, "a key of logit_bias is 1.0"),
    ({"logit_bias": {"7": 0, 7: 1}}, "logit_bias has token id 7 twice; leave one out"),
    ({"logit_bias": {7: 100.1}}, "logit_bias[7] is 100.1; it must be in [-100, 100]"),
    ({"logit_bias": {7: math.nan}}, "logit_bias[7] is nan"),
    ({"logit_bias": {7: "1"}}, "logit_bias[7] is '1'"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens is 6; it must be at most max_tokens, 5; raise that"),
    ({"n": 2, "temperature": 0}, "n is 2, but temperature 0 is greedy"),
    ({"n": 1025}, "n is 1025; it must be at most 1024"),
    ({"structured_outputs": {}}, "structured outputs are given by nothing; give exactly one of json, regex, choice"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs: StructuredOutputsParams has no argument 'regexp'"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "given by regex and choice; give exactly one of"),
    ({"temperature": 10**400}, "temperature is 1000"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED_TOO, ids=lambda v: str(v)[:40])
def test_refused_together(given, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        SamplingParams(**given)
    assert len(str(caught.value)) < 300


def test_numbers_too_long_to_print():
    with pytest.raises(ValueError, match=r"^top_k is a very large int; it must be"):
        SamplingParams(top_k=-(10**5000))
    assert SamplingParams(max_tokens=10**5000).max_tokens == 10**5000  # the engine cuts it to fit


@pytest.mark.parametrize(
    ("cls", "given", "said"),
    [
        (SamplingParams, "tempreature", "did you mean 'temperature'?"),
        (SamplingParams, "frobnicate", "known: n, temperature"),
        (SamplingParams, "guided_decoding", "structured_outputs=StructuredOutputsParams"),
        (SamplingParams, "regex", "structured_outputs=StructuredOutputsParams"),
        (SamplingParams, "use_beam_search", "LLM.beam_search"),
        (SamplingParams, "length_penalty", "LLM.beam_search"),
        (SamplingParams, "best_of", "give n and choose by cumulative_logprob"),
        (SamplingParams, "logits_processors", "logit_bias, allowed_token_ids, bad_words and structured_outputs"),
        (SamplingParams, "max_new_tokens", "the name is max_tokens"),
        (SamplingParams, "top_logprobs", "the name is logprobs"),
        (Structured, "json_schema", "the name is json"),
        (Structured, "regexp", "did you mean 'regex'?"),
        (BeamSearchParams, "width", "did you mean 'beam_width'?"),
    ],
)  # fmt: skip
def test_unknown_names(cls, given, said):
    with pytest.raises(TypeError, match=f"^{cls.__name__} has no argument '{given}'; .*{re.escape(said)}"):
        cls(**{given: 1})


def test_advice_is_for_names_that_are_not_here():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert not fields & _OTHER_NAMES.keys()
    for said in _OTHER_NAMES.values():
        (name,) = re.findall(r"the name is (\w+)$", said) or ["n"]
        assert name in fields


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
        ({"presence_penalty": -2, "frequency_penalty": np.float64(2)},
         {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"repetition_penalty": Fraction(3, 2)}, {"repetition_penalty": 1.5}),
        ({"logit_bias": {np.int64(9): np.float32(-100), "03": 1}}, {"logit_bias": TokenBias({3: 1.0, 9: -100.0})}),
        ({"logit_bias": {}}, {"logit_bias": None}),
        ({"allowed_token_ids": np.arange(3), "logprob_token_ids": range(128)},
         {"allowed_token_ids": (0, 1, 2), "logprob_token_ids": tuple(range(128))}),
        ({"allowed_token_ids": None, "logprob_token_ids": None}, {"allowed_token_ids": None}),
        ({"bad_words": [" a", np.str_("b")]}, {"bad_words": (" a", "b")}),
        ({"bad_words": None, "stop": None}, {"bad_words": (), "stop": ()}),
        ({"stop": "\n\n"}, {"stop": ("\n\n",)}),
        ({"stop": ["é", "🙂"], "include_stop_str_in_output": np.True_},
         {"stop": ("é", "🙂"), "include_stop_str_in_output": True}),
        ({"stop": [], "detokenize": False}, {"stop": (), "detokenize": False}),
        ({"min_tokens": np.int32(16)}, {"min_tokens": 16}),
        ({"min_tokens": 99, "max_tokens": None}, {"min_tokens": 99}),
        ({"logprobs": 0, "prompt_logprobs": -1}, {"logprobs": 0, "prompt_logprobs": -1}),
        ({"logprobs": np.int64(-1)}, {"logprobs": -1}),
        ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": -1}),
        ({"truncate_prompt_tokens": np.int16(7)}, {"truncate_prompt_tokens": 7}),
        ({"structured_outputs": {"regex": "[0-9]+"}}, {"structured_outputs": Structured(regex="[0-9]+")}),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_accepted(given, stored):
    params = SamplingParams(**given)
    for name, value in stored.items():
        assert getattr(params, name) == value and type(getattr(params, name)) is type(value)
    survives(params)


def survives(params):
    """Nothing in it can be changed, and it comes back from everything that is done with params."""
    assert hash(params) == hash(dataclasses.replace(params))
    assert dataclasses.replace(params) == params == pickle.loads(pickle.dumps(params))
    assert dataclasses.replace(params, ignore_eos=True).ignore_eos is True
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        assert value is None or type(value) in (int, float, bool, str, tuple, TokenBias, Structured)


def test_bias_is_like_a_dict():
    bias = SamplingParams(logit_bias={5: 1, 2: -3}).logit_bias
    assert bias == {2: -3.0, 5: 1.0} and list(bias.items()) == [(2, -3.0), (5, 1.0)] and bias[5] == 1.0
    assert {SamplingParams(logit_bias={5: 1}), SamplingParams(logit_bias={"5": 1.0})} == {
        SamplingParams(logit_bias={5: 1})
    }
    with pytest.raises(TypeError):
        bias[5] = 2.0


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 200), st.integers(), st.floats(), st.text(max_size=3),
    st.binary(max_size=2),
    st.lists(st.integers(-1, 9), max_size=3), st.lists(st.text(max_size=2), max_size=3),
    st.dictionaries(st.integers(-1, 9) | st.text("0123x", max_size=2), st.floats(-120, 120), max_size=3),
    st.sampled_from([np.int64(3), np.float32(0.5), np.bool_(1), np.arange(3), np.array([[1]]), object, 10**5000, 1j]),
)  # fmt: skip
NAMES = [field.name for field in dataclasses.fields(SamplingParams)]


@settings(deadline=None, max_examples=600)
@given(st.dictionaries(st.sampled_from([*NAMES, "best_of", "x"]), JUNK, max_size=4))
def test_anything_is_refused_or_sound(given):
    try:
        params = SamplingParams(**given)
    except ValueError as error:
        assert any(name in str(error) for name in given) and len(str(error)) < 400
    except TypeError as error:
        assert "has no argument" in str(error) and not given.keys() <= set(NAMES)
    else:
        survives(params)
        assert params == SamplingParams(**{name: getattr(params, name) for name in NAMES})


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-6, True), (9.9e-6, True), (1e-5, False), (1, False)]
)
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_params_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 2.0  # type: ignore[misc]


# -- structured outputs and beam search --------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}}
DEEP = "[" * 100_000
BAD_STRUCTURE = [
    ({}, "given by nothing"),
    ({"json_object": False}, "given by nothing"),
    ({"json": "{}", "regex": "a"}, "given by json and regex; give exactly one"),
    ({"json": "{"}, "json is '{', which does not parse"),
    ({"json": ""}, "json is ''; it must be a JSON schema that is not empty"),
    ({"json": "[]"}, "json is '[]'; it must be a schema, a JSON object; give a JSON schema as a dict"),
    ({"json": 5}, "json is 5"),
    ({"json": {"const": {1}}}, "json cannot be used (Object of type set"),
    ({"json": {"const": math.nan}}, "json cannot be used"),
    ({"json": '{"const": NaN}'}, "json cannot be used (Out of range"),
    ({"json": {"const": "\udc80"}}, "lone surrogates"),
    ({"json": DEEP}, "json cannot be used (it is too deep)"),
    ({"json": '{"const": ' + "9" * 5000 + "}"}, "json cannot be used"),
    ({"regex": ""}, "regex is ''; it must be a string that is not empty"),
    ({"regex": re.compile("a")}, "regex is re.compile('a'); it must be a string"),
    ({"grammar": 1}, "grammar is 1"),
    ({"grammar": "\udc80"}, "grammar is"),
    ({"choice": []}, "choice is empty; give at least one string"),
    ({"choice": "yes"}, "choice is 'yes'; it must be a list of strings"),
    ({"choice": ["yes", ""]}, "one of choice is ''"),
    ({"choice": ["yes", 1]}, "one of choice is 1"),
    ({"json_object": 1}, "json_object is 1; it must be True or False"),
    ({"json_object": True, "disable_any_whitespace": None}, "disable_any_whitespace is None"),
    ({"json_object": True, "whitespace_pattern": 5}, "whitespace_pattern is 5"),
    ({"json": "{}", "whitespace_pattern": " ?", "disable_any_whitespace": True}, "both given; drop one"),
    ({"regex": "a", "whitespace_pattern": " ?"}, "have no effect on regex; leave them out"),
    ({"choice": ["a"], "disable_any_whitespace": True}, "have no effect on choice"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), BAD_STRUCTURE, ids=lambda v: str(v)[:40])
def test_bad_structure(given, message):
    for make in (Structured, lambda **fields: SamplingParams(structured_outputs=fields)):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            make(**given)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"json": SCHEMA}, "json"),
        ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, "json"),
        ({"json": {}, "whitespace_pattern": "[ ]?"}, "json"),
        ({"regex": "é|[0-9]+"}, "regex"),
        ({"choice": ["yes", "no", "yes"]}, "choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"json_object": np.True_}, "json_object"),
        ({"regex": "a", "json_object": False}, "regex"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_structure(fields, kind):
    params = Structured(**fields)
    assert params.kind == kind and json.loads(params.key)[0] == kind
    assert hash(params) == hash(dataclasses.replace(params)) and params.key == dataclasses.replace(params).key
    assert pickle.loads(pickle.dumps(params)) == params
    survives(SamplingParams(structured_outputs=params))


def test_a_schema_keeps_its_order_and_cannot_change():
    given = {"properties": {"b": {}, "a": {}}}
    params = Structured(json=given)
    given["properties"].clear()
    assert list(json.loads(params.json)["properties"]) == ["b", "a"]


def test_key_tells_apart_what_differs():
    same = [
        [Structured(json=SCHEMA), Structured(json=json.dumps(SCHEMA, indent=4))],
        [Structured(choice=["a", "b"]), Structured(choice=("b", "a", "b"))],
        [Structured(json={"properties": {"b": {}, "a": {}}})],
        [Structured(json={"properties": {"a": {}, "b": {}}})],
        [Structured(json=SCHEMA, disable_any_whitespace=True)],
        [Structured(json=SCHEMA, whitespace_pattern=" ?")],
        [Structured(regex="a")],
        [Structured(grammar="a")],
        [Structured(choice=["a"])],
        [Structured(json_object=True)],
    ]
    keys = [{params.key for params in group} for group in same]
    assert all(len(group) == 1 for group in keys) and len(set.union(*keys)) == len(same)


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        *[("beam_width", v, "an integer of at least 1") for v in (0, 1.0, True, "2", None)],
        *[("max_tokens", v, "an integer of at least 1") for v in (0, 2.5, None)],
        *[("length_penalty", v, "in [-10, 10]") for v in (11, math.nan, math.inf, "1")],
        *[(name, v, "True or False") for name in ("ignore_eos", "include_stop_str_in_output") for v in (1, None)],
    ],
)  # fmt: skip
def test_bad_beams(field, value, bound):
    with pytest.raises(ValueError, match=re.escape(f"{field} is {value!r}; it must be {bound}")):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 8, field: value})


def test_beams():
    params = BeamSearchParams(np.int64(4), 8, length_penalty=1)
    assert params == BeamSearchParams(4, 8, False, 1.0, False) and type(params.length_penalty) is float
    assert pickle.loads(pickle.dumps(params)) == params and hash(params) == hash(dataclasses.replace(params))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.beam_width = 5

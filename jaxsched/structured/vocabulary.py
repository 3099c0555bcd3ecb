"""The bytes that each token adds to the text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Bytes by token id.

    ``tokens[t]`` are the bytes of token t within a text and ``first[t]`` those of t at the start of one, which differ
    where the decoder strips a leading space; b"" for tokens that must never be sampled: special ones, those without
    text, ids beyond the tokenizer's. Both have ``size`` items. ``key`` is a hash of all of it.
    """

    tokens: tuple[bytes, ...]
    first: tuple[bytes, ...]
    size: int
    key: str

    @property
    def strips(self) -> bool:
        """The first token of a text can have other bytes than the same token later on."""
        return self.first is not self.tokens


def read_vocabulary(tokenizer: Any, vocab_size: int, excluded: Collection[int] = ()) -> Vocabulary:
    """The bytes of the ``vocab_size`` ids of ``tokenizer`` (a ``jaxsched.text.Tokenizer``).

    ``excluded`` ids (ends of sequence) and special tokens get none. Raises ValueError for a tokenizer that is neither
    byte-level BPE nor of sentencepiece's kind, because there the text of a token depends on its neighbours.
    """
    backend = tokenizer._backend
    steps = _decoder_steps(backend)
    known = min(vocab_size, backend.get_vocab_size(with_added_tokens=True))
    never = {*excluded, *tokenizer.special_ids}
    ids = [token for token in range(known) if token not in never]
    if steps == ["ByteLevel"]:
        inner = _byte_level(backend, ids)
        first = inner
    elif "WordPiece" not in steps and ("ByteFallback" in steps or "Metaspace" in steps):
        inner, first = _pieces(backend, ids, tokenizer.byte_values)
    else:
        raise ValueError(
            f"structured outputs do not support a tokenizer with the decoder {steps or None}; "
            "supported: byte-level BPE (GPT-2's kind) and sentencepiece with byte fallback"
        )
    tokens = tuple(inner.get(token, b"") for token in range(vocab_size))
    starts = tokens if first == inner else tuple(first.get(token, b"") for token in range(vocab_size))
    return Vocabulary(tokens, starts, vocab_size, _hash(tokens, starts))


def _decoder_steps(backend: Any) -> list[str]:
    """Names of the decoder's steps, in order."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]


def _byte_level(backend: Any, ids: list[int]) -> dict[int, bytes]:
    """GPT-2's alphabet: one character per byte. Tokens with any other character stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    found = {}
    for token in ids:
        piece = backend.id_to_token(token)
        if piece is None:
            continue
        try:
            found[token] = bytes([table[character] for character in piece])
        except KeyError:
            found[token] = piece.encode()
    return found


def _pieces(
    backend: Any, ids: list[int], byte_values: dict[int, int]
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Bytes of tokens within a text and at its start, as the decoder itself gives them."""
    anchor = next((t for t in ids if t not in byte_values and (backend.id_to_token(t) or "").isalpha()), None)
    if anchor is None:
        raise ValueError("structured outputs need a vocabulary with at least one token that is a word")
    lead = backend.decode([anchor])
    after = backend.decode_batch([[anchor, token] for token in ids])
    alone = backend.decode_batch([[token] for token in ids])
    inner = {token: text[len(lead) :].encode() for token, text in zip(ids, after, strict=True)}
    first = {token: text.encode() for token, text in zip(ids, alone, strict=True)}
    for token in byte_values.keys() & inner.keys():
        byte = bytes([byte_values[token]])
        inner[token] = byte
        # Bytes that are no characters decode to U+FFFD; of those that are, a space may be stripped.
        first[token] = byte if _REPLACEMENT.encode() == first[token] else first[token]
    # A first token that is nothing but a stripped space has no bytes, so it is not allowed: the text is the same
    # without it.
    return inner, first


def _hash(tokens: tuple[bytes, ...], first: tuple[bytes, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for table in (tokens, first) if first is not tokens else (tokens,):
        digest.update(len(table).to_bytes(8, "little"))
        for piece in table:
            digest.update(len(piece).to_bytes(4, "little"))
            digest.update(piece)
    return digest.hexdigest()

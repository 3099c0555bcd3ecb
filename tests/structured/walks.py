"""Random texts that a constraint allows."""

import random

import numpy as np

from jaxsched.structured import Matcher
from jaxsched.text import Tokenizer


def allowed_tokens(matcher: Matcher, vocab_size: int) -> np.ndarray:
    out = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    matcher.allowed(out)
    return np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little"))


def walk(
    matcher: Matcher, vocab_size: int, rng: random.Random, closing: np.ndarray, patience: int = 25
) -> list[int]:
    """Random allowed tokens until the text is complete. After ``patience`` tokens, ``closing`` ones are preferred."""
    ids: list[int] = []
    while not matcher.final:
        tokens = allowed_tokens(matcher, vocab_size)
        if matcher.accepting and (len(ids) >= patience or rng.random() < 0.2):
            break
        assert len(tokens), (ids, getattr(matcher, "error", None))
        if len(ids) >= patience and rng.random() < 0.7 and len(better := np.intersect1d(tokens, closing)):
            tokens = better
        token = int(rng.choice(tokens))
        assert matcher.push(token)
        ids.append(token)
        assert len(ids) < 3000, "no end in sight"
    return ids


def closing_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """Tokens that bring JSON and brackets to an end."""
    ends = {'"', "}", "]", ")", '"}', '":', '": "', "null", "true", "false", "!", ":"}
    ids = range(tokenizer.vocab_size)
    return np.array(
        [token for token in ids if tokenizer.decode([token]) in ends or token in _bytes(tokenizer)]
    )


def _bytes(tokenizer: Tokenizer) -> set[int]:
    return {
        token
        for token, byte in tokenizer.byte_values.items()
        if bytes([byte]) in (b'"', b"}", b"]", b":", b")")
    }

"""Token ids to text, a few tokens at a time, without decoding everything again."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders put for bytes that are not (yet) UTF-8
_KEEP = 8  # tokens of context kept before the next one
_MAX_BYTE_RUN = 16  # byte tokens held back at most
_MAX_WINDOW = 64  # tokens decoded at most at a time, beyond those of one push


class Detokenizing(Protocol):
    """What the detokenizer needs of a ``Tokenizer``."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` skips."""
        ...

    @property
    def byte_values(self) -> Mapping[int, int]:
        """Id -> byte, of the tokens that are single bytes (sentencepiece)."""
        ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Streams the text of one sequence.

    A short window of the latest tokens is decoded at each push; the part that later tokens cannot change is new text.
    Cost per token does not depend on the length of the sequence.

    Held back until it is settled: a trailing U+FFFD, which may be the first bytes of a character; and, for
    vocabularies with byte tokens (sentencepiece), a trailing run of up to 16 of those, because one invalid byte
    turns all of its run into U+FFFD.

    Invariant: the pieces joined, with ``flush()`` last, are ``tokenizer.decode(all ids)``. The exception is a run of
    more than 16 byte tokens that is not valid UTF-8: its first part may have been shown as characters by then.

    The state is plain Python: pickle it, then ``attach`` a tokenizer.
    """

    def __init__(self, tokenizer: Detokenizing, skip_special_tokens: bool = True):
        self._tokenizer: Detokenizing | None = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # latest ids
        self._emitted = 0  # characters of the window's text that are out

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_tokenizer": None, "_window": list(self._window)}

    def attach(self, tokenizer: Detokenizing) -> None:
        """Gives an unpickled detokenizer its tokenizer back. It must be an equal of the original one."""
        self._tokenizer = tokenizer

    def push(self, ids: Iterable[int]) -> str:
        """Text that the next ``ids`` settle; "" when there is none yet.

        Raises RuntimeError after unpickling when no tokenizer is attached.
        """
        special = self._attached.special_ids if self.skip_special_tokens else ()
        new = [token for token in ids if token not in special]
        if not new:
            return ""
        self._window += new
        run = self._run(self._window)
        incomplete = _incomplete_bytes(run)
        text = self._decode(self._window[: len(self._window) - (incomplete or 0)])
        settled = text[: self._settled(text, run, valid=incomplete is not None)]
        piece = settled[self._emitted :]
        self._emitted = max(self._emitted, len(settled))
        if len(self._window) >= 2 * _KEEP:
            self._shorten(text, incomplete)
        return piece

    def flush(self) -> str:
        """What is still held back, at the end of the sequence. The detokenizer is then as new."""
        piece = self._decode(self._window)[self._emitted :]
        self._window, self._emitted = [], 0
        return piece

    @property
    def _attached(self) -> Detokenizing:
        if self._tokenizer is None:
            raise RuntimeError(
                "this detokenizer was unpickled without a tokenizer; call attach(tokenizer) first"
            )
        return self._tokenizer

    def _decode(self, ids: list[int]) -> str:
        return self._attached.decode(ids, skip_special_tokens=self.skip_special_tokens)

    def _settled(self, text: str, run: bytes, valid: bool) -> int:
        """Number of leading characters of ``text`` that no further token can change.

        ``text`` is the window's, without the bytes at its end that begin a character.
        """
        if not run:
            return len(text) - text.endswith(REPLACEMENT)
        before = len(self._decode(self._window[: -len(run)]))
        hold = valid and len(run) <= _MAX_BYTE_RUN and self._emitted <= before
        return before if hold else len(text)

    def _run(self, ids: list[int]) -> bytes:
        """The bytes of the byte tokens at the end of ``ids``."""
        values, length = self._attached.byte_values, 0
        while length < len(ids) and ids[-1 - length] in values:
            length += 1
        return bytes(values[token] for token in ids[len(ids) - length :])

    def _shorten(self, text: str, incomplete: int | None) -> None:
        """Drops tokens from the front of the window, where doing so leaves the rest of its text as it is.

        The first character kept must be out already: then the cut is not within a character that is incomplete. And
        a run of bytes that is invalid must stay so. ``text`` and ``incomplete`` are those of ``push``.
        """
        pending = len(text) - self._emitted
        last = len(self._window) - _KEEP
        for start in range(last, max(last - _MAX_WINDOW, 0), -1):
            kept = self._window[start:]
            rest = self._decode(kept[: len(kept) - (incomplete or 0)])
            if (
                len(rest) > pending
                and text.endswith(rest)
                and _incomplete_bytes(self._run(kept)) == incomplete
            ):
                break
        else:
            if len(self._window) < _MAX_WINDOW:
                return
            kept = self._window[last:]
            rest = self._decode(kept[: len(kept) - (incomplete or 0)])
        self._window, self._emitted = kept, max(0, len(rest) - pending)


def _incomplete_bytes(run: bytes) -> int | None:
    """How many bytes at the end of ``run`` begin a character that more bytes may complete; None if it is not UTF-8."""
    try:
        _, used = codecs.utf_8_decode(run, "strict", False)
    except UnicodeDecodeError:
        return None
    return len(run) - used

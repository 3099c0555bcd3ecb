"""Token ids to text, a few tokens at a time, without decoding everything again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders put for bytes that are not (yet) UTF-8
_KEEP = 8  # tokens of context kept before the next one
_MAX_BYTE_RUN = 16  # byte tokens held back at most
_MAX_WINDOW = 64  # tokens decoded at most at a time, beyond those of one push


class Detokenizing(Protocol):
    """What the detokenizer needs of a ``Tokenizer``."""

    special_ids: frozenset[int]
    byte_ids: frozenset[int]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Streams the text of one sequence.

    A short window of the latest tokens is decoded at each push; the part that later tokens cannot change is new text.
    Cost per token does not depend on the length of the sequence.

    Held back until it is settled: a trailing U+FFFD, which may be the first bytes of a character, and, for
    vocabularies with byte tokens (sentencepiece), a trailing run of those, because one invalid byte changes
    how all of its run is decoded.

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
        text = self._decode(self._window)
        settled = text[: self._settled(text)]
        piece = settled[self._emitted :]
        self._emitted = max(self._emitted, len(settled))
        if len(self._window) >= 2 * _KEEP:
            self._shorten(text)
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

    def _settled(self, text: str) -> int:
        """Number of leading characters of the window's text that no further token can change."""
        byte_ids, run = self._attached.byte_ids, 0
        while run < len(self._window) and self._window[-1 - run] in byte_ids:
            run += 1
        if 0 < run <= _MAX_BYTE_RUN:
            return len(self._decode(self._window[:-run]))
        if run and text.endswith(REPLACEMENT) and run <= _MAX_BYTE_RUN + 3:
            return self._emitted  # perhaps complete within three more bytes
        return len(text) - text.endswith(REPLACEMENT)

    def _shorten(self, text: str) -> None:
        """Drops tokens from the front of the window, where doing so leaves the rest of its text as it is.

        The first character kept must be out already: then the cut is not within a character that is incomplete.
        """
        pending = len(text) - self._emitted
        last = len(self._window) - _KEEP
        for start in range(last, max(last - _MAX_WINDOW, 0), -1):
            rest = self._decode(self._window[start:])
            if len(rest) > pending and text.endswith(rest):
                break
        else:
            if len(self._window) < _MAX_WINDOW:
                return
            start, rest = last, self._decode(self._window[last:])
        self._window = self._window[start:]
        self._emitted = max(0, len(rest) - pending)

"""Token ids to text, a few tokens at a time, without decoding everything again."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Mapping
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders put for bytes that are not (yet) UTF-8
_KEEP = 8  # tokens of context kept before the next one
_MAX_BYTE_RUN = 16  # byte tokens held back at most
_MAX_WINDOW = 64  # tokens decoded at most at a time, beyond those of one push
_HELD, _SHOWN, _BROKEN = "held", "shown", "broken"  # what is known of a run of byte tokens


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

    def token_of(self, token_id: int) -> str | None:
        """Spelling of an id, None outside the vocabulary."""
        ...

    def decode(
        self, ids: list[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str: ...


class IncrementalDetokenizer:
    """Streams the text of one sequence.

    A short window of the latest tokens is decoded at each push; the part that later tokens cannot change is new text.
    Cost per token does not depend on the length of the sequence.

    Held back until it is settled: a trailing U+FFFD, which may be the first bytes of a character; and, for
    vocabularies with byte tokens (sentencepiece), a trailing run of up to 16 of those, because one invalid byte
    turns all of its run into U+FFFD.

    Invariants: the pieces joined, with ``flush()`` last, are ``tokenizer.decode(all ids)``; and what has come out
    after some ids does not depend on how they were grouped into pushes. The exception to the first is a run of more
    than 16 byte tokens that is not valid UTF-8: its first part may have been shown as characters by then.

    The options are those of ``Tokenizer.decode``. The state is plain Python: pickle it, then ``attach`` a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Detokenizing,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        self._tokenizer: Detokenizing | None = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.spaces_between_special_tokens = spaces_between_special_tokens
        self._window: list[int] = []  # latest ids, without those of the run
        self._emitted = 0  # characters of the window's text that are out
        self._run: list[int] = []  # byte tokens at the end that are not out
        self._state = _HELD  # of the run

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_tokenizer": None, "_window": list(self._window), "_run": list(self._run)}

    def attach(self, tokenizer: Detokenizing) -> None:
        """Gives an unpickled detokenizer its tokenizer back. It must be an equal of the original one."""
        self._tokenizer = tokenizer

    def copy(self) -> IncrementalDetokenizer:
        """A second one in the same state, with the same tokenizer."""
        twin = IncrementalDetokenizer.__new__(IncrementalDetokenizer)
        twin.__dict__.update(self.__getstate__(), _tokenizer=self._tokenizer)
        return twin

    def push(self, ids: Iterable[int]) -> str:
        """Text that the next ``ids`` settle; "" when there is none yet.

        Raises RuntimeError after unpickling when no tokenizer is attached.
        """
        tokenizer = self._attached
        special = tokenizer.special_ids if self.skip_special_tokens else ()
        new = [token for token in ids if token not in special]
        values = tokenizer.byte_values
        if not new:
            return ""
        if not self._run and self._state == _HELD and values.keys().isdisjoint(new):
            return self._push_words(new)
        known = (token for token in new if tokenizer.token_of(token) is not None)  # others do not end a run
        pieces = []
        for is_byte, group in itertools.groupby(known, values.__contains__):
            if is_byte:
                pieces += [self._push_byte(token, values) for token in group]
            else:
                pieces += [self._end_run(), self._push_words(list(group))]
        return "".join(pieces)

    def flush(self) -> str:
        """What is still held back, at the end of the sequence. The detokenizer is then as new."""
        piece = self._end_run()
        piece += self._decode(self._window)[self._emitted :]
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
        if self.skip_special_tokens or self.spaces_between_special_tokens:
            return self._attached.decode(ids, skip_special_tokens=self.skip_special_tokens)
        return self._attached.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)

    def _push_words(self, new: list[int]) -> str:
        """Text that tokens settle which are no byte tokens. No run is open."""
        self._window += new
        text = self._decode(self._window)
        settled = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._emitted : settled]
        self._emitted = max(self._emitted, settled)
        if len(self._window) >= 2 * _KEEP:
            self._shorten(text)
        return piece

    def _push_byte(self, token: int, values: Mapping[int, int]) -> str:
        """Text that the next byte token of a run settles."""
        if self._state == _BROKEN:
            self._window = [token]
            return REPLACEMENT
        self._run.append(token)
        incomplete = _incomplete_bytes(bytes(values[t] for t in self._run))
        if incomplete is not None and self._state == _HELD and len(self._run) <= _MAX_BYTE_RUN:
            return ""
        whole = self._run[: len(self._run) - (incomplete or 0)]
        if self._state == _HELD:
            piece = self._decode(self._window + whole)[self._emitted :]
        elif incomplete is None:
            piece = REPLACEMENT * len(whole)
        else:
            piece = bytes(values[t] for t in whole).decode()
        self._state = _BROKEN if incomplete is None else _SHOWN
        self._run = self._run[len(whole) :]
        self._window = [token]  # what follows must not be decoded as the beginning of a text
        return piece

    def _end_run(self) -> str:
        """Text that the end of a run settles. A run that is held goes to the window instead."""
        if self._state == _HELD:
            self._window += self._run
            piece = ""
        else:
            piece = REPLACEMENT * len(self._run)
            self._emitted = len(self._decode(self._window))
        self._run, self._state = [], _HELD
        return piece

    def _shorten(self, text: str) -> None:
        """Drops tokens from the front of the window, where doing so leaves the rest of its text as it is.

        The first character kept must be out already: then the cut is not within a character that is incomplete.
        ``text`` is the window's.
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
            known = [token for token in self._window if self._attached.token_of(token) is not None]
            if len(known) < len(self._window):
                self._window = known  # the others have no text
                return
            start, rest = last, self._decode(self._window[last:])
        self._window, self._emitted = self._window[start:], max(0, len(rest) - pending)


def _incomplete_bytes(run: bytes) -> int | None:
    """How many bytes at the end of ``run`` begin a character that more bytes may complete; None if it is not UTF-8."""
    try:
        _, used = codecs.utf_8_decode(run, "strict", False)
    except UnicodeDecodeError:
        return None
    return len(run) - used

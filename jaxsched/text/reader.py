"""Token ids of one sequence to the text that is shown, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenizer import Detokenizing, IncrementalDetokenizer


class TextReader:
    """Turns a sequence's tokens into text and watches for stop strings.

    The rule: the sequence ends at the first token after which its text has a stop string. If there are several by
    then, the one that starts first counts, and among those that start together the longest. The text is cut where it
    starts; with ``include_stop_str_in_output`` where it ends. An occurrence that ends within the text of the first
    ``min_tokens`` tokens does not count. How tokens are grouped into pushes makes no difference.

    Text is what ``IncrementalDetokenizer`` has settled: a stop string may lie across tokens and begin or end within
    one; ids play no part, and special tokens only as far as they are shown. Work per token does not depend on the
    length of the sequence.

    ``stop`` is a string or several, none of them empty (ValueError). The other options are those of SamplingParams.
    The state is plain Python: pickle it, then ``attach`` a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Detokenizing,
        *,
        stop: str | Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        self._stop = tuple(dict.fromkeys([stop] if isinstance(stop, str) else stop))
        if "" in self._stop:
            raise ValueError("stop has an empty string, which every text has; leave it out")
        self._include = include_stop_str_in_output
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens, spaces_between_special_tokens
        )
        # A stop string that is not complete has at most so many characters.
        self._reach = max(map(len, self._stop), default=1) - 1
        self._early = max(min_tokens, 0)  # tokens to come in whose text stop strings do not count
        self._counts = min_tokens <= 0  # whether they count in the latest token's text
        self._recent = ""  # the latest settled characters, at most ``_reach``
        self._held = ""  # the end of these that is not to be shown yet
        self._ready: list[str] = []  # may be shown, not taken
        self._over = False
        self.stop_reason: str | None = None  # the stop string that was found

    def attach(self, tokenizer: Detokenizing) -> None:
        """Gives an unpickled reader its tokenizer back. It must be an equal of the original one."""
        self._detokenizer.attach(tokenizer)

    def push(self, ids: Sequence[int]) -> int | None:
        """Takes the next tokens. None: go on.

        k: a stop string was completed by the k-th of these (1 <= k <= len(ids)); those after it are no part of the
        output. Then, and after ``finish``, another push raises RuntimeError.
        """
        if self._over:
            raise RuntimeError("this text has ended; make a new reader")
        if not self._stop:
            self._ready.append(self._detokenizer.push(ids))
            return None
        early = min(self._early, len(ids))
        if early > 0:
            self._early -= early
            self._pass(self._detokenizer.push(ids[:early]))
        late = ids[early:]
        self._counts = self._counts or len(late) > 0
        if len(late) > 1:
            before = self._detokenizer.copy()
            text = self._detokenizer.push(late)
            if self._find(text) is None:
                self._pass(text)
                return None
            self._detokenizer = before  # somewhere in these; which one is found token by token
        for i, token in enumerate(late):
            if self._read(self._detokenizer.push([token])):
                return early + i + 1
        return None

    def take(self) -> str:
        """Text that may be shown now and was not taken before; no part of a stop string that may still come."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def finish(self) -> str:
        """All that is left when the sequence has ended, for whatever reason.

        Includes what was held back, such as the bytes of an incomplete character, as ``Tokenizer.decode`` shows them.
        A stop string may be found in it, which ``stop_reason`` then names. Another call gives "".
        """
        if not self._over:
            text = self._detokenizer.flush()
            if not self._counts:
                self._pass(text)
            if not self._counts or not self._read(text):
                self._ready.append(self._held)
            self._over = True
        return self.take()

    def _read(self, text: str) -> bool:
        """Takes in new settled text; whether a stop string ends in it, and then the output."""
        found = self._find(text)
        if found is None:
            self._pass(text)
            return False
        start, self.stop_reason = found
        end = start + len(self.stop_reason) if self._include else start
        shown = len(self._recent) - len(self._held)
        self._ready.append((self._recent + text)[shown:end])
        self._over = True
        return True

    def _find(self, text: str) -> tuple[int, str] | None:
        """Of the stop strings that end in ``text`` the one that counts, and where in recent text + text it begins."""
        whole, old = self._recent + text, len(self._recent)
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = whole.find(stop, max(old - len(stop) + 1, 0))
            if start >= 0 and (best is None or (start, -len(stop), stop) < best):
                best = (start, -len(stop), stop)
        return None if best is None else (best[0], best[2])

    def _pass(self, text: str) -> None:
        """Takes in new settled text in which the output does not end."""
        if not text:
            return
        shown = len(self._recent) - len(self._held)
        whole = self._recent + text
        self._recent = whole[max(len(whole) - self._reach, 0) :]
        self._held = "" if self._include else self._beginning()
        self._ready.append(whole[shown : len(whole) - len(self._held)])

    def _beginning(self) -> str:
        """The longest end of the recent text that a stop string begins with."""
        starts = [self._first_start(stop) for stop in self._stop]
        return self._recent[min(starts, default=len(self._recent)) :]

    def _first_start(self, stop: str) -> int:
        """Where in the recent text the first beginning of ``stop`` is that goes on to its end."""
        recent = self._recent
        start = recent.find(stop[0], max(len(recent) - len(stop) + 1, 0))
        while start >= 0 and not stop.startswith(recent[start:]):
            start = recent.find(stop[0], start + 1)
        return start if start >= 0 else len(recent)

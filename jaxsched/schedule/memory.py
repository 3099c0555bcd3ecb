"""Who gets pages: growth of running sequences, admission, prefix sharing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

from .limits import Limits
from .pages import Key, PagePool, page_keys, root_key
from .sequence import Sequence, Status

NEVER = 1 << 60  # ``Sequence.published`` of one that publishes nothing more
GONE = -1  # in ``Sequence.pages``: given back, behind the window


class Memory:
    """The page pool as the scheduler uses it.

    *Sharing.* A sequence with a salt finds the longest chain of full pages that it has in common with what is known
    under this salt, and reads on from there. At least its last token is always read, so that there are logits.

    *Admission.* A sequence gets the pages of all it has to read and of its first N tokens. It is admitted only when
    the pages then free cover the share ``expected`` of what it and the running sequences can still grow, so that
    preemption is rare. ``expected`` follows the share of ``max_tokens`` that finished sequences have used; a
    preemption sets it to 1, from where it decays with each sequence that ends (like the new-token ratio of SGLang's
    scheduler). At 1 nothing can be preempted. A sequence that has the pool to itself is always admitted.

    *Windows.* Where every layer has a sliding window, a sequence gives its pages back as the window leaves them
    (``give_back``), and gets those of its prompt as it is read (``read_on``), so that it owns at most
    ``Limits.pages_at_once``. Steps run in order: what no step from some step on reads may be written from that step
    on, by anybody. Pages that were given back stay findable, and a prompt reads on where all that its next query sees
    is known, whatever was forgotten before.
    """

    DECAY = 0.95  # of ``expected``, per sequence that ends
    LEARNING = 0.05  # weight of one sequence in the mean of used shares

    def __init__(self, limits: Limits):
        self.limits = limits
        self.pool = PagePool(limits.num_pages, keep=limits.prefix_caching)
        self.expected = 0.5
        self._used_share = 0.5
        self._growth = 0  # pages that the running sequences may still come to own, beyond those they own
        self._at_once = limits.pages_at_once or NEVER

    def short(self, sequences: Iterable[Sequence], steps: int) -> list[tuple[Sequence, int]]:
        """The decoding sequences that lack pages to sample ``steps`` more tokens, and how many pages each lacks.

        The last token that is sampled needs no position.
        """
        size, lacking = self.limits.page_size, []
        for sequence in sequences:
            outputs, limit = len(sequence.output) + sequence.pending + steps, sequence.max_tokens
            positions = len(sequence.prompt) + (outputs if outputs < limit else limit) - 1
            need = -(-positions // size) - len(sequence.pages)
            if need > 0:
                lacking.append((sequence, need))
        return lacking

    def grow(self, lacking: list[tuple[Sequence, int]], count: int) -> list[tuple[int, int, int]]:
        """Gives running sequences what they lack, ``count`` pages together; returns them as (slot, index, page)."""
        self._growth -= count
        pages, table = iter(self.pool.take(count)), []
        for sequence, need in lacking:
            own, slot = sequence.pages, sequence.slot
            for page in islice(pages, need):
                table.append((slot, len(own), page))
                own.append(page)
        return table

    def give_back(self, sequence: Sequence, position: int) -> None:
        """Gives back the pages of which no query at ``position`` or later sees anything."""
        gone, before = self.limits.behind(position), sequence.gone
        if gone <= before:
            return
        if (
            sequence.status is Status.DECODE and self.limits.prefix_caching
        ):  # a prompt's pages are known already
            self.publish(sequence, min(gone * self.limits.page_size, sequence.length))
        self._growth -= self._may_take(sequence)
        self.pool.give(sequence.pages[before:gone])
        sequence.pages[before:gone] = [GONE] * (gone - before)
        sequence.gone, sequence.published = gone, max(sequence.published, gone)
        self._growth += self._may_take(sequence)

    def readable(self, sequence: Sequence, length: int, steps: int, budget: int) -> int:
        """How many of the next ``length`` prompt tokens there are pages for, ``budget`` new ones at most.

        A prompt that ends also needs those of the first ``steps`` tokens sampled.
        """
        size, start, rest = (
            self.limits.page_size,
            sequence.prefilled,
            sequence.prefill_target - sequence.prefilled,
        )
        most = len(sequence.pages) + min(self.pool.free, budget)
        if self._pages_to_read(sequence, length, steps) <= most:
            return length
        if not self.limits.split_prompts:
            return 0
        length = max(min(length, rest - 1, most * size - start), 0)
        return length - length % size if self.limits.whole_pages else length

    def read_on(self, sequence: Sequence, length: int, steps: int) -> list[tuple[int, int, int]]:
        """Gives a running sequence the pages it lacks to read ``length`` more prompt tokens; (slot, index, page)s."""
        need = self._pages_to_read(sequence, length, steps) - len(sequence.pages)
        return self.grow([(sequence, need)], need) if need > 0 else []

    def _pages_to_read(self, sequence: Sequence, length: int, steps: int) -> int:
        end = sequence.prefilled + length
        if end == sequence.prefill_target:
            end += max(min(steps, sequence.left), 1) - 1
        return self.limits.pages_for(end)

    def fits_in(self, sequence: Sequence, room: int) -> bool:
        """Whether all that the sequence has to read fits into ``room`` tokens of a step."""
        return sequence.length - len(self._known(sequence)) * self.limits.page_size <= room

    def admit(self, sequence: Sequence, steps: int, budget: int, running: int) -> bool:
        """Gives a waiting sequence its first pages, shared ones first, if the pool allows.

        ``budget`` bounds the number of pages. Sets ``prefilled`` to the tokens found and ``prefill_target``.
        """
        limits, pool = self.limits, self.pool
        known = self._known(sequence)
        gone = limits.behind(len(known) * limits.page_size)
        shared = known[gone:]
        total = limits.pages_for(sequence.length + max(min(steps, sequence.left), 1) - 1)
        total = min(total, gone + self._at_once)
        if total - gone > budget:
            return False
        need = total - len(known)
        free = pool.free - pool.unowned(shared)
        end = min(self._pages_at_end(sequence), gone + self._at_once)
        if running:
            # A page for each that may grow, or admissions and preemptions would chase each other.
            growth = self._growth + end - total
            if need + max(math.ceil(self.expected * growth), min(running, growth)) > free:
                return False
        elif need > free:
            return False
        pool.share(shared)
        sequence.pages, sequence.gone = known + pool.take(need), gone
        sequence.published = len(known)
        sequence.prefill_target, sequence.prefilled = sequence.length, len(known) * limits.page_size
        self._growth += end - total
        return True

    def _known(self, sequence: Sequence) -> list[int]:
        """Pages of the longest known prefix, short of the last token."""
        if sequence.salt is None:
            return []
        count = (sequence.length - 1) // self.limits.page_size
        if sequence.reads_from is not None and sequence.reads_from < len(sequence.prompt):
            count = min(count, sequence.reads_from // self.limits.page_size)
        self._extend_keys(sequence, count)
        if self.limits.window is not None:
            return self._known_in_window(sequence.keys[:count])
        return self.pool.find(sequence.keys[:count])

    def _known_in_window(self, keys: list[Key]) -> list[int]:
        """Pages of the longest beginning after which all that the next query sees is known; GONE before that."""
        behind, size = self.limits.behind, self.limits.page_size
        found, run, best = [self.pool.get(key) for key in keys], 0, 0
        for count, page in enumerate(found, 1):
            run = 0 if page is None else run + 1
            if run >= count - behind(count * size):
                best = count
        return [
            GONE if i < behind(best * size) or page is None else page for i, page in enumerate(found[:best])
        ]

    def _extend_keys(self, sequence: Sequence, count: int) -> None:
        keys, size = sequence.keys, self.limits.page_size
        if len(keys) < count:
            parent = keys[-1] if keys else root_key(sequence.salt or b"")
            keys += page_keys(parent, sequence.tokens(len(keys) * size, count * size), size)

    def publish(self, sequence: Sequence, positions: int) -> None:
        """Lets others find the pages that the first ``positions`` tokens of a running sequence fill."""
        count = positions // self.limits.page_size
        if sequence.salt is None or sequence.published >= count:
            return
        self._extend_keys(sequence, count)
        publish, pages, keys = self.pool.publish, sequence.pages, sequence.keys
        for i in range(sequence.published, count):
            publish(pages[i], keys[i])
        sequence.published = count

    def reset(self, running: Iterable[Sequence]) -> None:
        """Forgets all contents, also those that running sequences would add to what is forgotten."""
        self.pool.reset()
        for sequence in running:
            sequence.published = NEVER

    def release(self, sequence: Sequence) -> None:
        """Takes all pages of a sequence back."""
        self._growth -= self._may_take(sequence)
        self.pool.give(sequence.pages[sequence.gone :])
        sequence.pages, sequence.gone, sequence.published = [], 0, 0

    def _may_take(self, sequence: Sequence) -> int:
        """Pages that a running sequence may come to own beyond those it owns."""
        return min(self._pages_at_end(sequence), sequence.gone + self._at_once) - len(sequence.pages)

    def _pages_at_end(self, sequence: Sequence) -> int:
        return self.limits.pages_for(len(sequence.prompt) + max(sequence.max_tokens, 1) - 1)

    def overcommitted(self) -> None:
        """Somebody had to be preempted."""
        self.expected = 1.0

    def ended(self, sequence: Sequence) -> None:
        """A sequence has ended by itself: its length teaches how much others will grow."""
        if not sequence.samples:
            return
        share = len(sequence.output) / sequence.max_tokens
        self._used_share += self.LEARNING * (share - self._used_share)
        self.expected = max(self.expected * self.DECAY, min(1.0, self._used_share + 0.1))

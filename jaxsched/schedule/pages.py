"""Who owns which page of the KV pool, and which pages hold a known prefix."""

from __future__ import annotations

import functools
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import blake2b

Key = bytes  # names the content of a page: every token from the first to the page's last, and the salt


def root_key(salt: bytes) -> Key:
    """The parent of a first page. Sequences share pages only under equal salts."""
    return blake2b(salt, digest_size=32).digest()


def page_keys(parent: Key, tokens: list[int], page_size: int) -> list[Key]:
    """Keys of the full pages that ``tokens`` fill after the page of ``parent``: a chain of hashes.

    blake2b with 256 bits: nobody can find two prompts with one key, so nobody can read another's pages.
    """
    pack, keys = _packer(page_size), []
    for end in range(page_size, len(tokens) + 1, page_size):
        parent = blake2b(parent + pack(*tokens[end - page_size : end]), digest_size=32).digest()
        keys.append(parent)
    return keys


@functools.cache
def _packer(page_size: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{page_size}i").pack


class PagePool:
    """Reference counts of all pages, and the pages that can be found by their content.

    A page is *owned* (by one or more sequences), *cached* (by none, its content is known and may be used again) or
    *blank*. ``take`` gives blank pages first, then evicts the cached page that has been unused longest.
    With ``keep`` False a page is forgotten as soon as nobody owns it: only live sequences share.

    >>> pool = PagePool(3)
    >>> pages = pool.take(2)
    >>> pool.give(pages), pool.free
    (None, 3)
    """

    def __init__(self, num_pages: int, *, keep: bool = True):
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; the pool needs at least 1 page")
        self.num_pages, self.keep = num_pages, keep
        self._blank = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self._key_of: list[Key | None] = [None] * num_pages
        self._page_of: dict[Key, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # unused longest first

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._blank) + len(self._cached)

    @property
    def used(self) -> int:
        """Pages that some sequence owns."""
        return self.num_pages - self.free

    @property
    def cached(self) -> int:
        """Pages that nobody owns and whose content can still be used."""
        return len(self._cached)

    def take(self, count: int) -> list[int]:
        """``count`` pages for a new owner to write. The caller has checked ``free``."""
        assert 0 <= count <= self.free, f"{count} pages taken, {self.free} free"
        if count == 0:
            return []
        cut = max(len(self._blank) - count, 0)
        taken = self._blank[cut:][::-1]
        del self._blank[cut:]
        while len(taken) < count:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
            taken.append(page)
        owners = self._owners
        for page in taken:
            owners[page] = 1
        return taken

    def find(self, keys: Iterable[Key]) -> list[int]:
        """Pages of the longest known prefix of a chain. They stay as they are: ``share`` makes the caller an owner."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def get(self, key: Key) -> int | None:
        """The page that holds ``key``, if one does."""
        return self._page_of.get(key)

    def unowned(self, pages: list[int]) -> int:
        """How many of these pages nobody owns: sharing them takes that many out of ``free``."""
        return sum(not self._owners[page] for page in pages)

    def share(self, pages: list[int]) -> None:
        """One owner more for each page."""
        for page in pages:
            if not self._owners[page]:
                del self._cached[page]
            self._owners[page] += 1

    def give(self, pages: list[int]) -> None:
        """One owner less. The last pages of a sequence are evicted before its first ones, which more prompts share."""
        owners, key_of = self._owners, self._key_of
        for page in reversed(pages):
            owners[page] -= 1
            if owners[page]:
                assert owners[page] > 0, f"page {page} was returned by nobody who owned it"
            elif key_of[page] is not None and self.keep:
                self._cached[page] = None
            else:
                self._forget(page)
                self._blank.append(page)

    def publish(self, page: int, key: Key) -> None:
        """The content of an owned page is ``key``, or will be before any later step reads it."""
        if key not in self._page_of and self._key_of[page] is None:
            self._page_of[key] = page
            self._key_of[page] = key

    def reset(self) -> None:
        """Forgets all contents. Owned pages stay with their owners, but nobody finds them any more."""
        self._page_of.clear()
        self._key_of = [None] * self.num_pages
        self._blank += reversed(self._cached)
        self._cached.clear()

    def _forget(self, page: int) -> None:
        key = self._key_of[page]
        if key is not None:
            del self._page_of[key]
            self._key_of[page] = None

"""Which pages of the KV pool are free."""

from __future__ import annotations


class PagePool:
    """A stack of free page ids. Pages are owned by exactly one sequence or are free.

    >>> pool = PagePool(3)
    >>> pages = pool.take(2)
    >>> pool.give(pages), pool.free
    (None, 3)
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; the pool needs at least 1 page")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that some sequence owns."""
        return self.num_pages - len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` free pages, now owned by the caller. The caller has checked ``free``."""
        assert 0 <= count <= len(self._free), f"{count} pages taken, {len(self._free)} free"
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken[::-1]

    def give(self, pages: list[int]) -> None:
        """Returns pages to the pool."""
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.num_pages, "a page was returned twice"

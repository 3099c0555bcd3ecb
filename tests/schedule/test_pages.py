"""The page pool and the numbers that follow from its size."""

import doctest

import pytest

from fake_device import make_limits
from jaxsched.schedule import pages
from jaxsched.schedule.pages import PagePool


def test_doctest():
    assert doctest.testmod(pages).failed == 0


def test_pages_come_and_go():
    pool = PagePool(5)
    first, second = pool.take(2), pool.take(3)
    assert sorted(first + second) == list(range(5))
    assert (pool.free, pool.used, pool.take(0)) == (0, 5, [])
    pool.give(first)
    assert (pool.free, pool.used) == (2, 3)
    assert sorted(pool.take(2)) == sorted(first)


def test_misuse_is_noticed():
    pool = PagePool(3)
    with pytest.raises(AssertionError, match="4 pages taken, 3 free"):
        pool.take(4)
    with pytest.raises(AssertionError, match="returned twice"):
        pool.give([1])
    with pytest.raises(ValueError, match="num_pages is 0; the pool needs at least 1 page"):
        PagePool(0)


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_pages_for(positions, pages):
    assert make_limits(page_size=4).pages_for(positions) == pages


def test_longest():
    """With the whole pool to itself a sequence reaches one token more than the pool has positions."""
    assert make_limits(num_pages=5, page_size=4, max_model_len=128).longest == 21
    assert make_limits(num_pages=64, page_size=4, max_model_len=128).longest == 128

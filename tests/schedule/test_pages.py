"""The page pool and the memory on top of it, against models that know nothing of reference counts and hashes."""

import doctest
import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_device import make_limits, make_sequence
from jaxsched.schedule import Sequence, Status, pages
from jaxsched.schedule.memory import Memory
from jaxsched.schedule.pages import PagePool, page_keys, root_key


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
    with pytest.raises(AssertionError, match="page 1 was returned by nobody who owned it"):
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


def test_keys_name_salt_and_all_tokens_so_far():
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    keys = page_keys(root_key(b""), tokens, 4)
    assert len(keys) == 2 and page_keys(keys[0], tokens[4:], 4) == keys[1:]
    assert page_keys(root_key(b""), tokens[:3], 4) == []
    others = [page_keys(root_key(b"x"), tokens, 4)]
    for i in range(8):
        changed = [*tokens[:i], tokens[i] + 1, *tokens[i + 1 :]]
        others.append(page_keys(root_key(b""), changed, 4))
        assert (others[-1][0] == keys[0]) is (i >= 4)
    assert len({other[1] for other in others} | {keys[1]}) == 10
    assert page_keys(root_key(b""), [1, 0], 2) != page_keys(root_key(b""), [1, 256], 2)
    assert page_keys(root_key(b""), [151_935, 2**31 - 1], 1)


# -- the pool --------------------------------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Owners are lists of pages; contents are letters. LRU: the pages that went unowned, in that order."""

    @initialize(size=st.integers(1, 12), keep=st.booleans())
    def begin(self, size, keep):
        self.pool, self.size, self.keep = PagePool(size, keep=keep), size, keep
        self.owned: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.unused: list[int] = []  # known and owned by nobody, unused longest first

    @property
    def owners(self):
        return {page: sum(page in pages for pages in self.owned) for page in range(self.size)}

    @property
    def blank(self):
        return {page for page, count in self.owners.items() if not count and page not in self.unused}

    @rule(share=st.floats(0, 1))
    def take(self, share):
        blank = self.blank
        count = round(share * (len(blank) + len(self.unused)))
        taken = self.pool.take(count)
        evicted = self.unused[: max(count - len(blank), 0)]
        assert len(taken) == len(set(taken)) == count
        assert set(taken) <= blank if count <= len(blank) else set(taken) == blank | set(evicted)
        del self.unused[: len(evicted)]
        for page in evicted:
            del self.content[page]
        self.owned.append(taken)

    @rule(keys=st.lists(st.sampled_from([bytes([i]) for i in range(6)]), unique=True, max_size=5))
    def find_and_share(self, keys):
        by_content = {key: page for page, key in self.content.items()}
        want = []
        for key in keys:
            if key not in by_content:
                break
            want.append(by_content[key])
        found = self.pool.find(keys)
        assert found == want
        assert self.pool.unowned(found) == len(set(found) & set(self.unused))
        self.pool.share(found)
        self.unused = [page for page in self.unused if page not in found]
        self.owned.append(found)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give(self, data):
        pages = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pool.give(pages)
        owners = self.owners
        for page in reversed(pages):
            if not owners[page] and page in self.content:
                if self.keep:
                    self.unused.append(page)
                else:
                    del self.content[page]

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data(), key=st.sampled_from([bytes([i]) for i in range(6)]))
    def publish(self, data, key):
        page = data.draw(st.sampled_from([page for pages in self.owned for page in pages]))
        self.pool.publish(page, key)
        if page not in self.content and key not in self.content.values():
            self.content[page] = key

    @rule()
    def reset(self):
        self.pool.reset()
        self.content, self.unused = {}, []

    @invariant()
    def agrees(self):
        pool, owners = self.pool, self.owners
        assert pool._owners == [owners[page] for page in range(self.size)]
        assert set(pool._blank) == self.blank and len(pool._blank) == len(self.blank)
        assert list(pool._cached) == self.unused
        assert {page: key for page, key in enumerate(pool._key_of) if key is not None} == self.content
        assert pool._page_of == {key: page for page, key in self.content.items()}
        free = sum(not count for count in owners.values())
        assert (pool.free, pool.used, pool.cached) == (free, self.size - free, len(self.unused))


# -- the memory ------------------------------------------------------------------------------------------------------

PROMPTS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=14)  # many begin alike


class MemoryMachine(RuleBasedStateMachine):
    """Running sequences, and for each page that can be found the salt and all tokens up to its end."""

    @initialize(pages=st.integers(4, 16), size=st.integers(1, 4), keep=st.booleans())
    def begin(self, pages, size, keep):
        self.size = size
        self.memory = Memory(
            make_limits(num_pages=pages, page_size=size, prefix_caching=keep, max_model_len=64)
        )
        self.running, self.names = [], 0
        self.content: dict[int, tuple] = {}
        self.offered: dict[Sequence, int] = {}  # pages that were offered to others

    def prefix(self, sequence, index):
        """What page ``index`` of the sequence holds when it is full."""
        return sequence.salt, *[*sequence.prompt, *sequence.output][: (index + 1) * self.size]

    def at_end(self, sequence):
        return math.ceil((len(sequence.prompt) + sequence.max_tokens - 1) / self.size)

    @rule(
        prompt=PROMPTS,
        output=PROMPTS,
        max_tokens=st.integers(1, 12),
        steps=st.integers(1, 8),
        salt=st.sampled_from([b"", b"x", None]),
        budget=st.integers(4, 40),
    )
    def admit(self, prompt, output, max_tokens, steps, salt, budget):
        """A new sequence, or one that had been preempted."""
        memory = self.memory
        self.names += 1
        output = output[: max_tokens - 1]
        sequence = make_sequence(self.names, prompt, max_tokens, salt=salt, output=list(output))
        if self.at_end(sequence) > memory.limits.num_pages:
            return
        by_content = {content: page for page, content in self.content.items()}
        known = []
        while salt is not None and (len(known) + 1) * self.size < len(prompt) + len(output):
            page = by_content.get(self.prefix(sequence, len(known)))
            if page is None:
                break
            known.append(page)
        total = math.ceil((len(prompt) + len(output) + min(steps, max_tokens - len(output)) - 1) / self.size)
        mine = {page for s in self.running for page in s.pages}
        left = memory.limits.num_pages - len(mine | set(known)) - (total - len(known))
        growth = sum(self.at_end(s) - len(s.pages) for s in [*self.running, sequence]) - total
        wanted = (
            max(math.ceil(memory.expected * growth), min(len(self.running), growth)) if self.running else 0
        )
        fits = total <= budget and left >= wanted
        assert memory.admit(sequence, steps, budget, len(self.running)) is fits
        if not fits:
            assert sequence.pages == []
            return
        assert sequence.pages[: len(known)] == known and len(sequence.pages) == total
        fresh = set(sequence.pages[len(known) :])
        assert len(fresh) == total - len(known) and not fresh & (mine | set(known))
        assert sequence.prefilled == len(known) * self.size
        for page in fresh:
            self.content.pop(page, None)
        self.offered[sequence] = len(known)
        sequence.status = Status.PREFILL
        self.running.append(sequence)

    def pick(self, data):
        return data.draw(st.sampled_from(self.running))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def read(self, data):
        """Part of a prompt is read, and can be found from now on."""
        sequence = self.pick(data)
        rest = sequence.length - sequence.prefilled
        if sequence.status is Status.PREFILL:
            sequence.prefilled += data.draw(st.integers(1, rest))
            self.publish(sequence, sequence.prefilled)
            if sequence.prefilled == sequence.length:
                sequence.status = Status.DECODE

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.sampled_from([0, 1]))
    def decode(self, data, token):
        sequence = self.pick(data)
        if sequence.status is not Status.DECODE or not sequence.left:
            return
        lacking = self.memory.short([sequence], 1)
        short = max(0, math.ceil(sequence.length / self.size) - len(sequence.pages))
        assert lacking == ([(sequence, short)] if short else [])
        if short > self.memory.pool.free:
            return
        mine = {page for s in self.running for page in s.pages}
        for slot, index, page in self.memory.grow(lacking, short):
            assert slot == sequence.slot and sequence.pages[index] == page and page not in mine
            self.content.pop(page, None)
        sequence.output.append(token)
        self.publish(sequence, sequence.length - 1)

    def publish(self, sequence, positions):
        """Each page is offered once: one that was a duplicate then, or was forgotten since, is not offered again."""
        self.memory.publish(sequence, positions)
        for index in range(self.offered[sequence], positions // self.size):
            content = self.prefix(sequence, index)
            if sequence.salt is not None and content not in self.content.values():
                self.content[sequence.pages[index]] = content
        self.offered[sequence] = max(self.offered[sequence], positions // self.size)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        sequence = self.pick(data)
        self.running.remove(sequence)
        pages = list(sequence.pages)
        self.memory.release(sequence)
        assert sequence.pages == []
        mine = {page for s in self.running for page in s.pages}
        for page in pages:
            if not self.memory.pool.keep and page not in mine:
                self.content.pop(page, None)
        if sequence.status is Status.DECODE:
            self.memory.ended(sequence)

    @rule()
    def overcommitted(self):
        self.memory.overcommitted()
        assert self.memory.expected == 1

    @rule()
    def reset(self):
        self.memory.pool.reset()
        self.content = {}

    @invariant()
    def agrees(self):
        if not hasattr(self, "memory"):
            return
        memory, pool = self.memory, self.memory.pool
        counts = [0] * pool.num_pages
        for sequence in self.running:
            for page in sequence.pages:
                counts[page] += 1
        assert pool._owners == counts
        assert {page for page, key in enumerate(pool._key_of) if key is not None} == set(self.content)
        assert set(pool._cached) == {page for page in self.content if not counts[page]}
        assert memory._growth == sum(self.at_end(s) - len(s.pages) for s in self.running)
        assert 0 < memory.expected <= 1


QUICK = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
LONG = settings(QUICK, max_examples=3000, stateful_step_count=60)
TestPool, TestMemory = PoolMachine.TestCase, MemoryMachine.TestCase
TestPool.settings = TestMemory.settings = QUICK


class PoolAtLength(PoolMachine):
    """The same, for minutes."""


class MemoryAtLength(MemoryMachine):
    """The same, for minutes."""


TestPoolAtLength = pytest.mark.slow(PoolAtLength.TestCase)
TestMemoryAtLength = pytest.mark.slow(MemoryAtLength.TestCase)
TestPoolAtLength.settings = TestMemoryAtLength.settings = LONG

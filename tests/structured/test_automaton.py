"""Token automata against an oracle: each token's bytes, one by one, through the automaton over bytes."""

import re
import time
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxsched.structured import TokenAutomaton
from jaxsched.structured.compose import Composer
from jaxsched.structured.dfa import ByteDfa, build_trie, from_words
from jaxsched.structured.vocabulary import Vocabulary
from jaxsched.structured.worker import DfaWorker

TOKENS = (
    *(b"a", b"b", b"", b"ab", b"ba", b"aab", b"abab", b"a", " é".encode(), "é".encode(), "é".encode()[:1]),
    *("é".encode()[1:], b" ", b" a", b" b", b"\n", b"bbbbbb", b"", b"\xff", b"aa"),
)
ATOMS = st.sampled_from(["a", "b", "ab", "[ab]", "[^a]", ".", "é", "a|ab", "a??", "", " ", "\n"])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "+?", "??", "{2}", "{0,2}"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)
TEXTS = ["".join(letters) for n in range(5) for letters in product("abé", repeat=n)]


@pytest.fixture(scope="module")
def worker():
    made = DfaWorker(max_states=20_000, time_limit=20, memory_limit=1 << 30)
    yield made
    made.close()


def vocabulary(tokens: tuple[bytes, ...], first: tuple[bytes, ...] | None = None) -> Vocabulary:
    return Vocabulary(tokens, tokens if first is None else first, len(tokens), "")


def bytes_step(dfa: ByteDfa, state: int, piece: bytes) -> int:
    for byte in piece:
        state = int(dfa.step[state, byte]) if state >= 0 else -1
    return state


def alive_states(dfa: ByteDfa, tokens: tuple[bytes, ...]) -> set[int]:
    """States from which tokens lead to an accepting one."""
    alive = set(np.flatnonzero(dfa.accepting).tolist())
    while True:
        more = {q for q in range(len(dfa.step)) if any(p and bytes_step(dfa, q, p) in alive for p in tokens)}
        if more <= alive:
            return alive
        alive |= more


def compare(
    automaton: TokenAutomaton, dfa: ByteDfa, tokens: tuple[bytes, ...], first: tuple[bytes, ...]
) -> None:
    """Both are walked in step from their starts over all pairs of states."""
    alive = alive_states(dfa, tokens)
    todo, seen = [(0, 0, first)], {(0, 0, first is tokens)}
    while todo:
        ours, theirs, pieces = todo.pop()
        assert automaton.accepting[ours] == dfa.accepting[theirs]
        targets = [bytes_step(dfa, theirs, piece) if piece else -1 for piece in pieces]
        targets = [target if target in alive else -1 for target in targets]
        assert automaton.final[ours] == (dfa.accepting[theirs] and max(targets) < 0)
        for token, target in enumerate(targets):
            following = automaton.next(ours, token)
            assert automaton.allows(ours, token) == (following >= 0) == (target >= 0)
            if target >= 0 and (pair := (following, target, True)) not in seen:
                seen.add(pair)
                todo.append((following, target, tokens))
    assert len({ours for ours, _, _ in seen}) == automaton.num_states  # and no others


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(regex=REGEXES, strips=st.booleans(), spelt=st.booleans())
def test_against_bytes(worker: DfaWorker, regex: str, strips: bool, spelt: bool) -> None:
    dfa = worker.regex(regex)
    for text in TEXTS:
        state = bytes_step(dfa, 0, text.encode())
        assert (state >= 0 and bool(dfa.accepting[state])) == bool(re.fullmatch(regex, text)), text
    tokens = TOKENS if spelt else tuple(piece if piece != b"b" else b"" for piece in TOKENS)
    first = tuple(piece.removeprefix(b" ") for piece in tokens) if strips else tokens
    automaton = Composer(vocabulary(tokens, first)).compose(dfa, "key", time.monotonic() + 60)
    possible = not dfa.empty and (
        dfa.accepting[0] or any(p and bytes_step(dfa, 0, p) in alive_states(dfa, tokens) for p in first)
    )
    assert (automaton is not None) == possible
    if automaton is not None:
        compare(automaton, dfa, tokens, first)
        check_tables(automaton)


def check_tables(automaton: TokenAutomaton) -> None:
    """Dtypes and forms that the device relies on."""
    states = automaton.num_states
    for table, dtype, length in (
        (automaton.mask_of, np.int32, states),
        (automaton.accepting, np.bool_, states),
        (automaton.final, np.bool_, states),
        (automaton.default, np.int32, states),
        (automaton.edge_start, np.int32, states + 1),
        (automaton.edge_token, np.int32, automaton.num_edges),
        (automaton.edge_next, np.int32, automaton.num_edges),
    ):
        assert (table.dtype, table.shape) == (dtype, (length,))
    assert automaton.mask.dtype == np.uint32
    assert len(np.unique(automaton.mask, axis=0)) == len(automaton.mask)
    assert set(automaton.mask_of.tolist()) == set(range(len(automaton.mask)))
    assert automaton.edge_start[0] == 0 and automaton.edge_start[-1] == automaton.num_edges
    for state in range(states):
        edges = automaton.edge_token[automaton.edge_start[state] : automaton.edge_start[state + 1]]
        assert (np.diff(edges) > 0).all()


def test_long_bounds_take_no_exponential_time(worker: DfaWorker) -> None:
    """The library's search for later beginnings would need 2**100 states here."""
    for regex in (
        r'"([^"\\]|\\["\\n]){0,100}"',
        r"x([^xy]|yx){0,60}[^x]?",
        "(x.){0,30}.*",
    ):
        dfa = worker.regex(regex)
        assert len(dfa.step) < 10_000


def test_the_default_is_the_most_common_next_state() -> None:
    """Or the tables would be as long as the vocabulary is."""
    dfa = from_words([b"b", b"ab", b"ac", b"ad"], 100)
    assert dfa is not None
    tokens = (b"ab", b"ac", b"ad", b"b", b"a")
    joined = ByteDfa(np.where(np.isin(dfa.step, np.flatnonzero(dfa.accepting)), 1, dfa.step), dfa.accepting)
    automaton = Composer(vocabulary(tokens)).compose(joined, "key", time.monotonic() + 60)
    assert automaton is not None
    assert automaton.default[0] == automaton.run([0]) == automaton.run([3])
    assert automaton.edge_token[: automaton.edge_start[1]].tolist() == [4]


def test_run() -> None:
    dfa = from_words([b"ab", b"abab", b"b"], 100)
    assert dfa is not None
    automaton = Composer(vocabulary(TOKENS)).compose(dfa, "key", time.monotonic() + 60)
    assert automaton is not None
    state = automaton.run([0, 1])
    assert automaton.accepting[state] and not automaton.final[state]
    assert automaton.final[automaton.run([3], state)]
    assert automaton.run([0, 0]) == -1
    assert automaton.run([0, len(TOKENS)]) == automaton.run([-1]) == -1


def test_trie() -> None:
    trie = build_trie(TOKENS)
    found: list[tuple[int, bytes]] = []

    def visit(node: int, text: bytes) -> None:
        found.extend((int(t), text) for t in trie.token[trie.token_start[node] : trie.token_start[node + 1]])
        for child in range(trie.child_start[node], trie.child_start[node + 1]):
            visit(child, text + bytes([trie.byte[child]]))

    visit(0, b"")
    assert sorted(found) == [(token, piece) for token, piece in enumerate(TOKENS) if piece]

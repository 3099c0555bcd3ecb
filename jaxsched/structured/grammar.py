"""Constraints without a finite automaton: llguidance gives the mask of each step."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np

from .matcher import GrammarMatcher, GrammarTables, fill
from .vocabulary import Vocabulary
from .worker import INSTALL

# The library's own limits, so that neither a grammar nor a step of it takes seconds or gigabytes.
_LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}


class Grammar:
    """A grammar over one vocabulary; gives matchers. Safe to use from several threads."""

    def __init__(self, inner: Any, tables: GrammarTables):
        self._inner, self._tables = inner, tables
        self._lock = threading.Lock()

    def matcher(self) -> GrammarMatcher:
        """A matcher at the start of a text."""
        with self._lock:
            return GrammarMatcher(self._inner.deep_copy(), self._tables)


class GrammarCompiler:
    """Makes grammars for one vocabulary. The library is loaded, and its tables are made, with the first one."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._made: tuple[_Tokens, _Tokens] | None = None  # within a text, at its start

    def json(self, schema: str, whitespace: str | None) -> Grammar:
        """``schema`` is JSON; ``whitespace`` a regex for what may stand between tokens of JSON ("": nothing).

        Raises ValueError with the library's reason, ImportError without the library.
        """
        library = _library()
        options: dict[str, Any] = {"whitespace_flexible": False}
        if whitespace != "":
            options = {"whitespace_pattern": "[ ]?" if whitespace is None else whitespace}
        return self._compile(
            library.LLMatcher.grammar_from_json_schema(schema, overrides=options | {"lenient": False})
        )

    def text(self, grammar: str) -> Grammar:
        """``grammar`` is Lark as llguidance has it, or GBNF with a rule ``root``. Raises as ``json``."""
        library = _library()
        if re.search(r"^\s*[\w-]+\s*::=", grammar, re.MULTILINE):
            from llguidance.gbnf_to_lark import gbnf_to_lark

            try:
                grammar = gbnf_to_lark(grammar)
            except RecursionError as error:
                raise ValueError("it is nested too deeply") from error
            except Exception as error:  # its own error class, and IndexError and the like for broken input
                raise ValueError(f"{error}") from error
        return self._compile(library.LLMatcher.grammar_from_lark(grammar))

    def _compile(self, grammar: str) -> Grammar:
        library = _library()
        within, at_start = self._tokens()
        limits = library.LLParserLimits(**_LIMITS)
        inner = library.LLMatcher(within.tokenizer, grammar, log_level=0, limits=limits)
        if inner.is_error():
            raise ValueError(_short(inner.get_error()))
        start = np.zeros(-(-self._vocabulary.size // 32), np.uint32)
        first = inner
        if at_start is not within:
            first = library.LLMatcher(at_start.tokenizer, grammar, log_level=0, limits=limits)
        fill(first, start, at_start.twins)
        if inner.is_error():
            raise ValueError(_short(inner.get_error()))
        if not start.any() and not inner.is_accepting():
            raise ValueError("no text of this vocabulary satisfies it")
        vocabulary = self._vocabulary
        # Computing a mask has filled the matcher's caches; it has not moved it.
        tables = GrammarTables(vocabulary.tokens, vocabulary.first, within.ids, within.twins, start)
        return Grammar(inner, tables)

    def _tokens(self) -> tuple[_Tokens, _Tokens]:
        with self._lock:
            if self._made is None:
                within = _Tokens(self._vocabulary.tokens)
                at_start = _Tokens(self._vocabulary.first) if self._vocabulary.strips else within
                self._made = within, at_start
            return self._made


class _Tokens:
    """The library's tokenizer for given pieces by token id.

    Of tokens with equal bytes it gets only the first, because it may allow only one of them; ``twins`` has the others.
    Single bytes that are no token get ids beyond the vocabulary, and so does an end of sequence, because ends of
    sequence are not the library's business.
    """

    def __init__(self, pieces: tuple[bytes, ...]):
        self.ids: dict[bytes, int] = {}
        for token, piece in enumerate(pieces):
            if piece:
                self.ids.setdefault(piece, token)
        twins = [(t, self.ids[piece]) for t, piece in enumerate(pieces) if piece and self.ids[piece] != t]
        self.twins = np.array(twins, np.int64).reshape(-1, 2).T
        size = -(-len(pieces) // 32) * 32  # so that no bit of a mask's last word is one of the following
        missing = [bytes([byte]) for byte in range(256) if bytes([byte]) not in self.ids]
        self.ids |= {piece: size + i for i, piece in enumerate(missing)}
        table = [b""] * (size + len(missing)) + [b"\xff[end]"]
        for piece, token in self.ids.items():
            table[token] = piece
        library = _library()
        wrapped = library.TokenizerWrapper(_Asked(table, self.ids))
        self.tokenizer = library.LLTokenizer(wrapped, n_vocab=len(table))


class _Asked:
    """What llguidance asks of a tokenizer: token bytes by id, and some way to write bytes in tokens."""

    bos_token_id = None

    def __init__(self, table: list[bytes], ids: dict[bytes, int]):
        self._ids, self.tokens = ids, table
        self.eos_token_id = len(table) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[bytes([byte])] for byte in text]


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(f"this constraint needs the package llguidance; install it: {INSTALL}") from error
    return llguidance


def _short(message: str, limit: int = 300) -> str:
    """The library's message without the state that it prints after it."""
    message = message.split("\n<state>")[0].strip()
    return message if len(message) <= limit else message[:limit] + "..."

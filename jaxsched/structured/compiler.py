"""From what is asked of a text to an automaton or a grammar."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from .automaton import TokenAutomaton
from .compose import Composer, TooLarge
from .dfa import ByteDfa, from_words
from .grammar import Grammar, GrammarCompiler
from .matcher import AutomatonMatcher, Matcher
from .regex import NotRegular, between_tokens, checked_regex, explain, shown
from .schema import NotFinite, lower
from .spec import Spec, StructuredOutputs, read_spec
from .vocabulary import read_vocabulary
from .worker import DfaWorker, WorkerError

DEVICE, HOST = "device", "host"
_SMALLER = "ask for less, for example repeat without a bound (x* instead of x{0,300})"


@dataclass(frozen=True, eq=False)
class Constraint:
    """A compiled constraint. Pickling keeps level, why and spec; what was compiled stays behind.

    An unpickled one gets automaton and matchers back from ``ConstraintCompiler.compile(constraint.spec)``.
    """

    level: str  # "device": an automaton; "host": a matcher only
    why: str  # why this level, in a few words
    automaton: TokenAutomaton | None
    spec: Spec
    _grammar: Grammar | None = field(default=None, repr=False)

    def matcher(self) -> Matcher:
        """A matcher at the start of a text. Raises RuntimeError after unpickling."""
        if self.automaton is not None:
            return AutomatonMatcher(self.automaton)
        if self._grammar is not None:
            return self._grammar.matcher()
        raise RuntimeError("this constraint was unpickled; call compiler.compile(constraint.spec) first")

    def __reduce__(self) -> tuple[Any, ...]:
        return Constraint, (self.level, self.why, None, self.spec)


class ConstraintCompiler:
    """Compiles constraints for one vocabulary, each once as long as it is among the last ``cache_size``.

    ``time_limit`` (seconds) and ``memory_limit`` (bytes) are those of one regex or schema, compiled in a process of its
    own; ``max_states`` bounds the automaton. Beyond them regexes are refused and JSON schemas become grammars.
    Safe to use from several threads.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        max_states: int = 20_000,
        time_limit: float = 10.0,
        memory_limit: int = 1 << 30,
        cache_size: int = 128,
    ):
        """``tokenizer`` is a jaxsched.text.Tokenizer. Raises ValueError for a kind of it that is not supported."""
        self._vocabulary = read_vocabulary(tokenizer, vocab_size, eos_token_ids)
        self._max_states, self._time_limit, self._cache_size = max_states, time_limit, cache_size
        self._worker = DfaWorker(max_states, time_limit, memory_limit)
        self._grammars = GrammarCompiler(self._vocabulary)
        self._lock = threading.Lock()
        self._composer: Composer | None = None
        self._cache: OrderedDict[Spec, Future[Constraint]] = OrderedDict()

    def compile(self, spec: StructuredOutputs) -> Constraint:
        """The constraint of ``spec``, which has the fields of StructuredOutputsParams.

        Raises ValueError naming the field, what is wrong with it and what to do, also for constraints that no text of
        this vocabulary satisfies; ImportError naming the package that is missing.
        """
        checked = read_spec(spec)
        with self._lock:
            future = self._cache.get(checked)
            mine = future is None
            if future is None:
                future = self._cache[checked] = Future()
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
            else:
                self._cache.move_to_end(checked)
        if mine:
            self._fulfil(checked, future)
        error = future.exception()
        if isinstance(error, ValueError):
            raise ValueError(str(error))  # a new one: each raise adds to the traceback of an exception
        return future.result()

    def known(self, spec: StructuredOutputs) -> Constraint | None:
        """The constraint if it has been compiled, without waiting. Raises as ``compile`` if it has been refused."""
        with self._lock:
            future = self._cache.get(read_spec(spec))
        return self.compile(spec) if future is not None and future.done() else None

    def close(self) -> None:
        """Ends the process that compiles and forgets what was compiled. A later ``compile`` starts anew."""
        with self._lock:
            self._cache.clear()
        self._worker.close()

    def _fulfil(self, spec: Spec, future: Future[Constraint]) -> None:
        try:
            future.set_result(self._build(spec))
        except ValueError as error:  # refused, and refused at once the next time
            future.set_exception(error)
        except BaseException as error:
            with self._lock:
                if self._cache.get(spec) is future:
                    del self._cache[spec]
            future.set_exception(error)

    def _build(self, spec: Spec) -> Constraint:
        if spec.regex is not None:
            return self._regex(spec, spec.regex)
        if spec.choice is not None:
            return self._choice(spec, spec.choice)
        if spec.json is not None:
            return self._json(spec, spec.json)
        if spec.grammar is not None:
            text = spec.grammar
            return self._host(spec, "grammar", lambda: self._grammars.text(text))
        whitespace = _whitespace(spec)
        return self._host(
            spec, "any JSON object", lambda: self._grammars.json('{"type": "object"}', whitespace)
        )

    def _regex(self, spec: Spec, regex: str) -> Constraint:
        began = time.monotonic()
        body = checked_regex(regex)
        try:
            automaton = self._automaton(spec, self._worker.regex(body), began)
        except WorkerError as error:
            if error.kind == "regex":
                raise ValueError(
                    f"structured_outputs.regex {shown(regex)} cannot be compiled: {explain(body)}; "
                    "correct or simplify it"
                ) from error
            raise self._too_large("regex", regex, str(error)) from error
        except TooLarge as error:
            raise self._too_large("regex", regex, f"more than {error}") from error
        return self._device(spec, "regex", automaton)

    def _choice(self, spec: Spec, words: tuple[str, ...]) -> Constraint:
        began = time.monotonic()
        dfa = from_words([word.encode() for word in words], self._max_states)
        what = f"of {len(words)} strings"
        if dfa is None:
            raise self._too_large("choice", what, f"more than {self._max_states} states")
        try:
            return self._device(spec, "choice", self._automaton(spec, dfa, began))
        except TooLarge as error:
            raise self._too_large("choice", what, f"more than {error}") from error

    def _json(self, spec: Spec, schema: str) -> Constraint:
        began = time.monotonic()
        whitespace = _whitespace(spec)
        try:
            lowered = json.dumps(lower(json.loads(schema)))
            automaton = self._automaton(spec, self._worker.schema(lowered, whitespace), began)
        except NotFinite as error:
            why = str(error)
        except WorkerError as error:
            why = {"schema": "schema not understood", "regex": "schema too large"}.get(error.kind, str(error))
        except TooLarge as error:
            why = f"more than {error}"
        except RecursionError:
            why = "nested deeply"
        except TypeError:  # a value where it cannot be, such as a list among the names of ``required``
            why = "schema not understood"
        else:
            if automaton is not None:
                return self._device(spec, "json", automaton)
            why = "no text found"
        return self._host(spec, why, lambda: self._grammars.json(schema, whitespace))

    def _automaton(self, spec: Spec, dfa: ByteDfa, began: float) -> TokenAutomaton | None:
        """None if no text of this vocabulary is accepted. Raises TooLarge."""
        with self._lock:
            if self._composer is None:
                self._composer = Composer(self._vocabulary)
        if dfa.empty:
            return None
        if len(dfa.step) > self._max_states:
            raise TooLarge(f"{self._max_states} states")
        key = hashlib.blake2b(f"{self._vocabulary.key} {spec!r}".encode(), digest_size=16).hexdigest()
        return self._composer.compose(dfa, key, began + 2 * self._time_limit)

    def _device(self, spec: Spec, name: str, automaton: TokenAutomaton | None) -> Constraint:
        if automaton is None:
            raise ValueError(
                f"structured_outputs.{name} {shown(str(getattr(spec, name)))} allows no text that this vocabulary can "
                "spell; correct it"
            )
        return Constraint(DEVICE, f"{name}, {automaton.num_states} states", automaton, spec)

    def _host(self, spec: Spec, why: str, make: Callable[[], Grammar]) -> Constraint:
        try:
            return Constraint(HOST, why, None, spec, make())
        except ValueError as error:
            reason = "" if spec.kind in why else f" ({why})"
            raise ValueError(
                f"structured_outputs.{spec.kind}{reason} is refused: {error}; write it in another way"
            ) from error

    def _too_large(self, name: str, value: str, what: str) -> ValueError:
        return ValueError(f"structured_outputs.{name} {shown(value)} needs {what}; {_SMALLER}")


def _whitespace(spec: Spec) -> str | None:
    """Regex for what may stand between tokens of JSON; None for the default, at most one space."""
    if spec.disable_any_whitespace:
        return ""
    if spec.whitespace_pattern is None:
        return None
    try:
        return between_tokens(spec.whitespace_pattern)
    except NotRegular as error:
        raise ValueError(
            f"structured_outputs.whitespace_pattern {shown(spec.whitespace_pattern)}: {error}; "
            "give a regex of spaces, tabs and line ends"
        ) from error

"""Compiles what outputs must follow, on first use."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxsched.request import StructuredOutputsParams
from jaxsched.text import Tokenizer

if TYPE_CHECKING:
    from jaxsched.structured import Constraint, ConstraintCompiler
    from jaxsched.structured.spec import Spec


class Constraints:
    """An engine's compiler of constraints. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, eos_token_ids: Sequence[int]):
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, tuple(eos_token_ids)
        self._compiler: ConstraintCompiler | None = None
        self._lock = threading.Lock()

    def compile(self, wanted: StructuredOutputsParams | Spec) -> Constraint:
        """The constraint, kept for the next time. May take seconds.

        Raises ValueError for one that is malformed, impossible or too large.
        """
        with self._lock:
            if self._compiler is None:
                if self._tokenizer is None:
                    raise ValueError("structured_outputs needs the checkpoint's tokenizer, and it has none")
                from jaxsched.structured import ConstraintCompiler

                self._compiler = ConstraintCompiler(self._tokenizer, self._vocab, self._eos)
        spec: Any = wanted
        return self._compiler.compile(spec)

    def known(self, wanted: StructuredOutputsParams) -> Constraint | None:
        """The constraint if it has been compiled. Raises as ``compile`` if it has been refused."""
        spec: Any = wanted
        return None if self._compiler is None else self._compiler.known(spec)

    def close(self) -> None:
        """Ends the compiler's process."""
        if self._compiler is not None:
            self._compiler.close()

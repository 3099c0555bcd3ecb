"""What is asked of a text, as the compiler keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .schema import parse_json

KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_SPEC_BYTES = 1 << 20


class StructuredOutputs(Protocol):
    """The fields of ``StructuredOutputsParams``; exactly one of the first five is set."""

    @property
    def json(self) -> str | dict[str, Any] | None: ...
    @property
    def regex(self) -> str | None: ...
    @property
    def choice(self) -> list[str] | None: ...
    @property
    def grammar(self) -> str | None: ...
    @property
    def json_object(self) -> bool | None: ...
    @property
    def disable_any_whitespace(self) -> bool: ...
    @property
    def whitespace_pattern(self) -> str | None: ...


@dataclass(frozen=True)
class Spec:
    """A checked copy of StructuredOutputs, which it satisfies itself. Equal constraints are equal and hash alike."""

    json: str | None = None  # a schema, as JSON
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    @property
    def kind(self) -> str:
        """The field that is set, one of KINDS."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def read_spec(given: StructuredOutputs) -> Spec:
    """Raises ValueError naming the field for values that are not of its type, not JSON or too long."""
    found = [name for name in KINDS if getattr(given, name) not in (None, False)]
    if len(found) != 1:
        raise ValueError(
            f"structured_outputs sets {' and '.join(found) or 'nothing'}; set exactly one of {', '.join(KINDS)}"
        )
    schema = None if given.json is None else _schema(given.json)
    choice = None if given.choice is None else _choice(given.choice)
    for name in ("regex", "grammar", "whitespace_pattern"):
        value = getattr(given, name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"structured_outputs.{name} is a {type(value).__name__}; give a str")
    spec = Spec(
        json=schema,
        regex=given.regex,
        choice=choice,
        grammar=given.grammar,
        json_object=True if given.json_object else None,
        disable_any_whitespace=bool(given.disable_any_whitespace),
        whitespace_pattern=given.whitespace_pattern,
    )
    _check_text(spec)
    return spec


def _schema(given: str | dict[str, Any]) -> str:
    try:
        value = parse_json(given) if isinstance(given, str) else given
        # One spelling for equal schemas. The order of names stays: it is that of the answer.
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json is not JSON: {error}; give a JSON schema") from error
    if not isinstance(value, (dict, bool)):
        raise ValueError(f"structured_outputs.json is a JSON {type(value).__name__}; a schema is an object")
    return text


def _choice(given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not all(isinstance(item, str) for item in given):
        raise ValueError("structured_outputs.choice has an item that is not a str; give a list of strings")
    if not given:
        raise ValueError(
            "structured_outputs.choice is empty, so that no text is possible; give at least one string"
        )
    return tuple(dict.fromkeys(given))


def _check_text(spec: Spec) -> None:
    for name in (spec.kind, "whitespace_pattern"):
        value = getattr(spec, name)
        text = "".join(value) if isinstance(value, tuple) else value
        if not isinstance(text, str):
            continue
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(
                f"structured_outputs.{name} has half of a surrogate pair, which is no character; remove it"
            ) from error
        if size > MAX_SPEC_BYTES:
            raise ValueError(
                f"structured_outputs.{name} has {size} bytes; the limit is {MAX_SPEC_BYTES}; give less"
            )

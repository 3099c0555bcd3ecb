"""Checks of what users hand in: each returns the value as it is stored, or raises ValueError naming field and range."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def shown(value: Any) -> str:
    """At most 80 characters that tell the user which value is meant."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def check_number(
    name: str, value: Any, low: float, high: float = math.inf, remedy: str = "", *, above: bool = False
) -> float:
    """A finite float in [low, high], or in (low, high] if ``above``."""
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not low <= number <= high or (above and number == low):
        bound = f"a finite number {'above' if above else 'of at least'} {low:g}"
        if math.isfinite(high):
            bound = f"in {'(' if above else '['}{low:g}, {high:g}]"
        raise ValueError(f"{name} is {shown(value)}; it must be {bound}{remedy}")
    if math.isinf(number):
        raise ValueError(f"{name} is {shown(value)}; it must be finite{remedy}")
    return number


def check_integer(name: str, value: Any, low: int, high: int | None = None, remedy: str = "") -> int:
    """An int in low..high; bools are none."""
    fits = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not fits or value < low or (high is not None and value > high):
        bound = f"an integer of at least {low}" if high is None else f"an integer in {low}..{high}"
        raise ValueError(f"{name} is {shown(value)}; it must be {bound}{remedy}")
    return int(value)


def check_count(name: str, value: Any, low: int, special: str) -> int | None:
    """None, -1 or an integer of at least ``low``."""
    if value is None:
        return None
    minus_one = isinstance(value, numbers.Integral) and value == -1
    return -1 if minus_one else check_integer(name, value, low, remedy=f", None, or -1 {special}")


def check_flag(name: str, value: Any) -> bool:
    """A bool, Python's or numpy's."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {shown(value)}; it must be True or False")
    return bool(value)


def check_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids; whether the model has them is the engine's to check."""
    try:
        ids = tuple(value)
    except TypeError:
        raise ValueError(f"{name} is {shown(value)}; it must be a list of token ids") from None
    return tuple(check_integer(name, i, 0) for i in ids)


def check_some_ids(name: str, value: Any, limit: int | None = None) -> tuple[int, ...] | None:
    """None, or one to ``limit`` token ids."""
    if value is None:
        return None
    ids = check_ids(name, value)
    if not ids:
        raise ValueError(f"{name} is empty; give at least one token id, or None")
    if limit is not None and len(ids) > limit:
        raise ValueError(f"{name} has {len(ids)} token ids; it must have at most {limit}")
    return ids


def check_text(name: str, value: Any, what: str = "a string") -> str:
    """A string that is not empty and can be encoded."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {shown(value)}; it must be {what} that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{name} is {shown(value)}; it must be {what} without lone surrogates: no text has these"
        ) from None
    return str(value)


def check_texts(name: str, value: Any) -> tuple[str, ...]:
    """Strings that are not empty; a single string is an error."""
    items: Any = None
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping):
        items = tuple(value)
    if items is None:
        raise ValueError(f"{name} is {shown(value)}; it must be a list of strings")
    return tuple(check_text(f"one of {name}", item) for item in items)


def refuse_unknown(
    owner: str, given: Iterable[str], known: list[str], advice: Mapping[str, str] | None = None
) -> None:
    """Raises TypeError for a name that is not known, with advice, the nearest known one, or all of them."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise TypeError(f"{owner} has no argument {name!r}; {(advice or {}).get(name, hint)}")


def advised(advice: Mapping[str, str]) -> Any:
    """A decorator that lets the constructor of a dataclass refuse unknown names helpfully."""

    def decorate(cls: Any) -> Any:
        original = cls.__init__
        known = [field.name for field in dataclasses.fields(cls)]

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            refuse_unknown(cls.__name__, kwargs, known, advice)
            original(self, *args, **kwargs)

        cls.__init__ = init
        return cls

    return decorate

"""Regexes: what is refused before compiling, and how those inside JSON are rewritten."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_REMEDY = "rewrite the regex without it, or use a grammar"
# In the order of a scan; what begins with these has no finite automaton or no meaning where the whole text matches.
_NEGATED, _VERBOSE = re.compile(r"\^?\]?"), re.compile(r"\(\?[a-zA-Z-]*x")
_GROUPS = {
    "(?=": "lookahead",
    "(?!": "lookahead",
    "(?<=": "lookbehind",
    "(?<!": "lookbehind",
    "(?P=": "a backreference",
    "(?(": "a conditional group",
    "(?>": "an atomic group",
    "(?#": "a comment",
}
_ESCAPES = {
    **{digit: "a backreference" for digit in "123456789k"},
    **{letter: "a word boundary" for letter in "bB"},
    **{letter: "an anchor" for letter in "AzZG"},
}


class NotRegular(Exception):
    """A pattern that cannot be rewritten; the message says why."""


def checked_regex(regex: str) -> str:
    """``regex`` without ^ and $ around it, which mean nothing when the whole text must match.

    Raises ValueError for what has no finite automaton and for brackets that are not in pairs.
    """
    body = regex[1:] if regex.startswith("^") else regex
    if body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1:
        body = body[:-1]
    at, groups, classes = 0, 0, 0
    while at < len(body):
        character = body[at]
        if character == "\\":
            if not classes and body[at + 1 : at + 2] in _ESCAPES:
                raise _refused(regex, body[at : at + 2], _ESCAPES[body[at + 1]])
            at += 1
        elif character == "[":
            classes += 1
            at += len(_NEGATED.match(body, at + 1)[0])  # type: ignore[index] # "" matches always
        elif character == "]" and classes:
            classes -= 1
        elif not classes and character in "^$":
            raise _refused(regex, character, "an anchor")
        elif not classes and character == "(":
            groups += 1
            for start, name in _GROUPS.items():
                if body.startswith(start, at):
                    raise _refused(regex, start, name)
            if flags := _VERBOSE.match(body, at):
                raise _refused(regex, flags[0], "the flag x")
        elif not classes and character == ")":
            groups -= 1
            if groups < 0:
                break
        at += 1
    if groups or classes:
        raise ValueError(
            f"structured_outputs.regex {shown(regex)} has brackets that are not in pairs; escape them: \\( \\["
        )
    return body


def explain(regex: str) -> str:
    """What Python's parser has to say about a regex that the library refused."""
    try:
        re.compile(regex)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return "it is too large or uses a construct that is not supported"


def shown(text: str, limit: int = 60) -> str:
    """``text`` for an error message."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


def _refused(regex: str, what: str, name: str) -> ValueError:
    return ValueError(
        f"structured_outputs.regex {shown(regex)} has {name} ({what}), which is not supported; {_REMEDY}"
    )


@dataclass(frozen=True)
class Universe:
    """The characters a rewritten pattern is confined to."""

    allowed: str  # a class
    space: str  # what \s stands for, inside a class
    quote: bool  # literals that need it are written as JSON escapes


# A JSON string's inside, unescaped; and what may stand between the tokens of JSON.
IN_STRING = Universe(r'[^"\\\x00-\x1f\x7f-\x9f]', " ", True)
BETWEEN = Universe(r"[ \t\n\r]", r" \t\n\r", False)
_STRING_CHARACTER = r'(?:[^"\\\x00-\x1f\x7f-\x9f]|\\["\\/bfnrt])'
_ESCAPED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}


def in_json_string(pattern: str) -> str:
    """A regex of JSON strings (without quotes) whose value ``pattern`` is found in, as JSON Schema understands it.

    Not of all such strings: sets such as ``.`` and ``[^a]`` give only characters that need no escape.
    Raises NotRegular.
    """
    tree = _parse(pattern)
    branches = tree[0][1][1] if len(tree) == 1 and str(tree[0][0]) == "BRANCH" else [tree]
    out = []
    for branch in branches:
        items = list(branch)
        head = (
            bool(items)
            and str(items[0][0]) == "AT"
            and str(items[0][1]) in ("AT_BEGINNING", "AT_BEGINNING_STRING")
        )
        items = items[1:] if head else items
        tail = bool(items) and str(items[-1][0]) == "AT" and str(items[-1][1]) in ("AT_END", "AT_END_STRING")
        items = items[:-1] if tail else items
        body = _emit(items, IN_STRING)
        out.append(
            ("" if head else _STRING_CHARACTER + "*") + body + ("" if tail else _STRING_CHARACTER + "*")
        )
    return f"(?:{'|'.join(out)})"


def between_tokens(pattern: str) -> str:
    """``pattern``, confined to the white space that JSON allows between its tokens. Raises NotRegular."""
    return f"(?:{_emit(list(_parse(pattern)), BETWEEN)})"


def _parse(pattern: str) -> Any:
    """Python's syntax tree: (operation, argument) pairs."""
    try:
        tree = re._parser.parse(pattern)  # type: ignore[attr-defined]
    except (re.error, OverflowError, RecursionError) as error:
        raise NotRegular(f"pattern {shown(pattern)}: {error}") from error
    if tree.state.flags & ~re.UNICODE:
        raise NotRegular(f"pattern {shown(pattern)}: flags")
    return tree


def _emit(items: list[Any], universe: Universe) -> str:
    return "".join(_one(str(operation), argument, universe) for operation, argument in items)


def _one(operation: str, argument: Any, universe: Universe) -> str:
    if operation == "LITERAL":
        return _literal(chr(argument), universe)
    if operation == "NOT_LITERAL":
        return _class(f"[^{_in_class(argument)}]", universe)
    if operation == "ANY":
        return _class(r"[^\n]", universe)
    if operation == "IN":
        return _class(_set(argument, universe), universe)
    if operation == "BRANCH":
        return f"(?:{'|'.join(_emit(list(branch), universe) for branch in argument[1])})"
    if operation == "SUBPATTERN" and not argument[1] and not argument[2]:
        return f"(?:{_emit(list(argument[3]), universe)})"
    if operation in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, body = argument
        bound = "" if str(most) == "MAXREPEAT" else most
        return f"(?:{_emit(list(body), universe)}){{{least},{bound}}}"
    raise NotRegular(f"pattern with {operation.lower().replace('_', ' ')}")


def _literal(character: str, universe: Universe) -> str:
    text = _ESCAPED.get(character, character) if universe.quote else character
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text) and universe.quote:
        raise NotRegular("pattern with a control character")
    if not universe.quote and text not in " \t\n\r":
        raise NotRegular(f"{text!r} in whitespace_pattern")
    return "".join(f"\\x{{{ord(c):x}}}" for c in text)


def _class(text: str, universe: Universe) -> str:
    return f"[{text}&&{universe.allowed}]"


def _in_class(code: int) -> str:
    return f"\\x{{{code:x}}}"


def _set(items: list[Any], universe: Universe) -> str:
    negated = bool(items) and str(items[0][0]) == "NEGATE"
    parts = []
    for operation, argument in items[1:] if negated else items:
        if str(operation) == "LITERAL":
            parts.append(_in_class(argument))
        elif str(operation) == "RANGE":
            parts.append(f"{_in_class(argument[0])}-{_in_class(argument[1])}")
        else:
            parts.append(_category(str(argument), negated, universe))
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _category(name: str, negated: bool, universe: Universe) -> str:
    """A category such as \\d: what all readings of it have in common, so that every reader finds a match.

    Readers differ in whether it is about ASCII or Unicode. Positive ones are ASCII; where they are excluded, Unicode.
    """
    kind = name.removeprefix("CATEGORY_").removeprefix("NOT_")
    if kind not in ("DIGIT", "WORD", "SPACE"):
        raise NotRegular(f"pattern with {name.lower()}")
    excluded = negated != ("NOT_" in name)
    if excluded:
        text = {"DIGIT": r"\d", "WORD": r"\w", "SPACE": r"\s"}[kind]
        return text.upper() if "NOT_" in name and not negated else text
    text = {"DIGIT": "0-9", "WORD": "0-9A-Za-z_", "SPACE": universe.space}[kind]
    return f"[^{text}]" if "NOT_" in name else text

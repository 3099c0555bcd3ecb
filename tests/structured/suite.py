"""Constraints of all sorts, as data: what is asked, at which level it is answered, and how to tell a valid text.

for case in SUITE: compile(params(**case.spec)); case.check(text) raises AssertionError for a text that is invalid
"""

import datetime
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jsonschema


@dataclass(frozen=True)
class Case:
    name: str
    level: str  # "device" or "host"
    spec: dict[str, Any]  # fields of StructuredOutputsParams
    check: Callable[[str], None]  # raises for an invalid text


FORMATS = jsonschema.FormatChecker(["uuid", "ipv4"])
FORMATS.checks("date", ValueError)(lambda text: bool(datetime.date.fromisoformat(text)))
FORMATS.checks("time", ValueError)(lambda text: datetime.time.fromisoformat(text).tzinfo is not None)
FORMATS.checks("date-time", ValueError)(lambda text: datetime.datetime.fromisoformat(text).tzinfo is not None)


def params(**fields: Any) -> SimpleNamespace:
    """The fields of StructuredOutputsParams."""
    empty = dict.fromkeys(("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern"))
    return SimpleNamespace(**{**empty, "disable_any_whitespace": False, **fields})


def _validator(schema: Any) -> Callable[[str], None]:
    def check(text: str) -> None:
        value = json.loads(text)
        jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)

    return check


def _json(name: str, level: str, schema: Any, **more: Any) -> Case:
    return Case(name, level, {"json": schema, **more}, _validator(schema))


def _regex(name: str, regex: str, python: str | None = None) -> Case:
    def check(text: str) -> None:
        assert re.fullmatch(python or regex, text), text

    return Case(name, "device", {"regex": regex}, check)


def _choice(name: str, *words: str) -> Case:
    def check(text: str) -> None:
        assert text in words, text

    return Case(name, "device", {"choice": list(words)}, check)


def _grammar(name: str, grammar: str, check: Callable[[str], None]) -> Case:
    return Case(name, "host", {"grammar": grammar}, check)


def _matches(regex: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(regex, text), text

    return check


def _balanced(text: str) -> None:
    depth = 0
    for character in text:
        assert character in "()"
        depth += 1 if character == "(" else -1
        assert depth >= 0
    assert depth == 0 and text


def _as_many(text: str) -> None:
    half = len(text) // 2
    assert half and text == "a" * half + "b" * half


def _sum(text: str) -> None:
    assert re.fullmatch(r"[0-9+*()]+", text)
    compile(re.sub(r"\b0+(?=\d)", "", text), "sum", "eval")  # Python's parser


def _object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def _compact(text: str) -> None:
    assert json.loads(text) == {"a": None, "b": [None]}
    assert text == '{"a":null,"b":[null]}'


def _obj(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names}


STRING, INTEGER, NULL, BOOLEAN = ({"type": name} for name in ("string", "integer", "null", "boolean"))
SHORT = {"type": "string", "maxLength": 4}
PERSON = _obj(
    name=SHORT, age=INTEGER, home=_obj(street=SHORT, at=_obj(x={"type": "number"}, y={"type": "number"}))
)
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": _obj(["v"], v=BOOLEAN, left={"$ref": "#/$defs/node"}, right={"$ref": "#/$defs/node"})},
}
CALL = {
    "oneOf": [
        _obj(tool={"const": "search"}, query=SHORT),
        _obj(tool={"const": "open"}, page=INTEGER),
    ]
}
REFERENCES = {**_obj(a={"$ref": "#/$defs/t~1u"}, b={"$ref": "#/$defs/t~1u"}), "$defs": {"t/u": SHORT}}
COMPACT = _obj(a=NULL, b={"type": "array", "items": NULL, "minItems": 1, "maxItems": 1})
PATTERN_PROPERTIES = {
    "type": "object",
    "patternProperties": {"^x[0-9]$": NULL},
    "additionalProperties": False,
}
EVENT = {
    "title": "Event",
    "description": "d",
    **_obj(when={"type": "string", "format": "date-time"}, id=INTEGER),
}

SUITE = [
    # JSON schemas that are automata
    _json("string", "device", STRING),
    _json("string bounds", "device", {"type": "string", "minLength": 2, "maxLength": 5}),
    _json("long string", "device", {"type": "string", "maxLength": 40}),
    _json("integer", "device", INTEGER),
    _json("number", "device", {"type": "number"}),
    _json("boolean", "device", BOOLEAN),
    _json("null", "device", NULL),
    _json("list of types", "device", {"type": ["integer", "null", "string"], "maxLength": 3}),
    _json("object or null", "device", {**_obj(a=NULL), "type": ["object", "null"]}),
    _json("nested objects", "device", PERSON),
    _json("optional properties", "device", _obj([], a=NULL, b=BOOLEAN, c=INTEGER)),
    _json("optional and required", "device", _obj(["b"], a=NULL, b=BOOLEAN, c=INTEGER)),
    _json("closed object", "device", {**_obj(a=NULL), "additionalProperties": False}),
    _json("empty closed object", "device", {"type": "object", "additionalProperties": False}),
    _json("names to escape", "device", _obj(**{'a"b': NULL, "é.\\": NULL, "(x)*": NULL, "\n": NULL, "日": NULL})),
    _json("enum of strings", "device", {"enum": ["red", "green", "red hot"]}),
    _json("enum of all sorts", "device", {"enum": ["é", '"\\', "\n\t", "日本", "a.*", 1, -2.5, None, True, [], {}]}),
    _json("nested enum", "device", {"enum": [{"a": [1, "x.y", {"b": None}]}, [1, [2]], "\x00\x7f"]}),
    _json("const", "device", {"const": {"k": "é.*", "n": [0.1, 1e-7]}}),
    _json("typed enum", "device", {"type": "string", "enum": ["a", "b", 1]}),
    _json("array of integers", "device", {"type": "array", "items": INTEGER}),
    _json("array bounds", "device", {"type": "array", "items": BOOLEAN, "minItems": 2, "maxItems": 4}),
    _json("array of one", "device", {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 1}),
    _json("array of none", "device", {"type": "array", "items": SHORT, "maxItems": 0}),
    _json("array of objects", "device", {"type": "array", "items": _obj(a=NULL), "maxItems": 3}),
    _json("prefix items", "device", {"type": "array", "prefixItems": [INTEGER, BOOLEAN], "items": False}),
    _json("anyOf", "device", {"anyOf": [INTEGER, _obj(a=NULL), {"const": "x"}]}),
    _json("oneOf by type", "device", {"oneOf": [STRING, INTEGER, {"type": "array", "items": NULL}]}),
    _json("oneOf by tag", "device", CALL),
    _json("references", "device", REFERENCES),
    _json("pattern", "device", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}),
    _json("pattern found inside", "device", {"type": "string", "pattern": "b+|^a|z$"}),
    _json("pattern with quotes", "device", {"type": "string", "pattern": '^"a\\\\b\\n"?$'}),
    _json("pattern of classes", "device", {"type": "string", "pattern": r"^.[^a]\d\w\s\D\W\S[^\d\s][\D]$"}),
    _json("date", "device", {"type": "string", "format": "date"}),
    _json("time", "device", {"type": "string", "format": "time"}),
    _json("uuid", "device", {"type": "string", "format": "uuid"}),
    _json("date-time and annotations", "device", EVENT),
    Case(
        "as text", "device", {"json": json.dumps(PERSON)}, _validator(PERSON)
    ),
    Case("no whitespace", "device", {"json": COMPACT, "disable_any_whitespace": True}, _compact),
    _json("own whitespace", "device", PERSON, whitespace_pattern=r"[\n ]{0,2}"),
    # JSON schemas that need a grammar
    _json("recursive", "host", TREE),
    _json("bounds of integers", "host", {"type": "integer", "minimum": -3, "maximum": 12}),
    _json("bounds of numbers", "host", {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}),
    _json("additional properties", "host", {**_obj(a=NULL), "additionalProperties": INTEGER}),
    _json("pattern properties", "host", PATTERN_PROPERTIES),
    _json("allOf", "host", {"allOf": [_obj(a=NULL), _obj(b=BOOLEAN)]}),
    _json("any array", "host", {"type": "array", "maxItems": 2}),
    _json("pattern and length", "host", {"type": "string", "pattern": "^[ab]+$", "maxLength": 6}),
    _json("ipv4", "host", {"type": "string", "format": "ipv4"}),
    _json("no whitespace at all", "host", {**TREE}, disable_any_whitespace=True),
    Case("any object", "host", {"json_object": True}, _object),
    # Regexes
    _regex("email", r"[a-z0-9]{1,8}@[a-z]{1,8}\.(com|org)"),
    _regex("anchors around", r"^[0-9]{3}-[0-9]{4}$"),
    _regex("alternatives of unequal length", r"(a|ab)(c|bcd)?(d*)"),
    _regex("lazy", r"a+?b??c*?!"),
    _regex("unicode", r"[é日😀]{1,3}|[^\x00-\x7f]"),
    _regex("any character", r".{1,3}"),
    _regex("any at all", r"(?s).{0,3}"),
    _regex("ignoring case", r"(?i)yes|no"),
    _regex("day", r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"),
    _regex("leading space", r" ?  x|  y"),
    _regex("empty", r""),
    _regex("empty or not", r"(ab)*"),
    # Choices
    _choice("words", "positive", "negative", "neutral"),
    _choice("prefixes", "a", "ab", "abc"),
    _choice("odd words", "", " two", "日本語", "tab\t", '"', "a*"),
    # Grammars
    _grammar("lark", 'start: "a" start "b" | "ab"', _as_many),
    _grammar("balanced", "root ::= pair+\npair ::= \"(\" root? \")\"", _balanced),
    _grammar("sums", 'start: term ("+" term)*\nterm: /[1-9][0-9]{0,2}/ | "(" start ")"', _sum),
    _grammar("gbnf classes", 'root ::= [a-c]+ ws "!"\nws ::= " "*', _matches("[a-c]+ *!")),
]  # fmt: skip

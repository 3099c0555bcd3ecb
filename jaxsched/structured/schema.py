"""Which JSON schemas become an automaton, and in which words the library understands them rightly.

outlines_core ignores what it does not know, writes patterns into the regex as they are, and drops some keywords beside
others. ``lower`` therefore takes only schemas whose keywords are all understood here, and rewrites them so that every
text of the resulting regex is valid: names are escaped, patterns confined to what a JSON string may hold, lists of
types and exclusive oneOf become anyOf, references are resolved. All others are left to a grammar.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from .regex import NotRegular, in_json_string

Schema = dict[str, Any]

MAX_BRANCHES, MAX_PAIRS = (
    200,
    100_000,
)  # of a oneOf, and of values of two enums, that are compared with each other
MAX_NODES = 5_000  # of a schema with its references resolved
_ANNOTATIONS = {
    *(
        "title",
        "description",
        "default",
        "examples",
        "$schema",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
    ),
    *("$defs", "definitions"),
}
_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "integer": set[str](),
    "number": set[str](),
    "boolean": set[str](),
    "null": set[str](),
}
_DATE = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
}
_EXACT = 2**53  # integers up to here survive being read as a float


class NotFinite(Exception):
    """A schema that is left to a grammar; the message says why."""


def lower(schema: Any) -> Schema:
    """The schema, or one that allows a part of it, in words that outlines_core understands. Raises NotFinite."""
    return _Lowering(schema).visit(schema, ())


class _Lowering:
    def __init__(self, root: Any):
        self._root, self._nodes = root, 0

    def visit(self, schema: Any, references: tuple[str, ...]) -> Schema:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise NotFinite(f"more than {MAX_NODES} subschemas")
        if not isinstance(schema, dict):
            raise NotFinite("any JSON value" if schema is True else "a schema that is not an object")
        keys = schema.keys() - _ANNOTATIONS
        if "$ref" in keys:
            _only(keys, {"$ref"})
            return self._reference(schema["$ref"], references)
        if "const" in keys or "enum" in keys:
            _only(keys, {"const", "enum", "type"})
            return _values(schema)
        if "anyOf" in keys or "oneOf" in keys:
            return self._either(schema, keys, references)
        _only(keys, {"type"}.union(*_OF_TYPE.values()))
        kinds = _types(schema, keys)
        if len(kinds) > 1:
            parts = [{**_relevant(schema, kind), "type": kind} for kind in kinds]
            return {"anyOf": [self.visit(part, references) for part in parts]}
        kind = kinds[0]
        schema = _relevant(schema, kind)
        if kind == "string":
            return _string(schema)
        if kind == "array":
            return self._array(schema, references)
        if kind == "object":
            return self._object(schema, references)
        return {"type": kind}

    def _reference(self, reference: Any, references: tuple[str, ...]) -> Schema:
        if reference in references:
            raise NotFinite("recursive schema")
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise NotFinite("$ref to another document")
        found = self._root
        for part in reference[1:].split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise NotFinite("$ref to nothing")
            found = found[name]
        return self.visit(found, (*references, reference))

    def _either(self, schema: Schema, keys: set[str], references: tuple[str, ...]) -> Schema:
        name = "anyOf" if "anyOf" in keys else "oneOf"
        _only(keys, {name})
        branches = schema[name]
        if not isinstance(branches, list) or not branches:
            raise NotFinite(f"{name} without branches")
        parts = [self.visit(branch, references) for branch in branches]
        if name == "oneOf" and len(parts) > MAX_BRANCHES:
            raise NotFinite(f"oneOf with more than {MAX_BRANCHES} branches")
        if name == "oneOf" and not all(_exclusive(a, b) for i, a in enumerate(parts) for b in parts[:i]):
            raise NotFinite("oneOf with branches that overlap")
        return {"anyOf": parts}

    def _array(self, schema: Schema, references: tuple[str, ...]) -> Schema:
        least, most = _bounds(schema, "minItems", "maxItems")
        out: Schema = {"type": "array"}
        if "prefixItems" in schema:
            prefix = schema["prefixItems"]
            if schema.get("items", False) is not False or not isinstance(prefix, list) or not prefix:
                raise NotFinite("prefixItems with items")
            if not least <= len(prefix) <= (len(prefix) if most is None else most):
                raise NotFinite("prefixItems with bounds")
            # Allowed without "items": false are also shorter and longer ones; the exact length is always valid.
            return {**out, "prefixItems": [self.visit(item, references) for item in prefix]}
        if "items" not in schema:
            raise NotFinite("arrays of any items")
        out["items"] = self.visit(schema["items"], references)
        out |= {name: schema[name] for name in ("minItems", "maxItems") if name in schema}
        return out

    def _object(self, schema: Schema, references: tuple[str, ...]) -> Schema:
        closed = schema.get("additionalProperties", True)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(closed, bool):
            raise NotFinite("keyword 'additionalProperties' with a schema")
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise NotFinite("malformed properties")
        if not properties and closed:
            raise NotFinite("any JSON object")
        if any(name not in properties for name in required):
            raise NotFinite("required names without a schema")
        parts = {_escape(name): self.visit(part, references) for name, part in properties.items()}
        return {"type": "object", "properties": parts, "required": [_escape(name) for name in required]}


def _only(keys: set[str], known: set[str]) -> None:
    if unknown := sorted(keys - known):
        raise NotFinite(f"keyword {unknown[0]!r}")


def _relevant(schema: Schema, kind: str) -> Schema:
    """Without the keywords that say nothing about ``kind``."""
    return {name: value for name, value in schema.items() if name in _OF_TYPE[kind]}


def _types(schema: Schema, keys: set[str]) -> list[str]:
    named = schema.get("type")
    kinds = [named] if isinstance(named, str) else named
    if kinds is None:
        # What the keywords are about; a value of another type would be valid too.
        kinds = [kind for kind, names in _OF_TYPE.items() if names & keys][:1]
    if not isinstance(kinds, list) or not kinds or any(kind not in _OF_TYPE for kind in kinds):
        raise NotFinite("any JSON value" if not kinds else f"type {named!r}")
    # A number is an integer too: "integer" beside it adds nothing.
    return [kind for kind in dict.fromkeys(kinds) if not (kind == "integer" and "number" in kinds)]


def _escape(name: str) -> str:
    """The name as it stands between quotes in JSON. The library escapes it for the regex, and only for that."""
    return json.dumps(name, ensure_ascii=False)[1:-1]


def _bounds(schema: Schema, low: str, high: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for name, value in ((low, least), (high, most)):
        if value is not None and (type(value) is not int or value < 0):
            raise NotFinite(f"{name} {value!r}")
    if most is not None and least > most:
        raise NotFinite(f"{low} above {high}")
    return least, most


def _string(schema: Schema) -> Schema:
    least, most = _bounds(schema, "minLength", "maxLength")
    bounded = least > 0 or most is not None
    if ("pattern" in schema) + ("format" in schema) + bounded > 1:
        raise NotFinite("pattern, format and length together")
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise NotFinite(f"format {schema['format']!r}")
        return {"type": "string", "pattern": f"^{_FORMATS[schema['format']]}$"}
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise NotFinite("pattern that is not a string")
        try:
            return {"type": "string", "pattern": f"^{in_json_string(schema['pattern'])}$"}
        except NotRegular as error:
            raise NotFinite(str(error)) from error
    return {"type": "string"} | {name: schema[name] for name in ("minLength", "maxLength") if name in schema}


def _values(schema: Schema) -> Schema:
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        raise NotFinite("enum that is not a list")
    if "const" in schema:
        values = [value for value in values if _same(value, schema["const"])]
    if "type" in schema:
        kinds = _types(schema, {"type"})
        values = [value for value in values if any(_is(value, kind) for kind in kinds)]
    if not values:
        raise NotFinite("no value")
    if any(type(n) in (int, float) and abs(n) > _EXACT for value in values for n in _leaves(value)):
        raise NotFinite("a number beyond 2**53")
    return {"enum": values}


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        # Names would have to be escaped as those of properties are.
        if any(_escape(name) != name for name in value):
            raise NotFinite("a value with names that need escapes")
        return [leaf for part in value.values() for leaf in _leaves(part)]
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, list) else [value]


def _same(a: Any, b: Any) -> bool:
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _is(value: Any, kind: str) -> bool:
    classes = {"string": str, "array": list, "object": dict, "boolean": bool, "null": type(None)}
    if kind in classes:
        return isinstance(value, classes[kind])
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and (kind == "number" or value == int(value))


def _exclusive(a: Schema, b: Schema) -> bool:
    """No value is valid for both (lowered) schemas."""
    if "anyOf" in a:
        return all(_exclusive(part, b) for part in a["anyOf"])
    if "anyOf" in b:
        return _exclusive(b, a)
    if "enum" in a:
        if "enum" in b:
            if len(a["enum"]) * len(b["enum"]) > MAX_PAIRS:
                return False  # nobody waits for that many comparisons
            # As text, but for numbers: 1 and 1.0 are equal.
            return all(x != y for x in a["enum"] for y in b["enum"])
        return not any(_is(value, b["type"]) for value in a["enum"])
    if "enum" in b:
        return _exclusive(b, a)
    if {a["type"], b["type"]} == {"integer", "number"}:
        return False
    if a["type"] == b["type"] == "object":
        common = set(a["required"]) & set(b["required"])
        return any(_exclusive(a["properties"][name], b["properties"][name]) for name in common)
    return bool(a["type"] != b["type"])


def parse_json(text: str) -> Any:
    """Raises ValueError also for NaN, for nesting beyond Python's stack and for numbers that are too long."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")

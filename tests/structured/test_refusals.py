"""What is impossible, malformed or hostile is refused at entry, in time, with a message that helps."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxsched.structured import ConstraintCompiler
from jaxsched.text import Tokenizer
from structured.suite import params

DEEP = '{"items": ' * 3000 + "{}" + "}" * 3000
MANY = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)},
}
MANY["$defs"]["d40"] = {"type": "null"}  # type: ignore[index]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "sets nothing; set exactly one of json, regex"),
    ({"regex": "a", "choice": ["a"]}, "sets regex and choice; set exactly one"),
    ({"regex": 3}, "regex is a int; give a str"),
    ({"regex": "(?=a)b"}, r"has lookahead \(\(\?=\), which is not supported; rewrite"),
    ({"regex": "a(?!b)"}, "has lookahead"),
    ({"regex": "(?<=a)b"}, "has lookbehind"),
    ({"regex": "(?<!a)b"}, "has lookbehind"),
    ({"regex": r"(a)\1"}, r"has a backreference \(\\1\)"),
    ({"regex": "(?P<n>a)(?P=n)"}, "has a backreference"),
    ({"regex": r"\bab"}, "has a word boundary"),
    ({"regex": "a(^b)"}, "has an anchor"),
    ({"regex": "(?x)a #)"}, "has the flag x"),
    ({"regex": "a)|(b"}, "brackets that are not in pairs"),
    ({"regex": "["}, "brackets that are not in pairs"),
    ({"regex": "a{3,2}"}, "cannot be compiled: min repeat greater than max repeat"),
    ({"regex": "*a"}, "cannot be compiled: nothing to repeat"),
    ({"regex": "[^\\s\\S]"}, "cannot be compiled|allows no text"),
    ({"regex": "a\ud800"}, "regex has half of a surrogate pair"),
    ({"regex": "a" * 2_000_000}, "regex has 2000000 bytes; the limit is 1048576"),
    ({"regex": "a{30000}"}, "needs more than 20000 states; ask for less"),
    ({"choice": []}, "choice is empty, so that no text is possible; give at least one"),
    ({"choice": "abc"}, "choice has an item that is not a str; give a list"),
    ({"choice": ["a", 3]}, "choice has an item that is not a str"),
    ({"choice": [f"{i:05d}xxxx" for i in range(10_000)]}, "choice 'of 10000 strings' needs more than 20000 states"),
    ({"json": "{"}, "json is not JSON: .*; give a JSON schema"),
    ({"json": '{"const": NaN}'}, "json is not JSON: NaN"),
    ({"json": {"const": float("nan")}}, "json is not JSON"),
    ({"json": {"const": object()}}, "json is not JSON"),
    ({"json": "[]"}, "json is a JSON list; a schema is an object"),
    ({"json": DEEP}, "json is not JSON|json.* is refused"),
    ({"json": {"enum": []}}, "json .*is refused: .*[Uu]nsatisfiable"),
    ({"json": {"type": "string", "enum": [1]}}, "json .*is refused"),
    ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, r"is refused: Unsatisfiable schema: minimum \(3\)"),
    ({"json": {"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2}}, "minItems above maxItems"),
    ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "minLength above maxLength"),
    ({"json": {"type": "array", "uniqueItems": True}}, "keyword 'uniqueItems'.* is refused: Unimplemented keys"),
    ({"json": {"not": {"type": "null"}}}, "keyword 'not'.* is refused: Unimplemented keys"),
    ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "oneOf with branches that overlap"),
    ({"json": {"type": "string", "format": "no-such"}}, "Unknown format: no-such"),
    ({"json": {"type": "strin"}}, "type 'strin'.* is refused"),
    ({"json": {"$ref": "#/$defs/x"}}, r"\$ref to nothing"),
    ({"json": {"$ref": "#"}}, "is refused"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, "is refused: regex parse error"),
    ({"json": {"type": "null"}, "whitespace_pattern": "x*"}, "'x' in whitespace_pattern; give a regex of spaces"),
    ({"json": {"type": "null"}, "whitespace_pattern": "["}, "whitespace_pattern .*unterminated"),
    ({"grammar": "start: x"}, "grammar is refused: .*unknown name"),
    ({"grammar": "root ::= ("}, "grammar is refused"),
    ({"grammar": "root ::= " + "(" * 5000}, "grammar is refused"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda value: repr(value)[:40])
def test_refused(fields: dict[str, Any], message: str, compilers: dict[str, ConstraintCompiler]) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"(?s)structured_outputs.*{message}"):
        compilers["byte_level"].compile(params(**fields))
    assert time.monotonic() - began < 10


def test_exponential_schemas_end(compilers: dict[str, ConstraintCompiler]) -> None:
    began = time.monotonic()
    try:
        constraint = compilers["byte_level"].compile(params(json=MANY))
        assert (constraint.level, constraint.why) == ("host", "more than 5000 subschemas")
    except ValueError as error:
        assert "more than 5000 subschemas" in str(error)
    assert time.monotonic() - began < 10


def test_texts_that_no_token_spells(sentencepiece: Tokenizer) -> None:
    """Excluding tokens leaves a vocabulary without the letter w, the byte 0x77."""
    without = [token for token in range(sentencepiece.vocab_size) if "w" in sentencepiece.decode([token])]
    compiler = ConstraintCompiler(sentencepiece, sentencepiece.vocab_size, without)
    with pytest.raises(
        ValueError, match=r"choice .* allows no text that this vocabulary can spell; correct it"
    ):
        compiler.compile(params(choice=["wow", "how"]))
    with pytest.raises(ValueError, match="regex '\\[w\\]\\+' allows no text"):
        compiler.compile(params(regex="[w]+"))
    with pytest.raises(ValueError, match="no text of this vocabulary satisfies it"):
        compiler.compile(params(grammar='start: "w" start | "w"'))
    constraint = compiler.compile(params(choice=["hello", "how"]))
    automaton = constraint.automaton
    assert automaton is not None
    word = [sentencepiece.id_of(letter) for letter in "ho"]
    assert automaton.run([token for token in word if token is not None]) == -1  # a dead end is no way
    compiler.close()


def parent_memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


HOSTILE = ["[ab]*a[ab]{30}", "(a{1000}){1000}", "(.{0,200}x){0,200}", r"(\w{1,300} ){1,300}"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_hostile_regexes(byte_level: Tokenizer) -> None:
    compiler = ConstraintCompiler(
        byte_level, byte_level.vocab_size, [], time_limit=1.0, memory_limit=256 << 20
    )
    compiler.compile(params(regex="a"))
    before = parent_memory()
    for regex in HOSTILE:
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"regex .* (needs more than (1 s|256 MiB)|cannot be compiled)"):
            compiler.compile(params(regex=regex))
        assert time.monotonic() - began < 4
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"structured_outputs\.regex"):
            compiler.compile(params(regex=regex))
        assert time.monotonic() - began < 0.1  # remembered
    assert parent_memory() - before < 50 << 20
    assert compiler.compile(params(regex="b+")).level == "device"  # a new process serves the next
    constraint = compiler.compile(params(json={"type": "string", "pattern": f"^{HOSTILE[0]}$"}))
    assert (constraint.level, constraint.why) == ("host", "more than 1 s")
    compiler.close()

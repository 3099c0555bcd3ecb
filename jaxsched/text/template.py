"""The environment that chat templates run in: what they expect, and what they must not do.

It is the one of Hugging Face transformers (``chat_template_utils``): sandboxed, because templates come with
checkpoints, with ``raise_exception``, ``strftime_now``, a ``tojson`` that leaves HTML characters alone, loop controls
and ``{% generation %}`` blocks. Beyond that, loops and arithmetic are limited, so that no template runs for ever.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TURNS = 1_000_000  # of all loops and macros of one rendering together
MAX_REPEATED = 100_000  # characters or elements that a multiplication may make
MAX_BITS = 10_000  # of an integer that is computed


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """The template, ready to render. Raises jinja2.TemplateError for what is not Jinja."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class _Context(Context):
    """The state of one rendering."""

    turns = 0


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that counts turns. Memory is not limited: string methods and filters can still ask for much."""

    context_class = _Context
    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        turning: Iterable[Any] = tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
        for node in list(turning):
            counter = nodes.EnvironmentAttribute("count_turn")
            call = nodes.Call(counter, [nodes.ContextReference()], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return tree

    def count_turn(self, context: _Context) -> None:
        """Called at the beginning of every turn of a loop and of every call of a macro."""
        context.turns += 1
        if context.turns > MAX_TURNS:
            raise jinja2.TemplateError(f"its loops take more than {MAX_TURNS} turns")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            times = left.bit_length() * abs(right)
            if (times if operator == "**" else left.bit_length() + right.bit_length()) > MAX_BITS:
                raise jinja2.TemplateError(f"it computes a number of more than {MAX_BITS} bits")
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and len(value) * times > MAX_REPEATED:
                raise jinja2.TemplateError(f"it repeats a value to more than {MAX_REPEATED} elements")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)

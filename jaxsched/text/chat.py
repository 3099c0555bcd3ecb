"""Renders chat messages to a prompt with a checkpoint's Jinja template, in the environment templates expect.

That environment is the one of Hugging Face transformers (``chat_template_utils``): sandboxed, because templates
come with checkpoints, with ``raise_exception``, ``strftime_now``, a ``tojson`` that leaves HTML characters alone,
loop controls and ``{% generation %}`` blocks.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Options of other libraries' functions of the same name. A template would silently ignore them.
_NOT_VARIABLES = {"continue_final_message", "tokenize", "return_dict", "return_tensors", "chat_template"}


class ChatTemplateError(ValueError):
    """Messages, template or options that cannot be rendered."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The prompt for ``messages``.

    A message is a dict with ``role`` (str) and ``content`` (str, or a list of ``{"type": "text", "text": ...}``
    parts, which are joined by newlines); further keys go to the template as they are. ``tools`` are JSON schemas.
    ``variables`` are visible in the template, e.g. ``bos_token`` or ``enable_thinking``.

    Raises ChatTemplateError for a message of another form, naming its index, and for whatever the template raises.
    """
    if reserved := sorted(_NOT_VARIABLES & variables.keys()):
        raise ChatTemplateError(f"chat template option {reserved[0]!r} is not supported; leave it out")
    plain = [_checked(i, message) for i, message in enumerate(_sequence("messages", messages))]
    if not plain:
        raise ChatTemplateError("messages is empty; give at least one message")
    if tools is not None:
        tools = [dict(_mapping(f"tools[{i}]", tool)) for i, tool in enumerate(_sequence("tools", tools))]
    try:
        compiled = _compile(template)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template is not valid Jinja: {error}") from error
    try:
        return compiled.render(
            messages=plain,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except (
        Exception
    ) as error:  # a template runs arbitrary expressions: any error in it is the template's or the user's
        raise ChatTemplateError(
            f"the chat template refused these messages: {str(error).rstrip('.')}; "
            "see the model's card for the roles it accepts"
        ) from error


def _sequence(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ChatTemplateError(f"{name} is a {type(value).__name__}; give a list of dicts")
    return value


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ChatTemplateError(
            f"{name} is a {type(value).__name__}; give a dict such as {{'role': 'user', 'content': '...'}}"
        )
    return value


def _checked(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    # None stands for "not given" in the messages of other APIs; templates would print it.
    plain = {key: value for key, value in _mapping(where, message).items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise ChatTemplateError(f"{where}['role'] is {plain.get('role')!r}; give a string such as 'user'")
    content = plain.get("content")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        plain["content"] = "\n".join(_text_part(f"{where}['content'][{i}]", p) for i, p in enumerate(content))
    elif not isinstance(content, str) and not (content is None and plain.get("tool_calls")):
        raise ChatTemplateError(
            f"{where}['content'] is {'missing' if content is None else 'a ' + type(content).__name__}; give a string"
        )
    return plain


def _text_part(where: str, part: Any) -> str:
    kind = _mapping(where, part).get("type", "text")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ChatTemplateError(f"{where} has type {kind!r}; supported: text parts with a string 'text'")
    return part["text"]


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


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


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)

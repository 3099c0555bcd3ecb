"""Renders chat messages to a prompt with a checkpoint's Jinja template."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from .template import compile_template

# Template variables that have an argument of their own, and options of other libraries' functions of the same name,
# which a template would silently ignore.
_ARGUMENTS = {"messages", "add_generation_prompt", "continue_final_message", "tools", "chat_template"}
_UNKNOWN = {"tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "conversation"}
_SPACES = "\v \f"  # unusual ones, behind the mark of where a message is to be continued


class ChatTemplateError(ValueError):
    """Messages, template or options that cannot be rendered."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt for ``messages``.

    A message is a dict with ``role`` (str) and ``content`` (str, or a list of ``{"type": "text", "text": ...}``
    parts, which are joined by newlines); further keys go to the template as they are, only that the arguments of
    ``tool_calls`` are parsed if they are JSON text. ``tools`` are JSON schemas (dicts); none of them is as if left
    out. ``variables`` are visible in the template, e.g. ``bos_token`` or ``enable_thinking``.

    ``add_generation_prompt`` ends the prompt where the assistant's answer begins; ``continue_final_message`` right
    behind the last message's content, so that the model writes on there. Not both.

    Raises ChatTemplateError for a message of another form, naming its index, and for whatever the template raises.
    """
    variables = variables or {}
    _check_names(variables)
    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError(
            "add_generation_prompt begins a new message, continue_final_message goes on with the last one; "
            "to continue pass add_generation_prompt=False"
        )
    plain = [_checked(i, message) for i, message in enumerate(_sequence("messages", messages))]
    if not plain:
        raise ChatTemplateError("messages is empty; give at least one message")
    mark = uuid.uuid4().hex
    if continue_final_message:
        if not isinstance(plain[-1].get("content"), str):
            raise ChatTemplateError(
                f"messages[{len(plain) - 1}] has no content to continue; give it a string"
            )
        plain[-1]["content"] += mark + _SPACES
    context = {
        "documents": None,
        **variables,
        "messages": plain,
        "tools": [_tool(i, tool) for i, tool in enumerate(_sequence("tools", tools or []))] or None,
        "add_generation_prompt": add_generation_prompt,
    }
    text = _render(template, context)
    return _cut(text, mark, plain[-1]["content"]) if continue_final_message else text


def _render(template: str, context: Mapping[str, Any]) -> str:
    if not isinstance(template, str):
        raise ChatTemplateError(f"the chat template is a {type(template).__name__}; give its text")
    try:
        compiled = compile_template(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ChatTemplateError(f"the chat template is not valid Jinja: {error}") from error
    try:
        return compiled.render(context)
    except (
        Exception
    ) as error:  # a template runs arbitrary expressions: any error in it is its own or the user's
        raise ChatTemplateError(
            f"the chat template refused these messages: {str(error).rstrip('.')}; "
            "see the model's card for the roles it accepts"
        ) from error


def _cut(text: str, mark: str, marked: str) -> str:
    """What is before the mark. Spaces before it go where the template has stripped those behind it, as all spaces."""
    end = text.rfind(mark)
    head = text[: max(end, 0)]
    if not text.startswith(mark + _SPACES, end):
        head = head.rstrip()
    if end < 0 or marked.partition(mark)[0].strip() not in head:
        raise ChatTemplateError(
            "continue_final_message: the chat template does not show the last message's content as it is; "
            "give another chat_template, or the prompt as text"
        )
    return head


def _check_names(variables: Mapping[str, Any]) -> None:
    for name in variables:
        if name in _ARGUMENTS:
            raise ChatTemplateError(f"{name!r} is no variable of a chat template; pass it as an argument")
        if name in _UNKNOWN:
            raise ChatTemplateError(f"chat template option {name!r} is not supported; leave it out")


def _sequence(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ChatTemplateError(f"{name} is a {type(value).__name__}; give a list of dicts")
    return value


def _mapping(name: str, value: Any, example: str = "{'role': 'user', 'content': '...'}") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ChatTemplateError(f"{name} is a {type(value).__name__}; give a dict such as {example}")
    return value


def _tool(index: int, tool: Any) -> dict[str, Any]:
    example = "{'type': 'function', 'function': {'name': '...', 'description': '...', 'parameters': {...}}}"
    return dict(_mapping(f"tools[{index}]", tool, example))


def _checked(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    # None stands for "not given" in the messages of other APIs; templates would print it.
    plain = {key: value for key, value in _mapping(where, message).items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise ChatTemplateError(f"{where}['role'] is {plain.get('role')!r}; give a string such as 'user'")
    content, calls = plain.get("content"), plain.get("tool_calls")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        plain["content"] = "\n".join(_text_part(f"{where}['content'][{i}]", p) for i, p in enumerate(content))
    elif not isinstance(content, str) and not (content is None and calls):
        raise ChatTemplateError(
            f"{where}['content'] is {'missing' if content is None else 'a ' + type(content).__name__}; give a string"
        )
    if isinstance(calls, Sequence) and not isinstance(calls, (str, bytes)):
        plain["tool_calls"] = [
            _tool_call(f"{where}['tool_calls'][{i}]", call) for i, call in enumerate(calls)
        ]
    return plain


def _tool_call(where: str, call: Any) -> Any:
    """``call`` with its arguments as a dict, which templates expect; in other APIs' messages they are JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(
            f"{where}['function']['arguments'] is not JSON ({error}); give a dict"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _text_part(where: str, part: Any) -> str:
    kind = _mapping(where, part, "{'type': 'text', 'text': '...'}").get("type", "text")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ChatTemplateError(f"{where} has type {kind!r}; supported: text parts with a string 'text'")
    return part["text"]

"""Chat templates: the environment they run in and the messages they get."""

import datetime
from typing import Any

import pytest

from jaxsched.text import ChatTemplateError
from jaxsched.text.chat import render_chat

USER = {"role": "user", "content": "hi"}
LOOP = (
    "{% for m in messages %}\n  {%- if loop.index > 1 %}{% break %}{% endif %}\n"
    "{{ m.role }}:{{ m.content }}\n{% endfor %}"
)

# template, messages, options -> text
RENDERED: list[tuple[str, list[Any], dict[str, Any], str]] = [
    (LOOP, [USER, USER], {}, "user:hi\n"),  # blocks leave no blank lines, loops can break
    (
        "{{ messages | tojson }}",
        [{"role": "user", "content": "<é&'>"}],
        {},
        '[{"role": "user", "content": "<é&\'>"}]',
    ),
    ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", [USER], {}, '{\n "a": 2,\n "b": 1\n}'),
    ("{{ add_generation_prompt }}{{ tools is none }}", [USER], {}, "TrueTrue"),
    ("{{ add_generation_prompt }}", [USER], {"add_generation_prompt": False}, "False"),
    ("{{ tools[0].name }}", [USER], {"tools": [{"name": "f"}]}, "f"),
    ("[{{ bos_token }}{{ missing }}]", [USER], {"bos_token": "<s>"}, "[<s>]"),
    ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", [USER], {}, "hi!"),
    ("{% set ns = namespace(n=0) %}{% set ns.n = 5 %}{{ ns.n }}", [USER], {}, "5"),
    (
        "{{ messages[0].content }}",
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}],
        {},
        "a\nb",
    ),
    (
        "{{ 'content' in messages[0] }}",
        [{"role": "assistant", "content": None, "tool_calls": [{}]}],
        {},
        "False",
    ),
    ("{{ messages[0].name }}", [USER | {"name": "Ann"}], {}, "Ann"),
]


@pytest.mark.parametrize(("template", "messages", "options", "text"), RENDERED)
def test_rendered(template: str, messages: list[Any], options: dict[str, Any], text: str) -> None:
    assert render_chat(template, messages, **options) == text


REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("", [], {}, "messages is empty; give at least one message"),
    ("", "hi", {}, "messages is a str; give a list of dicts"),
    ("", USER, {}, "messages is a dict; give a list of dicts"),
    ("", [USER, "hi"], {}, r"messages\[1\] is a str; give a dict"),
    ("", [{"content": "hi"}], {}, r"messages\[0\]\['role'\] is None; give a string such as 'user'"),
    ("", [{"role": 3, "content": "hi"}], {}, r"messages\[0\]\['role'\] is 3"),
    ("", [USER, {"role": "user"}], {}, r"messages\[1\]\['content'\] is missing; give a string"),
    ("", [{"role": "user", "content": 5}], {}, r"messages\[0\]\['content'\] is a int; give a string"),
    (
        "",
        [{"role": "user", "content": [{"type": "image_url"}]}],
        {},
        r"messages\[0\]\['content'\]\[0\] has type 'image_url'; supported: text parts",
    ),
    ("", [USER], {"tools": [len]}, r"tools\[0\] is a builtin_function_or_method; give a dict"),
    ("", [USER], {"continue_final_message": True}, "option 'continue_final_message' is not supported"),
    ("{% if %}", [USER], {}, "the chat template is not valid Jinja"),
    ("{{ raise_exception('Only user roles!') }}", [USER], {}, "refused these messages: Only user roles!"),
    ("{{ messages[0].content + 1 }}", [USER], {}, "refused these messages"),
    ("{{ ''.__class__.__mro__ }}", [USER], {}, "refused these messages.*unsafe"),
    (
        "{% set _ = messages.append(1) %}",
        [USER],
        {},
        "refused these messages: .*'append' of 'list' object is unsafe; see the model's card",
    ),
]


@pytest.mark.parametrize(("template", "messages", "options", "message"), REFUSED)
def test_refused(template: str, messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render_chat(template, messages, **options)


def test_todays_date() -> None:
    before = datetime.date.today()
    assert render_chat("{{ strftime_now('%Y-%m-%d') }}", [USER]) in {str(before), str(datetime.date.today())}


def test_messages_are_left_alone() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    render_chat("{{ messages }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]

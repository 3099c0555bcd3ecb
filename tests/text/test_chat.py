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

OWN = {"add_generation_prompt", "continue_final_message", "tools"}


def render(template: Any, messages: Any, options: dict[str, Any]) -> str:
    """``render_chat`` with template variables among the options."""
    own = {name: value for name, value in options.items() if name in OWN}
    return render_chat(template, messages, **own, variables={k: options[k] for k in options.keys() - OWN})


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
    ("{{ tools is none }}", [USER], {"tools": []}, "True"),
    ("{{ documents }}", [USER], {"documents": ["d"]}, "['d']"),
    (
        "{{ messages[0].tool_calls[0].function.arguments.x }}",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}],
        {},
        "1",
    ),
    ("{{ 2 ** 10 * 3 }}{{ '-' * 20 }}", [USER], {}, "3072" + "-" * 20),
]


@pytest.mark.parametrize(("template", "messages", "options", "text"), RENDERED)
def test_rendered(template: str, messages: list[Any], options: dict[str, Any], text: str) -> None:
    assert render(template, messages, options) == text


SQUARES = "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}"
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
    (
        "",
        [USER],
        {"tools": [len]},
        r"tools\[0\] is a builtin_function_or_method; give a dict such as {'type': 'f",
    ),
    ("", [USER], {"tools": {"name": "f"}}, r"tools is a dict; give a list of dicts"),
    ("", [USER], {"tokenize": True}, "option 'tokenize' is not supported; leave it out"),
    ("", [USER], {"messages": []}, "'messages' is no variable of a chat template; pass it as an argument"),
    (b"", [USER], {}, "the chat template is a bytes; give its text"),
    (
        "",
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        {},
        r"messages\[0\]\['tool_calls'\]\[0\]\['function'\]\['arguments'\] is not JSON",
    ),
    ("{% for i in range(10**9) %}{% endfor %}", [USER], {}, "refused these messages: Range too big"),
    (
        "{{ 9 ** (9 ** 9) }}",
        [USER],
        {},
        "refused these messages: it computes a number of more than 10000 bits",
    ),
    (SQUARES, [USER], {}, "refused these messages: it computes a number of more than 10000 bits"),
    ("{{ 'a' * 10 ** 10 }}", [USER], {}, "it repeats a value to more than 100000 elements"),
    ("{{ 10 ** 10 * [1] }}", [USER], {}, "it repeats a value to more than 100000 elements"),
    (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        [USER],
        {},
        "refused these messages: maximum recursion",
    ),
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
        render(template, messages, options)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} \t{% endfor %}"
START = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

# template, content of the last message -> the end of the prompt
CONTINUED: list[tuple[str, Any, str]] = [
    (CHATML, "Sure", START + "Sure"),
    (CHATML, "Sure, \n", START + "Sure, \n"),  # spaces stay where the template leaves them
    (CHATML, "", START),
    (CHATML, "im_end", START + "im_end"),  # found where it is, not in the text behind it
    (CHATML, [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}], START + "a\nb "),
    (TRIMMED, "Sure", "[user] hi \t[assistant] Sure"),
    (TRIMMED, " Sure \n", "[user] hi \t[assistant] Sure"),
]


@pytest.mark.parametrize(("template", "content", "text"), CONTINUED)
def test_the_last_message_is_continued(template: str, content: Any, text: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(template, messages, options) == text


def test_what_cannot_be_continued() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(ChatTemplateError, match="pass add_generation_prompt=False"):
        render(CHATML, [USER], {"continue_final_message": True})
    with pytest.raises(ChatTemplateError, match=r"messages\[0\] has no content to continue"):
        render(CHATML, [{"role": "assistant", "tool_calls": [{}]}], options)
    for template in (
        "nothing",
        "{{ messages[0].content | upper }}",
        "{{ messages[0].content | replace('h', 'H') }}",
    ):
        with pytest.raises(ChatTemplateError, match="does not show the last message's content as it is"):
            render(template, [USER], options)


SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BRANCHING = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"


@pytest.mark.parametrize("template", [SLOW, BRANCHING])
def test_no_template_runs_for_ever(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr("jaxsched.text.template.MAX_TURNS", 3000)
    with pytest.raises(
        ChatTemplateError, match="refused these messages: its loops take more than 3000 turns"
    ):
        render(template, [USER], {})
    many = [USER] * 1000
    for _ in range(4):  # each rendering has its own count
        assert render(CHATML, many, {}).count("hi") == 1000


def test_todays_date() -> None:
    before = datetime.date.today()
    assert render_chat("{{ strftime_now('%Y-%m-%d') }}", [USER]) in {str(before), str(datetime.date.today())}


def test_messages_are_left_alone() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    render_chat("{{ messages }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]

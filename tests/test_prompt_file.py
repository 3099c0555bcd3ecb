"""Prompts from options and files."""

import io
import json
from pathlib import Path

import pytest

from jaxsched.prompt_file import Question, questions, read_prompts

USER = {"role": "user", "content": "u"}
SYSTEM = {"role": "system", "content": "s"}
FILES = {
    "text": ("a.txt", "eins\n\n  zwei \r\n日本\n", [Question("eins"), Question("  zwei "), Question("日本")]),
    "byte order mark": ("a.txt", "\ufeffeins", [Question("eins")]),
    "braces are text": ("a.txt", '{"prompt": "x"}', [Question('{"prompt": "x"}')]),
    "json": (
        "a.jsonl",
        '{"prompt": "é", "id": 7}\n\n{"messages": [{"role": "user", "content": "u"}]}\n',
        [Question("é"), Question(None, [USER])],
    ),
    "line separator": ("a.jsonl", '{"prompt": "a\u2028b"}', [Question("a\u2028b")]),
    "text on stdin": ("-", "{eins}\nzwei", [Question("{eins}"), Question("zwei")]),
    "json on stdin": ("-", '{"prompt": "eins"}\n', [Question("eins")]),
}
BAD_FILES = {
    "empty": ("a.txt", b"\n \n", "has no prompts"),
    "not UTF-8": ("a.txt", b"ab\xff", "not UTF-8 (byte 2)"),
    "not JSON": ("a.jsonl", b'{"prompt": "a"}\n{', "line 2 is not valid JSON"),
    "neither": ("a.jsonl", b'{"text": "a"}', "one of"),
    "both": ("a.jsonl", b'{"prompt": "a", "messages": []}', "one of"),
    "a list": ("a.jsonl", b"[1]", "one of"),
    "number": ("a.jsonl", b'{"prompt": 1}', "prompt is 1"),
    "no messages": ("a.jsonl", b'{"messages": []}', "messages is []"),
    "setting": ("a.jsonl", b'{"prompt": "a", "max_tokens": 3}', "'max_tokens'"),
}


@pytest.mark.parametrize("name, content, found", FILES.values(), ids=FILES)
def test_prompt_files(
    name: str, content: str, found: list[Question], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content.encode()
    if name == "-":
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "ascii"))
    else:
        name = str(tmp_path / name)
        Path(name).write_bytes(data)
    assert read_prompts(name) == found


@pytest.mark.parametrize("name, content, said", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_prompt_files(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="--prompts-file") as error:
        read_prompts(str(tmp_path / name))
    assert said in str(error.value) and str(tmp_path / name) in str(error.value)


def test_system_message(tmp_path: Path) -> None:
    assert questions(["u"], None, True, None) == [Question("u", [USER])]
    assert questions(["u"], None, True, "s") == [Question("u", [SYSTEM, USER])]
    own = [{"role": "system", "content": "own"}, USER]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"messages": m}) for m in ([USER], own)))
    assert questions([], str(file), False, "s") == [Question(None, [SYSTEM, USER]), Question(None, own)]

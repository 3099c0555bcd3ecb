"""Tokenizers of both kinds, a compiler for each, and walks through constraints."""

from collections.abc import Iterator

import pytest
from tokenizers import AddedToken

from jaxsched.structured import ConstraintCompiler
from jaxsched.text import Tokenizer, load_tokenizer
from toy_gguf import SENTENCEPIECE, sentencepiece_metadata, write_vocabulary
from toys import EOS, FIRST_EXTRA, make_tokenizer

PIECES = [
    *(
        b'{"',
        b'":',
        b'", "',
        b'"}',
        b'": "',
        b" :",
        b'"a"',
        b"null",
        b"true",
        b"false",
        b"ull}",
        b"[[",
        b"],",
    ),
    *(
        b"00",
        b"123",
        b"-1",
        b"e+",
        b'\\"',
        b"\\n",
        b"\\\\",
        b"  ",
        b" two",
        b"ab",
        b"abc",
        b"bcd",
        b"yes",
        b"tive",
    ),
    *(
        "é日".encode(),
        "日".encode()[:2],
        "日".encode()[1:],
        "😀".encode()[2:],
        b"\xff\xfe",
        b"\xc3\xa9\xe6",
        b"2024-",
    ),
]


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """All bytes, special tokens, halves of characters, two tokens of equal bytes, and one that is added."""
    backend = make_tokenizer(extra_tokens=PIECES)
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return Tokenizer(backend, special_tokens={"eos_token": "<|eos|>"})


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte fallback, and a decoder that strips a space from the beginning of a text."""
    tokenizer = load_tokenizer(
        write_vocabulary(tmp_path_factory.mktemp("spm") / "v.gguf", sentencepiece_metadata())
    )
    assert tokenizer is not None and tokenizer.vocab_size == len(SENTENCEPIECE)
    return tokenizer


@pytest.fixture(scope="session")
def compilers(byte_level: Tokenizer, sentencepiece: Tokenizer) -> Iterator[dict[str, ConstraintCompiler]]:
    """By the tokenizer's name. The vocabularies are padded, as in many checkpoints."""
    made = {
        "byte_level": ConstraintCompiler(byte_level, FIRST_EXTRA + len(PIECES) + 9, [EOS]),
        "sentencepiece": ConstraintCompiler(
            sentencepiece, len(SENTENCEPIECE) + 7, sentencepiece.eos_token_ids
        ),
    }
    yield made
    for compiler in made.values():
        compiler.close()


@pytest.fixture(params=["byte_level", "sentencepiece"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokenizer(kind: str, request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(kind)


@pytest.fixture
def compiler(kind: str, compilers: dict[str, ConstraintCompiler]) -> ConstraintCompiler:
    return compilers[kind]

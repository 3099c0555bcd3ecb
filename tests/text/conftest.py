"""Vocabularies of every kind, small enough that random ids meet all their cases."""

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from jaxsched.text import Tokenizer, load_tokenizer
from toy_gguf import sentencepiece_metadata, write_vocabulary
from toys import EOS, write_script_model

KINDS = ["byte_level", "sentencepiece", "wordpiece", "metaspace", "suffix", "bare"]


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("vocabularies")
    emoji = "😀".encode()
    # Every byte a token, and some tokens that are halves of characters or invalid.
    write_script_model(folder, [[emoji[:2], emoji[2:], "é日".encode()[:3], b"\xff\xfe", b" word", EOS]])
    byte_level = load_tokenizer(folder)
    sentencepiece = load_tokenizer(write_vocabulary(folder / "v.gguf", sentencepiece_metadata()))
    assert byte_level is not None and sentencepiece is not None
    pieces = ["don", "'", "t", ".", "##ld", "wor", "hello", "n't", "\ufffd", "é", "日"]
    return {
        "byte_level": byte_level,
        "sentencepiece": sentencepiece,
        "wordpiece": make(pieces, decoders.WordPiece(prefix="##", cleanup=True)),
        "metaspace": make(["▁", "▁▁", "▁hello", "el", "▁w", "\ufffd", "日"], decoders.Metaspace()),
        "suffix": make(["hello</w>", "wor", "ld</w>", "</w>", "日"], decoders.BPEDecoder(suffix="</w>")),
        "bare": make(["hello", "wor", "", "日", " "], None),
    }


def make(pieces: list[str], decoder: decoders.Decoder | None) -> Tokenizer:
    """Ids 0 to 2: the special [CLS], [SEP] and the added, but not special <think>; then ``pieces``."""
    names = ["[CLS]", "[SEP]", "<think>"]
    vocab = {piece: i for i, piece in enumerate([*names, *pieces])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[SEP]"))
    backend.add_special_tokens([AddedToken(name, special=True) for name in names[:2]])
    backend.add_tokens([AddedToken(names[2], special=False)])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend)


@pytest.fixture(scope="session")
def byte_level(vocabularies: dict[str, Tokenizer]) -> Tokenizer:
    return vocabularies["byte_level"]


@pytest.fixture(scope="session")
def sentencepiece(vocabularies: dict[str, Tokenizer]) -> Tokenizer:
    return vocabularies["sentencepiece"]


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, vocabularies: dict[str, Tokenizer]) -> Tokenizer:
    return vocabularies[request.param]


@pytest.fixture(params=KINDS)
def vocabulary(request: pytest.FixtureRequest, vocabularies: dict[str, Tokenizer]) -> Tokenizer:
    return vocabularies[request.param]

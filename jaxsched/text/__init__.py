"""Text in, text out: tokenizers, chat templates, incremental detokenization and stop strings. Needs no JAX."""

from .chat import ChatTemplateError
from .detokenizer import IncrementalDetokenizer
from .load import load_tokenizer
from .reader import TextReader
from .tokenizer import Tokenizer, TokenizerError

__all__ = [
    "ChatTemplateError",
    "IncrementalDetokenizer",
    "TextReader",
    "Tokenizer",
    "TokenizerError",
    "load_tokenizer",
]

"""Text in, text out: tokenizers, chat templates and incremental detokenization. Needs no JAX."""

from .chat import ChatTemplateError
from .detokenizer import IncrementalDetokenizer
from .load import load_tokenizer
from .tokenizer import Tokenizer, TokenizerError

__all__ = ["ChatTemplateError", "IncrementalDetokenizer", "Tokenizer", "TokenizerError", "load_tokenizer"]

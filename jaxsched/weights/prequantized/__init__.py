"""Checkpoints that were quantised before: read as they are, into the one form that the decoder multiplies with."""

from .source import PrequantizedSource, open_prequantized

__all__ = ["PrequantizedSource", "open_prequantized"]

"""Checkpoints on disk or on the Hugging Face hub -> configuration and parameters."""

from .checkpoint import Checkpoint, open_checkpoint
from .errors import CheckpointError
from .load import load_model, load_params, nbytes, structure
from .parallel import Stop
from .source import TensorSource

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Stop",
    "TensorSource",
    "load_model",
    "load_params",
    "nbytes",
    "open_checkpoint",
    "structure",
]

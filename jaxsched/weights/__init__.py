"""Checkpoints on disk or on the Hugging Face hub -> configuration and parameters."""

from .adapters import AdapterTargets, adapter_targets, read_adapter
from .checkpoint import Checkpoint, open_checkpoint
from .errors import CheckpointError
from .load import load_model, load_params, nbytes, structure
from .parallel import Stop
from .source import TensorSource

__all__ = [
    "AdapterTargets",
    "Checkpoint",
    "CheckpointError",
    "Stop",
    "TensorSource",
    "adapter_targets",
    "load_model",
    "load_params",
    "nbytes",
    "open_checkpoint",
    "read_adapter",
    "structure",
]

"""Checkpoints on disk or on the Hugging Face hub -> configuration and parameters."""

from .adapters import AdapterTargets, adapter_targets, read_adapter
from .checkpoint import Checkpoint, open_checkpoint, open_description
from .errors import CheckpointError
from .hub import RemoteTensors
from .load import load_model, load_params, nbytes, planned_bytes, structure
from .parallel import Stop
from .source import TensorSource

__all__ = [
    "AdapterTargets", "Checkpoint", "CheckpointError", "RemoteTensors", "Stop", "TensorSource", "adapter_targets",
    "load_model", "load_params", "nbytes", "open_checkpoint", "open_description", "planned_bytes", "read_adapter",
    "structure",
]  # fmt: skip

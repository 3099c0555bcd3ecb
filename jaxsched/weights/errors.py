"""The one error of this package."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is. Names the file and, where there is one, the tensor."""

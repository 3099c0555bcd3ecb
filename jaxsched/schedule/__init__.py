"""Host scheduling in plain Python: what each round does. Imports no JAX."""

from .limits import Limits
from .plan import ChunkPiece, Entry, MixedStep, RoundPlan
from .scheduler import Scheduler
from .sequence import Finish, Sequence, Status

__all__ = [
    "ChunkPiece",
    "Entry",
    "Finish",
    "Limits",
    "MixedStep",
    "RoundPlan",
    "Scheduler",
    "Sequence",
    "Status",
]

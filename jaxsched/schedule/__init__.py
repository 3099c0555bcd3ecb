"""Host scheduling in plain Python: what each round does. Imports no JAX."""

from .limits import Limits
from .load import Choice, Load
from .plan import ChunkPiece, Entry, MixedStep, RoundPlan
from .scheduler import Scheduler
from .sequence import Finish, Sequence, Status

__all__ = [
    "Choice",
    "ChunkPiece",
    "Entry",
    "Finish",
    "Limits",
    "Load",
    "MixedStep",
    "RoundPlan",
    "Scheduler",
    "Sequence",
    "Status",
]

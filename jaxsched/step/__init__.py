"""The functional core: pure functions from a state and a round's inputs to the next state and the tokens."""

from .inputs import Chunks, Features, RoundInputs, RoundOutputs, RoundShape, SlotUpdates
from .round import decode_steps, prefill_chunk, run_round, update_slots
from .sampling import sample
from .state import NO_TOKEN, EngineState, SamplingRows, SlotState, init_state

__all__ = [
    "NO_TOKEN", "Chunks", "EngineState", "Features", "RoundInputs", "RoundOutputs", "RoundShape", "SamplingRows",
    "SlotState", "SlotUpdates", "decode_steps", "init_state", "prefill_chunk", "run_round", "sample", "update_slots",
]  # fmt: skip

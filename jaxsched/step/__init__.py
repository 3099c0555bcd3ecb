"""The functional core: pure functions from a state and a round's inputs to the next state and the tokens."""

from .controls import AutomatonPool, ControlRows, Controls, init_controls
from .inputs import Chunks, Features, RoundInputs, RoundOutputs, RoundShape, SlotUpdates, StepOutputs
from .logprobs import Logprobs
from .round import decode_steps, prefill_chunk, run_round, update_slots
from .sampling import sample
from .state import NO_TOKEN, EngineState, SamplingRows, SlotState, init_state

__all__ = [
    "NO_TOKEN", "AutomatonPool", "Chunks", "ControlRows", "Controls", "EngineState", "Features", "Logprobs",
    "RoundInputs", "RoundOutputs", "RoundShape", "SamplingRows", "SlotState", "SlotUpdates", "StepOutputs",
    "decode_steps", "init_controls", "init_state", "prefill_chunk", "run_round", "sample", "update_slots",
]  # fmt: skip

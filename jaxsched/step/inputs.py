"""What the host hands to a round and what it gets back. All shapes are fixed by RoundShape and the state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxsched.pallas_kernels import IMPLEMENTATIONS

from .logprobs import Logprobs
from .state import NO_TOKEN, EngineState, SamplingRows, SlotState

# The host packs numpy arrays into fields that are jax arrays once they are on the device.
zeros: Any = np.zeros
ones: Any = np.ones
full: Any = np.full
arange: Any = np.arange


@dataclasses.dataclass(frozen=True)
class RoundShape:
    """Static sizes of a round: they choose the compiled program.

    ``mixed_steps`` steps of ``slots`` decode rows plus ``chunk_tokens`` prompt rows, then decode steps up to ``steps``.
    """

    steps: int  # N
    mixed_steps: int  # M, 0 <= M <= N
    chunk_tokens: int  # C; 0 when M is 0
    slots: int  # rows 0..slots-1 of the slot table take part

    def __post_init__(self) -> None:
        if not 0 <= self.mixed_steps <= self.steps or self.steps < 1:
            raise ValueError(
                f"RoundShape: mixed_steps {self.mixed_steps} must lie in 0..steps ({self.steps} >= 1)"
            )
        if (self.mixed_steps > 0) != (self.chunk_tokens > 0):
            raise ValueError("RoundShape: chunk_tokens must be positive exactly when there are mixed steps")
        if self.slots < 1:
            raise ValueError(f"RoundShape: slots is {self.slots}; it must be at least 1")


LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
PROMPT_OUTPUTS = ("", "logprobs", "hidden", "both")


@dataclasses.dataclass(frozen=True, order=True)
class Features:
    """Which optional parts of a step are computed; each costs nothing where it is off. ``sampling``:

    "greedy" - argmax for every row; "full" - temperature and filters, masked per row; "auto" - decided on the device
    each step by a conditional, which costs nothing on a CPU but makes a GPU wait for the host.
    """

    sampling: str = "auto"
    controls: bool = False  # penalties, biases, bad words, minimal lengths, constraints; see ``controls.py``
    logprobs: int = (
        -1
    )  # how many of the best tokens are reported beside the sampled one; -1 = no log-probabilities
    prompt: str = ""  # of each prompt row: "logprobs" of its next token, its final "hidden" state, or "both"
    logprobs_mode: str = (
        "raw_logprobs"  # raw: the model's; processed: after controls, temperature and filters
    )
    attention: str = "auto"  # implementation of paged attention; auto: by platform and shape

    def __post_init__(self) -> None:
        known = {
            "sampling": ("auto", "greedy", "full"),
            "prompt": PROMPT_OUTPUTS,
            "logprobs_mode": LOGPROBS_MODES,
            "attention": ("auto", *IMPLEMENTATIONS),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                known_values = ", ".join(value or "nothing" for value in values)
                raise ValueError(
                    f"Features: {name} {getattr(self, name)!r} is unknown; known: {known_values}"
                )

    @property
    def plain(self) -> bool:
        """Whether all optional parts but sampling are off."""
        return not self.controls and self.logprobs < 0 and not self.prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotUpdates:
    """Changes to the slot table, made before the round's first step: move, drop, admit, then new pages."""

    source: Int[
        Array, "S"
    ]  # row s takes over the rows of slot source[s]; source[s] = s leaves it where it is
    drop: Bool[Array, "S"]  # stop decoding here
    admit: Bool[Array, "S"]  # take over the rows below; the slot's prompt will be read by chunks
    tokens_left: Int[Array, "S"]
    output_pos: Int[Array, "S"]
    stop_ids: Int[Array, "S F"]
    sampling: SamplingRows
    page_slot: Int[
        Array, "G"
    ]  # block_table[page_slot, page_index] = page_id; padded with slot S, which is dropped
    page_index: Int[Array, "G"]
    page_id: Int[Array, "G"]
    adapter: Int[Array, "S"] | None = None  # as in SlotState

    @staticmethod
    def empty(num_slots: int, max_stop_ids: int, max_new_pages: int, adapters: bool = False) -> SlotUpdates:
        """No changes, as numpy arrays to be filled in. ``adapters``: the slots have a column for them."""
        return SlotUpdates(
            source=arange(num_slots, dtype=np.int32),
            drop=zeros(num_slots, bool),
            admit=zeros(num_slots, bool),
            tokens_left=zeros(num_slots, np.int32),
            output_pos=zeros(num_slots, np.int32),
            stop_ids=full((num_slots, max_stop_ids), NO_TOKEN, np.int32),
            sampling=SamplingRows(
                temperature=zeros(num_slots, np.float32),
                top_k=zeros(num_slots, np.int32),
                top_p=ones(num_slots, np.float32),
                min_p=zeros(num_slots, np.float32),
                seed=zeros((num_slots, 2), np.uint32),
            ),
            page_slot=full(max_new_pages, num_slots, np.int32),
            page_index=zeros(max_new_pages, np.int32),
            page_id=zeros(max_new_pages, np.int32),
            adapter=zeros(num_slots, np.int32) if adapters else None,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks:
    """Packed prompt tokens of M mixed steps. The rows of one slot stand together, positions rising by one."""

    tokens: Int[Array, "M C"]
    positions: Int[Array, "M C"]
    slots: Int[Array, "M C"]  # owner of each row; S (out of range) for padding
    end_row: Int[Array, "M S"]  # row of the slot's last prompt token if its prompt ends in this step, else -1
    pause: Bool[Array, "M"]  # live slots do not decode in this step
    targets: Int[Array, "M C"]  # the prompt token after each row; only read for prompt log-probabilities

    @staticmethod
    def empty(mixed_steps: int, chunk_tokens: int, num_slots: int) -> Chunks:
        """All padding, as numpy arrays to be filled in."""
        shape = (mixed_steps, chunk_tokens)
        return Chunks(
            tokens=zeros(shape, np.int32),
            positions=zeros(shape, np.int32),
            slots=full(shape, num_slots, np.int32),
            end_row=full((mixed_steps, num_slots), -1, np.int32),
            pause=zeros(mixed_steps, bool),
            targets=zeros(shape, np.int32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundInputs:
    """Inputs of one round: slot updates and, when there are mixed steps, their chunks."""

    updates: SlotUpdates
    chunks: Chunks | None = None

    @staticmethod
    def empty(
        state: EngineState, *, mixed_steps: int = 0, chunk_tokens: int = 0, max_new_pages: int = 64
    ) -> RoundInputs:
        """Inputs that change nothing, sized for ``state``; numpy arrays to be filled in."""
        slots = state.slots
        chunks = Chunks.empty(mixed_steps, chunk_tokens, state.num_slots) if mixed_steps else None
        sizes = (state.num_slots, slots.stop_ids.shape[1], max_new_pages)
        return RoundInputs(SlotUpdates.empty(*sizes, slots.adapter is not None), chunks)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """What N steps produced. Optional parts are None unless their feature is on."""

    tokens: Int[Array, "N S"]  # NO_TOKEN where the slot sampled nothing in that step
    ends: Int[Array, "N S"] | None = None  # int32; FINISH_* where the slot ended in that step (controls)
    logprobs: Logprobs | None = None  # of the sampled tokens, [N, S]
    prompt_logprobs: Logprobs | None = None  # of each row's next prompt token, [N, C]
    prompt_hidden: Float[Array, "N C E"] | None = None  # float32, after the final norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundOutputs:
    """What a round produced."""

    tokens: Int[Array, "N S"]  # NO_TOKEN where the slot sampled nothing in that step
    finish: Int[Array, "S"]  # FINISH_* after the round
    logprobs: Logprobs | None = None  # of the sampled tokens, [N, slots of the shape]
    prompt_logprobs: Logprobs | None = None  # as in StepOutputs, of the mixed steps
    prompt_hidden: Float[Array, "M C E"] | None = None

    @property
    def valid(self) -> Bool[Array, "N S"]:
        """Where a token was sampled."""
        return self.tokens != NO_TOKEN


def apply_updates(slots: SlotState, updates: SlotUpdates, num_pages: int) -> SlotState:
    """The slot table after the host's changes. Pure. An admitted slot forgets its pages before it gets new ones."""
    slots = jax.tree.map(lambda rows: rows[updates.source], slots)

    def pick(new: Array, old: Array) -> Array:
        mask = updates.admit.reshape(updates.admit.shape + (1,) * (old.ndim - 1))
        return jnp.where(mask, new, old)

    cleared = updates.admit | updates.drop
    table = jnp.where(updates.admit[:, None], num_pages, slots.block_table)
    return SlotState(
        block_table=table.at[updates.page_slot, updates.page_index].set(updates.page_id, mode="drop"),
        context_len=jnp.where(cleared, 0, slots.context_len),
        last_token=slots.last_token,
        live=slots.live & ~cleared,
        tokens_left=pick(updates.tokens_left, slots.tokens_left),
        output_pos=pick(updates.output_pos, slots.output_pos),
        finish=jnp.where(cleared, 0, slots.finish),
        stop_ids=pick(updates.stop_ids, slots.stop_ids),
        sampling=jax.tree.map(pick, updates.sampling, slots.sampling),
        adapter=jax.tree.map(pick, updates.adapter, slots.adapter),
    )

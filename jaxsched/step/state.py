"""Everything the device remembers between rounds, as one pytree.

Axis letters: L layers, P pages, Z page size, K KV heads, D head_dim, S slots, W pages per sequence, F stop ids.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num, UInt32

from jaxsched.models import ModelConfig
from jaxsched.pallas_kernels.shapes import QUANTIZED

NO_TOKEN = -1  # in token tables: nothing was sampled here
FINISH_NONE, FINISH_STOP, FINISH_LENGTH = 0, 1, 2  # finish codes
FINISH_COMPLETE, FINISH_DEAD_END = 3, 4  # a constraint is complete; no token was allowed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """How each slot samples. A slot whose temperature is 0 takes the argmax and ignores the rest."""

    temperature: Float[Array, "S"]  # float32, >= 0
    top_k: Int[Array, "S"]  # int32; 0 = off
    top_p: Float[Array, "S"]  # float32 in (0, 1]; 1 = off
    min_p: Float[Array, "S"]  # float32 in [0, 1]; 0 = off
    seed: UInt32[Array, "S 2"]  # high and low word of the request's seed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """One row per slot. A slot is *live* when it decodes; while its prompt is being read it is not."""

    block_table: Int[
        Array, "S W"
    ]  # page of each run of Z positions; P (out of range: writes drop) where none was given
    context_len: Int[Array, "S"]  # positions whose K and V are in the pages
    last_token: Int[Array, "S"]  # sampled but not yet read by the model
    live: Bool[Array, "S"]
    tokens_left: Int[Array, "S"]  # tokens this slot may still sample
    output_pos: Int[Array, "S"]  # tokens sampled so far; keys the random stream
    finish: Int[Array, "S"]  # FINISH_* of the request that held the slot last
    stop_ids: Int[Array, "S F"]  # sampling one of these ends the request; padded with NO_TOKEN
    sampling: SamplingRows
    adapter: Int[Array, "S"] | None = None  # low-rank adapter of the slot, 0 = none; None: the model has none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """The scheduler state of the device: paged KV cache and slot table. Donated to and returned by each round.

    A plain value: it can be copied, pickled (after ``jax.device_get``), saved with orbax, and continued elsewhere.
    """

    k_pages: list[Num[Array, "P Z K D"]]  # one per layer
    v_pages: list[Num[Array, "P Z K D"]]  # one per layer
    slots: SlotState
    controls: Any = None  # ``controls.Controls`` once a request has needed them
    k_scales: list[Float[Array, "P K"]] | None = None  # one per layer, float32; None: pages are not quantised
    v_scales: list[Float[Array, "P K"]] | None = None

    @property
    def caches(self) -> list[tuple[Array, ...]]:
        """What each layer has: K pages, V pages and, where these are quantised, the scales of K and of V."""
        scales = () if self.k_scales is None or self.v_scales is None else (self.k_scales, self.v_scales)
        return list(zip(self.k_pages, self.v_pages, *scales, strict=True))

    def with_caches(self, caches: list[tuple[Array, ...]], slots: SlotState, controls: Any) -> EngineState:
        """The state with each layer's new ``caches``, a new slot table and new controls."""
        k_pages, v_pages, *scales = (list(arrays) for arrays in zip(*caches, strict=True))
        return EngineState(k_pages, v_pages, slots, controls, *scales)

    @property
    def num_pages(self) -> int:
        return self.k_pages[0].shape[0]

    @property
    def page_size(self) -> int:
        return self.k_pages[0].shape[1]

    @property
    def num_slots(self) -> int:
        return self.slots.live.shape[0]


def init_slots(
    num_slots: int, num_pages: int, pages_per_seq: int, max_stop_ids: int, adapters: bool = False
) -> SlotState:
    """A slot table in which nothing runs. ``adapters``: with a column for each slot's adapter."""

    def zeros(dtype: DTypeLike = jnp.int32) -> Array:
        # A buffer of its own per field: donation refuses one buffer given twice.
        return jnp.zeros((num_slots,), dtype)

    return SlotState(
        block_table=jnp.full((num_slots, pages_per_seq), num_pages, jnp.int32),
        context_len=zeros(),
        last_token=zeros(),
        live=zeros(jnp.bool_),
        tokens_left=zeros(),
        output_pos=zeros(),
        finish=zeros(),
        stop_ids=jnp.full((num_slots, max_stop_ids), NO_TOKEN, jnp.int32),
        sampling=SamplingRows(
            temperature=zeros(jnp.float32),
            top_k=zeros(),
            top_p=jnp.ones((num_slots,), jnp.float32),
            min_p=zeros(jnp.float32),
            seed=jnp.zeros((num_slots, 2), jnp.uint32),
        ),
        adapter=zeros() if adapters else None,
    )


def init_state(
    config: ModelConfig,
    *,
    num_slots: int,
    num_pages: int,
    page_size: int = 16,
    pages_per_seq: int | None = None,
    max_stop_ids: int = 8,
    dtype: DTypeLike = "float32",
    adapters: bool = False,
) -> EngineState:
    """An empty state: zeroed pages (``num_pages`` of ``page_size`` positions for each layer) and free slots.

    ``dtype`` of the pages: float32, bfloat16, float16; or int8 or float8_e4m3fn, then with scales.
    ``pages_per_seq`` bounds the length of a sequence; by default it covers ``config.max_position_embeddings``.
    ``adapters``: the model has room for low-rank adapters, and each slot says which it goes through.
    Raises ValueError for sizes below 1.
    """
    if pages_per_seq is None:
        pages_per_seq = -(-config.max_position_embeddings // page_size)
    sizes = {
        "num_slots": num_slots,
        "num_pages": num_pages,
        "page_size": page_size,
        "pages_per_seq": pages_per_seq,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"init_state: {name} is {value}; it must be at least 1")
    shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)

    def layers(shape: tuple[int, ...], dtype: DTypeLike) -> list[Array]:
        return [jnp.zeros(shape, dtype) for _ in range(config.num_layers)]

    slots = init_slots(num_slots, num_pages, pages_per_seq, max_stop_ids, adapters)
    state = EngineState(layers(shape, dtype), layers(shape, dtype), slots)
    if jnp.dtype(dtype).name in QUANTIZED:
        one = (num_pages, config.num_kv_heads)
        state = dataclasses.replace(state, k_scales=layers(one, "float32"), v_scales=layers(one, "float32"))
    return state

"""Sizes of the kernels per device family: the one table, and where each row of it comes from."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .shapes import AttentionShape

# Which kernels None tries on CUDA, in this order. No card has been measured yet (see docs/kernels.md): the backend that
# runs on every supported card comes first.
PREFERENCE = {"paged_decode": ("triton", "mosaic"), "paged_prefill": ("triton", "mosaic")}


@dataclasses.dataclass(frozen=True)
class Card:
    """What the kernels' own choice of sizes goes by."""

    multiprocessors: int  # of the family's usual card: fewer on another card only mean more waves
    shared_memory: int  # bytes that one block may have


CARDS = {
    "sm_80": Card(108, 166_912),
    "sm_86": Card(84, 101_376),
    "sm_89": Card(128, 101_376),
    "sm_90": Card(132, 232_448),
    "sm_100": Card(148, 232_448),
    "sm_103": Card(148, 232_448),
    "sm_120": Card(188, 101_376),
    "sm_121": Card(48, 101_376),
}
UNKNOWN = Card(108, 101_376)  # what fits all of them


def card(family: str | None) -> Card:
    """The card of a family; where it is not known, what fits all of them."""
    return CARDS.get(family or "", UNKNOWN)


@dataclasses.dataclass(frozen=True)
class Row:
    """Sizes for some shapes of one operation on one family. A field that is None matches everything."""

    operation: str  # "paged_decode", "paged_prefill"
    backend: str  # "triton", "mosaic"
    config: dict[
        str, Any
    ]  # fields of that kernel's configuration that differ from what it would choose itself
    source: str  # card, date and command of the measurement; or "untuned"
    family: str | None = None  # "sm_90"
    head_dim: int | None = None  # D, rounded up to a power of two
    group: int | None = None  # query heads per KV head
    kv_itemsize: int | None = None  # bytes
    rows: int | None = None  # at most this many slots (decode) or chunk rows (prefill)


# The first row that matches is taken. `scripts/tune_kernels` prints rows for this table; put them before these, which
# say that nothing has been measured: the kernels choose by what fits registers and shared memory.
ROWS: tuple[Row, ...] = (
    *(Row(operation, "triton", {}, "untuned", family) for operation in PREFERENCE for family in CARDS),
    *(Row(operation, "mosaic", {}, "untuned", "sm_90") for operation in PREFERENCE),
)


def find(operation: str, backend: str, shape: AttentionShape) -> Row | None:
    """The first row for ``shape``, or None. What it does not say is the kernel's own choice."""
    dim = 1 << (shape.head_dim - 1).bit_length()
    facts = {"family": shape.family, "head_dim": dim, "group": shape.group,
             "kv_itemsize": jax.numpy.dtype(shape.kv_dtype).itemsize}  # fmt: skip
    for row in ROWS:
        exact = all(getattr(row, name) in (None, value) for name, value in facts.items())
        few = row.rows is None or shape.rows <= row.rows
        if (row.operation, row.backend) == (operation, backend) and exact and few:
            return row
    return None


# Device kinds that an abstract mesh may name: it says nothing of the compute capability.
KINDS = {"A100": "sm_80", "A10": "sm_86", "A40": "sm_86", "RTX 30": "sm_86", "L4": "sm_89", "RTX 40": "sm_89",
         "H100": "sm_90", "H200": "sm_90", "GH200": "sm_90", "B200": "sm_100", "GB200": "sm_100", "RTX 50": "sm_120",
         "RTX PRO 6000": "sm_120"}  # fmt: skip


def device_family() -> str | None:
    """Compute capability of the GPU for which the present trace will be compiled ("sm_90"); None if there is none.

    That is the abstract device of the present mesh, which stands for a GPU that need not exist; else jax's default
    device where one is set; else its first device.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        known = (kind for kind in sorted(KINDS, key=len, reverse=True) if kind in abstract.device_kind)
        return KINDS.get(next(known, ""))
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda") or capability is None:
        return None
    return "sm_" + str(capability).replace(".", "")

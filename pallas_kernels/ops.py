"""The operations on a paged KV cache, and the one place where their implementation is chosen.

Shapes: S slots, C chunk rows, T rows of a step, P pages, Z positions per page, W pages per sequence, H query heads,
K KV heads, D head_dim. Pages ``[P, Z, K, D]``; ``block_table[s, i]`` is the page of positions ``i*Z .. i*Z+Z-1`` of
slot ``s``. Entries behind a sequence's length may hold anything, and so may the pages they name.

``implementation``: "reference", "xla", "triton", "mosaic", or None. None is XLA on a CPU; on CUDA the first kernel of
``tuning.PREFERENCE`` that takes the shape, else XLA. It is decided when a program is lowered, so that a program that is
compiled for a GPU on a machine without one has the kernels too. A kernel that is asked for by name runs in Pallas's
interpreter on a CPU: right, and slow.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from . import quantized, reference, rotary, tuning, xla
from .shapes import QUANTIZED, AttentionOptions, AttentionShape

IMPLEMENTATIONS = ("reference", "xla", "triton", "mosaic")
KERNELS = ("triton", "mosaic")  # written in Pallas: loaded on use, because importing Pallas takes time


def backend(name: str) -> Any:
    """The module of an implementation. Raises ValueError for an unknown name."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {name!r} is unknown; known: {', '.join(IMPLEMENTATIONS)}, or None"
        )
    if name in KERNELS:
        return importlib.import_module(f".{name}", __package__)
    return {"reference": reference, "xla": xla}[name]


def refusal(operation: str, name: str, shape: AttentionShape) -> str | None:
    """Why implementation ``name`` cannot do ``operation`` ("paged_decode", "paged_prefill") on ``shape``, or None."""
    return getattr(backend(name), f"{operation.removeprefix('paged_')}_refusal")(shape)


def choose(operation: str, shape: AttentionShape) -> str:
    """What None means on CUDA: the preferred kernel that takes ``shape``, or "xla"."""
    if shape.family is None:  # lowering for some GPU that nothing is known of: Pallas needs to know
        return "xla"
    accepting = (name for name in tuning.PREFERENCE[operation] if refusal(operation, name, shape) is None)
    return next(accepting, "xla")


def sizes(operation: str, name: str, shape: AttentionShape) -> Any:
    """The configuration of a kernel: its own choice, changed by the tuning table."""
    own = getattr(backend(name), f"{operation.removeprefix('paged_')}_config")(shape)
    row = tuning.find(operation, name, shape)
    return dataclasses.replace(own, **row.config) if row else own


def _run(
    operation: str, implementation: str | None, shape: AttentionShape, operands: tuple, **static: Any
) -> Array:
    """Calls ``operation`` of the implementation, chosen by platform where it is None."""
    # Operands that are None (no scales) cannot pass through platform_dependent.
    present = tuple(x for x in operands if x is not None)

    def call(name: str, interpret: bool = False) -> Callable[..., Array]:
        fn = getattr(backend(name), operation)
        options: dict[str, Any] = {"interpret": True} if interpret else {}
        if name in KERNELS:
            options["config"] = sizes(operation, name, shape)

        def run(*given: Array) -> Array:
            *most, k_scales, v_scales = given if len(present) == len(operands) else (*given, None, None)
            return fn(*most, k_scales=k_scales, v_scales=v_scales, **static, **options)

        return run

    if implementation is None:
        return lax.platform_dependent(*present, cuda=call(choose(operation, shape)), default=call("xla"))
    if (reason := refusal(operation, implementation, shape)) is not None:
        others = {name: refusal(operation, name, shape) for name in IMPLEMENTATIONS if name != implementation}
        can = "; ".join(f"{name}: {why or 'can do it'}" for name, why in others.items())
        raise ValueError(f"{operation}: implementation {implementation!r} cannot do this: {reason} ({can})")
    if implementation == "mosaic":  # its interpreter has effects, which cannot stand in a branch
        return call(implementation, interpret=shape.family is None)(*present)
    if implementation in KERNELS:
        compiled, interpreted = call(implementation), call(implementation, interpret=True)
        return lax.platform_dependent(*present, cpu=interpreted, default=compiled)
    return call(implementation)(*present)


def _check(operation: str, q: Array, k_pages: Array, v_pages: Array, k_scales: Any, v_scales: Any) -> None:
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"{operation}: K pages are {k_pages.dtype}{k_pages.shape} and V pages {v_pages.dtype}{v_pages.shape}; "
            "they must be alike"
        )
    heads, kv_heads = q.shape[1], k_pages.shape[2]
    if heads % kv_heads or q.shape[2] != k_pages.shape[3]:
        raise ValueError(
            f"{operation}: {heads} query heads of {q.shape[2]} do not fit pages of {kv_heads} heads of "
            f"{k_pages.shape[3]}; query heads must be a multiple of KV heads, and head_dim the same"
        )
    kind = jnp.dtype(k_pages.dtype).name
    needed, given = kind in QUANTIZED, k_scales is not None and v_scales is not None
    if needed != given or (k_scales is None) != (v_scales is None):
        what = "need k_scales and v_scales [P, K]" if needed else "take no scales"
        raise ValueError(f"{operation}: pages of {kind} {what}")


def paged_decode(
    q: Float[Array, "S H D"],
    k_pages: Num[Array, "P Z K D"],
    v_pages: Num[Array, "P Z K D"],
    block_table: Int[Array, "S W"],
    context_len: Int[Array, "S"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scales: Float[Array, "P K"] | None = None,
    v_scales: Float[Array, "P K"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "S H D"]:
    """Attention of one query row per slot over that slot's first ``context_len`` positions.

    Args:
      q: float32, bfloat16 or float16; the result has its dtype.
      k_pages, v_pages: float32, bfloat16 or float16; or int8 or float8_e4m3fn with ``k_scales`` and ``v_scales``
        (float32): value = stored * scale.
      context_len: positions that a slot sees; its query is at position ``context_len - 1``. 0 = a dead slot, which is
        skipped and gets zeros.
      scale: multiplies q·k.
      window: the query sees only the last ``window`` positions, its own among them.
      soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2).
      implementation: see the module.

    Softmax and sums are float32. Raises ValueError for shapes and dtypes that do not fit, an unknown implementation,
    and one that cannot do this (with every other one's reason).
    Paging as in Kwon et al. 2023; online softmax as in Milakov & Gimelshein 2018.
    """
    _check("paged_decode", q, k_pages, v_pages, k_scales, v_scales)
    shape = AttentionShape.of(q, k_pages, block_table, tuning.device_family())
    operands = (q, k_pages, v_pages, block_table, context_len, k_scales, v_scales)
    options = AttentionOptions(scale, window, soft_cap)
    return _run("paged_decode", implementation, shape, operands, options=options)


def paged_prefill(
    q: Float[Array, "C H D"],
    k_pages: Num[Array, "P Z K D"],
    v_pages: Num[Array, "P Z K D"],
    block_table: Int[Array, "S W"],
    slot: Int[Array, "C"],
    position: Int[Array, "C"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scales: Float[Array, "P K"] | None = None,
    v_scales: Float[Array, "P K"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "C H D"]:
    """Causal attention of packed chunk rows, row ``r`` over positions ``0..position[r]`` of slot ``slot[r]``.

    The rows of one slot stand together with positions rising by one; their K and V are in the pages already. A row
    whose slot is out of range (padding) gets zeros. The other arguments and errors are those of ``paged_decode``.
    """
    _check("paged_prefill", q, k_pages, v_pages, k_scales, v_scales)
    shape = AttentionShape.of(q, k_pages, block_table, tuning.device_family())
    operands = (q, k_pages, v_pages, block_table, slot, position, k_scales, v_scales)
    options = AttentionOptions(scale, window, soft_cap)
    return _run("paged_prefill", implementation, shape, operands, options=options)


def write_kv(
    pages: Float[Array, "P Z K D"],
    rows: Float[Array, "T K D"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
) -> Float[Array, "P Z K D"]:
    """``pages`` with ``rows`` written at ``(page, offset)``; rows whose page is out of range (>= P) are dropped.

    In place when ``pages`` is donated or carried by a scan. Negative pages would wrap: callers never pass them.
    """
    return pages.at[page, offset].set(rows.astype(pages.dtype), mode="drop", unique_indices=False)


def _write(implementation: str | None, plain: Callable, name: str, pages: Array, *operands: Array) -> Any:
    """Calls the kernel ``name`` of ``triton.write`` where it can be, else ``plain``. Mosaic has no writers."""
    family = tuning.device_family()
    if implementation is not None:
        backend(implementation)  # raises for an unknown one
    if implementation in ("reference", "xla") or (implementation is None and family is None):
        return plain(*operands)
    write = importlib.import_module(".triton.write", __package__)
    count, size, kv_heads, dim = pages.shape
    kind = jnp.dtype(pages.dtype).name
    shape = AttentionShape(
        operands[-1].shape[0], 1, kv_heads, kv_heads, dim, size, 1, count, kind, kind, family
    )
    refuse = write.rotate_refusal if name == "rotate_and_write" else write.write_refusal
    if refuse(shape) is not None:
        return plain(*operands)
    kernel = getattr(write, name)
    on_cpu = plain if implementation is None else functools.partial(kernel, interpret=True)
    return lax.platform_dependent(*operands, cpu=on_cpu, cuda=kernel, default=plain)


def rotate_and_write(
    heads: Float[Array, "T N D"],
    cos: Float[Array, "T 1 F"],
    sin: Float[Array, "T 1 F"],
    k_pages: Float[Array, "P Z K D"],
    v_pages: Float[Array, "P Z K D"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H D"], Float[Array, "P Z K D"], Float[Array, "P Z K D"]]:
    """Rotary embedding of queries and keys, and ``write_kv`` of keys and values: (queries, K pages, V pages).

    ``heads`` holds the N = H + 2 K projected heads of each row: queries, keys, values. ``cos`` and ``sin`` are float32,
    F = D/2; the two halves of a head are rotated (Su et al. 2021). On CUDA one kernel does it all.
    """
    operands = (heads, cos, sin, k_pages, v_pages, page, offset)
    return _write(implementation, rotary.rotate_and_write, "rotate_and_write", k_pages, *operands)


def write_kv_quantized(
    pages: Num[Array, "P Z K D"],
    scales: Float[Array, "P K"],
    rows: Float[Array, "T K D"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
    *,
    implementation: str | None = None,
) -> tuple[Num[Array, "P Z K D"], Float[Array, "P K"]]:
    """``write_kv`` for int8 and float8_e4m3fn pages with a scale per page and KV head; see ``quantized``."""
    operands = (pages, scales, rows, page, offset)
    return _write(implementation, quantized.write_kv_quantized, "write_kv_quantized", pages, *operands)


def page_of(
    block_table: Int[Array, "S W"], slot: Int[Array, "T"], position: Int[Array, "T"], page_size: int
) -> Array:
    """Page ``[T]`` that holds ``position`` of ``slot``; out-of-range slots read the last row and must be masked."""
    slots, width = block_table.shape
    return block_table[jnp.minimum(slot, slots - 1), jnp.minimum(position // page_size, width - 1)]

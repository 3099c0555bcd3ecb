"""What is compiled: single kernels for several GPUs, and the round programs of an 8B-shaped Llama for one."""

from __future__ import annotations

import dataclasses
from typing import Any

from .targets import TARGETS, Target

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One call of one operation. Sizes are Llama 8B's unless said otherwise; contexts of up to 8,192 positions."""

    operation: str  # of ``kernel_call`` in worker.py: "paged_decode", "sample", "product" ...
    backend: str  # "triton", "mosaic"
    rows: int  # slots of a decode, rows of a chunk or a write
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    num_pages: int = 4096
    capacity: int = 8192  # positions of one sequence
    widths: tuple[int, int] = (4096, 6144)  # of a product
    storage: str = ""  # of the kernels of products and experts, if it is not ``dtype``
    group: int = 64  # input rows that share a scale
    offset: bool = False

    @property
    def name(self) -> str:
        """Short, and different for different cases."""
        kind = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "fp8"}
        parts = [f"{self.operation} {self.rows} rows"]
        if self.operation == "experts":
            parts.append(f"{EXPERTS[0]} of {EXPERTS[1]} x {EXPERTS[2]} {kind.get(self.dtype, self.dtype)}")
        elif self.operation == "product":
            parts.append(f"{self.widths[0]} x {self.widths[1]} {kind.get(self.dtype, self.dtype)}")
        elif self.operation != "sample":
            parts.append(f"{self.heads}/{self.kv_heads} x {self.head_dim}, page {self.page_size}")
            types = dict.fromkeys(kind.get(d, d) for d in (self.dtype, self.kv_dtype))
            parts.append("/".join(types))
        parts += [f"{self.storage}/{self.group}"] if self.storage else []
        parts += ["with offsets"] if self.offset else []
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"cap {self.soft_cap:g}"] if self.soft_cap else []
        return " ".join(parts)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a round for the H200: ``steps`` decode steps, or ``steps`` mixed steps of ``chunk`` tokens."""

    layers: int
    steps: int
    chunk: int  # 0: decode steps
    slots: int = 64
    kv_bytes: int = 64 * GIB  # of 32 layers; fewer layers have their share
    page_size: int = 16
    context: int = 2048  # positions of each slot, for the count of bytes
    sampling: str = "full"

    @property
    def name(self) -> str:
        what = (
            f"{self.steps} mixed steps, {self.chunk} tokens" if self.chunk else f"{self.steps} decode steps"
        )
        return f"8B, {self.layers} layers, {self.slots} slots, {what}"

    @property
    def num_pages(self) -> int:
        per_page = 2 * self.page_size * LLAMA["num_kv_heads"] * LLAMA["head_dim"] * 2
        return self.kv_bytes // 32 // per_page


# Llama 3.1 8B
LLAMA: dict[str, Any] = {
    "architecture": "LlamaForCausalLM", "vocab_size": 128256, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8,
    "head_dim": 128, "intermediate_size": 14336, "max_position_embeddings": 8192,
}  # fmt: skip

EXPERTS = (64, 2048, 2048)  # OLMoE's: experts, width, gate and up together

DECODES = [
    KernelCase("paged_decode", "triton", 64),
    KernelCase("paged_decode", "triton", 64, page_size=64),
    KernelCase("paged_decode", "triton", 1, capacity=32768),
    KernelCase("paged_decode", "triton", 64, window=1024, soft_cap=50.0),
    KernelCase("paged_decode", "triton", 64, heads=32, kv_heads=32),
    KernelCase("paged_decode", "triton", 64, heads=24, kv_heads=8, head_dim=80),
    KernelCase("paged_decode", "triton", 64, heads=16, kv_heads=8, head_dim=256),
    KernelCase("paged_decode", "triton", 64, dtype="float32", kv_dtype="float32"),
    KernelCase("paged_decode", "triton", 64, kv_dtype="int8"),
    KernelCase("paged_decode", "triton", 64, kv_dtype="float8_e4m3fn"),
    KernelCase("paged_decode", "triton", 64, heads=16, kv_heads=8, head_dim=256, kv_dtype="int8"),
    KernelCase("paged_decode", "triton", 64, heads=64, kv_heads=1),
    KernelCase("paged_decode", "triton", 64, heads=16, kv_heads=1, dtype="float32", kv_dtype="float32"),
]
PREFILLS = [
    dataclasses.replace(case, operation="paged_prefill", rows=256 if case.rows == 64 else 2048)
    for case in DECODES
]
OTHERS = [
    KernelCase("rotate_and_write", "triton", 64),
    KernelCase("rotate_and_write", "triton", 320),
    KernelCase("write_kv_quantized", "triton", 320, kv_dtype="int8"),
    KernelCase("write_kv_quantized", "triton", 320, kv_dtype="float8_e4m3fn"),
    KernelCase("sample", "triton", 64),
    KernelCase("experts", "triton", 64 * 8),
    KernelCase("experts", "triton", 320 * 8),
    KernelCase("experts", "triton", 64 * 8, dtype="float32"),
]
PRODUCTS = [
    KernelCase("product", "triton", rows, widths=widths, storage=storage)
    for widths in ((4096, 6144), (14336, 4096))
    for storage in ("int4", "int8")
    for rows in (64, 320)
] + [
    KernelCase("product", "triton", 1, storage="int4"),
    KernelCase("product", "triton", 32, storage="int4", group=32, offset=True),
    KernelCase("product", "triton", 320, storage="int4", group=128, offset=True),
    KernelCase("product", "triton", 64, storage="int8", group=16, dtype="float16"),
    KernelCase("experts", "triton", 64 * 8, storage="int4"),
    KernelCase("experts", "triton", 320 * 8, storage="int8", group=128, offset=True),
]
MOSAIC = [
    KernelCase("paged_decode", "mosaic", 64),
    KernelCase("paged_decode", "mosaic", 64, page_size=64, window=1024, soft_cap=50.0),
    KernelCase("paged_decode", "mosaic", 1, capacity=32768),
    KernelCase("paged_prefill", "mosaic", 256),
    KernelCase("paged_prefill", "mosaic", 2048, page_size=64),
]


def kernel_jobs(fast: bool) -> list[tuple[Target, KernelCase]]:
    """Pairs to compile. Fast: the usual shapes on the H200 and one Ampere card."""
    if fast:
        cases = [DECODES[0], PREFILLS[0], *OTHERS[::2], *PRODUCTS[:2]]
        h200 = [(TARGETS["h200"], case) for case in (*cases, MOSAIC[0], MOSAIC[3])]
        return h200 + [(TARGETS["a100"], case) for case in cases[:2]]
    cases = DECODES + PREFILLS + OTHERS + PRODUCTS
    return [(target, case) for target in TARGETS.values() for case in cases] + [
        (TARGETS["h200"], case) for case in MOSAIC
    ]


def programs(fast: bool) -> list[Program]:
    """Round programs: M = 2 mixed steps of C = 256, and 8 decode steps."""
    layers = 4 if fast else 32
    return [Program(layers, 8, 0), Program(layers, 2, 256)]

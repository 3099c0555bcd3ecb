"""What a model needs, from its configuration and headers alone: no weight is read and no device is started."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from pathlib import Path

import jax.numpy as jnp

from jaxsched.config import GPU_RESERVE_BYTES, EngineConfig
from jaxsched.gguf_file import read_gguf_header
from jaxsched.kv_cache import bytes_per_token
from jaxsched.models import ModelConfig, RopeConfig
from jaxsched.step import Features
from jaxsched.step.programs import program_keys
from jaxsched.text import load_tokenizer
from jaxsched.weights import Checkpoint, RemoteTensors, open_description, planned_bytes

CARDS_GB = (24, 40, 80, 141, 192)  # memory of common GPUs in units of 10^9 bytes, as on the box
GPUS_GB = {
    "T4": 16, "L4": 24, "L40": 48, "L40S": 48, "A10": 24, "A10G": 24, "A16": 16, "A30": 24, "A40": 48,
    "A100": 40, "A100 40GB": 40, "A100 80GB": 80, "H100": 80, "H100 80GB": 80, "H100 NVL": 94, "H200": 141,
    "GH200": 96, "B200": 180, "V100": 16, "V100 32GB": 32, "RTX 3090": 24, "RTX 4080": 16, "RTX 4090": 24,
    "RTX 5080": 16, "RTX 5090": 32, "RTX A6000": 48, "RTX 6000 Ada": 48, "RTX PRO 6000": 96,
}  # fmt: skip
"""Memory of one GPU by name, in units of 10^9 bytes, as on the box."""
SHORT = 2048  # tokens of the shorter sequence in the table of what fits


@dataclasses.dataclass(frozen=True)
class Needs:
    """What the engine takes on one kind of device with a given EngineConfig."""

    platform: str  # "cpu" or "gpu"
    dtype: str  # of weights and rows
    kv_dtype: str  # of KV pages
    weight_bytes: int
    kv_bytes_per_token: int  # without the scales of quantised pages
    page_bytes: int  # one page, K and V of all layers, with scales
    max_num_seqs: int
    max_model_len: int
    full_pages: int  # that a sequence of max_model_len tokens owns at a time
    short_pages: int  # that one of SHORT tokens does, or of max_model_len where that is less
    num_programs: int  # compiled at start


@dataclasses.dataclass(frozen=True)
class Fit:
    """How much fits beside the weights. All zero where the weights alone do not fit."""

    device: str
    dtype: str
    pages: int  # of the KV pool
    kv_tokens: int
    full_sequences: int  # of max_model_len tokens
    short_sequences: int  # of SHORT tokens, or max_model_len where that is less


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Everything ``jaxsched info`` prints."""

    model: str
    architecture: str
    num_parameters: int
    file_bytes: int  # size of the weight files
    saved_as: str  # storage type of most weights, e.g. "bfloat16", "Q4_K"
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_head: bool
    context: int  # tokens
    rope: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat_template: bool
    page_size: int  # tokens
    gpu_memory_utilization: float  # share of the cards' memory counted in ``fits``
    short_tokens: int  # length of the ``short_sequences`` in ``fits``
    needs: tuple[Needs, ...]  # on a CPU, on a GPU
    fits: tuple[Fit, ...]  # common GPUs, then the default pool on a CPU


def inspect_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    config: EngineConfig | None = None,
    card: tuple[str, float] | None = None,
) -> ModelInfo:
    """Describes a checkpoint, under the given or the default EngineConfig. Of a hub id no weights are downloaded.

    ``card``: name and memory (units of 10^9 bytes) of the GPU to ask about in place of some common ones.
    Raises as ``open_checkpoint``, ``load_tokenizer`` and ``EngineConfig.resolve``.
    """
    cards = [(f"{size} GB", float(size)) for size in CARDS_GB] if card is None else [card]
    with open_description(model, revision=revision) as checkpoint:
        tokenizer = load_tokenizer(checkpoint.path)
        chat = tokenizer is not None and tokenizer.chat_template is not None
        found = describe(checkpoint, config or EngineConfig(), cards, chat_template=chat)
    return found if Path(found.model).exists() else dataclasses.replace(found, model=str(model))


def find_card(gpu: str | None, gigabytes: float | None) -> tuple[str, float] | None:
    """Name and memory of the GPU that is meant; None if none is. Raises ValueError for a name that is not known."""
    if gigabytes is not None:
        if not 0 < gigabytes < math.inf:
            raise ValueError(f"the memory of a GPU is {gigabytes} GB; it must be a positive number")
        return gpu or f"{gigabytes:.6g} GB", gigabytes
    if gpu is None:
        return None

    def plain(name: str) -> str:
        words = name.lower().replace("-", " ").replace("gb", "").split()
        return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla", "sxm", "pcie"))

    for name, size in GPUS_GB.items():
        if plain(name) == plain(gpu):
            return (name if "GB" in name else f"{name} ({size} GB)"), float(size)
    raise ValueError(
        f"GPU {gpu!r} is not known; known: {', '.join(GPUS_GB)}; for others give the memory in GB"
    )


def describe(
    checkpoint: Checkpoint, config: EngineConfig, cards: list[tuple[str, float]], *, chat_template: bool
) -> ModelInfo:
    """The ModelInfo of an opened checkpoint."""
    m = checkpoint.model_config
    cpu, gpu = (
        dataclasses.replace(need, weight_bytes=planned_bytes(checkpoint, need.dtype, config.quantization))
        for need in (needs(m, config, platform) for platform in ("cpu", "gpu"))
    )
    return ModelInfo(
        model=str(checkpoint.path),
        architecture=m.architecture,
        num_parameters=m.num_parameters,
        file_bytes=stored_bytes(checkpoint),
        saved_as=storage_type(checkpoint),
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        intermediate_size=m.intermediate_size,
        num_heads=m.num_heads,
        num_kv_heads=m.num_kv_heads,
        head_dim=m.head_dim,
        vocab_size=m.vocab_size,
        tied_head=m.tie_word_embeddings,
        context=m.max_position_embeddings,
        rope=describe_rope(m.rope),
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.bos_token_id,
        chat_template=chat_template,
        page_size=config.page_size,
        gpu_memory_utilization=config.gpu_memory_utilization,
        short_tokens=min(SHORT, gpu.max_model_len),
        needs=(cpu, gpu),
        fits=(
            *(_fit(name, gpu, config, pages_on_card(size, gpu, config)) for name, size in cards),
            _fit("CPU", cpu, config, config.resolve(m, "cpu").limits.num_pages),
        ),
    )


def needs(model: ModelConfig, config: EngineConfig, platform: str) -> Needs:
    """What the engine takes on "cpu" or "gpu"."""
    resolved = config.resolve(model, platform, None if platform == "cpu" else 1 << 62)
    limits, itemsize = resolved.limits, jnp.dtype(resolved.dtype).itemsize
    keys = program_keys(
        lengths=resolved.lengths,
        small_lengths=resolved.small_lengths,
        slot_buckets=limits.slot_buckets,
        mixed_slots=resolved.mixed_slots,
        chunk_buckets=resolved.chunk_buckets,
        features=tuple(Features(sampling) for sampling in resolved.variants),
    )
    return Needs(
        platform=platform,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        weight_bytes=model.num_parameters * itemsize,
        kv_bytes_per_token=bytes_per_token(model, resolved.kv_dtype),
        page_bytes=resolved.page_bytes,
        max_num_seqs=limits.num_slots,
        max_model_len=limits.max_model_len,
        full_pages=limits.need(limits.max_model_len),
        short_pages=limits.need(min(SHORT, limits.max_model_len)),
        num_programs=len(keys),
    )


def pages_on_card(gigabytes: float, gpu: Needs, config: EngineConfig) -> int:
    """KV pages that fit on a GPU of ``gigabytes`` × 10^9 bytes beside weights and temporaries; 0 if none does.

    The engine itself makes no more than ``max_num_seqs`` full sequences can use.
    """
    budget = int(gigabytes * 1e9 * config.gpu_memory_utilization) - gpu.weight_bytes - GPU_RESERVE_BYTES
    return max(0, budget // gpu.page_bytes)


def _fit(device: str, need: Needs, config: EngineConfig, pages: int) -> Fit:
    tokens = pages * config.page_size
    return Fit(device, need.dtype, pages, tokens, pages // need.full_pages, pages // need.short_pages)


def stored_bytes(checkpoint: Checkpoint) -> int:
    """Size of the weight files; of files on the hub without their headers."""
    if isinstance(checkpoint.source, RemoteTensors):
        return checkpoint.source.nbytes
    return sum(file.stat().st_size for file in weight_files(checkpoint.path))


def weight_files(path: Path) -> list[Path]:
    """The files that hold the tensors of the checkpoint at ``path``, as ``Checkpoint.path`` names it."""
    if path.is_file():
        return [path]
    if (single := path / "model.safetensors").is_file():
        return [single]
    index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return sorted(path / name for name in set(index["weight_map"].values()))


def storage_type(checkpoint: Checkpoint) -> str:
    """What most weights are stored as: a dtype, or the block format of a GGUF file."""
    if not checkpoint.path.is_file():
        return checkpoint.model_config.dtype
    import gguf  # optional, but without it the file could not have been opened

    sizes: Counter[int] = Counter()
    for tensor in read_gguf_header(checkpoint.path).tensors.values():
        sizes[tensor.kind] += math.prod(tensor.shape)
    return gguf.GGMLQuantizationType(sizes.most_common(1)[0][0]).name


def describe_rope(rope: RopeConfig | None) -> str:
    """One line, such as "llama3, theta 500000, factor 8 from 8192 tokens"."""
    if rope is None:
        return "none"
    text = f"{rope.kind}, theta {rope.theta:.10g}"
    if rope.partial != 1:
        text += f", {rope.partial:.4g} of each head"
    if rope.kind == "default":
        return text
    origin = f" from {rope.original_max_position} tokens" if rope.original_max_position else ""
    return f"{text}, factor {rope.factor:.10g}{origin}"


def render(info: ModelInfo) -> str:
    """The text of ``jaxsched info``."""
    rows = [
        ("architecture", info.architecture),
        ("parameters", f"{info.num_parameters:,}"),
        ("weight files", f"{binary(info.file_bytes)} (saved as {info.saved_as})"),
        ("layers", f"{info.num_layers} of width {info.hidden_size}, MLP width {info.intermediate_size}"),
        (
            "attention",
            f"{info.num_heads} query heads, {info.num_kv_heads} KV heads, head_dim {info.head_dim}",
        ),
        ("vocabulary", f"{info.vocab_size:,} ({'tied' if info.tied_head else 'separate'} output head)"),
        ("context", f"{info.context:,} tokens"),
        ("rope", info.rope),
        ("EOS ids", ", ".join(map(str, info.eos_token_ids)) or "none"),
        ("BOS id", "none" if info.bos_token_id is None else str(info.bos_token_id)),
        ("chat template", "yes" if info.chat_template else "no"),
    ]
    by_platform = [
        ["with these settings", *(need.platform.upper() for need in info.needs)],
        ["dtype", *(need.dtype for need in info.needs)],
        ["weights", *(binary(need.weight_bytes) for need in info.needs)],
        ["KV dtype", *(need.kv_dtype for need in info.needs)],
        ["KV per token", *(binary(need.kv_bytes_per_token) for need in info.needs)],
        [f"page of {info.page_size} tokens", *(binary(need.page_bytes) for need in info.needs)],
        ["sequences at once", *(str(need.max_num_seqs) for need in info.needs)],
        ["compiled programs", *(str(need.num_programs) for need in info.needs)],
    ]
    full = info.needs[-1].max_model_len
    sequences = [f"seqs of {full:,}", f"seqs of {info.short_tokens:,}"]
    fits = [["what fits", "dtype", "KV pages", "KV tokens", *sequences]]
    for fit in info.fits:
        numbers = (fit.pages, fit.kv_tokens, fit.full_sequences, fit.short_sequences)
        fits.append([fit.device, fit.dtype, *(f"{n:,}" if fit.kv_tokens else "-" for n in numbers)])
    if info.short_tokens == full:
        fits = [row[:-1] for row in fits]
    note = (
        f"GPUs: {info.gpu_memory_utilization:.0%} of the memory, less weights and temporaries; a GB is 10^9 bytes. "
        "CPU: the default KV pool."
    )
    if not all(fit.kv_tokens for fit in info.fits):
        note += "\n-: the weights do not fit."
    facts = "\n".join(f"  {name:<15}{value}" for name, value in rows)
    return "\n\n".join((f"{info.model}\n{facts}", table(by_platform), f"{table(fits)}\n{note}"))


def table(rows: list[list[str]]) -> str:
    """Rows as aligned columns, the first one to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
             for row in rows)  # fmt: skip
    return "\n".join(lines)


def binary(count: int) -> str:
    """A number of bytes in the largest unit that leaves at least 1: "45.0 KiB"."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"

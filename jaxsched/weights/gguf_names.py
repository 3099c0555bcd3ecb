"""What stands where in a GGUF file: llama.cpp's tensors as the Hugging Face tensors that they are made of.

Names of both sides come together in a family's ``Names``, so no architecture needs a list of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from jaxsched.gguf_file import GGUFTensor

from ..models.config import MAX_EXPERTS
from ..models.weights import Names
from .gguf_config import Arch

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?\.(weight|bias)")
_VECTORS = {"ffn_gate_inp_shexp"}  # matrices of one row, of which the converter drops the first axis


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a Hugging Face tensor is in the file, and what the converter has done to it."""

    source: str  # name in the file
    tensor: GGUFTensor
    shape: tuple[int, ...]  # in the Hugging Face checkpoint
    first: int  # row of the tensor, all axes but the last one taken as rows; of a vector its element
    rows: int
    permuted: int = 0  # heads whose rows are reordered from halves to neighbouring pairs
    regrouped: int = 0  # heads whose q, k and v rows are taken apart
    transposed: bool = False
    offset: float = 0.0  # added to all numbers


def places(name: str, tensor: GGUFTensor, row: Arch, names: Names, words: dict[str, Any]) -> dict[str, Place]:
    """The Hugging Face tensors that are in one tensor of the file; itself where it has no counterpart.

    ``words`` is the config.json of the file. Raises ValueError for a shape that cannot be taken apart.
    """
    top = {
        "token_embd": names.embed,
        "position_embd": names.positions,
        "output_norm": names.norm,
        "output": names.head,
    }
    stem, _, kind = name.rpartition(".")
    if top.get(stem):
        return {f"{top[stem]}.{kind}": _whole(name, tensor, stem, kind, row, names)}
    match = _BLOCK.fullmatch(name)
    parts = _parts(match[2], match[3], tensor, names, words) if match else []
    if match is None or not parts:
        return {name: Place(name, tensor, tensor.shape, 0, _rows(tensor))}
    found, first = {}, 0
    layer = names.layer.format(match[1])
    for part, rows in parts:
        whole = _whole(name, tensor, match[2], match[4], row, names)
        if len(parts) > 1 or len(tensor.shape) > 2:
            whole = dataclasses.replace(whole, shape=(rows, *tensor.shape[1:][-1:]), first=first, rows=rows)
        heads = _heads(part, names, words) if row.permuted else 0
        regrouped = words["num_attention_heads"] if names.interleaved and part == names.qkv[0] else 0
        found[f"{layer}{part}.{match[4]}"] = dataclasses.replace(whole, permuted=heads, regrouped=regrouped)
        first += rows
    if first != _rows(tensor):
        raise ValueError(
            f"has {_rows(tensor)} rows, and {first} belong to {', '.join(p for p, _ in parts[:3])}"
        )
    return found


def _rows(tensor: GGUFTensor) -> int:
    rows = 1
    for width in tensor.shape[:-1] if len(tensor.shape) > 1 else tensor.shape:
        rows *= width
    return rows


def _whole(name: str, tensor: GGUFTensor, base: str, kind: str, row: Arch, names: Names) -> Place:
    shape = tensor.shape
    if base in _VECTORS and len(shape) == 1:
        return Place(name, tensor, (1, *shape), 0, _rows(tensor))
    turned = names.transposed and len(shape) == 2 and base not in ("token_embd", "position_embd", "output")
    offset = row.norm_offset if base.endswith("norm") and kind == "weight" else 0.0
    turned_shape = shape[::-1] if turned else shape
    return Place(name, tensor, turned_shape, 0, _rows(tensor), transposed=turned, offset=offset)


def _parts(
    base: str, index: str | None, tensor: GGUFTensor, names: Names, words: dict[str, Any]
) -> list[tuple[str, int]]:
    """What the rows of a layer's tensor are, in their order: name within the layer, number of rows."""
    if index is not None:  # older files have a tensor for each expert
        expert = {
            "ffn_gate": names.expert_gate_up[0], "ffn_up": names.expert_gate_up[-1], "ffn_down": names.expert_down,
        }.get(base)  # fmt: skip
        return [(names.expert.format(index) + expert, _rows(tensor))] if expert else []
    if base.endswith("_exps"):
        return list(_expert_parts(base, tensor, names))
    if base == "attn_qkv" and len(names.qkv) == 3:
        q, kv = (words[word] * words["head_dim"] for word in ("num_attention_heads", "num_key_value_heads"))
        return list(zip(names.qkv, (q, kv, kv), strict=True))
    name = _simple(names).get(base)
    return [(name, _rows(tensor))] if name else []


def _expert_parts(base: str, tensor: GGUFTensor, names: Names) -> Iterator[tuple[str, int]]:
    gate, up, down = names.expert_gate_up[0], names.expert_gate_up[-1], names.expert_down
    parts = {
        "ffn_gate_exps": [gate],
        "ffn_up_exps": [up],
        "ffn_down_exps": [down],
        "ffn_gate_up_exps": [gate, up],
    }
    if base not in parts:
        return
    if len(tensor.shape) != 3 or not 0 < tensor.shape[0] <= MAX_EXPERTS or tensor.shape[1] % len(parts[base]):
        raise ValueError(f"of shape {tensor.shape} is not a stack of experts")
    for index in range(tensor.shape[0]):
        for part in parts[base]:
            yield names.expert.format(index) + part, tensor.shape[1] // len(parts[base])


def _simple(names: Names) -> dict[str, str]:
    """GGUF's names in a layer -> those of the family; empty for what it has not."""
    q, k, v = names.qkv if len(names.qkv) == 3 else ("", "", "")
    gate, up = names.gate_up if len(names.gate_up) == 2 else ("", names.gate_up[0])
    shared = [names.shared + part for part in (*names.expert_gate_up, names.expert_down)]
    return {
        "attn_norm": names.attn_norm, "post_attention_norm": names.attn_post_norm,
        "ffn_norm": names.mlp_norm, "post_ffw_norm": names.mlp_post_norm,
        "attn_q": q, "attn_k": k, "attn_v": v, "attn_qkv": names.qkv[0], "attn_output": names.out,
        "attn_q_norm": names.q_norm, "attn_k_norm": names.k_norm,
        "ffn_gate": gate, "ffn_up": up, "ffn_down": names.down, "ffn_gate_inp": names.router,
        "ffn_gate_shexp": shared[0], "ffn_up_shexp": shared[1], "ffn_down_shexp": shared[2],
        "ffn_gate_inp_shexp": names.shared_gate,
    }  # fmt: skip


def _heads(part: str, names: Names, words: dict[str, Any]) -> int:
    """Heads of a projection of queries or keys; 0 for anything else."""
    word = dict(zip(names.qkv, ("num_attention_heads", "num_key_value_heads"), strict=False)).get(part)
    return words[word] if word and len(names.qkv) == 3 else 0

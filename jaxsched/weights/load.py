"""Fills the decoder's parameters from a checkpoint, one at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from ..models import Decoder, Family, ModelConfig, family_of
from ..models.weights import Rule, weight_table
from .checkpoint import Checkpoint
from .errors import CheckpointError
from .source import TensorSource

_FLOATING = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)
_LISTED = 10  # names in an error


def load_model(
    checkpoint: Checkpoint, dtype: jnp.dtype, device: jax.Device | jax.sharding.Sharding | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
    """``(graphdef, params)`` of the checkpoint's Decoder: the static, hashable part and the arrays.

    ``nnx.merge(graphdef, params)`` is the module; do it inside ``jax.jit`` with ``graphdef`` static.
    Raises as ``load_params``.
    """
    graphdef, _ = _structure(checkpoint.model_config, dtype)
    return graphdef, load_params(checkpoint, dtype=dtype, device=device)


def load_params(
    checkpoint: Checkpoint, *, dtype: jnp.dtype, device: jax.Device | jax.sharding.Sharding | None = None
) -> nnx.State:
    """The decoder's parameters, pure arrays of ``dtype`` on ``device`` (None: jax's default).

    Tensors are read, cast, joined and copied to the device one parameter at a time, so the host holds at
    most one parameter beside the mapped file.

    Raises CheckpointError when tensors are missing, unexpected, wrongly shaped or not floating point, and
    ValueError for a dtype that is not a floating one.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype {dtype} is not a floating-point type; use float32, bfloat16 or float16")
    family, source = family_of(checkpoint.config), checkpoint.source
    table = _weight_table(checkpoint, family)
    _account_for_every_tensor(checkpoint, family, table)
    _, abstract = _structure(checkpoint.model_config, dtype)
    paths = [_dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(abstract)]
    assert sorted(paths) == sorted(table), f"weight table and decoder differ: {set(paths) ^ set(table)}"

    def fill(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        value = _parameter(source, table[_dotted(path)], dtype)
        assert value.shape == leaf.shape, (
            f"{_dotted(path)}: rule gives {value.shape}, decoder wants {leaf.shape}"
        )
        # Waiting for the copy bounds the host's memory to one parameter.
        return jax.block_until_ready(jax.device_put(value, device))

    return jax.tree_util.tree_map_with_path(fill, abstract)


def _weight_table(checkpoint: Checkpoint, family: Family) -> dict[str, Rule]:
    """The family's table, by the names of a bare model if the checkpoint has those."""
    names, found = family.names, checkpoint.source.shapes()
    if f"{names.embed}.weight" not in found and f"{names.bare().embed}.weight" in found:
        names = names.bare()
    return weight_table(checkpoint.model_config, names)


def _structure(config: ModelConfig, dtype: jnp.dtype) -> tuple[nnx.GraphDef, nnx.State]:
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, jnp.dtype(dtype))))
    return graphdef, nnx.as_pure(state)


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _parameter(source: TensorSource, rule: Rule, dtype: jnp.dtype) -> np.ndarray:
    tensors = []
    for name in rule.sources:
        tensor = source.read(name)
        if tensor.dtype not in _FLOATING:
            raise CheckpointError(
                f"tensor {name!r} has dtype {tensor.dtype}; supported: float16, bfloat16, float32, float64; "
                "use an unquantized checkpoint"
            )
        tensors.append(tensor.astype(dtype, copy=False))
    value = rule.build(tensors)
    # Never hand a view of the mapped file on: jax may alias it, and the file may change while it runs.
    return value if value.flags.owndata else value.copy()


def _account_for_every_tensor(checkpoint: Checkpoint, family: Family, table: dict[str, Rule]) -> None:
    found = checkpoint.source.shapes()
    wanted = {
        name: shape for rule in table.values() for name, shape in zip(rule.sources, rule.shapes, strict=True)
    }
    tied = checkpoint.model_config.tie_word_embeddings
    head, embed = f"{family.names.head}.weight", table["embed.embedding"].sources[0]
    if not tied and head not in found and head in wanted and embed in found:
        raise CheckpointError(
            f"{checkpoint.path}: tie_word_embeddings is false, but the checkpoint has no {head!r}; "
            "set tie_word_embeddings to true in config.json if the head shares the embedding table, "
            "otherwise download the missing tensor"
        )
    names = family.names
    known = (n for n in found if n not in wanted and not n.endswith(names.derived))
    unexpected = [name for name in known if not name.startswith(names.outside)]
    if tied and head in unexpected:
        _check_tied_head(checkpoint, head, embed)
        unexpected.remove(head)
    problems = [f"{name}: missing, expected {shape}" for name, shape in wanted.items() if name not in found]
    problems += [
        f"{name}: expected {shape}, found {found[name]}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    problems += [f"{name}: unexpected, found {found[name]}" for name in unexpected]
    if problems:
        more = [f"... and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        raise CheckpointError(
            f"the tensors of {checkpoint.path} are not those that its configuration describes "
            f"({len(problems)} differ):\n  " + "\n  ".join(problems[:_LISTED] + more)
            + "\nuse the config.json that belongs to these weights, or download the checkpoint again"
        )  # fmt: skip


def _check_tied_head(checkpoint: Checkpoint, head: str, embed: str) -> None:
    shapes, read = checkpoint.source.shapes(), checkpoint.source.read
    if shapes[head] == shapes.get(embed) and np.array_equal(read(head), read(embed)):
        return
    raise CheckpointError(
        f"{checkpoint.path}: tie_word_embeddings is true, but {head!r} differs from {embed!r}; "
        "set tie_word_embeddings to false in config.json to use the head that is stored"
    )

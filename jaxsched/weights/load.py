"""Fills the decoder's parameters from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..models import Decoder, Family, family_of
from ..models.parts import AdapterShape
from ..models.quantized import multiplies_fp8
from ..models.weights import Names, Rule, weight_table
from .checkpoint import Checkpoint
from .errors import CheckpointError
from .hub import RemoteTensors
from .parallel import Job, Stop, in_parallel
from .plan import make, plan

_LISTED = 10  # names in an error
_FEW = 100  # layers that may be missing altogether and are then listed by name
_SHARE, _LEAST = 0.2, 64 << 20  # of the model, bytes: what is read and made at the same time


def load_model(
    checkpoint: Checkpoint,
    dtype: jnp.dtype,
    device: jax.Device | jax.sharding.Sharding | None = None,
    *,
    quantization: str | None = None,
    adapters: Mapping[str, AdapterShape] | None = None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """``(graphdef, params)`` of the checkpoint's Decoder: the static, hashable part and the arrays.

    ``nnx.merge(graphdef, params)`` is the module; do it inside ``jax.jit`` with ``graphdef`` static.
    Arguments and errors as in ``load_params``.
    """
    options: dict[str, Any] = {"quantization": quantization, "adapters": adapters}
    graphdef, _ = structure(checkpoint, dtype, device, **options)
    return graphdef, load_params(checkpoint, dtype=dtype, device=device, **options)


def load_params(
    checkpoint: Checkpoint,
    *,
    dtype: jnp.dtype,
    device: jax.Device | jax.sharding.Sharding | None = None,
    quantization: str | None = None,
    stop: Stop | None = None,
    adapters: Mapping[str, AdapterShape] | None = None,
) -> nnx.State:
    """The decoder's parameters, pure arrays of ``dtype`` on ``device`` (None: jax's default).

    Parameters are read, cast, joined and copied to the device in a few threads, the largest first. Beside what is on
    the device the host holds a fifth of the model at most, or one parameter if that is larger; on a CPU the parameters
    are these arrays. ``quantization``: see ``plan.plan``. ``stop`` ends it with CancelledError. ``adapters``: the
    kernels with room for low-rank adapters, by path; the room is filled with zeros.

    Raises CheckpointError when tensors are missing, unexpected, wrongly shaped, not floating point or not finite, and
    ValueError for a dtype that is not a floating one.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype {dtype} is not a floating-point type; use float32, bfloat16 or float16")
    family, source = family_of(checkpoint.config), checkpoint.source
    _, abstract = structure(checkpoint, dtype, device, quantization=quantization, adapters=adapters)
    table = _weight_table(checkpoint, family)
    _check_tied_head(checkpoint, family, table)
    formats = plan(source, table, quantization, fp8=_multiplies_fp8(device))
    wide = 4 + (2 if formats else 1) * dtype.itemsize  # bytes a number while it is read and put in its place

    def job(path: str, rule: Rule) -> Job:
        def work() -> dict[str, jax.Array]:
            made = make(source, path, rule, dtype, formats)
            # Waiting for the copy bounds the host's memory.
            return {name: jax.block_until_ready(jax.device_put(x, device)) for name, x in made.items()}

        return wide * math.prod(rule.shape), work

    made = in_parallel(
        [job(*item) for item in table.items()], limit=max(_LEAST, int(_SHARE * nbytes(abstract))), stop=stop
    )
    arrays = {name: array for part in made for name, array in part.items()}
    del made

    def take(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = _dotted(path)
        if name.endswith((".lora_a", ".lora_b")):
            return jnp.zeros(leaf.shape, leaf.dtype, device=device)
        array = arrays.pop(name)
        found, wanted = (array.shape, array.dtype), (leaf.shape, leaf.dtype)
        assert found == wanted, f"{name}: made {found}, decoder wants {wanted}"
        return array

    params = jax.tree_util.tree_map_with_path(take, abstract)
    assert not arrays, f"the decoder has no place for {list(arrays)}"
    return params


def structure(
    checkpoint: Checkpoint,
    dtype: jnp.dtype,
    device: jax.Device | jax.sharding.Sharding | None = None,
    *,
    quantization: str | None = None,
    adapters: Mapping[str, AdapterShape] | None = None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """What ``load_model`` gives, with shapes in place of arrays. No tensor is read, but headers are checked already."""
    family = family_of(checkpoint.config)
    table = _weight_table(checkpoint, family)
    _account_for_every_tensor(checkpoint, family, table)
    formats = plan(checkpoint.source, table, quantization, fp8=_multiplies_fp8(device))
    config = checkpoint.model_config
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, jnp.dtype(dtype), formats, adapters)))
    return graphdef, nnx.as_pure(state)


def _weight_table(checkpoint: Checkpoint, family: Family) -> dict[str, Rule]:
    """The family's table, by the names of a bare model if the checkpoint has those."""
    names, found = family.names, checkpoint.source.shapes()
    if f"{names.embed}.weight" not in found and f"{names.bare().embed}.weight" in found:
        names = names.bare()
    _check_size(checkpoint, names)
    return weight_table(checkpoint.model_config, names)


def _check_size(checkpoint: Checkpoint, names: Names) -> None:
    """Refuses a configuration of another size than the tensors before anything of that size is made."""
    c, found = checkpoint.model_config, checkpoint.source.shapes()
    experts = c.experts.count if c.experts is not None else 0
    wanted = sum(max(1, experts * layer.experts) for layer in c.layers)  # of some tensor each
    if wanted > len(found) + _FEW:
        routed = f" with {experts} experts" if experts else ""
        raise CheckpointError(
            f"{checkpoint.path}: the configuration describes {c.num_layers} layers{routed}, but there are only "
            f"{len(found)} tensors; use the config.json that belongs to these weights"
        )
    table, shape = f"{names.embed}.weight", (c.vocab_size, c.hidden_size)
    if found.get(table, shape) != shape:
        raise CheckpointError(
            f"{checkpoint.path}: the configuration describes {c.vocab_size} tokens of width {c.hidden_size}, but "
            f"{table!r} in {checkpoint.source.file_of(table).name} has the shape {found[table]}; use the config.json "
            "that belongs to these weights"
        )


def _multiplies_fp8(device: jax.Device | jax.sharding.Sharding | None) -> bool:
    if device is None:
        return multiplies_fp8(jax.devices()[0])
    return all(
        map(multiplies_fp8, device.device_set if isinstance(device, jax.sharding.Sharding) else [device])
    )


def planned_bytes(checkpoint: Checkpoint, dtype: str, quantization: str | None = None) -> int:
    """Bytes that the parameters will take on a device, from the configuration and headers alone."""
    source = checkpoint.source
    if isinstance(source, RemoteTensors) and checkpoint.config.get("quantization_config"):
        return source.nbytes  # which kernels stay as they are is known when they are here; this is close
    table = _weight_table(checkpoint, family_of(checkpoint.config))
    formats, total = plan(source, table, quantization), 0
    for path, rule in table.items():
        fmt = formats.get(path.removesuffix(".kernel"))
        if fmt is not None and path.endswith(".kernel"):
            total += math.prod(rule.shape[:-2]) * fmt.nbytes(*rule.shape[-2:])
        else:
            total += math.prod(rule.shape) * jnp.dtype(dtype).itemsize
    return total


def nbytes(params: nnx.State) -> int:
    """Bytes of parameters, arrays or shapes, on the device; numbers of 4 bits take half a byte."""
    leaves = jax.tree.leaves(params)
    bits = (4 if leaf.dtype == jnp.int4 else 8 * leaf.dtype.itemsize for leaf in leaves)
    return sum(leaf.size * b for leaf, b in zip(leaves, bits, strict=True)) // 8


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


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
        unexpected.remove(head)  # _check_tied_head compares it
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


def _check_tied_head(checkpoint: Checkpoint, family: Family, table: dict[str, Rule]) -> None:
    """A head that is stored although it is tied must equal the embedding table."""
    shapes, read = checkpoint.source.shapes(), checkpoint.source.read
    head, embed = f"{family.names.head}.weight", table["embed.embedding"].sources[0]
    if not checkpoint.model_config.tie_word_embeddings or head not in shapes:
        return
    if shapes[head] == shapes[embed] and np.array_equal(read(head), read(embed)):
        return
    raise CheckpointError(
        f"{checkpoint.path}: tie_word_embeddings is true, but {head!r} differs from {embed!r}; "
        "set tie_word_embeddings to false in config.json to use the head that is stored"
    )

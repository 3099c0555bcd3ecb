"""Low-rank adapters (LoRA) as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

Names, patterns and scaling are those of PEFT's ``LoraConfig`` (github.com/huggingface/peft, tuners/lora); "rsLoRA" is
Kalajdzievski 2023. Whatever would change the result and is not computed here is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..models import family_of
from ..models.parts import AdapterShape
from ..models.weights import Rule
from .build import floating
from .checkpoint import Checkpoint
from .errors import CheckpointError
from .plan import kernel_path
from .safetensors_source import SafetensorsSource

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "rank_pattern"),
    *("alpha_pattern", "bias", "layers_to_transform", "layers_pattern", "init_lora_weights"),
}
# They concern training, or the matrix of the base model (fan_in_fan_out), not what is added to it.
_WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size", "eva_config", "runtime_config"),
    "ensure_weight_tying",
}
_PLAIN_STARTS = (
    True,
    False,
    "gaussian",
    "eva",
    "orthogonal",
)  # the others change the base model's weights too
_MERGE = "merge it into the model (merge_and_unload of PEFT) and load that"


@dataclasses.dataclass(frozen=True)
class Target:
    """A linear layer of the checkpoint: one of those that a kernel of the decoder is made of."""

    path: str  # of the kernel, "layers.0.attention.qkv"
    part: int  # which of its sources
    first: int  # its first column in the kernel, before these are reordered
    width_in: int
    width_out: int


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterTargets:
    """What adapters of a model may change, and how many of which rank it has room for."""

    linears: dict[str, Target]  # by name in the checkpoint, "model.layers.0.self_attn.q_proj"
    rules: dict[str, Rule]  # of the kernels, by path
    base: str  # the beginning of names that adapters of the bare model leave out
    max_loras: int
    max_rank: int
    dtype: Any

    @property
    def shapes(self) -> dict[str, AdapterShape]:
        """The room beside each kernel, by path."""
        width = {path: len(rule.sources) * self.max_rank for path, rule in self.rules.items()}
        return {path: AdapterShape(self.max_loras, columns) for path, columns in width.items()}

    def endings(self) -> str:
        """What ``target_modules`` may name."""
        return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in self.linears))


def adapter_targets(checkpoint: Checkpoint, max_loras: int, max_rank: int, dtype: Any) -> AdapterTargets:
    """Room for ``max_loras`` adapters of rank ``max_rank`` beside every kernel of the layers.

    Not beside embeddings, the output head, routers and experts (a shared expert is like any other MLP).
    """
    family = family_of(checkpoint.config)
    linears, rules = {}, {}
    for name, rule in family.weight_table(checkpoint.model_config).items():
        path = kernel_path(name)
        if path is None or rule.stack:
            continue
        rules[path], first = rule, 0
        for part, (source, shape) in enumerate(zip(rule.sources, rule.shapes, strict=True)):
            width_out, width_in = shape if rule.transpose else shape[::-1]
            linears[source.removesuffix(".weight")] = Target(path, part, first, width_in, width_out)
            first += width_out
    return AdapterTargets(linears, rules, family.names.base, max_loras, max_rank, np.dtype(dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter, ready for the device: by path of the kernel, A ``[in, W]`` and B ``[W, out]``.

    W is the largest rank times the number of tensors that are fused in the kernel; each has columns of its own in A,
    and in B a block of rows and columns. B includes the scale. Kernels that the adapter does not change are missing.
    """

    kernels: dict[str, tuple[np.ndarray, np.ndarray]]


def read_adapter(path: Path, targets: AdapterTargets) -> Adapter:
    """Reads the adapter in a folder.

    Raises CheckpointError (a ValueError) that names file and tensor, or field, the limit and the remedy: for files
    that are missing or damaged, variants other than plain LoRA and rsLoRA, layers that cannot be adapted, ranks above
    the limit, tensors that are missing, unexpected, of a wrong shape or not finite.
    """
    path = path.expanduser()
    config = _LoraConfig.read(path / CONFIG)
    if not (file := path / WEIGHTS).is_file():
        pickled = (
            "; convert it, pickled weights are not read" if (path / "adapter_model.bin").is_file() else ""
        )
        raise CheckpointError(f"{path} has no {WEIGHTS}{pickled or '; give the folder that PEFT has saved'}")
    source = SafetensorsSource([file])
    found = _modules(file, source, targets)
    for name in config.expected(targets):
        if name not in found:
            raise CheckpointError(
                f"{file} has no tensor 'base_model.model.{name}.lora_A.weight', which target_modules in {CONFIG} "
                "promises; download it again"
            )
    kernels: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, keys in found.items():
        if not config.covers(name):
            raise CheckpointError(
                f"{file}: tensor {keys['A']!r} is of a layer that target_modules in {CONFIG} leaves out; use the "
                f"{CONFIG} that belongs to these weights"
            )
        target = targets.linears[name]
        a, b = _pair(file, source, keys, config, name, targets)
        rows = slice(target.part * targets.max_rank, target.part * targets.max_rank + len(a))
        kernel_a, kernel_b = kernels.setdefault(target.path, _zeros(targets, target.path))
        kernel_a[:, rows] = a.T
        kernel_b[rows, target.first : target.first + target.width_out] = b.T
    for key, (_, kernel_b) in kernels.items():
        if (order := targets.rules[key].order) is not None:
            kernel_b[:] = kernel_b[:, order]
    return Adapter(kernels)


def _zeros(targets: AdapterTargets, path: str) -> tuple[np.ndarray, np.ndarray]:
    (width_in, width_out), width = targets.rules[path].shape, targets.shapes[path].width
    return np.zeros((width_in, width), targets.dtype), np.zeros((width, width_out), targets.dtype)


def _modules(file: Path, source: SafetensorsSource, targets: AdapterTargets) -> dict[str, dict[str, str]]:
    """Name of each adapted linear layer -> "A", "B" -> the tensor's key."""
    found: dict[str, dict[str, str]] = {}
    for key in source.shapes():
        match = _KEY.fullmatch(key)
        name = match["module"] if match else ""
        name = name if name in targets.linears else targets.base + name
        if match is None or name not in targets.linears:
            raise CheckpointError(
                f"{file}: tensor {key!r} is not lora_A or lora_B of a layer that can be adapted here "
                f"({targets.endings()}); {_MERGE}"
            )
        if match["side"] in found.setdefault(name, {}):
            raise CheckpointError(f"{file} has two tensors for lora_{match['side']} of {name}; remove one")
        found[name][match["side"]] = key
    for name, keys in found.items():
        for side in {"A", "B"} - keys.keys():
            raise CheckpointError(f"{file} has no lora_{side} for {name}; download it again")
    return found


def _pair(
    file: Path,
    source: SafetensorsSource,
    keys: dict[str, str],
    config: _LoraConfig,
    name: str,
    targets: AdapterTargets,
) -> tuple[np.ndarray, np.ndarray]:
    """A ``[r, in]`` and B ``[out, r]`` of one layer, B times the scale."""
    target, (rank, scale) = targets.linears[name], config.rank_and_scale(name)
    if rank > targets.max_rank:
        raise CheckpointError(
            f"{file}: {keys['A']!r} has rank {rank}, but max_lora_rank is {targets.max_rank}; make the engine with "
            f"max_lora_rank={rank} or more"
        )
    pair = []
    shapes = {"A": (rank, target.width_in), "B": (target.width_out, rank)}
    for side, factor in (("A", 1.0), ("B", scale)):
        key, shape = keys[side], source.shapes()[keys[side]]
        if shape != shapes[side]:
            raise CheckpointError(
                f"{file}: tensor {key!r} has shape {shape}, but with rank {rank} this model needs {shapes[side]}; use "
                "an adapter of this model"
            )
        with np.errstate(over="ignore"):
            value = (floating(source, key, np.float32) * np.float32(factor)).astype(targets.dtype)
        if not np.isfinite(value.astype(np.float32)).all():
            raise CheckpointError(
                f"{file}: tensor {key!r}{' times its scale' if side == 'B' else ''} has values that are not finite as "
                f"{jnp.dtype(targets.dtype).name}; use a sound adapter"
            )
        pair.append(value)
    return pair[0], pair[1]


@dataclasses.dataclass(frozen=True)
class _LoraConfig:
    """What adapter_config.json says of the tensors."""

    file: Path
    rank: int
    alpha: float
    by_root: bool  # alpha is divided by the root of the rank (rsLoRA)
    wanted: tuple[str, ...] | str  # names or ends of names, or a regular expression for whole names
    without: tuple[str, ...] | str
    layers: tuple[int, ...]  # only these; empty: all
    layers_pattern: tuple[str, ...]
    ranks: dict[str, int]  # by name, end of a name or regular expression
    alphas: dict[str, float]

    @classmethod
    def read(cls, file: Path) -> _LoraConfig:
        """Raises CheckpointError naming field, value and remedy."""
        if not file.is_file():
            raise CheckpointError(
                f"no {file}; lora_path is a folder on this machine with {CONFIG} and {WEIGHTS}"
            )
        try:
            fields = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} is not valid JSON ({error}); download it again") from error
        if not isinstance(fields, dict):
            raise CheckpointError(f"{file} holds no JSON object; download it again")
        _refuse(file, fields)
        f = _Reader(file, fields)
        return cls(
            file,
            f.rank("r", fields.get("r", 8)),
            f.number("lora_alpha", fields.get("lora_alpha", 8)),
            bool(fields.get("use_rslora")),
            f.names("target_modules", shorthand="all-linear"),
            f.names("exclude_modules"),
            f.indices("layers_to_transform"),
            tuple(f.names("layers_pattern", as_list=True)),
            {key: f.rank(f"rank_pattern[{key!r}]", r) for key, r in f.table("rank_pattern").items()},
            {key: f.number(f"alpha_pattern[{key!r}]", a) for key, a in f.table("alpha_pattern").items()},
        )

    def covers(self, name: str) -> bool:
        """Whether PEFT adapts the linear layer ``name``."""
        if _named(self.without, name) or not _named(self.wanted, name):
            return False
        if not self.layers or isinstance(self.wanted, str) or name in self.wanted:
            return True
        patterns = [rf"(?:^|.*?\.){p}\.(\d+)\." for p in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((m for p in patterns if (m := re.match(p, name))), None)
        return found is not None and int(found[1]) in self.layers

    def expected(self, targets: AdapterTargets) -> list[str]:
        """The linear layers that the file must have tensors for. Raises CheckpointError for those nobody can adapt."""
        names = list(targets.linears)
        for one in [self.wanted] if isinstance(self.wanted, str) else self.wanted:
            if not any(_named(one if isinstance(self.wanted, str) else (one,), name) for name in names):
                raise CheckpointError(
                    f"{self.file}: target_modules has {one!r}, which is no layer that can be adapted here; these are "
                    f"{targets.endings()} of this model; {_MERGE}"
                )
        return [name for name in names if self.covers(name)]

    def rank_and_scale(self, name: str) -> tuple[int, float]:
        """r, and what B A is multiplied by."""
        rank, alpha = _pattern(self.ranks, name, self.rank), _pattern(self.alphas, name, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.by_root else rank)


def _refuse(file: Path, fields: dict[str, Any]) -> None:
    """Variants whose result differs from that of plain LoRA."""
    if fields.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: peft_type is {fields.get('peft_type')!r}; only 'LORA' is supported")
    start = fields.get("init_lora_weights", True)
    refused = {
        "bias": fields.get("bias", "none") != "none",
        "init_lora_weights": not any(
            start is s or (s == start and isinstance(s, str)) for s in _PLAIN_STARTS
        ),
    }
    refused |= {key: bool(fields[key]) for key in fields.keys() - _READ - _WITHOUT_EFFECT}
    for name in sorted(key for key, bad in refused.items() if bad):
        raise CheckpointError(
            f"{file}: {name} is {fields[name]!r:.80}, which is not supported in an adapter; {_MERGE}"
        )


class _Reader:
    """Fields of one adapter_config.json. Raises CheckpointError for values of a wrong kind."""

    def __init__(self, file: Path, fields: dict[str, Any]):
        self.file, self.fields = file, fields

    def rank(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(name, value, "an integer of at least 1")
        return value

    def number(self, name: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._wrong(name, value, "a number")
        return float(value)

    def names(self, name: str, shorthand: str = "", as_list: bool = False) -> tuple[str, ...] | str:
        """A list of names, or a regular expression."""
        value = self.fields.get(name)
        if isinstance(value, str):
            if shorthand and value.lower() == shorthand:
                return ".*"
            if as_list:
                return (value,)
            return self.regex(name, value)
        if value is not None and not (isinstance(value, list) and all(isinstance(n, str) for n in value)):
            raise self._wrong(name, value, "a list of names, or a regular expression")
        if shorthand and not value:
            raise self._wrong(name, value, "a list of names, or a regular expression")
        return tuple(value or ())

    def indices(self, name: str) -> tuple[int, ...]:
        value = self.fields.get(name)
        value = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise self._wrong(name, value, "a number of a layer, or a list of these")
        return tuple(value)

    def table(self, name: str) -> dict[str, Any]:
        value = self.fields.get(name) or {}
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        for key in value:
            self.regex(name, key)
        return value

    def regex(self, name: str, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise self._wrong(name, value, f"a regular expression ({error})") from error
        return value

    def _wrong(self, name: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file}: {name} is {value!r:.80}; it must be {wanted}: correct it or download it again"
        )


def _named(names: Iterable[str] | str, name: str) -> bool:
    """Whether a regular expression, or one of some names or ends of names, stands for the layer ``name``."""
    if isinstance(names, str):
        return re.fullmatch(names, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in names)


def _pattern(table: dict[str, Any], name: str, default: Any) -> Any:
    """The value of the first pattern that is the name or the end of it."""
    return next((value for key, value in table.items() if re.match(rf"(.*\.)?({key})$", name)), default)

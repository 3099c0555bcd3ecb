"""safetensors files, one or several with an index.

The format (https://huggingface.co/docs/safetensors): 8 bytes of header length, a JSON header, then the data.
It is parsed here, not by the library: errors then name the tensor, and bfloat16 needs no framework.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .errors import CheckpointError
from .source import map_bytes

_DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library
_AGAIN = "download it again"


@dataclasses.dataclass(frozen=True)
class _Entry:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class SafetensorsSource:
    """Tensors of one or more safetensors files, read on demand; each is mapped into memory as long as somebody has it.

    ``promised`` is the index's map from tensor name to file name; without it every tensor found is taken.
    Raises CheckpointError for a file that is missing, corrupt or truncated, a tensor that two files hold,
    and a tensor that the index promises but its file lacks.
    """

    def __init__(self, paths: list[Path], promised: dict[str, str] | None = None):
        self._entries: dict[str, _Entry] = {}
        for path in paths:
            for name, entry in _read_header(path).items():
                if name in self._entries:
                    raise CheckpointError(
                        f"tensor {name!r} is in both {self._entries[name].path} and {path.name}; "
                        "remove one of the files or the duplicate"
                    )
                self._entries[name] = entry
        for name, file in (promised or {}).items():
            found = self._entries.get(name)
            if found is None or found.path.name != Path(file).name:
                where = f"; it is in {found.path.name}" if found else ""
                raise CheckpointError(
                    f"the index says that tensor {name!r} is in {file}, but it is not{where}; {_AGAIN}"
                )

    def dtypes(self) -> set[str]:
        """Names of the dtypes that are stored."""
        return {np.dtype(_DTYPES[entry.dtype]).name for entry in self._entries.values()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if entry.nbytes == 0:
            return np.empty(entry.shape, _DTYPES[entry.dtype])
        data = map_bytes(entry.path, entry.offset, entry.nbytes)
        return data.view(_DTYPES[entry.dtype]).reshape(entry.shape)

    def file_of(self, name: str) -> Path:
        return self._entries[name].path


def open_safetensors(directory: Path) -> SafetensorsSource:
    """Opens the ``model.safetensors`` of a folder, or the shards that ``model.safetensors.index.json`` names.

    Raises CheckpointError, also when the folder has no safetensors file.
    """
    index = directory / "model.safetensors.index.json"
    if (single := directory / "model.safetensors").is_file():
        return SafetensorsSource([single])
    if not index.is_file():
        raise CheckpointError(_no_weights(directory))
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not (isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())):
            raise TypeError("weight_map is not a map from tensor names to file names")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index ({error}); {_AGAIN}") from error
    files = sorted(set(weight_map.values()))
    if outside := [file for file in files if Path(file).name != file]:
        raise CheckpointError(f"{index} names {outside[0]!r}, which is not a file of its folder; {_AGAIN}")
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {', '.join(missing[:10])} ({len(missing)} of {len(files)} shards) "
            f"named in {index.name}; download the missing files"
        )
    return SafetensorsSource([directory / file for file in files], weight_map)


def _no_weights(directory: Path) -> str:
    text = f"{directory} has a config.json but neither model.safetensors nor model.safetensors.index.json"
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        return text + "; convert the PyTorch weights to safetensors, pickled weights are not read"
    if found := sorted(path.name for path in directory.glob("*.gguf")):
        return text + f"; to load a GGUF file pass its path, e.g. {directory / found[0]}"
    if found := sorted(path.name for path in directory.glob("*.safetensors")):
        return text + f"; it has {', '.join(found[:5])}: rename the file or add the index"
    return text + "; download the weights"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} appears twice")
    return result


def _read_header(path: Path) -> dict[str, _Entry]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path} is not a safetensors file: it has {size} bytes; {_AGAIN}")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file: its header claims {length} bytes, "
                f"the file has {size}; {_AGAIN}"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a corrupt safetensors header ({error}); {_AGAIN}") from error
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + length, size) for name, value in header.items()}
    _refuse_overlaps(path, entries)
    return entries


def _refuse_overlaps(path: Path, entries: dict[str, _Entry]) -> None:
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset < end and entry.nbytes:
            raise CheckpointError(
                f"{path}: tensor {name!r} begins at byte {entry.offset}, inside tensor {before!r}, which "
                f"ends at {end}; {_AGAIN}"
            )
        end, before = max(end, entry.offset + entry.nbytes), name


def _entry(path: Path, name: str, value: Any, start: int, size: int) -> _Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise ValueError("shape and data_offsets must be non-negative integers")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the description of tensor {name!r} is corrupt ({error!r}); {_AGAIN}"
        ) from error
    if dtype not in _DTYPES:
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype!r}; supported: {', '.join(_DTYPES)}")
    nbytes = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if end - begin != nbytes:
        raise CheckpointError(
            f"{path}: tensor {name!r} of shape {shape} and dtype {dtype} takes {nbytes} bytes, "
            f"its entry spans {end - begin}; {_AGAIN}"
        )
    if start + end > size:
        raise CheckpointError(
            f"{path} is truncated: tensor {name!r} ends at byte {start + end}, the file has {size}; {_AGAIN}"
        )
    return _Entry(path, dtype, shape, start + begin, nbytes)

"""jaxsched's own checkpoints: the decoder's parameters as they are used, written and read by orbax.

A folder with ``jaxsched.json`` (what is stored, and where it came from) and ``params`` (an orbax checkpoint of a flat
dict: path of the parameter -> array). Kernels are fused and transposed already, and quantised ones are stored as such.

orbax writes zarr 2, one uncompressed chunk for each array and no OCDBT: then every array is a file of its own that can
be mapped. Read here, not by orbax, whose restoring takes more CPU time than building the parameters anew from
safetensors (it copies twice, and importing it takes most of a second); but orbax can restore these folders too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.host_memory import empty_pages

from ..models.quantized import KernelFormat
from .build import largest
from .errors import CheckpointError
from .parallel import Job, Stop, in_parallel
from .source import map_bytes

FORMAT = 1  # of the folder; readers refuse what is newer
INFO, PARAMS = "jaxsched.json", "params"
_AGAIN = "convert the model again"
_TOGETHER = 1 << 30  # bytes that may be on their way to the device at the same time


@dataclasses.dataclass(frozen=True)
class Stored:
    """Shape and dtype of one array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return (
            math.prod(self.shape) * (4 if self.dtype == "int4" else 8 * jnp.dtype(self.dtype).itemsize) // 8
        )


class NativeTensors:
    """The parameters in a folder. As a TensorSource it knows only names and shapes: parameters are loaded together.

    Raises CheckpointError for a folder that is damaged, or newer than this version can read.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.about = _read_about(folder / INFO)
        self.dtype: str = self.about["dtype"]
        self.formats: dict[str, KernelFormat] = self.about["formats"]
        self.arrays: dict[str, Stored] = self.about["arrays"]
        if not (folder / PARAMS / "_METADATA").is_file():
            raise CheckpointError(f"{folder} has {INFO}, but {PARAMS} holds no parameters; {_AGAIN}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self.arrays.items()}

    def file_of(self, name: str) -> Path:
        return self.folder / PARAMS

    def read(self, name: str) -> np.ndarray:
        raise CheckpointError(
            f"{self.folder}: {name!r} cannot be read by itself, parameters are loaded together"
        )

    def files(self) -> list[Path]:
        """The files of the parameters."""
        return sorted(path for path in (self.folder / PARAMS).rglob("*") if path.is_file())

    def nbytes(self, dtype: str) -> int:
        """Bytes of the parameters on a device when those of the model's dtype are cast to ``dtype``."""
        arrays = [
            dataclasses.replace(array, dtype=dtype) if self._plain(name) else array
            for name, array in self.arrays.items()
        ]
        return sum(array.nbytes for array in arrays)

    def planned(self, quantization: str | None, *, fp8: bool) -> dict[str, KernelFormat]:
        """As ``plan.plan``: kernels are as they are stored. Raises CheckpointError if others are asked for."""
        stored = self.about["quantization"]
        as_it_is = stored if self.formats else "dequantize"
        if quantization not in (None, as_it_is) and not (quantization == "keep" and self.formats):
            what = f"quantised ({stored})" if self.formats else "not quantised"
            raise CheckpointError(
                f"{self.folder}: quantization {quantization!r} was asked for, but the parameters are stored {what}; "
                "leave it out, or convert the original model with this quantization"
            )
        if fp8:
            return self.formats
        return {name: dataclasses.replace(fmt, activations="") for name, fmt in self.formats.items()}

    def check(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Raises CheckpointError if these are not the parameters of the decoder that wants ``wanted``."""
        problems = [
            f"{n}: missing, expected {leaf.shape}" for n, leaf in wanted.items() if n not in self.arrays
        ]
        problems += [f"{name}: unexpected" for name in self.arrays if name not in wanted]
        for name, leaf in wanted.items():
            found = self.arrays.get(name)
            if found is None:
                continue
            if found.shape != leaf.shape:
                problems.append(f"{name}: expected {leaf.shape}, found {found.shape}")
            elif found.dtype != leaf.dtype.name and not self._plain(name):
                problems.append(f"{name}: expected {leaf.dtype.name}, found {found.dtype}")
        if problems:
            more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointError(
                f"the parameters of {self.folder} are not those that its configuration describes ({len(problems)} "
                "differ):\n  " + "\n  ".join(problems[:10]) + more + f"\n{_AGAIN}"
            )  # fmt: skip

    def load(
        self,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        device: jax.Device | jax.sharding.Sharding | None,
        stop: Stop | None = None,
    ) -> dict[str, jax.Array]:
        """All parameters, of the dtypes and where they are wanted. Raises CheckpointError if files are damaged.

        On a CPU arrays whose files nobody may write (``save`` leaves them so) are the mapped files: nothing is copied,
        and the system reads them when they are used and may drop them again.
        """
        self.check(wanted)

        def job(name: str, leaf: jax.ShapeDtypeStruct) -> Job:
            def work() -> jax.Array:
                array = self._cast(name, self._map(name), leaf.dtype)
                return jax.block_until_ready(jax.device_put(array, device))

            return leaf.size * leaf.dtype.itemsize, work

        arrays = in_parallel([job(*entry) for entry in wanted.items()], limit=_TOGETHER, stop=stop)
        return dict(zip(wanted, arrays, strict=True))

    def _map(self, name: str) -> np.ndarray:
        """A parameter as it is stored; in a file that can be written it is copied, for whoever does may do it later."""
        stored = self.arrays[name]
        folder, dtype = self.folder / PARAMS / name, np.dtype(jnp.dtype(stored.dtype))
        file = folder / (".".join("0" for _ in stored.shape) or "0")
        try:
            layout = json.loads((folder / ".zarray").read_text(encoding="utf-8"))
            found = tuple(layout["shape"]), tuple(layout["chunks"]), layout["compressor"], layout["order"]
            if found != (stored.shape, stored.shape, None, "C"):
                raise ValueError(f"shape, chunks, compressor and order are {found}, not as they were written")
            size, expected = file.stat().st_size, math.prod(stored.shape) * dtype.itemsize
            if size != expected:
                raise ValueError(f"{file.name} has {size} bytes, not {expected}")
            values = map_bytes(file, 0, expected).view(dtype).reshape(stored.shape)
            if file.stat().st_mode & 0o222:
                copy = empty_pages(stored.shape, dtype)
                copy[...] = values
                values = copy
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.folder / PARAMS}: {name!r} is damaged ({error}); {_AGAIN}"
            ) from error
        return values

    def _cast(self, name: str, values: np.ndarray, dtype: Any) -> np.ndarray:
        if values.dtype == dtype:
            return values
        with np.errstate(over="ignore"):
            if not np.isfinite(largest(values).astype(dtype)):
                raise CheckpointError(
                    f"{self.folder}: {name!r} has numbers that {np.dtype(dtype).name} cannot hold; use bfloat16 or "
                    "float32"
                )
        cast = empty_pages(values.shape, dtype)
        cast[...] = values
        return cast

    def _plain(self, name: str) -> bool:
        """Whether a parameter is of the model's dtype and may be cast: it is no part of a quantised kernel."""
        path, _, last = name.rpartition(".")
        return not (path in self.formats and last in ("kernel", "scale", "offset"))


def save(
    folder: Path,
    arrays: Mapping[str, jax.Array],
    formats: Mapping[str, KernelFormat],
    about: Mapping[str, Any],
) -> None:
    """Writes ``params`` and ``jaxsched.json`` into an existing folder. ``about`` is added to the latter."""
    with _quiet():
        import orbax.checkpoint

        handler = orbax.checkpoint.PyTreeCheckpointHandler(
            use_ocdbt=False,
            use_zarr3=False,
            use_compression=False,
            save_concurrent_gb=max(1, sum(x.nbytes for x in arrays.values()) // 5 >> 30),
        )
        with orbax.checkpoint.Checkpointer(handler) as checkpointer:
            args = orbax.checkpoint.args.PyTreeSave(dict(arrays))
            checkpointer.save((folder / PARAMS).absolute(), args=args)
    for file in (folder / PARAMS).rglob("*"):
        if file.is_file():
            file.chmod(0o444)
    stored = {n: {"shape": list(x.shape), "dtype": x.dtype.name} for n, x in arrays.items()}
    kernels = {name: dataclasses.asdict(fmt) for name, fmt in formats.items()}
    content = {"format": FORMAT, **about, "formats": kernels, "arrays": stored}
    (folder / INFO).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps to itself what orbax logs of an error that is raised anyway."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        number = about["format"]
        if number == FORMAT:
            about["formats"] = {name: KernelFormat(**fmt) for name, fmt in about["formats"].items()}
            about["arrays"] = {n: Stored(tuple(x["shape"]), x["dtype"]) for n, x in about["arrays"].items()}
            if not all(isinstance(n, int) and n >= 0 for x in about["arrays"].values() for n in x.shape):
                raise ValueError("a shape is not made of numbers")
            for name in {about["dtype"], *(x.dtype for x in about["arrays"].values())}:
                jnp.dtype(name)
            about.setdefault("quantization", None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); {_AGAIN}") from error
    if number != FORMAT:
        raise CheckpointError(
            f"{path} has the format {number!r}, this version reads {FORMAT}; update jaxsched or {_AGAIN}"
        )
    return dict(about)

"""The low-rank adapters (LoRA) on the device: which is where, who uses it, who makes room for others."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from jaxsched.lora import LoRARequest
from jaxsched.weights import AdapterTargets, read_adapter
from jaxsched.weights.adapters import Adapter

if TYPE_CHECKING:
    from .core import Engine


@dataclasses.dataclass(frozen=True)
class _Held:
    request: LoRARequest
    place: int  # on the device, from 1
    generation: int  # which load it came with: K and V of another load must not be taken for its own


class Adapters:
    """An engine's adapters. ``read``, ``knows`` and ``loaded`` may be called in any thread, the rest in the engine's.

    Loading one replaces arrays of the parameters by others of the same shapes, so nothing is traced or compiled, and
    rounds in flight keep the arrays that they were launched with. Adapters that no queued or running request uses make
    room for others, least recently used first.
    """

    def __init__(self, engine: Engine, targets: AdapterTargets | None):
        self._engine, self._targets = engine, targets
        self._held: OrderedDict[int, _Held] = OrderedDict()  # by id, least recently used first
        self._generation = 0
        self._writers: dict[Any, Any] = {}  # compiled, by the shapes of A and B
        if targets is not None:
            self._compile(targets)

    def _compile(self, targets: AdapterTargets) -> None:
        params = _adapter_arrays(self._engine.executor.params)
        for path, shape in targets.shapes.items():
            stacks = [params[f"{path}.lora_{side}"] for side in "ab"]
            (width_in, _), (_, width_out) = (stack.shape for stack in stacks)
            if (width_in, width_out, shape) not in self._writers:
                news = [(width_in, shape.width), (shape.width, width_out)]
                shapes = [jax.ShapeDtypeStruct(s, targets.dtype) for s in (*(x.shape for x in stacks), *news)]
                lowered = jax.jit(_write).lower(*shapes, jax.ShapeDtypeStruct((), np.int32))
                self._writers[width_in, width_out, shape] = lowered.compile()

    # -- asking ------------------------------------------------------------------------------------------------------

    def loaded(self) -> dict[int, LoRARequest]:
        """What is on the device, by id, least recently used first."""
        return {number: held.request for number, held in self._held.copy().items()}

    def knows(self, request: LoRARequest) -> bool:
        """Whether the adapter is on the device."""
        held = self._held.get(request.lora_int_id)
        return held is not None and held.request == request

    def read(self, request: LoRARequest, *, again: bool = False) -> Adapter | None:
        """The adapter's arrays; None if it is on the device already, unless ``again``. May take a second.

        Raises ValueError naming file and tensor, the limit and the remedy.
        """
        targets = self._check(request)
        if not again and self.knows(request):
            return None
        return read_adapter(Path(request.lora_path), targets)

    def _check(self, request: Any) -> AdapterTargets:
        if not isinstance(request, LoRARequest):
            raise ValueError(f"lora_request is {request!r:.80}; it must be a LoRARequest")
        if self._targets is None:
            raise ValueError(
                f"{request} was asked for, but enable_lora is False; make the engine with enable_lora=True"
            )
        return self._targets

    # -- for requests ------------------------------------------------------------------------------------------------

    def place(self, request: LoRARequest | None, adapter: Adapter | None = None) -> int:
        """Where the adapter is on the device, 0 for none. Loads it if need be; ``adapter``: if it has been read.

        Raises ValueError when it cannot be read, another has its id, or all places are taken by adapters in use.
        """
        if request is None:
            return 0
        self._check(request)
        held = self._held.get(request.lora_int_id)
        if held is None:
            return self.add(request, adapter)
        if held.request != request:
            raise ValueError(
                f"{request} of {request.lora_path} was asked for, but {held.request} of {held.request.lora_path} is "
                "loaded under this id; give each an id of its own, or load it in the other's place with add_lora"
            )
        self._held.move_to_end(request.lora_int_id)
        return held.place

    def salt(self, place: int, salt: bytes | None) -> bytes | None:
        """``salt`` for the prefix cache of a sequence: K and V of one adapter are nobody else's."""
        if not place or salt is None:
            return salt
        held = self._at(place)
        return (
            b"\xff" + held.generation.to_bytes(8, "little") + salt
        )  # 0xff is in no UTF-8, so in no user's salt

    def request_at(self, place: int) -> LoRARequest | None:
        """Whose adapter is there."""
        return self._at(place).request if place else None

    def _at(self, place: int) -> _Held:
        return next(held for held in self._held.values() if held.place == place)

    # -- loading and dropping ----------------------------------------------------------------------------------------

    def add(self, request: LoRARequest, adapter: Adapter | None = None) -> int:
        """Loads an adapter, in the place of one with its id if there is one. Returns its place.

        ``adapter``: if it has been read. Raises ValueError when that one is in use, or all are, or it cannot be read.
        """
        targets = self._check(request)
        held = self._held.get(request.lora_int_id)
        if held is not None:
            self._refuse_used(held, "replaced")
        elif len(self._held) == targets.max_loras and not self._unused():
            names = ", ".join(str(one.request) for one in self._held.values())
            raise ValueError(
                f"{request} cannot be loaded: max_loras is {targets.max_loras}, and {names} are all in use; wait for "
                "their requests, or raise max_loras"
            )
        if adapter is None:
            adapter = read_adapter(Path(request.lora_path), targets)
        if held is None and len(self._held) == targets.max_loras:
            held = self._unused()[0]
        if held is not None:
            del self._held[held.request.lora_int_id]
        taken = {one.place for one in self._held.values()}
        place = min(set(range(1, targets.max_loras + 1)) - taken)
        self._engine.executor.params = self._written(self._engine.executor.params, adapter, place)
        self._generation += 1
        self._held[request.lora_int_id] = _Held(request, place, self._generation)
        return place

    def remove(self, lora_int_id: int) -> bool:
        """Forgets an adapter; False if there is none with this id. Raises ValueError if requests use it."""
        held = self._held.get(lora_int_id)
        if held is None:
            return False
        self._refuse_used(held, "removed")
        del self._held[lora_int_id]  # what it leaves on the device is in nobody's rows
        return True

    def _users(self, place: int) -> list[str]:
        requests = self._engine.requests.by_id.items()
        return [number for number, request in requests if request.sequences[0].row.adapter == place]

    def _unused(self) -> list[_Held]:
        requests = self._engine.requests.by_id.values()
        used = {request.sequences[0].row.adapter for request in requests}
        return [held for held in self._held.values() if held.place not in used]

    def _refuse_used(self, held: _Held, done: str) -> None:
        if users := self._users(held.place):
            others = f" and {len(users) - 1} more" if len(users) > 1 else ""
            raise ValueError(
                f"{held.request} cannot be {done}: request {users[0]!r}{others} uses it; wait until that has finished, "
                "or abort it"
            )

    def _written(self, params: Any, adapter: Adapter, place: int) -> Any:
        """The parameters with ``adapter`` in ``place``; kernels that it does not change get zeros."""
        assert self._targets is not None
        old, new = _adapter_arrays(params), {}
        for path, shape in self._targets.shapes.items():
            a, b = (old[f"{path}.lora_{side}"] for side in "ab")
            pair = adapter.kernels.get(path)
            if pair is None:
                zeros = ((a.shape[0], shape.width), (shape.width, b.shape[1]))
                pair = (np.zeros(zeros[0], a.dtype), np.zeros(zeros[1], b.dtype))
            write = self._writers[a.shape[0], b.shape[1], shape]
            new[f"{path}.lora_a"], new[f"{path}.lora_b"] = write(a, b, *pair, np.int32(place - 1))
        return _with_arrays(params, new)

    # -- the engine as a value ---------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[Any, dict[str, np.ndarray]]:
        """What is held, to be pickled, and the arrays of all places."""
        arrays = _adapter_arrays(self._engine.executor.params) if self._held else {}
        return (self._held, self._generation), jax.device_get(arrays)

    def restore(self, held: Any, arrays: dict[str, np.ndarray]) -> None:
        """Goes back to a snapshot."""
        self._held, self._generation = held
        params = self._engine.executor.params
        self._engine.executor.params = _with_arrays(params, jax.device_put(arrays))


def _write(a: Array, b: Array, new_a: Array, new_b: Array, place: Array) -> tuple[Array, Array]:
    """A ``[in, N*W]`` and B ``[N*W, out]`` of all adapters with those of one in ``place`` (from 0)."""
    width = new_a.shape[1]
    return (
        lax.dynamic_update_slice(a, new_a, (0 * place, place * width)),
        lax.dynamic_update_slice(b, new_b, (place * width, 0 * place)),
    )


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _adapter_arrays(params: Any) -> dict[str, Array]:
    """A and B of all adapters by path, such as "layers.0.attention.qkv.lora_a"."""
    leaves = ((_dotted(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params))
    return {path: leaf for path, leaf in leaves if path.endswith((".lora_a", ".lora_b"))}


def _with_arrays(params: Any, arrays: dict[str, Array]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: arrays.get(_dotted(path), leaf), params)

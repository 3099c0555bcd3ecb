"""Bytes that one decode step of a compiled program moves, and the least that it could.

Every instruction of the scan's body reads its operands and writes its results once. Exceptions: an operand that is
only sliced or gathered counts by what is taken; an array that is updated in place counts by what is written;
attention counts by a model, because what it reads depends on the contexts: the live K and V once, its other operands
and its results. Whether a small intermediate stays in the L2 cache is not asked, so the count is high rather than
low.
"""

from __future__ import annotations

import dataclasses

from .hlo import Array, Computation, Instruction, Module

FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id"}
SLICES = {"dynamic-slice", "gather", "slice"}
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # operand that holds what is written


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one decode step by where they go."""

    attention: int
    products: int  # matrix products: weights, rows in, rows out
    other: int
    largest: tuple[tuple[str, int], ...]  # of ``other``

    @property
    def total(self) -> int:
        return self.attention + self.products + self.other


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and the load that are counted."""

    slots: int
    context: int  # positions of each slot
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    itemsize: int = 2

    @property
    def live_kv(self) -> int:
        """K and V of one layer's live contexts, bytes."""
        return 2 * self.slots * self.context * self.kv_heads * self.head_dim * self.itemsize

    @property
    def layer_widths(self) -> tuple[tuple[int, int], ...]:
        """Widths in and out of a layer's products."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        e, f = self.hidden, self.intermediate
        return ((e, q + 2 * kv), (q, e), (e, 2 * f), (f, e))

    @property
    def weights(self) -> int:
        """Bytes of the weights that a step reads: all but the embedding table."""
        layer = sum(a * b for a, b in self.layer_widths) + 2 * self.hidden
        return self.itemsize * (self.layers * layer + self.hidden + self.hidden * self.vocab)

    @property
    def least(self) -> int:
        """Weights once, live K and V once, the new K and V, each product's rows in and out, logits out and in."""
        rows = self.slots * sum(a + b for a, b in self.layer_widths) * self.itemsize
        new = 2 * self.slots * self.kv_heads * self.head_dim * self.itemsize
        head = self.slots * (self.hidden * self.itemsize + 2 * 4 * self.vocab)
        return self.weights + self.layers * (self.live_kv + rows + new) + head


def scan_body(module: Module) -> Computation:
    """The body of the program's loop over steps. Raises ValueError if there is not exactly one."""
    loops = [i for i in module.entry.instructions if i.opcode == "while"]
    if len(loops) != 1:
        raise ValueError(f"the program has {len(loops)} loops at the top, not one")
    return module.computations[loops[0].called["body"]]


def step_traffic(module: Module, sizes: Sizes) -> Traffic:
    """Counts the scan's body. Raises ValueError for a loop or branch inside it, of which the work is not known."""
    body = scan_body(module)
    sums = {"attention": 0, "products": 0, "other": 0}
    others = []
    for one in body.instructions:
        if one.opcode in FREE:
            continue
        if one.opcode in ("while", "conditional"):
            raise ValueError(f"{one.name} is a {one.opcode} inside the step")
        kind = _kind(one)
        moved = _attention(body, one, sizes) if kind == "attention" else _moved(module, body, one)
        sums[kind] += moved
        if kind == "other":
            others.append((one.op_name.rpartition("/")[2] + " " + one.name, moved))
    others.sort(key=lambda pair: -pair[1])
    return Traffic(**sums, largest=tuple(others[:3]))


def _kind(one: Instruction) -> str:
    if one.opcode == "custom-call" and one.op_name.endswith("/paged_decode/pallas_call"):
        return "attention"
    gemm = "gemm" in one.name or "gemm" in one.target or one.opcode == "dot"
    return "products" if gemm else "other"


def _attention(body: Computation, one: Instruction, sizes: Sizes) -> int:
    """The pages are the two largest operands; of them the live part is read."""
    operands = sorted((body.by_name[name].bytes for name in one.operands), reverse=True)
    return sizes.live_kv + sum(operands[2:]) + one.bytes


def _moved(module: Module, body: Computation, one: Instruction) -> int:
    if one.opcode != "fusion":
        return _plain(body, one)
    inside = module.computations[one.called["calls"]]
    read = sum(_read(inside, parameter) for parameter in inside.parameters)
    return read + sum(_written(inside, leaf) for leaf in _leaves(inside))


def _plain(body: Computation, one: Instruction) -> int:
    operands = [body.by_name[name] for name in one.operands]
    if one.opcode in SLICES:
        return 2 * one.bytes
    if one.opcode in UPDATES:
        return 2 * operands[UPDATES[one.opcode]].bytes
    aliased = set(one.aliases.values())
    read = sum(x.bytes for i, x in enumerate(operands) if i not in aliased)
    written = sum(a.bytes for i, a in enumerate(one.arrays) if i not in one.aliases)
    if aliased:  # rows that come in and go into the aliased arrays: no more than what was read
        written += max(0, read - written)
    return read + written


def _through(inside: Computation, one: Instruction) -> list[Instruction]:
    """Users of a value, looking through what only renames it."""
    users = []
    for user in inside.users[one.name]:
        users += _through(inside, user) if user.opcode in ("bitcast", "convert", "copy") else [user]
    return users


def _read(inside: Computation, parameter: Instruction) -> int:
    taken, whole = 0, False
    for user in _through(inside, parameter):
        if user.opcode in SLICES:
            taken += user.bytes
        elif user.opcode in UPDATES and parameter.bytes == user.bytes:
            continue  # updated in place: counted where it is written
        else:
            whole = True
    return parameter.bytes if whole or not inside.users[parameter.name] else min(taken, parameter.bytes)


def _leaves(inside: Computation) -> list[Instruction]:
    root = inside.root
    return [inside.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]


def _written(inside: Computation, leaf: Instruction) -> int:
    while leaf.opcode == "bitcast":
        leaf = inside.by_name[leaf.operands[0]]
    if leaf.opcode in UPDATES:
        return inside.by_name[leaf.operands[UPDATES[leaf.opcode]]].bytes
    return leaf.bytes


def copies_of(module: Module, dims: tuple[int, ...]) -> list[str]:
    """Instructions anywhere in the program that make a new array of ``dims`` (ones and order aside)."""
    wanted, found = _signature(dims), []
    inside_fusions = {i.called.get("calls") for c in module.computations.values() for i in c.instructions}
    for computation in module.computations.values():
        if computation.name in inside_fusions:
            continue
        for one in computation.instructions:
            if one.opcode in FREE or one.opcode in ("while", "conditional", "call", *UPDATES):
                continue
            for number, array in enumerate(one.arrays):
                if _signature(array.dims) != wanted or number in one.aliases:
                    continue
                if one.opcode == "fusion" and _updates_in_place(module, one, number, array):
                    continue
                found.append(f"{one.opcode} {one.name}")
    return found


def _signature(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(n for n in dims if n != 1))


def _updates_in_place(module: Module, one: Instruction, number: int, array: Array) -> bool:
    inside = module.computations[one.called["calls"]]
    leaf = _leaves(inside)[number]
    while leaf.opcode == "bitcast":
        leaf = inside.by_name[leaf.operands[0]]
    return leaf.opcode in UPDATES

"""A small reader of XLA's optimised programs in their text form: computations, instructions, shapes.

The grammar is that of ``Compiled.as_text()``: one instruction a line, operands by name with ``%`` before them,
``/*index=5*/`` comments in long lists, computations named in attributes (``calls=``, ``body=``, ``to_apply=``).
"""

from __future__ import annotations

import dataclasses
import math
import re
from functools import cached_property

BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16}  # the others end in their number of bits, such as f32


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in memory; 4-bit types are packed."""
        return -(-self.elements * _bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _bits(dtype: str) -> int:
    if dtype in BITS:
        return BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)  # f8e4m3fn has 8 bits, u64 has 64
    if match is None:
        raise ValueError(f"hlo: unknown element type {dtype!r}")
    return int(match[1])


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction. ``arrays`` are the leaves of its result; ``text`` is all that follows its operands."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    tuple_result: bool
    operands: tuple[str, ...]
    argument: str  # what stands in the parentheses
    text: str
    root: bool

    @property
    def bytes(self) -> int:
        return sum(a.bytes for a in self.arrays)

    @cached_property
    def called(self) -> dict[str, str]:
        """Computations by the attribute that names them: calls, body, condition, to_apply."""
        return dict(re.findall(r"\b(calls|body|condition|to_apply)=%?([\w.\-]+)", self.attributes))

    @cached_property
    def branches(self) -> tuple[str, ...]:
        """Computations of a conditional."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", self.attributes)
        return tuple(re.findall(r"[\w.\-]+", listed[1]) if listed else names)

    @cached_property
    def attributes(self) -> str:
        """``text`` up to the backend's own configuration, which may hold anything."""
        return self.text.partition(", backend_config=")[0]

    @property
    def trip_count(self) -> int | None:
        """How often a while loop runs, if the compiler knows."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.text)
        return int(match[1]) if match else None

    @property
    def op_name(self) -> str:
        """Where it comes from, as JAX names it."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def target(self) -> str:
        """What a custom call calls."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def index(self) -> int:
        """Of a get-tuple-element: which; of a parameter: its number."""
        if self.opcode == "parameter":
            return int(self.argument)
        match = re.search(r"\bindex=(\d+)", self.attributes)
        if match is None:
            raise ValueError(f"hlo: {self.name} ({self.opcode}) has no index")
        return int(match[1])

    @property
    def aliases(self) -> dict[int, int]:
        """Of a custom call: which result shares memory with which operand."""
        match = re.search(r"output_to_operand_aliasing=\{(.*?\))\s*\}", self.attributes)
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\d*\}\)", match[1]) if match else []
        return {int(out or 0): int(operand) for out, operand in pairs}


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                found[name].append(instruction)
        return found

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions if i.root)

    @property
    def parameters(self) -> list[Instruction]:
        return sorted((i for i in self.instructions if i.opcode == "parameter"), key=lambda i: i.index)


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program."""

    computations: dict[str, Computation]
    entry: Computation
    aliases: dict[int, int]  # output number -> number of the parameter whose memory it takes


def parse(text: str) -> Module:
    """Reads a program. Raises ValueError for what it does not understand."""
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", []
    header = text.partition("\n")[0]
    for raw in text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", raw) if " = " in raw else raw
        start = re.match(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$", raw)
        if start:
            name, lines = start[2], []
            entry = name if start[1] else entry
        elif raw == "}":
            computations[name] = Computation(name, tuple(lines))
            name = ""
        elif name and " = " in line:
            lines.append(_instruction(line.strip()))
    if entry not in computations:
        raise ValueError("hlo: the text has no ENTRY computation")
    return Module(computations, computations[entry], _aliases(header))


def _aliases(header: str) -> dict[int, int]:
    start = header.find("input_output_alias={")
    if start < 0:
        return {}
    block = _enclosed(header, header.index("{", start))
    return {int(out or 0): int(number) for out, number in re.findall(r"\{(\d*)\}: \((\d+), \{\}", block)}


def _enclosed(text: str, start: int) -> str:
    """What stands between the bracket at ``start`` and its partner; brackets in strings do not count."""
    depth, quoted = 0, False
    for at in range(start, len(text)):
        char = text[at]
        if char == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
            if depth == 0:
                return text[start + 1 : at]
    raise ValueError(f"hlo: bracket without partner in {text[start : start + 80]!r}")


def arrays_of(shape: str) -> tuple[Array, ...]:
    """All arrays of a shape, nested tuples flattened: ``(f32[2,3]{1,0}, s32[])``."""
    found = re.findall(r"([a-z]\w*)\[([\d,<=]*)\]", shape)
    return tuple(Array(d, tuple(int(n) for n in re.findall(r"\d+", dims))) for d, dims in found)


def _instruction(line: str) -> Instruction:
    match = re.match(r"(ROOT )?%?([\w.\-]+) = ", line)
    if match is None:
        raise ValueError(f"hlo: not an instruction: {line[:80]!r}")
    rest = line[match.end() :]
    if rest.startswith("("):
        shape = "(" + _enclosed(rest, 0) + ")"
        rest = rest[len(shape) :]
    else:
        shape, _, rest = rest.partition(" ")
    head = re.match(r"\s*([\w\-]+)\(", rest)
    if head is None:
        raise ValueError(f"hlo: no operation in {line[:80]!r}")
    argument = _enclosed(rest, head.end() - 1)
    text = rest[head.end() + len(argument) + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", argument)) if head[1] != "constant" else ()
    return Instruction(
        match[2], head[1], arrays_of(shape), shape.startswith("("), operands, argument, text, bool(match[1])
    )

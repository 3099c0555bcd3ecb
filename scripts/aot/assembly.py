"""What the assembler says of a kernel, and what the compiler's plan says of a program."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Assembled:
    """One entry function of one PTX file, assembled for its own architecture."""

    name: str
    registers: int
    spills: int  # bytes stored and loaded
    stack: int  # bytes
    wgmma: int  # instructions in the PTX file
    mma: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """One entry of the compiler's plan. ``depth`` counts the loops around it."""

    kind: str  # "kCustomKernel", "kCopy", "kWhile" ...
    name: str
    shared: int  # bytes of shared memory
    depth: int


def assemble(ptx: Path, ptxas: str = "ptxas") -> list[Assembled]:
    """Assembles a PTX file and reads the report. Raises RuntimeError with ptxas's words if it refuses."""
    text = ptx.read_text()
    target = re.search(r"^\.target\s+(\w+)", text, re.MULTILINE)
    if target is None:
        raise RuntimeError(f"{ptx.name} names no target")
    command = [ptxas, "-v", f"--gpu-name={target[1]}", str(ptx), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses {ptx.name}: {done.stderr.strip()[:500]}")
    return read_report(done.stderr, text)


def read_report(report: str, ptx: str = "") -> list[Assembled]:
    """The functions in a report of ``ptxas -v``; matrix instructions are counted in ``ptx``."""
    counts = len(re.findall(r"\bwgmma\.mma_async", ptx)), len(re.findall(r"\bmma\.sync", ptx))
    found = []
    parts = re.split(r"Compiling entry function '", report)[1:]
    for part in parts:
        name = part.partition("'")[0]
        registers = re.search(r"Used (\d+) registers", part)
        stack = re.search(r"(\d+) bytes stack frame", part)
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", part))
        if registers is None:
            raise RuntimeError(f"the assembler's report of {name} names no registers")
        found.append(Assembled(name, int(registers[1]), spills, int(stack[1]) if stack else 0, *counts))
    return found


def read_plan(text: str) -> list[Launch]:
    """The launches in the compiler's plan (``*.thunk_sequence.txt``), loops indented below their kWhile."""
    launches = []
    for line in text.splitlines():
        match = re.match(r"( *)\d+: (k\w+)\s+\[[^\]]*\]\s*(.*)", line)
        if match is None:
            continue
        name = match[3].split(" grid:")[0].strip()
        shared = re.search(r"shared_memory: (\d+) bytes", match[3])
        launches.append(Launch(match[2], name, int(shared[1]) if shared else 0, len(match[1]) // 4))
    return launches

"""Runs the jobs in processes of their own, judges what they found, prints one table. See scripts/aot_check."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import hlo, traffic
from .jobs import LLAMA, KernelCase, Program, kernel_jobs, programs
from .packages import install
from .targets import TARGETS, Target

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77  # exit code
TEMPORARY = 0.02  # of the KV pool's bytes
BYTES = 1.10  # moved over the least possible, decode steps
LAUNCHES = {"decode": 14, "mixed": 18}  # per layer and step
BATCH = 12  # jobs per process


@dataclasses.dataclass
class Row:
    """One line of the table."""

    target: str
    job: str
    found: str
    faults: list[str]


def judge_kernel(case: KernelCase, target: Target, result: dict[str, Any]) -> Row:
    """No spills, shared memory within the card's limit, wgmma for prefill on sm_90."""
    if "error" in result:
        return Row(target.name, f"{case.backend} {case.name}", "", [result["error"]])
    faults, kernels = [], result["assembled"]
    if not kernels:
        faults.append("no kernel was found in what the compiler wrote")
    spills = sum(k["spills"] for k in kernels)
    shared = max((launch["shared"] for launch in result["launches"]), default=0)
    registers = max((k["registers"] for k in kernels), default=0)
    wgmma, mma = (sum(k[kind] for k in kernels) for kind in ("wgmma", "mma"))
    if spills:
        faults.append(f"{spills} bytes of registers spilled; none may")
    if shared > target.shared_block:
        faults.append(f"{shared} bytes of shared memory; a block has at most {target.shared_block}")
    narrow = case.dtype == "float32"
    if case.operation == "paged_prefill" and target.family == "sm_90" and not narrow and not wgmma:
        faults.append("no wgmma instruction")
    if result["temp"] > 0.2 * case.num_pages * case.page_size * case.kv_heads * case.head_dim:
        if case.operation in ("rotate_and_write", "write_kv_quantized"):
            faults.append(f"{result['temp'] >> 20} MiB of temporaries: pages were copied")
    matrix = f", {wgmma} wgmma" if wgmma else f", {mma} mma" if mma else ""
    # The plan does not know the shared memory of a Mosaic kernel, which asks for it when it starts.
    memory = "" if case.backend == "mosaic" else f", {shared / 1024:.0f} KiB shared"
    found = f"{registers} registers{memory}{matrix}, {len(result['launches'])} launches"
    return Row(target.name, f"{case.backend} {case.name}", found, faults)


def sizes_of(program: Program) -> traffic.Sizes:
    """What the count of bytes needs to know."""
    names = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    return traffic.Sizes(program.slots, program.context, program.layers, *(LLAMA[name] for name in names))


def per_layer(launches: list[dict[str, Any]]) -> float:
    """Launches from one layer's write to the next one's, on average."""
    at = [i for i, launch in enumerate(launches) if launch["name"] == "rotate_and_write"]
    return (at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else float("nan")


def judge_program(program: Program, target: Target, result: dict[str, Any]) -> Row:
    """Aliasing, temporaries, copies, loops, launches and bytes."""
    if "error" in result:
        return Row(target.name, program.name, "", [result["error"]])
    faults, module, kv = [], hlo.parse(result["hlo"]), result["kv_bytes"]
    if result["alias"] < kv:
        faults.append(f"{result['alias'] >> 20} of {kv >> 20} MiB KV aliased; all must be")
    if result["temp"] > TEMPORARY * kv:
        faults.append(
            f"{result['temp'] >> 20} MiB of temporaries; at most {TEMPORARY:.0%} of {kv >> 20} MiB KV"
        )
    if copies := traffic.copies_of(module, tuple(result["pool"])):
        faults.append(f"{len(copies)} arrays as large as a layer's pages are made: {copies[0]}")
    for width_in, width_out in sizes_of(program).layer_widths:
        if copies := traffic.copies_of(module, (width_in, width_out)):
            faults.append(f"{len(copies)} copies of weights [{width_in}, {width_out}]: {copies[0]}")
    every = [i for c in module.computations.values() for i in c.instructions]
    loops = [i for i in module.entry.instructions if i.opcode == "while"]
    if [loop.trip_count for loop in loops] != [program.steps]:
        faults.append(
            f"trip counts of the loops at the top: {[i.trip_count for i in loops]}, not {program.steps}"
        )
    for opcode in ("conditional", "sort"):
        if any(i.opcode == opcode for i in every):
            faults.append(f"the program has a {opcode}")
    if any("callback" in i.target for i in every):
        faults.append("the program calls the host")
    steps = [launch for launch in result["launches"] if launch["depth"] and launch["kind"] != "kWhile"]
    layer, limit = per_layer(result["launches"]), LAUNCHES["mixed" if program.chunk else "decode"]
    if not layer <= limit:
        faults.append(f"{layer:.1f} launches per layer; at most {limit}")
    found = f"{layer:.1f} launches per layer, {len(steps)} per step, {result['temp'] >> 20} MiB temporary"
    if not program.chunk:
        sizes = sizes_of(program)
        moved = traffic.step_traffic(module, sizes)
        ratio = moved.total / sizes.least
        found += f", {moved.total / 1e9:.2f} GB per step = {ratio:.3f} of the least"
        if ratio > BYTES:
            faults.append(f"{ratio:.3f} times the least bytes; at most {BYTES}. Largest: {moved.largest}")
    return Row(target.name, program.name, found, faults)


def run_batch(jobs: list[tuple[Target, Any]], environment: dict[str, str]) -> list[dict[str, Any]]:
    """Results of a worker process. What it did not come to is an error with its last words."""
    done = subprocess.run(
        [sys.executable, "-m", "aot.worker"], input=pickle.dumps(jobs), capture_output=True, env=environment
    )
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    results = [json.loads(line) for line in lines]
    words = " ".join(done.stderr.decode(errors="replace").split())[-300:]
    missing = {"error": f"the compiling process ended with {done.returncode}: {words}"}
    return results + [missing] * (len(jobs) - len(results))


def batches(jobs: list[tuple[Target, Any]]) -> Iterator[list[tuple[Target, Any]]]:
    """Jobs of one GPU together; each program and each Mosaic kernel by itself, the longest first."""
    alone = [job for job in jobs if isinstance(job[1], Program) or job[1].backend == "mosaic"]
    yield from ([job] for job in sorted(alone, key=lambda job: isinstance(job[1], KernelCase)))
    for target in TARGETS.values():
        mine = [job for job in jobs if job[0] == target and job not in alone]
        yield from (mine[i : i + BATCH] for i in range(0, len(mine), BATCH))


def environment(packages: Path) -> dict[str, str]:
    """For workers: jax on the CPU, with the CUDA compiler beside it."""
    paths = [str(ROOT / "scripts"), str(ROOT), str(packages)]
    tools = packages / "nvidia" / "cu13" / "bin"
    return {
        **{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def judge(target: Target, job: KernelCase | Program, result: dict[str, Any]) -> Row:
    """A result as a row; what cannot be read is a fault too."""
    try:
        if isinstance(job, Program):
            return judge_program(job, target, result)
        return judge_kernel(job, target, result)
    except Exception as error:
        return Row(target.name, job.name, "", [f"{type(error).__name__}: {error}"])


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if nothing is at fault, 77 if nothing could be checked."""
    parser = argparse.ArgumentParser(prog="scripts/aot_check", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="a few kernels and one round of four layers")
    parser.add_argument("--only", default="", help="jobs whose GPU or name contains this text")
    parser.add_argument("--json", type=Path, help="write everything that was found to this file")
    parser.add_argument(
        "--packages", type=Path, help="folder with the CUDA compiler; default: .aot/, filled if need be"
    )
    options = parser.parse_args(arguments)
    jobs: list[tuple[Target, Any]] = [(TARGETS["h200"], program) for program in programs(options.fast)]
    jobs += kernel_jobs(options.fast)
    jobs = [
        j
        for j in jobs
        if options.only.lower() in f"{j[0].name} {getattr(j[1], 'backend', '')} {j[1].name}".lower()
    ]
    if not jobs:
        parser.error(f"no job's GPU or name contains {options.only!r}")
    packages = options.packages or install(ROOT / ".aot")
    if packages is None:
        return SKIPPED
    start, rows, kept = time.perf_counter(), [], []
    parts = list(batches(jobs))
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        done = pool.map(lambda part: run_batch(part, environment(packages)), parts)
        for part, results in zip(parts, done, strict=True):
            for (target, job), result in zip(part, results, strict=True):
                row = judge(target, job, result)
                rows.append(row)
                kept.append({**dataclasses.asdict(row), **{k: v for k, v in result.items() if k != "hlo"}})
                mark = "FAIL" if row.faults else "ok"
                print(f"{mark:4} {row.target.removeprefix('NVIDIA ')[:18]:18} {row.job}\n       {row.found}")
                for fault in row.faults:
                    print(f"       > {fault}")
                sys.stdout.flush()
    bad = sum(bool(row.faults) for row in rows)
    print(f"{len(rows)} compiled, {bad} at fault, {time.perf_counter() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

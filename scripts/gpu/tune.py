"""Tries kernel configurations on this card and prints rows for pallas_kernels/tuning.py. Run as scripts/tune_kernels.

    scripts/tune_kernels                                   # everything: about a minute for each shape and backend
    scripts/tune_kernels --operation decode --backend triton --seconds 20
    scripts/tune_kernels --dry-run                         # on a CPU, kernels interpreted: proves this script

A walk from the kernel's own choice: each number of its configuration is doubled and halved (stages: one more, one less)
while that helps by more than the noise. What does not compile or run is passed over. The winner must give the
reference's answer before it is printed. Each shape and backend is a process of its own, so a crash costs one row.

A row holds for every context, and the best number of splits does not: it is said in the row's comment beside what the
kernel chooses, for whoever improves that choice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from job import Job

SCRIPT = "scripts/tune_kernels"
GAIN = 0.02  # a change must save this share of the time: less is noise
STAGES = "stages"  # numbers whose names hold this go up and down by one
SPLITS = "splits"  # belongs to the context, not into the table


def loads(dry_run: bool) -> list[Any]:
    """The shapes to tune for, those of one kind by rising rows."""
    from inputs import Case
    from speed import DRY, Load

    if dry_run:
        return list(DRY)
    found = []
    for heads, kv_heads, dim, kv in (
        (32, 8, 128, ""),
        (32, 8, 128, "int8"),
        (32, 4, 128, ""),
        (24, 8, 64, ""),
    ):
        case = Case(heads, kv_heads, dim, 16, kv_dtype=kv)
        for slots, context in ((1, 8192), (16, 4096), (64, 2048), (256, 1024)):
            found.append(Load(f"decode {slots} x {context}, {case}", case, slots, context))
        for rows, context in ((256, 4096), (2048, 2048)):
            found.append(Load(f"prefill {rows} at {context}, {case}", case, 1, context, rows=rows))
    return found


def neighbours(config: Any) -> Iterator[Any]:
    """Configurations in which one number is a step away."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        near = (value + 1, value - 1) if STAGES in field.name else (value * 2, value // 2)
        for other in near:
            if other >= 1:
                yield dataclasses.replace(config, **{field.name: other})


def walk(
    start: Any, measure: Callable[[Any], float | None], left: Callable[[], float]
) -> tuple[Any, float | None, int]:
    """The best configuration that steps from ``start`` lead to, its seconds (None: even the first failed), and tries.

    ``measure`` gives seconds, or None for what does not run. ``left`` gives the seconds left.
    """
    best, seconds = start, measure(start)
    tried, moved = {start}, seconds is not None
    while moved and left() > 0:
        moved = False
        for config in neighbours(best):
            if config in tried or left() <= 0:
                continue
            tried.add(config)
            found = measure(config)
            if found is not None and seconds is not None and found < (1 - GAIN) * seconds:
                best, seconds, moved = config, found, True
                break
    return best, seconds, len(tried)


def differing(config: Any, default: Any) -> dict[str, Any]:
    """Fields of ``config`` that are not as in ``default``."""
    values = dataclasses.asdict(default)
    return {name: value for name, value in dataclasses.asdict(config).items() if value != values[name]}


def verified(backend: str, load: Any, config: Any, interpret: bool) -> str | None:
    """What is wrong with the answers under ``config``, or None."""
    import numpy as np
    from kernels import BOUNDS, PROBLEMS, compile_kernel, error_of, expected

    problem = PROBLEMS[load.operation](load.case, 0, min(400, load.context))
    compiled = compile_kernel(backend, load.operation, load.case, problem, config, interpret=interpret)
    error = error_of(
        np.asarray(compiled(problem.args, problem.scales)),
        expected(load.operation, load.case, problem),
        problem.dead,
    )
    bound = BOUNDS[load.case.dtype]
    return None if error <= bound else f"error {error:.2e} is above {bound:.2e}"


def tune_one(number: int, backend: str, seconds: float, dry_run: bool) -> dict[str, Any]:
    """Tunes one backend for one load, in this process. The result is a dict for JSON."""
    from facts import the_device
    from kernels import kernel, kernel_default
    from speed import prepare

    load = loads(dry_run)[number]
    with tempfile.TemporaryDirectory() as folder:
        job = Job("tune", backend, Path(folder) / "rows", seconds, dry_run)
        device = the_device(job)
        bench = prepare(load, device, dry_run=dry_run)
        refusal = kernel(backend, load.operation)[1](bench.shape)
        if refusal is not None:
            return {"load": load.name, "refused": refusal}
        log: list[dict[str, Any]] = []

        def measure(config: Any) -> float | None:
            try:
                timing = bench.time(backend, config, interpret=dry_run, repeats=3)
            except Exception as error:  # too much shared memory, a size that a kernel does not take
                log.append({"config": repr(config), "failed": str(error).strip()[:200]})
                return None
            log.append(
                {"config": repr(config), "microseconds": 1e6 * timing.seconds, "spread": timing.spread}
            )
            return timing.seconds

        default = kernel_default(backend, load.operation, bench.shape)
        best, found, tries = walk(default, measure, job.left)
        result = {"load": load.name, "tries": log, "count": tries}
        if found is None:
            return {**result, "failed": "the kernel's own configuration does not run: " + log[0]["failed"]}
        wrong = verified(backend, load, best, dry_run)
        if wrong is not None:
            return {**result, "failed": f"{best}: {wrong}"}
        card = "a dry run on a CPU" if dry_run else device.device_kind
        shape, changed = bench.shape, differing(best, default)
        if SPLITS in changed:
            result["splits"] = f"best with {changed.pop(SPLITS)} splits, the kernel chooses {default.splits}"
        key = {
            "operation": f"paged_{load.operation}",
            "backend": backend,
            "config": changed,
            "source": f"{card}, {time.strftime('%Y-%m-%d')}, {SCRIPT}",
            "family": shape.family,
            "head_dim": 1 << (shape.head_dim - 1).bit_length(),
            "group": shape.group,
            "kv_itemsize": bench.k_pages.dtype.itemsize,
            "rows": shape.rows,
        }
        first = log[0]["microseconds"]
        return {**result, "row": key, "microseconds": 1e6 * found, "default_microseconds": first}


def table_rows(results: list[dict[str, Any]]) -> list[str]:
    """Lines for the table, by kind and rising rows. The last of each kind has no limit of rows."""
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        if "row" in result:
            row = result["row"]
            names = ("operation", "backend", "family", "head_dim", "group", "kv_itemsize")
            kinds.setdefault(tuple(row[name] for name in names), []).append(result)
    lines = []
    for members in kinds.values():
        members.sort(key=lambda result: result["row"]["rows"])
        for number, result in enumerate(members):
            row = {**result["row"], "rows": None if number == len(members) - 1 else result["row"]["rows"]}
            text = ", ".join(
                f"{name}={json.dumps(value)}" for name, value in row.items() if value is not None
            )
            first, best = result["default_microseconds"], result["microseconds"]
            said = f"{best:.0f} µs, untuned {first:.0f} µs: {result['load']}"
            said += f"; {result['splits']}" if "splits" in result else ""
            lines.append(f"    Row({text}),  # {said}")
    return lines


def run_child(number: int, backend: str, args: argparse.Namespace) -> dict[str, Any]:
    """One load in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(number), backend]
    command += ["--seconds", str(args.seconds), *(["--dry-run"] if args.dry_run else [])]
    name = loads(args.dry_run)[number].name
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.seconds + 120)
    except subprocess.TimeoutExpired:
        return {"load": name, "failed": "ended: it hangs"}
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        return {"load": name, "failed": f"exit code {done.returncode}: {' '.join(lines[-1:])[:200]}"}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tune_kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operation", choices=("decode", "prefill"), help="default: both")
    parser.add_argument("--backend", choices=("triton", "mosaic"), help="default: both")
    parser.add_argument(
        "--seconds", type=float, default=45, help="for each shape and backend (default: %(default)g)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of everything that was tried")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, kernels interpreted, tiny shapes")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)  # number of the load, backend
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.child:
        number, backend = args.child
        print(json.dumps(tune_one(int(number), backend, args.seconds, args.dry_run)))
        return 0
    results = []
    for number, load in enumerate(loads(args.dry_run)):
        for backend in ("triton", "mosaic"):
            if args.backend in (None, backend) and args.operation in (None, load.operation):
                result = run_child(number, backend, args)
                results.append({"backend": backend, **result})
                said = result.get("failed") or result.get("refused")
                said = said or f"{result['microseconds']:.0f} µs after {result['count']} tries"
                print(f"{backend} {load.name}: {said}", file=sys.stderr, flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    lines = table_rows(results)
    print("\n".join(lines) if lines else "nothing was measured")
    return 1 if not lines or any("failed" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

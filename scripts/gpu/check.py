"""Checks and measures jaxsched on one GPU in at most six minutes, without a network. Run as scripts/gpu_check.

    scripts/gpu_check                        # everything, table on stdout, rows in gpu_check_out/
    scripts/gpu_check --only facts,speed     # some sections
    scripts/gpu_check --dry-run              # on a CPU: kernels interpreted, tiny shapes; proves this script

    facts    the card, its copy bandwidth and matrix rate
    kernels  every kernel against the float32 reference, unused pages full of NaN
    speed    attention against the card's own rates, with targets
    rounds   whole rounds of an 8B-shaped model: scan and dispatch, CUDA graphs, idle time, compile times
    answers  greedy tokens of a real model (or a toy) equal to those of a CPU

Each section is one or more processes with a time budget: what crashes or hangs costs its own rows only. Exit code: 0 if
every check passed, 1 if one failed (with --strict also for a missed target), 2 for wrong arguments or no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from job import NO_GPU, Job, read_rows
from table import failures, missed, render

GRACE = 10.0  # seconds that a process may exceed its budget before it is ended
TOTAL = 360.0  # seconds


@dataclasses.dataclass(frozen=True)
class Part:
    """One process. ``seconds`` is its budget; what earlier parts leave over is not added."""

    section: str
    name: str
    seconds: float
    xla_flags: str = ""
    platform: str = ""  # JAX_PLATFORMS


GRAPHS = {
    "default": "",
    "off": "--xla_gpu_enable_command_buffer=",
    "+while": "--xla_gpu_enable_command_buffer=+WHILE",
    "+while unrolled": "--xla_gpu_enable_command_buffer=+WHILE --xla_gpu_command_buffer_unroll_loops=true",
}
# In the order in which they run: checks come first, what can be cut short comes last.
PARTS = (
    Part("facts", "", 30),
    Part("kernels", "triton", 60),
    Part("kernels", "mosaic", 40),
    Part("kernels", "write", 25),
    Part("answers", "cpu", 30, platform="cpu"),
    Part("answers", "device", 40),
    Part("speed", "triton", 40),
    Part("speed", "mosaic", 35),
    Part("rounds", "", 100),
    *(Part("rounds", f"graphs {name}", 18, xla_flags=flags) for name, flags in GRAPHS.items()),
)
SECTIONS = tuple(dict.fromkeys(part.section for part in PARTS))


def child_environment(part: Part, dry_run: bool, cache: str) -> dict[str, str]:
    """Environment of a part's process. All share one compilation cache, which keeps autotuning the same, too."""
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "TF_CPP_MIN_LOG_LEVEL": "2"}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    if env.get("JAX_PLATFORMS") and "cpu" not in env["JAX_PLATFORMS"]:
        env["JAX_PLATFORMS"] += ",cpu"  # the reference runs there
    platform = "cpu" if dry_run else part.platform
    if platform:
        env["JAX_PLATFORMS"] = platform
    if part.xla_flags:
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {part.xla_flags}".strip()
    return env


def run_part(part: Part, args: argparse.Namespace, rows: Path, cache: str, seconds: float) -> int:
    """Runs one part in its own process. Returns its exit code; a part that breaks leaves a failed row."""
    job = Job(part.section, part.name, rows, seconds, args.dry_run, args.model)
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part.section, part.name, str(seconds)]
    command += ["--rows", str(rows), *(["--dry-run"] if args.dry_run else [])]
    command += ["--model", args.model] if args.model else []
    log = rows.with_name(f"{part.section}-{part.name or 'all'}.log".replace(" ", "-").replace("+", ""))
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=child_environment(part, args.dry_run, cache),
            start_new_session=True,  # ended as a whole, with what it has started
        )
        try:
            code = process.wait(timeout=seconds + GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            job.emit("process", ok=False, note=f"ended after {seconds + GRACE:.0f} s; see {log.name}")
            return 1
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if code not in (0, NO_GPU):
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        note = f"exit code {code}: {' '.join(last)[:200]}; see {log.name}"
        if part.xla_flags:  # this jax may not know the flag: no fault of jaxsched
            job.left_out("process", note)
        else:
            job.emit("process", ok=False, note=note)
    return code


def run_all(args: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    """Runs the chosen parts one after the other; returns their rows."""
    rows = out / "rows.jsonl"
    rows.unlink(missing_ok=True)
    start = time.monotonic()
    chosen = [part for part in PARTS if part.section in args.sections]
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as cache:
        for part in chosen:
            left = args.seconds - (time.monotonic() - start)
            label = f"{part.section} {part.name}".strip()
            why = "no time left" if left < min(15.0, part.seconds) else ""
            if args.dry_run and part.xla_flags:
                why = "its flags are for a GPU"
            if why:
                Job(part.section, part.name, rows, 0).left_out("all of it", why)
                continue
            begin = time.monotonic()
            code = run_part(part, args, rows, cache, min(part.seconds * args.scale, left))
            print(f"{label}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
            if code == NO_GPU:
                break
    found = read_rows(rows)
    seconds = time.monotonic() - start
    report = {"date": time.strftime("%Y-%m-%d"), "seconds": seconds, "dry_run": args.dry_run, "rows": found}
    (out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return found


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown section {', '.join(unknown)}; known: {', '.join(SECTIONS)}"
        )
    return names


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=_sections, metavar="A,B", default=SECTIONS, help="run only these sections"
    )
    parser.add_argument("--skip", type=_sections, metavar="A,B", default=(), help="leave these sections out")
    default = os.environ.get("OUT") or "gpu_check_out"
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(default),
        metavar="DIR",
        help="folder for rows and logs; $OUT, else gpu_check_out",
    )
    parser.add_argument("--seconds", type=float, default=TOTAL, help="for everything (default: %(default)g)")
    parser.add_argument(
        "--model", help="checkpoint for the answers; default: SmolLM2 if installed, else a toy"
    )
    parser.add_argument("--strict", action="store_true", help="a missed target fails, too")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, kernels interpreted, tiny shapes")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)  # section, part, seconds: run it here
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.sections = [name for name in args.only if name not in args.skip]
    # A larger total stretches every budget; a smaller one leaves out what comes last.
    args.scale = max(1.0, args.seconds / TOTAL)
    return args


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.part:
        section, name, seconds = args.part
        job = Job(section, name, args.rows, float(seconds), args.dry_run, args.model)
        importlib.import_module(section).run(job)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    rows = run_all(args, args.out)
    if args.dry_run:
        print("Dry run on a CPU: the rates below say nothing.\n")
    print(render(rows))
    failed, below = failures(rows), missed(rows)
    checks = sum("ok" in row for row in rows)
    print(
        f"\n{checks - len(failed)} of {checks} checks passed, {len(below)} targets missed; all rows: ", end=""
    )
    print(args.out / "gpu_check.json")
    if any(row["name"] == "device" and row.get("ok") is False for row in rows):
        return 2
    return 1 if failed or (args.strict and below) else 0


if __name__ == "__main__":
    sys.exit(main())

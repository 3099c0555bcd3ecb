"""How scripts/bench_modes.py shows its numbers: the columns, who is best, tables, and what the numbers depend on."""

import dataclasses
import math
import os
import platform
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxsched import __version__

NEAR = 0.03  # as good as the best


@dataclasses.dataclass(frozen=True)
class Column:
    """``better``: 1 more is, -1 less is, 0 neither. Percentages are compared in points, not as ratios."""

    key: str
    label: str
    better: int = 0
    digits: int = 1
    percent: bool = False


COLUMNS = (
    Column("output_rate", "output tokens/s", 1),
    Column("total_rate", "total tokens/s", 1),
    Column("itl_p50", "inter-token P50, ms", -1, 2),
    Column("itl_p90", "inter-token P90, ms", -1, 2),
    Column("itl_p99", "inter-token P99, ms", -1, 2),
    Column("gap_p99", "gap between pieces P99, ms", -1, 2),
    Column("ttft_p50", "first token P50, ms", -1),
    Column("ttft_p99", "first token P99, ms", -1),
    Column("wasted", "wasted decode tokens, %", -1, 2, percent=True),
    Column("idle", "device idle, %", -1, 2, percent=True),
    Column("host_per_token", "host µs per token", -1),
    Column("host_per_round", "host µs per round", 0, 0),
    Column("steps_per_round", "steps per round", 0, 2),
    Column("tokens_per_round", "tokens per round"),
)


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Of each number over the repeats."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def verdict(column: Column, values: Mapping[str, float]) -> str:
    """How the last mode stands: "best", "within 3 %", "no", or "" where neither more nor less is better."""
    if not column.better:
        return ""
    *others, last = (column.better * value for value in values.values())
    best = max(others, default=last)
    if not math.isfinite(last) or not math.isfinite(best):
        return "no number"
    if last >= best:
        return "best"
    room = 100 * NEAR if column.percent else NEAR * abs(best)
    return f"within {100 * NEAR:g} %" if best - last <= room else "no"


def tables(numbers: Mapping[str, Mapping[str, float]]) -> list[tuple[str, list[list[str]]]]:
    """Title and cells of the two tables: the numbers, and their ratios to the first mode's."""
    names = list(numbers)
    head, first = ["", *names, f"{names[-1]} is"], numbers[names[0]]
    values, ratios = [head], [head[:-1]]
    for column in COLUMNS:
        row = {name: numbers[name][column.key] for name in names}
        cells = [f"{value:.{column.digits}f}" for value in row.values()]
        values.append([column.label, *cells, verdict(column, row)])
        if not column.percent:
            base = first[column.key]
            ratios.append([column.label, *(f"{v / base:.2f}" if base else "-" for v in row.values())])
    return [("medians of the runs", values), (f"ratios to {names[0]}", ratios)]


def show(title: str, rows: list[list[str]]) -> None:
    """Prints a table with rich where that is installed, else as columns of text."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        print(f"\n{title}")
        for row in rows:
            rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            print("  ".join([row[0].ljust(widths[0]), *rest]).rstrip())
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row, style="red" if row[-1] == "no" else None)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def environment() -> dict[str, Any]:
    """What the numbers depend on beside the settings."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "jaxsched": __version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": f"{device.platform}: {device.device_kind}",
        "platform": platform.platform(),
        "cores": cores,
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "command": sys.argv,
    }

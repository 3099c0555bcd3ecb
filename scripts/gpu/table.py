"""Turns the rows of a run into one short table, and into the exit code."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def failures(rows: list[Row]) -> list[Row]:
    """Checks that did not pass, sections that broke included."""
    return [row for row in rows if row.get("ok") is False]


def missed(rows: list[Row]) -> list[Row]:
    """Measurements below their target."""
    return [row for row in rows if row.get("met") is False]


def title(rows: list[Row]) -> list[str]:
    """Lines that say on what the run was made."""
    for row in rows:
        about = row.get("about")
        if about:
            smi, versions = about["nvidia_smi"], about["versions"]
            memory = about["memory_bytes"]
            return [
                f"{about['name']} ({about['family'] or 'no GPU'}), driver {smi.get('driver_version', 'unknown')}, "
                f"{'memory unknown' if memory is None else f'{memory / 2**30:.0f} GiB for jax'}",
                ", ".join(f"{name} {version}" for name, version in versions.items()),
            ]
    return []


def render(rows: list[Row]) -> str:
    """The whole report as text."""
    lines = title(rows)
    checks = [row for row in rows if "ok" in row]
    if checks:
        lines += ["", "Checks", *_columns(_check_lines(checks))]
    for section in dict.fromkeys(row["section"] for row in rows):
        mine = [row for row in rows if row["section"] == section]
        measured = [row for row in mine if "value" in row and "executor" not in row]
        if measured:
            lines += ["", f"Measured: {section}", *_columns([_measured(row) for row in measured])]
        lines += _rounds([row for row in mine if "executor" in row])
        lines += _compiling([row for row in mine if "compiled" in row])
    out = [row for row in rows if "left_out" in row]
    if out:
        lines += ["", "Left out", *_columns(_left_out_lines(out))]
    return "\n".join(lines)


def _check_lines(checks: list[Row]) -> list[list[str]]:
    """One line per group of checks, then each failure."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in checks:
        key = (row["section"], row["part"], str(row.get("group", row["name"])))
        groups.setdefault(key, []).append(row)
    lines = []
    for (section, part, name), members in groups.items():
        passed = sum(row["ok"] for row in members)
        errors = [row["error"] / row["bound"] for row in members if row.get("bound")]
        worst = f"worst error {100 * max(errors):.0f} % of its bound" if errors else ""
        verdict = "pass" if passed == len(members) else "FAIL"
        notes = [worst] if worst else [members[0].get("note", "")[:90]]
        lines.append([verdict, f"{section} {part}".strip(), name, f"{passed}/{len(members)}", *notes])
    for row in failures(checks):
        place = f"{row['section']} {row['part']}".strip()
        lines.append(["  failed:", place, row["name"], "", row.get("note", "")[:160]])
    return lines


def _measured(row: Row) -> list[str]:
    value, target = row["value"], ""
    if row.get("target"):
        target = f"target {row['target']}: " + ("met" if row["met"] else "missed")
    share = f"{100 * row['share']:.0f} % of {row['of']}" if "share" in row else ""
    spread = f"±{50 * row['spread']:.0f} %" if "spread" in row else ""
    number = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return [row["part"], row["name"], f"{number} {row['unit']}", spread, share, target, row.get("note", "")]


def _rounds(rows: list[Row]) -> list[str]:
    """One line per part, load and executor: ms/step for each N, then what N=1 and the best N are worth.

    Idle is what N=1 takes beyond the best of its load, as a share of its own time.
    """
    if not rows:
        return []
    steps = sorted({row["n"] for row in rows})
    head = [
        "",
        "slots x context",
        "executor",
        *(f"N={n}" for n in steps),
        "tokens/s",
        "of copy",
        "idle at N=1",
    ]
    lines, groups = [head], dict.fromkeys((row["part"], row["load"], row["executor"]) for row in rows)
    for part, load, executor in groups:
        same = [row for row in rows if (row["part"], row["load"]) == (part, load)]
        mine = {row["n"]: row for row in same if row["executor"] == executor}
        best, quickest = (min(group, key=lambda row: row["ms_per_step"]) for group in (mine.values(), same))
        times = [f"{mine[n]['ms_per_step']:.2f}" if n in mine else "" for n in steps]
        share = f"{100 * best['share']:.0f} %" if "share" in best else ""
        idle = f"{100 * (1 - quickest['ms_per_step'] / mine[1]['ms_per_step']):.0f} %" if 1 in mine else ""
        layers = f"{load}, {best['layers']} layers"
        lines.append([part, layers, executor, *times, f"{best['value']:.0f}", share, idle])
    return ["", "Rounds, ms/step", *_columns(lines)]


def _compiling(rows: list[Row]) -> list[str]:
    """One line for all compile times."""
    if not rows:
        return []
    count, seconds = sum(row["programs"] for row in rows), sum(row["compiled"] for row in rows)
    alone = [row["compiled"] for row in rows if row["programs"] == 1]
    text = f"  {count} programs compiled in {seconds:.0f} s, some at a time, from an empty cache"
    return [text + (f"; one alone in {alone[0]:.0f} s" if alone else "")]


def _left_out_lines(rows: list[Row]) -> list[list[str]]:
    """Reasons, each with what it concerns; long lists are counted, the JSON file has them all."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        by_reason.setdefault((f"{row['section']} {row['part']}".strip(), row["left_out"]), []).append(
            row["name"]
        )
    lines = []
    for (place, reason), names in by_reason.items():
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append([place, listed, reason])
    return lines


def _columns(lines: list[list[str]]) -> list[str]:
    """Lines padded so that columns stand below each other; columns that are empty everywhere are dropped."""
    if not lines:
        return []
    count = max(map(len, lines))
    full = [line + [""] * (count - len(line)) for line in lines]
    kept = [c for c in range(count) if any(line[c] for line in full)]
    widths = {c: max(len(line[c]) for line in full) for c in kept}
    return ["  " + "  ".join(line[c].ljust(widths[c]) for c in kept).rstrip() for line in full]

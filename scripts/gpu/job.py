"""What a section's process is given: where rows go, how much time is left, what the card was measured to do.

A row is one line of JSON. Rows leave at once, so that a section that is killed keeps what it has found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NO_GPU = 3  # exit code of a section that needs a GPU and has none


@dataclasses.dataclass
class Job:
    """One section, or a part of one, in a process of its own."""

    section: str
    part: str  # "triton", "mosaic", ... ; "" = all of the section
    rows: Path  # JSON lines of the whole run
    seconds: float  # for this process, its imports included
    dry_run: bool = False
    model: str | None = None  # checkpoint for the answers
    start: float = dataclasses.field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds until this process should be done."""
        return self.seconds - (time.monotonic() - self.start)

    def emit(self, name: str, **fields: Any) -> None:
        """Appends a row. ``ok`` True or False makes it a check, ``value`` and ``unit`` a measurement."""
        row = {"section": self.section, "part": self.part, "name": name, **fields}
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def left_out(self, name: str, why: str) -> None:
        """A row for what was not done."""
        self.emit(name, left_out=why)

    def enough(self, name: str, seconds: float) -> bool:
        """Whether ``seconds`` are left; if not, a row says so."""
        if self.left() < seconds:
            self.left_out(name, f"no time: needs about {seconds:.0f} s, {max(0, self.left()):.0f} s are left")
            return False
        return True

    @contextlib.contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """An exception inside becomes a failed check and the section goes on."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}".strip()
            self.emit(name, ok=False, note=text[:400], trace=traceback.format_exc()[-4000:])

    def fact(self, name: str) -> float | None:
        """A value that an earlier section measured."""
        values = [row["value"] for row in read_rows(self.rows) if row["name"] == name and "value" in row]
        return values[-1] if values else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows of a run so far."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]

"""Rounds to a file: a picture or a trace, by the file's name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .record import RoundRecord
from .timeline import draw_timeline
from .trace import write_trace

TRACE, PICTURES = ".json", (".png", ".svg", ".pdf")


def check_timeline_path(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a name that does not say what to make, FileNotFoundError for a folder that is not there."""
    suffix, folder = Path(path).suffix.lower(), Path(path).absolute().parent
    if suffix not in (TRACE, *PICTURES):
        raise ValueError(
            f"a timeline cannot be written to {str(path)!r}; end the name with {TRACE} for a trace (Perfetto), or with "
            f"{', '.join(PICTURES)} for a picture"
        )
    if not folder.is_dir():
        raise FileNotFoundError(f"a timeline cannot be written to {str(path)!r}: there is no folder {folder}")


def save_timeline(
    rounds: Iterable[RoundRecord], path: str | os.PathLike[str], *, limit_s: float | None = None
) -> None:
    """Draws rounds, or writes their trace where ``path`` ends in .json. ``limit_s``: only the last so many seconds.

    Raises what ``check_timeline_path`` raises, ValueError when there are no rounds, ImportError that names the extra.
    """
    check_timeline_path(path)
    rounds = list(rounds)
    if rounds and limit_s is not None:
        rounds = [record for record in rounds if record.time >= rounds[-1].time - limit_s]
    if Path(path).suffix.lower() == TRACE:
        write_trace(rounds, path)
    else:
        draw_timeline(rounds, path)

"""A picture of rounds: slots over time. Needs the extra ``plot`` (matplotlib)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .record import DECODE, PREFILL, RoundRecord
from .spans import WASTED, Span, end_of, idle_of, spans_of, start_of, steps_of, timed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every kind of colour blindness. Waste is hatched.
COLOURS = {PREFILL: "#0072B2", DECODE: "#E69F00", WASTED: "#FFFFFF"}
WASTED_COLOUR = "#8B1A1A"
IDLE_COLOUR = "#BDBDBD"
LABELS = {PREFILL: "prefill", DECODE: "decode", WASTED: "wasted: sampled nothing"}
TEXT_COLOURS = {PREFILL: "white", DECODE: "black"}
WIDTH = 14.0  # inches
ROW = 0.28  # inches per slot, as long as the picture stays below MAX_ROWS inches
MAX_ROWS, MIN_ROWS = 9.0, 1.4
STRIP = 1.5  # inches
MARGINS = 1.5, 1.5  # inches right and left of the rows, and above and below rows and strip
MAX_NAMED = 24  # rounds whose sizes are written above them
LEGEND: dict[str, Any] = {"ncols": 4, "frameon": False}
FLOOR = 0.7  # where the axis of tokens per step begins
MAX_LINED = 48  # rounds up to which lines have their full width
LETTER = 0.075  # inches that a letter of a request id takes


def draw_timeline(
    records: Iterable[RoundRecord],
    path: str | os.PathLike[str] | None = None,
    *,
    ax: Axes | None = None,
    title: str = "What each slot did",
    limit_s: float | None = None,
) -> Figure:
    """Draws one row per slot over time, and below it the tokens of each step; saves it where ``path`` is given.

    Above each round stand its steps, mixed + decode. With ``ax`` the rows are drawn there, without the strip and the
    requests' ids. ``limit_s``: only so many seconds from the first round. Raises ValueError when no record has device
    times, ImportError that names the extra when matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("a timeline needs matplotlib; pip install 'jaxsched[plot]'") from error
    rounds = timed(records, "a timeline")
    origin = start_of(rounds[0])
    if limit_s is not None:
        rounds = [record for record in rounds if start_of(record) < origin + limit_s] or rounds[:1]
    spans = [span for record in rounds for span in spans_of(record)]
    slots = 1 + max((span.slot for span in spans), default=0)
    stop = max(end_of(record) for record in rounds) - origin
    length = (stop if limit_s is None else min(stop, limit_s)) or 1e-3
    strip = None
    if ax is None:
        rows = min(MAX_ROWS, max(MIN_ROWS, ROW * slots))
        figure: Any = Figure(figsize=(WIDTH, rows + STRIP + MARGINS[1]), layout="constrained")
        FigureCanvasAgg(figure)
        ax, strip = figure.subplots(2, 1, sharex=True, height_ratios=(rows, STRIP))
        if rows / slots > 0.7 * ROW:
            _name_requests(ax, spans, origin, (WIDTH - MARGINS[0]) / length)
    else:
        figure = ax.figure
    _draw_rows(ax, rounds, spans, origin, alone=strip is not None)
    ax.set_title(title, loc="left", parse_math=False, pad=20 if len(rounds) <= MAX_NAMED else 8)
    ax.set(xlim=(0, 1e3 * length), ylim=(slots - 0.5, -0.5), ylabel="slot")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    bottom = ax
    if strip is not None:
        _draw_strip(strip, rounds, origin)
        ax.tick_params(labelbottom=False)
        bottom = strip
    bottom.set_xlabel("milliseconds")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _draw_rows(ax: Any, rounds: list[RoundRecord], spans: list[Span], origin: float, *, alone: bool) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    handles = []
    for kind, colour in COLOURS.items():
        boxes = [
            _rectangle(span.start, span.end, span.slot - 0.42, span.slot + 0.42, origin)
            for span in spans
            if span.kind == kind
        ]
        style: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": _line(0.6, rounds)}
        if kind == WASTED:
            few = len(rounds) <= MAX_LINED  # hatching takes long, and is not seen on small pieces
            style |= {"edgecolor": WASTED_COLOUR, "hatch": "//////"} if few else {"facecolor": WASTED_COLOUR}
        ax.add_collection(PolyCollection(boxes, label=kind, zorder=2, **style), autolim=False)
        handles.append(Patch(label=LABELS[kind], **style))
    ends = [start_of(rounds[0]), *map(end_of, rounds)]
    idle = [times for record, before in zip(rounds, ends, strict=False) for times in idle_of(record, before)]
    stripes = [_rectangle(*times, 0, 1, origin) for times in idle]
    whole = ax.get_xaxis_transform()  # heights as fractions of the axes
    shade = PolyCollection(stripes, label="idle", facecolor=IDLE_COLOUR, zorder=1, transform=whole)
    ax.add_collection(shade, autolim=False)
    _draw_starts(ax, rounds, origin, 0.7)
    handles.append(Patch(label="device waits for the host", color=IDLE_COLOUR))
    if len(rounds) <= MAX_NAMED:
        _name_rounds(ax, rounds, origin)
    if alone:
        pad = 1.6 if len(rounds) <= MAX_NAMED else 0.3
        ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=pad, **LEGEND)
    else:  # there may be no room above
        ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize="small", **LEGEND)


def _line(width: float, rounds: list[RoundRecord]) -> float:
    """The width of a line between pieces, less when there are many, so that the lines do not hide the pieces."""
    return width * min(1.0, MAX_LINED / len(rounds))


def _rectangle(start: float, end: float, low: float, high: float, origin: float) -> list[tuple[float, float]]:
    left, right = 1e3 * (start - origin), 1e3 * (end - origin)
    return [(left, low), (right, low), (right, high), (left, high)]


def _draw_starts(ax: Any, rounds: list[RoundRecord], origin: float, width: float) -> None:
    starts = [1e3 * (start_of(record) - origin) for record in rounds]
    style = {"colors": "black", "linewidths": _line(width, rounds), "zorder": 3}
    ax.vlines(starts, 0, 1, label="rounds", transform=ax.get_xaxis_transform(), **style)


def _name_rounds(ax: Any, rounds: list[RoundRecord], origin: float) -> None:
    """Writes above each round how many steps it has, and how many of them are mixed."""
    style: dict[str, Any] = {"fontsize": 8, "textcoords": "offset points", "annotation_clip": True}
    ax.annotate("steps", (0, 1), xycoords="axes fraction", xytext=(-6, 3), ha="right", **style)
    for record in rounds:
        start, end = (1e3 * (time - origin) for time in (start_of(record), end_of(record)))
        label = f"{record.mixed}+{record.steps - record.mixed}" if record.mixed else f"{record.steps}"
        place = ((start + end) / 2, 1)
        ax.annotate(label, place, xycoords=("data", "axes fraction"), xytext=(0, 3), ha="center", **style)


def _name_requests(ax: Any, spans: list[Span], origin: float, inches: float) -> None:
    """Writes a request's id where it begins in a slot, if it fits; ``inches`` are those of a second."""
    last: dict[int, str] = {}
    for span in spans:
        label = span.request_id if span.request_id.isascii() else ascii(span.request_id)[1:-1]
        if span.kind == WASTED:
            continue
        fits = LETTER * (len(label) + 1) <= (span.end - span.start) * inches
        if last.get(span.slot) != span.request_id and fits:
            last[span.slot] = span.request_id
            place = (1e3 * (span.start - origin), span.slot)
            style = {"color": TEXT_COLOURS[span.kind], "fontsize": 7, "va": "center", "zorder": 4}
            offset = {"xytext": (3, 0), "textcoords": "offset points", "annotation_clip": True}
            ax.annotate(label, place, parse_math=False, **style, **offset)


def _draw_strip(ax: Any, rounds: list[RoundRecord], origin: float) -> None:
    """Tokens of each step on a logarithmic axis: prompt tokens as bars, sampling decode rows as lines over them."""
    from matplotlib.collections import LineCollection, PolyCollection

    bars, lines, most = [], [], 1
    for record in rounds:
        prompt, sampled = record.tokens_per_step()
        for step in steps_of(record):
            read, decoded = prompt[step.index], sampled[step.index]
            most = max(most, read, decoded)
            if read:
                bars.append(_rectangle(step.start, step.end, FLOOR, read, origin))
            if decoded:
                lines.append(_rectangle(step.start, step.end, decoded, decoded, origin)[:2])
    style: dict[str, Any] = {
        "facecolor": COLOURS[PREFILL],
        "edgecolor": "white",
        "linewidth": _line(0.6, rounds),
    }
    ax.add_collection(PolyCollection(bars, label="prompt", **style), autolim=False)
    ax.add_collection(
        LineCollection(lines, colors=COLOURS[DECODE], linewidths=2.5, label="decode"), autolim=False
    )
    ax.set(yscale="log", ylim=(FLOOR, most * 2), ylabel="tokens per step")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.grid(axis="y", linewidth=0.3)
    _draw_starts(ax, rounds, origin, 0.4)

"""The picture of rounds: what is drawn where."""

import itertools
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from jaxsched.metrics import RoundRecord, Segment, Work, draw_timeline
from jaxsched.metrics.timeline import COLOURS


def pieces(ax: Any, label: str) -> list[tuple[float, float, float, float]]:
    """Left, right, lowest and highest of each rectangle of a kind, rounded."""
    (collection,) = [c for c in ax.collections if c.get_label() == label]
    boxes = [path.get_extents() for path in collection.get_paths()]
    return sorted(tuple(round(float(v), 3) for v in (b.x0, b.x1, b.y0, b.y1)) for b in boxes)  # type: ignore[misc]


def test_every_piece_of_work_is_drawn(rounds: list[RoundRecord]) -> None:
    rows, strip = draw_timeline(rounds).axes
    assert pieces(rows, "prefill") == [(0.0, 8.0, -0.42, 0.42), (4.0, 8.0, 0.58, 1.42)]
    assert pieces(rows, "decode") == [
        (0.0, 8.0, 1.58, 2.42),
        (8.0, 12.0, -0.42, 0.42),
        (8.0, 12.0, 0.58, 1.42),
        (14.0, 16.0, -0.42, 0.42),
    ]
    assert pieces(rows, "wasted") == [(8.0, 12.0, 1.58, 2.42), (14.0, 16.0, 1.58, 2.42)]
    assert pieces(rows, "idle") == [(12.0, 14.0, 0.0, 1.0)]
    assert pieces(rows, "rounds") == [(0.0, 0.0, 0.0, 1.0), (14.0, 14.0, 0.0, 1.0)]
    assert rows.get_xlim() == pytest.approx((0.0, 16.0)) and rows.get_ylim() == (2.5, -0.5)
    assert pieces(strip, "prompt") == [(0.0, 4.0, 0.7, 46.0), (4.0, 8.0, 0.7, 54.0)]
    assert [p[:3] for p in pieces(strip, "decode")] == [
        *((0.0, 4.0, 1.0), (4.0, 8.0, 3.0), (8.0, 10.0, 2.0), (10.0, 12.0, 2.0)),
        *((14.0, 15.0, 1.0), (15.0, 16.0, 1.0)),
    ]


def test_texts(rounds: list[RoundRecord]) -> None:
    rows, strip = draw_timeline(rounds, title="$a_1").axes
    texts = [text.get_text() for text in rows.texts]
    assert {"steps", "2+2", "2", "a", "c", "\\xe9"} == set(texts) and texts.count("a") == 1
    assert rows.get_title(loc="left") == "$a_1"
    assert (rows.get_ylabel(), strip.get_ylabel()) == ("slot", "tokens per step")
    assert (rows.get_xlabel(), strip.get_xlabel()) == ("", "milliseconds")
    labels = [text.get_text() for text in rows.get_legend().get_texts()]
    assert labels == ["prefill", "decode", "wasted: sampled nothing", "device waits for the host"]


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize(("slots", "inches"), [(1, 1.4), (10, 2.8), (200, 9.0)])
def test_the_file_has_the_size_of_the_figure(tmp_path: Path, slots: int, inches: float) -> None:
    work = [Work(slots - 1, "a", "decode", 0, 2, 2)]
    plain = {"time": 0.0, "steps": 2, "mixed": 0, "chunk": 0, "slots": slots, "running": 1, "waiting": 0}
    record = RoundRecord(
        round=0,
        **plain,  # type: ignore[arg-type]
        **{"live": 1, "prefill_tokens": 0, "cached_tokens": 0},
        segments=[Segment(0, 2, 0, slots, 0.0, 1.0)],
        work=work,
    )
    path = tmp_path / "t.png"
    draw_timeline([record], path)
    assert png_size(path) == (1680, round((inches + 3.0) * 120))


def test_other_formats(tmp_path: Path, rounds: list[RoundRecord]) -> None:
    draw_timeline(rounds, str(tmp_path / "t.svg"))
    assert "<svg" in (tmp_path / "t.svg").read_text(encoding="utf-8")


def test_into_given_axes(rounds: list[RoundRecord]) -> None:
    figure = Figure()
    ax = figure.subplots()
    assert draw_timeline(rounds, ax=ax) is figure
    assert figure.axes == [ax] and len(pieces(ax, "decode")) == 4
    assert ax.get_xlabel() == "milliseconds"


@pytest.mark.parametrize(
    ("limit", "right", "decode"), [(0.0135, 12.0, 3), (0.015, 15.0, 4), (9.0, 16.0, 4), (0.001, 1.0, 3)]
)
def test_limit(rounds: list[RoundRecord], limit: float, right: float, decode: int) -> None:
    rows = draw_timeline(rounds, limit_s=limit).axes[0]
    assert rows.get_xlim() == pytest.approx((0.0, right)) and len(pieces(rows, "decode")) == decode


def test_order_of_records_does_not_matter(rounds: list[RoundRecord]) -> None:
    rows, turned = draw_timeline(rounds).axes[0], draw_timeline(iter(rounds[::-1])).axes[0]
    assert pieces(rows, "decode") == pieces(turned, "decode")


def test_many_rounds(tmp_path: Path, rounds: list[RoundRecord]) -> None:
    many = []
    for number in range(100):
        shifted = [s._replace(start=s.start + number, end=s.end + number) for s in rounds[0].segments]
        line = RoundRecord.from_json(rounds[0].to_json())
        line.round, line.segments = number, shifted
        many.append(line)
    rows = draw_timeline(many, tmp_path / "t.png").axes[0]
    assert (len(pieces(rows, "prefill")), len(pieces(rows, "wasted"))) == (200, 100)
    assert "2+2" not in [text.get_text() for text in rows.texts]


def test_nothing_to_draw(rounds: list[RoundRecord]) -> None:
    rounds[0].segments = []
    assert len(pieces(draw_timeline(rounds).axes[0], "decode")) == 1  # rounds in flight are left out
    for records in ([], rounds[:1]):
        with pytest.raises(ValueError, match="no round to put into a timeline"):
            draw_timeline(records)


def test_colours_can_be_told_apart() -> None:
    def luminance(colour: str) -> float:
        return sum(
            w * int(to_hex(colour)[i : i + 2], 16)
            for w, i in zip((0.2126, 0.7152, 0.0722), (1, 3, 5), strict=True)
        )

    lights = sorted(luminance(colour) for colour in COLOURS.values())
    assert min(b - a for a, b in itertools.pairwise(lights)) > 50  # also without any colour


def test_no_pyplot(rounds: list[RoundRecord]) -> None:
    draw_timeline(rounds)
    assert "matplotlib.pyplot" not in sys.modules


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, rounds: list[RoundRecord]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxsched\[plot\]'"):
        draw_timeline(rounds)

"""scripts/bench_modes.py: its arithmetic, its driver, and a small run of the whole."""

import importlib
import itertools
import json
import math
import random
import statistics
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from harness import assert_idle

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,396,109\n"
)
SHAREGPT = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n"


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))


bench, parts, report = script("bench_modes"), script("bench_load"), script("bench_report")


@pytest.fixture(scope="module")
def engine() -> Any:
    settings = {"max_model_len": 128, "max_num_seqs": 4, "num_scheduler_steps": 2, "prefill_chunk_size": 32}
    return parts.make_engine(parts.toy_model(num_layers=1), settings)


# -- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "tokens", "raw"),
    [
        ([], [], []),
        ([(1.0, 4)], [], []),  # the first piece has no gap, whatever its size
        ([(1.0, 1), (3.0, 1)], [2.0], [2.0]),
        ([(1.0, 3), (3.0, 4), (4.0, 1)], [0.5, 0.5, 0.5, 0.5, 1.0], [2.0, 1.0]),
    ],
)
def test_gaps(pieces: list, tokens: list, raw: list) -> None:
    assert parts.token_gaps(pieces) == tokens
    assert parts.piece_gaps(pieces) == raw


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3.0, 1.0, 2.0], 50, 2.0), ([0.0, 10.0], 90, 9.0), ([5.0], 99, 5.0), ([0.0] * 99 + [1.0], 99, 0.01)],
)
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    assert parts.percentile(values, percent) == pytest.approx(expected)


def test_percentile_of_nothing() -> None:
    assert math.isnan(parts.percentile([], 50))


def test_arrivals() -> None:
    times = parts.arrivals(random.Random(1), 4000, 5.0)
    assert times == sorted(times) == parts.arrivals(random.Random(1), 4000, 5.0)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)  # as of an exponential distribution
    assert parts.arrivals(random.Random(1), 3, math.inf) == [0.0, 0.0, 0.0]


def test_chat_lengths() -> None:
    prompts, outputs = zip(*parts.chat_lengths(random.Random(2), 4000), strict=True)
    assert statistics.median(prompts) == pytest.approx(757, rel=0.1)
    assert statistics.median(outputs) == pytest.approx(151, rel=0.1)
    assert min(*prompts, *outputs) >= 1


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        (AZURE, [(374, 44), (396, 109)]),
        ("\ufeff" + AZURE, [(374, 44), (396, 109)]),
        (SHAREGPT + "10,0,10,0\n", [(74, 918)]),  # without output there is nothing to measure
    ],
)
def test_read_lengths(tmp_path: Path, text: str, lengths: list) -> None:
    (tmp_path / "lengths.csv").write_text(text, encoding="utf-8")
    assert parts.read_lengths(tmp_path / "lengths.csv") == lengths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", r"columns \['a', 'b'\]; it needs ContextTokens and GeneratedTokens or num_prefill"),
        ("", "columns None"),
        (AZURE + "x,y,1\n", r"lengths.csv, line 4: ContextTokens and GeneratedTokens must be integers"),
        (AZURE + "x\n", "line 4"),
        ("ContextTokens,GeneratedTokens\n", "no request"),
    ],
)
def test_read_lengths_refuses(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "lengths.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        parts.read_lengths(tmp_path / "lengths.csv")


@pytest.mark.parametrize(
    ("lengths", "scale", "expected", "cut"),
    [
        ([(100, 20), (40, 8)], 0.5, [(50, 10), (20, 4)], 0),
        ([(1, 1)], 0.1, [(1, 1)], 0),
        ([(400, 30)], 0.5, [(85, 15)], 1),  # prompt is lost, not output,
        ([(10, 300)], 1.0, [(10, 50)], 1),  # which gets half of the room
    ],
)
def test_scaled(lengths: list, scale: float, expected: list, cut: int) -> None:
    assert parts.scaled(lengths, scale, 100) == (expected, cut)


def test_choose_keeps_order() -> None:
    lengths = [(i, i) for i in range(1, 6)]
    chosen = parts.choose(lengths, 12, random.Random(3))
    assert len(chosen) == 12 and all(b[0] == a[0] % 5 + 1 for a, b in itertools.pairwise(chosen))


RATE, LATENCY, SHARE, NEUTRAL = (
    report.Column("x", "x", better, percent=percent)
    for better, percent in ((1, False), (-1, False), (-1, True), (0, False))
)


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        (RATE, (100, 90, 101), "best"),
        (RATE, (100, 90, 97.5), "within 3 %"),
        (RATE, (100, 90, 96.5), "no"),
        (LATENCY, (10.0, 12.0, 10.0), "best"),
        (LATENCY, (10.0, 12.0, 10.2), "within 3 %"),
        (LATENCY, (10.0, 12.0, 10.4), "no"),
        (SHARE, (0.0, 1.0, 2.5), "within 3 %"),  # points: the ratio to 0 would be infinite
        (SHARE, (0.0, 1.0, 3.5), "no"),
        (NEUTRAL, (1.0, 2.0, 9.0), ""),
        (LATENCY, (10.0, 12.0, math.nan), "no number"),
        (LATENCY, (10.0,), "best"),
    ],
)
def test_verdict(column: Any, values: tuple, expected: str) -> None:
    assert report.verdict(column, dict(zip("abc", values, strict=False))) == expected


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {
        mode: dict.fromkeys((c.key for c in report.COLUMNS), value)
        for mode, value in (("a", 2.0), ("b", 3.0))
    }
    numbers["a"]["host_per_round"] = 0.0
    (_, values), (title, ratios) = report.tables(numbers)
    assert title == "ratios to a" and values[0] == ["", "a", "b", "b is"] and ratios[0] == ["", "a", "b"]
    assert values[1] == ["output tokens/s", "2.0", "3.0", "best"] and ratios[1] == [
        "output tokens/s",
        "1.00",
        "1.50",
    ]
    assert ["host µs per round", "-", "-"] in ratios
    report.show(title, ratios)
    assert "1.50" in capsys.readouterr().out


def test_tables_without_rich(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    report.show("a title", [["", "one"], ["speed", "1.0"]])
    assert capsys.readouterr().out == "\na title\n       one\nspeed  1.0\n"


def test_medians() -> None:
    assert report.medians([{"x": 1.0}, {"x": 9.0}, {"x": 2.0}]) == {"x": 2.0}


def test_summarize() -> None:
    host = {"plan": 10.0, "dispatch": 20.0, "wait": 500.0, "commit": 6.0, "emit": 4.0}
    rounds = [
        SimpleNamespace(
            steps=4, decode_tokens=6, wasted={"stopped": 2}, host_us=host, device_us=900.0, idle_us=100.0
        ),
        SimpleNamespace(steps=2, decode_tokens=2, wasted={}, host_us=host, device_us=900.0, idle_us=0.0),
    ]
    streams = [
        parts.Stream(10.0, 30, True, [(10.5, 1), (11.0, 2), (12.0, 1)]),
        parts.Stream(10.0, 8, False, [(11.5, 4)]),  # the background's first token does not count
        parts.Stream(10.0, 99, False),  # not begun
    ]
    run = parts.Run(10.0, 12.0, streams, rounds)
    assert parts.summarize(run) == pytest.approx({
        "seconds": 2.0, "output_rate": 4.0, "total_rate": 23.0,
        "itl_p50": 250.0, "itl_p90": 850.0, "itl_p99": 985.0, "gap_p99": 995.0,
        "ttft_p50": 500.0, "ttft_p99": 500.0, "wasted": 20.0, "idle": 100 / 19,
        "host_per_token": 10.0, "host_per_round": 40.0, "steps_per_round": 3.0, "tokens_per_round": 4.0,
    })  # fmt: skip


def test_window() -> None:
    requests = [parts.Request(float(i), [0] * size, 1) for i, size in enumerate((9, 1, 1, 7, 1, 1, 1, 8))]
    run = parts.Run(0.0, 9.0, [], [SimpleNamespace(steps=10, device_us=1e6)])
    assert bench.window({"plain": run}, parts.Load(requests), 2.0) == (2.5, 2.0)
    assert bench.window({"plain": run}, parts.Load(requests), None) == pytest.approx((1.4, 6.4))
    assert bench.window({"plain": run}, parts.Load(requests[:1]), 2.0) == (0.0, 2.0)


@pytest.mark.parametrize("option", ["--rate", "--scale", "--repeat", "--num-prompts"])
def test_bad_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--model", "toy", option, "0"])
    assert f"{option} is 0" in capsys.readouterr().err


# -- the driver ------------------------------------------------------------------------------------------------------


def test_driver(engine: Any) -> None:
    rng = random.Random(0)
    load = parts.make_load([(20, 5), (40, 1), (3, 8)], 200.0, rng, engine.model.vocab_size)
    run = parts.Driver(engine, load).run()
    assert [stream.prompt_tokens for stream in run.streams] == [20, 40, 3]
    assert [sum(n for _, n in stream.pieces) for stream in run.streams] == [5, 1, 8]
    wanted = [run.start + request.at for request in load.requests]
    assert [stream.arrival for stream in run.streams] == wanted, "counts from when it should have come"
    assert all(stream.pieces[0][0] >= stream.arrival for stream in run.streams)
    assert run.end == max(stream.pieces[-1][0] for stream in run.streams)
    assert sum(record.decode_tokens for record in run.rounds) == 14
    assert engine.before_plan is None and engine.round_log is None
    assert_idle(engine)


def test_background_streams_go_on(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "STREAM_OUTPUT", 8)
    load = parts.Load([parts.Request(0.0, [20] * 30, 40)], background=2)
    run = parts.Driver(engine, load).run()
    timed = [stream for stream in run.streams if stream.timed]
    assert len(timed) == 1 and sum(n for _, n in timed[0].pieces) == 40
    assert len(run.streams) > 5, "a stream that ends is followed by another"
    assert all(when <= run.end for stream in run.streams for when, _ in stream.pieces)
    assert_idle(engine)


# -- the whole -------------------------------------------------------------------------------------------------------

SMALL = ["--max-model-len", "64", "--max-num-seqs", "4", "--scale", "0.02"]


@pytest.mark.slow
def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = tmp_path / "pictures", tmp_path / "numbers.json"
    counts = ["--num-prompts", "6", "--warmup", "4", "--chunk", "32", "--steps", "4", "--repeat", "2"]
    files = ["--timelines", str(folder), "--json", str(file), "--window", "5"]
    bench.main(["--model", "toy", *SMALL, *counts, *files])
    out = capsys.readouterr().out
    for text in (
        "6 requests at",
        "multi-step",
        "adaptive is",
        "ratios to plain",
        *(c.label for c in report.COLUMNS),
    ):
        assert text in out
    result = json.loads(file.read_text(encoding="utf-8"))
    assert list(result["medians"]) == ["plain", "chunked", "multi-step", "adaptive"]
    assert all(len(runs) == 2 for runs in result["runs"].values())
    outputs = {
        round(run["output_rate"] * run["seconds"]) for runs in result["runs"].values() for run in runs[:1]
    }
    assert len(outputs) == 1, "all modes had the same load"
    assert result["engines"]["plain"]["prefill_chunk_size"] is None and result["environment"]["jax"]
    names = {f"{mode}{end}" for mode in result["medians"] for end in (".png", ".trace.json")} | {"modes.png"}
    assert {path.name for path in folder.iterdir()} == names


def test_waste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n5,20\n9,1\n3,33\n", encoding="utf-8")
    small = ["--max-model-len", "64", "--max-num-seqs", "4", "--num-prompts", "6", "--warmup", "2"]
    bench.main(["--waste", "--lengths", str(lengths), *small])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["streamed", "not streamed"]
    assert all("6 requests of 18 output tokens" in line for line in lines)

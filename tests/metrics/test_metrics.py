"""What EngineMetrics counts: exact values of every metric."""

import math
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jaxsched.metrics import Counter, EngineMetrics, Gauge, Histogram, Metric, RoundRecord
from jaxsched.metrics.metrics import COUNTERS, FAMILIES, HELP, HISTOGRAMS, quantile
from jaxsched.metrics.values import Distribution, bound_text, one_two_five


def read(metrics: EngineMetrics, name: str, **labels: str) -> Any:
    """The one metric of this name whose labels include these."""
    found = [
        m
        for m in metrics.snapshot()
        if m.name == f"jaxsched:{name}" and labels.items() <= m.labels.items()  # type: ignore[attr-defined]
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def value(metrics: EngineMetrics, name: str, **labels: str) -> float:
    return read(metrics, name, **labels).value


@pytest.fixture
def fed(rounds: list[RoundRecord]) -> EngineMetrics:
    metrics = EngineMetrics(page_size=8)
    for record in rounds:
        metrics.planned(record)
    for record in rounds:
        metrics.committed(record)
    return metrics


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("rounds", {}, 2),
        ("steps", {}, 6),
        ("mixed_steps", {}, 2),
        ("num_preemptions", {}, 1),
        ("prompt_tokens", {}, 100),
        ("generation_tokens", {}, 10),
        ("wasted_decode_tokens", {"reason": "stopped"}, 2),
        ("wasted_decode_tokens", {"reason": "run_ahead"}, 2),
        ("wasted_decode_tokens", {"reason": "aborted"}, 0),
        ("wasted_decode_tokens", {"reason": "preempted"}, 0),
        ("host_seconds", {"phase": "plan"}, 300e-6),
        ("host_seconds", {"phase": "wait"}, 10e-3),
        ("device_busy_seconds", {}, 14e-3),
        ("device_idle_seconds", {}, 2e-3),
        ("scheduling_seconds_quantile", {"quantile": "0.5"}, 500e-6),
        ("scheduling_seconds_quantile", {"quantile": "0.99"}, 1000e-6),
        ("device_idle_fraction", {}, 2 / 16),
        ("kv_pages_written_per_second", {}, 110 / 8 / 16e-3),
    ],
)
def test_rounds(fed: EngineMetrics, name: str, labels: dict[str, str], expected: float) -> None:
    assert value(fed, name, **labels) == pytest.approx(expected, rel=1e-12)


def test_histograms_of_rounds(fed: EngineMetrics) -> None:
    steps = read(fed, "steps_per_round")
    assert (steps.count, steps.sum) == (2, 6)
    assert steps.buckets == {
        **{"1.0": 0, "2.0": 1, "4.0": 2, "8.0": 2, "16.0": 2, "32.0": 2, "64.0": 2, "128.0": 2, "256.0": 2},
        "+Inf": 2,
    }
    tokens = read(fed, "iteration_tokens_total")  # 46 + 1, 45 + 9 + 3, 2, 2; 1, 1
    assert (tokens.count, tokens.sum) == (6, 110)
    assert [tokens.buckets[b] for b in ("1.0", "8.0", "32.0", "64.0", "+Inf")] == [2, 4, 4, 6, 6]
    scheduling = read(fed, "scheduling_seconds")
    assert (scheduling.count, scheduling.sum) == (2, pytest.approx(1500e-6))
    assert [scheduling.buckets[b] for b in ("0.0002", "0.0005", "0.001")] == [0, 1, 2]


def test_planning_alone_counts_no_tokens(rounds: list[RoundRecord]) -> None:
    metrics = EngineMetrics()
    metrics.planned(rounds[0])
    assert value(metrics, "rounds") == 1
    assert value(metrics, "prompt_tokens") == 0 == value(metrics, "generation_tokens")


def test_unknown_reasons_get_their_own_series(rounds: list[RoundRecord]) -> None:
    metrics = EngineMetrics()
    rounds[0].wasted = {"moonlight": 3}
    metrics.committed(rounds[0])
    assert value(metrics, "wasted_decode_tokens", reason="moonlight") == 3


def request(*times: float | None) -> SimpleNamespace:
    arrival, scheduled, first, finished = times
    return SimpleNamespace(
        arrival=arrival,
        first_scheduled=scheduled,
        first_token=first,
        finished=finished,
        prompt_tokens=100,
        generation_tokens=7,
    )


NAMES = ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time")


@pytest.mark.parametrize(
    ("times", "sums", "inference"),
    [
        ((1.0, 1.5, 3.0, 7.0), (6.0, 0.5, 1.5, 4.0), 5.5),
        ((1.0, 1.5, None, 2.0), (1.0, 0.5, None, None), 0.5),  # aborted while its prompt was read
        ((1.0, None, None, 3.0), (2.0, None, None, None), None),  # aborted in the queue
        ((1.0, None, None, None), (None, None, None, None), None),
        ((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), 0.0),  # a time of 0 is a time
    ],
)
def test_finished_requests(times: Any, sums: Any, inference: float | None) -> None:
    metrics = EngineMetrics()
    metrics.request_finished("length", request(*times))
    for name, expected in zip((*NAMES, "request_inference_time"), (*sums, inference), strict=True):
        histogram = read(metrics, f"{name}_seconds")
        assert (histogram.count, histogram.sum) == ((0, 0.0) if expected is None else (1, expected)), name
    assert value(metrics, "request_success", finished_reason="length") == 1
    assert value(metrics, "request_success", finished_reason="stop") == 0
    assert read(metrics, "request_prompt_tokens").sum == 100
    assert read(metrics, "request_generation_tokens").buckets["10.0"] == 1


def test_time_to_first_token() -> None:
    metrics = EngineMetrics()
    for seconds in (0.0, 0.001, 0.0011, 5000.0):  # on a bound: below it
        metrics.first_token(seconds)
    histogram = read(metrics, "time_to_first_token_seconds")
    assert [histogram.buckets[b] for b in ("0.001", "0.005", "2560.0", "+Inf")] == [2, 3, 3, 4]
    assert histogram.sum == pytest.approx(5000.0021)


def test_a_piece_is_as_many_gaps_as_it_has_tokens() -> None:
    metrics = EngineMetrics()
    metrics.inter_token(0.08, 4)
    metrics.inter_token(0.3, 1)
    metrics.inter_token(9.0, 0)  # a last piece may have no token
    tokens, pieces = (
        read(metrics, "inter_token_latency_seconds"),
        read(metrics, "inter_piece_latency_seconds"),
    )
    assert (tokens.count, tokens.sum) == (5, pytest.approx(0.38))
    assert [tokens.buckets[b] for b in ("0.01", "0.025", "0.2", "0.3")] == [0, 4, 4, 5]
    assert (pieces.count, pieces.sum) == (2, pytest.approx(0.38))
    assert [pieces.buckets[b] for b in ("0.075", "0.1", "0.3")] == [0, 1, 2]


def test_plain_counters() -> None:
    metrics = EngineMetrics()
    metrics.request_arrived()
    metrics.prefix_cache(100, 48)
    metrics.prefix_cache(10, 0)
    assert value(metrics, "requests_received") == 1
    assert (value(metrics, "prefix_cache_queries"), value(metrics, "prefix_cache_hits")) == (110, 48)


NOW = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "rounds_in_flight")
RATES = ("device_idle_fraction", "kv_pages_written_per_second")


def test_gauges_return_to_zero_when_the_engine_is_idle(fed: EngineMetrics, rounds: list[RoundRecord]) -> None:
    fed.set_gauges(running=3, waiting=2, kv_usage=0.25, in_flight=1)
    assert [value(fed, name) for name in NOW] == [3, 2, 0.25, 1]
    fed.set_gauges(running=0, waiting=0, kv_usage=0.0, in_flight=1)
    assert all(value(fed, name) for name in RATES)  # a round is still to come back
    fed.set_gauges(running=0, waiting=0, kv_usage=0.0)
    assert [value(fed, name) for name in (*NOW, *RATES)] == [0] * 6
    assert value(fed, "scheduling_seconds_quantile", quantile="0.5") > 0  # not a "now"
    fed.committed(rounds[1])  # rates begin anew
    assert value(fed, "device_idle_fraction") == 0.5


def test_windows_forget(rounds: list[RoundRecord]) -> None:
    metrics = EngineMetrics()
    metrics.committed(rounds[0])
    for _ in range(1024):
        metrics.committed(rounds[1])
    assert value(metrics, "scheduling_seconds_quantile", quantile="0.99") == pytest.approx(500e-6)
    assert value(metrics, "device_idle_fraction") == 0.5
    assert value(metrics, "device_busy_seconds") == pytest.approx(12e-3 + 1024 * 2e-3)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, 0.0),
        ([7.0], 0.5, 7.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([1.0, 2.0, 3.0], 0.5, 2.0),
        ([float(i) for i in range(1, 101)], 0.99, 99.0),
        ([float(i) for i in range(1, 101)], 0.9, 90.0),
        ([1.0, 2.0], 1.0, 2.0),
    ],
)
def test_quantile(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == expected


def test_every_metric_is_there_from_the_start_with_help_and_labels() -> None:
    metrics = EngineMetrics(labels={"model_name": "toy"}, max_model_len=2048)
    snapshot = metrics.snapshot()
    names = [m.name.removeprefix("jaxsched:") for m in snapshot]
    assert set(names) == set(HELP)
    assert set(HELP) >= {*COUNTERS, *HISTOGRAMS, *(name for name, _, _ in FAMILIES)}
    assert all(m.help.endswith(".") and m.labels["model_name"] == "toy" for m in snapshot)  # type: ignore[attr-defined]
    assert list(dict.fromkeys(names)) == [n for i, n in enumerate(names) if i == 0 or names[i - 1] != n]
    keys = [(m.name, *sorted(m.labels.items())) for m in snapshot]  # type: ignore[attr-defined]
    assert len(keys) == len(set(keys))
    values = [m.value for m in snapshot if isinstance(m, Counter | Gauge)]
    assert values == [0] * len(values)
    prompts = read(metrics, "request_prompt_tokens")
    assert prompts.bounds == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, math.inf)


def test_histograms_are_cumulative(fed: EngineMetrics) -> None:
    for metric in fed.snapshot():
        if isinstance(metric, Histogram):
            assert list(metric.counts) == sorted(metric.counts)
            assert metric.counts[-1] == metric.count == metric.buckets["+Inf"]
            assert list(metric.bounds) == sorted(set(metric.bounds)) and metric.bounds[-1] == math.inf


def test_a_snapshot_does_not_change(fed: EngineMetrics, rounds: list[RoundRecord]) -> None:
    before = fed.snapshot()
    copy = pickle.loads(pickle.dumps(before))
    fed.planned(rounds[0])
    fed.committed(rounds[0])
    assert before == copy != fed.snapshot()


def test_pickle(fed: EngineMetrics, rounds: list[RoundRecord]) -> None:
    other: EngineMetrics = pickle.loads(pickle.dumps(fed))
    assert other.snapshot() == fed.snapshot()
    other.committed(rounds[0])
    assert other.snapshot() != fed.snapshot()


def test_sources_are_asked_at_each_snapshot() -> None:
    metrics = EngineMetrics()
    seen: list[Metric] = [Gauge("jaxsched:extra", "More.", 1.0)]
    metrics.sources.append(lambda: seen)
    assert metrics.snapshot()[-1] == seen[0]
    seen.clear()
    assert not [m for m in metrics.snapshot() if m.name == "jaxsched:extra"]


def test_reading_while_another_thread_feeds(rounds: list[RoundRecord]) -> None:
    metrics, stop = EngineMetrics(), threading.Event()

    def feed() -> None:
        while not stop.is_set():
            metrics.committed(rounds[0])

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        for _ in range(30):
            snapshot = {m.name: m for m in metrics.snapshot()}
            scheduling: Any = snapshot["jaxsched:scheduling_seconds"]
            prompt: Any = snapshot["jaxsched:prompt_tokens"]
            assert prompt.value == 100 * scheduling.count  # all of a round or nothing
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1, 100, (1, 2, 5, 10, 20, 50, 100)),
        (1, 99, (1, 2, 5, 10, 20, 50)),
        (1, 1, (1,)),
        (1e-5, 1e-4, (1e-5, 2e-5, 5e-5, 1e-4)),
        (3, 30, (5, 10, 20)),
    ],
)
def test_one_two_five(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert one_two_five(low, high) == expected


@pytest.mark.parametrize(
    ("bound", "text"), [(1, "1.0"), (0.5, "0.5"), (16384.0, "16384.0"), (math.inf, "+Inf")]
)
def test_bound_text(bound: float, text: str) -> None:
    assert bound_text(bound) == text


def test_distribution() -> None:
    distribution = Distribution((1.0, 10.0))
    distribution.observe(1.0)
    distribution.observe(5.0, times=3)
    distribution.observe(11.0)
    read = distribution.read("d", "D.", {})
    assert (read.counts, read.count, read.sum) == ((1, 4, 5), 5, 27.0)

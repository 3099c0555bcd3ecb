"""Prometheus' text, read back with Prometheus' own parser."""

import sys
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxsched.metrics import Counter, EngineMetrics, Gauge, Histogram, Metric, RoundRecord
from jaxsched.metrics.prometheus import CONTENT_TYPE, registry, text

Sample = tuple[str, tuple[tuple[str, str], ...]]


def parse(exposed: str) -> tuple[dict[str, Any], dict[Sample, float]]:
    families = {family.name: family for family in text_string_to_metric_families(exposed)}
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families.values()
        for sample in family.samples
    }
    return families, samples


@pytest.fixture
def fed(rounds: list[RoundRecord]) -> EngineMetrics:
    metrics = EngineMetrics(labels={"model_name": 'a "toy"\\\n'})
    for record in rounds:
        metrics.planned(record)
        metrics.committed(record)
    metrics.first_token(0.002)
    metrics.inter_token(0.08, 4)
    metrics.set_gauges(running=2, waiting=1, kv_usage=0.5)
    return metrics


def test_everything_comes_back(fed: EngineMetrics) -> None:
    families, samples = parse(text(fed))
    expected: dict[Sample, float] = {}
    kinds = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}
    metric: Any
    for metric in fed.snapshot():
        labels = tuple(sorted(metric.labels.items()))
        assert families[metric.name].type == kinds[type(metric)]
        assert families[metric.name].documentation == metric.help
        if isinstance(metric, Histogram):
            for bound, count in metric.buckets.items():
                expected[metric.name + "_bucket", tuple(sorted((*labels, ("le", bound))))] = count
            expected[metric.name + "_sum", labels] = metric.sum
            expected[metric.name + "_count", labels] = metric.count
        else:
            expected[metric.name + "_total" * isinstance(metric, Counter), labels] = metric.value
    assert samples == expected


@pytest.mark.parametrize(
    "line",
    [
        "jaxsched:num_requests_running 2.0",
        "jaxsched:num_preemptions_total 1.0",
        "jaxsched:prompt_tokens_total 100.0",
        'jaxsched:request_success_total{finished_reason="stop"} 0.0',
        'jaxsched:wasted_decode_tokens_total{reason="run_ahead"} 2.0',
        'jaxsched:inter_token_latency_seconds_bucket{le="0.025"} 4.0',
        'jaxsched:iteration_tokens_total_bucket{le="+Inf"} 6.0',
        "jaxsched:iteration_tokens_total_count 6.0",
    ],
)
def test_names_as_vllm_has_them(fed: EngineMetrics, line: str) -> None:
    fed.labels.clear()
    assert line in text(fed).splitlines()


def test_a_registry_reads_at_each_scrape(fed: EngineMetrics) -> None:
    scraped = registry(fed)
    labels = {"model_name": fed.labels["model_name"]}
    assert scraped.get_sample_value("jaxsched:rounds_total", labels) == 2
    fed.request_arrived()
    assert scraped.get_sample_value("jaxsched:requests_received_total", labels) == 1


def test_registering_does_not_read() -> None:
    class Source:
        def snapshot(self) -> list[Metric]:
            raise AssertionError

    registry(Source())


def test_two_engines_differ_in_their_labels() -> None:
    engines = [EngineMetrics(labels={"engine": str(i)}) for i in range(2)]
    engines[1].request_arrived()
    exposed = text(*engines)
    _, samples = parse(exposed)
    assert samples["jaxsched:requests_received_total", (("engine", "0"),)] == 0
    assert samples["jaxsched:requests_received_total", (("engine", "1"),)] == 1
    assert exposed.count("# TYPE jaxsched:rounds_total counter") == 1


def test_labels_that_only_some_have() -> None:
    class Source:
        def snapshot(self) -> list[Metric]:
            return [Gauge("jaxsched:x", "X.", 1.0), Gauge("jaxsched:x", "X.", 2.0, {"part": "b"})]

    _, samples = parse(text(Source()))
    assert samples == {("jaxsched:x", (("part", ""),)): 1.0, ("jaxsched:x", (("part", "b"),)): 2.0}


def test_content_type() -> None:
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, fed: EngineMetrics) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxsched\[metrics\]'"):
        text(fed)

"""Metrics in Prometheus' format. Needs the extra ``metrics`` (prometheus_client)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from .values import Counter, Histogram, Metric, bound_text

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of ``text``


class Source(Protocol):
    """Something with metrics, such as ``EngineMetrics``."""

    def snapshot(self) -> list[Metric]: ...


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise ImportError(
            "Prometheus' format needs prometheus_client; pip install 'jaxsched[metrics]'"
        ) from error
    return prometheus_client


class _Collector:
    """Translates snapshots at each scrape; it keeps nothing."""

    def __init__(self, sources: tuple[Source, ...]):
        self.sources = sources
        self.core = _client().core

    def describe(self) -> list[Any]:
        return []  # registering must not read the sources

    def collect(self) -> Iterator[Any]:
        families: dict[str, list[Metric]] = {}  # a name may come only once, with all its labels
        for source in self.sources:
            for metric in source.snapshot():
                families.setdefault(metric.name, []).append(metric)
        for name, metrics in families.items():
            yield self._family(name, metrics)

    def _family(self, name: str, metrics: list[Metric]) -> Any:
        first: Any = metrics[0]
        keys = list(dict.fromkeys(key for metric in metrics for key in metric.labels))  # type: ignore[attr-defined]
        core = self.core
        kind = {Counter: core.CounterMetricFamily, Histogram: core.HistogramMetricFamily}
        family = kind.get(type(first), core.GaugeMetricFamily)(name, first.help, labels=keys)
        metric: Any
        for metric in metrics:
            labels = [str(metric.labels.get(key, "")) for key in keys]
            if isinstance(metric, Histogram):
                buckets = [(bound_text(b), c) for b, c in zip(metric.bounds, metric.counts, strict=True)]
                family.add_metric(labels, buckets, metric.sum)
            else:
                family.add_metric(labels, metric.value)
        return family


def registry(*sources: Source) -> CollectorRegistry:
    """A registry of its own that reads the sources at each scrape.

    Sources with metrics of the same names, such as two engines, must differ in their labels. Raises ImportError that
    names the extra when prometheus_client is missing.
    """
    made = _client().CollectorRegistry(auto_describe=False)
    made.register(_Collector(sources))
    return made


def text(*sources: Source) -> str:
    """The sources' metrics now, as Prometheus reads them. Served with ``CONTENT_TYPE``."""
    return _client().generate_latest(registry(*sources)).decode()

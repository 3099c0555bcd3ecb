"""Metrics as values, and the histogram that counts. Read as from vLLM's ``LLM.get_metrics``."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math

Labels = dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One reading. Metrics of the same name differ in their labels."""

    name: str
    help: str


@dataclasses.dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A sum that only grows. Prometheus exposes it as ``name_total``."""

    value: float
    labels: Labels = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float
    labels: Labels = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """How often values of at most each bound were seen. ``counts`` are cumulative; the last bound is infinity."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    count: int
    labels: Labels = dataclasses.field(default_factory=dict)

    @property
    def buckets(self) -> dict[str, int]:
        """Cumulative counts by upper bound, the bounds written as Prometheus does: "0.5", "1.0", "+Inf"."""
        return dict(zip(map(bound_text, self.bounds), self.counts, strict=True))


def bound_text(bound: float) -> str:
    """An upper bound as the value of Prometheus' label ``le``."""
    return "+Inf" if math.isinf(bound) else str(float(bound))


class Distribution:
    """A histogram that is being filled."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds  # ascending, without infinity
        self.counts = [0] * (len(bounds) + 1)  # of each bucket alone
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts ``value``; it belongs to the first bucket whose bound it does not exceed."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def read(self, name: str, help: str, labels: Labels) -> Histogram:
        counts = tuple(itertools.accumulate(self.counts))
        return Histogram(name, help, (*self.bounds, math.inf), counts, self.sum, counts[-1], labels)


def one_two_five(low: float, high: float) -> tuple[float, ...]:
    """Bounds 1, 2, 5 times powers of ten between two numbers, both included."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    bounds = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    return tuple(bound for bound in bounds if low <= bound <= high)

"""What the engine counts, and its readings. Names and bounds as in vLLM where the meaning is the same."""

from __future__ import annotations

import copy
import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from .record import ABORTED, PHASES, PREEMPTED, RUN_AHEAD, STOPPED, RoundRecord
from .values import Counter, Distribution, Gauge, Labels, Metric, one_two_five

PREFIX = "jaxsched:"
WINDOW = 1024  # rounds that quantiles and rates are taken over
QUANTILES = (0.5, 0.9, 0.99)

# Upper bounds in seconds, vLLM's.
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKEN_BOUNDS = (1.0, *(float(1 << bit) for bit in range(3, 15)))
# Ours.
SCHEDULING_BOUNDS = one_two_five(1e-5, 1.0)
STEPS_BOUNDS = tuple(float(1 << bit) for bit in range(9))

HELP = {
    "num_requests_running": "Requests that hold a slot.",
    "num_requests_waiting": "Requests that wait for a slot.",
    "kv_cache_usage_perc": "Share of the KV pages in use; 1 is all of them.",
    "rounds_in_flight": "Rounds dispatched whose tokens were not read yet.",
    "num_preemptions": "Sequences that lost slot and pages and were queued again.",
    "requests_received": "Requests that were queued.",
    "request_success": "Requests that ended, by reason.",
    "prompt_tokens": "Prompt tokens read: those from the prefix cache not counted, those read again counted.",
    "generation_tokens": "Tokens sampled.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "rounds": "Rounds planned.",
    "steps": "Steps planned.",
    "mixed_steps": "Steps planned that also read prompts.",
    "wasted_decode_tokens": "Row-steps planned that sampled nothing, by reason.",
    "host_seconds": "Host time by phase of a round.",
    "device_busy_seconds": "Time the device took for rounds.",
    "device_idle_seconds": "Time the device waited for the host.",
    "time_to_first_token_seconds": "Seconds from arrival until the host saw the first token.",
    "inter_token_latency_seconds": "Seconds per token between pieces: a piece of n tokens counts as n equal gaps.",
    "inter_piece_latency_seconds": "Seconds between pieces, whatever their number of tokens.",
    "e2e_request_latency_seconds": "Seconds from arrival to end.",
    "request_queue_time_seconds": "Seconds from arrival until a slot was given.",
    "request_prefill_time_seconds": "Seconds from the slot to the first token.",
    "request_decode_time_seconds": "Seconds from the first token to the end.",
    "request_inference_time_seconds": "Seconds from the slot to the end.",
    "request_prompt_tokens": "Prompt tokens of a request that ended.",
    "request_generation_tokens": "Tokens generated for a request that ended.",
    "iteration_tokens_total": "Tokens per step, prompt and sampled together.",
    "steps_per_round": "Steps per round.",
    "scheduling_seconds": "Host time per round: plan, dispatch, commit and emit, not the wait for the device.",
    "scheduling_seconds_quantile": f"Quantiles of scheduling_seconds over the latest {WINDOW} rounds.",
    "device_idle_fraction": "Share of the time since the engine was last idle that the device waited for the host.",
    "kv_pages_written_per_second": "KV pages filled per second since the engine was last idle.",
}

COUNTERS = (
    *("num_preemptions", "requests_received", "prompt_tokens", "generation_tokens"),
    *("prefix_cache_queries", "prefix_cache_hits", "rounds", "steps", "mixed_steps"),
    *("device_busy_seconds", "device_idle_seconds"),
)
# Counters with a label: name, label, values that are there from the start.
FAMILIES = (
    ("request_success", "finished_reason", ("stop", "length", "abort", "error")),
    ("wasted_decode_tokens", "reason", (STOPPED, RUN_AHEAD, ABORTED, PREEMPTED)),
    ("host_seconds", "phase", PHASES),
)
# Bounds by name; None: 1, 2, 5 times powers of ten up to max_model_len.
HISTOGRAMS: dict[str, tuple[float, ...] | None] = {
    "time_to_first_token_seconds": FIRST_TOKEN_BOUNDS,
    "inter_token_latency_seconds": TOKEN_GAP_BOUNDS,
    "inter_piece_latency_seconds": TOKEN_GAP_BOUNDS,
    "e2e_request_latency_seconds": REQUEST_BOUNDS,
    "request_queue_time_seconds": REQUEST_BOUNDS,
    "request_prefill_time_seconds": REQUEST_BOUNDS,
    "request_decode_time_seconds": REQUEST_BOUNDS,
    "request_inference_time_seconds": REQUEST_BOUNDS,
    "request_prompt_tokens": None,
    "request_generation_tokens": None,
    "iteration_tokens_total": STEP_TOKEN_BOUNDS,
    "steps_per_round": STEPS_BOUNDS,
    "scheduling_seconds": SCHEDULING_BOUNDS,
}
SCHEDULING = tuple(phase for phase in PHASES if phase != "wait")  # what scheduling_seconds sums


class FinishedRequest(Protocol):
    """What ``request_finished`` reads; times in clock seconds, None for what the request never reached."""

    @property
    def arrival(self) -> float: ...
    @property
    def first_scheduled(self) -> float | None: ...
    @property
    def first_token(self) -> float | None: ...
    @property
    def finished(self) -> float | None: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...


class EngineMetrics:
    """Counters, gauges and histograms of one engine, fed by its thread and read from any.

    ``labels`` are put on every metric. Each of ``sources`` is asked for further metrics at every ``snapshot``.
    """

    def __init__(
        self, *, page_size: int = 16, max_model_len: int = 131072, labels: Mapping[str, str] | None = None
    ):
        self.page_size = page_size
        self.labels: Labels = dict(labels or {})
        self.sources: list[Callable[[], list[Metric]]] = []
        self._lock = threading.RLock()  # reentrant: a signal handler may read
        self._counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._families = {name: (label, dict.fromkeys(known, 0.0)) for name, label, known in FAMILIES}
        self._gauges: dict[str, float] = {}
        tokens = one_two_five(1, max(1, max_model_len))
        self._histograms = {name: Distribution(bounds or tokens) for name, bounds in HISTOGRAMS.items()}
        self._scheduling: deque[float] = deque(maxlen=WINDOW)  # host seconds of the latest rounds
        # Tokens written, seconds busy and seconds idle of the latest rounds since the engine was last idle.
        self._busy: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)
        self.set_gauges(running=0, waiting=0, kv_usage=0.0)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: copy.deepcopy(value) for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    # -- what the engine tells -----------------------------------------------------------------------------------

    def planned(self, record: RoundRecord) -> None:
        """A round was planned and dispatched."""
        with self._lock:
            counters = self._counters
            counters["rounds"] += 1
            counters["steps"] += record.steps
            counters["mixed_steps"] += record.mixed
            counters["num_preemptions"] += record.preempted
            self._histograms["steps_per_round"].observe(record.steps)

    def committed(self, record: RoundRecord) -> None:
        """A round's tokens were read and handed out: the record is complete, its host times included."""
        prompt, sampled = record.tokens_per_step()
        host = record.host_us
        scheduling = sum(host.get(phase, 0.0) for phase in SCHEDULING) / 1e6
        device, idle = record.device_us / 1e6, record.idle_us / 1e6
        with self._lock:
            counters, histograms = self._counters, self._histograms
            counters["prompt_tokens"] += record.prefill_tokens
            counters["generation_tokens"] += record.decode_tokens
            counters["device_busy_seconds"] += device
            counters["device_idle_seconds"] += idle
            self._add("wasted_decode_tokens", record.wasted)
            self._add("host_seconds", {phase: us / 1e6 for phase, us in host.items()})
            histograms["scheduling_seconds"].observe(scheduling)
            step_tokens = histograms["iteration_tokens_total"]
            for tokens in map(operator.add, prompt, sampled):
                step_tokens.observe(tokens)
            self._scheduling.append(scheduling)
            self._busy.append((record.prefill_tokens + record.decode_tokens, device, idle))

    def request_arrived(self) -> None:
        """A request was queued."""
        with self._lock:
            self._counters["requests_received"] += 1

    def first_token(self, seconds: float) -> None:
        """A request's first token came ``seconds`` after its arrival."""
        with self._lock:
            self._histograms["time_to_first_token_seconds"].observe(seconds)

    def inter_token(self, seconds: float, count: int) -> None:
        """A piece of ``count`` tokens came ``seconds`` after the piece before it. A piece of none is not counted."""
        if count < 1:
            return
        with self._lock:
            self._histograms["inter_token_latency_seconds"].observe(seconds / count, count)
            self._histograms["inter_piece_latency_seconds"].observe(seconds)

    def request_finished(self, reason: str, metrics: FinishedRequest) -> None:
        """A request ended for a reason such as "stop". Phases whose beginning or end it never saw are not counted."""
        arrival, scheduled = metrics.arrival, metrics.first_scheduled
        first, finished = metrics.first_token, metrics.finished
        phases = (
            ("e2e_request_latency_seconds", arrival, finished),
            ("request_queue_time_seconds", arrival, scheduled),
            ("request_prefill_time_seconds", scheduled, first),
            ("request_decode_time_seconds", first, finished),
            ("request_inference_time_seconds", scheduled, finished),
        )
        with self._lock:
            self._add("request_success", {reason: 1})
            histograms = self._histograms
            for name, start, end in phases:
                if start is not None and end is not None:
                    histograms[name].observe(end - start)
            histograms["request_prompt_tokens"].observe(metrics.prompt_tokens)
            histograms["request_generation_tokens"].observe(metrics.generation_tokens)

    def prefix_cache(self, queries: int, hits: int) -> None:
        """An admission looked ``queries`` prompt tokens up in the prefix cache and found ``hits``."""
        with self._lock:
            self._counters["prefix_cache_queries"] += queries
            self._counters["prefix_cache_hits"] += hits

    def set_gauges(self, *, running: int, waiting: int, kv_usage: float, in_flight: int = 0) -> None:
        """What is the case now. ``kv_usage`` in 0..1: pages that only the prefix cache keeps do not count.

        With nothing running, waiting or in flight the engine is idle: rates and fractions become 0 and begin anew.
        """
        with self._lock:
            gauges = self._gauges
            gauges["num_requests_running"] = running
            gauges["num_requests_waiting"] = waiting
            gauges["kv_cache_usage_perc"] = kv_usage
            gauges["rounds_in_flight"] = in_flight
            if not (running or waiting or in_flight):
                self._busy.clear()

    def _add(self, name: str, amounts: Mapping[str, float]) -> None:
        values = self._families[name][1]
        for key, amount in amounts.items():
            values[key] = values.get(key, 0) + amount

    # -- readings ------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[Metric]:
        """All metrics as they stand, ``sources`` last. Metrics of one name stand together."""
        with self._lock:
            metrics = self._read()
        for source in self.sources:
            metrics.extend(source())
        return metrics

    def _read(self) -> list[Metric]:
        labels = self.labels
        gauges = {**self._gauges, **self._rates()}
        metrics: list[Metric] = [Gauge(PREFIX + name, HELP[name], v, labels) for name, v in gauges.items()]
        name, latest = "scheduling_seconds_quantile", sorted(self._scheduling)
        for share in QUANTILES:
            value = quantile(latest, share)
            metrics.append(Gauge(PREFIX + name, HELP[name], value, {**labels, "quantile": str(share)}))
        for name, total in self._counters.items():
            metrics.append(Counter(PREFIX + name, HELP[name], total, labels))
        for name, (label, values) in self._families.items():
            for key, total in values.items():
                metrics.append(Counter(PREFIX + name, HELP[name], total, {**labels, label: key}))
        for name, histogram in self._histograms.items():
            metrics.append(histogram.read(PREFIX + name, HELP[name], labels))
        return metrics

    def _rates(self) -> dict[str, float]:
        tokens = sum(row[0] for row in self._busy)
        busy = sum(row[1] for row in self._busy)
        idle = sum(row[2] for row in self._busy)
        seconds = busy + idle
        return {
            "device_idle_fraction": idle / seconds if seconds else 0.0,
            "kv_pages_written_per_second": tokens / self.page_size / seconds if seconds else 0.0,
        }


def quantile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; 0 when there are none."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else 0.0

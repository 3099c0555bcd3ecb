"""What the engine did: round records, metrics, Prometheus, timelines."""

from .metrics import EngineMetrics
from .record import RoundLog, RoundRecord, Segment, Work, read_round_log
from .timeline import draw_timeline
from .trace import write_trace
from .values import Counter, Gauge, Histogram, Metric

__all__ = [
    "Counter",
    "EngineMetrics",
    "Gauge",
    "Histogram",
    "Metric",
    "RoundLog",
    "RoundRecord",
    "Segment",
    "Work",
    "draw_timeline",
    "read_round_log",
    "write_trace",
]

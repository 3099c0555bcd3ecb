"""How busy a GPU is, as the driver sees it. Needs the package nvidia-ml-py; without it there is nothing to read."""

from __future__ import annotations

import os
from typing import Any

from .values import Gauge, Labels, Metric

COMPUTE = "jaxsched:device_compute_busy_fraction"
MEMORY = "jaxsched:device_memory_busy_fraction"
COMPUTE_HELP = "Share of the driver's latest sample period in which a kernel ran."
MEMORY_HELP = "Share of the driver's latest sample period in which device memory was read or written."


class NvmlDevice:
    """Reads one GPU: call it for its metrics, none where the driver does not tell. For ``EngineMetrics.sources``."""

    def __init__(self, device: int | str = 0, labels: Labels | None = None):
        self.device = device  # NVML's index, or a UUID
        self.labels = dict(labels or {})
        self._library: Any = None
        self._handle: Any = None
        self._absent = False

    @classmethod
    def first_visible(cls, labels: Labels | None = None) -> NvmlDevice:
        """The first GPU that CUDA_VISIBLE_DEVICES names, else GPU 0."""
        name = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
        return cls(int(name) if name.isdigit() else name or 0, labels)

    def __reduce__(self) -> tuple[Any, ...]:
        return NvmlDevice, (self.device, self.labels)  # a handle belongs to its process

    def __call__(self) -> list[Metric]:
        if self._absent or not self._open():
            return []
        try:
            rates = self._library.nvmlDeviceGetUtilizationRates(self._handle)
        except self._library.NVMLError:  # not supported, or lost
            return []
        return [
            Gauge(COMPUTE, COMPUTE_HELP, rates.gpu / 100, self.labels),
            Gauge(MEMORY, MEMORY_HELP, rates.memory / 100, self.labels),
        ]

    def _open(self) -> bool:
        if self._handle is not None:
            return True
        try:
            import pynvml
        except ImportError:
            self._absent = True
            return False
        try:
            pynvml.nvmlInit()
            if isinstance(self.device, int):
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(self.device)
            else:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.device)
        except pynvml.NVMLError:  # no driver, no such device
            self._absent = True
            return False
        self._library = pynvml
        return True

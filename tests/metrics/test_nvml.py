"""GPU utilisation, with a driver library made up here."""

import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest

from jaxsched.metrics import EngineMetrics, Gauge
from jaxsched.metrics.nvml import NvmlDevice


class FakeError(Exception):
    pass


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    fake = ModuleType("pynvml")
    fake.NVMLError = FakeError  # type: ignore[attr-defined]
    fake.nvmlInit = lambda: None  # type: ignore[attr-defined]
    fake.nvmlDeviceGetHandleByIndex = lambda index: ("index", index)  # type: ignore[attr-defined]
    fake.nvmlDeviceGetHandleByUUID = lambda uuid: ("uuid", uuid)  # type: ignore[attr-defined]
    fake.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=75, memory=50)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def fail(*args: object) -> None:
    raise FakeError


def test_reads_both(library: ModuleType) -> None:
    compute, memory = NvmlDevice(0, {"model_name": "toy"})()
    assert isinstance(compute, Gauge) and isinstance(memory, Gauge)
    assert (compute.name, compute.value) == ("jaxsched:device_compute_busy_fraction", 0.75)
    assert (memory.name, memory.value) == ("jaxsched:device_memory_busy_fraction", 0.5)
    assert compute.labels == {"model_name": "toy"}


@pytest.mark.parametrize(
    "broken", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUtilizationRates"]
)
def test_no_metric_where_the_driver_does_not_tell(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(library, broken, fail)
    device = NvmlDevice()
    assert device() == device() == []


def test_no_metric_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    metrics = EngineMetrics()
    before = metrics.snapshot()
    metrics.sources.append(NvmlDevice())
    assert metrics.snapshot() == before


@pytest.mark.parametrize(
    ("visible", "device"), [(None, 0), ("", 0), ("3", 3), ("2,1", 2), ("GPU-abc,GPU-def", "GPU-abc")]
)
def test_first_visible(monkeypatch: pytest.MonkeyPatch, visible: str | None, device: int | str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert NvmlDevice.first_visible().device == device


def test_pickles_without_its_handle(library: ModuleType) -> None:
    device = NvmlDevice("GPU-abc")
    assert len(device()) == 2 and device._handle == ("uuid", "GPU-abc")
    other = pickle.loads(pickle.dumps(device))
    assert (other.device, other._handle) == ("GPU-abc", None) and len(other()) == 2

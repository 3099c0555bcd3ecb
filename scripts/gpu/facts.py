"""What this card is, and the two rates that everything else is judged by: copying memory and multiplying matrices."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
from clock import calls_for, time_calls
from job import NO_GPU, Job

COPY = "copy bandwidth"
MATMUL = "matmul bf16"
HOPED = {"bytes": 5e12, "flops": 1e15}  # per second; only sets the length of timed loops
COPY_BYTES = 2 << 30  # far more than any L2
MATMUL_SIZE = 8192


def the_device(job: Job) -> jax.Device:
    """The device that is checked. Ends the process where there is no GPU and this is no dry run."""
    device = jax.local_devices()[0]
    if device.platform == "cpu" and not job.dry_run:
        job.emit("device", ok=False, note="jax finds no GPU here; on a CPU use --dry-run")
        sys.exit(NO_GPU)
    return device


def family(device: jax.Device) -> str | None:
    """The device family as the tuning table names it, such as "sm_90"; None on a CPU."""
    capability = getattr(device, "compute_capability", None)
    return None if capability is None else "sm_" + str(capability).replace(".", "")


def memory_limit(device: jax.Device) -> int | None:
    """Bytes that jax may use on the device, or None where it does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return (stats or {}).get("bytes_limit")


def nvidia_smi() -> dict[str, str]:
    """Name, driver, memory and limits of the first GPU; empty without nvidia-smi."""
    fields = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = done.stdout.strip().splitlines()
    return dict(zip(fields, (v.strip() for v in lines[0].split(",")), strict=False)) if lines else {}


def versions() -> dict[str, str]:
    """Versions of what is timed here."""
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy")
    found: dict[str, str] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(device: jax.Device) -> dict[str, Any]:
    """All that identifies the card and the software."""
    return {
        "name": device.device_kind,
        "family": family(device),
        "memory_bytes": memory_limit(device),
        "platform_version": device.client.platform_version,
        "nvidia_smi": nvidia_smi(),
        "versions": versions(),
    }


def copy_bandwidth(job: Job, device: jax.Device) -> float:
    """GB/s read plus written by one elementwise pass over an array far larger than the L2."""
    size = 1 << 20 if job.dry_run else min(COPY_BYTES, (memory_limit(device) or 16 << 30) // 8)
    x = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
    timing = time_calls(
        lambda x: x * 0.999 + 1e-3, x, calls=calls_for(2 * size / HOPED["bytes"], dry_run=job.dry_run)
    )
    value = 2 * size / timing.seconds / 1e9
    note = f"read + written, elementwise over {size / 2**20:.0f} MiB"
    job.emit(COPY, value=value, unit="GB/s", spread=timing.spread, note=note)
    return value


def matmul_rate(job: Job) -> float:
    """TFLOP/s of a square bfloat16 product of random matrices, float32 accumulation."""
    n = 128 if job.dry_run else MATMUL_SIZE
    keys = jax.random.split(jax.random.key(1))
    x = jax.random.normal(keys[0], (n, n), jnp.bfloat16)
    w = jax.random.normal(keys[1], (n, n), jnp.bfloat16) * n**-0.5  # keeps the products' size
    flops = 2 * n**3
    timing = time_calls(jnp.dot, x, w, calls=calls_for(flops / HOPED["flops"], dry_run=job.dry_run))
    value = flops / timing.seconds / 1e12
    job.emit(MATMUL, value=value, unit="TFLOP/s", spread=timing.spread, note=f"{n}³, random data")
    return value


def rates(job: Job, device: jax.Device) -> tuple[float, float]:
    """Copy bandwidth in GB/s and matmul rate in TFLOP/s, measured now unless an earlier section did."""
    copy, matmul = job.fact(COPY), job.fact(MATMUL)
    return copy or copy_bandwidth(job, device), matmul or matmul_rate(job)


def run(job: Job) -> None:
    """Section "facts"."""
    device = the_device(job)
    job.emit("device", about=describe(device))
    with job.guarded(COPY):
        copy_bandwidth(job, device)
    with job.guarded(MATMUL):
        matmul_rate(job)

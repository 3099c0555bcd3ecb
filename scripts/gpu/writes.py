"""KV writes and the sampling pass against the same operation in plain XLA on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from facts import family
from job import Job

from jaxsched.pallas_kernels import quantized, rotary, write_kv
from jaxsched.pallas_kernels.shapes import AttentionShape
from jaxsched.step import SamplingRows
from jaxsched.step.sampling import filtered_scores

# A product and a sum may be rounded once or twice: the last place, as |got - want| / (1 + |want|).
BOUNDS = {"float32": 1e-6, "bfloat16": 2.0**-7}


def on_cpu(function: Callable[..., Any], *args: Any) -> Any:
    """Leaves of what ``function`` returns on the CPU, as numpy arrays."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.tree.map(np.asarray, jax.jit(function)(*args))


def places(rng: np.random.Generator, pages: int, size: int, runs: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Page and offset of rows of several sequences, each from the start of a page; then two rows that are dropped."""
    order, page, offset = iter(rng.permutation(pages).tolist()), [], []
    for run in runs:
        mine = [next(order) for _ in range(-(-run // size))]
        page += [mine[at // size] for at in range(run)]
        offset += [at % size for at in range(run)]
    page += [pages, pages + 1000]
    offset += [0, size - 1]
    return np.array(page, np.int32), np.array(offset, np.int32)


def written(pages: np.ndarray, page: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Bytes of the rows that a write has put into ``pages``."""
    real = page < len(pages)
    return np.ascontiguousarray(pages[page[real], offset[real]]).view(np.uint8)


def plain(job: Job, dtype: str, rng: np.random.Generator) -> None:
    """The scatter that the engine uses by default: every byte, and nothing else changes."""
    page, offset = places(rng, 30, 16, [40, 7, 16])
    pages = rng.standard_normal((30, 16, 4, 64), np.float32).astype(jnp.dtype(dtype))
    rows = rng.standard_normal((len(page), 4, 64), np.float32)
    want, real = pages.copy(), page < len(pages)
    want[page[real], offset[real]] = rows[real].astype(pages.dtype)
    got = np.asarray(jax.jit(write_kv, donate_argnums=0)(jnp.asarray(pages), rows, page, offset))
    same = bool((got.view(np.uint8) == want.view(np.uint8)).all())
    job.emit(f"write_kv {dtype}", group="write_kv", ok=same, note="bit for bit")


def quantised(job: Job, device: jax.Device, kind: str, rng: np.random.Generator) -> None:
    """Quantising writes, in XLA and in Triton, into pages of garbage, then more rows into the pages just begun."""
    from jaxsched.pallas_kernels.triton import write

    count, size, heads, dim = 30, 16, 4, 64
    refusal = write.write_refusal(
        AttentionShape(9, 9, heads, heads, dim, size, 4, count, "bfloat16", kind, family(device))
    )
    first = places(rng, count, size, [40, 7, 16])
    later = (np.array([first[0][39], first[0][46]], np.int32), np.array([8, 7], np.int32))
    stale = rng.integers(0, 255, (count, size, heads, dim), np.uint8).view(jnp.dtype(kind))
    scales = np.full((count, heads), np.nan, np.float32)
    rows = [rng.standard_normal((len(p), heads, dim), np.float32) for p, _ in (first, later)]
    rows[1] *= 9.0  # scales must grow

    def both(writer: Callable[..., Any]) -> Callable[..., Any]:
        def run(pages: Any, scales: Any, rows: Any) -> Any:
            pages, scales = writer(pages, scales, rows[0], *first)
            return writer(pages, scales, rows[1], *later)

        return run

    want = on_cpu(both(quantized.write_kv_quantized), stale, scales, rows)
    writers = {
        "XLA": quantized.write_kv_quantized,
        "triton": lambda *a: write.write_kv_quantized(*a, interpret=job.dry_run),
    }
    for name, writer in writers.items():
        title = f"write_kv_quantized {kind} {name}"
        if refusal is not None:
            job.left_out(title, f"refused: {refusal}")
            continue
        with job.guarded(title):
            got = jax.tree.map(np.asarray, jax.jit(both(writer))(stale, scales, rows))
            used = np.unique(first[0][first[0] < count])
            same = all((written(got[0], *at) == written(want[0], *at)).all() for at in (first, later))
            same = same and (got[1][used] == want[1][used]).all()
            job.emit(title, group="write_kv_quantized", ok=bool(same), note="bit for bit with XLA on the CPU")


def rotating(job: Job, dtype: str, rng: np.random.Generator) -> None:
    """Rotate and write at once."""
    from jaxsched.pallas_kernels.triton import write

    page, offset = places(rng, 30, 16, [40, 7, 16])
    packed = rng.standard_normal((len(page), 8 + 4, 128), np.float32).astype(jnp.dtype(dtype))
    angles = rng.uniform(0, 7, (len(page), 1, 64)).astype(np.float32)
    pages = [rng.standard_normal((30, 16, 2, 128), np.float32).astype(jnp.dtype(dtype)) for _ in range(2)]
    args = (packed, np.cos(angles), np.sin(angles), *pages, page, offset)
    want = on_cpu(rotary.rotate_and_write, *args)
    got = jax.jit(lambda *a: write.rotate_and_write(*a, interpret=job.dry_run))(*args)
    errors = []
    for mine, theirs in zip(got, want, strict=True):
        a, b = np.asarray(mine).astype(np.float32), theirs.astype(np.float32)
        real = page < 30  # rows that go nowhere are still rotated, but pages must hold only the others
        a, b = (a[real], b[real]) if a.shape[0] == len(page) else (a, b)
        errors.append(float((np.abs(a - b) / (1 + np.abs(b))).max()))
    worst, bound = max(errors), BOUNDS[dtype]
    job.emit(
        f"rotate_and_write {dtype}", group="rotate_and_write", ok=worst <= bound, error=worst, bound=bound
    )


def sampling(job: Job, rng: np.random.Generator) -> None:
    """The kernel of the filters keeps the tokens that the searches in XLA keep on the CPU.

    At the edge of top-p one token may differ: the probabilities are sums in another order, by another exp.
    """
    from jaxsched.pallas_kernels.triton.sample import filter_thresholds

    vocab, ks, ps = (1000 if job.dry_run else 50_000), (0, 1, 20, 500), (1.0, 0.9, 0.5)
    top_k, top_p = (np.array(x) for x in zip(*((k, p) for k in ks for p in ps), strict=True))
    count = len(top_k)
    logits = (3 * rng.standard_normal((count, vocab), np.float32)).astype(np.float32)
    rows: Any = SamplingRows(
        temperature=np.full(count, 0.8, np.float32),
        top_k=top_k.astype(np.int32),
        top_p=top_p.astype(np.float32),
        min_p=np.zeros(count, np.float32),
        seed=np.zeros((count, 2), np.uint32),
    )
    want = np.isfinite(on_cpu(filtered_scores, logits, rows))
    run = jax.jit(lambda *a: filter_thresholds(*a, interpret=job.dry_run))
    best, _, least = jax.tree.map(np.asarray, run(logits, rows.temperature, rows.top_k, rows.top_p))
    kept = logits >= least[:, None]
    differing = (kept != want).sum(-1)
    passed = (best == logits.argmax(-1)).all() and (differing <= np.where(top_p < 1, 1, 0)).all()
    note = f"tokens kept differ by {differing.max()} at most; 1 may at the edge of top-p"
    job.emit(f"filter_thresholds {count} x {vocab}", group="filter_thresholds", ok=bool(passed), note=note)


def run(job: Job, device: jax.Device) -> None:
    """Part "write" of section "kernels"."""
    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16"):
        for check in (plain, rotating):
            with job.guarded(f"{check.__name__} write {dtype}"):
                check(job, dtype, rng)
    for kind in ("int8", "float8_e4m3fn"):
        with job.guarded(f"write_kv_quantized {kind}"):
            quantised(job, device, kind, rng)
    with job.guarded("filter_thresholds"):
        sampling(job, rng)

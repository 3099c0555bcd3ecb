"""Times products with quantised kernels on this machine's CPU, in the shapes of SmolLM2-135M.

    python scripts/bench_quantized.py [--rows 1,32] [--rounds 10] [--scale 1.0]

Each shape is timed over as many kernels as do not fit the caches together, one after the other, as a model reads them;
the ways alternate, and each number is the best round, in milliseconds a product. The last line of a table adds up a
decode step of SmolLM2-135M: its 30 layers and its head. Ways:

* float32: the product with float32 weights
* int8 converted: one scale a column, ``dot(x, kernel.astype(float32)) * scale``
* int8: what ``jaxsched.models.quantized.matmul`` does instead
* W8A8: inputs rounded to int8 too. Faster, but another result: not used, shown for comparison
* int4/64, Q4_1: groups of 64, or of 32 with offsets, dequantised before the product, as ``matmul`` does on a CPU
* partial sums: the same as int4/64 by one product per group, as ``matmul`` does on a GPU
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from jaxsched.host_memory import keep_freed_memory
from jaxsched.models.quantized import KernelFormat, _partial_sums, _row_scale, matmul

LAYERS = 30
SHAPES = {
    "qkv": (576, 960),
    "out": (576, 576),
    "gate_up": (576, 3072),
    "down": (1536, 576),
    "head": (576, 49152),
}
COLD = 100e6  # bytes of float32 weights that are read in turn

Arrays = list[tuple[Any, Any, Any]]
Way = Callable[[Any, Any, Any, Any], Any]


def converted(x: Any, kernel: Any, scale: Any, offset: Any) -> Any:
    return jnp.dot(x, kernel.astype(x.dtype)) * scale


def w8a8(x: Any, kernel: Any, scale: Any, offset: Any) -> Any:
    step = _row_scale(x, 127.0)
    rounded = jnp.round(x / step).astype(jnp.int8)
    return jnp.dot(rounded, kernel, preferred_element_type=jnp.int32).astype(x.dtype) * step * scale


def product(fmt: KernelFormat) -> Way:
    return lambda x, kernel, scale, offset: matmul(x, kernel, scale, offset, fmt)


INT8, INT4, Q4_1 = KernelFormat("int8"), KernelFormat("int4", 64), KernelFormat("int4", 32, offset=True)
WAYS: dict[str, tuple[KernelFormat | None, Way]] = {
    "float32": (None, lambda x, kernel, scale, offset: jnp.dot(x, kernel)),
    "int8 converted": (INT8, converted),
    "int8": (INT8, product(INT8)),
    "W8A8": (INT8, w8a8),
    "int4/64": (INT4, product(INT4)),
    "partial sums": (INT4, _partial_sums),
    "Q4_1": (Q4_1, product(Q4_1)),
}


def make(fmt: KernelFormat | None, shape: tuple[int, int], count: int) -> Arrays:
    """``count`` random kernels with scale and offset."""
    rng = np.random.default_rng(0)
    if fmt is None:
        return [(jnp.asarray(rng.standard_normal(shape, np.float32)), None, None) for _ in range(count)]
    groups = (fmt.groups(shape[0]), shape[1])
    scale = jnp.full(groups, 0.01, jnp.float32)
    offset = scale if fmt.offset else None
    kernels = (jnp.asarray(rng.integers(-8, 8, shape, np.int8), fmt.storage) for _ in range(count))
    return [(kernel, scale, offset) for kernel in kernels]


def program(way: Way, x: Any, kernels: Arrays) -> Any:
    def run(x: Any, kernels: Arrays) -> Any:
        for kernel in kernels:  # each waits for the one before, as layers do, and nothing is computed across
            x = jax.lax.optimization_barrier(x + 1e-9 * jax.lax.optimization_barrier(way(x, *kernel))[:, :1])
        return x

    return jax.jit(run).lower(x, kernels).compile()


def measure(shape: tuple[int, int], rows: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a product by each way."""
    count = max(2, round(COLD / (4 * shape[0] * shape[1])))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, shape[0]), np.float32))
    arrays: dict[KernelFormat | None, Arrays] = {fmt: make(fmt, shape, count) for fmt, _ in WAYS.values()}
    programs = {name: program(way, x, arrays[fmt]) for name, (fmt, way) in WAYS.items()}
    best = dict.fromkeys(WAYS, float("inf"))
    for _ in range(rounds + 1):  # the first fills the allocator
        for name, (fmt, _) in WAYS.items():
            start = time.perf_counter()
            jax.block_until_ready(programs[name](x, arrays[fmt]))
            best[name] = min(best[name], (time.perf_counter() - start) / count * 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,32", help="rows of the input, comma separated")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--scale", type=float, default=1.0, help="of the head's columns; less for a trial")
    options = parser.parse_args()
    keep_freed_memory()
    print(f"jax {jax.__version__}, {os.cpu_count()} cores; milliseconds")
    for rows in map(int, options.rows.split(",")):
        print(f"\n{rows} rows".ljust(24) + "".join(name.rjust(16) for name in WAYS))
        step = dict.fromkeys(WAYS, 0.0)
        for name, (width_in, width_out) in SHAPES.items():
            shape = (width_in, round(width_out * options.scale) if name == "head" else width_out)
            found = measure(shape, rows, options.rounds)
            print(f"{name} {shape[0]} × {shape[1]}".ljust(23) + "".join(f"{t:16.3f}" for t in found.values()))
            sys.stdout.flush()
            for way, milliseconds in found.items():
                step[way] += milliseconds * (1 if name == "head" else LAYERS)
        print("a decode step".ljust(23) + "".join(f"{t:16.1f}" for t in step.values()))


if __name__ == "__main__":
    main()

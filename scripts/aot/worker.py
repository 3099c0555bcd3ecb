"""Compiles one list of jobs for one GPU, in a process of its own: a wrong description may abort it.

Reads a pickled list of ``(Target, KernelCase or Program)`` from standard input, prints one JSON object a line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from . import assembly
from .jobs import EXPERTS, LLAMA, KernelCase, Program
from .targets import Target

warnings.filterwarnings("ignore", message=".*Triton backend is deprecated.*")


def device_of(target: Target) -> Any:
    """A device to compile for. It need not exist."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.describe(), topology="1x1x1"
    )
    return topology.devices[0]


def placed(tree: Any, device: Any) -> Any:
    """Shapes of ``tree`` on ``device``."""
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


def kernel_call(case: KernelCase) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """A function, the shapes of its arguments, and which of them are donated."""
    import jax
    import jax.numpy as jnp

    from jaxsched import pallas_kernels as pk

    def shape(dims: tuple[int, ...], dtype: str) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))

    def stored(*dims: int) -> Any:
        vectors = shape((*dims[:-2], dims[-2] // c.group, dims[-1]), "float32")
        return pk.Stored(shape(dims, c.storage), vectors, vectors if c.offset else None)

    c = case
    pages = shape((c.num_pages, c.page_size, c.kv_heads, c.head_dim), c.kv_dtype)
    scales = shape((c.num_pages, c.kv_heads), "float32")
    rows, ids = shape((c.rows,), "int32"), shape((c.rows,), "int32")
    options = {
        "scale": c.head_dim**-0.5,
        "window": c.window,
        "soft_cap": c.soft_cap,
        "implementation": c.backend,
    }
    if c.operation == "rotate_and_write":
        heads = shape((c.rows, c.heads + 2 * c.kv_heads, c.head_dim), c.dtype)
        angle = shape((c.rows, 1, c.head_dim // 2), "float32")
        return pk.rotate_and_write, (heads, angle, angle, pages, pages, rows, ids), (3, 4)
    if c.operation == "write_kv_quantized":
        new = shape((c.rows, c.kv_heads, c.head_dim), c.dtype)
        return pk.write_kv_quantized, (pages, scales, new, rows, ids), (0, 1)
    if c.operation == "sample":
        from jaxsched.pallas_kernels.triton.sample import filter_thresholds

        vector = shape((c.rows,), "float32")
        return filter_thresholds, (shape((c.rows, LLAMA["vocab_size"]), "float32"), vector, rows, vector), ()
    if c.operation == "experts":
        count, width, wide = EXPERTS
        grouped = partial(pk.grouped_matmul, implementation=c.backend)
        matrices = stored(count, width, wide) if c.storage else shape((count, width, wide), c.dtype)
        return grouped, (shape((c.rows, width), c.dtype), matrices, rows), ()
    if c.operation == "product":
        product = partial(pk.quantized_matmul, implementation=c.backend)
        return product, (shape((c.rows, c.widths[0]), c.dtype), stored(*c.widths)), ()
    slots = c.rows if c.operation == "paged_decode" else 64
    table = shape((slots, c.capacity // c.page_size), "int32")
    where = (rows,) if c.operation == "paged_decode" else (rows, ids)
    operands = (shape((c.rows, c.heads, c.head_dim), c.dtype), pages, pages, table, *where)
    fn, quantized, base = getattr(pk, c.operation), c.kv_dtype in ("int8", "float8_e4m3fn"), len(operands)

    def call(*given: Any) -> Any:
        extra = {"k_scales": given[base], "v_scales": given[base + 1]} if quantized else {}
        return fn(*given[:base], **options, **extra)

    return call, operands + ((scales, scales) if quantized else ()), ()


def program_call(program: Program) -> tuple[Any, Any]:
    """What lowers the program for a device, and the shape of its state."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxsched.models import Decoder, ModelConfig
    from jaxsched.step import Chunks, Features, decode_steps, init_state, prefill_chunk

    config = ModelConfig(**LLAMA, num_layers=program.layers)
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, jnp.dtype("bfloat16"))))
    sizes = {"num_slots": program.slots, "num_pages": program.num_pages, "page_size": program.page_size}
    state = jax.eval_shape(lambda: init_state(config, **sizes, dtype="bfloat16"))

    def lower(device: Any) -> Any:
        trees = placed((nnx.as_pure(params), state), device)
        options = {"slots": program.slots, "features": Features(program.sampling)}
        if program.chunk:
            chunks = placed(Chunks.empty(program.steps, program.chunk, program.slots), device)
            return prefill_chunk.lower(graph, *trees, chunks, **options)
        return decode_steps.lower(graph, *trees, steps=program.steps, **options)

    return lower, state


def compile_job(target: Target, job: KernelCase | Program, device: Any, folder: Path) -> dict[str, Any]:
    """Compiles one job, with the compiler's notes in ``folder``; what was found, for ``check``."""
    import jax

    start = time.perf_counter()
    options = {"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx"}
    result: dict[str, Any] = {"target": target.name, "job": job.name}
    with jax.default_device(device):
        if isinstance(job, Program):
            lower, state = program_call(job)
            lowered = lower(device)
            result["kv_bytes"] = sum(a.size * a.dtype.itemsize for a in (*state.k_pages, *state.v_pages))
            result["pool"] = list(state.k_pages[0].shape)
        else:
            fn, shapes, donated = kernel_call(job)
            lowered = jax.jit(fn, donate_argnums=donated).lower(*placed(shapes, device))
        compiled = lowered.compile(compiler_options=options)
    memory = compiled.memory_analysis()
    result |= {"alias": memory.alias_size_in_bytes, "temp": memory.temp_size_in_bytes}
    if isinstance(job, Program):
        result["hlo"] = compiled.as_text()
    plan = [path for path in folder.glob("*.thunk_sequence.txt")]
    result["launches"] = [
        dataclasses.asdict(launch) for path in plan for launch in assembly.read_plan(path.read_text())
    ]
    if not isinstance(job, Program):  # of a program, the kernels are known already
        files = sorted(folder.glob("*.ptx"))
        result["assembled"] = [dataclasses.asdict(one) for path in files for one in assembly.assemble(path)]
    result["seconds"] = round(time.perf_counter() - start, 2)
    return result


def mosaic_report(target: Target, job: KernelCase, device: Any, folder: Path) -> dict[str, Any]:
    """The same for a Mosaic kernel, which calls the assembler itself and prints all: the PTX and the report."""
    printed = folder / "printed"
    saved = os.dup(1), os.dup(2)
    with printed.open("w") as sink:
        for number in (1, 2):
            os.dup2(sink.fileno(), number)
        try:
            result = compile_job(target, job, device, folder)
        finally:
            for number, old in zip((1, 2), saved, strict=True):
                os.dup2(old, number)
    words = printed.read_text(errors="replace")
    result["assembled"] = [dataclasses.asdict(one) for one in assembly.read_report(words, words)]
    return result


def main() -> None:
    jobs = pickle.load(sys.stdin.buffer)
    device = None
    for target, job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            try:
                device = device or device_of(target)
                run = mosaic_report if getattr(job, "backend", "") == "mosaic" else compile_job
                result = run(target, job, device, Path(folder))
            except Exception as error:
                words = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:400]
                result = {"target": target.name, "job": job.name, "error": words}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

"""Every implementation of paged attention against the float32 reference, on shapes drawn at random: one row each.

The GPU kernels run in Pallas's interpreter here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxsched.pallas_kernels import (
    IMPLEMENTATIONS,
    AttentionShape,
    ops,
    paged_decode,
    paged_prefill,
    refusal,
    tuning,
    write_kv,
)
from jaxsched.pallas_kernels.ops import page_of

BACKENDS = [name for name in IMPLEMENTATIONS if name != "reference"]
# float32: sums of up to 200 terms of size 1 in different orders. bfloat16 has 8 bits: probabilities and results are
# each rounded to it, so an error is at most two roundings of values up to about 3, and seldom more than one.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3, "int8": 2e-5, "float8_e4m3fn": 2e-5}
HIGHEST = {"int8": 127, "float8_e4m3fn": 448}


def pool(rng, lengths, page_size, kv_heads, dim, kind="float32", spare=3):
    """Pages filled with NaN except the live positions; block tables with garbage behind each length; scales or None.

    Pages without NaN among their values (int8) have it in their scales.
    """
    slots = len(lengths)
    need = [-(-int(n) // page_size) for n in lengths]
    width, total = max(need) + 2, sum(need) + spare
    table = rng.integers(-5, total + 1000, (slots, width)).astype(np.int32)
    free = list(rng.permutation(total))
    pages = [np.full((total, page_size, kv_heads, dim), np.nan, np.float32) for _ in "kv"]
    scales = [np.full((total, kv_heads), np.nan, np.float32) for _ in "kv"]
    for s, n in enumerate(lengths):
        table[s, : need[s]] = [free.pop() for _ in range(need[s])]
        for p in range(n):
            page = table[s, p // page_size]
            for part, scale in zip(pages, scales, strict=True):
                row = rng.standard_normal((kv_heads, dim))
                if kind in HIGHEST:
                    scale[page] = 2.0 ** rng.integers(-6, -4, kv_heads) * 127 / HIGHEST[kind]
                    row = np.clip(row / scale[page][:, None], -HIGHEST[kind], HIGHEST[kind])
                part[page, p % page_size] = np.round(row) if kind == "int8" else row
    if kind == "int8":
        pages = [np.where(np.isnan(part), 99, part) for part in pages]
    quantized = [jnp.asarray(scale) if kind in HIGHEST else None for scale in scales]
    return *(jnp.asarray(part).astype(kind) for part in pages), jnp.asarray(table), *quantized


#         page size, query heads, KV heads, head_dim, dtype of queries, of pages, window, soft cap
CASES = [
    (16, 9, 3, 64, "float32", "float32", None, None),
    (16, 4, 4, 16, "float32", "float32", None, None),
    (8, 8, 1, 32, "float32", "float32", 20, None),
    (32, 6, 2, 80, "float32", "float32", None, 3.0),
    (4, 4, 2, 96, "float32", "float32", 1, 2.0),
    (64, 8, 2, 128, "bfloat16", "bfloat16", None, None),
    (16, 8, 4, 64, "bfloat16", "bfloat16", 40, None),
    (128, 2, 1, 128, "float16", "float16", None, None),
    (16, 16, 1, 64, "bfloat16", "bfloat16", None, 5.0),
    (16, 4, 2, 64, "float32", "int8", None, None),
    (32, 4, 1, 64, "float32", "float8_e4m3fn", 50, None),
    (16, 2, 2, 256, "float32", "float32", None, None),
]


def rows_of(operation):
    """Every case that a backend takes. What it refuses must be said, and is no test."""
    for backend in BACKENDS:
        for case in CASES:
            page_size, heads, kv_heads, dim, kind, kv, _, _ = case
            shape = AttentionShape(8, 8, heads, kv_heads, dim, page_size, 9, 50, kind, kv, "sm_90")
            if refusal(operation, backend, shape) is None:
                # That interpreter is slow: by default one prefill, with a window.
                slow = (backend, operation) == ("mosaic", "paged_prefill") and case[6] is None
                marks = [pytest.mark.slow] if slow else []
                yield pytest.param(backend, case, id=f"{backend}-{'-'.join(map(str, case))}", marks=marks)


@pytest.mark.parametrize(("backend", "case"), list(rows_of("paged_decode")))
def test_decode_matches_reference(backend, case):
    page_size, heads, kv_heads, dim, kind, kv, window, soft_cap = case
    rng = np.random.default_rng(0)
    lengths = [0, 1, page_size - 1, page_size, page_size + 1, 5 * page_size + 3, 0, 3 * page_size]
    k, v, table, k_scales, v_scales = pool(rng, lengths, page_size, kv_heads, dim, kv)
    q = jnp.asarray(rng.standard_normal((len(lengths), heads, dim))).astype(kind)
    run = functools.partial(
        paged_decode, scale=dim**-0.5, window=window, soft_cap=soft_cap, k_scales=k_scales, v_scales=v_scales
    )
    args = (k, v, table, jnp.asarray(lengths, jnp.int32))
    want = run(q.astype(jnp.float32), *args, implementation="reference")
    got = run(q, *args, implementation=backend)
    assert got.dtype == q.dtype and np.isfinite(want).all()
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=TOLERANCE[kind])
    assert (np.asarray(got)[[0, 6]] == 0).all()


def chunk(rng, page_size, rows, slots):
    """Runs of consecutive positions, each of one slot, in random order, with padding between and behind them."""
    lengths, slot, position = np.zeros(slots, int), [], []
    for s in rng.permutation(slots)[: rng.integers(1, slots)]:
        start, run = int(rng.integers(0, 3 * page_size)), int(rng.integers(1, 70))
        run = min(run, rows - len(slot))
        slot += [s] * run
        position += range(start, start + run)
        lengths[s] = start + run
        gap = min(int(rng.choice([0, 0, 3])), rows - len(slot))
        slot, position = slot + [slots] * gap, position + [0] * gap
    pad = rows - len(slot)
    return lengths, np.array(slot + [slots] * pad, np.int32), np.array(position + [0] * pad, np.int32)


@pytest.mark.parametrize(("backend", "case"), list(rows_of("paged_prefill")))
def test_prefill_matches_reference(backend, case):
    page_size, heads, kv_heads, dim, kind, kv, window, soft_cap = case
    run = jax.jit(
        functools.partial(paged_prefill, scale=dim**-0.5, window=window, soft_cap=soft_cap),
        static_argnames="implementation",
    )
    for seed in range(1 if backend == "mosaic" else 3):
        rng = np.random.default_rng(seed)
        lengths, slot, position = chunk(rng, page_size, rows=160, slots=6)
        lengths[0] = max(
            lengths[0], 3 * page_size + 70
        )  # all seeds have tables of one width: one compilation
        k, v, table, k_scales, v_scales = pool(
            rng, lengths, page_size, kv_heads, dim, kv, 3 + 70 * 6 - int(sum(-(-lengths // page_size)))
        )
        q = jnp.asarray(rng.standard_normal((160, heads, dim))).astype(kind)
        args = (k, v, table, jnp.asarray(slot), jnp.asarray(position))
        scales = {"k_scales": k_scales, "v_scales": v_scales}
        want = run(q.astype(jnp.float32), *args, **scales, implementation="reference")
        got = run(q, *args, **scales, implementation=backend)
        assert got.dtype == q.dtype and np.isfinite(want).all()
        np.testing.assert_allclose(got.astype(jnp.float32), want, atol=TOLERANCE[kind])
        assert (np.asarray(got)[slot == 6] == 0).all()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("backend", "operation"),
    [
        *((name, "decode") for name in ("reference", "xla", "triton")),
        pytest.param("mosaic", "decode", marks=SLOW),
        *((name, "prefill") for name in ("reference", "xla", "triton")),
        pytest.param("mosaic", "prefill", marks=SLOW),
    ],
)
def test_pages_behind_every_window_may_be_anothers(backend, operation):
    """The table still names them, but they hold whatever somebody else has written there, NaN in the worst case."""
    rng, window, size, lengths = np.random.default_rng(4), 40, 16, [90, 40, 0, 150]
    k, v, table, _, _ = pool(rng, lengths, size, 2, 64, "bfloat16")
    if operation == "decode":
        first, rows = [n - 1 for n in lengths], (jnp.asarray(lengths, jnp.int32),)
    else:  # the last 30, 1, none and 70 rows of each
        runs = [30, 1, 0, 70]
        first = [n - run for n, run in zip(lengths, runs, strict=True)]
        slot = np.repeat(np.arange(4), runs)
        position = np.concatenate([np.arange(f, n) for f, n in zip(first, lengths, strict=True)])
        rows = (jnp.asarray(slot, jnp.int32), jnp.asarray(position, jnp.int32))
    behind = [[int(p) for p in table[s, : max(0, f - window + 1) // size]] for s, f in enumerate(first)]
    assert len(behind[0]) > 0 and len(behind[3]) > 1
    gone = jnp.asarray([page for pages in behind for page in pages])
    count = 4 if operation == "decode" else len(rows[0])
    q = jnp.asarray(rng.standard_normal((count, 4, 64))).astype("bfloat16")
    run = functools.partial(
        paged_decode if operation == "decode" else paged_prefill,
        scale=0.125,
        window=window,
        implementation=backend,
    )
    want = run(q, k, v, table, *rows)
    got = run(q, k.at[gone].set(jnp.nan), v.at[gone].set(jnp.nan), table, *rows)
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
    assert np.isfinite(got.astype(jnp.float32)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_neighbours(backend):
    """Bit for bit: a longer neighbour adds iterations, and they must change nothing."""
    rng = np.random.default_rng(1)
    k, v, table, _, _ = pool(rng, [20, 300], 16, 2, 64, "bfloat16")
    q = jnp.asarray(rng.standard_normal((2, 4, 64))).astype(jnp.bfloat16)

    def run(lengths):
        return paged_decode(
            q, k, v, table, jnp.asarray(lengths, jnp.int32), scale=0.25, implementation=backend
        )

    assert (np.asarray(run([20, 300]))[0] == np.asarray(run([20, 0]))[0]).all()


def test_write_kv_drops_rows_out_of_range():
    pages = jnp.zeros((3, 4, 1, 2))
    rows = jnp.arange(8.0).reshape(4, 1, 2) + 1
    got = write_kv(pages, rows, jnp.array([0, 3, 2, 1000]), jnp.array([1, 0, 3, 2]))
    want = np.zeros((3, 4, 1, 2))
    want[0, 1], want[2, 3] = [[1, 2]], [[5, 6]]
    np.testing.assert_array_equal(got, want)


def test_page_of():
    table = jnp.array([[5, 6], [7, 8]])
    got = page_of(table, jnp.array([0, 1, 1]), jnp.array([3, 4, 7]), page_size=4)
    np.testing.assert_array_equal(got, [5, 8, 8])


def small(dim=4, kind="float32"):
    pages = jnp.zeros((3, 4, 2, dim), kind)
    return jnp.zeros((1, 4, dim)), pages, pages, jnp.zeros((1, 2), int), jnp.zeros(1, int)


@pytest.mark.parametrize(
    ("operands", "options", "message"),
    [
        (small(), {"implementation": "triton9"}, r"'triton9' is unknown; known: reference, xla, triton, mosaic"),
        (small(300), {"implementation": "triton"}, r"'triton' cannot do this: head_dim 300 is above 256 \(.*xla: can"),
        (small(kind="int8"), {}, r"pages of int8 need k_scales and v_scales"),
        (small(), {"k_scales": jnp.ones((3, 2)), "v_scales": jnp.ones((3, 2))}, "pages of float32 take no scales"),
        (small(), {"window": 0}, "window is 0; it must be at least 1"),
        (small(), {"soft_cap": -1.0}, "soft_cap is -1.0; it must be positive"),
        ((jnp.zeros((1, 3, 4)), *small()[1:]), {}, "3 query heads of 4 do not fit pages of 2 heads of 4"),
        ((*small()[:2], small(kind="bfloat16")[2], *small()[3:]), {}, "they must be alike"),
    ],
)  # fmt: skip
def test_what_is_refused(operands, options, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: paged_decode(*operands, scale=1.0, **options))


def test_the_tuning_table(monkeypatch):
    """A row changes the sizes of the shapes that it names, and of no others."""
    shape = AttentionShape(64, 64, 32, 8, 128, 16, 512, 4096, "bfloat16", "bfloat16", "sm_90")
    own = ops.sizes("paged_decode", "triton", shape)
    row = tuning.Row(
        "paged_decode", "triton", {"block": 32, "splits": 7}, "H200, some day", "sm_90", 128, rows=64
    )
    monkeypatch.setattr(tuning, "ROWS", (row, *tuning.ROWS))
    assert ops.sizes("paged_decode", "triton", shape) == dataclasses.replace(own, block=32, splits=7)
    for change in ({"rows": 65}, {"head_dim": 64}, {"family": "sm_80"}):
        other = dataclasses.replace(shape, **change)
        assert ops.sizes("paged_decode", "triton", other).splits != 7
    assert ops.sizes("paged_prefill", "triton", shape).block_q


def test_rows_of_the_table_are_of_use():
    """Each names fields that its kernel has, and a family that it takes."""
    for row in tuning.ROWS:
        shape = AttentionShape(
            64, 64, 32, 8, row.head_dim or 128, 16, 512, 4096, *["bfloat16"] * 2, row.family
        )
        assert refusal(row.operation, row.backend, shape) is None
        assert tuning.find(row.operation, row.backend, shape) is not None and row.source
        assert ops.sizes(row.operation, row.backend, shape)


def test_every_platform_gets_its_own():
    """None: XLA for a CPU, the kernel for CUDA, decided when a program is lowered."""

    def lowered(platform):
        traced = jax.jit(functools.partial(paged_decode, scale=1.0)).trace(*small(64))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "triton" not in lowered("cpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", None, "gpu"))):
        assert "triton" in lowered("cuda")

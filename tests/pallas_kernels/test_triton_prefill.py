"""The prefill kernel of the Triton backend: tiles that several sequences share, splits, what it lowers for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxsched.pallas_kernels import AttentionOptions, AttentionShape, paged_prefill
from jaxsched.pallas_kernels.triton import prefill
from jaxsched.pallas_kernels.tuning import CARDS

LLAMA = AttentionShape(256, 64, 32, 8, 128, 16, 512, 4096, "bfloat16", "bfloat16", "sm_90")
SLOTS, SIZE, KV_HEADS, DIM = 5, 8, 2, 32
# Slot and first position of each run of rows; slot 5 is padding. Runs end inside, at and behind borders of tiles.
RUNS = [(3, 0, 1), (5, 0, 2), (0, 30, 13), (4, 8, 16), (1, 0, 8), (5, 0, 3), (2, 60, 21)]


def operands(kind="float32", seed=0):
    rng = np.random.default_rng(seed)
    pages = [np.full((SLOTS * 12 + 3, SIZE, KV_HEADS, DIM), np.nan, np.float32) for _ in "kv"]
    table = rng.permutation(SLOTS * 12).reshape(SLOTS, 12).astype(np.int32)
    for slot, start, count in RUNS:
        if slot < SLOTS:
            for p in range(start + count):
                for part in pages:
                    part[table[slot, p // SIZE], p % SIZE] = rng.standard_normal((KV_HEADS, DIM))
            table[slot, -(-(start + count) // SIZE) :] = rng.choice([-1, 10**6])
    slots = np.concatenate([np.full(count, slot, np.int32) for slot, _, count in RUNS])
    positions = np.concatenate([np.arange(start, start + count, dtype=np.int32) for _, start, count in RUNS])
    q = jnp.asarray(rng.standard_normal((len(slots), 4, DIM)), jnp.float32)
    return (
        q,
        *(jnp.asarray(p).astype(kind) for p in pages),
        jnp.asarray(table),
        jnp.asarray(slots),
        jnp.asarray(positions),
    )


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize(
    ("block_q", "block_kv", "splits"), [(16, 16, 1), (32, 32, 3), (128, 16, 8), (16, 64, 2)]
)
def test_tiles_and_splits_change_nothing_but_the_order_of_sums(block_q, block_kv, splits, window):
    given = operands()
    want = paged_prefill(*given, scale=0.2, window=window, implementation="reference")
    config = prefill.PrefillConfig(block_q=block_q, block_kv=block_kv, splits=splits)
    options = AttentionOptions(0.2, window)
    got = prefill.paged_prefill(*given, options=options, config=config, interpret=True)
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert (np.asarray(got)[np.asarray(given[4]) == SLOTS] == 0).all()


def test_pages_before_the_window_may_be_gone():
    """Nothing is read through the entries of pages that no row's window reaches any more."""
    q, k, v, table, slots, positions = operands()
    want = paged_prefill(q, k, v, table, slots, positions, scale=0.2, window=11, implementation="reference")
    entries, gone = np.asarray(table).copy(), []
    for slot, start, _ in RUNS:
        if slot < SLOTS:
            dead = max(0, start - 11 + 1) // SIZE
            gone += list(entries[slot, :dead])
            entries[slot, :dead] = -(10**6)
    assert gone, "no run begins late enough"
    k, v = (part.at[jnp.asarray(gone)].set(jnp.nan) for part in (k, v))
    config = prefill.PrefillConfig(block_q=32, block_kv=64, splits=2)
    got = prefill.paged_prefill(
        q,
        k,
        v,
        jnp.asarray(entries),
        slots,
        positions,
        options=AttentionOptions(0.2, 11),
        config=config,
        interpret=True,
    )
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_row_does_not_depend_on_the_others():
    """Bit for bit: with one sequence alone in the chunk its rows are the same, wherever they stand in their tile."""
    q, k, v, table, slots, positions = operands()
    run = functools.partial(prefill.paged_prefill, options=AttentionOptions(0.2), interpret=True)
    whole = np.asarray(run(q, k, v, table, slots, positions))
    for slot in (0, 4):
        alone = jnp.where(slots == slot, slots, SLOTS)
        mine = np.asarray(slots) == slot
        assert (np.asarray(run(q, k, v, table, alone, positions))[mine] == whole[mine]).all()


@pytest.mark.parametrize("family", [*CARDS, None])
@pytest.mark.parametrize("rows", [16, 256, 2048])
def test_sizes_are_within_limits(rows, family):
    shape = dataclasses.replace(LLAMA, rows=rows, family=family)
    config = prefill.default_config(shape)
    assert config.block_q >= shape.group and 1 <= config.splits <= 8
    if rows == 2048:
        assert config.splits == 1, "a long chunk fills every card by itself"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 257}, "head_dim 257 is above 256"),
        ({"heads": 65, "kv_heads": 1}, "65 query heads per KV head are above 64"),
        ({"dtype": "float64"}, "queries are float64"),
        ({"kv_dtype": "int8", "num_pages": 2**17 + 1}, "between 2 and 4 GiB, where Triton's 32-bit offsets"),
        ({"family": "sm_75"}, "GPU family sm_75 is not among sm_80"),
    ],
)
def test_refusals(change, reason):
    assert prefill.prefill_refusal(LLAMA) is None
    assert reason in prefill.prefill_refusal(dataclasses.replace(LLAMA, **change))


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA B200"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_it_lowers_for(kind, kv_dtype):
    q, *rest = operands(kv_dtype)
    scales = (
        {} if kv_dtype == "bfloat16" else dict.fromkeys(("k_scales", "v_scales"), jnp.ones((63, KV_HEADS)))
    )
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "gpu"))):
        run = jax.jit(lambda *given: paged_prefill(*given, scale=0.2, **scales))
        text = run.trace(q.astype(jnp.bfloat16), *rest).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text

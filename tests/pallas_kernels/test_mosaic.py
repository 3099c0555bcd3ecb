"""The Mosaic GPU kernels in the interpreter that watches for races: TMA copies, barriers, rings, warpgroups."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsched.pallas_kernels import AttentionOptions, AttentionShape, paged_decode, paged_prefill
from jaxsched.pallas_kernels.mosaic import decode, prefill

RACES = plgpu.InterpretGPUParams(detect_races=True)
CLOSE = 2e-2  # bfloat16: two roundings of values up to about 3
LLAMA = AttentionShape(64, 64, 32, 8, 128, 16, 512, 4096, "bfloat16", "bfloat16", "sm_90")


def pages_for(lengths, size, kv_heads, dim):
    """K, V and block table; NaN wherever nothing was written, garbage ids behind each length."""
    rng = np.random.default_rng(0)
    width = max(-(-n // size) for n in lengths) + 1
    pages = [np.full((len(lengths) * width + 2, size, kv_heads, dim), np.nan, np.float32) for _ in "kv"]
    table = rng.permutation(len(lengths) * width).reshape(len(lengths), width).astype(np.int32)
    for s, n in enumerate(lengths):
        for p in range(n):
            for part in pages:
                part[table[s, p // size], p % size] = rng.standard_normal((kv_heads, dim))
        table[s, -(-n // size) :] = rng.choice([-1, 10**6])
    return *(jnp.asarray(part, jnp.bfloat16) for part in pages), jnp.asarray(table)


def queries(rows, heads, dim):
    return jnp.asarray(np.random.default_rng(1).standard_normal((rows, heads, dim)), jnp.bfloat16)


SLOW = pytest.mark.slow
#   page size, heads, KV heads, head_dim, window, soft cap, splits
DECODES = [
    (16, 6, 2, 64, 70, 5.0, 2),
    pytest.param(64, 8, 1, 128, None, None, 1, marks=SLOW),
    pytest.param(128, 2, 2, 64, 100, None, 3, marks=SLOW),
    pytest.param(16, 4, 1, 256, None, None, 2, marks=SLOW),
]


@pytest.mark.parametrize(("size", "heads", "kv_heads", "dim", "window", "soft_cap", "splits"), DECODES)
def test_decode_without_races(size, heads, kv_heads, dim, window, soft_cap, splits):
    lengths = [0, 1, 65, 200]
    operands = (*pages_for(lengths, size, kv_heads, dim), jnp.asarray(lengths, jnp.int32))
    q, options = queries(4, heads, dim), AttentionOptions(dim**-0.5, window, soft_cap)
    config = decode.DecodeConfig(block=64, stages=2, splits=splits, min_tiles=1)
    got = decode.paged_decode(q, *operands, options=options, config=config, interpret=RACES)
    want = paged_decode(
        q.astype(jnp.float32), *operands, **dataclasses.asdict(options), implementation="reference"
    )
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=CLOSE)
    assert (np.asarray(got)[0] == 0).all()


#   page size, heads, KV heads, head_dim, window, soft cap, consumer warpgroups
PREFILLS = [
    (16, 4, 2, 64, None, None, 2),
    pytest.param(64, 8, 1, 128, 50, 5.0, 2, marks=SLOW),
    pytest.param(32, 3, 1, 64, None, None, 1, marks=SLOW),
]


@pytest.mark.parametrize(("size", "heads", "kv_heads", "dim", "window", "soft_cap", "warpgroups"), PREFILLS)
def test_prefill_without_races(size, heads, kv_heads, dim, window, soft_cap, warpgroups):
    """Two sequences and padding between them, from the middle of one and the start of the other."""
    lengths = [0, 90, 20]
    slot = np.array([1] * 40 + [3] * 3 + [2] * 20 + [3] * 1, np.int32)
    position = np.array([*range(50, 90), 0, 0, 0, *range(20), 0], np.int32)
    operands = (*pages_for(lengths, size, kv_heads, dim), jnp.asarray(slot), jnp.asarray(position))
    q, options = queries(64, heads, dim), AttentionOptions(dim**-0.5, window, soft_cap)
    config = prefill.PrefillConfig(block=64, stages=2, warpgroups=warpgroups)
    got = prefill.paged_prefill(q, *operands, options=options, config=config, interpret=RACES)
    want = paged_prefill(
        q.astype(jnp.float32), *operands, **dataclasses.asdict(options), implementation="reference"
    )
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=CLOSE)
    assert (np.asarray(got)[slot == 3] == 0).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"family": "sm_80"}, "written for sm_90"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "bfloat16 and float16 queries, not float32"),
        ({"kv_dtype": "int8"}, "pages of the queries' dtype bfloat16, not int8"),
        ({"head_dim": 80}, "head_dim 64, 128 or 256, not 80"),
        ({"heads": 520}, "65 query heads share a KV head"),
        ({"page_size": 12}, "page_size 12 is not a multiple of 8"),
        ({"page_size": 48}, "page_size 48 and a tile of .* do not divide each other"),
    ],
)
@pytest.mark.parametrize("refusal", [decode.decode_refusal, prefill.prefill_refusal])
def test_refusals(refusal, change, reason):
    assert refusal(LLAMA) is None
    assert re.search(reason, refusal(dataclasses.replace(LLAMA, **change)))


def test_too_much_shared_memory_is_refused():
    config = decode.DecodeConfig(block=256, stages=4)
    assert "bytes of shared memory, sm_90 has 232448" in decode.decode_refusal(LLAMA, config)


@pytest.mark.parametrize("slots", [1, 8, 64, 256])
def test_splits_fill_the_card(slots):
    shape = dataclasses.replace(LLAMA, rows=slots, slots=slots, pages_per_sequence=2048)
    splits = decode.default_config(shape).splits
    assert slots * 8 * splits >= 264 and (splits == 1 or slots * 8 * (splits - 1) < 264)


def test_a_plan_cuts_at_sequences_and_tiles():
    """Rows of a tile are of one slot; each row is in one tile; padding is in none."""
    shape = dataclasses.replace(LLAMA, rows=100, slots=4)
    slot = np.array([2] * 50 + [4] * 5 + [0] * 45, np.int32)
    position = np.array([*range(7, 57), *[0] * 5, *range(45)], np.int32)
    config = prefill.PrefillConfig(128, 2, 2)  # 16 rows of 4 heads per warpgroup
    live = jnp.asarray(slot < 4)
    plan = prefill.plan_tiles(
        shape, AttentionOptions(1.0), config, live, jnp.asarray(slot), jnp.asarray(position)
    )
    tiles, limits = np.asarray(plan.tiles), np.asarray(plan.limits)
    used = tiles[tiles[:, 3] > 0]
    assert used.tolist() == [[2, 0, 0, 39], [2, 32, 0, 57], [0, 55, 0, 32], [0, 87, 0, 45]]
    seen = sorted(limits[limits >= 0].tolist())
    assert seen == sorted([p for p in position[slot < 4].tolist() for _ in range(4)])

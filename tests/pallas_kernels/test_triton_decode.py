"""The decode kernel of the Triton backend: splits of the context, float8 by integer arithmetic, what it lowers for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jaxsched.pallas_kernels import AttentionOptions, AttentionShape, paged_decode
from jaxsched.pallas_kernels.triton import common, decode
from jaxsched.pallas_kernels.tuning import CARDS, UNKNOWN

LLAMA = AttentionShape(
    64, 64, 32, 8, 128, 16, 512, 4096, "bfloat16", "bfloat16", "sm_90"
)  # 8B, 8,192 positions


def sized(slots, positions, **changes):
    return dataclasses.replace(LLAMA, rows=slots, slots=slots, pages_per_sequence=positions // 16, **changes)


@pytest.mark.parametrize("family", [*CARDS, None])
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
@pytest.mark.parametrize("slots", [1, 2, 16, 64, 256])
def test_splits_fill_the_chip_and_no_more(slots, kv_heads, family):
    shape = sized(slots, 32768, kv_heads=kv_heads, heads=32, family=family)
    processors = CARDS.get(family, UNKNOWN).multiprocessors
    splits, programs = decode.choose_splits(shape, 64), slots * kv_heads
    assert 1 <= splits <= decode.MAX_SPLITS
    if programs * 128 >= processors:  # as many as there can be are enough
        assert programs * splits >= 0.75 * processors, "part of the chip has nothing to do"
    if programs >= 2 * processors and splits > 1:
        partial = splits * shape.group * shape.head_dim * 4 * 2  # written and read
        assert partial < 0.02 * 2 * 32768 * shape.head_dim * 2, "partial results cost more than they bring"


def test_one_long_sequence_uses_the_whole_chip():
    assert decode.choose_splits(sized(1, 32768), 64) * 8 >= 132
    assert decode.choose_splits(sized(64, 64), 64) == 1, "one block is not divided"


def small_case(kind="float32", lengths=(0, 1, 33, 70, 200, 256)):
    rng = np.random.default_rng(0)
    slots, size, kv_heads, dim = len(lengths), 8, 2, 32
    pages = [np.full((slots * 32 + 3, size, kv_heads, dim), np.nan, np.float32) for _ in "kv"]
    table = rng.permutation(slots * 32).reshape(slots, 32).astype(np.int32)
    for s, n in enumerate(lengths):
        for p in range(n):
            for part in pages:
                part[table[s, p // size], p % size] = rng.standard_normal((kv_heads, dim))
        table[s, -(-n // size) :] = rng.choice([-1, 10**6])
    q = jnp.asarray(rng.standard_normal((slots, 8, dim)).astype(np.float32))
    k, v = (jnp.asarray(part).astype(kind) for part in pages)
    return q, k, v, jnp.asarray(table), jnp.asarray(lengths, jnp.int32)


@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.parametrize("splits", [1, 2, 5, 16, 100])
def test_the_number_of_splits_changes_nothing_but_the_order_of_sums(splits, window):
    """Also more splits than a context has blocks, and contexts far shorter than the program's capacity."""
    operands = small_case()
    want = paged_decode(*operands, scale=0.2, window=window, implementation="reference")
    config = decode.DecodeConfig(block=16, num_warps=4, num_stages=2, splits=splits)
    options = AttentionOptions(0.2, window)
    got = decode.paged_decode(*operands, options=options, config=config, interpret=True)
    np.testing.assert_allclose(got, want, atol=2e-5)
    assert (np.asarray(got)[0] == 0).all()


def test_a_split_context_does_not_depend_on_its_neighbours():
    """Bit for bit: what a split covers follows from its own slot's length."""
    q, k, v, table, lengths = small_case()
    config = decode.DecodeConfig(block=16, num_warps=4, num_stages=2, splits=4)
    run = functools.partial(decode.paged_decode, options=AttentionOptions(0.2), config=config, interpret=True)
    alone = run(q, k, v, table, jnp.where(jnp.arange(6) == 3, lengths, 0))
    assert (np.asarray(run(q, k, v, table, lengths))[3] == np.asarray(alone)[3]).all()


def test_float8_by_integer_arithmetic_is_the_cast():
    """All 254 values that are numbers; what sm_80 does in the place of a conversion that it lacks."""
    bits = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)
    stored = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float8_e4m3fn)
    got = common.decode_float8(stored)
    np.testing.assert_array_equal(got, stored.astype(jnp.float32))


@pytest.mark.parametrize("bits", [False, True])
def test_float8_pages(bits):
    q, k, v, table, lengths = small_case("float8_e4m3fn")
    scales = jnp.full((k.shape[0], 2), 0.5)
    operands = {"k_scales": scales, "v_scales": scales}
    config = decode.DecodeConfig(block=16, num_warps=4, num_stages=2, splits=3, decode_bits=bits)
    options = AttentionOptions(0.2)
    got = decode.paged_decode(
        q, k, v, table, lengths, **operands, options=options, config=config, interpret=True
    )
    want = paged_decode(q, k, v, table, lengths, **operands, scale=0.2, implementation="reference")
    np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 257}, "head_dim 257 is above 256"),
        ({"heads": 65, "kv_heads": 1}, "65 query heads per KV head are above 64"),
        ({"dtype": "float64"}, "queries are float64; known: float32, bfloat16, float16"),
        ({"kv_dtype": "int4"}, "pages are int4; known"),
        ({"kv_dtype": "int8", "num_pages": 2**17 + 1}, "between 2 and 4 GiB, where Triton's 32-bit offsets"),
        ({"family": "sm_75"}, "GPU family sm_75 is not among sm_80"),
    ],
)
def test_refusals(change, reason):
    assert decode.decode_refusal(LLAMA) is None
    assert reason in decode.decode_refusal(dataclasses.replace(LLAMA, **change))


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA L4", "NVIDIA H200", "NVIDIA B200"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_it_lowers_for(kind, kv_dtype):
    q, k, v, table, lengths = small_case(kv_dtype)
    scales = (
        {} if kv_dtype == "bfloat16" else dict.fromkeys(("k_scales", "v_scales"), jnp.ones((k.shape[0], 2)))
    )
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, None, "gpu"))):
        run = jax.jit(lambda *given: paged_decode(*given, scale=0.2, **scales))
        text = (
            run.trace(q.astype(jnp.bfloat16), k, v, table, lengths)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )
    assert "triton" in text

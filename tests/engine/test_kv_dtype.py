"""The dtype of the KV cache: what it costs in exactness, what it saves in memory, and what stays as it was."""

import dataclasses
import pickle

import jax
import numpy as np
import pytest

from harness import GREEDY, assert_idle, collect, drain, make_engine, random_prompt, run_all
from jaxsched import EngineConfig, SamplingParams, info
from jaxsched.kv_cache import KV_DTYPES
from jaxsched.step import Features, decode_steps, init_state, prefill_chunk
from jaxsched.step.inputs import Chunks

NAMES = {"int8": "int8", "fp8": "float8_e4m3fn"}  # of the setting, of the dtype
QUANTIZED = pytest.mark.parametrize("kv", NAMES)
FEW_PROGRAMS = {"executor": "dispatch", "num_scheduler_steps": 2}


@pytest.fixture(scope="module")
def engine_of(toy):
    """Engines of one layer by their settings, made once; each test finds them idle and leaves them so."""
    made = {}

    def get(**settings):
        key = tuple(sorted(settings.items()))
        if key not in made:
            made[key] = make_engine(toy("base", num_layers=1), **FEW_PROGRAMS, **settings)
        made[key].reset_prefix_cache()
        return made[key]

    yield get
    for engine in made.values():
        assert_idle(engine)


def mixed_requests(count=12):
    """Prompts of all lengths, some that begin alike; half of them greedy."""
    rng = np.random.default_rng(5)
    prefix = random_prompt(rng, 37)
    for i in range(count):
        prompt = (prefix if i % 3 == 0 else []) + random_prompt(rng, int(rng.integers(1, 50)))
        temperature = float(i % 2)
        yield prompt, SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True)


# -- how near it is --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact(engine_of):
    return scores(engine_of())


def scores(engine):
    """Log-probabilities of the tokens of some prompts under what is before them."""
    rng = np.random.default_rng(3)
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    results = run_all(engine, [(random_prompt(rng, length), params) for length in (100, 61, 7, 80)])
    return np.array(
        [next(iter(at.values())).logprob for result in results for at in result.prompt_logprobs[1:]]
    )


# The toy's weights are random and its scores wide, so that rounding shows; see docs for a real model.
@pytest.mark.parametrize(("kv", "mean"), [("bfloat16", 0.012), ("int8", 0.06), ("fp8", 0.17)])
def test_scores_are_near_those_of_float32(kv, mean, engine_of, exact):
    away = np.abs(scores(engine_of(kv_cache_dtype=kv)) - exact)
    print(f"{kv}: mean {away.mean():.4f}, largest {away.max():.4f}")
    assert mean / 3 < away.mean() < mean and away.max() < 10 * mean


# -- what the tokens depend on ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokens(engine_of):
    made = {}

    def get(kv):
        if kv not in made:
            made[kv] = [r.ids for r in run_all(engine_of(kv_cache_dtype=kv), mixed_requests())]
        return made[kv]

    return get


@QUANTIZED
def test_a_request_alone_gets_the_same_tokens(kv, engine_of, tokens):
    """O1: beside others its prompt is cut elsewhere and its slot is another."""
    engine = engine_of(kv_cache_dtype=kv)
    assert [run_all(engine, [request])[0].ids for request in mixed_requests()] == tokens(kv)


@QUANTIZED
def test_tokens_do_not_depend_on_chunks_and_hits(kv, engine_of, tokens):
    """O2: other chunks, which are no multiple of the page either, and nothing found in the prefix cache."""
    engine = engine_of(kv_cache_dtype=kv, prefill_chunk_size=19, enable_prefix_caching=False)
    assert [r.ids for r in run_all(engine, mixed_requests())] == tokens(kv)


@QUANTIZED
def test_hits_and_misses_in_the_prompt(kv, engine_of, tokens):
    """The second time every full page of the prompts is found."""
    engine, before = engine_of(kv_cache_dtype=kv), None
    for _ in range(2):
        before = engine.stats.cached_tokens
        assert [r.ids for r in run_all(engine, mixed_requests())] == tokens(kv)
    assert engine.stats.cached_tokens - before > 200


def test_after_a_preemption_int8_may_go_on_otherwise(engine_of):
    """The one thing that does not hold: output that is read again is rounded once where it was rounded row by row."""
    parted = {}
    for kv in ("auto", "fp8", "int8"):
        engine, runs = engine_of(kv_cache_dtype=kv), []
        for evicts in (False, True):
            engine.reset_prefix_cache()
            ids = [
                engine.add_request([i, 2, 3], dataclasses.replace(GREEDY, max_tokens=100)) for i in range(4)
            ]
            results = {}
            for _ in range(40):
                collect(engine, results)
            if evicts:
                engine.finish_rounds()
                for sequence in list(engine.scheduler.running):
                    engine.scheduler.evict(sequence, engine.clock())
                engine.reset_prefix_cache()
            drain(engine, results)
            runs.append([results[i].ids for i in ids])
        assert [len(ids) for ids in runs[1]] == [100] * 4
        parted[kv] = sum(a != b for a, b in zip(*runs, strict=True))
    assert (parted["auto"], parted["fp8"]) == (0, 0) and parted["int8"] > 0, parted


# -- the engine as a value -------------------------------------------------------------------------------------------


@QUANTIZED
def test_a_snapshot_goes_on_token_for_token(kv, engine_of):
    engine, results = engine_of(kv_cache_dtype=kv), {}
    for request in mixed_requests(6):
        engine.add_request(*request)
    for _ in range(5):
        collect(engine, results)
    saved = pickle.loads(pickle.dumps(engine.snapshot()))
    assert saved.state.k_pages[0].dtype == NAMES[kv] and saved.state.k_scales[0].any()
    before = pickle.loads(pickle.dumps(results))
    want = drain(engine, results)
    engine.restore(saved)
    assert drain(engine, before) == want


@QUANTIZED
def test_sleep_frees_the_scales_too(kv, engine_of):
    engine = engine_of(kv_cache_dtype=kv)
    name = engine.add_request([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=20))
    results = {}
    collect(engine, results)
    state = engine.executor.state
    engine.sleep()
    assert all(array.is_deleted() for array in jax.tree.leaves(state.caches)) and len(state.caches[0]) == 4
    engine.wake_up()
    assert len(drain(engine, results)[name].ids) == 20


@QUANTIZED
def test_forks_share_pages(kv, engine_of):
    engine, results = engine_of(kv_cache_dtype=kv), {}
    params = dataclasses.replace(GREEDY, max_tokens=40)
    parent = engine.add_request([5] * 30, params)
    for _ in range(8):
        collect(engine, results)
    child = engine.fork(parent, dataclasses.replace(params, max_tokens=5))
    engine.step()
    own = {name: engine.requests.by_id[name].sequences[0].pages for name in (parent, child)}
    assert own[parent][:4] == own[child][:4]
    drain(engine, results)


@pytest.mark.parametrize("kv", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk", [0, 32])
def test_quantised_pages_are_updated_in_place(kv, chunk, toy):
    """O7: pages and scales alias, and nothing as large as a layer's pages is copied."""
    model, features = toy("base", num_layers=1), Features(attention="xla")
    state = jax.eval_shape(
        lambda: init_state(model.config, num_slots=4, num_pages=4096, page_size=8, dtype=NAMES[kv])
    )
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)
    if chunk:
        chunks = Chunks.empty(1, chunk, 4)
        lowered = prefill_chunk.lower(model.graph, params, state, chunks, slots=4, features=features)
    else:
        lowered = decode_steps.lower(model.graph, params, state, steps=2, slots=4, features=features)
    memory = lowered.compile().memory_analysis()
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(state.caches)]
    assert memory.alias_size_in_bytes >= sum(sizes)
    assert memory.temp_size_in_bytes < max(sizes) / 2, "room for a copy of one layer's pages"


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_pages_and_what_is_told_of_them(kv, toy):
    model = toy("base").config
    resolved = EngineConfig(kv_cache_dtype=kv, page_size=16).resolve(model, "cpu")
    assert resolved.kv_dtype == {"auto": "float32", "fp8_e4m3": "float8_e4m3fn", **NAMES}.get(kv, kv)
    size = {"int8": 1, "fp8": 1, "fp8_e4m3": 1, "bfloat16": 2, "float16": 2}.get(kv, 4)
    values, scales = (
        2 * model.num_layers * model.kv_width * size,
        2 * model.num_layers * model.num_kv_heads * 4,
    )
    assert resolved.page_bytes == 16 * values + scales * (size == 1)
    assert (resolved.dtype, resolved.limits.whole_pages) == ("float32", size == 1)
    need = info.needs(model, EngineConfig(kv_cache_dtype=kv), "cpu")
    assert (need.kv_dtype, need.kv_bytes_per_token) == (resolved.kv_dtype, values)
    state = jax.eval_shape(
        lambda: init_state(model, num_slots=1, num_pages=3, page_size=16, dtype=resolved.kv_dtype)
    )
    bytes_of_state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.caches))
    assert bytes_of_state == 3 * resolved.page_bytes


def test_more_pages_fit(toy):
    """In the same memory, as many as the smaller elements and the scales leave room for."""
    model = dataclasses.replace(toy("base").config, max_position_embeddings=1 << 20)
    plain, small = (
        EngineConfig(kv_cache_dtype=kv).resolve(model, "cpu").limits.num_pages for kv in ("auto", "int8")
    )
    assert 3.5 * plain < small < 4 * plain


def test_a_chunk_must_hold_a_page(toy):
    model, settings = toy("base").config, {"page_size": 32, "prefill_chunk_size": 16}
    with pytest.raises(ValueError, match=r"a chunk has 16 tokens, .*KV cache of int8 .* has 32; raise"):
        EngineConfig(kv_cache_dtype="int8", **settings).resolve(model, "cpu")
    EngineConfig(kv_cache_dtype="bfloat16", **settings).resolve(model, "cpu")
    EngineConfig(kv_cache_dtype="int8", max_model_len=16, **settings).resolve(model, "cpu")


def test_a_kernel_that_cannot_read_such_pages_is_refused(toy):
    model = dataclasses.replace(toy("base").config, head_dim=64, num_heads=8)
    options = {"attention_backend": "mosaic", "dtype": "bfloat16", "page_size": 64}
    EngineConfig(**options).resolve(model, "gpu", 1 << 34)
    with pytest.raises(ValueError, match=r"attention_backend .mosaic. cannot run this model: .*int8"):
        EngineConfig(kv_cache_dtype="int8", **options).resolve(model, "gpu", 1 << 34)

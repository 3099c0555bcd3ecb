"""O6: after warm-up nothing compiles or traces. O7: the compiled programs update the KV cache in place."""

import re

import jax
import numpy as np
import pytest

from harness import drain, make_engine, random_prompt, thrash
from jaxsched import SamplingParams, StructuredOutputsParams
from jaxsched.step import Features
from jaxsched.step.programs import UPDATE, ProgramKey, Programs, program_keys

COMPILE_EVENTS = "/jax/core/compile"  # tracing, lowering and compiling each report a duration under this name


class CompileCounter:
    def __init__(self):
        self.events = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event, duration, **_):
        if event.startswith(COMPILE_EVENTS):
            self.events.append(event)

    def close(self):
        jax.monitoring.unregister_event_duration_listener(self._listen)


@pytest.fixture
def compiles():
    counter = CompileCounter()
    yield counter.events
    counter.close()


def test_the_counter_counts(compiles):
    jax.jit(lambda x: x + 41)(1.0)
    assert len(compiles) >= 3


def mixed_traffic(engine, seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        if rng.random() < 0.5:
            params = SamplingParams(
                temperature=float(rng.choice([0, 1])),
                top_k=int(rng.integers(0, 9)),
                top_p=float(rng.choice([1, 0.5])),
                max_tokens=int(rng.integers(0, 30)),
                stop_token_ids=rng.integers(0, 255, rng.integers(0, 5)).tolist(),
            )
            engine.add_request(random_prompt(rng, int(rng.integers(1, 90))), params)
        if rng.random() < 0.1 and engine.requests.by_id:
            engine.abort(str(rng.choice(list(engine.requests.by_id))))
        if rng.random() < 0.1:
            thrash(engine, rng)
        engine.step()
    drain(engine)


REGEX = {"regex": "[a-c]+(, [a-c]+)*"}
ON_THE_HOST = {"json": {"type": "array", "items": {"type": "integer", "minimum": 7}}}


def rich_traffic(engine, seed):
    """Every feature that has programs of its own, in changing company."""
    rng = np.random.default_rng(seed)
    wishes = [
        {},
        {"temperature": 1},
        {"repetition_penalty": 1.2, "logit_bias": {3: 5}, "min_tokens": 2, "bad_words": ["ab", "the"]},
        {"logprobs": 4},
        {"logprobs": 0, "frequency_penalty": 1.0, "stop": "x"},
        {"prompt_logprobs": 2},
        {"structured_outputs": REGEX},
        {"structured_outputs": ON_THE_HOST, "logprob_token_ids": [1, 2]},
    ]
    for _ in range(60):
        if rng.random() < 0.6:
            wish = {"temperature": 0, **wishes[rng.integers(len(wishes))]}
            params = SamplingParams(**wish, max_tokens=int(rng.integers(2, 12)))
            pooling = str(rng.choice(["", "", "", "mean"]))
            engine.add_request(random_prompt(rng, int(rng.integers(1, 60))), params, pooling=pooling)
        if rng.random() < 0.1:
            thrash(engine, rng)
        engine.step()
    drain(engine)


def test_nothing_compiles_with_all_features_warm(toy, compiles):
    settings = {"num_scheduler_steps": 1, "max_num_seqs": 2, "prefill_chunk_size": 16, "num_pages": 40}
    engine = make_engine(toy("base", num_layers=1), **settings, warm_up="all")
    engine.constraints.compile(StructuredOutputsParams(**REGEX))
    compiles.clear()
    with jax.no_tracing():
        rich_traffic(engine, 0)
    assert compiles == []
    assert engine.stats.generation_tokens > 100


def test_a_feature_is_compiled_on_first_use_and_said(toy, compiles, caplog):
    engine = make_engine(toy("base"))
    compiles.clear()
    for _ in range(2):
        engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=3, logprobs=1))
        drain(engine)
    assert compiles and sum("asks for the first time" in record.message for record in caplog.records) == 1
    assert engine.scheduler.controller.host_seconds < 1  # compiling does not count as the work of a round
    compiles.clear()
    engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=3, logprobs=1))
    drain(engine)
    assert compiles == []


AUTO = {"num_scheduler_steps": "auto", "prefill_chunk_size": "auto"}


@pytest.mark.parametrize(
    "settings",
    [
        {"num_pages": 17},
        {"executor": "dispatch", "run_ahead": 2},
        AUTO,
        {"scheduling_policy": "prefill-first"},
    ],
    ids=str,
)
def test_nothing_compiles_after_warm_up(toy, compiles, settings):
    """Making the engine is the warm-up: the first request compiles nothing either."""
    engine = make_engine(toy("base"), **settings)
    compiles.clear()
    with jax.no_tracing():
        mixed_traffic(engine, 0)
    assert compiles == []
    stats = engine.stats
    assert stats.mixed_steps and stats.steps > stats.mixed_steps and stats.generation_tokens > 100
    assert engine.scheduler.num_preemptions > 0


ON_A_CPU = Features(attention="xla")
SAMPLINGS = (Features(sampling="full"), Features(sampling="greedy"))


def test_every_round_finds_its_programs():
    """Any round that a scheduler can plan is cut into compiled segments that hold it."""
    rng = np.random.default_rng(0)
    for scan in (True, False):
        for n, slots, chunks in ((8, (4, 16, 64), (16, 64, 256)), (1, (1,), (16,)), (6, (2, 8), (20, 80))):
            lengths, small = ((1, 3, n), (1, n)) if scan else ((1,), (1,))
            keys = program_keys(
                lengths=tuple(sorted(set(lengths))),
                small_lengths=tuple(sorted(set(small))),
                slot_buckets=slots,
                mixed_slots=slots[-1:],
                chunk_buckets=chunks,
                features=SAMPLINGS,
            )
            assert len(set(keys)) == len(keys)
            programs = Programs(keys)
            for _ in range(200):
                steps = int(rng.integers(1, n + 1))
                sizes = rng.integers(1, chunks[-1] + 1, rng.integers(0, steps + 1)).tolist()
                rows, features, alone = (
                    int(rng.choice(slots)),
                    SAMPLINGS[rng.integers(2)],
                    int(rng.integers(3)),
                )
                at = 0
                for segment in programs.segments(sizes, steps, rows, features, alone=alone):
                    key = segment.key
                    assert key in keys and key.features == features and key.slots >= rows
                    assert at >= alone or key.steps == 1
                    assert segment.first == at and (key.steps == 1 or (scan and not key.chunk_tokens))
                    inside = sizes[at : at + key.steps]
                    assert max(inside, default=0) <= key.chunk_tokens
                    assert len(inside) in (0, key.steps) and bool(inside) == bool(key.chunk_tokens)
                    at += key.steps
                assert at == steps


def test_the_number_of_programs_is_a_sum(toy):
    buckets = {
        "slot_buckets": (4, 16, 64),
        "mixed_slots": (16, 64),
        "chunk_buckets": (16, 64, 256),
        "features": (Features(),),
    }
    assert len(program_keys(lengths=(1, 2, 4, 8), small_lengths=(1, 8), **buckets)) == 1 + 4 + 2 * 2 + 2 * 3
    keys = program_keys(lengths=(1,), small_lengths=(1,), **buckets)
    several = (
        Features(),
        Features(controls=True),
        Features(logprobs=0, prompt="logprobs"),
    )  # of prompts: mixed only
    many = program_keys(lengths=(1, 2, 4, 8), small_lengths=(1, 8), **{**buckets, "features": several})
    assert len(many) == 1 + 2 * (4 + 2 * 2 + 2 * 3) + 2 * 3
    assert keys[0] == UPDATE and all(k.steps <= 1 for k in keys) and len(keys) <= 10


@pytest.fixture(scope="module")
def big_pool(toy):
    """A toy with a pool far larger than all else it computes with: 4 MiB a layer and side, 0.7 MiB of weights."""
    return make_engine(toy("base"), num_scheduler_steps=2, num_pages=4096, max_model_len=64)


KEYS = [
    ProgramKey(2, 0, 4, ON_A_CPU),
    ProgramKey(1, 0, 4, ON_A_CPU),
    ProgramKey(1, 32, 4, ON_A_CPU),
    UPDATE,
]
RICH = Features(controls=True, logprobs=20, attention="xla")


@pytest.mark.parametrize("key", KEYS, ids=lambda k: f"N{k.steps}-C{k.chunk_tokens}")
def test_the_kv_cache_is_updated_in_place(big_pool, key):
    compiled = big_pool.executor.programs._compiled[key]
    pages = [*big_pool.executor.state.k_pages, *big_pool.executor.state.v_pages]
    kv_bytes = sum(p.nbytes for p in pages)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= kv_bytes
    assert memory.temp_size_in_bytes < pages[0].nbytes / 2, "room for a copy of one layer's pages"
    assert not page_copies(compiled, pages[0].shape)


@pytest.mark.parametrize("chunk", [0, 32])
def test_controls_are_updated_in_place_too(big_pool, chunk):
    """Counts, biases and masks are large: with penalties and a constraint on, a scan must not copy them either."""
    key = ProgramKey(1 if chunk else 2, chunk, 4, RICH)
    compiled = big_pool.executor.programs._lower(key).compile()
    controls = big_pool.executor.controls.new()
    pages = [*big_pool.executor.state.k_pages, *big_pool.executor.state.v_pages]
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(
        x.nbytes for x in (*pages, *jax.tree.leaves(controls))
    )
    assert not page_copies(compiled, pages[0].shape)
    text = compiled.as_text()
    for array, kind in ((controls.counts, "s32"), (controls.bias, "f32"), (controls.automata.masks, "u32")):
        spelt = re.escape(f"{kind}[" + ",".join(map(str, array.shape)) + "]")
        assert re.search(spelt, text), "the shape is spelt in another way"
        assert not re.findall(rf"^.*= {spelt}\S* copy(?:-start)?\(.*$", text, re.MULTILINE), kind


def page_copies(compiled, shape):
    """Lines of the optimised program that copy an array of this shape."""
    text, spelt = compiled.as_text(), re.escape("f32[" + ",".join(map(str, shape)) + "]")
    assert re.search(spelt, text), "the shape is spelt in another way"
    return re.findall(rf"^.*= {spelt}\S* copy(?:-start)?\(.*$", text, re.MULTILINE)


def test_a_copy_would_be_found():
    pages = jax.ShapeDtypeStruct((64, 8, 2, 16), "float32")
    write = jax.jit(lambda p: p.at[3, 4].set(1.0))
    assert page_copies(write.lower(pages).compile(), pages.shape)
    write = jax.jit(lambda p: p.at[3, 4].set(1.0), donate_argnums=0)
    assert not page_copies(write.lower(pages).compile(), pages.shape)

"""EngineConfig: every field does something or is refused, and resolve() is a table."""

import dataclasses
import json
import math
import re
import types
from pathlib import Path

import pytest

from harness import GREEDY, make_engine
from jaxsched import LLM, EngineConfig, SamplingParams
from jaxsched.config import cache_dir
from jaxsched.loading import free_bytes
from jaxsched.models import ModelConfig
from jaxsched.schedule.policies import Priority
from jaxsched.schedule.rounds import AdaptiveRounds, FixedRounds
from jaxsched.step.programs import Programs

MODEL = ModelConfig("LlamaForCausalLM", 1000, 64, 2, 4, 2, 16, 128, 1024)
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, width, float32


def resolve(platform="cpu", free_bytes=None, model=MODEL, **settings):
    return EngineConfig(**settings).resolve(model, platform, free_bytes)


# -- every field does something ------------------------------------------------------------------------------------


def memory_of(utilization):
    stats = {"bytes_limit": 10 << 30, "bytes_in_use": 1 << 30}
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    free = free_bytes(device, utilization)
    return resolve("gpu", free, max_num_seqs=10_000_000, num_scheduler_steps=1).limits.num_pages


# field -> two values and what they change
SEEN_IN_RESOLVE = {
    "dtype": ("float32", "bfloat16"),
    "max_model_len": (None, 500),
    "max_num_seqs": (None, 7),
    "max_num_batched_tokens": (None, 100),
    "enable_chunked_prefill": (True, False),
    "num_scheduler_steps": ("auto", 3),
    "prefill_chunk_size": ("auto", None),
    "enable_prefix_caching": (True, False),
    "page_size": (16, 32),
    "num_pages": (None, 50),
    "executor": ("scan", "dispatch"),
    "attention_backend": ("auto", "triton"),
    "kv_cache_dtype": ("auto", "int8"),
    "max_logprobs": (20, 50),
    "logprobs_mode": ("raw_logprobs", "processed_logits"),
    "enable_lora": (False, True),
    "max_loras": (4, 3),
    "max_lora_rank": (16, 64),
}
SEEN_IN_CONTROLLER = {
    "target_ttft_ms": (None, 50),
    "target_itl_ms": (None, 20.0),
    "prefill_share": ((0.3, 0.5), [0.1, 0.2]),
    "stream_interval": (8, 2),
}
SEEN_ELSEWHERE = {
    "gpu_memory_utilization",
    "quantization",
    "seed",
    "max_stop_ids",
    "run_ahead",
    "scheduling_policy",
    "warm_up",
}


def test_no_field_is_left_out():
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert names == set(SEEN_IN_RESOLVE) | set(SEEN_IN_CONTROLLER) | SEEN_ELSEWHERE


@pytest.mark.parametrize("field", SEEN_IN_RESOLVE)
def test_field_changes_what_is_resolved(field):
    one, other = SEEN_IN_RESOLVE[field]
    with_it = {"enable_lora": True} if "lora" in field else {}
    assert resolve(**{**with_it, field: one}) != resolve(**{**with_it, field: other})


def controller(**settings):
    return EngineConfig(**settings).controller(resolve(**settings))


@pytest.mark.parametrize("field", SEEN_IN_CONTROLLER)
def test_field_changes_the_controller(field):
    """What the rules make of it is tested in tests/schedule; where nothing could use it, it is refused."""
    with_it = {"target_itl_ms": 9} if field in ("prefill_share", "target_ttft_ms") else {}
    one, other = (vars(controller(**{field: value}, **with_it)) for value in SEEN_IN_CONTROLLER[field])
    assert len([name for name in one if name != "cost" and one[name] != other[name]]) == 1
    fixed = {"num_scheduler_steps": 8, "prefill_chunk_size": 64, field: SEEN_IN_CONTROLLER[field][1]}
    with pytest.raises(
        ValueError, match=f"^{field} is .*both fixed, so there is nothing that it could steer"
    ):
        EngineConfig(**fixed)


@pytest.mark.parametrize("name", ["max_loras", "max_lora_rank"])
def test_what_goes_with_adapters(name):
    with pytest.raises(ValueError, match=f"^{name} is 8, but enable_lora is False, .*; set enable_lora=True"):
        EngineConfig(**{name: 8})


@pytest.mark.parametrize(("name", "value"), [("prefill_share", (0.1, 0.2)), ("target_ttft_ms", 9)])
def test_what_goes_with_a_target(name, value):
    with pytest.raises(
        ValueError, match=f"^{name} is .*, but without target_itl_ms prompts are read as fast"
    ):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("field", "value", "settings", "why"),
    [
        ("stream_interval", 2, {"num_scheduler_steps": 8}, "num_scheduler_steps is fixed"),
        (
            "prefill_share",
            (0.1, 0.2),
            {"prefill_chunk_size": 64, "target_itl_ms": 9},
            "prefill_chunk_size is fixed",
        ),
        (
            "target_ttft_ms",
            9,
            {"prefill_chunk_size": None, "target_itl_ms": 9},
            "prefill_chunk_size is fixed",
        ),
        (
            "target_ttft_ms",
            9,
            {"enable_chunked_prefill": False, "target_itl_ms": 9},
            "prefill_chunk_size is fixed",
        ),
    ],
)
def test_what_one_fixed_number_leaves_nothing_to_do(field, value, settings, why):
    with pytest.raises(ValueError, match=f'^{field} is .*, but {why}; leave it at "auto"'):
        EngineConfig(**{field: value}, **settings)
    EngineConfig(**settings)


def test_controllers():
    auto, fixed = controller(), controller(num_scheduler_steps=3, prefill_chunk_size=64)
    assert isinstance(auto, AdaptiveRounds) and isinstance(fixed, FixedRounds)
    assert (fixed.steps, fixed.chunk) == (3, 64)
    assert (auto.step_sizes, auto.chunk_sizes) == ((1, 2, 4, 8, 16), (16, 64, 128, 256))
    half = controller(num_scheduler_steps=3)
    assert (half.step_sizes, half.chunk_sizes) == ((3,), (16, 64, 128, 256))
    half = controller(prefill_chunk_size=None)
    assert (half.step_sizes, half.chunk_sizes) == ((1, 2, 4, 8, 16), (1024,))


def test_scheduling_policy(toy, monkeypatch):
    monkeypatch.setattr(Programs, "compile", lambda *_, **__: None)
    assert make_engine(toy("base"), scheduling_policy="fair").scheduler.policy.name == "fair"
    mine = Priority(ageing_s=None)
    assert make_engine(toy("base"), scheduling_policy=mine).scheduler.policy is mine
    with pytest.raises(ValueError, match="policy 'lifo' is unknown; choose one of stall-free, fcfs"):
        EngineConfig(scheduling_policy="lifo")


def test_gpu_memory_utilization():
    """On a GPU it sets the pool; on a CPU, where it cannot, LLM says so (tests/test_llm.py)."""
    assert memory_of(0.9) > memory_of(0.5) > memory_of(0.2) > 0
    assert memory_of(0.5) == ((5 << 30) - (1 << 30) - (512 << 20)) // (16 * BYTES_PER_TOKEN // 2)
    cpu = types.SimpleNamespace(platform="cpu", memory_stats=lambda: None)
    assert free_bytes(cpu, 0.9) is None


def test_seed(toy):
    def draw(seed):
        engine = make_engine(toy("base"), seed=seed)
        engine.add_request([1], SamplingParams(temperature=2.0, ignore_eos=True))
        return [t for _ in range(9) for p in engine.step() for t in p.outputs[0].token_ids]

    assert draw(0) == draw(0) != draw(1)


def test_max_stop_ids(toy, monkeypatch):
    params = SamplingParams(stop_token_ids=range(6))
    make_engine(toy("base")).add_request([1], params)
    monkeypatch.setattr(Programs, "compile", lambda *_, **__: None)  # it shall only refuse
    few = make_engine(toy("base"), max_stop_ids=7)
    assert few.executor.state.slots.stop_ids.shape == (4, 7)
    with pytest.raises(
        ValueError, match="are 8 together; this engine holds 7 per request; raise max_stop_ids"
    ):
        few.add_request([1], params)


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_run_ahead(toy, run_ahead):
    engine = make_engine(toy("base"), run_ahead=run_ahead)
    engine.add_request([1], dataclasses.replace(GREEDY, max_tokens=60), stream=False)
    engine.step()
    assert (len(engine.pipeline.flights), engine.stats.rounds) == (run_ahead, run_ahead + 1)


# -- what resolve() derives ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, {"num_slots": 32, "max_model_len": 1024, "chunk_tokens": 256, "num_steps": 16, "num_pages": 32 * 64}),
        ({"platform": "gpu"}, {"num_slots": 64}),
        ({"max_num_seqs": 64}, {"slot_buckets": (8, 16, 32, 64)}),
        ({"max_num_seqs": 10}, {"slot_buckets": (5, 10)}),
        ({"max_num_seqs": 3}, {"slot_buckets": (3,)}),
        ({"max_num_seqs": 1}, {"slot_buckets": (1,), "num_pages": 64}),
        ({"max_model_len": 100}, {"max_model_len": 100, "chunk_tokens": 64, "num_pages": 32 * 7}),
        ({"max_model_len": 40}, {"chunk_tokens": 40}),
        ({"max_model_len": 700}, {"chunk_tokens": 128}),  # a quarter of the window
        ({"prefill_chunk_size": 512}, {"chunk_tokens": 512}),
        ({"num_scheduler_steps": 5}, {"num_steps": 5}),
        ({"prefill_chunk_size": 64}, {"chunk_tokens": 64, "split_prompts": True}),
        ({"prefill_chunk_size": None}, {"chunk_tokens": 1024, "split_prompts": False}),
        ({"enable_chunked_prefill": False}, {"chunk_tokens": 1024, "split_prompts": False}),
        ({"max_num_batched_tokens": 132}, {"chunk_tokens": 100}),
        ({"max_num_batched_tokens": 5000}, {"chunk_tokens": 256}),
        ({"max_num_batched_tokens": 1056, "prefill_chunk_size": None}, {"chunk_tokens": 1024}),
        ({"num_pages": 5}, {"num_pages": 5}),
        ({"page_size": 1}, {"page_size": 1, "num_pages": 32 * 1024}),
        ({"max_num_seqs": 100_000}, {"num_pages": (1 << 30) // (16 * BYTES_PER_TOKEN)}),
    ],
    ids=str,
)  # fmt: skip
def test_limits(settings, want):
    limits = resolve(**settings).limits
    assert {name: getattr(limits, name) for name in want} == want


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, {"dtype": "float32", "executor": "scan", "variants": ("auto",), "pages_per_seq": 64}),
        ({"platform": "gpu"}, {"dtype": "bfloat16", "executor": "scan", "variants": ("full", "greedy")}),
        (
            {"platform": "gpu", "dtype": "float16"},
            {"dtype": "float16", "page_bytes": 16 * BYTES_PER_TOKEN // 2},
        ),
        ({"executor": "dispatch"}, {"executor": "dispatch"}),
        ({}, {"chunk_buckets": (16, 64, 128, 256), "lengths": (1, 4, 8, 16), "small_lengths": (1, 4)}),
        ({"max_num_batched_tokens": 132}, {"chunk_buckets": (16, 64, 100)}),
        ({"num_scheduler_steps": 6}, {"lengths": (1, 2, 4, 6), "small_lengths": (1, 6)}),
        ({"num_scheduler_steps": 1}, {"lengths": (1,), "small_lengths": (1,)}),
        ({"executor": "dispatch"}, {"lengths": (1,), "small_lengths": (1,)}),
        ({"prefill_chunk_size": None}, {"chunk_buckets": (16, 32, 64, 128, 256, 512, 1024)}),
        ({"prefill_chunk_size": 64}, {"chunk_buckets": (16, 64)}),
        ({"prefill_chunk_size": 256}, {"chunk_buckets": (16, 64, 256)}),
        ({"prefill_chunk_size": 20}, {"chunk_buckets": (20,)}),
        ({"prefill_chunk_size": 5}, {"chunk_buckets": (5,)}),
        ({"page_size": 100}, {"pages_per_seq": 11, "page_bytes": 100 * BYTES_PER_TOKEN}),
    ],
    ids=str,
)
def test_resolved(settings, want):
    resolved = resolve(**settings)
    assert {name: getattr(resolved, name) for name in want} == want


@pytest.mark.parametrize(
    ("saved", "platform", "dtype"),
    [("float32", "cpu", "float32"), ("bfloat16", "cpu", "float32"), ("bfloat16", "gpu", "bfloat16"),
     ("float16", "gpu", "float16"), ("float32", "gpu", "bfloat16")],
)  # fmt: skip
def test_auto_dtype(saved, platform, dtype):
    assert EngineConfig().resolve_dtype(dataclasses.replace(MODEL, dtype=saved), platform) == dtype


@pytest.mark.parametrize("slots", [1, 2, 5, 64])
@pytest.mark.parametrize("page_size", [1, 16, 512])
@pytest.mark.parametrize("steps", [1, 8, 33])
def test_a_round_may_always_change_the_pages_it_must(slots, page_size, steps):
    """All slots growing by N tokens fit the budget, and so does the longest prompt by itself."""
    resolved = resolve(max_num_seqs=slots, page_size=page_size, num_scheduler_steps=steps)
    growth = slots * (-(-(steps - 1) // page_size) + 1)
    assert resolved.limits.max_new_pages >= max(growth, resolved.pages_per_seq)


# -- what is refused -----------------------------------------------------------------------------------------------

COUNTS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages", "max_stop_ids",
          "stream_interval", "max_loras", "max_lora_rank")  # fmt: skip
MAY_BE_AUTO = ("num_scheduler_steps", "prefill_chunk_size")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *[(name, bad, "it must be an integer of at least 1") for name in COUNTS for bad in (0, -1, 2.0, "8", True)],
        *[(name, bad, "it must be an integer of at least 1") for name in MAY_BE_AUTO for bad in (0, -1, 2.0, True)],
        *[(name, bad, 'it must be a number or "auto"') for name in MAY_BE_AUTO for bad in ("8", "Auto", "")],
        *[(name, bad, "it must be a positive number of milliseconds")
          for name in ("target_ttft_ms", "target_itl_ms") for bad in (0, -1.0, math.inf, math.nan, "5", True)],
        *[("prefill_share", bad, "it must be two numbers with 0 <= low <= high <= 1")
          for bad in (0.5, (0.5,), (0.5, 0.3), (-0.1, 0.5), (0.1, 1.1), ("a", 1), None, (0, math.nan))],
        *[("enable_lora", bad, "it must be True or False") for bad in (1, None)],
        *[("enable_prefix_caching", bad, "it must be True or False") for bad in (1, None)],
        *[("run_ahead", bad, "it must be an integer of at least 0") for bad in (-1, 1.0, "1", False)],
        *[("dtype", bad, "it must be one of auto, bfloat16, float16, float32") for bad in ("int8", "", None, 32)],
        *[("kv_cache_dtype", bad, "it must be one of auto, float32, bfloat16, float16, int8, fp8, fp8_e4m3")
          for bad in ("float8_e4m3fn", "fp8_e5m2", "", None)],
        *[("executor", bad, "it must be one of auto, scan, dispatch") for bad in ("vmap", None)],
        *[("warm_up", bad, "it must be one of plain, all") for bad in ("some", None)],
        ("logprobs_mode", "log", "it must be one of raw_logprobs, raw_logits, processed_logprobs, processed_logits"),
        *[("max_logprobs", bad, "it must be an integer of at least -1") for bad in (-2, 1.5, None)],
        *[("seed", bad, "it must be an integer") for bad in (1.0, "1", None, True)],
        *[("enable_chunked_prefill", bad, "it must be True or False") for bad in (1, None, "no")],
        *[("gpu_memory_utilization", bad, "it must be in (0, 1]")
          for bad in (0, -0.5, 1.1, math.nan, "0.9", None, True)],
    ],
    ids=lambda v: str(v)[:24],
)  # fmt: skip
def test_bad_values(field, value, message):
    with pytest.raises(ValueError, match="^" + re.escape(f"{field} is {value!r}; {message}")):
        EngineConfig(**{field: value})


@pytest.mark.parametrize("field", ["num_scheduler_steps", "page_size", "max_stop_ids", "stream_interval"])
def test_none_is_only_for_what_is_derived(field):
    with pytest.raises(ValueError, match=f"{field} is None; it must be an integer of at least 1"):
        EngineConfig(**{field: None})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_model_len": 2000},
            "max_model_len is 2000, but the model's positions end at 1024; lower max_model_len",
        ),
        (
            {"max_num_batched_tokens": 32},
            "max_num_batched_tokens is 32, but max_num_seqs 32 decode rows leave no room for a chunk; raise it above",
        ),
        (
            {"max_num_batched_tokens": 1055, "prefill_chunk_size": None},
            "max_num_batched_tokens is 1055, but without chunked prefill a step holds a whole prompt of up to "
            "max_model_len 1024 tokens beside 32 decode rows; raise it to 1056, lower max_model_len, or turn",
        ),
        (
            {"platform": "gpu", "free_bytes": 100 << 20},
            "the KV pool has -412 MiB on this GPU, and one page of 16 tokens takes 0.00 MiB; lower page_size",
        ),
    ],
    ids=str,
)
def test_impossible_settings(settings, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        resolve(**settings)


def test_switches_that_contradict_each_other():
    message = (
        "prefill_chunk_size is 64, but enable_chunked_prefill is False, so prompts are read whole; leave one"
    )
    with pytest.raises(ValueError, match=message):
        EngineConfig(enable_chunked_prefill=False, prefill_chunk_size=64)
    assert not EngineConfig(enable_chunked_prefill=False, prefill_chunk_size=None).chunked


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_num_seq", "; did you mean 'max_num_seqs'\\?"),
        ("tensor_parallel", "; known: dtype, quantization, kv_cache_dtype, max_model_len, "),
    ],
)
def test_unknown_arguments(name, hint, tmp_path: Path):
    with pytest.raises(TypeError, match=f"LLM has no argument '{name}'{hint}"):
        LLM(tmp_path / "is not even looked for", **{name: 1})
    with pytest.raises(TypeError, match=name):
        EngineConfig(**{name: 1})


def test_impossible_settings_are_refused_before_the_weights_are_read(toy, tmp_path: Path):
    config = json.loads((toy("base").path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(ValueError, match="max_model_len is 513, but the model's positions end at 512"):
        LLM(tmp_path, max_model_len=513)


@pytest.mark.parametrize(
    ("env", "want"),
    [
        ({"JAXSCHED_CACHE_DIR": "/x/y"}, "/x/y"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/jaxsched/xla"),
        ({"HOME": "/home/me"}, "/home/me/.cache/jaxsched/xla"),
    ],
    ids=str,
)
def test_cache_dir(monkeypatch, env, want):
    for name in ("JAXSCHED_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == want

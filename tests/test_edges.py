"""Faults that were found by trying to break the engine, each kept as a test."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from harness import GREEDY, SMALL, assert_idle, oracle
from jaxsched import LLM, EngineConfig, SamplingParams
from jaxsched.models import ModelConfig, RopeConfig, family_of
from jaxsched.text import TokenizerError, load_tokenizer
from toys import TOYS, write_toy


@pytest.fixture(scope="module")
def llm(toy):
    with LLM(toy("base").path, **SMALL) as made:
        yield made


def generate(llm, prompts, params=GREEDY):
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def test_interrupts_lose_nothing(llm, toy):
    """Ctrl-C at 25 moments of a generation: it is raised, and the engine goes on as if nothing had happened."""
    prompts, params = [[1, 2, 3], [4] * 40], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    want = [oracle(toy("base"), ids, params)[0] for ids in prompts]
    generate(llm, prompts, params)
    start = time.perf_counter()
    generate(llm, prompts, params)
    usual = time.perf_counter() - start
    hit, came = 0, threading.Event()

    def interrupted(number, frame):
        came.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        for moment in np.linspace(0.02, 0.9, 25) * usual:
            came.clear()
            timer = threading.Timer(moment, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()  # on a busy machine it may be over before this returns
                generate(llm, prompts, params)
                late = time.monotonic() + 60
                while not came.is_set() and time.monotonic() < late:
                    time.sleep(0.001)  # one that comes late must hit here and nothing else
            except KeyboardInterrupt:
                hit += 1
            timer.join()
            assert_idle(llm.engine)
    finally:
        signal.signal(signal.SIGINT, before)
    assert hit > 10
    assert generate(llm, prompts, params) == want


@pytest.mark.parametrize("top_p", [1e-45, 1e-40, 1e-38, 1e-12])
def test_tiny_top_p_is_greedy(llm, top_p):
    params = SamplingParams(top_p=top_p, max_tokens=6, ignore_eos=True, seed=0)
    assert generate(llm, [[5, 6]], params) == generate(
        llm, [[5, 6]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    )


def test_huge_temperature(llm):
    """float32 cannot hold it. Warnings are errors here."""
    params = SamplingParams(temperature=1e300, max_tokens=4, seed=1, ignore_eos=True)
    assert len(generate(llm, [[1]], params)[0]) == 4
    with pytest.raises(ValueError, match=r"temperature is 1000+.*; it must be finite"):
        SamplingParams(temperature=10**400)


def test_odd_prompts_leave_the_others_alone(llm):
    with pytest.warns(UserWarning, match="4 of 5 prompts were refused"):
        outputs = llm.generate([{1: 2, "b": 3}, "a", b"abc", [True, False], [1.5]], GREEDY, use_tqdm=False)
    assert [output.error is None for output in outputs] == [False, True, False, False, False]
    with pytest.raises(TypeError, match="not bytes"):
        llm.generate(b"abc")
    with pytest.raises(TypeError, match="not NoneType"):
        llm.generate(None)
    with pytest.raises(TypeError, match="not dict"):
        llm.generate("a", {"temperature": 0})
    with pytest.raises(
        TypeError, match=r"SamplingParams has no argument 'max_new_tokens'; the name is max_tokens"
    ):
        SamplingParams(max_new_tokens=3)


def test_restoring_under_a_stream_is_reported(llm):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    first = llm.stream([1, 2], params)
    next(first)
    snapshot = llm.engine.snapshot()
    list(first)
    second = llm.stream([[3], [4]], params)
    next(second)
    llm.engine.restore(snapshot)
    with pytest.raises(RuntimeError, match="the engine was restored meanwhile"):
        list(second)
    for request_id in list(llm.engine.requests.by_id):
        llm.engine.abort(request_id)
    while llm.engine.has_work:
        llm.engine.step()
    assert_idle(llm.engine)


def test_outputs_do_not_share_the_engines_lists(llm):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    want = generate(llm, [[7, 8]], params)
    pieces = llm.stream([7, 8], params)
    _, piece = next(pieces)
    piece.prompt_token_ids.append(9999)
    assert [piece.outputs[0].token_ids + [t for _, p in pieces for t in p.outputs[0].token_ids]] == want


def test_one_message_is_a_conversation(llm):
    message = {"role": "user", "content": "hi"}
    assert llm.chat_prompts(message) == llm.chat_prompts([message]) == llm.chat_prompts(iter([[message]]))


def test_many_eos_ids(tmp_path):
    path = write_toy(tmp_path, **TOYS["base"])
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": list(range(30, 50))}))
    with LLM(path, **{**SMALL, "max_num_seqs": 1, "num_scheduler_steps": 1}) as llm:
        [output] = llm.generate("abc", SamplingParams(max_tokens=8, seed=0), use_tqdm=False)
    assert output.error is None


MALFORMED = {
    "tokenizer_config.json": [b"[" * 200_000, b'{"bos_token": {"a": 1}}', b'{"added_tokens_decoder": [1]}',
                              b'{"chat_template": [{"x": 1}]}', b'{"additional_special_tokens": 5}'],
    "chat_template.jinja": [b"\xff\xfe"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data"), [(name, data) for name, all_ in MALFORMED.items() for data in all_], ids=range(6)
)
def test_malformed_tokenizer_files(tmp_path: Path, name: str, data: bytes):
    path = write_toy(tmp_path, **TOYS["base"])
    (path / name).write_bytes(data)
    with pytest.raises(TokenizerError, match="download it again"):
        load_tokenizer(path)


BASE = ModelConfig("LlamaForCausalLM", 300, 64, 2, 4, 2, 16, 128, 256)


@pytest.mark.parametrize(
    "rope",
    [{"theta": -5.0}, {"theta": float("inf")}, {"kind": "linear", "factor": 0.0},
     {"kind": "llama3", "factor": 2.0, "original_max_position": 64, "low_freq_factor": 4.0},
     {"kind": "yarn", "factor": -1.0, "original_max_position": 64}, {"kind": "yarn", "factor": 2.0},
     {"kind": "yarn", "factor": 2.0, "original_max_position": 64, "beta_fast": 0.0}],
    ids=str,
)  # fmt: skip
def test_rope_values_that_make_no_sense(rope):
    with pytest.raises(ValueError, match="rope: "):
        RopeConfig(**rope)


def test_configurations_that_make_no_sense():
    with pytest.raises(ValueError, match="norm_eps is nan"):
        ModelConfig(**{**BASE.__dict__, "norm_eps": float("nan")})
    assert family_of({"architectures": "LlamaForCausalLM"})
    with pytest.raises(ValueError, match="num_scheduler_steps is 1000000000; it must be at most 1024"):
        EngineConfig(num_scheduler_steps=10**9)
    with pytest.raises(ValueError, match=r"num_pages is 1000000000, which takes .* but this CPU has"):
        EngineConfig(num_pages=10**9).resolve(BASE, "cpu")
    with pytest.raises(ValueError, match="lower page_size, set num_pages"):
        EngineConfig(page_size=10**9).resolve(BASE, "cpu")
    assert EngineConfig(max_model_len=np.int64(64)).max_model_len == 64
    with pytest.raises(FileNotFoundError, match="an empty name"):
        LLM("")

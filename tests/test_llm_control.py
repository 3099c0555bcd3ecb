"""LLM: samples, order of service, forks, metrics, round log, timelines, sleep."""

import gc
import json
import warnings

import pytest

from harness import assert_idle, oracle
from jaxsched import LLM, SamplingParams
from jaxsched.engine.entry import sample_seed
from jaxsched.metrics import read_round_log
from jaxsched.metrics.prometheus import text as prometheus_text

SMALL = {"max_num_seqs": 4, "num_pages": 64, "page_size": 8, "max_model_len": 128, "num_scheduler_steps": 4,
         "prefill_chunk_size": 32, "use_tqdm_on_load": False}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(toy):
    return toy("base")


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model.path, **SMALL) as made:
        yield made


def test_samples(llm, model):
    params = SamplingParams(n=3, temperature=1.5, seed=9, max_tokens=10, ignore_eos=True)
    prompts = [[1] * 20, [2] * 33]
    for output, prompt in zip(llm.generate(prompts, params, use_tqdm=False), prompts, strict=True):
        assert [sample.index for sample in output.outputs] == [0, 1, 2] and output.finished
        assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
        for sample in output.outputs:
            alone = SamplingParams(
                temperature=1.5, seed=sample_seed(9, sample.index), max_tokens=10, ignore_eos=True
            )
            assert sample.token_ids == oracle(model, prompt, alone)[0]
            assert sample.text == model.tokenizer.decode(sample.token_ids)
            assert sample.finish_reason == "length"
        assert output.metrics.generation_tokens == 30
    assert_idle(llm.engine)


def test_samples_are_streamed_by_index(llm):
    params = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    tokens, ends = {0: [], 1: []}, 0
    for index, piece in llm.stream([[5, 6, 7]], params):
        assert index == 0
        for sample in piece.outputs:
            tokens[sample.index] += sample.token_ids
        ends += piece.finished
    assert [len(t) for t in tokens.values()] == [8, 8] and tokens[0] != tokens[1] and ends == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"n": 0}, "n is 0; it must be an integer of at least 1"),
        ({"n": 2.0}, "n is 2.0; it must be an integer"),
        ({"n": 5000}, "n is 5000; it must be at most 1024"),
        (
            {"n": 2, "temperature": 0},
            "n is 2, but temperature 0 is greedy, so all samples would be equal; raise",
        ),
    ],
)
def test_bad_numbers_of_samples(options, error):
    with pytest.raises(ValueError, match=error):
        SamplingParams(**options)


def test_order_of_service(model):
    """With one slot the order in which requests start is the policy's."""
    settings = {**SMALL, "max_num_seqs": 1, "scheduling_policy": "priority"}
    with LLM(model.path, **settings) as llm:
        prompts = [[i] * 5 for i in range(6)]
        outputs = llm.generate(prompts, GREEDY, priority=[0, 50, -40, 3, 2, 10], use_tqdm=False)
        started = sorted(range(6), key=lambda i: outputs[i].metrics.first_scheduled)
        assert started == [2, 0, 4, 3, 5, 1]
        with pytest.raises(
            ValueError, match="2 values of priority for 1 prompts; give one for all, or one for"
        ):
            llm.generate([1, 2], GREEDY, priority=[1, 2])
        with pytest.raises(ValueError, match="priority is 'high'; it must be an integer"):
            llm.generate([1, 2], GREEDY, priority="high", use_tqdm=False)
        with pytest.raises(ValueError, match="client is 5; it must be a string"):
            llm.generate([1, 2], GREEDY, client=5, use_tqdm=False)


def test_clients_take_turns(model):
    settings = {**SMALL, "max_num_seqs": 1, "scheduling_policy": "fair"}
    with LLM(model.path, **settings) as llm:
        prompts = [[i] * 5 for i in range(8)]
        outputs = llm.generate(prompts, GREEDY, client=["a"] * 6 + ["b"] * 2, use_tqdm=False)
        started = sorted(range(8), key=lambda i: outputs[i].metrics.first_scheduled)
        assert set(started[:4]) == {0, 1, 6, 7}


def test_cached_prompts(llm):
    prompt = list(range(40, 100))
    llm.reset_prefix_cache()
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, 56)
    other = llm.generate({"prompt_token_ids": prompt, "cache_salt": "mine"}, GREEDY, use_tqdm=False)[0]
    assert other.metrics.cached_tokens == 0
    llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].metrics.cached_tokens == 0


def test_fork(llm, model):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    stream = llm.stream([[7, 8, 9] * 9], params)
    ids = []
    while len(ids) < 10:
        _, piece = next(stream)
        ids += piece.outputs[0].token_ids
    fork = llm.fork(piece.request_id, SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True))
    branch = list(fork)
    assert branch[0].prompt_token_ids == [7, 8, 9] * 9 + ids
    got = [t for p in branch for t in p.outputs[0].token_ids]
    alone = SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True)
    assert got == oracle(model, branch[0].prompt_token_ids, alone)[0]
    assert branch[-1].metrics.cached_tokens >= 24  # whole pages of the 37 tokens they share
    for _, piece in stream:
        ids += piece.outputs[0].token_ids
    assert ids == oracle(model, [7, 8, 9] * 9, params)[0]
    with pytest.raises(ValueError, match=r"request id .* is not running, so it cannot be forked"):
        llm.fork(piece.request_id)
    assert_idle(llm.engine)


def test_a_fork_that_nobody_reads_is_aborted(llm):
    stream = llm.stream([[1, 2, 3]], SamplingParams(temperature=1, max_tokens=60, ignore_eos=True))
    _, piece = next(stream)
    unread, begun = llm.fork(piece.request_id), llm.fork(piece.request_id)
    next(begun)
    unread.close()
    del begun
    stream.close()
    gc.collect()
    assert_idle(llm.engine)


def test_metrics(model):
    with LLM(model.path, **SMALL) as llm:
        llm.generate([[1, 2, 3], [4] * 50], GREEDY, use_tqdm=False)
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        value = {name: getattr(metric, "value", None) for name, metric in metrics.items()}
        assert value["jaxsched:generation_tokens"] == 24 and value["jaxsched:prompt_tokens"] == 53
        assert value["jaxsched:num_requests_running"] == value["jaxsched:num_requests_waiting"] == 0
        assert value["jaxsched:prefix_cache_queries"] == 53 and value["jaxsched:prefix_cache_hits"] == 0
        assert metrics["jaxsched:time_to_first_token_seconds"].count == 2
        assert metrics["jaxsched:inter_token_latency_seconds"].count > 15
        assert value["jaxsched:kv_cache_usage_perc"] == 0
        assert "jaxsched:generation_tokens_total 24.0" in prometheus_text(llm.engine.metrics)


def test_round_log(model, tmp_path):
    with LLM(model.path, **SMALL) as llm:
        log = llm.record_rounds(tmp_path / "rounds.jsonl")
        llm.generate([[1, 2, 3], [4] * 50], GREEDY, use_tqdm=False)
        log.close()
        rounds = list(read_round_log(tmp_path / "rounds.jsonl"))
        assert sum(r.decode_tokens for r in rounds) == 24 and sum(r.prefill_tokens for r in rounds) == 53
        assert rounds == list(llm.engine.rounds)
        with pytest.warns(RuntimeWarning, match="the round log ends here"):
            llm.generate([1], GREEDY, use_tqdm=False)  # it is closed, which hurts nobody
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm.generate([1], GREEDY, use_tqdm=False)


def test_timeline(model, tmp_path):
    with LLM(model.path, **SMALL) as llm:
        with pytest.raises(ValueError, match="record"):
            llm.timeline(tmp_path / "empty.png")
        llm.generate([[1, 2, 3], [4] * 50], GREEDY, use_tqdm=False)
        llm.timeline(tmp_path / "t.png")
        llm.timeline(tmp_path / "t.json", limit_s=60)
        assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_sleep(model):
    with LLM(model.path, **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        stream = llm.stream([[1, 2, 3]], params)
        ids = list(next(stream)[1].outputs[0].token_ids)
        llm.sleep()
        llm.sleep()
        assert all(page.is_deleted() for page in llm.engine.executor.state.k_pages)
        with pytest.raises(RuntimeError, match="this LLM is asleep; call wake_up\\(\\) first"):
            llm.generate([1], GREEDY, use_tqdm=False)
        with pytest.raises(RuntimeError, match="asleep"):
            llm.engine.snapshot()
        llm.wake_up()
        llm.wake_up()
        for _, piece in stream:
            ids += piece.outputs[0].token_ids
        assert ids == oracle(model, [1, 2, 3], params)[0]
        assert (
            llm.generate([5], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == oracle(model, [5], GREEDY)[0]
        )
        assert_idle(llm.engine)


def test_closed(model):
    llm = LLM(model.path, **SMALL)
    llm.close()
    for call in (llm.sleep, llm.wake_up, llm.reset_prefix_cache, lambda: llm.fork("1")):
        with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
            call()

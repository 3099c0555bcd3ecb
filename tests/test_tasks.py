"""What was found wrong in likelihoods, controls and constraints by people who tried to break them."""

import numpy as np
import pytest

from controls_oracle import log_softmax, logits_after
from harness import Result, assert_idle, collect, drain, make_engine, run_all
from jaxsched import LLM, BeamSearchParams, SamplingParams
from toys import TOYS, write_toy

SMALL = {"max_model_len": 64, "max_num_seqs": 2, "num_scheduler_steps": 1, "prefill_chunk_size": 32, "page_size": 8,
         "use_tqdm_on_load": False}  # fmt: skip


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with LLM(
        write_toy(tmp_path_factory.mktemp("tasks"), **{**TOYS["base"], "num_layers": 1}), **SMALL
    ) as llm:
        yield llm


def score(llm, *args):
    return llm.score(*args, use_tqdm=False)


def test_tokens_that_the_continuation_changes_are_scored(llm, monkeypatch):
    """When prompt and continuation make one token together, that token is scored."""
    merged = {"ab": [97, 98], "abc": [97, 260]}
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, add_special_tokens=True: merged[text])
    [one] = score(llm, "ab", "c")
    assert (one.prompt_token_ids, one.token_ids) == ([97], [260]) and one.logprob < 0
    merged["abc"] = [97, 98]  # as if nothing had been added
    [one] = score(llm, "ab", "c")
    assert one.token_ids == [98]


def test_an_empty_prompt_scores_all_of_the_continuation(llm, toy):
    bos, ids = llm.engine.bos_token_id, [104, 105]
    want = [log_softmax(logits_after(toy("base", num_layers=1), [bos, *ids[:i]]))[ids[i]] for i in range(2)]
    for args in (("", "hi"), ("  ", "hi"), ([[]], [ids])):
        [one] = score(llm, *args)
        assert one.token_ids[-2:] == ids and len(one.token_ids) == len(one.token_logprobs)
    np.testing.assert_allclose(one.token_logprobs, want, atol=1e-4)
    [one] = score(llm, [np.array([1, 2, 3])], [np.array([4])])
    assert one.token_ids == [4] and type(one.token_ids[0]) is int


def test_what_cannot_be_scored_fails_alone(llm, monkeypatch):
    good, surrogate, mixed, long = score(llm, ["ok", "\ud800", "a", "b"], ["a", "b", [1], "c" * 99])
    assert good.error is None and good.logprob < 0 and len(good.token_ids) == 1
    assert all(
        isinstance(one.error, ValueError) and not one.token_logprobs for one in (surrogate, mixed, long)
    )
    with pytest.raises(ValueError, match="must both be text"):
        score(llm, "a", [[1]])
    monkeypatch.setattr(llm.engine, "bos_token_id", None)
    with pytest.raises(ValueError, match="no token before the first"):
        score(llm, [[]], [[5]])


def test_beams_end_with_the_context(llm):
    [output] = llm.beam_search("x", BeamSearchParams(beam_width=1, max_tokens=2**70))
    assert len(output.outputs[0].token_ids) <= SMALL["max_model_len"]
    with pytest.raises(ValueError, match="beam_width is 11, which takes 22 log-probabilities"):
        llm.beam_search("x", BeamSearchParams(beam_width=11, max_tokens=2))


FEW_PROGRAMS = {"num_scheduler_steps": 1, "max_num_seqs": 2, "prefill_chunk_size": 16, "num_pages": 40}


@pytest.mark.parametrize("penalty", [1e-50, 1e-38, 1e-30, 1e30, 1e300])
def test_penalties_never_bring_forbidden_tokens_back(toy, penalty):
    engine = make_engine(toy("base", num_layers=1), **FEW_PROGRAMS)
    params = SamplingParams(
        temperature=0,
        repetition_penalty=penalty,
        allowed_token_ids=[65, 66, 67, 68],
        max_tokens=6,
        ignore_eos=True,
    )
    for one in (params, SamplingParams(**{**vars(params), "temperature": 1.0, "seed": 1})):
        [result] = run_all(engine, [([1, 2, 3, 65], one)])
        assert len(result.ids) == 6 and set(result.ids) <= {65, 66, 67, 68}


def test_huge_minimal_lengths(toy):
    engine = make_engine(toy("base", num_layers=1), **FEW_PROGRAMS)
    [result] = run_all(engine, [([1], SamplingParams(temperature=0, min_tokens=2**40, max_tokens=None))])
    assert len(result.ids) == 127 and result.finish_reason == "length"


def test_text_needs_a_tokenizer(toy):
    engine = make_engine(toy("base", num_layers=1), tokenizer=None)
    wishes = ({"stop": ["a"]}, {"bad_words": ["a"]}, {"structured_outputs": {"regex": "a"}})
    for wish in wishes:
        with pytest.raises(ValueError, match=f"{next(iter(wish))}.* tokenizer"):
            engine.add_request([1], SamplingParams(max_tokens=5, **wish))
    assert_idle(engine)


@pytest.mark.parametrize(
    "spec", [{"regex": "[a-f]{40}"}, {"json": {"type": "array", "items": {"minimum": 3}}}], ids=str
)
def test_a_constraint_goes_on_in_another_engine(toy, spec):
    params = SamplingParams(temperature=1, seed=1, max_tokens=30, structured_outputs=spec, logprobs=2)
    first, second = (make_engine(toy("base", num_layers=1), **FEW_PROGRAMS) for _ in range(2))
    [want] = run_all(first, [([1, 2, 3], params)])
    results: dict[str, Result] = {}
    name = first.add_request([1, 2, 3], params)
    while len(results.get(name, Result()).ids) < 3:
        collect(first, results)
    second.restore(first.snapshot())
    drain(second, results)
    assert (results[name].ids, results[name].text, len(results[name].logprobs)) == (
        want.ids,
        want.text,
        len(want.ids),
    )
    assert_idle(second)


def test_a_fork_without_room(toy):
    engine = make_engine(toy("base", num_layers=1))
    parent = engine.add_request([1, 2], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    results: dict[str, Result] = {}
    collect(engine, results)
    child = engine.fork(parent, SamplingParams(max_tokens=0))
    drain(engine, results)
    assert results[child].finish_reason == "length" and not results[child].ids
    assert_idle(engine)


def test_malformed_schemas_are_refused_alone(llm):
    malformed = [
        {"type": [{"a": 1}]},
        {"type": "string", "format": ["x"]},
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": [{"a": 1}]},
    ]
    params = [SamplingParams(max_tokens=2, structured_outputs={"json": schema}) for schema in malformed]
    with pytest.warns(UserWarning, match="3 of 4 prompts were refused"):
        outputs = llm.generate(["a"] * 4, [*params, SamplingParams(max_tokens=2)], use_tqdm=False)
    assert all(isinstance(output.error, ValueError) for output in outputs[:3]) and outputs[3].error is None


def test_a_closed_llm_compiles_nothing(tmp_path):
    llm = LLM(write_toy(tmp_path, **{**TOYS["base"], "num_layers": 1}), **SMALL)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a", SamplingParams(structured_outputs={"regex": "zz"}), use_tqdm=False)
    assert llm.engine.constraints._compiler is None

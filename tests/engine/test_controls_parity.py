"""What a request may ask beyond plain sampling, through the engine, against transformers (tests/goldens/sampling.json).

The script that wrote the goldens made sure that no token hangs on float noise and that each control matters.
"""

import copy
import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from harness import GREEDY, SMALL, make_engine, run_all
from jaxsched import LLM, SamplingParams
from jaxsched.request import BeamSearchParams

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "sampling.json").read_text())
PROMPTS = GOLDENS["prompts"]
TOYS = sorted({prompt["toy"] for prompt in PROMPTS})
CASES = sorted({run["case"] for run in GOLDENS["runs"]})
CLOSE = 2e-4  # logits and log-probabilities, in float32 with sums in another order
MODES = {  # engine setting -> which distribution of a golden, which field has the value of the token
    "raw_logprobs": ("raw", "chosen"),
    "raw_logits": ("raw", "logit"),
    "processed_logprobs": ("processed", "chosen"),
    "processed_logits": ("processed", "logit"),
}


def spelled(ids) -> str:
    """A "word" that ``with_words`` encodes as these ids."""
    return "#" + " ".join(map(str, ids))


def with_words(model):
    """The model, its tokenizer encoding "#7 300" as [7, 300]: many tokens have no text that is encoded to them."""
    tokenizer = copy.copy(model.tokenizer)
    encode = tokenizer.encode

    def patched(text, add_special_tokens=True):
        if re.fullmatch(r" ?#[\d ]+", text):
            return [int(number) for number in re.findall(r"\d+", text)]
        return encode(text, add_special_tokens)

    tokenizer.encode = patched
    return dataclasses.replace(model, tokenizer=tokenizer)


def params_of(run, **more) -> SamplingParams:
    given = dict(run["params"])
    words = [spelled(ids) for ids in given.pop("bad_word_ids", ())]
    bias = {int(token): value for token, value in given.pop("logit_bias", {}).items()}
    if bias:
        given["logit_bias"] = bias
    return SamplingParams(temperature=0, max_tokens=24, bad_words=words, **given, **more)


def runs_of(toy: str, case: str | None = None) -> list[dict]:
    runs = [run for run in GOLDENS["runs"] if PROMPTS[run["prompt"]]["toy"] == toy]
    return [run for run in runs if case in (None, run["case"])]


def requests_of(runs, **more):
    return [(PROMPTS[run["prompt"]]["ids"], params_of(run, **more)) for run in runs]


@pytest.fixture(scope="module")
def engine_of(toy):
    """``engine_of("base", 4)``: an engine of a toy with N steps, made once."""
    made = {}

    def make(name: str, steps: int, mode: str = "raw_logprobs"):
        key = (name, steps, mode)
        if key not in made:
            executor = "dispatch" if steps == 1 else "scan"
            made[key] = make_engine(
                with_words(toy(name)),
                num_scheduler_steps=steps,
                executor=executor,
                logprobs_mode=mode,
                prefill_chunk_size=16,
            )
        return made[key]

    return make


def check_output(result, run):
    got = (result.ids, result.finish_reason, result.stop_reason)
    assert got == (run["token_ids"], run["finish_reason"], run["stop_reason"]), run["case"]


def check_place(got, token, want, i, value="chosen"):
    """One dict of log-probabilities: the token, and the best, against place ``i`` of a golden distribution.

    ``want["top"]`` are log-probabilities; where ``value`` is "logit" they are shifted to scores.
    """
    width = len(want["top"][i])
    assert got[token].logprob == pytest.approx(want[value][i], abs=CLOSE)
    if want["rank"][i] is not None:
        assert got[token].rank == want["rank"][i]
    shift = want[value][i] - want["chosen"][i]
    best = {t: v + shift for t, v in zip(want["top_ids"][i], want["top"][i], strict=True)}
    ranked = sorted((t for t in got if got[t].rank <= width), key=lambda t: got[t].rank)
    assert len(ranked) == width and len(got) == width + (token not in ranked)
    np.testing.assert_allclose([got[t].logprob for t in ranked], [*best.values()], atol=CLOSE, rtol=0)
    for t in ranked:  # two that are equal up to noise may have swapped places, also across the last one
        assert got[t].logprob == pytest.approx(best.get(t, min(best.values())), abs=CLOSE)


def check_logprobs(result, run, which="raw", value="chosen"):
    assert len(result.logprobs) == len(result.ids)
    for i, token in enumerate(result.ids):
        check_place(result.logprobs[i], token, run[which], i, value)


# Toy and N; each engine compiles its own programs, so by default there is one.
WHERE = [("base", 4)]
WHERE += [pytest.param(*pair, marks=pytest.mark.slow) for pair in (("base", 1), ("gqa3", 1), ("gqa3", 4))]
SOME_TOYS = [name if name == "base" else pytest.param(name, marks=pytest.mark.slow) for name in TOYS]
SOME_MODES = [
    mode if mode == "processed_logprobs" else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES
]


def test_the_goldens_have_every_case():
    assert len(CASES) == 20
    assert len(GOLDENS["runs"]) == len(PROMPTS) * len(CASES)
    assert {run["finish_reason"] for run in GOLDENS["runs"]} == {"stop", "length"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "steps"), WHERE)
def test_a_control(name, case, steps, engine_of):
    """Each case by itself: tokens, how they ended, and the model's own distribution at each of them."""
    runs = runs_of(name, case)
    for result, run in zip(run_all(engine_of(name, steps), requests_of(runs, logprobs=5)), runs, strict=True):
        check_output(result, run)
        check_logprobs(result, run)


@pytest.mark.parametrize(("name", "steps"), WHERE)
def test_all_cases_in_one_batch(name, steps, engine_of):
    """More requests than slots, in an order in which neighbours differ; half of them report log-probabilities."""
    runs = runs_of(name)
    order = np.random.default_rng(steps).permutation(len(runs))
    runs = [runs[i] for i in order]
    requests = requests_of(runs[::2], logprobs=5) + requests_of(runs[1::2])
    runs = runs[::2] + runs[1::2]
    mixed = np.random.default_rng(7).permutation(len(runs))
    results = run_all(engine_of(name, steps), [requests[i] for i in mixed])
    for result, i in zip(results, mixed, strict=True):
        check_output(result, runs[i])
        if requests[i][1].logprobs is None:
            assert result.logprobs == []
        else:
            check_logprobs(result, runs[i])


@pytest.mark.parametrize("mode", SOME_MODES)
def test_what_logprobs_are_of(mode, engine_of):
    """The four modes. Those of what was processed differ from those of the model, or this would say nothing."""
    which, value = MODES[mode]
    runs = [run for run in runs_of("base") if run["processed"] is not None]
    assert len(runs) == 10
    assert all(run["processed"]["chosen"] != run["raw"]["chosen"] for run in runs)
    for result, run in zip(
        run_all(engine_of("base", 4, mode), requests_of(runs, logprobs=5)), runs, strict=True
    ):
        check_output(result, run)
        check_logprobs(result, run, which, value)


def test_cumulative_logprob(engine_of):
    """The last piece of a request says the sum over all of its tokens."""
    engine = engine_of("base", 4)
    runs = runs_of("base", "all") + runs_of("base", "plain")
    ids = [engine.add_request(*request) for request in requests_of(runs, logprobs=0)]
    sums = {}
    while engine.has_work:
        for piece in engine.step():
            sums[piece.request_id] = piece.outputs[0].cumulative_logprob
    for name, run in zip(ids, runs, strict=True):
        assert sums[name] == pytest.approx(sum(run["raw"]["chosen"]), abs=24 * CLOSE)


@pytest.mark.parametrize(("name", "steps"), WHERE)
def test_prompt_logprobs(name, steps, engine_of):
    """Prompts of 70 tokens, in chunks of 16, beside a request that wants none."""
    entries = [e for e in GOLDENS["prompt_logprobs"] if PROMPTS[e["prompt"]]["toy"] == name]
    params = dataclasses.replace(GREEDY, max_tokens=3, prompt_logprobs=3)
    [other] = runs_of(name, "plain")[:1]
    requests = [(e["ids"], params) for e in entries] + requests_of([other])
    *results, last = run_all(engine_of(name, steps), requests)
    check_output(last, other)
    assert last.prompt_logprobs is None
    for result, entry in zip(results, entries, strict=True):
        first, *rest = result.prompt_logprobs
        assert first is None and len(rest) == len(entry["ids"]) - 1 == 69
        for i, (got, token) in enumerate(zip(rest, entry["ids"][1:], strict=True)):
            check_place(got, token, entry, i)


@pytest.mark.parametrize("name", SOME_TOYS)
def test_likelihoods_of_continuations(name, engine_of):
    """The sum over the continuation's tokens of what prompt_logprobs says, and whether each was the best."""
    entries = [e for e in GOLDENS["likelihoods"] if PROMPTS[e["prompt"]]["toy"] == name]
    params = dataclasses.replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    requests = [(e["context"] + e["continuation"], params) for e in entries]
    for result, entry in zip(run_all(engine_of(name, 4), requests), entries, strict=True):
        tokens, start = entry["continuation"], len(entry["context"])
        known = [one[t] for one, t in zip(result.prompt_logprobs[start:], tokens, strict=True)]
        assert sum(x.logprob for x in known) == pytest.approx(entry["logprob"], abs=len(tokens) * CLOSE)
        assert all(x.rank == 1 for x in known) == entry["is_greedy"]


# -- what LLM makes of it ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SOME_TOYS)
def served(request, toy):
    """A toy's name, and an LLM of it."""
    with LLM(toy(request.param).path, dtype="float32", **SMALL) as llm:
        yield request.param, llm


def entries_of(key: str, name: str) -> list[tuple[list[int], dict]]:
    """Entries of a golden list that are about one toy, each after its prompt."""
    prompts = [(PROMPTS[entry["prompt"]], entry) for entry in GOLDENS[key]]
    return [(prompt["ids"], entry) for prompt, entry in prompts if prompt["toy"] == name]


def test_beam_search(served):
    """Beams that are complete and beams that are not, by three ways of ordering them."""
    name, llm = served
    for prompt, entry in entries_of("beams", name):
        how = {key: entry[key] for key in ("length_penalty", "ignore_eos")}
        params = BeamSearchParams(beam_width=3, max_tokens=8, include_stop_str_in_output=True, **how)
        [output] = llm.beam_search([prompt], params)
        want = entry["sequences"]
        assert [beam.token_ids for beam in output.outputs] == [beam["token_ids"] for beam in want], how
        got = [beam.cumulative_logprob for beam in output.outputs]
        assert got == pytest.approx([beam["logprob"] for beam in want], abs=8 * CLOSE)


def test_the_goldens_have_complete_beams():
    """Without them the test above would not see what EOS does, nor the length penalty."""
    ended = {
        (entry["prompt"], entry["length_penalty"])
        for entry in GOLDENS["beams"]
        for beam in entry["sequences"]
        if len(beam["token_ids"]) < 8
    }
    assert ended
    first = {
        (e["prompt"], e["length_penalty"]): e["sequences"] for e in GOLDENS["beams"] if not e["ignore_eos"]
    }
    assert any(
        [beam["token_ids"] for beam in first[i, 1.0]] != [beam["token_ids"] for beam in first[i, 0.5]]
        for i in range(len(PROMPTS))
    )


def test_score(served):
    name, llm = served
    entries = [entry for _, entry in entries_of("likelihoods", name)]
    outputs = llm.score(
        [entry["context"] for entry in entries], [entry["continuation"] for entry in entries], use_tqdm=False
    )
    for output, entry in zip(outputs, entries, strict=True):
        assert output.token_ids == entry["continuation"]
        assert output.logprob == pytest.approx(entry["logprob"], abs=len(output.token_ids) * CLOSE)
        assert output.is_greedy == entry["is_greedy"]


def test_embed(served):
    name, llm = served
    for _, entry in entries_of("embeddings", name):
        [plain] = llm.embed([entry["ids"]], pooling=entry["pooling"], normalize=False, use_tqdm=False)
        [unit] = llm.embed([entry["ids"]], pooling=entry["pooling"], use_tqdm=False)
        np.testing.assert_allclose(plain.embedding[:16], entry["start"], atol=1e-4, rtol=0)
        assert np.linalg.norm(plain.embedding) == pytest.approx(entry["norm"], rel=1e-5)
        np.testing.assert_allclose(unit.embedding, plain.embedding / entry["norm"], atol=1e-5, rtol=0)

"""Writes tests/goldens/sampling.json: what transformers computes when a request asks for more than plain sampling.

Runs in the environment of make_goldens.py, as `python scripts/make_sampling_goldens.py`. Everything is float32 and
greedy; parameters have vLLM's names, except `bad_word_ids` (its bad_words, as ids). No golden hangs on float noise:
the script asserts that the two best scores of each step are LEAD apart, and that each control changes the output.

In the file, T being the length of the output:
    prompts         {toy, ids}; entries below name one by its index here
    runs            {prompt, case, params, token_ids, finish_reason, stop_reason, raw, processed}. raw is of the model's
                    own distribution, processed (some cases) of the one chosen from: top_ids and top [T][5], chosen
                    [T] (log-probability of the token), logit [T] (its score), rank [T] (1 + number of tokens with
                    higher scores; null where another score is within NOISE)
    prompt_logprobs {prompt, ids, chosen, rank, top_ids, top}: of ids[1:], each given all before it
    distributions   {params, prompt, output, logits, probabilities}: of one row; -inf is null
    beams           {prompt, length_penalty, ignore_eos, sequences}: see beam_search()
    likelihoods     {prompt, context, continuation, logprob, is_greedy}
    embeddings      {prompt, ids, pooling, start, norm}: hidden states after the final norm, their first 16 numbers
"""

import itertools
import math
import tempfile
from typing import Any

import numpy as np
import torch
import transformers
from make_goldens import GOLDENS, load, versions, write_json
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from toys import EOS, IM_END, PAD, TOYS, VOCAB_SIZE, write_toy

MODEL_EOS = [EOS, IM_END]  # as the toys' generation_config.json says
THEIR_NAMES = {"bad_word_ids": "bad_words_ids", "min_tokens": "min_new_tokens"}
STEPS = 24
LEAD = 1e-3  # of the best score over the second, at least
NOISE = 1e-4  # what float32 sums in another order may change
PROCESSED = ("repetition_1.3", "logit_bias", "frequency_presence", "min_tokens", "all")
# Seeds of the prompts of each toy, chosen so that every assertion below holds.
SEEDS = {"base": (1, 2), "gqa3": (1, 5)}


class CountPenalties(LogitsProcessor):
    """OpenAI's and vLLM's penalties, which transformers lacks; they count in the output only."""

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add(1, output, torch.ones_like(output, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class OnlyAllowed(LogitsProcessor):
    """All ids but these are impossible."""

    def __init__(self, allowed: list[int]):
        self.others = sorted(set(range(VOCAB_SIZE)) - set(allowed))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor(self.others), -math.inf)


def stop_ids(params: dict[str, Any]) -> list[int]:
    """What ends an output."""
    return [*params.get("stop_token_ids", []), *([] if params.get("ignore_eos") else MODEL_EOS)]


@torch.inference_mode()
def generate(model: Any, prompt: list[int], params: dict[str, Any]) -> Any:
    """What ``model.generate`` returns; its order is bias, repetition, bans, then the processors given here."""
    processors: list[LogitsProcessor] = []
    if (allowed := params.get("allowed_token_ids")) is not None:
        processors.append(OnlyAllowed(allowed))
    frequency, presence = params.get("frequency_penalty", 0.0), params.get("presence_penalty", 0.0)
    if frequency or presence:
        processors.append(CountPenalties(len(prompt), frequency, presence))
    options = {theirs: params[ours] for ours, theirs in THEIR_NAMES.items() if ours in params}
    options["repetition_penalty"] = params.get("repetition_penalty", 1.0)
    if "logit_bias" in params:
        options["sequence_bias"] = {(int(token),): value for token, value in params["logit_bias"].items()}
    config = GenerationConfig(
        max_new_tokens=STEPS,
        do_sample=False,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        eos_token_id=stop_ids(params) or None,
        **options,
    )
    model.generation_config = GenerationConfig()  # nothing of the checkpoint's own
    ids = torch.tensor([prompt])
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        logits_processor=LogitsProcessorList(processors),
    )


def tokens_of(model: Any, prompt: list[int], params: dict[str, Any]) -> list[int]:
    return generate(model, prompt, params).sequences[0, len(prompt) :].tolist()


def distribution(scores: torch.Tensor, tokens: list[int], width: int) -> dict[str, Any]:
    """What is known of each row of ``scores`` [T, V] and the token at it."""
    scores = scores.double()
    logprobs = scores.log_softmax(-1)
    at = torch.tensor(tokens)[:, None]
    own = scores.gather(1, at)
    best = logprobs.topk(width)
    ranks = 1 + (scores > own).sum(-1)
    unsure = ((scores - own).abs() < NOISE).sum(-1) > 1
    return {
        "chosen": rounded(logprobs.gather(1, at)[:, 0]),
        "logit": rounded(own[:, 0]),
        "rank": [None if u else r for r, u in zip(ranks.tolist(), unsure.tolist(), strict=True)],
        "top_ids": best.indices.tolist(),
        "top": [rounded(row) for row in best.values],
    }


def rounded(values: Any, digits: int = 5) -> list[float]:
    return [round(float(value), digits) for value in values]


def run(model: Any, prompt: list[int], case: str, params: dict[str, Any]) -> dict[str, Any]:
    """One greedy output and the distributions of its steps."""
    out = generate(model, prompt, params)
    tokens = out.sequences[0, len(prompt) :].tolist()
    scores, logits = torch.cat(out.scores), torch.cat(out.logits)
    lead = -float(scores.topk(2).values.diff().max())
    assert lead > LEAD, f"{case}: the two best scores are {lead:.5f} apart"
    assert scores.argmax(-1).tolist() == tokens
    stopped = tokens[-1] in stop_ids(params)
    own = stopped and tokens[-1] in params.get("stop_token_ids", [])
    return {
        "case": case,
        "params": params,
        "token_ids": tokens,
        "finish_reason": "stop" if stopped else "length",
        "stop_reason": tokens[-1] if own else None,
        "raw": distribution(logits, tokens, 5),
        "processed": distribution(scores, tokens, 5) if case in PROCESSED else None,
    }


def cases(model: Any, prompt: list[int], plain: list[int]) -> dict[str, dict[str, Any]]:
    """Name -> parameters, made for what comes without any: ``plain``."""
    on = {"ignore_eos": True}
    bias = eos_bias(model, prompt)
    ends = {"logit_bias": {str(EOS): bias}}
    early = tokens_of(model, prompt, ends).index(EOS)
    new = next(i for i in range(5, STEPS) if plain[i] not in plain[:i])  # where a stop id comes first
    some = sorted(np.random.RandomState(prompt[0]).choice(VOCAB_SIZE, 40, replace=False).tolist())
    return {
        **{f"repetition_{x}": {**on, "repetition_penalty": x} for x in (0.8, 1.3, 5.0)},
        "presence": {**on, "presence_penalty": 2.0},
        "presence_negative": {**on, "presence_penalty": -1.5},
        "frequency": {**on, "frequency_penalty": 1.5},
        "frequency_presence": {**on, "frequency_penalty": -1.2, "presence_penalty": 0.5},
        "logit_bias": {**on, "logit_bias": {str(plain[0]): -100.0, str(plain[6]): -2.5, "9": 4.0}},
        "allowed": {**on, "allowed_token_ids": some},
        "bad_word": {**on, "bad_word_ids": [[plain[3]]]},
        "bad_words": {**on, "bad_word_ids": [plain[4:6], plain[8:11], [plain[13]]]},
        "bad_word_begun_in_prompt": {**on, "bad_word_ids": [[*prompt[-3:], plain[0]]]},
        "stop_ids": {**on, "stop_token_ids": [plain[9], plain[5]]},
        "eos": ends,
        "eos_ignored": {**ends, **on},
        "min_tokens": {**ends, "min_tokens": early + 4},
        "min_tokens_too_few": {**on, "stop_token_ids": [plain[new]], "min_tokens": new + 1},
        "min_tokens_enough": {**on, "stop_token_ids": [plain[new]], "min_tokens": new},
        "all": everything(model, prompt),
    }


def eos_bias(model: Any, prompt: list[int]) -> float:
    """What must be added to the logit of EOS for it to come early, but not at once."""
    for half in range(1, 60):
        tokens = tokens_of(model, prompt, {"logit_bias": {str(EOS): half / 2}})
        if EOS in tokens[:14]:
            assert tokens.index(EOS) > 0, "EOS comes at once"
            return half / 2
    raise AssertionError("no bias brings EOS")


def everything(model: Any, prompt: list[int]) -> dict[str, Any]:
    """All controls at once, each of which matters: without it the output is another."""
    for seed in range(100):
        params = mixture(model, prompt, np.random.RandomState(seed).choice(VOCAB_SIZE, 20, replace=False))
        tokens = tokens_of(model, prompt, params)
        fewer = [{k: v for k, v in params.items() if k != name} for name in params if name != "ignore_eos"]
        if all(tokens_of(model, prompt, one) != tokens for one in fewer):
            return params
    raise AssertionError("all: some control changes nothing")


def mixture(model: Any, prompt: list[int], allowed: np.ndarray) -> dict[str, Any]:
    """All controls; each of the later ones is about what comes with those before it."""
    params: dict[str, Any] = {
        "allowed_token_ids": sorted(allowed.tolist()),
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.8,
        "ignore_eos": True,
    }
    tokens = tokens_of(model, prompt, params)
    params["logit_bias"] = {str(tokens[1]): -3.0, str(allowed[0]): 2.5}
    tokens = tokens_of(model, prompt, params)
    params["bad_word_ids"] = [[tokens[3]], tokens[5:7], [prompt[-1], tokens[0]]]
    tokens = tokens_of(model, prompt, params)
    params["stop_token_ids"] = [tokens[6], tokens[-5]]
    params["min_tokens"] = 9
    return params


def runs_of(model: Any, prompt: list[int]) -> list[dict[str, Any]]:
    """All cases of one prompt, the first one without controls."""
    plain = run(model, prompt, "plain", {"ignore_eos": True})
    tokens = plain["token_ids"]
    result = [plain]
    for case, params in cases(model, prompt, tokens).items():
        one = run(model, prompt, case, params)
        assert one["token_ids"] != tokens, f"{case} changes nothing"
        result.append(one)
    ended = {one["case"]: len(one["token_ids"]) for one in result if one["finish_reason"] == "stop"}
    assert {"stop_ids", "eos", "min_tokens", "all"} <= ended.keys() and "eos_ignored" not in ended
    assert ended["eos"] < ended["min_tokens"]
    return result


@torch.inference_mode()
def forward(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of a whole sequence."""
    return model(torch.tensor([ids])).logits[0]


def prompt_logprobs(model: Any, ids: list[int]) -> dict[str, Any]:
    known = distribution(forward(model, ids)[:-1], ids[1:], 3)
    return {"ids": ids, **{name: known[name] for name in ("chosen", "rank", "top_ids", "top")}}


FIXED_PROMPT, FIXED_OUTPUT = [1, 4, 4, 30], [2, 30, 30, 7, 41]
MIXES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 10},
    {"temperature": 1.5, "top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 40, "min_p": 0.02},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.5, "temperature": 0.9, "top_p": 0.85, "top_k": 25},
]


def fixed_row() -> np.ndarray:
    """Logits float32 [50] with ties among the best and elsewhere, and impossible tokens."""
    row = np.random.RandomState(11).standard_normal(50).astype(np.float32) * 1.5
    best = np.argsort(-row)
    row[best[1:4]] = row[best[1]]
    row[best[8:12]] = row[best[8]]  # across the tenth place
    row[[5, 17, 49]] = -np.inf
    return row


def probabilities(params: dict[str, Any]) -> list[float]:
    """By transformers' own processors in float64, in its order: penalties, temperature, top-k, top-p, min-p."""
    chain: list[LogitsProcessor] = []
    if "repetition_penalty" in params:
        chain.append(transformers.RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
        presence = params.get("presence_penalty", 0.0)
        chain.append(CountPenalties(len(FIXED_PROMPT), params["frequency_penalty"], presence))
    for name, warper in (
        ("temperature", transformers.TemperatureLogitsWarper),
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
    ):
        if name in params:
            chain.append(warper(params[name]))
    scores = torch.from_numpy(fixed_row().astype(np.float64))[None]
    ids = torch.tensor([[*FIXED_PROMPT, *FIXED_OUTPUT]])
    for step in chain:
        before, scores = scores, step(ids, scores)
        lost = (scores == -math.inf) & (before > -math.inf)
        if lost.any():  # jaxsched keeps equals together; transformers' top-p does not
            assert before[lost].max() < before[scores > -math.inf].min() - NOISE, f"{params} cuts too close"
    return scores.softmax(-1)[0].tolist()


def distributions() -> list[dict[str, Any]]:
    logits = [None if x == -np.inf else float(x) for x in fixed_row()]
    shared = {"prompt": FIXED_PROMPT, "output": FIXED_OUTPUT, "logits": logits}
    return [{"params": params, **shared, "probabilities": probabilities(params)} for params in MIXES]


BEAM_WIDTH, BEAM_STEPS = 3, 8
Beam = tuple[list[int], float]  # tokens of the output, sum of their log-probabilities


def beam_search(
    model: Any, prompt: list[int], *, length_penalty: float, ignore_eos: bool
) -> list[dict[str, Any]]:
    """The best outputs: [{token_ids, logprob, score}], best first; EOS is among token_ids and counts.

    As vLLM's LLM.beam_search: each step extends every live beam by its 2 * BEAM_WIDTH likeliest tokens. What ends in
    EOS is complete, the best of the others live on. The score is logprob / tokens of the output ** length_penalty
    (where vLLM's code counts the prompt's tokens too).
    """
    ends = () if ignore_eos else MODEL_EOS

    def score(beam: Beam) -> float:
        return beam[1] / len(beam[0]) ** length_penalty

    def best(beams: list[Beam]) -> list[Beam]:
        ordered = sorted(beams, key=score, reverse=True)
        close = min(score(a) - score(b) for a, b in itertools.pairwise(ordered[: BEAM_WIDTH + 1]))
        assert close > NOISE, f"beams are {close} apart"
        return ordered[:BEAM_WIDTH]

    live: list[Beam] = [([], 0.0)]
    complete: list[Beam] = []
    for _ in range(BEAM_STEPS):
        grown: list[Beam] = []
        for tokens, total in live:
            logprobs = forward(model, [*prompt, *tokens])[-1].double().log_softmax(-1).numpy()
            for token in np.argsort(-logprobs)[: 2 * BEAM_WIDTH].tolist():
                beam = ([*tokens, token], total + float(logprobs[token]))
                (complete if token in ends else grown).append(beam)
        live = best(grown)
    return [
        {"token_ids": beam[0], "logprob": round(beam[1], 5), "score": round(score(beam), 6)}
        for beam in best(complete + live)
    ]


def beams_of(model: Any, prompt: list[int]) -> list[dict[str, Any]]:
    result = []
    for penalty, ignore in ((1.0, False), (0.5, False), (1.0, True)):
        found = beam_search(model, prompt, length_penalty=penalty, ignore_eos=ignore)
        result.append({"length_penalty": penalty, "ignore_eos": ignore, "sequences": found})
    return result


def likelihood(model: Any, context: list[int], continuation: list[int]) -> dict[str, Any]:
    logits = forward(model, context + continuation)[len(context) - 1 : -1].double()
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])
    return {
        "context": context,
        "continuation": continuation,
        "logprob": round(float(logprobs.sum()), 5),
        "is_greedy": logits.argmax(-1).tolist() == continuation,
    }


@torch.inference_mode()
def embeddings(model: Any, ids: list[int]) -> list[dict[str, Any]]:
    hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
    return [
        {"ids": ids, "pooling": pooling, "start": rounded(x[:16], 6), "norm": round(float(x.norm()), 6)}
        for pooling, x in (("last", hidden[-1]), ("mean", hidden.mean(0)))
    ]


def random_ids(seed: int, length: int) -> list[int]:
    return np.random.RandomState(seed).randint(0, 256, length).tolist()


def add_toy(content: dict[str, Any], name: str, model: Any) -> None:
    """Everything of one toy."""
    for seed in SEEDS[name]:
        index, prompt = len(content["prompts"]), random_ids(1000 + seed, 20)
        content["prompts"].append({"toy": name, "ids": prompt})
        parts = {"runs": runs_of(model, prompt), "beams": beams_of(model, prompt)}
        parts["embeddings"] = embeddings(model, prompt)
        parts["prompt_logprobs"] = [prompt_logprobs(model, random_ids(2000 + seed, 70))]
        greedy = parts["runs"][0]["token_ids"][:6]
        pairs = [(prompt, greedy), (prompt, [*greedy[:5], greedy[5] ^ 1]), (prompt[:7], prompt[7:])]
        parts["likelihoods"] = [likelihood(model, *pair) for pair in pairs]
        assert [one["is_greedy"] for one in parts["likelihoods"]] == [True, False, False]
        for key, entries in parts.items():
            content[key] += [{"prompt": index, **entry} for entry in entries]


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    keys = ("prompts", "runs", "prompt_logprobs", "beams", "likelihoods", "embeddings")
    content = {"versions": versions(), "distributions": distributions(), **{key: [] for key in keys}}
    for name in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            add_toy(content, name, load(write_toy(folder, **TOYS[name])))
    write_json(GOLDENS / "sampling.json", content)


if __name__ == "__main__":
    main()

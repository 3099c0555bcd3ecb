"""What a request with controls must give: the whole sequence is computed again for each token, in plain numpy."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from harness import ORACLE_LEN, Model, dense_forward, sampling_rows
from jaxsched import SamplingParams
from jaxsched.step import sample


@dataclasses.dataclass
class Expected:
    ids: list[int]
    finish_reason: str
    stop_reason: Any
    text: str
    logprobs: list[np.ndarray]  # [V] of the raw distribution, at each token


@functools.partial(jax.jit, static_argnames=("graph",))
def _logits(graph, params, tokens, count):
    return dense_forward(graph, params, tokens)[1][count - 1]


@jax.jit
def _draw(scores, rows, position):
    return sample(scores[None], rows, position[None], mode="full")[0]


def logits_after(model: Model, tokens: list[int]) -> np.ndarray:
    """Scores of the token that comes next, float32 ``[V]``."""
    padded = np.zeros(ORACLE_LEN, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_logits(model.graph, model.params, padded, len(tokens)))


def log_softmax(scores: np.ndarray) -> np.ndarray:
    wide = scores.astype(np.float64)
    top = wide.max()
    return wide - top - np.log(np.exp(wide - top).sum())


def bad_word_ids(model: Model, words) -> set[tuple[int, ...]]:
    tokenizer = model.tokenizer
    found = set()
    for word in words:
        for text in (word, " " + word.lstrip()):
            found.add(tuple(tokenizer.encode(text, add_special_tokens=False)))
    return found - {()}


def controlled(logits, params: SamplingParams, prompt, out, stop_ids, bad) -> np.ndarray:
    """The scores that the token after ``prompt`` and ``out`` is sampled from, constraints aside."""
    scores = logits.astype(np.float32).copy()
    for token, value in dict(params.logit_bias or {}).items():
        scores[token] += np.float32(value)
    for token in {*prompt, *out}:
        if scores[token] > 0:
            scores[token] /= np.float32(params.repetition_penalty)
        else:
            scores[token] *= np.float32(params.repetition_penalty)
    for token in set(out):
        scores[token] -= np.float32(params.frequency_penalty) * out.count(token)
        scores[token] -= np.float32(params.presence_penalty)
    if params.allowed_token_ids is not None:
        scores[[t for t in range(len(scores)) if t not in params.allowed_token_ids]] = -np.inf
    text = [*prompt, *out]
    for word in bad:
        if len(word) == 1 or tuple(text[-(len(word) - 1) :]) == word[:-1]:
            scores[word[-1]] = -np.inf
    if len(out) < params.min_tokens:
        scores[[*stop_ids]] = -np.inf
    return scores


def find_stop(model: Model, params: SamplingParams, out) -> tuple[str, str] | None:
    """The stop string in the text of ``out`` and the text that it leaves; ASCII strings only."""

    def text_of(ids):
        return model.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)

    text, early = text_of(out), len(text_of(out[: params.min_tokens])) if params.min_tokens else 0
    hits = []
    for stop in params.stop:
        at = text.find(stop)
        while at >= 0 and at + len(stop) <= early:
            at = text.find(stop, at + 1)
        if at >= 0:
            hits.append((at, -len(stop), stop))
    if not hits:
        return None
    at, length, stop = min(hits)
    return stop, text[: at - length if params.include_stop_str_in_output else at]


def expected(
    model: Model, prompt, params: SamplingParams, *, max_model_len: int = ORACLE_LEN, constraint: Any = None
) -> Expected:
    """``params`` must have a seed unless they are greedy; n is 1."""
    assert params.greedy or params.seed is not None
    room = max_model_len - len(prompt)
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    eos = () if params.ignore_eos else model.checkpoint.eos_token_ids
    stop_ids = {*params.stop_token_ids, *eos}
    rows, bad = sampling_rows(params), bad_word_ids(model, params.bad_words)
    matcher = None if constraint is None else constraint.matcher()
    out, logprobs = [], []

    def done(reason, why=None, text=None):
        if text is None:
            text = model.tokenizer.decode(out, skip_special_tokens=params.skip_special_tokens)
        return Expected(out, reason, why, text, logprobs)

    while len(out) < limit:
        logits = logits_after(model, [*prompt, *out])
        scores = controlled(logits, params, prompt, out, stop_ids, bad)
        if matcher is not None:
            words = np.zeros(-(-len(scores) // 32), np.uint32)
            matcher.allowed(words)
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(scores)].astype(bool)
            if matcher.accepting:
                allowed[[*eos]] = True
            scores[~allowed] = -np.inf
        if (scores == -np.inf).all():
            return done("error", "no token is allowed")
        token = int(_draw(jnp.asarray(scores), rows, np.int32(len(out))))
        out.append(token)
        logprobs.append(log_softmax(logits))
        if params.stop and (hit := find_stop(model, params, out)):
            return done("stop", *hit)
        if token in stop_ids:
            return done("stop", token if token in params.stop_token_ids else None)
        if matcher is not None:
            assert matcher.push(token)
            if matcher.final:
                return done("stop")
    return done("length")

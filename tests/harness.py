"""What tests of the step and the engine share: loaded checkpoints, engines, and an oracle that knows no pages."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsched import CompletionOutput, EngineConfig, SamplingParams
from jaxsched.engine import Engine
from jaxsched.models import ModelConfig
from jaxsched.pallas_kernels.shapes import AttentionOptions
from jaxsched.step import RoundInputs, SamplingRows, sample
from jaxsched.text import Tokenizer, load_tokenizer
from jaxsched.weights import Checkpoint, load_model, open_checkpoint

# Settings that most engine tests share, so that a session compiles them once.
SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "num_scheduler_steps": 4,
    "prefill_chunk_size": 32,
    "page_size": 8,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ORACLE_LEN = 128  # tokens of prompt and output that the oracle can read


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A checkpoint and what ``load_model`` makes of it. The parameters are shared: never close its engines."""

    checkpoint: Checkpoint
    graph: nnx.GraphDef
    params: Any
    tokenizer: Tokenizer | None

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.model_config


def load(path: Path, *, max_model_len: int | None = None) -> Model:
    checkpoint = open_checkpoint(path).at_length(max_model_len)
    graph, params = load_model(checkpoint, jnp.dtype("float32"))
    return Model(checkpoint, graph, params, load_tokenizer(checkpoint.path))


def make_engine(model: Model, **settings: Any) -> Engine:
    """An engine with the settings SMALL unless told otherwise; ``clock`` and ``bos_token_id`` go to Engine itself."""
    engine_only = {
        name: settings.pop(name) for name in ("clock", "bos_token_id", "tokenizer") if name in settings
    }
    config = EngineConfig(**{**SMALL, **settings})
    resolved = config.resolve(model.config, "cpu")
    options = {
        "tokenizer": model.tokenizer,
        "eos_token_ids": model.checkpoint.eos_token_ids,
        "bos_token_id": model.checkpoint.bos_token_id,
        "max_stop_ids": config.max_stop_ids,
        **config.engine_options(resolved, "cpu"),
    }
    return Engine(model.graph, model.params, model.config, resolved, **{**options, **engine_only})


@dataclasses.dataclass
class Result:
    """A request's pieces put together."""

    ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    pieces: int = dataclasses.field(default=0, compare=False)
    logprobs: list[dict] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[dict | None] | None = None

    def add(self, output: CompletionOutput) -> None:
        assert self.finish_reason is None, "a piece came after the last one"
        self.pieces += 1
        self.ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs or []
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


def collect(engine: Engine, results: dict[str, Result]) -> None:
    """One engine step, its pieces added to ``results``. Samples but the first go by "id#index"."""
    for piece in engine.step():
        assert piece.error is None, piece.error
        for output in piece.outputs:
            name = piece.request_id if output.index == 0 else f"{piece.request_id}#{output.index}"
            results.setdefault(name, Result()).add(output)
            if piece.prompt_logprobs is not None and output.index == 0:
                assert results[name].prompt_logprobs is None, "told twice"
                results[name].prompt_logprobs = piece.prompt_logprobs
        if len(piece.outputs) == 1 and piece.outputs[0].index == 0 and piece.finished:
            assert piece.outputs[0].finish_reason is not None


def drain(engine: Engine, results: dict[str, Result] | None = None, limit: int = 5000) -> dict[str, Result]:
    """Steps until nothing is left to do."""
    results = {} if results is None else results
    for _ in range(limit):
        if not engine.has_work:
            return results
        collect(engine, results)
    raise AssertionError(f"the engine is not done after {limit} steps")


def run_all(engine: Engine, requests: Iterable[tuple[Sequence[int], SamplingParams]]) -> list[Result]:
    """Results of requests that are all there from the start."""
    ids = [engine.add_request(prompt, params) for prompt, params in requests]
    results = drain(engine)
    return [results[i] for i in ids]


def thrash(engine: Engine, rng: np.random.Generator) -> None:
    """Preempts a running sequence, as a pool would that is too small."""
    running = list(engine.scheduler.running)
    if running:
        engine.scheduler.evict(running[int(rng.integers(len(running)))], engine.clock())


def assert_idle(engine: Engine) -> None:
    """Everything is where it was when the engine was new (O5)."""
    scheduler, limits = engine.scheduler, engine.resolved.limits
    pool = scheduler.memory.pool
    assert (pool.used, pool.free) == (0, limits.num_pages)
    assert sorted([*pool._blank, *pool._cached]) == list(range(limits.num_pages))
    assert not any(pool._owners) and scheduler.memory._growth == 0
    assert {page for page, key in enumerate(pool._key_of) if key is not None} == set(pool._cached)
    assert sorted(scheduler._free_slots) == list(range(limits.num_slots))
    assert (scheduler.running, scheduler.num_waiting, scheduler.in_flight) == ({}, 0, 0)
    assert (scheduler.num_streaming, scheduler._waiting_tokens) == (0, 0)
    assert (engine.requests.by_id, list(engine.pipeline.flights), engine.requests.pieces) == ({}, [], [])
    gauges = engine.metrics._gauges
    assert {name: gauges[name] for name in gauges if gauges[name]} == {}
    assert not engine.has_work


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    """Token ids below 256: no special tokens."""
    return rng.integers(0, 256, length).tolist()


# -- the oracle ----------------------------------------------------------------------------------------------------


def dense_attend(
    at: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, cache: None, options: AttentionOptions
):
    """Causal attention as in the textbook; ``at [T]`` are the positions."""
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    mask = at[None] <= at[:, None]
    if options.window is not None:
        mask &= at[None] > at[:, None] - options.window
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest"), cache


@partial(jax.jit, static_argnames=("graph",))
def dense_forward(graph: nnx.GraphDef, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each layer's hidden states ``[L+1, T, E]`` (the embedding first) and logits ``[T, V]`` of a whole sequence."""
    decoder, trace = nnx.merge(graph, params), []
    at = jnp.arange(tokens.shape[0])
    hidden, _ = decoder(tokens, at, dense_attend, at, [None] * len(decoder.layers), trace)
    return jnp.stack(trace), decoder.logits(hidden)


@partial(jax.jit, static_argnames=("graph",))
def _next(graph, params, tokens, count, rows, position):
    _, logits = dense_forward(graph, params, tokens)
    return sample(logits[count - 1][None], rows, position[None], mode="full")[0]


def sampling_rows(*params: SamplingParams) -> SamplingRows:
    """The device rows of some sampling parameters, as the engine would fill them in."""
    seeds = [(p.seed or 0) & (2**64 - 1) for p in params]
    return SamplingRows(
        temperature=np.array([0 if p.greedy else p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        seed=np.array([(s >> 32, s & 0xFFFF_FFFF) for s in seeds], np.uint32),
    )


def oracle(
    model: Model, prompt: Sequence[int], params: SamplingParams, *, max_model_len: int = ORACLE_LEN
) -> tuple[list[int], str]:
    """Tokens and finish reason of a request: the whole sequence is computed again for each token, nothing is cached.

    ``params`` must have a seed unless they are greedy.
    """
    assert params.greedy or params.seed is not None
    room = max_model_len - len(prompt)
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    stop = {*params.stop_token_ids, *(() if params.ignore_eos else model.checkpoint.eos_token_ids)}
    tokens = np.zeros(ORACLE_LEN, np.int32)
    tokens[: len(prompt)] = prompt
    rows, out = sampling_rows(params), []
    while len(out) < limit:
        count = len(prompt) + len(out)
        token = int(_next(model.graph, model.params, tokens, count, rows, np.int32(len(out))))
        out.append(token)
        if token in stop:
            return out, "stop"
        if count < ORACLE_LEN:
            tokens[count] = token
    return out, "length"


# -- rounds by hand --------------------------------------------------------------------------------------------------


def admit(
    inputs: RoundInputs,
    slot: int,
    pages: Sequence[int],
    *,
    max_tokens: int,
    stop_ids: Sequence[int] = (),
    params: SamplingParams = GREEDY,
    output_pos: int = 0,
) -> None:
    """Writes a request into the slot updates of ``inputs``; ``pages`` are all that it will use."""
    updates = inputs.updates
    updates.admit[slot] = True
    updates.tokens_left[slot] = max_tokens
    updates.output_pos[slot] = output_pos
    updates.stop_ids[slot, : len(stop_ids)] = stop_ids
    row = sampling_rows(params)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        getattr(updates.sampling, name)[slot] = getattr(row, name)[0]
    first = int((updates.page_slot < len(updates.admit)).sum())
    for i, page in enumerate(pages):
        updates.page_slot[first + i], updates.page_index[first + i], updates.page_id[first + i] = (
            slot,
            i,
            page,
        )


def put_chunk(
    inputs: RoundInputs, step: int, slot: int, tokens: Sequence[int], start: int, *, ends: bool
) -> None:
    """Appends ``tokens``, at positions ``start ...``, to the chunk of a mixed step."""
    chunks = inputs.chunks
    assert chunks is not None
    row = int((chunks.slots[step] < chunks.end_row.shape[1]).sum())
    stop = row + len(tokens)
    chunks.tokens[step, row:stop] = tokens
    chunks.positions[step, row:stop] = np.arange(start, start + len(tokens))
    chunks.slots[step, row:stop] = slot
    if ends:
        chunks.end_row[step, slot] = stop - 1

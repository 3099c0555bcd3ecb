"""Parts of scripts/bench_modes.py: models and engines, lengths and arrivals, the loop that drives an engine, and what
a run measured.

Times are seconds of the engine's clock. A request counts from the moment at which it should arrive, so an engine that
takes it up late pays for that.
"""

import csv
import dataclasses
import itertools
import math
import random
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsched import EngineConfig, SamplingParams
from jaxsched.config import GPU_RESERVE_BYTES
from jaxsched.engine import Engine
from jaxsched.models import Decoder, ModelConfig
from jaxsched.startup import default_model
from jaxsched.text import Tokenizer, load_tokenizer
from jaxsched.weights import load_model, open_checkpoint

Lengths = list[tuple[int, int]]  # prompt and output tokens of each request

# Mean and deviation of the logarithms of prompt and output tokens in a public trace of a chat service: the
# conversation part of the Azure LLM inference trace of 2023 (Patel et al., *Splitwise*, ISCA 2024). The two are nearly
# independent there (correlation 0.09).
CHAT_PROMPT, CHAT_OUTPUT = (6.63, 0.985), (5.02, 0.859)
COLUMNS = (
    ("ContextTokens", "GeneratedTokens"),
    ("num_prefill_tokens", "num_decode_tokens"),
)  # Azure, ShareGPT
LONG_PROMPT, LONG_OUTPUT = 1024, 16  # tokens of the requests of --scenario long-prompts
STREAM_PROMPT, STREAM_OUTPUT = (
    32,
    1024,
)  # of those that decode behind them; long, so that they seldom start anew
FIRST_TOKEN = 17  # ids below are special in many vocabularies
POOL_BYTES = 1 << 30  # KV pages of each engine


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """``at``: seconds after the start of the run."""

    at: float
    prompt: list[int]
    max_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What one run is given. Behind the requests ``background`` streams decode all the time, one after the other."""

    requests: list[Request]  # by time of arrival
    background: int = 0


@dataclasses.dataclass(slots=True)
class Stream:
    """What came of one request."""

    arrival: float
    prompt_tokens: int
    timed: bool  # its first token counts; not so in the background
    pieces: list[tuple[float, int]] = dataclasses.field(default_factory=list)  # when, how many tokens


@dataclasses.dataclass(slots=True)
class Run:
    """One load on one engine."""

    start: float
    end: float  # when the last request was done
    streams: list[Stream]
    rounds: list[Any]  # RoundRecord


# -- engines ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Model:
    """Weights that all engines share."""

    graph: nnx.GraphDef
    params: Any
    config: ModelConfig
    tokenizer: Tokenizer | None = None


def toy_model(**sizes: int) -> Model:
    """A tiny Llama with random weights. Equal arguments give equal weights."""
    shape = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
             "intermediate_size": 128, "max_position_embeddings": 4096, **sizes}  # fmt: skip
    config = ModelConfig("LlamaForCausalLM", **shape)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, jnp.dtype("float32"))))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) * leaf.shape[0] ** -0.5, leaf.dtype),
        nnx.as_pure(shapes),
    )
    return Model(graph, params, config)


def countdown_model(vocab: int) -> Model:
    """A toy that counts down to 0: after token i it says i - 1, whatever came before. After 0 it says anything."""
    model = toy_model(vocab_size=vocab, hidden_size=128, num_layers=1)
    rows = np.random.default_rng(0).standard_normal((vocab, 128))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)  # nearly orthogonal
    values = {"embed.embedding": rows, "head.kernel": np.roll(rows, -1, axis=0).T, "norm.scale": np.ones(128)}

    def fill(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return jnp.asarray(values.get(name, np.zeros(leaf.shape)), leaf.dtype)

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(fill, model.params))


def get_model(name: str) -> Model:
    """ "toy", "smollm2", or whatever ``LLM`` takes."""
    if name == "toy":
        return toy_model()
    checkpoint = open_checkpoint(default_model() if name == "smollm2" else name)
    dtype = EngineConfig().resolve_dtype(checkpoint.model_config, _platform())
    graph, params = load_model(checkpoint, jnp.dtype(dtype))
    return Model(graph, params, checkpoint.model_config, load_tokenizer(checkpoint.path))


def _platform() -> str:
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def make_engine(model: Model, settings: Mapping[str, Any]) -> Engine:
    """An engine as ``LLM`` makes it, with a KV pool small enough for several to live side by side."""
    config = EngineConfig(**settings)
    free = None if _platform() == "cpu" else POOL_BYTES + GPU_RESERVE_BYTES
    resolved = config.resolve(model.config, _platform(), free)
    return Engine(
        model.graph,
        model.params,
        model.config,
        resolved,
        tokenizer=model.tokenizer,
        max_stop_ids=config.max_stop_ids,
        **config.engine_options(resolved, _platform()),
    )


# -- making a load ---------------------------------------------------------------------------------------------------


def chat_lengths(rng: random.Random, count: int) -> Lengths:
    """Lengths as in chat traffic, drawn."""
    draw = rng.lognormvariate
    return [(max(1, round(draw(*CHAT_PROMPT))), max(1, round(draw(*CHAT_OUTPUT)))) for _ in range(count)]


def read_lengths(path: Path) -> Lengths:
    """Lengths from a CSV file with the columns of the Azure trace or of ShareGPT statistics.

    Raises ValueError that names what is missing or the line that is not a number.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        names = next((pair for pair in COLUMNS if set(pair) <= set(reader.fieldnames or ())), None)
        if names is None:
            wanted = " or ".join(map(" and ".join, COLUMNS))
            raise ValueError(f"{path} has the columns {reader.fieldnames}; it needs {wanted}")
        lengths = []
        for row in reader:
            try:
                pair = int(row[names[0]]), int(row[names[1]])
            except (TypeError, ValueError):
                raise ValueError(
                    f"{path}, line {reader.line_num}: {names[0]} and {names[1]} must be integers"
                ) from None
            if min(pair) > 0:
                lengths.append(pair)
    if not lengths:
        raise ValueError(f"{path} has no request with prompt and output; give a file with at least one")
    return lengths


def choose(lengths: Lengths, count: int, rng: random.Random) -> Lengths:
    """``count`` of them in a row from a random place, so that what belongs together stays together; wraps around."""
    start = rng.randrange(len(lengths))
    return [lengths[(start + i) % len(lengths)] for i in range(count)]


def scaled(lengths: Lengths, scale: float, max_model_len: int) -> tuple[Lengths, int]:
    """All lengths times ``scale``, at least 1; returns them and how many were still too long.

    What is too long for ``max_model_len`` keeps its output, up to half of the room, and loses prompt.
    """
    fitting, cut = [], 0
    for prompt, output in lengths:
        prompt, output = max(1, round(prompt * scale)), max(1, round(output * scale))
        if prompt + output > max_model_len:
            cut += 1
            output = min(output, max_model_len // 2)
            prompt = min(prompt, max_model_len - output)
        fitting.append((prompt, output))
    return fitting, cut


def arrivals(rng: random.Random, count: int, rate: float) -> list[float]:
    """Times of a Poisson process with ``rate`` events a second; ``math.inf``: all at once."""
    now, times = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate) if math.isfinite(rate) else 0.0
        times.append(now)
    return times


def make_load(lengths: Lengths, rate: float, rng: random.Random, vocab: int, background: int = 0) -> Load:
    """Requests of these lengths with random tokens, which no earlier run has left in the prefix cache."""
    times = arrivals(rng, len(lengths), rate)
    requests = [
        Request(at, random_tokens(rng, prompt, vocab), output)
        for at, (prompt, output) in zip(times, lengths, strict=True)
    ]
    return Load(requests, background)


def random_tokens(rng: random.Random, count: int, vocab: int) -> list[int]:
    """Random token ids without the first few."""
    return [rng.randrange(FIRST_TOKEN, vocab) for _ in range(count)]


# -- running it ------------------------------------------------------------------------------------------------------


class Driver:
    """Brings one load to one engine, all in the calling thread.

    Requests are added between steps and in the engine's hook before each planning. Without work it sleeps.
    """

    def __init__(
        self, engine: Engine, load: Load, *, seed: int = 0, stream: bool = True, stop: int | None = None
    ):
        self.engine, self.load, self.stream = engine, load, stream
        self.stop = () if stop is None else (stop,)  # tokens that end a request
        self.rng = random.Random(seed)
        self.streams: dict[str, Stream] = {}
        self.running: set[str] = set()  # ids of unfinished requests, without the background
        self.next = self.started = 0  # requests and background streams submitted so far
        self.start = self.end = 0.0

    def run(self) -> Run:
        """Until all requests are done."""
        engine, rounds = self.engine, []
        engine.before_plan, engine.round_log = self._submit_due, rounds
        self.start = engine.clock()
        for _ in range(self.load.background):
            self._start_stream()
        try:
            while self.next < len(self.load.requests) or self.running:
                self._submit_due()
                self._take(engine.step())
                if not engine.has_work and self.next < len(self.load.requests):
                    time.sleep(max(0.0, self.start + self.load.requests[self.next].at - engine.clock()))
        finally:
            engine.before_plan = None
        run = Run(self.start, self.end, list(self.streams.values()), list(rounds))
        for name in self.streams:
            engine.abort(name)
        while engine.has_work:
            engine.step()
        engine.round_log = None
        return run

    def _submit_due(self) -> None:
        now, requests = self.engine.clock(), self.load.requests
        while self.next < len(requests) and self.start + requests[self.next].at <= now:
            request = requests[self.next]
            name = f"r{self.next}"
            self.next += 1
            self.running.add(name)
            self._add(name, request.prompt, request.max_tokens, self.start + request.at, timed=True)

    def _start_stream(self) -> None:
        most = min(STREAM_OUTPUT, self.engine.resolved.limits.max_model_len - STREAM_PROMPT)
        max_tokens = self.rng.randint(most // 4, most)  # random, so that the streams do not end together
        prompt = random_tokens(self.rng, STREAM_PROMPT, self.engine.model.vocab_size)
        name = f"b{self.started}"
        self.started += 1
        self._add(name, prompt, max_tokens, self.engine.clock(), timed=False)

    def _add(self, name: str, prompt: list[int], max_tokens: int, arrival: float, timed: bool) -> None:
        self.streams[name] = Stream(arrival, len(prompt), timed)
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=self.stop
        )
        self.engine.add_request(prompt, params, request_id=name, stream=self.stream)

    def _take(self, pieces: Iterable[Any]) -> None:
        now = self.engine.clock()
        for piece in pieces:
            if piece.error is not None:
                raise RuntimeError(f"request {piece.request_id} failed") from piece.error
            stream = self.streams[piece.request_id]
            count = sum(len(output.token_ids) for output in piece.outputs)
            if count:
                stream.pieces.append((now, count))
            if not piece.finished:
                continue
            if stream.timed:
                self.running.discard(piece.request_id)
                self.end = now
            else:
                self._start_stream()


# -- what came of it -------------------------------------------------------------------------------------------------


def token_gaps(pieces: list[tuple[float, int]]) -> list[float]:
    """Seconds between tokens: a piece of k tokens after a gap g counts as k gaps of g / k.

    The tokens of the first piece have no gap before them.
    """
    gaps: list[float] = []
    for (before, _), (now, count) in itertools.pairwise(pieces):
        gaps += [(now - before) / count] * count
    return gaps


def piece_gaps(pieces: list[tuple[float, int]]) -> list[float]:
    """Seconds between pieces."""
    return [now - before for (before, _), (now, _) in itertools.pairwise(pieces)]


def percentile(values: list[float], percent: float) -> float:
    """Linear between the two nearest ranks; nan of nothing."""
    return float(np.percentile(values, percent)) if values else math.nan


def share(part: float, whole: float) -> float:
    """Percent; 0 of nothing."""
    return 100.0 * part / whole if whole else 0.0


def summarize(run: Run) -> dict[str, float]:
    """The numbers of one run, by the keys of the columns of bench_modes.py."""
    seconds = run.end - run.start
    begun = [stream for stream in run.streams if stream.pieces]
    output = sum(count for stream in begun for _, count in stream.pieces)
    gaps = [gap for stream in begun for gap in token_gaps(stream.pieces)]
    raw = [gap for stream in begun for gap in piece_gaps(stream.pieces)]
    first = [stream.pieces[0][0] - stream.arrival for stream in begun if stream.timed]
    rounds, steps = max(1, len(run.rounds)), sum(r.steps for r in run.rounds)
    sampled = sum(r.decode_tokens for r in run.rounds)
    wasted = sum(sum(r.wasted.values()) for r in run.rounds)
    host = sum(us for r in run.rounds for phase, us in r.host_us.items() if phase != "wait")
    device, idle = sum(r.device_us for r in run.rounds), sum(r.idle_us for r in run.rounds)
    return {
        "seconds": seconds,
        "output_rate": output / seconds,
        "total_rate": (output + sum(stream.prompt_tokens for stream in begun)) / seconds,
        **{f"itl_p{p}": 1e3 * percentile(gaps, p) for p in (50, 90, 99)},
        "gap_p99": 1e3 * percentile(raw, 99),
        **{f"ttft_p{p}": 1e3 * percentile(first, p) for p in (50, 99)},
        "wasted": share(wasted, sampled + wasted),
        "idle": share(idle, device + idle),
        "host_per_token": host / max(1, sampled),
        "host_per_round": host / rounds,
        "steps_per_round": steps / rounds,
        "tokens_per_round": sampled / rounds,
    }

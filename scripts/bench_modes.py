"""Compares four ways to schedule on one model, one machine, one load of requests that arrive at random times.

    python scripts/bench_modes.py                                           # SmolLM2, chat traffic
    python scripts/bench_modes.py --model toy                               # steps so short that the host matters
    python scripts/bench_modes.py --scenario long-prompts --repeat 3
    python scripts/bench_modes.py --lengths AzureLLMInferenceTrace_conv.csv --timelines pictures
    python scripts/bench_modes.py --waste --lengths sharegpt_lengths.csv

    plain       one step per round, prompts read whole
    chunked     one step per round, prompts read in chunks
    multi-step  N steps per round, prompts read whole
    adaptive    N and C chosen for each round (the default of jaxsched)

The modes run one after the other on the same arrivals, lengths and weights, each in an engine of its own; --repeat runs
them in turn. Requests arrive in a Poisson process whose rate is a share of what plain scheduling was measured to serve.
End-of-sequence is ignored, decoding is greedy, and each request streams. Everything has run before the clock starts.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from bench_load import (
    FIRST_TOKEN,
    LONG_OUTPUT,
    LONG_PROMPT,
    Driver,
    Lengths,
    Load,
    Request,
    Run,
    chat_lengths,
    choose,
    countdown_model,
    get_model,
    make_engine,
    make_load,
    random_tokens,
    read_lengths,
    scaled,
    summarize,
)
from bench_report import environment, medians, show, tables
from draw_timelines import draw_together

from jaxsched.engine import Engine
from jaxsched.host_memory import keep_freed_memory
from jaxsched.metrics import draw_timeline, write_trace
from jaxsched.startup import use_compilation_cache

WASTE_PROMPT = 64  # tokens of the prompts of --waste, at most


def modes(steps: int, chunk: int) -> dict[str, dict[str, Any]]:
    """The settings of each mode; the first is what the others are compared with, the last is the one to judge."""
    return {
        "plain": {"num_scheduler_steps": 1, "prefill_chunk_size": None},
        "chunked": {"num_scheduler_steps": 1, "prefill_chunk_size": chunk},
        "multi-step": {"num_scheduler_steps": steps, "prefill_chunk_size": None},
        "adaptive": {"num_scheduler_steps": "auto", "prefill_chunk_size": "auto"},
    }


# -- the benchmark ---------------------------------------------------------------------------------------------------


def touch(engine: Engine, seed: int) -> None:
    """Runs every compiled program once or more: prompts of each chunk size, then a batch that shrinks slowly."""
    rng, limits, vocab = random.Random(seed), engine.resolved.limits, engine.model.vocab_size
    for size in engine.resolved.chunk_buckets:
        length = min(size, limits.max_model_len - 4)
        Driver(engine, Load([Request(0.0, random_tokens(rng, length, vocab), 3)])).run()
    shrinking = [Request(0.0, random_tokens(rng, 8, vocab), 2 * i + 2) for i in range(limits.num_slots)]
    Driver(engine, Load(shrinking)).run()


class Bench:
    """The engines of all modes, and the loads that they get."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.model = get_model(args.model)
        known = modes(args.steps, args.chunk)
        common = {"max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs, **args.settings}
        self.settings = {mode: {**common, **known[mode]} for mode in args.modes}
        self.engines = {}
        for mode, settings in self.settings.items():
            say(f"making the engine of mode {mode}")
            self.engines[mode] = make_engine(self.model, settings)
        self.length = min(e.resolved.limits.max_model_len for e in self.engines.values())
        self.lengths = None if args.lengths is None else read_lengths(args.lengths)
        self.background = args.background if args.scenario == "long-prompts" else 0
        self.cut = 0  # requests of the latest load that were too long

    def load(self, number: int, count: int, rate: float) -> Load:
        """The load of one round of runs, the same for all modes."""
        rng = random.Random(f"{self.args.seed}/{number}")
        if self.background:
            lengths: Lengths = [(LONG_PROMPT, LONG_OUTPUT)] * count
        elif self.lengths is None:
            lengths = chat_lengths(rng, count)
        else:
            lengths = choose(self.lengths, count, rng)
        lengths, self.cut = scaled(lengths, 1.0 if self.background else self.args.scale, self.length)
        return make_load(lengths, rate, rng, self.model.config.vocab_size, self.background)

    def rate(self) -> float:
        """Requests per second: as asked, or a share of what the first mode serves when all wait at once."""
        if self.args.rate is not None:
            return float(self.args.rate)
        load = self.load(-1, self.args.warmup, math.inf)
        run = Driver(next(iter(self.engines.values())), load).run()
        served = len(load.requests) / (run.end - run.start)
        rate = self.args.share * served
        say(f"{next(iter(self.engines))} serves {served:.3g} requests/s at most; {rate:.3g} will come")
        return rate

    def run(self) -> tuple[float, dict[str, list[Run]]]:
        """Rate, and the runs of each mode."""
        for mode, engine in self.engines.items():
            say(f"first runs of mode {mode}")
            touch(engine, self.args.seed)
        rate = self.rate()
        warm = self.load(-2, self.args.warmup, rate)
        for mode, engine in self.engines.items():
            say(f"warming up mode {mode}")
            Driver(engine, warm, seed=-2).run()
        runs: dict[str, list[Run]] = {mode: [] for mode in self.engines}
        for number in range(self.args.repeat):
            load = self.load(number, self.args.num_prompts, rate)
            for mode, engine in self.engines.items():
                run = Driver(engine, load, seed=number).run()
                runs[mode].append(run)
                say(f"{number + 1}/{self.args.repeat} {mode}: {run.end - run.start:.1f} s")
        return rate, runs


def say(text: str) -> None:
    """Progress goes to stderr, the result to stdout."""
    print(text, file=sys.stderr, flush=True)


# -- pictures --------------------------------------------------------------------------------------------------------


def window(runs: Mapping[str, Run], load: Load, seconds: float | None) -> tuple[float, float]:
    """Begin and length, seconds after the start of the run: about the arrival of the longest prompt in its middle.

    The length, unless it is given, is that of 64 steps of the first mode.
    """
    first = next(iter(runs.values()))
    if seconds is None:
        steps = sum(record.steps for record in first.rounds)
        seconds = 64e-6 * sum(record.device_us for record in first.rounds) / max(1, steps)
    count = len(load.requests)
    middle = load.requests[count // 4 : max(count // 4 + 1, 3 * count // 4)]
    at = max(middle, key=lambda request: len(request.prompt)).at
    return max(0.0, at - seconds / 4), seconds


def draw(folder: Path, runs: Mapping[str, Run], load: Load, seconds: float | None) -> None:
    """One picture and one trace per mode, and one picture of all modes above each other."""
    folder.mkdir(parents=True, exist_ok=True)
    begin, seconds = window(runs, load, seconds)
    parts, starts = {}, {}
    for mode, run in runs.items():
        low, high = run.start + begin, run.start + begin + seconds
        seen = [
            r for r in run.rounds if r.segments and r.segments[-1].end > low and r.segments[0].start < high
        ]
        if not seen:
            say(f"no picture of mode {mode}: nothing ran between {begin:.3f} and {begin + seconds:.3f} s")
            continue
        parts[mode], starts[mode] = seen, low
        draw_timeline(seen, folder / f"{mode}.png", title=mode, limit_s=seconds)
        write_trace(run.rounds, folder / f"{mode}.trace.json")
    if parts:
        title = f"The same requests in each mode, from {begin:.2f} s after the start"
        draw_together(folder / "modes.png", parts, starts=starts, seconds=seconds, title=title)


# -- waste behind ends that nobody can foresee -----------------------------------------------------------------------


def measure_waste(args: argparse.Namespace, stream: bool) -> dict[str, float]:
    """Runs the adaptive mode on sequences that end by a stop token at given lengths; only the model knows these.

    Steps take a fraction of a millisecond, so rounds are as long as they ever get: the worst case. Prompts are cut:
    reading them wastes nothing and takes long.
    """
    rng = random.Random(args.seed)
    if args.lengths is None:
        lengths = chat_lengths(rng, args.num_prompts)
    else:
        lengths = choose(read_lengths(args.lengths), args.num_prompts, rng)
    lengths, _ = scaled(lengths, args.scale, args.max_model_len)
    lengths = [(min(prompt, WASTE_PROMPT), output) for prompt, output in lengths]
    longest = max(output for _, output in lengths)
    model = countdown_model(longest + FIRST_TOKEN + 1)
    settings = {"max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs, **args.settings}
    engine = make_engine(model, settings)
    touch(engine, args.seed)
    requests = []
    for prompt, output in lengths:
        ids = random_tokens(rng, prompt - 1, model.config.vocab_size)
        requests.append(Request(0.0, [*ids, output], args.max_model_len - prompt))
    Driver(engine, Load(requests[: args.warmup]), stream=stream, stop=0).run()
    engine.reset_prefix_cache()
    run = Driver(engine, Load(requests), stream=stream, stop=0).run()
    for got, (_, wanted) in zip(run.streams, lengths, strict=True):
        count = sum(tokens for _, tokens in got.pieces)
        assert count == wanted, f"a sequence ended after {count} tokens instead of {wanted}"
    numbers = summarize(run)
    for reason in ("stopped", "run_ahead"):
        numbers[reason] = sum(record.wasted.get(reason, 0) for record in run.rounds)
    numbers["mean_output"] = statistics.mean(output for _, output in lengths)
    engine.close()
    return numbers


def report_waste(args: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints waste, with somebody reading along and without."""
    found = {}
    for stream in (True, False):
        name = "streamed" if stream else "not streamed"
        found[name] = numbers = measure_waste(args, stream)
        print(
            f"{name}: {numbers['wasted']:.2f} % of the decode tokens wasted "
            f"({numbers['stopped']:.0f} in the round of the end, {numbers['run_ahead']:.0f} in later ones), "
            f"{args.num_prompts} requests of {numbers['mean_output']:.0f} output tokens on average, "
            f"{numbers['steps_per_round']:.1f} steps per round"
        )
    return found


# -- command line ----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    use_compilation_cache()
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    result: dict[str, Any] = {"environment": environment(), "settings": {**vars(args)}}
    if args.waste:
        result["waste"] = report_waste(args)
    else:
        bench = Bench(args)
        rate, runs = bench.run()
        numbers = {mode: [summarize(run) for run in of_mode] for mode, of_mode in runs.items()}
        middle = {mode: medians(of_mode) for mode, of_mode in numbers.items()}
        prompts = statistics.mean(len(r.prompt) for r in bench.load(0, args.num_prompts, rate).requests)
        print(
            f"{args.model} on {result['environment']['device']}, {args.num_prompts} requests at {rate:.3g} per second, "
            f"{prompts:.0f} prompt tokens on average, {bench.background} streams behind them, {args.repeat} run(s)"
        )
        if bench.cut:
            print(
                f"{bench.cut} of them were longer than {bench.length} tokens and were cut; --scale is {args.scale}"
            )
        for title, rows in tables(middle):
            show(title, rows)
        result |= {"rate": rate, "engines": bench.settings, "runs": numbers, "medians": middle}
        if args.timelines is not None:
            last = {mode: of_mode[-1] for mode, of_mode in runs.items()}
            draw(args.timelines, last, bench.load(args.repeat - 1, args.num_prompts, rate), args.window)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")


def _arguments(argv: list[str] | None = None) -> argparse.Namespace:
    known = list(modes(1, 1))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2", help='"smollm2", "toy", a folder, a .gguf file or a hub id')
    add("--scenario", choices=("chat", "long-prompts"), default="chat", help="default: %(default)s")
    add("--modes", nargs="+", choices=known, default=known, help="default: all; the first is the reference")
    add(
        "--lengths",
        type=Path,
        metavar="CSV",
        help="Azure trace or ShareGPT lengths; default: drawn, like chat",
    )
    add("--scale", type=float, help="factor on all lengths (default: 0.25, with --waste 1)")
    add("--num-prompts", type=int, metavar="K", help="default: 64, with --model toy or --waste 400")
    add("--rate", type=float, help="requests per second; default: --share of what the first mode can serve")
    add("--share", type=float, default=0.6, help="default: %(default)s")
    add(
        "--background",
        type=int,
        default=8,
        metavar="K",
        help="decoding streams of long-prompts (default: %(default)s)",
    )
    add(
        "--warmup",
        type=int,
        metavar="K",
        help="requests before the clock starts (default: half of --num-prompts)",
    )
    add(
        "--repeat", type=int, default=1, metavar="K", help="runs of each mode, in turn (default: %(default)s)"
    )
    add("--seed", type=int, default=0, help="of lengths, arrivals and prompts")
    add("--steps", type=int, default=8, metavar="N", help="of multi-step (default: %(default)s)")
    add("--chunk", type=int, default=256, metavar="C", help="of chunked (default: %(default)s)")
    add("--max-model-len", type=int, help="default: 2048, with --waste 4096")
    add("--max-num-seqs", type=int, default=32, help="default: %(default)s")
    add(
        "--settings",
        type=json.loads,
        default={},
        metavar="JSON",
        help="more fields of EngineConfig, for all modes",
    )
    add("--json", type=Path, metavar="FILE", help="write all numbers there")
    add("--timelines", type=Path, metavar="FOLDER", help="draw the modes' rounds, needs matplotlib")
    add("--window", type=float, metavar="SECONDS", help="length of the pictures; default: 64 steps")
    add("--waste", action="store_true", help="only measure the steps wasted behind stop tokens, on a toy")
    args = parser.parse_args(argv)
    if args.scale is None:
        args.scale = 1.0 if args.waste else 0.25
    if args.num_prompts is None:
        args.num_prompts = 400 if args.waste or args.model == "toy" else 64
    if args.max_model_len is None:
        args.max_model_len = 4096 if args.waste else 2048
    if args.warmup is None:
        args.warmup = max(4, args.num_prompts // 2)
    for name in ("num_prompts", "warmup", "repeat", "background", "scale", "share", "max_model_len"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; give more than 0")
    if args.rate is not None and args.rate <= 0:
        parser.error(f"--rate is {args.rate}; give more than 0")
    return args


if __name__ == "__main__":
    main()

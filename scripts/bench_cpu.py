"""Compares jaxsched with transformers on this machine's CPU, on two workloads, both in float32 and on all cores.

    python scripts/bench_cpu.py --reference-python PYTHON [--gsm8k test.jsonl]

PYTHON is the interpreter of the environment described at the top of scripts/make_goldens.py; its side of the comparison
is scripts/bench_transformers.py: static batches of 32 requests. Workloads, end-of-sequence ignored in both:

* fixed: 32 requests of 128 prompt tokens and 64 output tokens,
* mixed: 64 requests with word problems as prompts and 16 to 256 output tokens, at 32 slots.

The two sides alternate, A B A B, each run in a process of its own, never two at a time. The clock of each covers
generation alone, after a warm-up. Rates count the tokens that were asked for, not padding.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOALS = {"fixed": ("total tokens/s", 1.2), "mixed": ("output tokens/s", 2.0)}  # at least this much faster
SLOTS, SEED = 32, 0
SCRIPTS = Path(__file__).resolve().parent
Workload = dict[str, Any]


# -- workloads -------------------------------------------------------------------------------------------------------


def make_fixed(encode: Any, scale: float = 1.0) -> Workload:
    """32 × (128 + 64) tokens of generated English sentences."""
    rng = random.Random(SEED)
    count, length, outputs = (max(2, round(n * scale)) for n in (SLOTS, 128, 64))
    requests = []
    for _ in range(count):
        text = " ".join(_sentence(rng) for _ in range(length))
        requests.append({"prompt_ids": encode(text)[:length], "max_tokens": outputs})
    return {"name": "fixed", "requests": requests}


def make_mixed(encode: Any, questions: list[str] | None = None, scale: float = 1.0) -> Workload:
    """64 word problems with 16 to 256 output tokens. ``questions``: real ones, of which the first 64 are taken."""
    rng = random.Random(SEED)
    count, low, high = max(2, round(64 * scale)), max(1, round(16 * scale)), max(2, round(256 * scale))
    lengths = [rng.randint(low, high) for _ in range(count)]
    if questions is not None and len(questions) < count:
        raise ValueError(f"the GSM8K file has {len(questions)} questions; the benchmark needs {count}")
    prompts = [encode(text) for text in questions[:count]] if questions else [
        _problem(rng, encode, rng.randint(60, 200)) for _ in range(count)
    ]  # fmt: skip
    requests = [{"prompt_ids": ids, "max_tokens": n} for ids, n in zip(prompts, lengths, strict=True)]
    return {"name": "mixed", "requests": requests}


_NAMES = ("Anna", "Ben", "Clara", "David", "Ella", "Farid", "Grace", "Hugo", "Ines", "Jonas")
_PLACES = ("market", "library", "harbour", "school", "garden", "station", "workshop", "bakery")
_THINGS = ("apples", "books", "tickets", "marbles", "pencils", "eggs", "stamps", "candles", "bottles")
_DEEDS = ("carried", "counted", "sold", "bought", "found", "packed", "gave away", "collected")
_TIMES = ("On Monday", "In the morning", "After lunch", "The next day", "Before the rain", "Last week")


def _sentence(rng: random.Random) -> str:
    who, when, deed = rng.choice(_NAMES), rng.choice(_TIMES), rng.choice(_DEEDS)
    return f"{when} {who} {deed} {rng.randint(3, 90)} {rng.choice(_THINGS)} at the {rng.choice(_PLACES)}."


def _problem(rng: random.Random, encode: Any, most: int) -> list[int]:
    """A word problem of at most ``most`` tokens: sentences while they fit, then a question."""
    body, question = "", f"How many {rng.choice(_THINGS)} are left at the {rng.choice(_PLACES)}?"
    while True:
        longer = f"{body}{_sentence(rng)} "
        if len(encode(longer + question)) > most:
            return list(encode(body + question))
        body = longer


def read_questions(file: Path) -> list[str]:
    """The "question" of each line of a GSM8K file."""
    lines = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["question"] for line in lines if line.strip()]


# -- the two sides ---------------------------------------------------------------------------------------------------


def run_ours(workload: Workload, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs a workload in this process."""
    import jax

    from jaxsched import LLM, SamplingParams, __version__

    requests = workload["requests"]
    prompts = [request["prompt_ids"] for request in requests]
    each = [SamplingParams(temperature=0.0, max_tokens=r["max_tokens"], ignore_eos=True) for r in requests]
    start = time.perf_counter()
    own = {"dtype": "float32", "max_num_seqs": SLOTS, "num_scheduler_steps": 8}
    own |= {"prefill_chunk_size": 512, "max_model_len": 1024}
    arguments: dict[str, Any] = {**own, **settings}
    with LLM(**arguments) as llm:
        # Outputs of 1, 2, 3, … tokens: the batch shrinks slowly and every program runs once.
        warm = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in range(1, SLOTS + 1)]
        llm.generate([ids[:8] for ids in prompts[:SLOTS]], warm[: len(prompts)], use_tqdm=False)
        ready = time.perf_counter()
        outputs = llm.generate(prompts, each, use_tqdm=False)
        seconds = time.perf_counter() - ready
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    wanted = [request["max_tokens"] for request in requests]
    assert counts == wanted, f"generated {counts} tokens, asked for {wanted}"
    return {
        "engine": f"jaxsched {__version__}, jax {jax.__version__}, {jax.devices()[0].platform}",
        "seconds": seconds,
        "startup_seconds": ready - start,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(counts),
    }  # fmt: skip


def run_side(command: list[str]) -> dict[str, Any]:
    """Runs one side in a process of its own; its last line of output is its result."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"bench_cpu: this failed with exit code {done.returncode}, see above: {' '.join(command)}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


# -- report ----------------------------------------------------------------------------------------------------------


def rates(result: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of one run, by the names in GOALS."""
    prompt, output, seconds = result["prompt_tokens"], result["output_tokens"], result["seconds"]
    return {"total tokens/s": (prompt + output) / seconds, "output tokens/s": output / seconds}


def report(name: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """A markdown table of one workload: a row per pair of runs, then the verdict."""
    metric, goal = GOALS[name]
    lines = [
        "| run | jaxsched total tok/s | output tok/s | transformers total tok/s | output tok/s | ratio |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    ratios = []
    for number, (ours, theirs) in enumerate(pairs, 1):
        a, b = rates(ours), rates(theirs)
        ratios.append(a[metric] / b[metric])
        cells = [a["total tokens/s"], a["output tokens/s"], b["total tokens/s"], b["output tokens/s"]]
        lines.append(f"| {number} | " + " | ".join(f"{c:.1f}" for c in cells) + f" | {ratios[-1]:.2f} |")
    median, first = statistics.median(ratios), pairs[0][0]
    verdict = "reached" if median >= goal else "missed"
    size = f"{first['prompt_tokens']} prompt + {first['output_tokens']} output tokens"
    return "\n".join([
        f"### {name}: {size}", "", *lines, "",
        f"Median ratio of {metric}: **{median:.2f}** (goal {goal:g}: {verdict}). "
        f"jaxsched started in {statistics.median(a['startup_seconds'] for a, _ in pairs):.1f} s, not counted.",
    ])  # fmt: skip


def machine(threads: int) -> str:
    """Cores and model of the CPU, system, Python."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{threads} cores of {model}, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def main() -> None:
    args = _arguments()
    if args.side is not None:
        workload = json.loads(args.side.read_text(encoding="utf-8"))
        print(json.dumps(run_ours(workload, json.loads(args.settings))))
        return
    if args.reference_python is None:
        sys.exit(
            "bench_cpu: --reference-python is missing; see the top of scripts/make_goldens.py for how to make it"
        )
    from jaxsched.startup import default_model
    from jaxsched.text import load_tokenizer

    model = default_model()
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None, f"{model} has no tokenizer"
    questions = None if args.gsm8k is None else read_questions(args.gsm8k)
    workloads = [
        make_fixed(tokenizer.encode, args.scale),
        make_mixed(tokenizer.encode, questions, args.scale),
    ]
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sections, engines = [], set()
    for workload in workloads:
        name = workload["name"]
        if args.only not in (None, name):
            continue
        pairs = []
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.json"
            file.write_text(json.dumps(workload), encoding="utf-8")
            ours = [
                sys.executable,
                str(Path(__file__).resolve()),
                "--side",
                str(file),
                "--settings",
                args.settings,
            ]
            theirs = [args.reference_python, str(SCRIPTS / "bench_transformers.py"), str(file)]
            theirs += ["--gguf", str(model), "--batch-size", str(SLOTS), "--threads", str(threads)]
            for number in range(args.repeat):
                a, b = run_side(ours), run_side(theirs)
                pairs.append((a, b))
                engines |= {a["engine"], b["engine"]}
                seconds = f"jaxsched {a['seconds']:.1f} s, transformers {b['seconds']:.1f} s"
                print(f"{name} {number + 1}/{args.repeat}: {seconds}", file=sys.stderr, flush=True)
        sections.append(report(name, pairs))
    prompts = "GSM8K questions" if questions else "synthetic word problems"
    head = [machine(threads), *sorted(engines), f"prompts of the mixed workload: {prompts}"]
    text = "\n".join([*(f"- {line}" for line in head), "", "\n\n".join(sections)])
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--reference-python", metavar="PYTHON", help="interpreter that has torch and transformers"
    )
    parser.add_argument("--only", choices=sorted(GOALS), help="one workload; default: both")
    parser.add_argument(
        "--repeat", type=int, default=2, metavar="K", help="pairs of runs (default: %(default)s)"
    )
    parser.add_argument(
        "--gsm8k", type=Path, metavar="FILE", help='jsonl with "question"; default: made-up problems'
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the report there")
    parser.add_argument(
        "--settings", default="{}", metavar="JSON", help="arguments of LLM, over the benchmark's own"
    )
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)  # run our side of this workload file
    parser.add_argument(
        "--scale", type=float, default=1.0, help=argparse.SUPPRESS
    )  # smaller, to test this script
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error(f"--repeat is {args.repeat}; give at least 1")
    return args


if __name__ == "__main__":
    main()

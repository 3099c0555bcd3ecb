"""What features cost: tokens/s with penalties, log-probabilities and a regex on every row, against plain decoding.

    python scripts/bench_features.py [--model M] [--rows 32] [--tokens 128] [--steps 8] [--repeat 3]

Both sides run in turn on one engine, with the same prompts and the same number of tokens; each pair gives a ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time

from jaxsched import LLM, SamplingParams

PROMPTS = (
    "Once upon a time",
    "The capital of France",
    "Water boils at",
    "In the year 1969",
    "My favourite recipe",
)


def variants(tokens: int) -> dict[str, SamplingParams]:
    """The sides by name."""
    plain = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    regex = {"structured_outputs": {"regex": r"[A-Za-z0-9 ,.;:'\n-]+"}}
    return {
        "plain greedy": SamplingParams(**plain),
        "penalties": SamplingParams(**plain, **penalties),
        "logprobs=5": SamplingParams(**plain, logprobs=5),
        "regex": SamplingParams(**plain, **regex),
        "all three": SamplingParams(**plain, **penalties, **regex, logprobs=5),
    }


def rate(llm: LLM, params: SamplingParams, rows: int) -> float:
    """Output tokens per second."""
    prompts = [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in range(rows)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    for name, default in (("rows", 32), ("tokens", 128), ("steps", 8), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    sides = variants(args.tokens)
    with LLM(args.model, max_num_seqs=args.rows, num_scheduler_steps=args.steps, max_model_len=512) as llm:
        for params in sides.values():  # compiles what each side needs
            rate(llm, params, args.rows)
        ratios: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(args.repeat):
            for name, params in sides.items():
                before = rate(llm, sides["plain greedy"], args.rows)
                mine = rate(llm, params, args.rows)
                after = rate(llm, sides["plain greedy"], args.rows)
                ratios[name].append(2 * mine / (before + after))
                print(f"{name:>14}  {mine:7.1f} tokens/s, plain {before:7.1f} and {after:7.1f}", flush=True)
    for name, values in ratios.items():
        spread = f"{min(values):.3f} to {max(values):.3f}"
        print(f"{name:>14}  {statistics.median(values):.3f} of plain (median of {len(values)}, {spread})")


if __name__ == "__main__":
    main()

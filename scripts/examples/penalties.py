"""Penalties: the same prompt with and without them, and how often words come back."""

from jaxsched import LLM, SamplingParams

PROMPT = "My shopping list:\n- apples\n- bread\n- apples\n- bread\n-"
VARIANTS = {
    "plain": {},
    "repetition_penalty": {"repetition_penalty": 1.3},  # tokens of prompt and output
    "frequency_penalty": {"frequency_penalty": 1.0},  # tokens of the output, each time
    "presence_penalty": {"presence_penalty": 1.5},  # tokens of the output, once
}


def main() -> None:
    params = [SamplingParams(temperature=0, max_tokens=40, **fields) for fields in VARIANTS.values()]
    with LLM(max_model_len=512, max_num_seqs=4) as llm:
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    for name, output in zip(VARIANTS, outputs, strict=True):
        ids = output.outputs[0].token_ids
        print(f"{name}: {len(set(ids))} different tokens of {len(ids)}")
        print(f"    {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()

"""Tokens made likely, tokens allowed, words forbidden."""

from jaxsched import LLM, SamplingParams

PROMPT = "The capital of France is"


def main() -> None:
    with LLM(max_model_len=512, max_num_seqs=4) as llm:
        tokenizer = llm.get_tokenizer()
        (rome,) = tokenizer.encode(" Rome", add_special_tokens=False)
        digits = [tokenizer.encode(str(digit), add_special_tokens=False)[0] for digit in range(10)]
        variants = {
            "plain": {},
            "logit_bias": {"logit_bias": {rome: 20.0}},
            "allowed_token_ids": {"allowed_token_ids": digits},
            "bad_words": {"bad_words": ["Paris"]},  # with and without a space before it
        }
        params = [SamplingParams(temperature=0, max_tokens=6, **fields) for fields in variants.values()]
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    for name, output in zip(variants, outputs, strict=True):
        print(f"{name}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()

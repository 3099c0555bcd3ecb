"""Log-probabilities of the output, of the prompt, and the sum that ranks samples."""

import math

from jaxsched import LLM, SamplingParams

PROMPT = "The capital of France is"


def main() -> None:
    with LLM(max_model_len=512, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, logprobs=3, prompt_logprobs=0)
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
        samples = llm.generate(PROMPT, SamplingParams(n=4, seed=1, max_tokens=8, logprobs=0), use_tqdm=False)

    print("prompt")  # nothing is known of the first token, so its entry is None
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        found = entry[token]
        print(f"  {found.decoded_token!r:10} {found.logprob:7.2f}  rank {found.rank}")
    print("output")  # for each token a dict: the token itself, and the three most likely
    for entry in output.outputs[0].logprobs:
        print("  " + ", ".join(f"{e.decoded_token!r} {math.exp(e.logprob):.2f}" for e in entry.values()))
    print("samples, best first")
    for sample in sorted(samples[0].outputs, key=lambda s: s.cumulative_logprob, reverse=True):
        print(f"  {sample.cumulative_logprob:7.2f}  {sample.text!r}")


if __name__ == "__main__":
    main()

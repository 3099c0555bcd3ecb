"""The most likely continuations, beside what taking the most likely token each time finds."""

from jaxsched import LLM, BeamSearchParams, SamplingParams

PROMPT = "The best way to learn a language is"


def main() -> None:
    with LLM(max_model_len=512, max_num_seqs=4) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=10, logprobs=0)
        alone = llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0]
        (found,) = llm.beam_search(PROMPT, BeamSearchParams(beam_width=4, max_tokens=10))
    print(f"greedy {alone.cumulative_logprob:7.3f} {alone.text!r}")
    for beam in found.outputs:
        print(f"beam {beam.index} {beam.cumulative_logprob:7.3f} {beam.text!r}")


if __name__ == "__main__":
    main()

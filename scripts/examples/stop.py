"""Where an answer ends: stop strings, with and without them in the text, and min_tokens. Then the same as a stream."""

from jaxsched import LLM, SamplingParams

PROMPT = "Count: one, two, three, four,"
VARIANTS = {
    "stop": {"stop": [", eight", "\n"]},
    "with the stop string": {"stop": [", eight", "\n"], "include_stop_str_in_output": True},
    "a comma": {"stop": ","},
    "min_tokens": {"stop": ",", "min_tokens": 4},  # a comma among the first four tokens does not count
    "none of them": {},
}


def main() -> None:
    params = [SamplingParams(temperature=0, max_tokens=16, **fields) for fields in VARIANTS.values()]
    with LLM(max_model_len=512, max_num_seqs=4) as llm:
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        for name, output in zip(VARIANTS, outputs, strict=True):
            first = output.outputs[0]
            print(f"{name}: {first.text!r} {first.finish_reason} {first.stop_reason!r}")
        print("streamed:")  # characters that may begin a stop string are held back until it is clear
        for _, piece in llm.stream(PROMPT, params[0]):
            print("  ", repr(piece.outputs[0].text), piece.outputs[0].stop_reason)


if __name__ == "__main__":
    main()

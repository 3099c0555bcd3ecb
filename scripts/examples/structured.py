"""Answers that match a regex, one of several strings, a JSON schema, a grammar. Prints where each is enforced."""

import json

from jaxsched import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer"},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "population", "capital"],
    "additionalProperties": False,
}
NESTED = 'start: pair\npair: "(" (pair | "x") ")"\n'  # brackets in pairs: no regex can say that
ASKED = {
    "regex": ("The year of the moon landing was ", {"regex": "(19|20)[0-9]{2}"}),
    "choice": ("Review: 'I loved it!' The sentiment is ", {"choice": ["positive", "negative"]}),
    "json": ("Facts about Paris as JSON: ", {"json": SCHEMA}),
    "grammar": ("((((x)))) (((x))) ", {"grammar": NESTED}),
    "json_object": ("A person as JSON: ", {"json_object": True}),
}


def main() -> None:
    prompts = [prompt for prompt, _ in ASKED.values()]
    params = [
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=what) for _, what in ASKED.values()
    ]
    with LLM(max_model_len=512, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for name, output in zip(ASKED, outputs, strict=True):
        first = output.outputs[0]
        print(f"{name} on the {output.constraint}, {first.finish_reason}: {first.text!r}")
        if name == "json":  # always parses, unless max_tokens cut it off
            print("parsed:", sorted(json.loads(first.text)))


if __name__ == "__main__":
    main()

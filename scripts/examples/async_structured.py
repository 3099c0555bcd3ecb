"""Several constrained requests at once in asyncio, each read as it comes."""

import asyncio

from jaxsched import AsyncLLM, SamplingParams

ASKED = {
    "The year is ": {"regex": "[12][0-9]{3}"},
    "The opposite of hot is ": {"choice": ["cold", "warm", "large"]},
    "A list of three numbers: ": {
        "json": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}
    },
}


async def ask(llm: AsyncLLM, prompt: str, what: dict) -> str:
    params = SamplingParams(seed=3, temperature=0.5, max_tokens=40, structured_outputs=what)
    pieces = [piece async for piece in llm.generate(prompt, params)]  # compiled in another thread
    text = "".join(piece.outputs[0].text for piece in pieces)
    return f"{prompt!r} -> {text!r} ({pieces[-1].outputs[0].finish_reason}, {pieces[-1].constraint})"


async def main() -> None:
    async with AsyncLLM(max_model_len=512, max_num_seqs=4) as llm:
        for line in await asyncio.gather(*[ask(llm, prompt, what) for prompt, what in ASKED.items()]):
            print(line)


if __name__ == "__main__":
    asyncio.run(main())

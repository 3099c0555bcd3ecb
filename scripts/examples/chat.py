"""Chat: a system message, tools, a template of one's own, and an answer that is begun by the user."""

from jaxsched import LLM, SamplingParams

MESSAGES = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of Italy?"},
]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
WITH_TOOLS = (  # the embedded model's own template knows no tools
    "{% for tool in tools %}Tool: {{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=20, stop="\n")
    with LLM(max_model_len=512, max_num_seqs=4) as llm:
        print("answer:", llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0].text)

        begun = [*MESSAGES, {"role": "assistant", "content": "The capital of Italy is the city of"}]
        options = {"continue_final_message": True, "add_generation_prompt": False}
        print("continued:", llm.chat(begun, params, use_tqdm=False, **options)[0].outputs[0].text)

        (prompt,) = llm.chat_prompts(MESSAGES, tools=[TOOL], chat_template=WITH_TOOLS)
        print("with tools:", prompt["prompt"], sep="\n")
        print(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main()

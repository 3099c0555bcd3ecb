"""A tiny multiple-choice evaluation: the answer is the choice that the model finds most likely."""

from jaxsched import LLM

QUESTIONS = [
    ("Question: What is the capital of France?\nAnswer:", [" Paris", " London", " Berlin"]),
    ("Question: How many legs does a spider have?\nAnswer:", [" six", " eight", " ten"]),
    ("Question: Which planet is the largest?\nAnswer:", [" Mars", " Venus", " Jupiter"]),
    ("Question: What do bees make?\nAnswer:", [" honey", " milk", " wool"]),
]
RIGHT = [0, 1, 2, 0]


def main() -> None:
    correct = 0
    with LLM(max_model_len=512, max_num_seqs=4) as llm:
        for (question, choices), right in zip(QUESTIONS, RIGHT, strict=True):
            scores = llm.score(question, choices, use_tqdm=False)  # the question is read once
            # Per character: long answers would lose otherwise.
            best = max(range(len(choices)), key=lambda i: scores[i].logprob / len(choices[i]))
            correct += best == right
            numbers = ", ".join(f"{c} {s.logprob:.2f}" for c, s in zip(choices, scores, strict=True))
            print(f"{'right' if best == right else 'wrong'}:{numbers}")
    print(f"{correct} of {len(QUESTIONS)} right")


if __name__ == "__main__":
    main()

"""Prompts as vectors, and how alike they are."""

import numpy as np

from jaxsched import LLM

TEXTS = [
    "The cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "The central bank has raised interest rates.",
    "Interest rates went up, the bank said.",
]


def main() -> None:
    with LLM(max_model_len=512, max_num_seqs=4) as llm:
        outputs = llm.embed(TEXTS, pooling="mean", use_tqdm=False)
    vectors = np.stack([output.embedding for output in outputs])  # of length 1: a product is a cosine
    vectors -= vectors.mean(axis=0)  # a language model's vectors all point one way
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for text, row in zip(TEXTS, vectors @ vectors.T, strict=True):
        print(" ".join(f"{value:5.2f}" for value in row), "", text)


if __name__ == "__main__":
    main()

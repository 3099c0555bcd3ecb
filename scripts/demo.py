"""Answers a handful of prompts with a small model on this machine, and shows what the engine did.

scripts/demo makes the environment and runs this. Decoding is greedy, so two runs print the same answers.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

PROCESS_START = time.monotonic()  # before the imports that take long, which are in main
ARTICLE = """\
The lighthouse on Gull Rock was built in 1874, after three ships had been lost on the reef in a single winter. The \
stone was cut on the mainland and carried over by barge in calm weather, forty blocks at a time, so the tower took \
six summers to finish. Its first lamp burned rape oil and had to be trimmed every four hours; the two keepers slept \
in turns. In 1902 the oil lamp gave way to a paraffin burner, and the beam could be seen from nineteen miles away \
instead of eleven. During the war years the light was kept dark except when a convoy was expected, and the keepers \
learned of that by a coded telegram that spoke of the health of an aunt. The best known of them, Martha Oyelaran, \
came as the widow of a keeper and stayed for thirty-one years. She kept a diary of the weather and of the birds that \
struck the glass, and counted more than eleven thousand of them. Biologists still use her lists, because no one else \
recorded migration on that coast at night. When electricity came by cable in 1958 the second keeper was sent away, \
and in 1983 the light was made automatic and the last keeper left. The tower stood empty for twenty years. Salt got \
into the iron of the gallery, and the council wanted to pull it down. A group of villagers then bought it for one \
pound, on condition that they would repair it with their own money. They raised most of it by letting visitors pay \
to spend a night in the lamp room. Today the light is solar powered and the lower floors are a small field station, \
where students count birds as Oyelaran did, only with a radar on the roof. The diary is on display in a glass case \
by the door, open at the page of the great storm of 1928, when she wrote only four words: still here, still lit."""
PROMPTS = [
    "What is the capital of France, and what is it famous for?",
    f"Summarize this text in three sentences.\n\n{ARTICLE}",
    "Explain to a ten year old why the sky is blue.",
    "Write a Python function that tells whether a word is a palindrome.",
    "List three things to check before a long bicycle trip.",
    "What is photosynthesis?",
    "Write a short poem about a river in autumn.",
    "What is the difference between weather and climate?",
]


class View(Protocol):
    """How progress is shown."""

    def piece(self, text: str, new_tokens: int, finished: bool) -> None:
        """Something came; ``text`` belongs to the first prompt, or is empty."""
        ...

    def close(self) -> None: ...


class PlainView:
    """The first answer as it comes, then how many prompts are done. Right for files and pipes."""

    def __init__(self, prompts: int, max_tokens: int):
        self.prompts, self.done, self.middle = prompts, 0, False

    def piece(self, text: str, new_tokens: int, finished: bool) -> None:
        print(text, end="", flush=True)
        self.middle = not text.endswith("\n") if text else self.middle
        if finished:
            self.done += 1

    def close(self) -> None:
        print(f"{chr(10) if self.middle else ''}[{self.done} of {self.prompts} prompts done]", flush=True)


class LiveView:
    """The first answer as it comes above a bar over the tokens of all prompts. Needs rich and a terminal."""

    def __init__(self, prompts: int, max_tokens: int):
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.text import Text

        self.prompts, self.done, self.tokens = prompts, 0, 0
        self.answer = Text()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} tokens"))
        self.bar = Progress(*columns, TimeElapsedColumn())
        self.task = self.bar.add_task(self._label(), total=prompts * max_tokens)
        self.live = Live(Group(self.answer, Text(), self.bar), refresh_per_second=12, transient=True)
        self.live.start()

    def _label(self) -> str:
        return f"{self.done} of {self.prompts} prompts"

    def piece(self, text: str, new_tokens: int, finished: bool) -> None:
        self.answer.append(text)
        self.done += finished
        self.tokens += new_tokens
        self.bar.update(self.task, completed=self.tokens, description=self._label())

    def close(self) -> None:
        self.bar.update(self.task, total=max(self.tokens, 1))  # many stop before their limit
        self.live.stop()


def main() -> None:
    args = _arguments()
    print("Starting: loading the model and its compiled programs", flush=True)
    from jaxsched import LLM, SamplingParams

    entries = _cache_entries()
    start = time.monotonic()
    try:
        llm = LLM(args.model, max_num_seqs=len(PROMPTS), max_model_len=args.max_model_len, executor=args.executor,
                  num_scheduler_steps=args.num_scheduler_steps, prefill_chunk_size=args.prefill_chunk_size)  # fmt: skip
        chats = llm.chat_prompts([[{"role": "user", "content": prompt}] for prompt in PROMPTS])
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"demo: {error}")
    ready, new_entries = time.monotonic(), _cache_entries() - entries
    with llm:
        params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
        print(f"Ready. First prompt: {PROMPTS[0]}\n", flush=True)
        rich = sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
        view: View = (LiveView if rich else PlainView)(len(PROMPTS), args.max_tokens)
        try:
            answers, last, first_token = _answer(llm, chats, params, view)
        finally:
            view.close()
        finished = time.monotonic()
        for prompt, text, output in zip(PROMPTS, answers, last, strict=True):
            shown = text.strip() if output.error is None else f"refused: {output.error}"
            cut = " [...]" if output.outputs[0].finish_reason == "length" else ""
            print(f"\n>>> {_shortened(prompt)}\n{shown}{cut}")
        cold = "cold cache" if new_entries else "warm cache"
        print()
        _print_table(
            [
                *_work_rows(llm, last, finished - ready),
                ("first token", f"{_seconds(_median_first(last))} after the request (median)"),
                ("", f"{_seconds(first_token and first_token - PROCESS_START)} after the process started"),
                (
                    "start-up",
                    f"{ready - PROCESS_START:.2f} s, {ready - start:.2f} of it model and programs ({cold})",
                ),
            ]
        )


def _answer(
    llm: Any, chats: list[Any], params: Any, view: View, clock: Callable[[], float] = time.monotonic
) -> tuple[list[str], list[Any], float | None]:
    """Runs all prompts at once. Returns texts, each prompt's last piece, and when the first token came."""
    answers, last, first_token = [""] * len(chats), [None] * len(chats), None
    for index, piece in llm.stream(chats, params):
        output = piece.outputs[0]
        if output.token_ids and first_token is None:
            first_token = clock()
        answers[index] += output.text
        last[index] = piece
        view.piece(output.text if index == 0 else "", len(output.token_ids), piece.finished)
    return answers, last, first_token


def _work_rows(llm: Any, last: list[Any], seconds: float) -> list[tuple[str, str]]:
    stats, limits = llm.stats, llm.engine.resolved.limits
    prompt_tokens = sum(len(piece.prompt_token_ids) for piece in last)
    generated = stats.generation_tokens
    per_round = stats.steps / max(stats.rounds, 1)
    rate, total = generated / seconds, (prompt_tokens + generated) / seconds
    return [
        ("prompts", str(len(last))),
        ("tokens", f"{prompt_tokens} read, {generated} generated in {seconds:.2f} s"),
        ("speed", f"{rate:.1f} generated tokens/s, {total:.1f} tokens/s with those read"),
        (
            "rounds",
            f"{stats.rounds} of {per_round:.1f} steps on average (N = {llm.config.num_scheduler_steps})",
        ),
        ("steps", f"{stats.steps}, {stats.mixed_steps} of them mixed with {stats.chunks} chunks of prompts"),
        (
            "pages",
            f"{stats.peak_pages} of {limits.num_pages} used at the peak, {limits.page_size} tokens each",
        ),
        ("preemptions", str(stats.preemptions)),
    ]


def _median_first(last: list[Any]) -> float | None:
    times = sorted(t for piece in last if (t := piece.metrics.time_to_first_token) is not None)
    return times[len(times) // 2] if times else None


def _seconds(value: float | None) -> str:
    return "no token" if value is None else f"{value:.2f} s"


def _shortened(prompt: str, width: int = 76) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= width else line[: width - 4] + " ..."


def _print_table(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def _cache_entries() -> int:
    """Files in the folder of compiled programs: new ones mean that something was compiled."""
    import jax

    from jaxsched.config import cache_dir

    folder = Path(jax.config.jax_compilation_cache_dir or cache_dir())
    return sum(not file.name.endswith("-atime") for file in folder.rglob("*")) if folder.is_dir() else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model", help="folder, .gguf file or Hugging Face id; default: the embedded SmolLM2"
    )
    parser.add_argument("--max-tokens", type=int, default=96, help="per prompt (default: %(default)s)")
    parser.add_argument("--max-model-len", type=int, default=1024, help="tokens (default: %(default)s)")
    parser.add_argument(
        "--num-scheduler-steps", type=_number, default="auto", help="N (default: %(default)s)"
    )
    parser.add_argument(
        "--prefill-chunk-size", type=_number, default="auto", help="C, or none (default: %(default)s)"
    )
    parser.add_argument("--executor", default="auto", help="auto, scan or dispatch (default: %(default)s)")
    return parser.parse_args()


def _number(text: str) -> int | str | None:
    words = {"none": None, "auto": "auto"}
    return words[text.lower()] if text.lower() in words else int(text)


if __name__ == "__main__":
    main()

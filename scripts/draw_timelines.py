"""Shows how to look at what the engine did: runs a small load in two modes, draws their rounds and writes traces.

    python scripts/draw_timelines.py --output timelines

A few questions are being answered when two long prompts arrive. Scheduled one step at a time with whole prompts, the
answers stand still while these are read; with the defaults of jaxsched they go on. The folder then has modes.png, both
modes above each other, and for each mode a picture of its own and a trace for https://ui.perfetto.dev.

Needs matplotlib (pip install 'jaxsched[plot]').
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxsched import LLM, SamplingParams
from jaxsched.metrics import RoundRecord, draw_timeline, write_trace

MODES: dict[str, dict[str, Any]] = {
    "plain": {"num_scheduler_steps": 1, "prefill_chunk_size": None},
    "adaptive": {},
}
QUESTIONS = (
    "What is the capital of France?",
    "Explain to a child why the sky is blue.",
    "List three things to check before a long bicycle trip.",
    "Write a short poem about a river in autumn.",
    "What is the difference between weather and climate?",
    "Name five animals that sleep during the day.",
)
ANSWER_TOKENS, SUMMARY_TOKENS = 40, 12
LONG_AFTER = 60  # tokens of the answers after which the long prompts arrive
SETTINGS = {"max_model_len": 1024, "max_num_seqs": 8}


def long_text(number: int) -> str:
    """About 700 tokens."""
    lines = (f"On day {day} the keeper of light {number} counted {day * 7 % 60} ships." for day in range(45))
    return " ".join(("Summarize this diary.", *lines))


def serve(llm: LLM) -> list[RoundRecord]:
    """Runs the load once and returns the records of its rounds."""
    engine = llm.engine
    engine.reset_prefix_cache()  # or the second run would find its prompts there
    engine.rounds.clear()  # the engine keeps its latest 1024 records

    def add(text: str, max_tokens: int) -> None:
        (prompt,) = llm.chat_prompts([{"role": "user", "content": text}])
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(prompt["prompt_token_ids"], params)  # type: ignore[call-overload, index]

    for question in QUESTIONS:
        add(question, ANSWER_TOKENS)
    tokens, late = 0, [long_text(1), long_text(2)]
    while engine.has_work:
        for piece in engine.step():
            tokens += sum(len(output.token_ids) for output in piece.outputs)
        while late and tokens >= LONG_AFTER:
            add(late.pop(), SUMMARY_TOKENS)
    return list(engine.rounds)


def draw_together(
    path: Path,
    runs: Mapping[str, list[RoundRecord]],
    *,
    starts: Mapping[str, float],
    seconds: float,
    title: str,
) -> None:
    """One panel per mode, with one axis of time: ``seconds`` from the mode's ``starts`` (engine's clock)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    figure = Figure(figsize=(14, 2.3 * len(runs) + 1.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    ticks, handles = MaxNLocator(10).tick_values(0, 1e3 * seconds), []
    for ax, (mode, rounds) in zip(axes, runs.items(), strict=True):
        draw_timeline(rounds, ax=ax, title=mode)
        handles = ax.get_legend().legend_handles
        ax.get_legend().remove()  # there will be one for all
        for text in list(ax.texts):
            text.remove()  # the sizes of the rounds: too many here
        # draw_timeline counts from the first round, here all panels count from their mode's start.
        low = 1e3 * (starts[mode] - rounds[0].segments[0].start)
        ax.set_xlim(low, low + 1e3 * seconds)
        ax.xaxis.set_major_locator(FixedLocator(list(ticks + low)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _, low=low: f"{x - low:g}"))
        ax.set_title(mode, loc="left", pad=6)
        if ax is not axes[-1]:
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)
    slots = max(ax.get_ylim()[0] for ax in axes)
    for ax in axes:
        ax.set_ylim(slots, -0.5)
    figure.suptitle(title, x=0.01, ha="left")
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id; default: the embedded SmolLM2")
    parser.add_argument("--output", type=Path, default=Path("timelines"), metavar="FOLDER")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    runs = {}
    for mode, settings in MODES.items():
        with LLM(args.model, **SETTINGS, **settings) as llm:
            serve(llm)  # the first run of each program is slow, and the cost model has to learn
            runs[mode] = rounds = serve(llm)
        draw_timeline(rounds, args.output / f"{mode}.png", title=mode)
        write_trace(rounds, args.output / f"{mode}.trace.json")
    starts = {mode: rounds[0].segments[0].start for mode, rounds in runs.items()}
    seconds = max(rounds[-1].segments[-1].end - starts[mode] for mode, rounds in runs.items())
    title = f"{len(QUESTIONS)} answers, and two long prompts that arrive meanwhile"
    draw_together(args.output / "modes.png", runs, starts=starts, seconds=seconds, title=title)
    print(f"pictures and traces are in {args.output}")


if __name__ == "__main__":
    main()

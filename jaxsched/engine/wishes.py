"""What a request asks of its distribution, checked against the model and the engine, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxsched.request import SamplingParams
from jaxsched.step.controls import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

from .control_rows import ControlSpec
from .guide import Guide
from .reports import PromptReport

if TYPE_CHECKING:
    from .core import Engine

FORBIDDEN = float("-inf")


def check_ids(name: str, ids: Iterable[int], vocab: int) -> None:
    """Raises ValueError for ids that the model does not have."""
    for token in ids:
        if not 0 <= token < vocab:
            raise ValueError(f"{name} has {token}, out of range; the model's vocabulary is 0..{vocab - 1}")


def control_spec(params: SamplingParams, engine: Engine) -> ControlSpec:
    """The controls of a request. Raises ValueError that names field, value and limit."""
    vocab = engine.model.vocab_size
    bias = dict(params.logit_bias or {})
    allowed, listed = params.allowed_token_ids, tuple(params.logprob_token_ids or ())
    check_ids("logit_bias", bias, vocab)
    check_ids("allowed_token_ids", allowed or (), vocab)
    check_ids("logprob_token_ids", listed, vocab)
    words = bad_words(params.bad_words, engine)
    if params.stop and engine.tokenizer is None:
        raise ValueError("stop has strings, and this checkpoint has no tokenizer; use stop_token_ids")
    bias |= {word[0]: FORBIDDEN for word in words if len(word) == 1}
    return ControlSpec(
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        min_tokens=min(params.min_tokens, engine.resolved.limits.max_model_len),
        bias=tuple(bias.items()),
        allowed=None if allowed is None else tuple(allowed),
        bad_words=tuple(word for word in words if len(word) > 1),
        listed=listed,
    )


def bad_words(words: Iterable[str], engine: Engine) -> list[tuple[int, ...]]:
    """The token sequences of bad words: as they are, and as they are behind a space."""
    if words and engine.tokenizer is None:
        raise ValueError("bad_words are strings, and this checkpoint has no tokenizer; use allowed_token_ids")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        assert engine.tokenizer is not None
        for text in (word, " " + word.lstrip()):
            ids = tuple(engine.tokenizer.encode(text, add_special_tokens=False))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise ValueError(
                    f"bad_words has {word!r:.60}, which is {len(ids)} tokens; it must be at most "
                    f"{MAX_BAD_WORD_TOKENS}; give a part of it"
                )
            if ids:
                found[ids] = None
    many = sum(len(ids) > 1 for ids in found)
    if many > MAX_BAD_WORDS:
        raise ValueError(
            f"bad_words are {many} sequences of several tokens (each word counts with and without a leading space); "
            f"they must be at most {MAX_BAD_WORDS}; give fewer"
        )
    return list(found)


def logprob_width(name: str, wanted: int | None, engine: Engine) -> int:
    """How many log-probabilities to report; -1 for none. Raises ValueError above ``max_logprobs``."""
    if wanted is None:
        return -1
    vocab, most = engine.model.vocab_size, engine.resolved.logprob_widths[-1]
    width = vocab if wanted < 0 else min(wanted, vocab)
    if width > most:
        raise ValueError(
            f"{name} is {wanted}, which is {width} per token; this engine reports at most {most}; raise max_logprobs "
            "(-1 = the whole vocabulary)"
        )
    return width


def guide_for(params: SamplingParams, engine: Engine, constraint: Any) -> Guide | None:
    """What the output must follow; ``constraint`` if it has been compiled. Raises ValueError if it cannot be met."""
    if params.structured_outputs is None:
        return None
    if constraint is None:
        constraint = engine.constraints.compile(params.structured_outputs)
    return Guide(
        constraint, engine.executor.controls.places, not params.ignore_eos and bool(engine.eos_token_ids)
    )


def prompt_report(
    params: SamplingParams, prompt: list[int], pooling: str, start: int, engine: Engine
) -> PromptReport | None:
    """What is reported of the prompt, or None."""
    width = logprob_width("prompt_logprobs", params.prompt_logprobs, engine)
    if width < 0 and not pooling:
        return None
    return PromptReport(prompt, width, pooling, start)

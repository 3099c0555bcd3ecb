"""What ``LLM`` does beside generating: chat, likelihoods, embeddings, beam search."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import operator
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from jaxsched.arguments import Adapters, Prompt, as_list
from jaxsched.engine import Engine
from jaxsched.loading import tokenize
from jaxsched.lora import LoRARequest
from jaxsched.request import (
    BeamSearchParams,
    CompletionOutput,
    EmbeddingOutput,
    OutputBuilder,
    RequestOutput,
    SamplingParams,
    ScoreOutput,
)
from jaxsched.text import Tokenizer

Message = Mapping[str, Any]
POOLINGS = ("last", "mean")


@dataclasses.dataclass(frozen=True, slots=True)
class _Beam:
    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    ended: bool = False  # by end-of-sequence

    def score(self, length_penalty: float) -> float:
        return self.logprob / max(len(self.tokens), 1) ** length_penalty


class Tasks:
    """The base of ``LLM`` with what is made of its requests."""

    engine: Engine
    tokenizer: Tokenizer | None

    def _pieces(
        self, prompts: list[Prompt], params: Any, options: list[dict[str, Any]], *, stream: bool
    ) -> Generator[tuple[int, RequestOutput]]:
        raise NotImplementedError

    def _outputs(
        self, items: Sequence[Prompt], params: Any, options: list[dict[str, Any]], use_tqdm: bool
    ) -> list[RequestOutput]:
        """The whole outputs of prompts, also of those that were refused."""
        builders = [OutputBuilder() for _ in items]
        pieces = self._pieces(list(items), params, options, stream=False)
        bar = tqdm(total=len(items), desc="Prompts", unit="prompt", dynamic_ncols=True, disable=not use_tqdm)
        with bar, contextlib.closing(pieces):
            for index, piece in pieces:
                builders[index].add(piece)
                bar.update(piece.finished)
        return [builder.output() for builder in builders]

    # -- chat ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """See ``LLM.generate``."""
        raise NotImplementedError

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """``generate`` for one conversation or a list of them, rendered with the checkpoint's chat template.

        ``template_options`` are the keyword arguments of ``chat_prompts``.
        """
        prompts = self.chat_prompts(messages, **template_options)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def chat_prompts(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Prompt]:
        """Conversations as prompts for ``generate`` and ``stream``: text and token ids, without a second BOS.

        ``continue_final_message`` leaves the last message open, so that the model goes on with it; give
        ``add_generation_prompt=False`` with it. ``tools`` (JSON schemas as dicts) and ``chat_template_kwargs`` are
        handed to the template, which is the checkpoint's unless ``chat_template`` is given.
        Raises ValueError when the checkpoint has no tokenizer or no chat template, or the template fails.
        """
        if self.tokenizer is None:
            raise ValueError(
                "this checkpoint has no tokenizer, so there is no chat; pass token ids to generate"
            )
        given: list[Any] = [messages] if isinstance(messages, Mapping) else list(messages)
        one = bool(given) and isinstance(given[0], Mapping)
        prompts: list[Prompt] = []
        for conversation in [given] if one else given:
            text = self.tokenizer.apply_chat_template(
                list(conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return prompts

    # -- likelihood ----------------------------------------------------------------------------------------------

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoreOutput]:
        """How likely continuations are after prompts: what evaluation harnesses call loglikelihood.

        There is one continuation for each prompt, or one prompt for all continuations. Without ``continuations`` it is
        the likelihood of each prompt's own tokens from the second on (of a single one: behind beginning-of-sequence).
        Prompts that begin alike are read once (prefix cache). Text is tokenized as a whole, so that the place where it
        was cut does not matter; white space at the end of a prompt counts as the beginning of its continuation.

        An output that cannot be scored (too long, out of range) has ``error``; if all are, the first is raised.
        """
        contexts: list[Any] = as_list(prompts)
        if continuations is None:
            asked = [partial(self._alone, item) for item in contexts]
        else:
            ends: list[Any] = as_list(continuations)
            if len(contexts) == 1:
                contexts = contexts * len(ends)
            if len(contexts) != len(ends):
                raise ValueError(
                    f"{len(ends)} continuations for {len(contexts)} prompts; give one for each, or one prompt"
                )
            asked = [partial(self._pair, context, end) for context, end in zip(contexts, ends, strict=True)]
        salts = [item.get("cache_salt") or "" if isinstance(item, dict) else "" for item in contexts]
        results: list[ScoreOutput] = [ScoreOutput([], []) for _ in asked]
        good: dict[int, tuple[int, list[int]]] = {}
        for index, ask in enumerate(asked):
            try:
                good[index] = self._scorable(*ask())
            except ValueError as error:  # it fails alone
                results[index].error = error
        params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0, detokenize=False)
        items: list[Any] = [{"prompt_token_ids": ids, "cache_salt": salts[i]} for i, (_, ids) in good.items()]
        options: list[dict[str, Any]] = [
            {"prompt_start": max(start - 1, 0), "lora_request": lora_request} for start, _ in good.values()
        ]
        for index, output in zip(good, self._outputs(items, params, options, use_tqdm), strict=True):
            results[index] = _score(*good[index], output)
        _raise_if_all_refused(results)
        return results

    def _alone(self, prompt: Any) -> tuple[int, list[int]]:
        """A prompt whose own tokens are scored: from the second on, or from the first if it is the only one."""
        ids = [operator.index(token) for token in tokenize(self.tokenizer, prompt)[1]]
        return (1 if len(ids) > 1 else 0), ids

    def _pair(self, context: Any, end: Any) -> tuple[int, list[int]]:
        """Where the continuation begins, and the ids of both."""
        if isinstance(context, dict):
            ids = context.get("prompt_token_ids")
            context = context.get("prompt") if ids is None else ids
        if isinstance(context, str) and isinstance(end, str):
            stripped = context.rstrip()
            end = context[len(stripped) :] + end
            ids, whole = (list(tokenize(self.tokenizer, text)[1]) for text in (stripped, stripped + end))
            # Where the two meet, tokens may have become others; what differs counts to the continuation, at least one.
            same = sum(
                1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, whole, strict=False))
            )
            return min(same, max(len(whole) - bool(end), 0)), whole
        if isinstance(context, str) or isinstance(end, str):
            raise ValueError(
                "score: prompt and continuation must both be text, or both token ids, and not lists of texts"
            )
        return len(context), [operator.index(token) for token in (*context, *end)]

    def _scorable(self, start: int, ids: list[int]) -> tuple[int, list[int]]:
        """There must be a token before the first that is scored: if there is none, the beginning of sequence."""
        bos = self.engine.bos_token_id
        if start > 0:
            return start, ids
        if bos is None:
            raise ValueError(
                "there is no token before the first that is to be scored, and the model has no beginning-of-sequence "
                "token; give a prompt"
            )
        return 1, [bos, *ids]

    # -- embedding -----------------------------------------------------------------------------------------------

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingOutput]:
        """Prompts as vectors: the model's final hidden states, of the last token or their mean over all tokens.

        ``normalize`` scales each to length 1. An output that cannot be made (prompt too long) has ``error``; if none
        can be, the first error is raised.
        """
        if pooling not in POOLINGS:
            raise ValueError(f"pooling is {pooling!r}; it must be one of {', '.join(POOLINGS)}")
        items = as_list(prompts)
        params = SamplingParams(temperature=0, max_tokens=0, detokenize=False)
        outputs = self._outputs(
            items, params, [{"pooling": pooling, "lora_request": lora_request}] * len(items), use_tqdm
        )
        _raise_if_all_refused(outputs)
        results = []
        for output in outputs:
            vector = np.array(output.embedding or [], np.float32)
            length = np.linalg.norm(vector)
            if normalize and length > 0:
                vector = vector / length
            results.append(EmbeddingOutput(output.prompt_token_ids, vector, output.error))
        return results

    # -- beam search ---------------------------------------------------------------------------------------------

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> list[RequestOutput]:
        """The most likely continuations: ``outputs`` are the ``beam_width`` best that were found, best first.

        In each step every beam is extended by its ``2 * beam_width`` most likely tokens; extensions by end-of-sequence
        are complete, the best of the others go on. At the end complete and unfinished beams are ordered by
        ``logprob / tokens ** length_penalty`` (of generated tokens; vLLM counts the prompt's too).

        Beams share the KV pages of what they have in common. Raises ValueError when ``2 * beam_width`` log-
        probabilities are more than ``max_logprobs``, or a prompt cannot be served.
        """
        most, longest = self.engine.resolved.logprob_widths[-1], self.engine.resolved.limits.max_model_len
        if 2 * params.beam_width > most:
            raise ValueError(
                f"beam_width is {params.beam_width}, which takes {2 * params.beam_width} log-probabilities per token; "
                f"this engine reports at most {most}; lower beam_width or raise max_logprobs"
            )
        starts = [tokenize(self.tokenizer, prompt) for prompt in as_list(prompts)]
        going = [[_Beam()] for _ in starts]
        complete: list[list[_Beam]] = [[] for _ in starts]
        one = SamplingParams(
            temperature=0, max_tokens=1, logprobs=2 * params.beam_width, detokenize=False, ignore_eos=True
        )
        eos = () if params.ignore_eos else self.engine.eos_token_ids
        for _ in tqdm(range(min(params.max_tokens, longest)), desc="Tokens", disable=not use_tqdm):
            asked = [(i, beam) for i, beams in enumerate(going) for beam in beams]
            if not asked:
                break
            items: list[Any] = [
                {"prompt_token_ids": [*starts[i][1], *beam.tokens], "cache_salt": starts[i][2]}
                for i, beam in asked
            ]
            outputs = self._outputs(items, one, [{"lora_request": lora_request}] * len(items), False)
            for output in outputs:
                if output.error is not None:
                    raise output.error
            grown: list[list[_Beam]] = [[] for _ in starts]
            for (i, beam), output in zip(asked, outputs, strict=True):
                _extend(beam, output.outputs[0], eos, grown[i], complete[i])
            going = [heapq.nlargest(params.beam_width, beams, key=lambda b: b.logprob) for beams in grown]
        return [self._found(start, [*complete[i], *going[i]], params) for i, start in enumerate(starts)]

    def _found(
        self, start: tuple[Any, Any, str], beams: list[_Beam], params: BeamSearchParams
    ) -> RequestOutput:
        ranked = sorted(beams, key=lambda beam: beam.score(params.length_penalty), reverse=True)
        outputs = []
        for index, beam in enumerate(ranked[: params.beam_width]):
            ids = list(beam.tokens)
            if beam.ended and not params.include_stop_str_in_output:
                ids = ids[:-1]
            text = "" if self.tokenizer is None else self.tokenizer.decode(ids)
            outputs.append(
                CompletionOutput(
                    index=index,
                    text=text,
                    token_ids=ids,
                    finish_reason="stop" if beam.ended else "length",
                    cumulative_logprob=beam.logprob,
                )
            )
        return RequestOutput("", start[0], list(start[1]), outputs, finished=True)


def _extend(
    beam: _Beam, output: CompletionOutput, eos: Iterable[int], grown: list[_Beam], complete: list[_Beam]
) -> None:
    if not output.logprobs:  # max_model_len is reached
        complete.append(beam)
        return
    for token, found in output.logprobs[0].items():
        longer = _Beam((*beam.tokens, token), beam.logprob + found.logprob, token in eos)
        (complete if longer.ended else grown).append(longer)


def _score(start: int, ids: list[int], output: RequestOutput) -> ScoreOutput:
    scored = ids[start:]
    if output.error is not None:
        return ScoreOutput(ids[:start], scored, error=output.error)
    entries: list[Any] = (output.prompt_logprobs or [])[start:]
    found = [entry[token] for entry, token in zip(entries, scored, strict=True)]
    logprobs = [one.logprob for one in found]
    greedy = all(one.rank == 1 for one in found)
    return ScoreOutput(ids[:start], scored, float(sum(logprobs)), logprobs, greedy)


def _raise_if_all_refused(outputs: Sequence[RequestOutput | ScoreOutput]) -> None:
    if outputs and all(output.error is not None for output in outputs):
        error = outputs[0].error
        assert error is not None
        raise error

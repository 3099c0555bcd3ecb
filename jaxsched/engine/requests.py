"""The requests that are queued or running, and how their new tokens become pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from jaxsched.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from jaxsched.schedule import Finish, Sequence
from jaxsched.text import IncrementalDetokenizer, Tokenizer

if TYPE_CHECKING:
    from jaxsched.metrics import EngineMetrics

NewTokens = tuple[Sequence, list[int]]


@dataclasses.dataclass
class Request:
    """What the engine keeps of a request beside its sequences, one for each of its n samples."""

    id: str
    sequences: list[Sequence]
    params: SamplingParams
    prompt: str | None
    prompt_token_ids: list[int]  # the user's copy
    detokenizers: list[IncrementalDetokenizer | None]
    metrics: RequestMetrics
    last_token: list[float | None]  # clock seconds at which each sample's latest token came

    @classmethod
    def new(
        cls,
        request_id: str,
        sequences: list[Sequence],
        params: SamplingParams,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        now: float,
    ) -> Request:
        """A request that arrives ``now``, in clock seconds."""
        ids, count = sequences[0].prompt, len(sequences)
        detokenizers: list[IncrementalDetokenizer | None] = [None] * count
        if params.detokenize and tokenizer is not None:
            detokenizers = [IncrementalDetokenizer(tokenizer, params.skip_special_tokens) for _ in sequences]
        metrics = RequestMetrics(arrival=now, prompt_tokens=len(ids))
        return cls(request_id, sequences, params, prompt, list(ids), detokenizers, metrics, [None] * count)

    @property
    def finished(self) -> bool:
        return all(sequence.finish is not None for sequence in self.sequences)


class RequestTable:
    """Unfinished requests by id. Makes pieces: per request only what is new."""

    def __init__(self, clock: Callable[[], float], metrics: EngineMetrics):
        self.clock, self.metrics = clock, metrics
        self.by_id: dict[str, Request] = {}
        self.pieces: list[RequestOutput] = []  # new since they were taken last

    def emit(self, news: Iterable[NewTokens]) -> list[tuple[Sequence, Exception]]:
        """Pieces for sequences with new tokens or an end. Returns the sequences whose text could not be made."""
        outputs: dict[str, list[CompletionOutput]] = {}
        failed = []
        for sequence, new in news:
            try:
                output = self._output(self.by_id[sequence.request_id], sequence, new)
            except Exception as error:  # a tokenizer may raise anything; it is this request's alone
                failed.append((sequence, error))
                continue
            outputs.setdefault(sequence.request_id, []).append(output)
        for sequence, _ in failed:
            outputs.pop(sequence.request_id, None)  # ``fail`` makes the last piece of all its samples
        for request_id, parts in outputs.items():
            self._add_piece(self.by_id[request_id], parts)
        return failed

    def fail(self, request_id: str, error: Exception) -> None:
        """The last piece of a request that the host cannot go on with; its sequences have been aborted."""
        request = self.by_id[request_id]
        parts = [CompletionOutput(index=s.index, finish_reason=Finish.ERROR.value) for s in request.sequences]
        self._add_piece(request, parts, error)

    def take(self) -> list[RequestOutput]:
        """The pieces since the last call."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def _output(self, request: Request, sequence: Sequence, new: list[int]) -> CompletionOutput:
        text, detokenizer = "", request.detokenizers[sequence.index]
        if detokenizer is not None:
            text = detokenizer.push(new)
            if sequence.finish is not None:
                text += detokenizer.flush()
        output = CompletionOutput(index=sequence.index, text=text, token_ids=new)
        if sequence.finish is not None:
            output.finish_reason = sequence.finish.value
            last = sequence.output[-1] if sequence.output else None
            by_id = sequence.finish is Finish.STOP and last in request.params.stop_token_ids
            output.stop_reason = last if by_id else None
        return output

    def _add_piece(
        self, request: Request, parts: list[CompletionOutput], error: Exception | None = None
    ) -> None:
        now, metrics = self.clock(), request.metrics
        for part in parts:
            count, before = len(part.token_ids), request.last_token[part.index]
            if not count:
                continue
            metrics.generation_tokens += count
            metrics.last_token = request.last_token[part.index] = now
            if metrics.first_token is None:
                metrics.first_token = now
                metrics.first_scheduled = request.sequences[0].scheduled
                metrics.cached_tokens = request.sequences[0].cached
                self.metrics.first_token(now - metrics.arrival)
            if before is not None:
                self.metrics.inter_token(now - before, count)
        finished = request.finished
        if finished:
            metrics.finished = now
            metrics.preemptions = sum(sequence.preemptions for sequence in request.sequences)
            self.metrics.request_finished(parts[-1].finish_reason or Finish.ABORT.value, metrics)
            del self.by_id[request.id]
        piece = RequestOutput(
            request.id, request.prompt, request.prompt_token_ids, parts, finished, error, metrics
        )
        self.pieces.append(piece)

"""The requests that are queued or running, and how their new tokens become pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from jaxsched.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams
from jaxsched.schedule import ChunkPiece, Finish, Sequence
from jaxsched.schedule.books import Taken
from jaxsched.text import TextReader, Tokenizer

from .reports import PromptReport, entries_of

if TYPE_CHECKING:
    from jaxsched.metrics import EngineMetrics

DEAD_END = (
    "no token is allowed here: structured_outputs, allowed_token_ids, bad_words, logit_bias and min_tokens "
    "leave nothing to choose from"
)


@dataclasses.dataclass
class News:
    """What a sequence has got and no piece has told yet."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Request:
    """What the engine keeps of a request beside its sequences, one for each of its n samples."""

    id: str
    sequences: list[Sequence]
    params: SamplingParams
    prompt: str | None
    prompt_token_ids: list[int]  # the user's copy
    readers: list[TextReader | None]
    metrics: RequestMetrics
    last_token: list[float | None]  # clock seconds at which each sample's latest token came
    cumulative: list[float]  # log-probability of each sample so far
    report: PromptReport | None = None  # what is reported of the prompt
    told_prompt: bool = False

    @classmethod
    def new(
        cls,
        request_id: str,
        sequences: list[Sequence],
        params: SamplingParams,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        now: float,
        report: PromptReport | None = None,
    ) -> Request:
        """A request that arrives ``now``, in clock seconds."""
        ids, count = sequences[0].prompt, len(sequences)
        readers: list[TextReader | None] = [None] * count
        if params.detokenize and tokenizer is not None:
            readers = [new_reader(tokenizer, params) for _ in sequences]
        metrics = RequestMetrics(arrival=now, prompt_tokens=len(ids))
        return cls(
            request_id,
            sequences,
            params,
            prompt,
            list(ids),
            readers,
            metrics,
            [None] * count,
            [0.0] * count,
            report,
        )

    @property
    def finished(self) -> bool:
        return all(sequence.finish is not None for sequence in self.sequences)

    @property
    def constraint(self) -> str | None:
        """Where the output is constrained."""
        guide = self.sequences[0].guide
        return None if guide is None else guide.level


def new_reader(tokenizer: Tokenizer, params: SamplingParams) -> TextReader:
    """What makes text of a sample's tokens and finds its stop strings."""
    return TextReader(
        tokenizer,
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


class RequestTable:
    """Unfinished requests by id. Makes pieces: per request only what is new."""

    def __init__(self, clock: Callable[[], float], metrics: EngineMetrics, tokenizer: Tokenizer | None):
        self.clock, self.metrics = clock, metrics
        self.by_id: dict[str, Request] = {}
        self.pieces: list[RequestOutput] = []  # new since they were taken last
        self._tokenizer = tokenizer
        self._decoded: dict[int, str] = {}
        self._news: dict[Sequence, News] = {}  # what has come and is not in a piece yet
        self._failed: list[tuple[Sequence, Exception]] = []  # whose text could not be made

    @property
    def has_news(self) -> bool:
        return bool(self._news or self._failed)

    def forget_news(self) -> None:
        """What has come since the last pieces is dropped."""
        self._news, self._failed = {}, []

    def read_prompt(self, piece: ChunkPiece, outputs: Any, step: int, row: int) -> None:
        """Prompt rows that are reported: rows ``row ...`` of step ``step`` of the outputs."""
        sequence = piece.sequence
        report = self.by_id[sequence.request_id].report
        assert report is not None, "prompt rows that nobody asked for"
        report.add(outputs, step, row, piece.start, piece.length, self.decoded)
        if not sequence.samples and report.complete:
            self._news.setdefault(sequence, News())

    def read(self, taken: Taken) -> int | None:
        """Makes text of new tokens; the number of them to keep if a stop string ends the sequence there."""
        sequence = taken.sequence
        reader = self.by_id[sequence.request_id].readers[sequence.index]
        if reader is None or not taken.tokens:
            return None
        try:
            return reader.push(taken.tokens)
        except Exception as error:  # a tokenizer may raise anything; it is this request's alone
            self._failed.append((sequence, error))
            return None

    def add_news(self, taken: Taken, tokens: list[int], logprobs: Any) -> None:
        """Keeps the ``tokens`` that stay for the next piece; ``logprobs`` as in ``StepOutputs``, in numpy."""
        news = self._news.setdefault(taken.sequence, News())
        news.tokens += tokens
        news.logprobs += self._logprobs(taken, tokens, logprobs)

    def _logprobs(self, taken: Taken, tokens: list[int], found: Any) -> list[dict[int, Logprob]]:
        request = self.by_id[taken.sequence.request_id]
        params = request.params
        if not tokens or (params.logprobs is None and not params.logprob_token_ids):
            return []
        width = taken.sequence.row.width
        places = [(taken.step + i, taken.slot) for i in range(len(tokens))]
        listed = params.logprob_token_ids or ()
        entries = entries_of(found, places, tokens, width, listed, self.decoded)
        chosen = (entry[token].logprob for entry, token in zip(entries, tokens, strict=True))
        request.cumulative[taken.sequence.index] += sum(chosen)
        return entries

    def decoded(self, token: int) -> str | None:
        """The text of a single token."""
        if self._tokenizer is None:
            return None
        text = self._decoded.get(token)
        if text is None:
            text = self._decoded[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def emit(self, ended: Iterable[Sequence] = ()) -> list[tuple[Sequence, Exception]]:
        """Pieces of the news, and of sequences that have ``ended``. Returns the sequences whose text was not made."""
        for sequence in ended:
            self._news.setdefault(sequence, News())
        news, failed = self._news, self._failed
        self.forget_news()
        outputs: dict[str, list[CompletionOutput]] = {}
        for sequence, new in news.items():
            try:
                output = self._output(self.by_id[sequence.request_id], sequence, new)
            except Exception as error:  # as in ``read``
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

    def _output(self, request: Request, sequence: Sequence, new: News) -> CompletionOutput:
        text, reader = "", request.readers[sequence.index]
        if reader is not None:
            text = reader.take()
            if sequence.finish is not None:
                text += reader.finish()
                if reader.stop_reason is not None and sequence.finish is Finish.LENGTH:
                    sequence.finish = Finish.STOP  # the last characters, which were held back, complete it
        output = CompletionOutput(index=sequence.index, text=text, token_ids=new.tokens)
        params = request.params
        if params.logprobs is not None or params.logprob_token_ids:
            output.logprobs, output.cumulative_logprob = new.logprobs, request.cumulative[sequence.index]
        if sequence.finish is not None:
            output.finish_reason = sequence.finish.value
            output.stop_reason = self._stop_reason(request, sequence, reader)
        return output

    def _stop_reason(
        self, request: Request, sequence: Sequence, reader: TextReader | None
    ) -> int | str | None:
        if sequence.finish is Finish.ERROR:
            return DEAD_END
        if sequence.finish is not Finish.STOP:
            return None
        if reader is not None and reader.stop_reason is not None:
            return reader.stop_reason
        last = sequence.output[-1] if sequence.output else None
        return last if last in request.params.stop_token_ids else None

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
        piece.constraint = request.constraint
        self._tell_prompt(request, piece)
        self.pieces.append(piece)

    def _tell_prompt(self, request: Request, piece: RequestOutput) -> None:
        """What was asked of the prompt, once, when it is known."""
        report = request.report
        if report is not None and report.complete and not request.told_prompt:
            request.told_prompt = True
            if report.width >= 0:
                piece.prompt_logprobs = report.logprobs
            piece.embedding = report.embedding()

"""LLM: the class for scripts and notebooks."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from jaxsched.arguments import Adapters, Prompt, as_list, options_for, params_for, refusal
from jaxsched.engine import EngineStats
from jaxsched.engine.interrupts import uninterrupted
from jaxsched.loading import load_engine, release, tokenize
from jaxsched.lora import LoRARequest
from jaxsched.metrics import Metric, RoundLog
from jaxsched.metrics.save import save_timeline
from jaxsched.request import RequestOutput, SamplingParams
from jaxsched.tasks import Tasks
from jaxsched.text import Tokenizer


class LLM(Tasks):
    """A model ready to generate: weights, tokenizer, KV pool, compiled programs.

    >>> with LLM("path/or/hub-id") as llm:                                                        # doctest: +SKIP
    ...     outputs = llm.generate(["Hello"], SamplingParams(max_tokens=20))

    Making one compiles the programs it will ever run: up to a minute for sizes not seen before, seconds afterwards
    (they are kept on disk); a progress bar appears if it takes long, unless ``use_tqdm_on_load`` is False.

    ``model`` is a folder with safetensors, a .gguf file or a Hugging Face id; None takes the embedded SmolLM2.
    ``hf_overrides`` replaces fields of its config.json (None drops one). The other arguments are the fields of
    ``EngineConfig``; unknown ones raise TypeError. Leaving the ``with`` block, ``close()`` or ``del`` frees the device
    memory. Methods may be called from several threads.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        use_tqdm_on_load: bool = True,
        **settings: Any,
    ):
        loaded = load_engine(
            model,
            revision=revision,
            hf_overrides=hf_overrides,
            use_tqdm_on_load=use_tqdm_on_load,
            settings=settings,
            owner="LLM",
        )
        self.engine, self.config = loaded.engine, loaded.config
        self.model_config, self.tokenizer = loaded.model_config, loaded.tokenizer
        self._lock = threading.Lock()
        self._mail: dict[str, list[RequestOutput]] = {}  # pieces by request, until their reader fetches them
        self._abandoned: deque[str] = deque()  # requests whose reader has gone, to be aborted
        self._closed = False
        self._free = weakref.finalize(self, release, self.engine)
        self._free.atexit = False  # the system takes everything then

    # -- generating ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        client: str | Sequence[str] = "",
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Completes prompts; the outputs are in their order.

        A prompt is a string, a list of token ids, or a dict with ``prompt`` or ``prompt_token_ids`` and perhaps
        ``cache_salt``: prompts share cached pages only under equal salts. One SamplingParams serves all prompts, or
        there is one for each. So it is with ``priority`` (lower is sooner) and ``client``, by which the scheduling
        policies "priority" and "fair" go, and with ``lora_request``, the adapter to go through, which is loaded
        first if it is not yet (see ``add_lora``).

        A prompt that cannot be served does not stop the others: its output has ``error`` set and
        ``finish_reason`` "error", and a warning counts such prompts. If all are refused, the first error is raised.
        """
        items = as_list(prompts)
        options = options_for(len(items), priority, client, lora_request)
        done = self._outputs(items, sampling_params, options, use_tqdm)
        refused = [output for output in done if output.error is not None]
        if refused:
            if len(refused) == len(done) and refused[0].error is not None:
                raise refused[0].error
            message = (
                f"{len(refused)} of {len(done)} prompts were refused; see .error of their outputs; first: "
            )
            warnings.warn(message + str(refused[0].error), stacklevel=2)
        return done

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        client: str | Sequence[str] = "",
        lora_request: Adapters = None,
    ) -> Generator[tuple[int, RequestOutput]]:
        """Yields ``(index of the prompt, piece)`` as tokens come; a piece holds only new text and token ids.

        A refused prompt yields one piece with ``error``; if it is the only prompt, the error is raised. Leaving the
        loop early aborts what is unfinished.
        """
        items = as_list(prompts)
        options = options_for(len(items), priority, client, lora_request)
        with contextlib.closing(self._pieces(items, sampling_params, options, stream=True)) as pieces:
            for index, piece in pieces:
                if piece.error is not None and len(items) == 1:
                    raise piece.error
                yield index, piece

    def fork(
        self, request_id: str, sampling_params: SamplingParams | None = None, *, sample: int = 0
    ) -> Generator[RequestOutput]:
        """Continues a request that is being streamed a second way; yields the pieces of the new request.

        Its prompt is the other's prompt and all tokens that have come of its ``sample``; both share the KV pages of
        that. ``sampling_params`` default to the other's, with another seed. Raises ValueError when the request does
        not run any more.
        """
        self._check_open()
        if sampling_params is not None and sampling_params.structured_outputs is not None:
            self.engine.constraints.compile(
                sampling_params.structured_outputs
            )  # the engine finds it compiled
        with self._lock, uninterrupted():
            self._check_open()
            new_id = self.engine.fork(request_id, sampling_params, sample=sample)
            self._mail[new_id] = []
            pieces = self._follow(new_id)
            next(pieces)
            return pieces

    # -- looking inside ------------------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made: rounds, steps, tokens, pages, ..."""
        return self.engine.stats

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms as they stand, under vLLM's names with the prefix ``jaxsched:``.

        For Prometheus: ``jaxsched.metrics.prometheus.registry(llm.engine.metrics)`` (extra ``metrics``).
        """
        return self.engine.metrics.snapshot()

    def record_rounds(self, path: str | os.PathLike[str]) -> RoundLog:
        """From now on every round is appended to a file, one JSON line each; see ``metrics.RoundRecord``.

        Ends when the returned log or this LLM is closed.
        """
        with self._lock:
            self._check_open()
            log = RoundLog(path)
            if self.engine.round_log is not None:
                self.engine.round_log.close()
            self.engine.round_log = log
            return log

    def timeline(self, path: str | os.PathLike[str], *, limit_s: float | None = None) -> None:
        """Draws the latest rounds (at most 1024): what each slot did over time.

        ``path`` ends in .json for a trace that Perfetto and chrome://tracing show, otherwise it is a picture (.png,
        .svg, .pdf; extra ``plot``). ``limit_s``: only the last so many seconds. Raises ValueError before any round.
        """
        with self._lock:
            rounds = list(self.engine.rounds)
        save_timeline(rounds, path, limit_s=limit_s)

    # -- adapters ------------------------------------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> None:
        """Loads a low-rank adapter (LoRA) that PEFT has saved, in the place of one with its id if there is one.

        Nothing is compiled, and running requests go on. There is room for ``max_loras``; those that no request uses
        make room, least recently used first. Raises ValueError for files that are damaged or hold what is not
        supported, ranks above ``max_lora_rank``, without ``enable_lora``, and when its id or all are in use.
        """
        self._check_open()
        adapter = self.engine.adapters.read(lora_request, again=True)
        with self._lock, uninterrupted():
            self._check_open()
            self.engine.adapters.add(lora_request, adapter)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Drops an adapter; False if none with this id is loaded. Raises ValueError while requests use it."""
        with self._lock, uninterrupted():
            self._check_open()
            return self.engine.adapters.remove(lora_int_id)

    def list_loras(self) -> dict[int, LoRARequest]:
        """The adapters that are loaded, by id, least recently used first."""
        return self.engine.adapters.loaded()

    # -- control -------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forgets what the KV pages hold; later prompts are read anew."""
        with self._lock:
            self._check_open()
            self.engine.reset_prefix_cache()

    def sleep(self) -> None:
        """Frees the KV pool until ``wake_up``: weights and compiled programs stay. Running requests wait.

        ``generate``, and reading a stream, raise RuntimeError meanwhile.
        """
        with self._lock:
            self._check_open()
            self.engine.sleep()

    def wake_up(self) -> None:
        """Makes the KV pool anew. Waiting requests go on."""
        with self._lock:
            self._check_open()
            self.engine.wake_up()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed; make a new one")

    # -- plumbing ------------------------------------------------------------------------------------------------

    def _pieces(
        self, prompts: list[Prompt], params: Any, options: list[dict[str, Any]], *, stream: bool
    ) -> Generator[tuple[int, RequestOutput]]:
        """Queues the prompts, drives the engine and yields their pieces. Aborts what is left when it is closed."""
        each = params_for(prompts, params)
        index_of: dict[str, int] = {}
        refused: dict[int, ValueError] = {}
        try:
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
                try:
                    self._submit(prompt, one, index_of, index, stream=stream, **options[index])
                except ValueError as error:
                    refused[index] = error
            for index, reason in refused.items():
                yield index, refusal(prompts[index], reason)
        except BaseException:
            self._abandon(list(index_of))
            raise
        yield from self._read(index_of)

    def _read(self, index_of: dict[str, int]) -> Generator[tuple[int, RequestOutput]]:
        """Drives the engine and yields the pieces of these requests. Aborts what is left when it is closed."""
        generation = self.engine.generation
        try:
            while index_of:
                for request_id, piece in self._pump(index_of, generation):
                    yield index_of[request_id], piece
                    if piece.finished:
                        del index_of[request_id]
        finally:
            if index_of and not self._closed:
                self._abandon(list(index_of))

    def _follow(self, request_id: str) -> Generator[Any]:
        """The pieces of one request. Its maker takes the first None: so closing it unread aborts the request too."""
        index_of = {request_id: 0}
        try:
            yield None
            with contextlib.closing(self._read(index_of)) as pieces:
                for _, piece in pieces:
                    yield piece
        finally:
            if index_of and not self._closed:
                self._abandon(list(index_of))

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        index_of: dict[str, int],
        index: int,
        *,
        stream: bool,
        **options: Any,
    ) -> None:
        """Queues one prompt and enters its request in ``index_of``."""
        text, ids, salt = tokenize(self.tokenizer, prompt)
        if params.structured_outputs is not None:  # may take seconds, in which other threads go on
            self._check_open()
            options["constraint"] = self.engine.constraints.compile(params.structured_outputs)
        if options.get("lora_request") is not None:  # so may reading one
            self._check_open()
            options["adapter"] = self.engine.adapters.read(options["lora_request"])
        try:
            with self._lock, uninterrupted():
                self._check_open()
                request_id = self.engine.add_request(
                    ids, params, prompt=text, cache_salt=salt, stream=stream, **options
                )
                self._mail[request_id] = []
                index_of[request_id] = index
        finally:
            self._abort_abandoned()

    def _pump(self, mine: dict[str, int], generation: int) -> list[tuple[str, RequestOutput]]:
        """One engine step, unless another caller's step has already brought something for us."""
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError("this LLM was closed while requests were running")
                if self.engine.asleep:
                    raise RuntimeError("this LLM is asleep; call wake_up() first")
                if self.engine.generation != generation:
                    names = ", ".join(mine)
                    mine.clear()  # their names may be those of other requests by now
                    raise RuntimeError(f"requests {names} are gone: the engine was restored meanwhile")
                if not any(self._mail[request_id] for request_id in mine):
                    self.engine.advance()
                    with uninterrupted():
                        for piece in self.engine.requests.take():
                            box = self._mail.get(piece.request_id)
                            if box is not None:
                                box.append(piece)
                    lost = [i for i in mine if not self._mail[i] and not self.engine.knows(i)]
                    if lost:
                        raise RuntimeError(
                            f"requests {', '.join(lost)} are gone: the engine was restored meanwhile"
                        )
                pieces = []
                for request_id in mine:
                    pieces += [(request_id, piece) for piece in self._mail[request_id]]
                    self._mail[request_id] = []
                for request_id, piece in pieces:
                    if piece.finished:
                        del self._mail[request_id]
                return pieces
        finally:
            self._abort_abandoned()

    def _abandon(self, request_ids: list[str]) -> None:
        """Aborts requests nobody reads any more.

        Never waits for the lock: the garbage collector may end a stream in any thread at any moment, also in the one
        that holds the lock. Whoever holds it then does the work when it lets go.
        """
        self._abandoned.extend(request_ids)
        self._abort_abandoned()

    def _abort_abandoned(self) -> None:
        while self._abandoned and self._abort_some():
            pass

    @uninterrupted()
    def _abort_some(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while self._abandoned and not self._closed:
                request_id = self._abandoned.popleft()
                self._mail.pop(request_id, None)
                self.engine.abort(request_id)
            while not self._mail and not self._closed and self.engine.has_work:
                self.engine.step()  # nobody else is there to finish the rounds in flight
            if self._closed:
                self._abandoned.clear()
            return True
        finally:
            self._lock.release()

    def get_tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer (``encode``, ``decode``, ``apply_chat_template``), or None if it has none."""
        return self.tokenizer

    def __repr__(self) -> str:
        limits, resolved = self.engine.resolved.limits, self.engine.resolved
        return (
            f"LLM({self.model_config.architecture}, {self.model_config.num_parameters / 1e6:.0f}M parameters, "
            f"{resolved.dtype}, {limits.num_slots} slots, {limits.num_pages} pages of {limits.page_size} tokens, "
            f"max_model_len {limits.max_model_len}{', closed' if self._closed else ''})"
        )

    def close(self) -> None:
        """Frees the device memory now. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._free()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

"""AsyncLLM: the class for servers and for anything else that runs in asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import math
import numbers
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from jaxsched.async_stream import LoopOutlet, RequestStream
from jaxsched.config import EngineConfig
from jaxsched.engine import Engine
from jaxsched.engine.desk import Desk, QueueFullError, Request, Ticket
from jaxsched.engine.runner import Done, EngineClosedError, EngineDeadError
from jaxsched.loading import load_engine, tokenize
from jaxsched.lora import LoRARequest
from jaxsched.metrics import Metric, RoundLog
from jaxsched.metrics.save import save_timeline
from jaxsched.models import ModelConfig
from jaxsched.request import SamplingParams, StructuredOutputsParams
from jaxsched.text import Tokenizer

__all__ = ["AsyncLLM", "EngineClosedError", "EngineDeadError", "QueueFullError", "RequestStream"]

COMPILERS = 8  # threads in which constraints are compiled, or wait for another to be
INLINE_CHARACTERS = 1000  # longer texts are tokenized in another thread


class AsyncLLM:
    """A model ready to generate for many at once, in asyncio.

    >>> async with AsyncLLM("path/or/hub-id") as llm:                                               # doctest: +SKIP
    ...     async for piece in llm.generate("Hello", SamplingParams(max_tokens=20)):
    ...         print(piece.outputs[0].text, end="")

    Takes what ``LLM`` takes, and ``max_waiting``: how many requests may wait for a slot, on their way to the engine or
    queued in it; None is no limit. Making one may take a minute, and can be done outside of any event loop or with
    ``await asyncio.to_thread(AsyncLLM, ...)``.

    One thread drives the engine. Methods may be called from several event loops, in several threads, at once.
    Leaving the ``async with`` block, ``shutdown()`` or ``del`` ends the thread and frees the device memory.

    After an error inside the engine every call and every stream raises EngineDeadError with the error as
    ``__cause__``, after ``shutdown`` or ``drain`` EngineClosedError; what is wrong with one request is raised to that
    request alone.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        use_tqdm_on_load: bool = True,
        max_waiting: int | None = None,
        **settings: Any,
    ):
        _check_max_waiting(max_waiting)  # before the model is read
        loaded = load_engine(
            model,
            revision=revision,
            hf_overrides=hf_overrides,
            use_tqdm_on_load=use_tqdm_on_load,
            settings=settings,
            owner="AsyncLLM",
        )
        self.config: EngineConfig | None = loaded.config
        self._serve(loaded.engine, max_waiting, owns_engine=True)

    @classmethod
    def from_engine(
        cls, engine: Engine, *, max_waiting: int | None = None, owns_engine: bool = False
    ) -> AsyncLLM:
        """Serves an engine that exists. Nobody else may use it until ``shutdown``.

        ``owns_engine``: ``shutdown`` also frees the engine's device memory.
        """
        self = cls.__new__(cls)
        self.config = None
        _check_max_waiting(max_waiting)
        self._serve(engine, max_waiting, owns_engine=owns_engine)
        return self

    def _serve(self, engine: Engine, max_waiting: int | None, *, owns_engine: bool) -> None:
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.model_config: ModelConfig = engine.model
        self._desk = Desk(engine, max_waiting)
        self._outlets: weakref.WeakValueDictionary[int, LoopOutlet] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self._owns_engine = owns_engine
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="jaxsched-compile")
        self._desk.runner.start()
        # The thread knows the desk and not this object, so that it ends when nobody uses this object any more.
        weakref.finalize(self, self._desk.close).atexit = False  # the runner has an exit handler of its own

    # -- generating ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        client: str = "",
        deadline_ms: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestStream:
        """An async generator of the request's pieces: each has only what is new, the last has ``finished`` True.

        ``prompt`` is text, token ids, or a dict with ``prompt`` or ``prompt_token_ids`` and perhaps ``cache_salt``.
        ``request_id`` names the request for ``abort`` and ``fork``; ``priority`` (lower is sooner), ``client`` and
        ``deadline_ms`` (milliseconds from now by which the first token is wanted) are for the scheduling policy.
        ``lora_request`` is the adapter to go through, which is loaded if it is not yet.

        The request begins with the first ``anext``, which raises ValueError or TypeError for a bad request and
        QueueFullError, without waiting, when ``max_waiting`` others wait. Pieces that are not fetched in time are
        merged into one. A request that fails inside the engine ends with a piece whose ``error`` is set.

        Leaving the loop, closing or forgetting the generator, or cancelling the task that waits for it, aborts the
        request.
        """

        async def begin(stream: RequestStream) -> Ticket:
            options = _options(priority, client, deadline_ms, self.engine.clock)
            sampling = _check_params(sampling_params)
            ticket = stream.adopt(Ticket(_check_id(stream.request_id), self._outlet()))
            self._desk.open(ticket)
            text, ids, salt = await self._tokenize(prompt)
            if sampling.structured_outputs is not None:
                options["constraint"] = await self._compile(sampling.structured_outputs)
            if lora_request is not None:
                options |= {"lora_request": lora_request, "adapter": await self._read(lora_request)}
            options["cache_salt"] = salt
            self._desk.submit(ticket, Request(ids, sampling, text, options))
            return ticket

        return RequestStream(self, self._desk, _given_or_new(request_id), begin)

    async def _compile(self, wanted: StructuredOutputsParams) -> Any:
        """The constraint. What is not known yet may take seconds, in threads that serve nothing else."""
        constraint = self.engine.constraints.known(wanted)
        if constraint is None:
            loop = asyncio.get_running_loop()
            constraint = await loop.run_in_executor(self._compilers, self.engine.constraints.compile, wanted)
        return constraint

    async def _read(self, request: LoRARequest, *, again: bool = False) -> Any:
        """The adapter, in a thread where it is not loaded."""
        read = partial(self.engine.adapters.read, request, again=again)
        if not again and self.engine.adapters.knows(request):
            return read()
        return await asyncio.get_running_loop().run_in_executor(self._compilers, read)

    async def _tokenize(self, prompt: Any) -> tuple[str | None, Any, str]:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > INLINE_CHARACTERS:
            return await asyncio.to_thread(tokenize, self.tokenizer, prompt)
        text, ids, salt = tokenize(self.tokenizer, prompt)
        return (
            text,
            list(ids) if isinstance(ids, list) else ids,
            salt,
        )  # a caller may change its list meanwhile

    async def fork(
        self,
        request_id: str,
        sampling_params: SamplingParams | None = None,
        *,
        new_request_id: str | None = None,
    ) -> RequestStream:
        """A new request that goes on from all that a running one has read and generated so far, and its pieces.

        Raises ValueError when no such request runs, and what ``generate`` raises.
        """
        if sampling_params is not None and sampling_params.structured_outputs is not None:
            await self._compile(sampling_params.structured_outputs)  # the engine's thread finds it compiled
        stream = RequestStream(self, self._desk, _given_or_new(new_request_id), None)
        ticket = stream.adopt(Ticket(_check_id(stream.request_id), self._outlet()))
        self._desk.open(ticket)
        try:
            await self._ask(lambda done: self._desk.fork(ticket, request_id, sampling_params, done))
        except BaseException:
            stream.close()
            raise
        return stream

    async def abort(self, request_id: str) -> None:
        """Ends a request. Its consumer gets a last piece with finish_reason "abort". Unknown ids are ignored."""
        await self._ask(lambda done: self._desk.abort(request_id, done))

    # -- the engine ------------------------------------------------------------------------------------------------

    async def add_lora(self, lora_request: LoRARequest) -> None:
        """Loads a low-rank adapter, in the place of one with its id if there is one; see ``LLM.add_lora``."""
        adapter = await self._read(lora_request, again=True)
        await self._call(lambda engine: engine.adapters.add(lora_request, adapter))

    async def remove_lora(self, lora_int_id: int) -> bool:
        """Drops an adapter; False if none with this id is loaded. Raises ValueError while requests use it."""
        return await self._call(lambda engine: engine.adapters.remove(lora_int_id))

    def list_loras(self) -> dict[int, LoRARequest]:
        """The adapters that are loaded, by id, least recently used first."""
        return self.engine.adapters.loaded()

    async def reset_prefix_cache(self) -> None:
        """Forgets what the pages of the pool hold; what runs goes on, later prompts are read anew."""
        await self._call(lambda engine: engine.reset_prefix_cache())

    async def sleep(self) -> None:
        """Frees the memory of the KV pool until ``wake_up``; running requests wait and go on then."""
        await self._call(lambda engine: engine.sleep())

    async def wake_up(self) -> None:
        """Makes the KV pool anew after ``sleep``."""
        await self._call(lambda engine: engine.wake_up())

    def get_metrics(self) -> list[Metric]:
        """Readings of all metrics. Also after the end."""
        return self.engine.metrics.snapshot()

    def get_tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer (``encode``, ``decode``, ``apply_chat_template``), or None if it has none."""
        return self.tokenizer

    async def check_health(self, timeout: float = 30.0) -> None:
        """Returns if the engine's thread answers.

        Raises EngineDeadError or EngineClosedError after its end, TimeoutError if it is silent for ``timeout`` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._call(lambda engine: None, between_steps=False)
        except TimeoutError:
            raise TimeoutError(
                f"the engine's thread has not answered for {timeout:g} s; a round hangs, or takes longer: raise timeout"
            ) from None

    @property
    def is_running(self) -> bool:
        """Whether the engine works; False after ``shutdown`` and after an error inside it."""
        return self._desk.runner.running and not self._desk.runner.stopping

    @property
    def errored(self) -> bool:
        """Whether an error has ended the engine."""
        return self._desk.runner.error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What every call raises once an error has ended the engine, else None."""
        error = self._desk.runner.refusal()
        return error if isinstance(error, EngineDeadError) else None

    # -- the end ---------------------------------------------------------------------------------------------------

    def record_rounds(self, path: str | os.PathLike[str]) -> RoundLog:
        """From now on every round is appended to a file, one JSON line each, until the returned log is closed."""
        self.engine.round_log = RoundLog(path)
        return self.engine.round_log

    def timeline(self, path: str | os.PathLike[str], *, limit_s: float | None = None) -> None:
        """Draws the latest rounds, or writes their trace where ``path`` ends in .json; see ``LLM.timeline``."""
        save_timeline(self.engine.rounds.copy(), path, limit_s=limit_s)

    async def drain(self) -> None:
        """Takes no new requests from now on and waits until all others are finished. Cannot be undone.

        Raises RuntimeError while the engine sleeps: it would wait for ever.
        """
        if self.engine.asleep:
            raise RuntimeError("this engine is asleep, so nothing can finish; call wake_up() first")
        await self._ask(self._desk.drain)

    async def shutdown(self, drain: bool = False) -> None:
        """Ends the engine's thread and frees the device memory; what runs is aborted, or finished with ``drain``.

        Returns when it is done, also after an error inside the engine. Safe to call twice.
        """
        if drain and not self.engine.asleep:
            with contextlib.suppress(EngineDeadError, EngineClosedError):
                await self.drain()
        self._desk.close()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(EngineDeadError, EngineClosedError):
            await self._ask(self._desk.watch_end)
        self._desk.runner.join()  # all that is left for it is to return
        with self._lock:
            owned, self._owns_engine = self._owns_engine, False
        if owned:
            self.engine.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    def __repr__(self) -> str:
        state = "dead" if self.errored else "running" if self.is_running else "closed"
        limits = self.engine.resolved.limits
        return (
            f"AsyncLLM({self.model_config.architecture}, {limits.num_slots} slots, {limits.num_pages} pages of "
            f"{limits.page_size} tokens, max_model_len {limits.max_model_len}, {state})"
        )

    # -- plumbing --------------------------------------------------------------------------------------------------

    async def _call(self, run: Callable[[Engine], Any], *, between_steps: bool = True) -> Any:
        """``run(engine)`` in the engine's thread."""
        return await self._ask(lambda done: self._desk.runner.submit(run, done, between_steps=between_steps))

    async def _ask(self, send: Callable[[Done], None]) -> Any:
        """What ``done``, given to ``send``, is called with in another thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not future.done():  # whoever asked may have been cancelled
                future.set_result((result, error))

        def done(result: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, result, error)

        send(done)
        result, error = await future
        if error is not None:
            raise error
        return result

    def _outlet(self) -> LoopOutlet:
        """The one of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            outlet = self._outlets.get(id(loop))
            if outlet is None:  # it keeps its loop alive, so an id is not used again while it is here
                outlet = self._outlets[id(loop)] = LoopOutlet(loop)
            return outlet


def _check_max_waiting(value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(
            f"max_waiting is {value!r}; it must be an integer of at least 1, or None for no limit"
        )


def _given_or_new(request_id: str | None) -> str:
    return uuid.uuid4().hex if request_id is None else request_id


def _check_id(request_id: Any) -> str:
    if not isinstance(request_id, str) or not request_id:
        raise ValueError(f"request_id is {request_id!r}; it must be a string that is not empty")
    return request_id


def _check_params(params: Any) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
    return SamplingParams() if params is None else params


def _options(priority: Any, client: Any, deadline_ms: Any, clock: Callable[[], float]) -> dict[str, Any]:
    """The scheduling arguments of ``Engine.add_request``; a deadline by the engine's clock."""
    if not isinstance(priority, numbers.Integral) or isinstance(priority, bool):
        raise ValueError(f"priority is {priority!r}; it must be an integer, lower is sooner")
    if not isinstance(client, str):
        raise ValueError(f"client is {client!r}; it must be a string")
    if deadline_ms is None:
        return {"priority": int(priority), "client": client, "deadline": None}
    number = isinstance(deadline_ms, numbers.Real) and not isinstance(deadline_ms, bool)
    if not number or not 0 < deadline_ms < math.inf:
        raise ValueError(f"deadline_ms is {deadline_ms!r}; it must be a positive number of milliseconds")
    return {"priority": int(priority), "client": client, "deadline": clock() + float(deadline_ms) / 1000}

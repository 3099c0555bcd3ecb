"""The host loop: schedule, pack, dispatch, commit."""

from __future__ import annotations

import dataclasses
import hashlib
import operator
import pickle
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxsched.config import Resolved
from jaxsched.models import ModelConfig
from jaxsched.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from jaxsched.schedule import Finish, RoundPlan, Scheduler, Sequence
from jaxsched.step import EngineState, init_state
from jaxsched.step.programs import Programs, program_keys
from jaxsched.text import IncrementalDetokenizer, Tokenizer

from .executor import Executor, RoundHandle
from .interrupts import uninterrupted
from .pack import SamplingRow
from .stats import EngineStats

FLOAT32 = np.finfo(np.float32)  # what the slot table can hold


@dataclasses.dataclass
class _Request:
    """What the engine keeps of a running request beside its sequence."""

    sequence: Sequence
    params: SamplingParams
    prompt: str | None
    prompt_token_ids: list[int]  # the user's copy
    detokenizer: IncrementalDetokenizer | None
    metrics: RequestMetrics


@dataclasses.dataclass(frozen=True)
class EngineSnapshot:
    """A running engine as a value: device state as numpy arrays, scheduler and requests. Pickle it as you like."""

    state: EngineState
    host: bytes  # pickled scheduler, requests, counters
    model: ModelConfig
    resolved: Resolved


class Engine:
    """Continuous batching over a fixed set of compiled programs. One thread drives it.

    ``add_request`` checks and queues, ``step`` advances by one round and returns what is new. With ``run_ahead`` r the
    next r rounds are planned and dispatched before the results of the current one are read.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        params: Any,
        model: ModelConfig,
        resolved: Resolved,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Seq[int] = (),
        bos_token_id: int | None = None,
        max_stop_ids: int = 8,
        run_ahead: int = 1,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[int, int], None] | None = None,
    ):
        self.model, self.resolved, self.tokenizer = model, resolved, tokenizer
        self.eos_token_ids, self.bos_token_id = tuple(eos_token_ids), bos_token_id
        self.max_stop_ids, self.run_ahead, self.seed, self.clock = max_stop_ids, run_ahead, seed, clock
        self.stats = EngineStats()
        limits = resolved.limits
        state = init_state(
            model,
            num_slots=limits.num_slots,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            pages_per_seq=resolved.pages_per_seq,
            max_stop_ids=max_stop_ids,
            dtype=resolved.dtype,
        )
        programs = Programs(
            program_keys(
                num_steps=limits.num_steps,
                slot_buckets=limits.slot_buckets,
                chunk_buckets=resolved.chunk_buckets,
                scan=resolved.executor == "scan",
                variants=resolved.variants,
            )
        )
        programs.compile(graph, params, state, limits.max_new_pages, progress=progress)
        self.executor = Executor(programs, params, state, resolved)
        self.scheduler = Scheduler(limits)
        self._requests: dict[str, _Request] = {}
        self._in_flight: deque[tuple[RoundPlan, RoundHandle]] = deque()
        self._pieces: list[RequestOutput] = []  # new since the last step
        self._count = 0
        self._broken: BaseException | None = None  # what kept a planned round from being dispatched

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_token_ids: Seq[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
    ) -> str:
        """Checks and queues a request; returns its id.

        Raises ValueError that names what was asked, the limit and the remedy. Nothing is queued then.
        """
        params = SamplingParams() if params is None else params
        request_id = self._unused_id() if request_id is None else request_id
        if request_id in self._requests:
            raise ValueError(
                f"request id {request_id!r} is already running; use another or wait until it has finished"
            )
        ids = self._check_prompt(prompt_token_ids)
        stop_ids = self._check_stop_ids(params)
        max_tokens = self._check_fit(len(ids), params.max_tokens)
        row = SamplingRow(
            temperature=0.0 if params.greedy else min(params.temperature, float(FLOAT32.max)),
            top_k=min(params.top_k, self.model.vocab_size),
            top_p=max(params.top_p, float(FLOAT32.tiny)),  # 0 would ask for no token at all
            min_p=params.min_p,
            seed=self._seed_of(params.seed),
            stop_ids=stop_ids,
            greedy=params.greedy,
        )
        sequence = Sequence(request_id, ids, max_tokens, frozenset(stop_ids), row)
        detokenizer = None
        if params.detokenize and self.tokenizer is not None:
            detokenizer = IncrementalDetokenizer(self.tokenizer, params.skip_special_tokens)
        request = _Request(
            sequence, params, prompt, list(ids), detokenizer, RequestMetrics(arrival=self.clock())
        )
        self._count += 1
        self._requests[request_id] = request
        if max_tokens == 0:
            sequence.finish = Finish.LENGTH
            self._emit(request, [])
        else:
            self.scheduler.add(sequence)
        return request_id

    def _unused_id(self) -> str:
        number = self._count
        while str(number) in self._requests:  # a caller has taken it
            number += 1
        return str(number)

    def _check_prompt(self, prompt_token_ids: Seq[int]) -> list[int]:
        vocab = self.model.vocab_size
        try:
            ids = [operator.index(i) for i in prompt_token_ids]  # int() would take 1.5 and "1"
            if isinstance(prompt_token_ids, bytes | bytearray) or any(
                isinstance(i, bool) for i in prompt_token_ids
            ):
                raise TypeError
        except TypeError:
            raise ValueError(
                f"prompt_token_ids must be a list of integers, not {prompt_token_ids!r:.80}"
            ) from None
        if not ids:
            if self.bos_token_id is None:
                raise ValueError(
                    "the prompt is empty and the model has no beginning-of-sequence token; give a prompt"
                )
            ids = [self.bos_token_id]
        bad = next((i for i in ids if not 0 <= i < vocab), None)
        if bad is not None:
            raise ValueError(
                f"prompt token id {bad} is out of range; the model's vocabulary is 0..{vocab - 1}"
            )
        return ids

    def _check_stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        vocab = self.model.vocab_size
        for token in params.stop_token_ids:
            if token >= vocab:
                raise ValueError(
                    f"stop_token_ids has {token}, out of range; the model's vocabulary is 0..{vocab - 1}"
                )
        eos = () if params.ignore_eos else self.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        if len(stop_ids) > self.max_stop_ids:
            raise ValueError(
                f"stop_token_ids and end-of-sequence ids are {len(stop_ids)} together; this engine holds "
                f"{self.max_stop_ids} per request; raise max_stop_ids"
            )
        return stop_ids

    def _check_fit(self, prompt_len: int, max_tokens: int | None) -> int:
        """The output limit: ``max_tokens`` cut to the room that max_model_len leaves."""
        limits = self.resolved.limits
        if prompt_len > limits.max_model_len:
            raise ValueError(
                f"the prompt has {prompt_len} tokens, but max_model_len is {limits.max_model_len}; shorten the prompt "
                "or raise max_model_len"
            )
        room = limits.max_model_len - prompt_len
        wanted = room if max_tokens is None else min(max_tokens, room)
        capacity = limits.num_pages * limits.page_size
        if max_tokens is None:
            wanted = max(min(wanted, capacity - prompt_len + 1), min(1, room))
        need = limits.pages_for(prompt_len + max(wanted - 1, 0))
        if wanted and need > limits.num_pages:
            raise ValueError(
                f"the request needs {need} KV pages of {limits.page_size} tokens ({prompt_len} prompt + {wanted} "
                f"output tokens), but the pool has {limits.num_pages} pages; raise num_pages or lower max_tokens"
            )
        return wanted

    def _seed_of(self, seed: int | None) -> int:
        if seed is not None:
            return seed & 0xFFFF_FFFF_FFFF_FFFF
        digest = hashlib.blake2b(f"{self.seed}:{self._count}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def knows(self, request_id: str) -> bool:
        """Whether the request is queued or running."""
        return request_id in self._requests

    def abort(self, request_id: str) -> None:
        """Ends a request; the next ``step`` reports it with finish_reason "abort". Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.sequence.finish is None:
            self.scheduler.abort(request.sequence)
            self._emit(request, [])

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do or to report."""
        return self._broken is None and bool(self._pieces or self.scheduler.has_work)

    # -- rounds --------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Advances by one round. Returns pieces: per request only the new text and token ids.

        Raises RuntimeError after a round could not be dispatched: the device state is lost then.
        """
        if self._broken is not None:
            raise RuntimeError(f"this engine stopped at {self._broken!r}; make a new one") from self._broken
        self._dispatch()
        if self._in_flight:
            self._collect()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _dispatch(self) -> None:
        """Plans and submits rounds until ``run_ahead`` of them are in flight beyond the one to be read next."""
        while len(self._in_flight) <= self.run_ahead:
            with uninterrupted():
                if not self._dispatch_one():
                    return

    def _dispatch_one(self) -> bool:
        start = time.perf_counter()
        plan = self.scheduler.plan()
        if plan is None:
            return False
        try:
            handle = self.executor.submit(plan)
        except BaseException as error:
            self._broken = error
            raise
        self.stats.planned(plan, time.perf_counter() - start, self.scheduler.pool.used)
        self._in_flight.append((plan, handle))
        return True

    def _collect(self) -> None:
        """Waits for the oldest round and hands its tokens out. An interrupt while waiting loses nothing."""
        plan, handle = self._in_flight[0]
        tokens = handle.tokens()
        with uninterrupted():
            start = time.perf_counter()
            self._in_flight.popleft()
            changed = self.scheduler.commit(plan, tokens)
            self.stats.committed(plan, sum(len(new) for _, new in changed), time.perf_counter() - start)
            for sequence, new in changed:
                self._emit(self._requests[sequence.id], new)

    def _emit(self, request: _Request, new: list[int]) -> None:
        """Turns new tokens into a piece; forgets the request when it has ended."""
        sequence, now = request.sequence, self.clock()
        text = ""
        if request.detokenizer is not None:
            text = request.detokenizer.push(new)
            if sequence.finish is not None:
                text += request.detokenizer.flush()
        metrics = request.metrics
        if new and metrics.first_token is None:
            metrics.first_token = now
        output = CompletionOutput(text=text, token_ids=new)
        if sequence.finish is not None:
            metrics.finished, metrics.preemptions = now, sequence.preemptions
            output.finish_reason = sequence.finish.value
            last = sequence.output[-1] if sequence.output else None
            by_id = sequence.finish is Finish.STOP and last in request.params.stop_token_ids
            output.stop_reason = last if by_id else None
            del self._requests[sequence.id]
        self._pieces.append(
            RequestOutput(
                sequence.id,
                request.prompt,
                request.prompt_token_ids,
                [output],
                output.finished,
                metrics=request.metrics,
            )
        )

    # -- the engine as a value -----------------------------------------------------------------------------------

    def snapshot(self) -> EngineSnapshot:
        """The whole engine in mid-generation. Waits for the rounds in flight; their pieces come with the next step."""
        while self._in_flight:
            self._collect()
        host = pickle.dumps((self.scheduler, self._requests, self._pieces, self._count, self.seed))
        return EngineSnapshot(jax.device_get(self.executor.state), host, self.model, self.resolved)

    def restore(self, snapshot: EngineSnapshot) -> None:
        """Continues from a snapshot, token for token. What this engine was doing is dropped.

        Raises ValueError if the snapshot is of another model or of other sizes.
        """
        for name in ("model", "resolved"):
            if getattr(snapshot, name) != getattr(self, name):
                raise ValueError(
                    f"the snapshot is of another {name}: {getattr(snapshot, name)}, this engine has "
                    f"{getattr(self, name)}; restore into an engine with equal settings"
                )
        stop_ids = snapshot.state.slots.stop_ids.shape[1]
        if stop_ids != self.max_stop_ids:
            raise ValueError(
                f"the snapshot is of max_stop_ids {stop_ids}, this engine has {self.max_stop_ids}; restore into an "
                "engine with equal settings"
            )
        self._in_flight.clear()
        self._broken = None
        self.executor.state = jax.device_put(snapshot.state)
        self.scheduler, self._requests, self._pieces, self._count, self.seed = pickle.loads(snapshot.host)
        for request in self._requests.values():
            if request.detokenizer is not None:
                assert self.tokenizer is not None, "the snapshot has text, this engine has no tokenizer"
                request.detokenizer.attach(self.tokenizer)

    def close(self) -> None:
        """Frees the device memory. The engine cannot be used afterwards."""
        for leaf in jax.tree.leaves((self.executor.params, self.executor.state)):
            leaf.delete()

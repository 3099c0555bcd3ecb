"""The host loop: schedule, pack, dispatch, commit."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

import jax
from flax import nnx

from jaxsched.config import Resolved
from jaxsched.lora import LoRARequest
from jaxsched.metrics import EngineMetrics, RoundLog, RoundRecord
from jaxsched.models import ModelConfig
from jaxsched.request import RequestOutput, SamplingParams
from jaxsched.schedule import Finish, Scheduler, Sequence, Status
from jaxsched.schedule.policies import Policy
from jaxsched.schedule.rounds import RoundController
from jaxsched.step import EngineState, init_state
from jaxsched.text import Tokenizer
from jaxsched.weights import AdapterTargets

from . import control
from .adapters import Adapters
from .constraints import Constraints
from .control import EngineSnapshot
from .entry import Order, make_sequences
from .executor import new_executor
from .guide import Places
from .intake import intake
from .interrupts import uninterrupted
from .pipeline import Flight, Pipeline, complete_record, new_record
from .reports import PromptReport
from .requests import Request, RequestTable
from .stats import EngineStats

KEPT_ROUNDS = 1024  # records of the latest rounds that are kept for timelines


class Engine:
    """Continuous batching over a fixed set of compiled programs. One thread drives it.

    ``add_request`` checks and queues, ``step`` advances and returns what is new. With ``run_ahead`` r up to r rounds
    are planned and dispatched before the results of the current one are read; ``just_in_time`` plans the last of
    them as late as the cost model allows (see ``pipeline.py``). ``before_plan``, if set, is called in the driving
    thread before each planning; it may add and abort requests.
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
        just_in_time: bool = False,
        seed: int = 0,
        policy: str | Policy = "stall-free",
        controller: RoundController | None = None,
        adapters: AdapterTargets | None = None,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[int, int], None] | None = None,
    ):
        self.model, self.resolved, self.tokenizer = model, resolved, tokenizer
        self.eos_token_ids, self.bos_token_id = tuple(eos_token_ids), bos_token_id
        self.max_stop_ids, self.seed, self.clock = max_stop_ids, seed, clock
        self.before_plan: Callable[[], None] | None = None
        self.round_log: RoundLog | None = None  # every committed round is written there
        self.stats = EngineStats()
        self.metrics = EngineMetrics(
            page_size=resolved.limits.page_size, max_model_len=resolved.limits.max_model_len
        )
        self.rounds: deque[RoundRecord] = deque(maxlen=KEPT_ROUNDS)
        slots, vocab = resolved.limits.num_slots, model.vocab_size
        places = Places(slots, vocab, self.eos_token_ids, lambda: self.scheduler.running)
        self.executor = new_executor(graph, params, self.empty_state(), resolved, places, clock, progress)
        self.adapters = Adapters(self, adapters)
        self.scheduler = Scheduler(resolved.limits, policy, controller)
        self.requests = RequestTable(clock, self.metrics, tokenizer)
        self.constraints = Constraints(tokenizer, vocab, self.eos_token_ids)
        self.pipeline = Pipeline(clock, run_ahead, just_in_time and run_ahead > 0)
        self.asleep = False
        self.generation = 0  # times restored: who reads a request of an earlier one reads somebody else's
        self.count = 0  # requests so far; seeds of requests that bring none depend on it
        self._broken: BaseException | None = None  # why the device state is lost

    def empty_state(self) -> EngineState:
        """Device state in which nothing runs."""
        limits = self.resolved.limits
        return init_state(
            self.model,
            num_slots=limits.num_slots,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            pages_per_seq=self.resolved.pages_per_seq,
            max_stop_ids=self.max_stop_ids,
            dtype=self.resolved.kv_dtype,
            adapters=self.resolved.loras[0] > 0,
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_token_ids: Seq[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        priority: int = 0,
        client: str = "",
        deadline: float | None = None,
        cache_salt: str = "",
        stream: bool = True,
        pooling: str = "",
        prompt_start: int = 0,
        constraint: Any = None,
        lora_request: LoRARequest | None = None,
        adapter: Any = None,
    ) -> str:
        """Checks and queues a request; returns its id.

        ``priority`` (lower is sooner), ``client`` and ``deadline`` (seconds of the engine's clock) are for the
        policies that go by them. Prompts share cached pages only under equal ``cache_salt``. ``stream``: somebody reads
        the pieces as they come, so rounds are kept short. ``pooling``: "last" or "mean" hidden state of the prompt.
        ``prompt_start``: prompt log-probabilities are wanted from this row on. ``constraint``: if compiled already.
        ``lora_request``: the adapter that it goes through; ``adapter``: if it has been read already.
        Raises ValueError that names what was asked, the limit and the remedy. Nothing is queued then.
        """
        params = SamplingParams() if params is None else params
        request_id = self._unused_id() if request_id is None else request_id
        if request_id in self.requests.by_id:
            raise ValueError(
                f"request id {request_id!r} is already running; use another or wait until it has finished"
            )
        order = Order(priority, client, deadline, cache_salt, stream)
        more = (pooling, prompt_start, constraint, lora_request, adapter)
        sequences, report = make_sequences(self, request_id, prompt_token_ids, params, order, *more)
        return self._queue(request_id, sequences, params, prompt, report)

    @uninterrupted()
    def _queue(
        self,
        request_id: str,
        sequences: list[Sequence],
        params: SamplingParams,
        prompt: str | None,
        report: PromptReport | None,
    ) -> str:
        now = self.clock()
        request = Request.new(request_id, sequences, params, prompt, self.tokenizer, now, report)
        self.count += 1
        self.requests.by_id[request_id] = request
        idle = [s for s in sequences if not s.samples and s.reads_from is None]
        for sequence in idle:
            sequence.finish = Finish.LENGTH
        self._add([s for s in sequences if s.finish is None], now)
        self._emit(idle)
        self.metrics.request_arrived()
        return request_id

    def _add(self, sequences: list[Sequence], now: float) -> None:
        try:
            for sequence in sequences:
                self.scheduler.add(sequence, now)
        except BaseException:  # a policy of the user's may raise anything; then nothing is queued
            for sequence in sequences:
                if sequence.status is not Status.NEW:
                    self.scheduler.abort(sequence)
            del self.requests.by_id[sequences[0].request_id]
            raise

    def _unused_id(self) -> str:
        number = self.count
        while str(number) in self.requests.by_id:  # a caller has taken it
            number += 1
        return str(number)

    @uninterrupted()
    def fork(
        self,
        request_id: str,
        params: SamplingParams | None = None,
        *,
        sample: int = 0,
        new_id: str | None = None,
        stream: bool = True,
    ) -> str:
        """Continues one sequence a second way; see ``control.fork``."""
        return control.fork(self, request_id, params, sample=sample, new_id=new_id, stream=stream)

    def knows(self, request_id: str) -> bool:
        """Whether the request is queued or running."""
        return request_id in self.requests.by_id

    @uninterrupted()
    def abort(self, request_id: str) -> None:
        """Ends a request; the next ``step`` reports it with finish_reason "abort". Unknown ids are ignored."""
        request = self.requests.by_id.get(request_id)
        if request is not None:
            going = [sequence for sequence in request.sequences if sequence.finish is None]
            for sequence in going:
                self.scheduler.abort(sequence)
            self._emit(going)
            control.set_gauges(self)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return self.scheduler.num_waiting

    @property
    def num_free_slots(self) -> int:
        """Slots that the next requests can have."""
        return self.scheduler.num_free_slots

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do or to report."""
        return self._broken is None and bool(
            self.requests.pieces or (self.scheduler.has_work and not self.asleep)
        )

    # -- rounds --------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Advances to the next tokens. Returns pieces: per request only the new text and token ids.

        Raises RuntimeError after a round was lost: the device state is lost with it.
        """
        self.advance()
        return self.requests.take()

    def advance(self) -> None:
        """``step`` without taking the pieces; ``requests.take()`` gives them."""
        if self._broken is not None:
            raise RuntimeError(f"this engine stopped at {self._broken!r}; make a new one") from self._broken
        if not self.asleep:
            self._advance()

    def _advance(self) -> None:
        pipeline, scheduler = self.pipeline, self.scheduler
        self._launch()
        if not pipeline.flights:
            pipeline.device.out_of_work()
            return
        count = pipeline.group(scheduler.num_streaming > 0)
        waiting_for = sum(len(flight.parts) for flight in pipeline.flights)
        if pipeline.just_in_time and count == waiting_for and not pipeline.flights[-1].hosted:
            pipeline.sleep_until_due(scheduler)
            self._launch(now=True)
        self._collect(count)

    def _launch(self, now: bool = False) -> None:
        """Plans and submits rounds until enough are in flight. ``now``: the next one is due."""
        pipeline = self.pipeline
        while True:
            if now and len(pipeline.flights) > pipeline.run_ahead:
                return
            if not now and pipeline.flights and pipeline.full(self.scheduler):
                return
            with uninterrupted():
                if not self._launch_one():
                    return
            now = False

    def _launch_one(self) -> bool:
        if self.before_plan is not None:
            self.before_plan()
        begin = self.clock()
        try:
            plan = self.scheduler.plan(begin)
            if plan is None:
                return False
            planned, before = self.clock(), self.executor.programs.late_seconds
            parts = self.executor.submit(plan)
            compiled = self.executor.programs.late_seconds - before
        except BaseException as error:
            self._broken = error
            raise
        record = new_record(self.stats.rounds, begin, plan, self.scheduler, parts)
        dispatch = max(self.clock() - planned - compiled, 0.0)  # compiling is no part of a usual round
        record.host_us = {"plan": (planned - begin) * 1e6, "dispatch": dispatch * 1e6}
        self.stats.planned(plan, record)
        self.metrics.planned(record)
        if plan.queries:
            self.metrics.prefix_cache(plan.queries, plan.hits)
        self.pipeline.flights.append(Flight(plan, deque(parts), record))
        control.set_gauges(self)
        return True

    def _collect(self, count: int) -> None:
        """Waits for the next ``count`` parts of the oldest round and hands their tokens out together."""
        record = self.pipeline.flights[0].record
        try:
            for _ in range(count):
                self._collect_one()
        finally:
            with uninterrupted():
                self._hand_out(record)

    def _collect_one(self) -> None:
        """Waits for the oldest part of the oldest round and takes its tokens. An interrupt loses nothing."""
        pipeline, flight = self.pipeline, self.pipeline.flights[0]
        try:
            waited, seconds, landed = pipeline.wait(self.resolved.limits.num_slots)
            with uninterrupted():
                begin = self.clock()
                first = pipeline.landed(self.scheduler, waited, seconds)
                intake(self.scheduler, self.requests, flight.plan, landed, first)
                host = flight.record.host_us
                host["commit"] = host.get("commit", 0.0) + (self.clock() - begin) * 1e6
                if not flight.parts:
                    self._landed(flight)
        except Exception as error:
            self._broken = error
            raise

    def _landed(self, flight: Flight) -> None:
        """The last tokens of a round are here."""
        self._hand_out(flight.record)
        self.pipeline.flights.popleft()
        if not self.scheduler.has_work:
            self.pipeline.device.out_of_work()
        record, scheduler = flight.record, self.scheduler
        complete_record(record, flight.plan)
        self.rounds.append(record)
        self.stats.committed(record)
        self.metrics.committed(record)
        host = record.host_us
        scheduler.controller.host_time((sum(host.values()) - host.get("wait", 0.0)) / 1e6)
        if self.round_log is not None:
            control.log_round(self, self.round_log, record)
        control.set_gauges(self)

    def _hand_out(self, record: RoundRecord) -> None:
        """Makes pieces of the tokens that have been taken."""
        if self.requests.has_news:
            begin = self.clock()
            self._emit()
            record.host_us["emit"] = record.host_us.get("emit", 0.0) + (self.clock() - begin) * 1e6

    def _emit(self, ended: Iterable[Sequence] = ()) -> None:
        """Makes pieces of what has come, and of the ends of others."""
        for sequence, error in self.requests.emit(ended):
            if self.knows(sequence.request_id):
                for other in self.requests.by_id[sequence.request_id].sequences:
                    self.scheduler.abort(other, Finish.ERROR)
                self.requests.fail(sequence.request_id, error)
        if not self.scheduler.has_work:
            control.set_gauges(self)

    # -- the engine as a value -----------------------------------------------------------------------------------

    def finish_rounds(self) -> None:
        """Waits for the rounds in flight; their pieces come with the next ``step``."""
        while self.pipeline.flights:
            self._collect(len(self.pipeline.flights[0].parts))

    def snapshot(self) -> EngineSnapshot:
        """The whole engine in mid-generation, as a value; see ``control.snapshot``."""
        return control.snapshot(self)

    @uninterrupted()
    def restore(self, snapshot: EngineSnapshot) -> None:
        """Continues from a snapshot, token for token; see ``control.restore``."""
        control.restore(self, snapshot)

    @uninterrupted()
    def reset_prefix_cache(self) -> None:
        """Forgets what the pages of the pool hold. Running requests go on; later prompts are read anew."""
        self.scheduler.reset_prefix_cache()

    @uninterrupted()
    def sleep(self) -> None:
        """Frees the KV pool; see ``control.sleep``."""
        control.sleep(self)

    @uninterrupted()
    def wake_up(self) -> None:
        """Makes the KV pool anew; requests go on where they were."""
        control.wake_up(self)

    def close(self) -> None:
        """Frees the device memory. The engine cannot be used afterwards."""
        for leaf in jax.tree.leaves((self.executor.params, self.executor.state)):
            leaf.delete()
        self.constraints.close()
        if self.round_log is not None:
            with contextlib.suppress(OSError):
                self.round_log.close()

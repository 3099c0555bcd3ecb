"""What can be done to a whole engine: snapshot and restore, fork, sleep and wake up."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax

from jaxsched.config import Resolved
from jaxsched.metrics import RoundLog, RoundRecord
from jaxsched.models import ModelConfig
from jaxsched.request import SamplingParams
from jaxsched.schedule import Scheduler, Status
from jaxsched.step import EngineState

if TYPE_CHECKING:
    from .core import Engine
    from .requests import Request


@dataclasses.dataclass(frozen=True)
class EngineSnapshot:
    """A running engine as a value: device state and adapters as numpy arrays, scheduler and requests. Pickle it as you
    like.
    """

    state: EngineState
    host: bytes  # pickled scheduler, requests, counters
    model: ModelConfig
    resolved: Resolved
    clock: float = 0.0  # seconds of the engine's clock
    adapters: dict[str, Any] = dataclasses.field(default_factory=dict)  # by path of the parameter


def snapshot(engine: Engine) -> EngineSnapshot:
    """The whole engine in mid-generation. Waits for the rounds in flight; their pieces come with the next step.

    Raises RuntimeError while the engine sleeps.
    """
    if engine.asleep:
        raise RuntimeError("the engine is asleep and has no KV pool to save; call wake_up() first")
    engine.finish_rounds()
    requests = engine.requests
    held, adapters = engine.adapters.snapshot()
    host = pickle.dumps((engine.scheduler, requests.by_id, requests.pieces, engine.count, engine.seed, held))
    # Controls follow from the requests: they are loaded anew.
    state = jax.device_get(dataclasses.replace(engine.executor.state, controls=None))
    return EngineSnapshot(state, host, engine.model, engine.resolved, engine.clock(), adapters)


def restore(engine: Engine, saved: EngineSnapshot) -> None:
    """Continues from a snapshot, token for token. What the engine was doing is dropped.

    Raises ValueError if the snapshot is of another model or of other sizes.
    """
    for name in ("model", "resolved"):
        if getattr(saved, name) != getattr(engine, name):
            raise ValueError(
                f"the snapshot is of another {name}: {getattr(saved, name)}, this engine has "
                f"{getattr(engine, name)}; restore into an engine with equal settings"
            )
    stop_ids = saved.state.slots.stop_ids.shape[1]
    if stop_ids != engine.max_stop_ids:
        raise ValueError(
            f"the snapshot is of max_stop_ids {stop_ids}, this engine has {engine.max_stop_ids}; restore into an "
            "engine with equal settings"
        )
    scheduler, by_id, pieces, count, seed, held = pickle.loads(saved.host)
    for request in by_id.values():
        for reader in request.readers:
            if reader is not None:
                assert engine.tokenizer is not None, "the snapshot has text, this engine has no tokenizer"
                reader.attach(engine.tokenizer)
        for sequence in request.sequences:
            if sequence.guide is not None:
                sequence.guide.attach(engine.executor.controls.places, engine.constraints.compile)
    _shift_times(scheduler, by_id.values(), engine.clock() - saved.clock)
    engine.pipeline.flights.clear()
    engine.requests.forget_news()
    engine.executor.state = jax.device_put(saved.state)
    engine.adapters.restore(held, saved.adapters)
    engine.requests.by_id, engine.requests.pieces = by_id, pieces
    engine.scheduler, engine.count, engine.seed = scheduler, count, seed
    for sequence in scheduler.running:  # this device may have another place for its automaton, or none
        if sequence.guide is not None:
            sequence.hosted = not sequence.guide.on_device()
    engine.executor.reload_controls(scheduler.running)
    engine._broken, engine.asleep = None, False
    engine.generation += 1
    set_gauges(engine)


def _shift_times(scheduler: Scheduler, requests: Iterable[Request], by: float) -> None:
    """Moves all times to this engine's clock, as if no time had passed since the snapshot."""

    def moved(at: float | None) -> float | None:
        return None if at is None else at + by

    for request in requests:
        request.last_token = [moved(at) for at in request.last_token]
        metrics = request.metrics
        metrics.arrival += by
        for name in ("first_scheduled", "first_token", "last_token"):
            setattr(metrics, name, moved(getattr(metrics, name)))
        for sequence in request.sequences:
            waits = sequence.status is Status.WAITING
            if waits:
                scheduler.policy.discard(sequence)
            sequence.arrived += by
            sequence.deadline, sequence.scheduled = moved(sequence.deadline), moved(sequence.scheduled)
            if waits:
                scheduler.policy.push(sequence, sequence.arrived)


def fork(
    engine: Engine,
    request_id: str,
    params: SamplingParams | None,
    *,
    sample: int,
    new_id: str | None,
    stream: bool,
) -> str:
    """A new request that continues where a running one stands: its prompt is the other's prompt and output so far.

    Both share the full pages of what they have in common; nothing is copied, and at most a page is read again. The
    point of the fork is the last token that the host has seen. ``params`` default to the other's, with a seed of
    their own. Raises ValueError for a request that is not running, and for what ``add_request`` refuses.
    """
    request = engine.requests.by_id.get(request_id)
    if request is None:
        raise ValueError(f"request id {request_id!r} is not running, so it cannot be forked")
    if not 0 <= sample < len(request.sequences):
        raise ValueError(f"sample is {sample}; request {request_id!r} has 0..{len(request.sequences) - 1}")
    parent = request.sequences[sample]
    same = params is None
    if params is None:
        params = dataclasses.replace(
            request.params, seed=None, n=1, prompt_logprobs=None, truncate_prompt_tokens=None
        )
    memory = engine.scheduler.memory
    if parent.salt is None:  # without prefix caching nobody could find its pages until now
        parent.salt = f"fork of {parent.id} at {engine.count}".encode(errors="surrogatepass")
    if parent.pages:
        written = parent.prefilled if parent.status is Status.PREFILL else parent.length
        memory.publish(parent, min(written, parent.length - 1))  # the last token may still have to be read
    child = engine.add_request(
        parent.prompt + parent.output,
        params,
        request_id=new_id,
        priority=parent.priority,
        client=parent.client,
        stream=stream,
        constraint=parent.guide.constraint if same and parent.guide is not None else None,
        lora_request=engine.adapters.request_at(parent.row.adapter),
    )
    made = engine.requests.by_id.get(child)
    for sequence in [] if made is None else made.sequences:  # None: there was no room for a token
        sequence.salt = parent.salt
        if same and sequence.guide is not None:  # the child goes on within the same text
            sequence.guide.prefix = (*parent.guide.prefix, *parent.output)
    return child


def sleep(engine: Engine) -> None:
    """Frees the device memory of the KV pool until ``wake_up``. Running requests are preempted and lose nothing but
    time; the prefix cache is forgotten. Idempotent.
    """
    if engine.asleep:
        return
    engine.finish_rounds()
    scheduler, now = engine.scheduler, engine.clock()
    for sequence in list(scheduler.running):
        scheduler.evict(sequence, now)
    scheduler.reset_prefix_cache()
    state = engine.executor.state
    for array in jax.tree.leaves(state.caches):
        array.delete()
    engine.asleep = True
    set_gauges(engine)


def wake_up(engine: Engine) -> None:
    """Makes the KV pool anew. Idempotent."""
    if engine.asleep:
        engine.executor.state = engine.empty_state()
        engine.executor.reload_controls(())
        engine.asleep = False


def set_gauges(engine: Engine) -> None:
    """Tells the metrics what runs, waits and is in flight."""
    scheduler = engine.scheduler
    engine.metrics.set_gauges(
        running=len(scheduler.running),
        waiting=scheduler.num_waiting,
        kv_usage=scheduler.memory.pool.used / engine.resolved.limits.num_pages,
        in_flight=len(engine.pipeline.flights),
    )


def log_round(engine: Engine, log: RoundLog, record: RoundRecord) -> None:
    """Appends a round to the log. A full disk ends the log with a warning and does not stop the engine."""
    try:
        log.append(record)
    except (OSError, ValueError) as error:
        engine.round_log = None
        with contextlib.suppress(Warning):  # where warnings are errors
            warnings.warn(f"the round log ends here: {error}", RuntimeWarning, stacklevel=2)

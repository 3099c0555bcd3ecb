"""Which consumer waits for which request of an engine that runs in a thread. Knows no asyncio."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from jaxsched.request import CompletionOutput, OutputBuilder, RequestOutput, SamplingParams

from .core import Engine
from .runner import Done, EngineClosedError, EngineRunner

Item = RequestOutput | BaseException


class QueueFullError(RuntimeError):
    """As many requests wait as may. Nothing was queued; try again later."""


class Outlet(Protocol):
    """Brings items to consumers that share a thread."""

    def post(self, items: list[tuple[Ticket, Item]]) -> bool:
        """Puts the items into their tickets and wakes the consumers, from any thread. False: they cannot be woken."""
        ...


class Ticket:
    """A consumer's claim to one request: what has come and was not taken yet, at most one merged piece and an error.

    ``put`` and ``take`` are called under the outlet's lock. The other fields belong to ``Desk``.
    """

    def __init__(self, request_id: str, outlet: Outlet):
        self.request_id, self.outlet = request_id, outlet
        self.waiter: Any = None  # the outlet's: what the consumer sleeps on
        self.counted = False  # among those that wait to be queued
        self.leaving = False  # aborted; the engine may not have said so yet
        self.gone = False  # nobody takes pieces any more
        self.ended = False  # the last item was posted
        self._pieces: OutputBuilder | None = None
        self._error: BaseException | None = None

    def put(self, item: Item) -> None:
        """Adds an item to what waits."""
        if isinstance(item, BaseException):
            self._error = item
        else:
            self._pieces = self._pieces or OutputBuilder()
            self._pieces.add(item)

    def take(self) -> Item | None:
        """All that waits as one piece, then the error; None when nothing has come."""
        pieces, self._pieces = self._pieces, None
        return self._error if pieces is None else pieces.output()


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of ``Engine.add_request``."""

    prompt_token_ids: Any
    params: SamplingParams
    prompt: str | None
    options: dict[str, Any]  # priority, client, deadline, cache_salt


class Desk:
    """Takes requests for an engine from any number of threads and brings each piece to the one who asked for it.

    It owns the ``EngineRunner``. With ``max_waiting`` no more than so many requests are on their way to the engine or
    queued in it beyond those for which a slot is free.
    """

    def __init__(self, engine: Engine, max_waiting: int | None = None):
        self.engine, self.max_waiting = engine, max_waiting
        self.runner = EngineRunner(engine, on_pieces=self._deliver, on_end=self._end)
        # Guards the next four. The garbage collector may come back here while it is held, hence reentrant.
        self._lock = threading.RLock()
        self._names: dict[str, Ticket] = {}  # every request until its last piece, by id
        self._coming = 0  # opened and not yet handed to the engine
        self._queued = 0  # waiting in the engine when last looked
        self._accepting = True
        # What follows belongs to the engine's thread.
        self._routes: dict[str, Ticket] = {}  # requests that the engine has
        self._deferred: list[
            tuple[Ticket, Request]
        ] = []  # their id is that of a request which is about to leave
        self._drainers: list[Done] = []
        self._watchers: list[Done] = []
        self._closed = False

    # -- in any thread ---------------------------------------------------------------------------------------------

    def open(self, ticket: Ticket) -> None:
        """Takes a place in the queue and the request id.

        Raises QueueFullError, ValueError for an id that is in use, EngineClosedError, EngineDeadError.
        """
        if not self.runner.running:
            raise self.runner.refusal()
        with self._lock:
            if self.runner.stopping:
                raise self.runner.refusal()
            if not self._accepting:
                raise EngineClosedError("this engine is being drained and takes no new requests; use another")
            old = self._names.get(ticket.request_id)
            if old is not None and not old.leaving:
                raise ValueError(
                    f"request id {ticket.request_id!r} is already running; use another or wait until it has finished"
                )
            # The engine's own number is up to date but may count one that is also among the coming.
            waiting = self._coming + min(self._queued, self.engine.num_waiting)
            # Free slots take what comes as soon as the engine has looked, so that is not waiting.
            waiting = max(0, waiting - self.engine.num_free_slots)
            if self.max_waiting is not None and waiting >= self.max_waiting:
                raise QueueFullError(
                    f"{waiting} requests are waiting and max_waiting is {self.max_waiting}; try again later or raise "
                    "max_waiting"
                )
            self._names[ticket.request_id] = ticket
            self._coming += 1
            ticket.counted = True

    def submit(self, ticket: Ticket, request: Request) -> None:
        """Queues the request of an opened ticket. Everything that goes wrong comes as its item."""
        self.runner.submit(partial(self._admit, ticket, request), partial(self._answer, ticket))

    def fork(self, ticket: Ticket, parent: str, params: SamplingParams | None, done: Done) -> None:
        """Has an opened ticket's request continue from what ``parent`` has generated."""
        self.runner.submit(partial(self._fork, ticket, parent, params), done, between_steps=True)

    def leave(self, ticket: Ticket, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """The consumer is gone: its request is aborted. The garbage collector may call it at any moment.

        At the interpreter's end, when modules have lost their names, nobody is left to be told.
        """
        if not ticket.gone and not finalizing():
            ticket.gone = ticket.leaving = True
            self.runner.submit(partial(self._leave, ticket))

    def abort(self, request_id: str, done: Done) -> None:
        """Ends a request; its consumer gets a last piece. Unknown ids are ignored."""
        with self._lock:
            ticket = self._names.get(request_id)
            if ticket is not None:
                ticket.leaving = True  # its id may be used again from now on
        self.runner.submit(partial(self._abort, ticket), done)

    def drain(self, done: Done) -> None:
        """Takes no new requests from now on; ``done`` is called when none is left."""
        with self._lock:
            self._accepting = False
        self.runner.submit(partial(self._drain, done), partial(_only_errors, done))

    def close(self) -> None:
        """Aborts all requests, then ends the engine's thread. Does not wait; the garbage collector may call it."""
        self.runner.submit(self._close, _ignore)
        self.runner.stop()

    def watch_end(self, done: Done) -> None:
        """``done`` is called when the engine's thread takes nothing more."""
        self.runner.submit(lambda engine: self._watchers.append(done), partial(_only_errors, done))

    # -- in the engine's thread ------------------------------------------------------------------------------------

    def _admit(self, ticket: Ticket, request: Request, engine: Engine) -> None:
        if ticket.ended or ticket.gone:
            self._forget(ticket)
            return
        if self._closed:
            raise EngineClosedError("this engine was shut down before the request was queued; make a new one")
        old = self._routes.get(ticket.request_id)
        if old is not None and old.leaving:
            self._deferred.append((ticket, request))
            return
        engine.add_request(
            request.prompt_token_ids,
            request.params,
            request_id=ticket.request_id,
            prompt=request.prompt,
            **request.options,
        )
        self._queue(ticket)

    def _answer(self, ticket: Ticket, result: None, error: BaseException | None) -> None:
        if error is not None:
            self._fail(ticket, error)

    def _fork(self, ticket: Ticket, parent: str, params: SamplingParams | None, engine: Engine) -> None:
        if ticket.ended or ticket.gone:
            self._forget(ticket)
            return
        try:
            engine.fork(parent, params, new_id=ticket.request_id)
        except BaseException:
            self._forget(ticket)
            raise
        self._queue(ticket)

    def _queue(self, ticket: Ticket) -> None:
        self._routes[ticket.request_id] = ticket
        with self._lock:
            self._uncount(ticket)

    def _leave(self, ticket: Ticket, engine: Engine) -> None:
        if self._routes.get(ticket.request_id) is ticket:
            engine.abort(ticket.request_id)
        else:
            self._forget(ticket)

    def _abort(self, ticket: Ticket | None, engine: Engine) -> None:
        if ticket is None or ticket.ended:
            return
        if self._routes.get(ticket.request_id) is ticket:
            engine.abort(ticket.request_id)
        else:
            self._post([(ticket, _aborted(ticket.request_id))])
            self._forget(ticket)

    def _drain(self, done: Done, engine: Engine) -> None:
        self._drainers.append(done)
        self._check_drained()

    def _close(self, engine: Engine) -> None:
        self._closed = True
        with self._lock:
            self._accepting = False
        for request_id in list(self._routes):
            engine.abort(request_id)

    def _deliver(self, pieces: list[RequestOutput]) -> None:
        """Brings the pieces of a step to their consumers, and sees that nobody waits in vain."""
        items: list[tuple[Ticket, Item]] = []
        for piece in pieces:
            ticket = self._routes.get(piece.request_id)
            if ticket is None:
                continue
            items.append((ticket, piece))
            if piece.finished:
                del self._routes[piece.request_id]
                self._forget(ticket)
        self._post(items)
        with self._lock:
            self._queued = self.engine.num_waiting
        deferred, self._deferred = self._deferred, []
        for ticket, request in deferred:
            self.submit(ticket, request)
        if self._routes and not self.engine.has_work:
            self._fail_lost()

    def _fail_lost(self) -> None:
        """Nobody may wait for a request that the engine does not have."""
        for request_id, ticket in list(self._routes.items()):
            if not self.engine.knows(request_id):
                del self._routes[request_id]
                self._fail(
                    ticket, RuntimeError(f"request {request_id!r} is gone: the engine was restored meanwhile")
                )

    def _post(self, items: list[tuple[Ticket, Item]]) -> None:
        """One call per outlet. Requests whose consumers' event loop is gone are aborted."""
        batches: dict[Outlet, list[tuple[Ticket, Item]]] = {}
        for ticket, item in items:
            if not ticket.gone and not ticket.ended:
                ticket.ended = isinstance(item, BaseException) or item.finished
                batches.setdefault(ticket.outlet, []).append((ticket, item))
        for outlet, batch in batches.items():
            if not outlet.post(batch):
                for ticket, _ in batch:
                    self.leave(ticket)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        """The request ends with an error that its consumer raises. Any thread, once the engine's has ended."""
        self._forget(ticket)
        self._post([(ticket, error)])

    def _forget(self, ticket: Ticket) -> None:
        """The request has left: its id and its place in the queue are free."""
        with self._lock:
            if self._names.get(ticket.request_id) is ticket:
                del self._names[ticket.request_id]
            self._uncount(ticket)
        self._check_drained()

    def _uncount(self, ticket: Ticket) -> None:
        """No longer on its way to the engine. Under the lock."""
        if ticket.counted:
            ticket.counted = False
            self._coming -= 1
        self._queued = self.engine.num_waiting

    def _check_drained(self) -> None:
        if self._drainers and not self._names and not self._routes:
            drainers, self._drainers = self._drainers, []
            for done in drainers:
                done(None, None)

    def _end(self, error: BaseException | None) -> None:
        """The thread ends: whoever still waits is told why."""
        with self._lock:
            self._accepting = False
            tickets = {*self._names.values(), *self._routes.values()}
            self._names.clear()
        self._routes.clear()
        self._deferred.clear()
        self._post([(ticket, self.runner.refusal()) for ticket in tickets])
        for done in self._drainers:
            done(None, None if error is None else self.runner.refusal())
        for done in self._watchers:
            done(None, None)
        self._drainers, self._watchers = [], []


def _aborted(request_id: str) -> RequestOutput:
    return RequestOutput(request_id, None, [], [CompletionOutput(finish_reason="abort")], finished=True)


def _only_errors(done: Done, result: Any, error: BaseException | None) -> None:
    if error is not None:
        done(None, error)


def _ignore(result: Any, error: BaseException | None) -> None:
    """For commands whose outcome does not matter."""

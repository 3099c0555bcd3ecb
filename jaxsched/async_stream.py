"""What a consumer in asyncio holds of a request, and how the engine's thread wakes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Any

from jaxsched.engine.desk import Desk, Item, Ticket
from jaxsched.request import RequestOutput


class RequestStream(AsyncGenerator[RequestOutput, None]):
    """The pieces of one request, as an async generator. Belongs to the event loop of its first ``anext``."""

    def __init__(
        self,
        owner: object,
        desk: Desk,
        request_id: str,
        begin: Callable[[RequestStream], Awaitable[Any]] | None,
    ):
        self.request_id = request_id
        self._owner = owner  # lives as long as the stream
        self._desk, self._begin = desk, begin
        self._ticket: Ticket | None = None
        self._busy = self._over = False

    def adopt(self, ticket: Ticket) -> Ticket:
        """The request that is aborted when the stream is closed or forgotten."""
        self._ticket = ticket
        return ticket

    async def __anext__(self) -> RequestOutput:
        if self._busy:
            raise RuntimeError(f"two tasks wait for the next piece of request {self.request_id!r}; one may")
        if self._over:
            raise StopAsyncIteration
        self._busy = True
        try:
            if self._begin is not None:
                begin, self._begin = self._begin, None
                await begin(self)
            assert self._ticket is not None
            outlet = self._ticket.outlet
            assert isinstance(outlet, LoopOutlet)
            item = await outlet.next(self._ticket)
        except BaseException:
            self.close()
            raise
        finally:
            self._busy = False
        if isinstance(item, BaseException):
            self._over = True
            raise item
        self._over = item.finished
        return item

    async def asend(self, value: None) -> RequestOutput:
        return await self.__anext__()

    async def athrow(self, typ: Any, val: Any = None, tb: TracebackType | None = None) -> RequestOutput:
        self.close()
        raise typ if val is None else val

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Aborts the request unless it has ended. Waits for nothing; may be called in any thread."""
        over, self._over, self._begin = self._over, True, None
        if self._ticket is not None and not over:
            self._desk.leave(self._ticket)

    def __del__(self) -> None:
        self.close()


class LoopOutlet:
    """Wakes the consumers of one event loop, with one call however many pieces there are."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._lock = threading.RLock()  # reentrant: the garbage collector may close a stream while it is held
        self._ready: dict[Ticket, None] = {}  # something has come for them
        self._called = False  # the loop is about to look

    def post(self, items: list[tuple[Ticket, Item]]) -> bool:
        """See ``Outlet``. In the engine's thread."""
        with self._lock:
            for ticket, item in items:
                ticket.put(item)
                self._ready[ticket] = None
            called, self._called = self._called, True
        if called:
            return not self._loop.is_closed()
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _wake(self) -> None:
        with self._lock:
            ready, self._ready, self._called = self._ready, {}, False
        for ticket in ready:
            if ticket.waiter is not None and not ticket.waiter.done():
                ticket.waiter.set_result(None)

    async def next(self, ticket: Ticket) -> Item:
        """What has come for the ticket; waits until something has. In the event loop."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                f"request {ticket.request_id!r} was begun in another event loop; fetch its pieces there"
            )
        while True:
            with self._lock:
                item = ticket.take()
            if item is not None:
                return item
            # What comes from here on is announced in the event loop, that is, after the waiter is there.
            ticket.waiter = self._loop.create_future()
            try:
                await ticket.waiter
            finally:
                ticket.waiter = None

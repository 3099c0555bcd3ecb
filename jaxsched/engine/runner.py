"""A thread that drives an engine, and the inbox through which all other threads talk to it. Knows no asyncio."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from jaxsched.request import RequestOutput

from .core import Engine

EXIT_SECONDS = 5.0  # that the end of the interpreter waits for a round

Done = Callable[[Any, BaseException | None], None]


class EngineDeadError(RuntimeError):
    """The engine stopped for good while it was in use. ``__cause__`` is the reason."""


class EngineClosedError(RuntimeError):
    """The engine was shut down, or is about to be."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Engine], Any]
    done: Done | None  # gets (result, None) or (None, error)
    between_steps: bool


class EngineRunner:
    """Drives an engine in a daemon thread of its own, from ``start`` to ``stop``.

    Nobody else may touch the engine meanwhile: what others want they hand to ``submit``, and it is run in order in the
    engine's thread, just before each planning and between steps. The thread sleeps when there is nothing to do.

    Called in that thread: ``on_pieces(pieces)`` after each step, and without pieces before it sleeps; ``on_end(error)``
    once, last, with None after ``stop`` or with what ended the thread. An error of a command goes to its ``done``. Any
    other error, of a step or of a callback, ends the thread: host and device may disagree then, and going on would give
    wrong tokens.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_pieces: Callable[[list[RequestOutput]], None],
        on_end: Callable[[BaseException | None], None],
        name: str = "jaxsched-engine",
    ):
        self.engine, self._on_pieces, self._on_end = engine, on_pieces, on_end
        # put() of a SimpleQueue may interrupt itself: the garbage collector may submit at any moment, in any thread.
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._held: deque[_Command] = (
            deque()
        )  # taken out of the inbox while a step was on; engine thread only
        self._stopping = self._halted = self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread. Once only."""
        self.engine.before_plan = self._before_plan
        atexit.register(self._at_exit)
        self._thread.start()

    def submit(
        self, run: Callable[[Engine], Any], done: Done | None = None, *, between_steps: bool = False
    ) -> None:
        """Has ``run(engine)`` called in the engine's thread, then ``done(result, error)``. Waits for nothing.

        ``between_steps``: not while a round is being planned. Later commands wait behind it. Without ``done``, an error
        of ``run`` ends the thread. After the end ``done`` gets EngineDeadError or EngineClosedError, at once.
        """
        self._inbox.put(_Command(run, done, between_steps))
        if self._ended:  # nobody else may come for it
            self._refuse_all()

    def stop(self) -> None:
        """Ends the thread when the engine has no work left. Does not wait; may be called anywhere, also twice."""
        self._stopping = True
        self.submit(_nothing, _forget)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the end of the thread; False if it has not come within ``timeout`` seconds."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def running(self) -> bool:
        """Whether the thread takes commands."""
        return self._thread.is_alive() and not self._ended

    @property
    def stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopping

    @property
    def error(self) -> BaseException | None:
        """What ended the thread; None while it runs and after ``stop``."""
        return self._error

    def refusal(self) -> RuntimeError:
        """A new exception that says why the engine is not to be had any more."""
        if self._error is None:
            return EngineClosedError("this engine was shut down; make a new one")
        dead = EngineDeadError(f"the engine stopped at {self._error!r}; make a new one")
        dead.__cause__ = self._error
        return dead

    # -- in the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._drive()
        except BaseException as error:  # also SystemExit and the like: others wait for this thread
            self._error = error
        finally:
            self._end()

    def _drive(self) -> None:
        engine = self.engine
        while not self._halted:
            self._between_steps()
            if engine.has_work:
                self._on_pieces(engine.step())
            elif self._inbox.empty():
                if self._stopping:
                    return
                self._on_pieces([])
                self._execute(self._inbox.get())

    def _before_plan(self) -> None:
        """Runs what has come, up to the first command that has to wait for the end of the step."""
        for _ in range(self._inbox.qsize()):  # what comes meanwhile waits for the next time
            command = self._inbox.get_nowait()
            if self._held or command.between_steps:
                self._held.append(command)
            else:
                self._execute(command)

    def _between_steps(self) -> None:
        count = self._inbox.qsize()
        while self._held:
            self._execute(self._held.popleft())
        for _ in range(count):
            self._execute(self._inbox.get_nowait())

    def _execute(self, command: _Command) -> None:
        try:
            result = command.run(self.engine)
        except BaseException as error:
            if command.done is None:
                raise
            command.done(None, error)
            if not isinstance(error, Exception):
                raise
        else:
            if command.done is not None:
                command.done(result, None)

    def _end(self) -> None:
        self.engine.before_plan = None
        self._ended = True
        try:
            self._on_end(self._error)
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._refuse_all()
            atexit.unregister(self._at_exit)

    # -- in any thread ---------------------------------------------------------------------------------------------

    def _refuse_all(self) -> None:
        """Empties the inbox after the end. Each command is taken by one thread only."""
        while True:
            try:
                command = self._held.popleft() if self._held else self._inbox.get_nowait()
            except (queue.Empty, IndexError):
                if self._held or not self._inbox.empty():
                    continue
                return
            if command.done is not None:
                with contextlib.suppress(Exception):
                    command.done(None, self.refusal())

    def _at_exit(self) -> None:
        """The interpreter ends: a daemon thread must not be inside jax by then."""
        self._halted = True
        self.stop()
        self.join(EXIT_SECONDS)


def _nothing(engine: Engine) -> None:
    """Wakes the thread up."""


def _forget(result: Any, error: BaseException | None) -> None:
    """For commands whose outcome does not matter."""

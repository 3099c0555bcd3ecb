"""What LLM and AsyncLLM share: loading a model into an engine, and reading prompts."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from jaxsched.config import EngineConfig
from jaxsched.engine import Engine
from jaxsched.host_memory import keep_freed_memory, return_freed_memory
from jaxsched.metrics.nvml import NvmlDevice
from jaxsched.models import ModelConfig
from jaxsched.request import refuse_unknown
from jaxsched.startup import Background, CompileBar, default_model, use_compilation_cache
from jaxsched.text import Tokenizer, load_tokenizer
from jaxsched.weights import adapter_targets, load_params, nbytes, open_checkpoint, structure

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedEngine:
    """An engine and what it was made of."""

    engine: Engine
    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None


def load_engine(
    model: str | os.PathLike[str] | None,
    *,
    revision: str | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    use_tqdm_on_load: bool = True,
    settings: Mapping[str, Any],
    owner: str = "LLM",
) -> LoadedEngine:
    """Reads a checkpoint and meanwhile compiles the programs for it, and makes the KV pool.

    ``model`` is a folder with safetensors, a .gguf file or a Hugging Face id; None takes the embedded SmolLM2.
    ``settings`` are fields of ``EngineConfig``; TypeError names ``owner`` and a setting it does not know, ValueError
    one that is out of range, before any weight is read. Warnings point at the caller of the caller.
    """
    refuse_unknown(owner, settings, [field.name for field in dataclasses.fields(EngineConfig)])
    config = EngineConfig(**settings)
    use_compilation_cache()
    checkpoint = open_checkpoint(
        default_model() if model is None else model, revision=revision, hf_overrides=hf_overrides
    )
    checkpoint = checkpoint.at_length(config.max_model_len)
    device = jax.local_devices()[0]
    platform = "cpu" if device.platform == "cpu" else "gpu"
    model_config = checkpoint.model_config
    dtype = config.resolve_dtype(model_config, platform)
    if platform == "cpu":
        keep_freed_memory()
        if dtype != "float32":
            warnings.warn(f"dtype {dtype} is slower than float32 on a CPU", stacklevel=3)
        if "gpu_memory_utilization" in settings:
            warnings.warn(
                "gpu_memory_utilization does nothing on a CPU; num_pages sets the pool", stacklevel=3
            )
    config.resolve(model_config, platform, 1 << 62)  # refuse impossible settings before reading weights
    room = None
    if config.enable_lora:
        room = adapter_targets(checkpoint, config.max_loras, config.max_lora_rank, dtype)
    how: dict[str, Any] = {
        "dtype": jax.numpy.dtype(dtype),
        "device": device,
        "quantization": config.quantization,
        "adapters": None if room is None else room.shapes,
    }
    graph, shapes = structure(checkpoint, **how)
    tokenizer = load_tokenizer(checkpoint.path)
    free = free_bytes(device, config.gpu_memory_utilization)
    resolved = config.resolve(model_config, platform, None if free is None else free - nbytes(shapes))
    bar = CompileBar() if use_tqdm_on_load else None
    with Background(lambda stop: load_params(checkpoint, stop=stop, **how), bar) as loading:
        engine = Engine(
            graph,
            shapes,  # all that compiling needs
            model_config,
            resolved,
            tokenizer=tokenizer,
            eos_token_ids=checkpoint.eos_token_ids,
            bos_token_id=checkpoint.bos_token_id,
            max_stop_ids=max(config.max_stop_ids, len(checkpoint.eos_token_ids)),
            adapters=room,
            **config.engine_options(resolved, platform),
            progress=loading.progress,
        )
        try:
            engine.executor.params = loading.result()
        except BaseException:
            engine.executor.params = ()
            release(engine)
            raise
    if platform == "gpu":
        engine.metrics.sources.append(NvmlDevice.first_visible(engine.metrics.labels))
    return LoadedEngine(engine, config, model_config, tokenizer)


def release(engine: Engine) -> None:
    """Frees what an engine has on the device and, on a CPU, what the allocator keeps of it."""
    engine.close()
    return_freed_memory()


def free_bytes(device: jax.Device, utilization: float) -> int | None:
    """Bytes of GPU memory left for the KV pool, or None where the device does not say (a CPU)."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats:
        return None
    limit = stats.get("bytes_limit", 0)
    return int(limit * utilization) - stats.get("bytes_in_use", 0)


def tokenize(tokenizer: Tokenizer | None, prompt: Any) -> tuple[str | None, Any, str]:
    """Text (None if only ids were given), token ids and cache salt of what a user gives as one prompt.

    A prompt is text, token ids, or a dict with PROMPT_KEYS. Raises ValueError for other keys, none, a cache_salt that
    is no string, text that cannot be encoded, and text without a tokenizer. The ids are the engine's to check.
    """
    text, salt = prompt, ""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - set(PROMPT_KEYS)
        if unknown or set(prompt) <= {"cache_salt"}:
            found = ", ".join(sorted(map(repr, unknown))) or "nothing"
            raise ValueError(f"a prompt dict has 'prompt' or 'prompt_token_ids', not {found}")
        salt = "" if prompt.get("cache_salt") is None else prompt["cache_salt"]
        if not isinstance(salt, str):
            raise ValueError(f"cache_salt is {salt!r:.80}; it must be a string")
        text = prompt.get("prompt")
        if prompt.get("prompt_token_ids") is not None:
            return text, prompt["prompt_token_ids"], salt
    if not isinstance(text, str):
        return None, text, salt
    if tokenizer is None:
        raise ValueError("this checkpoint has no tokenizer; pass prompts as lists of token ids")
    return text, tokenizer.encode(text), salt

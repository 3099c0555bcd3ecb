"""What users hand to ``LLM.generate`` and its kin: one or many prompts, and options for all or for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxsched.lora import LoRARequest
from jaxsched.request import CompletionOutput, RequestOutput, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Adapters = LoRARequest | None | Sequence[LoRARequest | None]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
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


def params_for(prompts: list[Prompt], params: Any) -> list[SamplingParams]:
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


def options_for(
    count: int, priority: Any = 0, client: Any = "", lora_request: Any = None
) -> list[dict[str, Any]]:
    """The keyword arguments of each request that are given once for all or once for each."""
    columns = {}
    for name, value in (("priority", priority), ("client", client), ("lora_request", lora_request)):
        alone = isinstance(value, str) or not isinstance(value, Sequence)
        column = [value] * count if alone else list(value)
        if len(column) != count:
            raise ValueError(
                f"{len(column)} values of {name} for {count} prompts; give one for all, or one for each"
            )
        columns[name] = column
    return [{name: columns[name][i] for name in columns} for i in range(count)]


def refusal(prompt: Prompt, error: ValueError) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput("", text, [], [CompletionOutput(finish_reason="error")], finished=True, error=error)

"""The door: everything a request can get wrong is refused here, alone, before anything is queued."""

from __future__ import annotations

import dataclasses
import hashlib
import numbers
import operator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxsched.config import Resolved
from jaxsched.lora import LoRARequest
from jaxsched.request import SamplingParams
from jaxsched.schedule import Sequence

from .pack import NO_CONTROLS, SamplingRow
from .reports import PromptReport
from .wishes import check_ids, control_spec, guide_for, logprob_width, prompt_report

if TYPE_CHECKING:
    from .core import Engine

FLOAT32 = np.finfo(np.float32)  # what the slot table can hold
PRIORITIES = 1 << 31  # their absolute values lie below


def check_prompt(prompt_token_ids: Seq[int], vocab: int, bos_token_id: int | None) -> list[int]:
    """The prompt as a list of its own. An empty one becomes the beginning-of-sequence token."""
    try:
        ids = [operator.index(i) for i in prompt_token_ids]  # int() would take 1.5 and "1"
        if isinstance(prompt_token_ids, bytes | bytearray) or any(
            isinstance(i, bool) for i in prompt_token_ids
        ):
            raise TypeError
    except TypeError:
        raise ValueError(
            f"prompt_token_ids must be a list of integers, not {prompt_token_ids!r:.80}"
        ) from None
    if not ids:
        if bos_token_id is None:
            raise ValueError(
                "the prompt is empty and the model has no beginning-of-sequence token; give a prompt"
            )
        ids = [bos_token_id]
    if not 0 <= min(ids) <= max(ids) < vocab:
        bad = next(i for i in ids if not 0 <= i < vocab)
        raise ValueError(f"prompt token id {bad} is out of range; the model's vocabulary is 0..{vocab - 1}")
    return ids


def check_stop_ids(
    params: SamplingParams, eos_token_ids: Seq[int], vocab: int, max_stop_ids: int
) -> tuple[int, ...]:
    """All ids that end the request."""
    check_ids("stop_token_ids", params.stop_token_ids, vocab)
    eos = () if params.ignore_eos else eos_token_ids
    stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
    if len(stop_ids) > max_stop_ids:
        raise ValueError(
            f"stop_token_ids and end-of-sequence ids are {len(stop_ids)} together; this engine holds "
            f"{max_stop_ids} per request; raise max_stop_ids"
        )
    return stop_ids


def check_fit(prompt_len: int, max_tokens: int | None, resolved: Resolved, reads: bool = False) -> int:
    """The output limit: ``max_tokens`` cut to the room that max_model_len leaves. ``reads``: even without output."""
    limits = resolved.limits
    if prompt_len > limits.max_model_len:
        raise ValueError(
            f"the prompt has {prompt_len} tokens, but max_model_len is {limits.max_model_len}; shorten the prompt "
            "or raise max_model_len"
        )
    room = limits.max_model_len - prompt_len
    wanted = room if max_tokens is None else min(max_tokens, room)
    if max_tokens is None:
        wanted = max(min(wanted, limits.longest - prompt_len), min(1, room))
    need = limits.need(prompt_len + max(wanted - 1, 0))
    if (wanted or reads) and need > limits.num_pages:
        raise ValueError(
            f"the request needs {need} KV pages of {limits.page_size} tokens ({prompt_len} prompt + {wanted} "
            f"output tokens), but the pool has {limits.num_pages} pages; raise num_pages or lower max_tokens"
        )
    return wanted


class Order(NamedTuple):
    """What policies, the prefix cache and the length of rounds go by. As in ``Engine.add_request``."""

    priority: int
    client: str
    deadline: float | None
    cache_salt: str
    stream: bool

    def check(self) -> None:
        """Raises ValueError that names field, value and limit."""
        number = isinstance(self.priority, numbers.Integral) and not isinstance(self.priority, bool)
        if not number or abs(self.priority) >= PRIORITIES:
            raise ValueError(
                f"priority is {self.priority!r}; it must be an integer between -2^31 and 2^31, lower is sooner"
            )
        for name in ("client", "cache_salt"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a string")
        real = isinstance(self.deadline, numbers.Real) and not isinstance(self.deadline, bool)
        if self.deadline is not None and not (real and np.isfinite(self.deadline)):
            raise ValueError(f"deadline is {self.deadline!r}; it must be seconds of the engine's clock")


def check_truncation(ids: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """The prompt's last tokens, as many as ``truncate_prompt_tokens`` says; -1: all that leave room for the output."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep > max_model_len:
        raise ValueError(
            f"truncate_prompt_tokens is {keep}; it must be at most max_model_len, {max_model_len}"
        )
    if keep < 0:
        keep = max(max_model_len - (1 if params.max_tokens is None else params.max_tokens), 1)
    return ids[-keep:]


def make_sequences(
    engine: Engine,
    request_id: str,
    prompt_token_ids: Seq[int],
    params: SamplingParams,
    order: Order,
    pooling: str = "",
    prompt_start: int = 0,
    constraint: Any = None,
    lora_request: LoRARequest | None = None,
    adapter: Any = None,
) -> tuple[list[Sequence], PromptReport | None]:
    """The sequences of a request, one for each of its n samples, and what is reported of its prompt.

    Raises ValueError for all that is wrong with it.
    """
    vocab, resolved = engine.model.vocab_size, engine.resolved
    if not isinstance(request_id, str):
        raise ValueError(f"request_id is {request_id!r}; it must be a string")
    ids = check_prompt(prompt_token_ids, vocab, engine.bos_token_id)
    ids = check_truncation(ids, params, resolved.limits.max_model_len)
    stop_ids = check_stop_ids(params, engine.eos_token_ids, vocab, engine.max_stop_ids)
    report = prompt_report(params, ids, pooling, prompt_start, engine)
    max_tokens = check_fit(len(ids), params.max_tokens, resolved, report is not None)
    order.check()
    seed = seed_of(f"{engine.seed}:{engine.count}") if params.seed is None else params.seed % (1 << 64)
    salt: bytes | None = order.cache_salt.encode(errors="surrogatepass")
    if not resolved.limits.prefix_caching:  # then only the samples of one request share pages
        salt = f"request {engine.count}".encode() if params.n > 1 else None
    guides = [guide_for(params, engine, constraint) for _ in range(params.n)]
    row = sampling_row(params, seed, stop_ids, vocab)
    row = dataclasses.replace(row, **reported(params, report, engine), spec=control_spec(params, engine))
    if guides[0] is not None or row.spec != NO_CONTROLS:
        row = dataclasses.replace(row, controls=True)
    row = dataclasses.replace(row, adapter=engine.adapters.place(lora_request, adapter))
    salt = engine.adapters.salt(row.adapter, salt)
    sequences = [
        Sequence(
            id=request_id if params.n == 1 else f"{request_id}#{index}",
            prompt=ids,
            max_tokens=max_tokens,
            stop_ids=frozenset(stop_ids),
            row=dataclasses.replace(row, seed=sample_seed(seed, index), prompt="" if index else row.prompt),
            request_id=request_id,
            index=index,
            priority=int(order.priority),
            client=order.client,
            deadline=None if order.deadline is None else float(order.deadline),
            salt=salt,
            streaming=order.stream,
            guide=guides[index],
            reads_from=None if index or report is None else report.start,
        )
        for index in range(params.n)
    ]
    return sequences, report


def reported(params: SamplingParams, report: PromptReport | None, engine: Engine) -> dict[str, Any]:
    """The fields of a SamplingRow that say what is reported of tokens and prompt."""
    width = logprob_width("logprobs", params.logprobs, engine)
    if params.logprob_token_ids and width < 0:
        width = 0
    prompt = ""
    if report is not None:
        both = report.width >= 0 and report.pooling
        prompt = "both" if both else "hidden" if report.pooling else "logprobs"
    return {"width": width, "logprobs": max(width, -1 if report is None else report.width), "prompt": prompt}


def sampling_row(params: SamplingParams, seed: int, stop_ids: tuple[int, ...], vocab: int) -> SamplingRow:
    """How a sequence samples, in numbers that the slot table can hold."""
    return SamplingRow(
        temperature=0.0 if params.greedy else min(params.temperature, float(FLOAT32.max)),
        top_k=min(params.top_k, vocab),
        top_p=max(params.top_p, float(FLOAT32.tiny)),  # 0 would ask for no token at all
        min_p=params.min_p,
        seed=seed,
        stop_ids=stop_ids,
        greedy=params.greedy,
    )


def seed_of(text: str) -> int:
    """64 bits that look random."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def sample_seed(seed: int, index: int) -> int:
    """The seed of a request's sample. The first has the request's own; the others do not meet other requests'."""
    return seed if index == 0 else seed_of(f"{seed}/{index}")

"""One sequence as the scheduler sees it: lengths, pages, slot, and what the rounds in flight may still add."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from .pages import Key


class Status(enum.Enum):
    """Where a sequence stands. WAITING holds neither slot nor pages; PREFILL and DECODE hold both."""

    NEW = "new"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Finish(enum.Enum):
    """Why a sequence ended. The values are the public ``finish_reason``."""

    STOP = "stop"  # sampled an end-of-sequence or stop token
    LENGTH = "length"  # reached max_tokens or max_model_len
    ABORT = "abort"
    ERROR = "error"  # the host could not go on with it, or no token was allowed


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and its output so far.

    Of ``row``, how it samples, the scheduler reads only ``greedy``, ``controls`` and ``logprobs``.
    """

    id: str
    prompt: list[int]
    max_tokens: int  # output limit, already cut to the room that max_model_len leaves
    stop_ids: frozenset[int]
    row: Any
    request_id: str = ""  # of the request; its n samples have one
    index: int = 0  # which of the samples
    priority: int = 0  # lower is sooner
    client: str = ""
    deadline: float | None = None  # clock seconds by which the first token is wanted
    salt: bytes | None = b""  # sequences share pages only under equal salts; None: with nobody
    streaming: bool = False  # somebody reads its tokens as they come
    hosted: bool = False  # the host must see each token before the next one can be sampled
    guide: Any = None  # the engine's constraint on its output
    reads_from: int | None = (
        None  # prompt rows from here on are reported, so they must be computed; None: no rows are
    )
    output: list[int] = dataclasses.field(default_factory=list)  # tokens that reached the host
    status: Status = Status.NEW
    finish: Finish | None = None
    arrival: int = 0  # rank by arrival, unique
    arrived: float = 0.0  # clock seconds
    scheduled: float | None = None  # clock seconds of the first admission
    slot: int = -1
    epoch: int = 0  # times admitted to a slot
    pages: list[int] = dataclasses.field(default_factory=list)  # by position // page_size
    gone: int = (
        0  # of its pages, in order, that lie behind the window and were given back; GONE stands for them
    )
    keys: list[Key] = dataclasses.field(default_factory=list)  # of its full pages, as far as known
    published: int = 0  # of its pages, in order, that others can find
    prefill_target: int = 0  # tokens to read before decoding: the prompt, after preemption the output too
    prefilled: int = 0  # of which planned so far, or found in the cache
    cached: int = 0  # of the prompt's tokens, found in the cache at the first admission
    pending: int = 0  # tokens that rounds in flight may add to the output, at most
    preemptions: int = 0

    @property
    def samples(self) -> bool:
        """Whether it goes on to generate after its prompt."""
        return self.max_tokens > 0

    @property
    def length(self) -> int:
        """Prompt and output tokens known to the host."""
        return len(self.prompt) + len(self.output)

    @property
    def left(self) -> int:
        """Tokens it may still sample after the rounds in flight, if none of them ends it early."""
        return self.max_tokens - len(self.output) - self.pending

    def tokens(self, start: int, stop: int) -> list[int]:
        """Tokens ``start .. stop-1`` of prompt and output together."""
        prompt = self.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        if start >= len(prompt):
            return self.output[start - len(prompt) : stop - len(prompt)]
        return prompt[start:] + self.output[: stop - len(prompt)]

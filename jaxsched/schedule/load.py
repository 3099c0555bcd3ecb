"""What a round is decided from, and the decision. Plain data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The scheduler's state in numbers, when a round is about to be planned."""

    now: float  # seconds of the clock that was passed in
    waiting: int  # sequences without a slot
    waiting_tokens: int  # tokens that they have to read, at most
    first_tokens: int  # of these, the tokens of the next in line; 0 when none waits
    first_wait: float  # seconds since the next in line arrived
    blocked: bool  # somebody waits whom slots or pages keep out
    decoding: int  # sequences that decode
    unread_tokens: int  # prompt tokens of admitted sequences that are still to be read
    free_slots: int
    free_pages: int
    ends: tuple[
        int, ...
    ]  # tokens that decoding sequences may still sample, as far as below the longest round's N
    context: int  # KV positions of all decoding sequences together
    streaming: bool  # somebody reads tokens as they come
    in_flight: int  # rounds dispatched and not yet committed


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The size of a round: at most this much. Pages may make it shorter, lack of work too."""

    steps: int  # N
    mixed: int  # M, of the N
    chunk: int  # C, prompt tokens per mixed step
    decode: bool = True  # False: a round that reads prompts is one step long, and running decodes pause in it
    admit: bool = True  # False: no new request in this round
    reason: str = ""  # why, for the round log

"""What one round will do, in host terms. Plain data, no arrays."""

from __future__ import annotations

import dataclasses

from .sequence import Sequence


@dataclasses.dataclass(slots=True)
class ChunkPiece:
    """Tokens ``start .. start+length-1`` of one sequence, read in one mixed step."""

    sequence: Sequence
    slot: int
    start: int
    length: int
    ends: bool  # the last token to read is in this piece, so the step samples
    epoch: int = 0  # of the sequence, as in Entry


@dataclasses.dataclass(slots=True)
class MixedStep:
    """One mixed step: the pieces of prompts that it reads."""

    pieces: tuple[ChunkPiece, ...]

    @property
    def tokens(self) -> int:
        """Prompt tokens read."""
        return sum(piece.length for piece in self.pieces)


@dataclasses.dataclass(slots=True)
class Entry:
    """A sequence that may sample in steps ``first .. first+steps-1`` of the round.

    ``epoch`` guards against a stale slot.
    """

    sequence: Sequence
    slot: int
    epoch: int
    first: int
    steps: int
    sampled: int = 0  # tokens that came of it, known after the commit


@dataclasses.dataclass(slots=True)
class RoundPlan:
    """M mixed steps, then ``steps`` - M decode steps, and the slot updates before them."""

    steps: int = 0  # N
    mixed: list[MixedStep] = dataclasses.field(default_factory=list)  # M of them
    slots: int = 0  # slot bucket: rows 0..slots-1 take part
    decode: bool = True  # False: live slots pause in the mixed steps
    moves: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (old slot, new slot)
    drops: list[int] = dataclasses.field(default_factory=list)  # slots that must stop decoding
    admits: list[tuple[int, Sequence]] = dataclasses.field(default_factory=list)
    pages: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # (slot, index, page)
    entries: list[Entry] = dataclasses.field(default_factory=list)
    preempted: int = 0
    sampling: bool = False  # some sequence in the round does not decode greedily
    controls: bool = False  # some running sequence has controls
    logprobs: int = -1  # most log-probabilities that a running sequence wants; -1 = none
    hosted: int = 0  # steps of the round after which the host must see tokens before it can plan on
    # For the log, the metrics and the cost model:
    reason: str = ""  # why this N and C
    decoding: int = 0  # sequences that decoded before the round and go on in it
    context: int = 0  # KV positions of the decoding sequences
    running: int = 0
    waiting: int = 0
    queries: int = 0  # tokens of newly admitted prompts, and
    hits: int = 0  # how many of them were found in the prefix cache
    ended: set[Sequence] = dataclasses.field(
        default_factory=set
    )  # sequences that ended in the round, by commit
    wasted: dict[str, int] = dataclasses.field(default_factory=dict)  # row-steps without a token, by reason

    @property
    def decode_steps(self) -> int:
        return self.steps - len(self.mixed)

    @property
    def changes_slots(self) -> bool:
        """Whether the slot table must be updated before the round."""
        return bool(self.moves or self.drops or self.admits or self.pages)

"""How long a round is and how many prompt tokens it reads: N, M and C."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Protocol

from .cost import StepCost
from .load import Choice, Load


class RoundController(Protocol):
    """Chooses the size of each round; is told what happened. Reads no clock; it is pickled with the scheduler."""

    cost: StepCost
    host_seconds: float  # of a round, running mean; 0 where it is not learned

    def choose(self, load: Load) -> Choice:
        """The size of the next round, at most."""
        ...

    def measured(self, chunk: int, slots: int, context: int, steps: int, seconds: float, live: int) -> None:
        """``steps`` equal steps of one program took ``seconds`` on the device; ``live`` sequences decoded in them."""
        ...

    def host_time(self, seconds: float) -> None:
        """What one round cost the host: planning, packing, launching, committing, emitting."""
        ...

    def ended(self, tokens: int, stopped: bool) -> None:
        """A sequence ended with so many output tokens; ``stopped``: by a stop token, which no plan can foresee."""
        ...


class FixedRounds:
    """N and C as the user gave them: every round as long as its work allows. It learns step times all the same."""

    def __init__(self, steps: int, chunk: int):
        self.steps, self.chunk, self.cost, self.host_seconds = steps, chunk, StepCost(), 0.0

    def choose(self, load: Load) -> Choice:
        """Always N steps, prompts read in as many of them as there is anything to read."""
        return Choice(self.steps, self.steps, self.chunk, reason="fixed")

    def measured(self, chunk: int, slots: int, context: int, steps: int, seconds: float, live: int) -> None:
        """Feeds the cost model."""
        self.cost.observe(chunk, slots, context, steps, seconds)

    def host_time(self, seconds: float) -> None:
        """Not used."""

    def ended(self, tokens: int, stopped: bool) -> None:
        """Not used."""


class AdaptiveRounds:
    """N, M and C from load, measured times and targets. One rule a line, in the order in which they are applied:

    C, prompt tokens per mixed step
      1. the smallest bucket that holds all there is to read, else the largest;
      2. with ``target_itl`` (seconds) and live decodes: the largest whose predicted step keeps it, at least the
         smallest bucket;
      3. but one bucket more than rule 2 says while prompts get less than ``prefill_share[0]`` of the device time, or
         when ``target_ttft`` (seconds) would be missed by the next in line.
    M, steps that read prompts
      4. as many as it takes to read all there is;
      5. where rule 2 holds C down: none in this round while prompts have had more than ``prefill_share[1]`` of the
         device time of the last ``HORIZON`` seconds in which decodes wanted it too; not so when ``target_ttft`` would
         be missed. Elsewhere throughput goes first, and a step that reads prompts decodes as well.
    N, steps
      6. the fewest that keep the host, which works while the device does, at 1/4 of the round while an arrival could
         be admitted, at 1/25 while it could not (no slot left): longer rounds would only make it wait;
      7. when somebody waits whom slots or pages keep out: as many of these as give most tokens per second, knowing that
         a sequence that ends leaves its slot empty until the round is over. That is no further than the nearest certain
         end, unless the host's time for another round costs more than the empty slots;
      8. ``stream_interval`` tokens at most while somebody reads a stream;
      9. with ``target_itl``: as many decode steps as keep it;
     10. as many as waste at most 2.5 % of the decode steps behind unforeseen ends: an end by a stop token wastes N/2
         steps of its round and the rounds run ahead; but not so few that the device waits for the host.
    N is rounded down to one of ``step_sizes``. Until a program has been measured its time is taken from its neighbours;
    until anything has, rounds have one step. With one step size, or one chunk size, that number is fixed.
    """

    HOST_SHARE_FREE, HOST_SHARE_FULL = 1 / 4, 1 / 25
    WASTE = 0.025
    HORIZON = 5.0  # seconds of device time over which the share of prompts is measured
    LEARNING = 0.05  # weight of one sequence in the means behind rule 10

    def __init__(
        self,
        *,
        step_sizes: tuple[int, ...],
        chunk_sizes: tuple[int, ...],
        slot_buckets: tuple[int, ...],
        mixed_slots: tuple[int, ...] = (),
        target_ttft: float | None = None,
        target_itl: float | None = None,
        prefill_share: tuple[float, float] = (0.3, 0.5),
        stream_interval: int = 8,
        run_ahead: int = 1,
        host_beside: bool = False,
    ):
        self.step_sizes, self.chunk_sizes, self.slot_buckets = step_sizes, chunk_sizes, slot_buckets
        self.mixed_slots = mixed_slots or slot_buckets[-1:]  # slot buckets of mixed steps
        self.target_ttft, self.target_itl, self.prefill_share = target_ttft, target_itl, prefill_share
        self.stream_interval, self.run_ahead = stream_interval, run_ahead
        self.host_beside = host_beside  # the host's time costs the device nothing: it has cores of its own
        self.cost = StepCost()
        self.host_seconds = 0.0
        self._prompt_time = self._decode_time = 0.0  # of the recent past, with live decodes
        self._mean_output, self._stop_share = 128.0, 0.5

    # -- what happened -------------------------------------------------------------------------------------------

    def measured(self, chunk: int, slots: int, context: int, steps: int, seconds: float, live: int) -> None:
        """Feeds the cost model and the share of prompts in the device's time."""
        self.cost.observe(chunk, slots, context, steps, seconds)
        if not live:
            return
        decode = seconds
        if chunk:
            decode = min(seconds, self.cost.predict(0, self._bucket(live), context) * steps)
        elif not self._prompt_time:
            return
        decay = math.exp(-seconds / self.HORIZON)
        self._prompt_time = self._prompt_time * decay + seconds - decode
        self._decode_time = self._decode_time * decay + decode

    def host_time(self, seconds: float) -> None:
        """Running mean; a hiccup counts no more than four ordinary rounds."""
        seconds = max(seconds, 0.0)  # a clock may be set back
        if not self.host_seconds:
            self.host_seconds = seconds
        self.host_seconds += 0.1 * (min(seconds, 4 * self.host_seconds) - self.host_seconds)

    def ended(self, tokens: int, stopped: bool) -> None:
        """Feeds rule 10."""
        self._mean_output += self.LEARNING * (tokens - self._mean_output)
        self._stop_share += self.LEARNING * (stopped - self._stop_share)

    @property
    def prompt_share(self) -> float:
        """Share of prompts in the device time of the recent past in which decodes wanted it too."""
        both = self._prompt_time + self._decode_time
        return self._prompt_time / both if both else 0.0

    # -- the choice ----------------------------------------------------------------------------------------------

    def choose(self, load: Load) -> Choice:
        """See the class."""
        slots = self._bucket(load.decoding)
        to_read = load.unread_tokens + (load.waiting_tokens if load.free_slots else 0)
        chunk, why_chunk, held = self._chunk(load, to_read)
        mixed = -(-to_read // chunk)
        if mixed and held and self.prompt_share > self.prefill_share[1] and not self._late(load, chunk):
            mixed, why_chunk = 0, "none: prefill_share"
        each = self._mixed_step(load, chunk) if mixed else self.cost.predict(0, slots, load.context)
        share = self.HOST_SHARE_FREE if load.free_slots > load.waiting else self.HOST_SHARE_FULL
        steps, why = self._amortised(each, share)
        steps, why = self._capped(load, slots, each, steps, why)
        sizes = self.step_sizes
        why = why if len(sizes) > 1 else "fixed"
        down = max((size for size in sizes if size <= steps), default=sizes[0])
        steps = max(down, min(mixed, steps))  # mixed steps come one by one
        reason = f"N {why}; C {why_chunk}" if to_read else f"N {why}"
        return Choice(steps, min(mixed, steps), chunk, reason=reason)

    def _bucket(self, slots: int) -> int:
        return self.slot_buckets[bisect_left(self.slot_buckets, min(slots, self.slot_buckets[-1]))]

    def _mixed_step(self, load: Load, chunk: int) -> float:
        """Predicted seconds of a step that also reads ``chunk`` prompt tokens, with a slot more than now."""
        rows = min(load.decoding + 1, self.mixed_slots[-1])
        slots = self.mixed_slots[bisect_left(self.mixed_slots, rows)]
        return self.cost.predict(chunk, slots, load.context)

    def _chunk(self, load: Load, to_read: int) -> tuple[int, str, bool]:
        """Rules 1 to 3; and whether rule 2 holds C down."""
        sizes = self.chunk_sizes
        index = min(bisect_left(sizes, to_read), len(sizes) - 1)
        why = "all" if sizes[index] >= to_read else "largest"
        why = why if len(sizes) > 1 else "fixed"
        if self.target_itl is None or not load.decoding:
            return sizes[index], why, False
        fast = 0
        while fast < index and self._mixed_step(load, sizes[fast + 1]) <= self.target_itl:
            fast += 1
        if fast >= index:
            return sizes[index], why, False
        if self.prompt_share < self.prefill_share[0]:
            return sizes[fast + 1], "prefill_share", True
        if self._late(load, sizes[fast]):
            return sizes[fast + 1], "target_ttft", True
        return sizes[fast], "target_itl", True

    def _late(self, load: Load, chunk: int) -> bool:
        """Whether the next in line misses ``target_ttft`` unless prompts are read now."""
        if self.target_ttft is None:
            return False
        steps = -(-(load.unread_tokens + load.first_tokens) // chunk)
        rest = steps * self._mixed_step(load, chunk)
        return load.first_wait + rest > self.target_ttft

    def _amortised(self, each: float, share: float) -> tuple[int, str]:
        """Rule 6: the fewest steps in which the host takes at most ``share``."""
        if not each or not self.host_seconds:
            return 1, "unmeasured"
        need = self.host_seconds / (share * each)
        sizes = self.step_sizes
        return sizes[min(bisect_left(sizes, need), len(sizes) - 1)], "host"

    def _most_tokens(self, load: Load, each: float) -> int:
        """Rule 7."""

        def rate(steps: int) -> float:
            empty = sum(steps - end for end in load.ends if end < steps)
            device, host = steps * each, self.host_seconds
            return (load.decoding * steps - empty) / (
                max(device, host) if self.host_beside else device + host
            )

        return max(self.step_sizes, key=rate)

    def _capped(self, load: Load, slots: int, each: float, steps: int, why: str) -> tuple[int, str]:
        """Rules 7 to 10."""
        caps = []
        if load.blocked and load.ends and each:
            caps.append((self._most_tokens(load, each), "ends"))
        if load.streaming:
            caps.append((self.stream_interval, "stream_interval"))
        if self.target_itl is not None and load.decoding:
            one = self.cost.predict(0, slots, load.context)
            caps.append((max(int(self.target_itl / one), 1) if one else 1, "target_itl"))
        lost_per_step = (0.5 + self.run_ahead) * self._stop_share
        bearable = int(self.WASTE * max(self._mean_output, 1.0) / max(lost_per_step, 1e-3))
        caps.append((max(bearable, self._amortised(each, 1.0)[0]), "waste"))
        for cap, reason in caps:
            if cap < steps:
                steps, why = max(cap, 1), reason
        return steps, why

"""What a part of a round brought: it is booked, followed, read and kept for the next piece."""

from __future__ import annotations

from jaxsched.schedule import Finish, RoundPlan, Scheduler

from .executor import Landed
from .requests import RequestTable


def intake(scheduler: Scheduler, requests: RequestTable, plan: RoundPlan, landed: Landed, first: int) -> None:
    """Takes in steps ``first ...`` of a round: prompt rows, tokens, ends, log-probabilities.

    A sequence whose text meets a stop string, or whose constraint is complete on the host, ends here; what the device
    has sampled beyond that is dropped.
    """
    outputs = landed.outputs
    for step, row, piece in scheduler.read(plan, first, first + len(landed.tokens[0])):
        requests.read_prompt(piece, outputs, step - first, row)
    for taken in scheduler.commit(plan, landed.tokens, first, landed.ends):
        sequence, tokens = taken.sequence, taken.tokens
        keep = requests.read(taken)
        if keep is not None:
            tokens = scheduler.cut(plan, taken, keep)
        elif sequence.hosted and sequence.finish in (None, Finish.LENGTH):
            end = sequence.guide.follow(sequence.output)
            if end is Finish.STOP or (end and sequence.finish is None):
                scheduler.cut(plan, taken, len(tokens), end)
        requests.add_news(taken, tokens, outputs.logprobs)

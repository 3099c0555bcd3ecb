"""Who is served next: nine rules, and how to bring your own. Imports no JAX."""

from __future__ import annotations

from typing import Any, cast

from .base import Policy
from .decode_first import DecodeFirst
from .edf import Edf
from .fair import Fair
from .fcfs import Fcfs
from .hrrn import Hrrn
from .prefill_first import PrefillFirst
from .priority import Priority
from .srpf import Srpf
from .stall_free import StallFree
from .waiting import WaitingQueue

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (StallFree, Fcfs, PrefillFirst, DecodeFirst, Priority, Edf, Srpf, Hrrn, Fair)
}

_METHODS = ("push", "first", "pop", "discard", "__len__", "victim", "shape", "served")
_VALUES = ("name", "counts_service")


def make_policy(policy: str | Policy | Any) -> Policy:
    """The policy of a name in ``POLICIES``, with its defaults, or the object that was passed, if it is a policy.

    ValueError for an unknown name, for a class instead of an object, and for an object that lacks part of ``Policy``.
    """
    names = ", ".join(POLICIES)
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(
                f"policy {policy!r} is unknown; choose one of {names}, or pass an object with the methods of "
                "jaxsched.schedule.policies.Policy"
            )
        return POLICIES[policy]()
    if isinstance(policy, type):
        raise ValueError(f"policy is the class {policy.__name__}; pass an object of it: {policy.__name__}()")
    missing = [name for name in _METHODS if not callable(getattr(policy, name, None))]
    missing += [name for name in _VALUES if not hasattr(policy, name)]
    if missing:
        raise ValueError(
            f"policy is a {type(policy).__name__}, which lacks {', '.join(missing)}; choose one of {names}, or pass "
            "an object with all methods of jaxsched.schedule.policies.Policy (the simplest way is to inherit from it)"
        )
    return cast(Policy, policy)


__all__ = [
    "POLICIES",
    "DecodeFirst",
    "Edf",
    "Fair",
    "Fcfs",
    "Hrrn",
    "Policy",
    "PrefillFirst",
    "Priority",
    "Srpf",
    "StallFree",
    "WaitingQueue",
    "make_policy",
]

"""How the tensors of a checkpoint become the parameters of a decoder: one rule per parameter."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rule:
    """One parameter, made of one or more checkpoint tensors.

    The sources are concatenated along their first axis (output features) and, for a kernel, transposed: checkpoints
    store ``[out, in]``, the decoder multiplies by ``[in, out]``. ``axes`` names the parameter's axes for sharding.
    """

    sources: tuple[str, ...]  # tensor names in the checkpoint
    shapes: tuple[tuple[int, ...], ...]  # their shapes there
    axes: tuple[str, ...]  # logical axis names of the result, for sharding
    transpose: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        stacked = (sum(s[0] for s in self.shapes), *self.shapes[0][1:])
        return stacked[::-1] if self.transpose else stacked

    def build(self, tensors: list[np.ndarray]) -> np.ndarray:
        """The parameter, from its source tensors in the order of ``sources``."""
        joined = tensors[0] if len(tensors) == 1 else np.concatenate(tensors, axis=0)
        return np.ascontiguousarray(joined.T) if self.transpose else joined


def dense(sources: tuple[str, ...], outs: tuple[int, ...], width_in: int, axes: tuple[str, str]) -> Rule:
    """Rule of a kernel ``[width_in, sum(outs)]`` whose sources are ``[out, width_in]``."""
    return Rule(sources, tuple((out, width_in) for out in outs), axes, transpose=True)


def vector(sources: tuple[str, ...], widths: tuple[int, ...], axis: str) -> Rule:
    """Rule of a bias or norm scale ``[sum(widths)]``."""
    return Rule(sources, tuple((w,) for w in widths), (axis,))

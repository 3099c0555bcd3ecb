"""How long a step will take: a model fitted to the engine's own steps."""

from __future__ import annotations

import numpy as np

FEATURES = 4


class StepCost:
    """Predicted device time of one step: seconds ≈ w · (1, slots, chunk rows, context).

    The weights are fitted online by ridge regression with forgetting (Ljung, *System Identification*, 1999, section
    11.2) on relative errors, so that short steps count as much as long ones. For a program (chunk bucket, slot bucket)
    that has run, the line only carries its own running mean over to another context. The first step of each program
    is left out: it pays for loading.

    Plain numbers: it pickles, and a simulator may load it.
    """

    FORGET = 0.995
    RIDGE = 1e-6  # of the data's scale: decides only what the data leave open
    NEW = 0.2  # weight of one measurement in a program's means and error

    def __init__(self) -> None:
        self._weights = [0.0] * FEATURES  # none below 0: no part of a step takes negative time
        self._moments = np.zeros((FEATURES, FEATURES))
        self._targets = np.zeros(FEATURES)
        self._means: dict[tuple[int, int], tuple[float, float]] = {}  # of seconds and context, by program
        self._errors: dict[tuple[int, int], float] = {}
        self._seen: set[tuple[int, int, int]] = set()

    @staticmethod
    def _features(chunk: int, slots: int, context: float) -> tuple[float, float, float, float]:
        return (1.0, slots / 64, chunk / 256, context / 16384)

    @property
    def known(self) -> bool:
        """Whether anything has been measured yet."""
        return bool(self._means)

    def predict(self, chunk: int, slots: int, context: int) -> float:
        """Seconds of one step; 0.0 while nothing has been measured."""
        if not self._means:
            return 0.0
        key = (chunk, slots)
        if key not in self._means:  # the nearest program, and the line from there
            key = min(self._means, key=lambda k: (abs(k[0] - chunk), abs(k[1] - slots)))
        seconds, mean_context = self._means[key]
        return seconds * self._line(chunk, slots, context) / self._line(*key, mean_context)

    def error(self, chunk: int, slots: int) -> float:
        """Mean relative error of recent predictions for this program; 1.0 where it has never run."""
        return self._errors.get((chunk, slots), 1.0)

    def _line(self, chunk: int, slots: int, context: float) -> float:
        features = self._features(chunk, slots, context)
        return max(sum(w * x for w, x in zip(self._weights, features, strict=True)), 1e-6)

    def observe(self, chunk: int, slots: int, context: int, steps: int, seconds: float) -> None:
        """``steps`` equal steps took ``seconds`` together."""
        program = (chunk, slots, steps)
        if program not in self._seen:
            self._seen.add(program)
            return
        each = seconds / steps
        if each <= 0:
            return
        self._learn_mean(chunk, slots, context, each)
        x = np.array(self._features(chunk, slots, context)) / each
        self._moments = self.FORGET * self._moments + x[:, None] * x
        self._targets = self.FORGET * self._targets + x
        ridge = self.RIDGE * np.trace(self._moments) * np.eye(FEATURES)
        self._weights = np.maximum(np.linalg.solve(self._moments + ridge, self._targets), 0).tolist()

    def _learn_mean(self, chunk: int, slots: int, context: int, each: float) -> None:
        key = (chunk, slots)
        if key not in self._means:
            self._means[key], self._errors[key] = (each, context), 1.0
            return
        wrong = abs(each - self.predict(chunk, slots, context)) / each
        seconds, mean_context = self._means[key]
        bounded = min(max(each, seconds / 4), seconds * 4)  # one hiccup is not a trend
        self._means[key] = (
            seconds + self.NEW * (bounded - seconds),
            mean_context + self.NEW * (context - mean_context),
        )
        self._errors[key] += self.NEW * (min(wrong, 2.0) - self._errors[key])

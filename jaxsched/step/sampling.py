"""Choosing the next token on the device, without sorting the vocabulary.

Filters apply in the order of transformers: temperature, top-k, top-p, min-p. Each is a threshold on the score: a token
stays if its score is at least that of the last token that must stay, so ties stay together. The threshold is found by
a search over the bits of the float, counting (top-k) or summing probability (top-p) in each pass. On an NVIDIA GPU
one kernel does all passes (``pallas_kernels/triton/sample.py``), elsewhere XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxsched.pallas_kernels.tuning import CARDS, device_family

from .state import SamplingRows

GREEDY_BELOW = 1e-5  # temperatures below this mean argmax; dividing by them would only overflow
SIGN = np.uint32(0x8000_0000)
Weigh = Callable[[Array], Array]


def sample(
    logits: Float[Array, "S V"], rows: SamplingRows, position: Int[Array, "S"], *, mode: str = "auto"
) -> Int[Array, "S"]:
    """One token id per row. ``position`` is the index of the token in its output; it keys the random stream.

    The draw of a row depends on its logits, its sampling row and ``position`` alone. ``mode`` as in ``Features``.
    """
    if mode == "greedy":
        return _argmax(logits)
    random = rows.temperature >= GREEDY_BELOW
    if mode == "full":
        greedy, scores = _best_and_scores(logits, rows, skip_unused=False)
        return jnp.where(random, _draw(scores, rows, position), greedy)
    greedy = _argmax(logits)

    def draw() -> Array:
        scores = filtered_scores(logits, rows, skip_unused=True)
        return jnp.where(random, _draw(scores, rows, position), greedy)

    return lax.cond(jnp.any(random), draw, lambda: greedy)


def processed_scores(
    logits: Float[Array, "S V"], rows: SamplingRows, *, mode: str = "auto"
) -> Float[Array, "S V"]:
    """The scores that are sampled from, up to a constant per row; those of greedy rows are the logits."""
    if mode == "greedy":
        return logits
    random = rows.temperature >= GREEDY_BELOW
    return jnp.where(random[:, None], filtered_scores(logits, rows, skip_unused=mode == "auto"), logits)


def row_keys(seed: UInt32[Array, "S 2"], position: Int[Array, "S"]) -> Array:
    """Random key of each row: the request's seed and the position in its output, nothing else."""

    def one(words: Array, at: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(0), words[0])
        return jax.random.fold_in(jax.random.fold_in(key, words[1]), at)

    return jax.vmap(one)(seed, position)


def _draw(scores: Array, rows: SamplingRows, position: Array) -> Array:
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:], jnp.float32))(
        row_keys(rows.seed, position)
    )
    # Gumbel-max: the argmax of score + noise is a draw from softmax(score).
    return _argmax(scores + noise)


def _argmax(x: Float[Array, "S V"]) -> Int[Array, "S"]:
    """Index of the largest value, the lowest one of equals."""

    def two_passes(x: Array) -> Array:  # XLA:CPU is slow at reducing pairs
        size = x.shape[-1]
        best = jnp.max(x, axis=-1, keepdims=True)
        index = jnp.min(jnp.where(x == best, jnp.arange(size, dtype=jnp.int32), size), axis=-1)
        return jnp.minimum(index, size - 1)  # a row of NaN equals nothing

    def one_pass(x: Array) -> Array:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)

    return lax.platform_dependent(x, cpu=two_passes, default=one_pass)


def filtered_scores(
    logits: Float[Array, "S V"], rows: SamplingRows, *, skip_unused: bool = False
) -> Float[Array, "S V"]:
    """Log-weights to draw from, up to a constant per row; tokens that the filters remove are -inf.

    ``skip_unused`` guards each filter by a conditional (see ``Features.sampling``).
    """
    return _best_and_scores(logits, rows, skip_unused=skip_unused)[1]


def _best_and_scores(logits: Array, rows: SamplingRows, *, skip_unused: bool) -> tuple[Array, Array]:
    """The best token of each row and ``filtered_scores``. The kernel finds both in one pass over memory."""

    def searches(logits: Array, rows: SamplingRows) -> tuple[Array, Array]:
        return _argmax(logits), _searched_scores(logits, rows, skip_unused)

    if not _kernel_in_sight():  # then nothing of it is imported or traced
        return searches(logits, rows)
    return lax.platform_dependent(logits, rows, cuda=_kernel_scores, default=searches)


def _kernel_in_sight() -> bool:
    return device_family() in CARDS


def _kernel_scores(logits: Array, rows: SamplingRows, *, interpret: bool = False) -> tuple[Array, Array]:
    from jaxsched.pallas_kernels.triton.sample import filter_thresholds

    temperature = jnp.maximum(rows.temperature, GREEDY_BELOW)
    best, top, least = filter_thresholds(logits, temperature, rows.top_k, rows.top_p, interpret=interpret)
    scores = (logits - top[:, None]) / temperature[:, None]
    keep = (logits >= least[:, None]) & (jnp.exp(scores) >= rows.min_p[:, None])
    return best, jnp.where(keep, scores, -jnp.inf)


def _searched_scores(logits: Array, rows: SamplingRows, skip_unused: bool) -> Array:
    """``filtered_scores`` in plain XLA, whose searches pass over the vocabulary in memory."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0, top)  # a row in which nothing is allowed stays -inf
    scores = (logits - top) / jnp.maximum(rows.temperature, GREEDY_BELOW)[:, None]
    keys = _ordered_bits(scores)
    everything = jnp.zeros(logits.shape[:1], jnp.uint32)

    def guarded(active: Bool[Array, "S"], search: Callable[[], Array]) -> Array:
        found = lax.cond(jnp.any(active), search, lambda: everything) if skip_unused else search()
        return jnp.where(active, found, everything)

    use_k = (rows.top_k > 0) & (rows.top_k < logits.shape[1])
    wanted = jnp.where(use_k, rows.top_k, 1).astype(jnp.float32)
    low = _from_bits(guarded(use_k, lambda: _threshold(keys, _one, wanted, width=32)))

    weights = jnp.where(scores >= low[:, None], jnp.exp(scores), 0)
    use_p = rows.top_p < 1
    mass = rows.top_p * jnp.sum(weights, axis=-1)
    # Weights are in [0, 1], so their bits are in their order, and the two highest are 0.
    bits = lax.bitcast_convert_type(weights, jnp.uint32)
    light = guarded(use_p, lambda: _threshold(bits, _itself, mass, width=30))
    # The best token has weight exp(0) = 1, so min-p is a bound on the weight itself.
    keep = (scores >= low[:, None]) & (bits >= light[:, None]) & (jnp.exp(scores) >= rows.min_p[:, None])
    return jnp.where(keep, scores, -jnp.inf)


def _ordered_bits(x: Float[Array, "S V"]) -> UInt32[Array, "S V"]:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >= SIGN, ~bits, bits | SIGN)


def _from_bits(keys: UInt32[Array, "S"]) -> Float[Array, "S"]:
    """The inverse of ``_ordered_bits``; 0, which is below all floats, becomes -inf."""
    bits = jnp.where(keys >= SIGN, keys ^ SIGN, ~keys)
    return jnp.where(keys == 0, -jnp.inf, lax.bitcast_convert_type(bits, jnp.float32))


def _one(keys: UInt32[Array, "S V"]) -> Float[Array, ""]:
    return jnp.float32(1)


def _itself(bits: UInt32[Array, "S V"]) -> Float[Array, "S V"]:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _threshold(
    keys: UInt32[Array, "S V"], weigh: Weigh, target: Float[Array, "S"], *, width: int
) -> UInt32[Array, "S"]:
    """Largest key ``t`` of each row for which ``weigh(keys)`` of keys >= ``t`` sums to at least ``target``; 0 if none.

    ``width``: bits of a key. One bit per pass on a CPU, where arithmetic is dear; four or five elsewhere, where memory
    traffic is, for which the keys are all that a pass reads.
    """
    several = 5 if width % 5 == 0 else 4
    one, many = (partial(_search, weigh=weigh, bits=bits, width=width) for bits in (1, several))
    return lax.platform_dependent(keys, target, cpu=one, default=many)


def _search(keys: Array, target: Array, *, weigh: Weigh, bits: int, width: int = 32) -> Array:
    digits = jnp.arange(1, 1 << bits, dtype=jnp.uint32)

    def one_pass(i: Array, low: Array) -> Array:
        shift = jnp.uint32(width) - jnp.uint32(bits) * (i.astype(jnp.uint32) + 1)
        candidates = low[:, None] | (digits << shift)[None, :]  # [S, digits], rising
        above = keys[:, None, :] >= candidates[:, :, None]
        weights = jnp.broadcast_to(weigh(keys), keys.shape)
        enough = jnp.sum(jnp.where(above, weights[:, None, :], 0), axis=-1) >= target[:, None]
        return low | (jnp.sum(enough, axis=-1).astype(jnp.uint32) << shift)

    return lax.fori_loop(0, width // bits, one_pass, jnp.zeros(keys.shape[:1], jnp.uint32))

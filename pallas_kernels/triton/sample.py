"""The best token and the thresholds of top-k and top-p, in one kernel of the Triton backend of Pallas.

Shapes: S rows, V vocabulary. One program per row. It passes over its row several times, but memory is read once: the
rows of all programs that run at a time fit the second-level cache (128,256 float32 are 513 KB). A pass counts, or sums
the probability of, what lies above each of ``2**BITS - 1`` candidates, and so finds BITS more bits of the threshold;
rows that do not filter leave at once, and a search ends as soon as just enough is above a candidate.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

SIGN = np.uint32(0x8000_0000)
WIDTH = 32  # bits of a key


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Sizes of the kernel. ``block`` changes the order of sums, and nothing else. Untuned."""

    block: int = 4096  # values that are loaded at once, a power of two
    bits: int = 3  # of the threshold, found per pass
    num_warps: int = 32


def _keys(x: Array) -> Array:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >= SIGN, ~bits, bits | SIGN)


def _kernel(static: tuple[int, int, int], *refs: Any) -> None:
    logits_ref, temperature_ref, top_k_ref, top_p_ref, best_ref, top_ref, least_ref = refs
    vocab, block, bits = static
    row, lane, blocks = pl.program_id(0), jnp.arange(block), -(-vocab // block)
    below = jnp.zeros((block,), jnp.float32)

    def part(i: Array) -> Array:
        at = i * block + lane
        return plt.load(logits_ref.at[row, at], mask=at < vocab, other=-jnp.inf)

    def better(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        most, index = carry
        values = part(i)
        return jnp.where(values > most, values, most), jnp.where(values > most, i * block + lane, index)

    start = (jnp.full((block,), -jnp.inf, jnp.float32), jnp.minimum(lane, vocab - 1).astype(jnp.int32))
    most, index = lax.fori_loop(0, blocks, better, start)
    top = jnp.max(most)
    plt.store(best_ref.at[row], jnp.min(jnp.where(most == top, index, vocab - 1)))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    plt.store(top_ref.at[row], top)
    # Scores are products: a division may be rounded in more than one way, and equals must stay equal.
    cold = 1.0 / plt.load(temperature_ref.at[row])

    def score(values: Array) -> Array:
        return (values - top) * cold

    def above(candidates: list[Array], weigh: Callable[[Array], Array], active: Array) -> list[Array]:
        """Sums of what ``weigh`` gives values with keys at or above each candidate."""

        def add(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            values = part(i)
            # Behind the vocabulary all is -inf: without weight, and where it is counted, -inf is the threshold.
            keys, weights = _keys(values), weigh(values)
            return tuple(
                total + jnp.where(keys >= one, weights, 0.0)
                for total, one in zip(sums, candidates, strict=True)
            )

        sums = lax.fori_loop(0, active.astype(jnp.int32) * blocks, add, (below,) * len(candidates))
        return [jnp.sum(total) for total in sums]

    def search(active: Array, target: Array, weigh: Callable[[Array], Array]) -> Array:
        """The largest key from which on there is ``target``, or any from which on there is just that."""
        passes = -(-WIDTH // bits)

        def unfinished(carry: tuple[Array, Array, Array]) -> Array:
            return carry[2] & (carry[0] < passes)

        def one_pass(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            i, low, going = carry
            # The last pass finds fewer bits where BITS does not divide WIDTH: candidates then repeat.
            shift = jnp.maximum(WIDTH - bits * (i + 1), 0).astype(jnp.uint32)
            room = (jnp.uint32(1) << jnp.minimum(WIDTH - bits * i, bits).astype(jnp.uint32)) - jnp.uint32(1)
            digits = [jnp.minimum(jnp.uint32(digit), room) for digit in range(1, 1 << bits)]
            more = low
            candidates = [low | (digit << shift) for digit in digits]
            for one, total in zip(candidates, above(candidates, weigh, active), strict=True):
                more = jnp.where(total >= target, one, more)  # candidates rise, so the last that has enough
                going &= total != target
            return i + 1, more, going

        return lax.while_loop(unfinished, one_pass, (jnp.int32(0), jnp.uint32(0), active))[1]

    def least(stays: Callable[[Array], Array], active: Array) -> Array:
        """The smallest value of the row that ``stays``; without passing over it where not ``active``."""

        def keep(i: Array, kept: Array) -> Array:
            values = part(i)
            return jnp.minimum(kept, jnp.where(stays(values), values, jnp.inf))

        count = active.astype(jnp.int32) * blocks
        return jnp.min(lax.fori_loop(0, count, keep, jnp.full((block,), jnp.inf, jnp.float32)))

    top_k = plt.load(top_k_ref.at[row])
    use_k = (top_k > 0) & (top_k < vocab)
    ones = jnp.ones((block,), jnp.float32)
    key = search(use_k, top_k.astype(jnp.float32), lambda _: ones)

    last = least(lambda values: _keys(values) >= key, use_k)
    low = least(lambda values: score(values) >= score(last), use_k)
    low = jnp.where(use_k, low, -jnp.inf)

    top_p = plt.load(top_p_ref.at[row])
    use_p = top_p < 1

    def weight(values: Array) -> Array:
        return jnp.where(values >= low, jnp.exp(score(values)), 0.0)

    mass = top_p * above([jnp.uint32(0)], weight, use_p)[0]
    key = search(use_p, mass, weight)
    last = least(lambda values: _keys(values) >= key, use_p)
    # As long as all others, so that it is computed in the same way.
    bound = weight(jnp.full((block,), last, jnp.float32))
    light = least(lambda values: weight(values) >= bound, use_p)
    plt.store(least_ref.at[row], jnp.where(use_p, light, low))


def filter_thresholds(
    logits: Float[Array, "S V"],
    temperature: Float[Array, "S"],
    top_k: Int[Array, "S"],
    top_p: Float[Array, "S"],
    *,
    config: SampleConfig | None = None,
    interpret: bool = False,
) -> tuple[Int[Array, "S"], Float[Array, "S"], Float[Array, "S"]]:
    """Of each row the best token, its logit, and the least logit that top-k and top-p leave.

    Best: the lowest id of equals; its logit is given as 0 where all are -inf. Top-k is off where ``top_k`` <= 0 or
    >= V, top-p where ``top_p`` >= 1; where both are, the least is -inf. Top-p counts the softmax of
    ``logits / temperature`` over what top-k left, in float32; ``temperature`` is positive. Tokens whose scores (top-k)
    or weights (top-p) are equal in float32 stay together.
    """
    rows, vocab = logits.shape
    config = config or SampleConfig()
    block = min(config.block, 1 << max(vocab - 1, 0).bit_length())
    number = jax.ShapeDtypeStruct((rows,), jnp.float32)
    out = pl.pallas_call(
        functools.partial(_kernel, (vocab, block, config.bits)),
        grid=(rows,),
        out_shape=[jax.ShapeDtypeStruct((rows,), jnp.int32), number, number],
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="filter_thresholds",
    )(logits, temperature, top_k, top_p)
    return out[0], out[1], out[2]

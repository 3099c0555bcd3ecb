"""Log-probabilities of tokens, without sorting the vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 128  # vocabulary entries of which only the best is looked at first
PROMPT_ROWS = 32  # prompt rows whose logits are held at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """What is known of the distribution that each of R rows was sampled from; leading axes may be more."""

    chosen: Float[Array, "*R"]  # float32, of the token that was sampled (or that stands in the prompt)
    rank: Int[Array, "*R"]  # 1 + number of tokens that are strictly more likely
    top_ids: Int[Array, "*R K"]  # the K best, best first, ties by the lower id
    top: Float[Array, "*R K"]
    listed: Float[Array, "*R J"] | None = None  # of the ids that the request has listed


def logprobs_of(
    scores: Float[Array, "R V"],
    token: Int[Array, "R"],
    width: int,
    listed: Int[Array, "R J"] | None = None,
    *,
    normalise: bool = True,
) -> Logprobs:
    """Of each row the sampled token, the ``width`` best, and the ``listed`` ids (ids out of range: of no meaning).

    ``normalise``: log-probabilities, otherwise the scores as they are.
    """
    # Not take_along_axis with its out-of-bounds fill, and not argmax: XLA:CPU makes slow loops of both.
    at = jnp.clip(token, 0, scores.shape[1] - 1)[:, None]
    chosen = jnp.take_along_axis(scores, at, axis=-1, mode="clip")
    top, ids = best(scores, width)
    most = top[:, :1] if width > 0 else jnp.max(scores, axis=-1, keepdims=True)
    most = jnp.where(jnp.isfinite(most), most, 0)
    mass, above = _mass_and_rank(scores, most, chosen)
    shift = jnp.log(mass) + most[:, 0] if normalise else jnp.zeros(scores.shape[:1], scores.dtype)
    more = None
    if listed is not None:
        more = jnp.take_along_axis(scores, listed, axis=-1, mode="clip") - shift[:, None]
    return Logprobs(chosen[:, 0] - shift, 1 + above, ids, top - shift[:, None], more)


def _mass_and_rank(scores: Array, most: Array, chosen: Array) -> tuple[Array, Array]:
    """Sum of exp(score - most) and number of scores above the chosen one, ``[R]`` each."""

    # XLA:CPU reduces pairs slowly; on a GPU every pass reads the scores again.
    def two_passes(scores: Array, most: Array, chosen: Array) -> tuple[Array, Array]:
        above = jnp.sum(scores > chosen, axis=-1, dtype=jnp.int32)
        return jnp.sum(jnp.exp(scores - most), axis=-1), above

    def one_pass(scores: Array, most: Array, chosen: Array) -> tuple[Array, Array]:
        terms = jnp.exp(scores - most), (scores > chosen).astype(jnp.int32)
        start = jnp.zeros((), scores.dtype), jnp.int32(0)
        mass, above = lax.reduce(terms, start, lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,))
        return mass, above

    return lax.platform_dependent(scores, most, chosen, cpu=two_passes, default=one_pass)


def best(scores: Float[Array, "R V"], k: int) -> tuple[Float[Array, "R K"], Int[Array, "R K"]]:
    """The ``k`` largest of each row, largest first, of equals the lower index first; exact.

    Two stages: the k largest values lie in the k blocks with the largest maxima, so only these are sorted.
    """
    rows, size = scores.shape
    k = min(k, size)
    blocks = -(-size // BLOCK)
    if k == 0:
        return jnp.zeros((rows, 0), scores.dtype), jnp.zeros((rows, 0), jnp.int32)
    if 2 * k >= blocks:
        top, ids = lax.top_k(scores, k)
        return top, ids.astype(jnp.int32)
    padded = jnp.pad(scores, ((0, 0), (0, blocks * BLOCK - size)), constant_values=-jnp.inf)
    parts = padded.reshape(rows, blocks, BLOCK)
    _, chosen = lax.top_k(jnp.max(parts, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)  # so that the order of candidates is the order of ids
    candidates = jnp.take_along_axis(parts, chosen[:, :, None], axis=1, mode="clip")
    ids = chosen[:, :, None] * BLOCK + jnp.arange(BLOCK)
    top, where = lax.top_k(candidates.reshape(rows, k * BLOCK), k)
    ids = jnp.take_along_axis(ids.reshape(rows, k * BLOCK), where, axis=-1, mode="clip")
    return top, jnp.minimum(ids, size - 1).astype(jnp.int32)


def prompt_logprobs(
    decoder: Any, hidden: Float[Array, "C E"], target: Int[Array, "C"], width: int, *, normalise: bool = True
) -> Logprobs:
    """Log-probability of each prompt row's next token, ``PROMPT_ROWS`` rows of logits at a time."""
    rows = hidden.shape[0]
    block = min(PROMPT_ROWS, rows)
    padding = -rows % block
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1])
    target = jnp.pad(target, (0, padding)).reshape(-1, block)

    def one(part: tuple[Array, Array]) -> Logprobs:
        return logprobs_of(decoder.logits(part[0]), part[1], width, normalise=normalise)

    parts = lax.map(one, (hidden, target))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], parts)

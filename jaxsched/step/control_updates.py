"""Changes that the host makes to controls between rounds: small compiled programs that take ``controls`` over."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from .controls import AutomatonPool, ControlRows, Controls, neutral_rows

GRANTS = 8  # masks per call of ``grant_step``
BLOCK_MASKS, BLOCK_STATES, BLOCK_EDGES = 64, 1024, 1 << 14  # table rows per call of ``load_tables``

_donating = partial(jax.jit, donate_argnames=("controls",))


@_donating
def update_rows(controls: Controls, source: Int[Array, "S"], clear: Bool[Array, "S"]) -> Controls:
    """Row s takes over the small fields of slot ``source[s]``; where ``clear`` it asks for nothing from now on."""
    slots, vocab = controls.counts.shape
    neutral = neutral_rows(slots, vocab)

    def change(rows: Array, fresh: Array) -> Array:
        mask = clear.reshape(clear.shape + (1,) * (rows.ndim - 1))
        return jnp.where(mask, fresh, rows[source])

    return dataclasses.replace(controls, rows=jax.tree.map(change, controls.rows, neutral))


@_donating
def move_tables(controls: Controls, source: Int[Array, "S"]) -> Controls:
    """Row s takes over the token counts and biases of slot ``source[s]``."""
    return dataclasses.replace(controls, counts=controls.counts[source], bias=controls.bias[source])


@_donating
def load_row(controls: Controls, slot: Int[Array, ""], row: ControlRows) -> Controls:
    """The small fields of one slot; ``row`` has no slot axis."""
    rows = jax.tree.map(lambda whole, one: whole.at[slot].set(one), controls.rows, row)
    return dataclasses.replace(controls, rows=rows)


@_donating
def load_counts(controls: Controls, slot: Int[Array, ""], counts: Int[Array, "V"]) -> Controls:
    """The token counts of one slot."""
    return dataclasses.replace(controls, counts=controls.counts.at[slot].set(counts))


@_donating
def load_bias(controls: Controls, slot: Int[Array, ""], bias: Float[Array, "V"]) -> Controls:
    """The biases of one slot."""
    return dataclasses.replace(controls, bias=controls.bias.at[slot].set(bias))


@_donating
def grant_step(controls: Controls, slots: Int[Array, "G"], masks: UInt32[Array, "G U"]) -> Controls:
    """Lets each of ``slots`` sample one token, out of its mask. Padded with slot S, which is dropped."""
    count = controls.counts.shape[0]
    where = jnp.where(slots < count, slots + 1, controls.automata.masks.shape[0])
    rows, pool = controls.rows, controls.automata
    rows = dataclasses.replace(
        rows,
        state=rows.state.at[slots].set(slots + 1, mode="drop"),
        grant=rows.grant.at[slots].set(1, mode="drop"),
    )
    pool = dataclasses.replace(pool, masks=pool.masks.at[where].set(masks, mode="drop"))
    return dataclasses.replace(controls, rows=rows, automata=pool)


@_donating
def load_tables(controls: Controls, at: dict[str, Array], tables: dict[str, Array]) -> Controls:
    """Writes blocks of an automaton's tables into the pool; ``at`` has their rows, out of range for padding."""
    pool = controls.automata

    def put(name: str, index: str) -> Array:
        return getattr(pool, name).at[at[index]].set(tables[name], mode="drop")

    states = ("mask_of", "accepting", "final", "default", "edge_begin", "edge_end")
    changed = {name: put(name, "states") for name in states}
    changed |= {name: put(name, "edges") for name in ("edge_token", "edge_next")}
    pool = dataclasses.replace(pool, masks=put("masks", "masks"), **changed)
    return dataclasses.replace(controls, automata=pool)


def table_blocks(
    automaton: Any, masks_at: int, states_at: int, edges_at: int, pool: AutomatonPool
) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """The arguments of ``load_tables`` that put an automaton's tables at the given places of the pool.

    ``automaton`` has the fields of ``structured.TokenAutomaton``; its states and masks count from 0.
    """
    start = automaton.edge_start
    states = {
        "mask_of": automaton.mask_of + masks_at,
        "accepting": automaton.accepting,
        "final": automaton.final,
        "default": np.where(automaton.default >= 0, automaton.default + states_at, 0),
        "edge_begin": start[:-1] + edges_at,
        "edge_end": start[1:] + edges_at,
    }
    edges = {"edge_token": automaton.edge_token, "edge_next": automaton.edge_next + states_at}
    parts = [
        ("masks", {"masks": automaton.mask}, masks_at, BLOCK_MASKS, pool.masks.shape[0]),
        ("states", states, states_at, BLOCK_STATES, pool.mask_of.shape[0]),
        ("edges", edges, edges_at, BLOCK_EDGES, pool.edge_token.shape[0]),
    ]
    blocks = []
    number = max(-(-len(next(iter(t.values()))) // size) for _, t, _, size, _ in parts)
    for block in range(max(number, 1)):
        at, tables = {}, {}
        for name, fields, first, size, end in parts:
            begin = block * size
            count = min(max(len(next(iter(fields.values()))) - begin, 0), size)
            at[name] = np.full(size, end, np.int32)
            at[name][:count] = first + begin + np.arange(count)
            for field, values in fields.items():
                like = getattr(pool, field)
                tables[field] = np.zeros((size, *like.shape[1:]), like.dtype)
                tables[field][:count] = values[begin : begin + count]
        blocks.append((at, tables))
    return blocks

"""The step functions without an engine: rounds put together by hand on a toy."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from harness import GREEDY, admit, oracle, put_chunk, random_prompt
from jaxsched import SamplingParams
from jaxsched.step import (
    NO_TOKEN,
    Chunks,
    Features,
    RoundInputs,
    RoundShape,
    decode_steps,
    init_state,
    prefill_chunk,
    run_round,
    update_slots,
)
from jaxsched.step.state import FINISH_LENGTH, FINISH_NONE, FINISH_STOP

SIZES = {"num_slots": 4, "num_pages": 24, "page_size": 4, "pages_per_seq": 6}
SHAPE = RoundShape(steps=6, mixed_steps=2, chunk_tokens=12, slots=4)
PROMPTS = {slot: random_prompt(np.random.default_rng(slot), n) for slot, n in {0: 5, 2: 9, 3: 7}.items()}
PAGES = {0: [5, 11, 3, 8], 2: [20, 1, 7, 13], 3: [2, 19, 4, 9]}
AUTO = Features()
SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=-3)


@pytest.fixture(scope="module")
def model(toy):
    return toy("base")


def filled_state(model):
    """A state whose pages hold noise, so that a write which should not be there shows."""
    state = init_state(model.config, **SIZES)
    rng = np.random.default_rng(0)

    def noise(pages):
        return [jax.numpy.asarray(rng.standard_normal(p.shape, np.float32)) for p in pages]

    return dataclasses.replace(state, k_pages=noise(state.k_pages), v_pages=noise(state.v_pages))


def three_requests(state, *, max_tokens=(20, 20, 20), stop_ids=((), (), ()), params=GREEDY):
    """Slot 0's prompt ends in mixed step 0, slot 2's in step 1, slot 3's is not read to its end. Slot 1 is free."""
    inputs = RoundInputs.empty(state, mixed_steps=2, chunk_tokens=12)
    for (slot, pages), limit, stop in zip(PAGES.items(), max_tokens, stop_ids, strict=True):
        admit(inputs, slot, pages, max_tokens=limit, stop_ids=stop, params=params)
    put_chunk(inputs, 0, 0, PROMPTS[0], 0, ends=True)
    put_chunk(inputs, 0, 2, PROMPTS[2][:6], 0, ends=False)
    put_chunk(inputs, 1, 2, PROMPTS[2][6:], 6, ends=True)
    put_chunk(inputs, 1, 3, PROMPTS[3][:4], 0, ends=False)
    return inputs


def play(model, *, features=AUTO, **options):
    before = filled_state(model)
    pages = np.stack(jax.device_get([*before.k_pages, *before.v_pages]))
    inputs = three_requests(before, **options)
    state, out = run_round(model.graph, model.params, before, inputs, shape=SHAPE, features=features)
    return pages, state, np.asarray(out.tokens), np.asarray(out.finish)


def written(before, state):
    """Positions of the pool ``[P, Z]`` that differ in any layer. K and V must agree about it."""
    after = np.stack(jax.device_get([*state.k_pages, *state.v_pages]))
    differs = (before != after).any(axis=(-1, -2))
    assert (differs == differs[0]).all()
    return differs[0]


def positions(pages, count):
    mask = np.zeros((SIZES["num_pages"], SIZES["page_size"]), bool)
    for at in range(count):
        mask[pages[at // 4], at % 4] = True
    return mask


# -- tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_prompt_decodes_in_the_step_after_its_last_chunk(model, params):
    _, state, tokens, finish = play(model, params=params)
    valid = tokens != NO_TOKEN
    assert valid.T.tolist() == [
        [True] * 6,
        [False] * 6,
        [False] + [True] * 5,
        [False] * 6,
    ]
    for slot, count in ((0, 6), (2, 5)):
        want, _ = oracle(model, PROMPTS[slot], dataclasses.replace(params, max_tokens=count, ignore_eos=True))
        assert tokens[valid[:, slot], slot].tolist() == want
    rows = state.slots
    assert np.asarray(rows.live).tolist() == [True, False, True, False]
    assert np.asarray(rows.context_len).tolist() == [5 + 5, 0, 9 + 4, 0]
    assert np.asarray(rows.output_pos).tolist() == [6, 0, 5, 0]
    assert np.asarray(rows.tokens_left).tolist() == [14, 0, 15, 20]
    assert finish.tolist() == [FINISH_NONE] * 4


def test_a_round_is_its_parts_in_a_row(model):
    _, whole, tokens, finish = play(model, params=SAMPLED)
    state = filled_state(model)
    inputs = three_requests(state, params=SAMPLED)
    state = update_slots(state, inputs.updates)
    state, first = prefill_chunk(model.graph, model.params, state, inputs.chunks, slots=4)
    state, second = decode_steps(model.graph, model.params, state, steps=4, slots=4)
    assert np.concatenate((first.tokens, second.tokens)).tolist() == tokens.tolist()
    for a, b in zip(jax.tree.leaves(whole.slots), jax.tree.leaves(state.slots), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(whole.k_pages + whole.v_pages, state.k_pages + state.v_pages, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)  # two programs may add in another order
    assert np.asarray(state.slots.finish).tolist() == finish.tolist()


def test_modes_of_sampling_agree(model):
    """All rows greedy: three programs, one result. Some random: "full" and "auto" agree."""
    results = [play(model, features=Features(sampling=m))[2].tolist() for m in ("auto", "full", "greedy")]
    assert results[0] == results[1] == results[2]
    results = [
        play(model, features=Features(sampling=m), params=SAMPLED)[2].tolist() for m in ("auto", "full")
    ]
    assert results[0] == results[1]


# -- slots that are done -------------------------------------------------------------------------------------------


def test_only_live_slots_write(model):
    """Everything outside the positions that were read or decoded is bit for bit what it was."""
    before, state, _, _ = play(model)
    want = positions(PAGES[0], 5 + 5) | positions(PAGES[2], 9 + 4) | positions(PAGES[3], 4)
    np.testing.assert_array_equal(written(before, state), want)


def test_a_slot_stops_at_its_limit(model):
    before, state, tokens, finish = play(model, max_tokens=(2, 1, 20))
    full, _ = oracle(model, PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=2))
    assert tokens[:, 0].tolist() == [*full, *[NO_TOKEN] * 4]
    assert (tokens[:, 2] != NO_TOKEN).tolist() == [False, True, False, False, False, False]
    assert finish.tolist() == [FINISH_LENGTH, FINISH_NONE, FINISH_LENGTH, FINISH_NONE]
    # The last token sampled is never read: slot 0 wrote one position after its prompt, slot 2 none.
    want = positions(PAGES[0], 5 + 1) | positions(PAGES[2], 9) | positions(PAGES[3], 4)
    np.testing.assert_array_equal(written(before, state), want)
    assert not np.asarray(state.slots.live).any()


def test_a_slot_stops_at_a_stop_id(model):
    answer, _ = oracle(model, PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=6))
    at = next(i for i in range(1, 5) if answer[i] not in answer[:i])
    before, state, tokens, finish = play(model, stop_ids=((271, answer[at]), (), ()))
    assert tokens[:, 0].tolist() == answer[: at + 1] + [NO_TOKEN] * (5 - at)
    assert finish.tolist() == [FINISH_STOP, FINISH_NONE, FINISH_NONE, FINISH_NONE]
    want = positions(PAGES[0], 5 + at) | positions(PAGES[2], 9 + 4) | positions(PAGES[3], 4)
    np.testing.assert_array_equal(written(before, state), want)


def test_a_stop_id_at_the_limit_counts_as_stop(model):
    answer, _ = oracle(model, PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=2))
    _, _, _, finish = play(model, max_tokens=(2, 2, 20), stop_ids=((answer[1],), (), ()))
    assert finish.tolist() == [FINISH_STOP, FINISH_NONE, FINISH_LENGTH, FINISH_NONE]


def test_rows_behind_the_slot_bucket_stand_still(model):
    _, state, _, _ = play(model)
    before = jax.device_get(state)
    state, tokens = decode_steps(model.graph, model.params, state, steps=3, slots=2)
    assert tokens.tokens.shape == (3, 2)
    for old, new in zip(jax.tree.leaves(before.slots), jax.tree.leaves(state.slots), strict=True):
        np.testing.assert_array_equal(old[2:], new[2:])
    assert np.asarray(state.slots.output_pos).tolist() == [9, 0, 5, 0]


def test_a_slot_moves(model):
    """Slot 2 goes on in slot 1 as if nothing had happened; what slot 1 was is forgotten, slot 2 is dropped."""
    _, state, tokens, _ = play(model, max_tokens=(1, 20, 20))
    inputs = RoundInputs.empty(state)
    inputs.updates.source[1], inputs.updates.drop[2] = 2, True
    state = update_slots(state, inputs.updates)
    state, more = decode_steps(model.graph, model.params, state, steps=3, slots=2)
    want, _ = oracle(model, PROMPTS[2], dataclasses.replace(GREEDY, max_tokens=8))
    assert [*tokens[1:, 2].tolist(), *np.asarray(more.tokens)[:, 1].tolist()] == want
    assert np.asarray(state.slots.live).tolist() == [False, True, False, False]


def test_drop_then_admit(model):
    """Slot 0 is dropped, slot 2 is taken over: what they were does not show any more."""
    _, state, _, _ = play(model)
    inputs = RoundInputs.empty(state)
    inputs.updates.drop[[0, 2]] = True
    admit(inputs, 2, [6, 14], max_tokens=9, stop_ids=(7,), params=SAMPLED, output_pos=3)
    slots = jax.device_get(update_slots(state, inputs.updates)).slots
    assert slots.live.tolist() == [False] * 4
    assert slots.context_len.tolist() == [0] * 4
    assert (
        slots.tokens_left[2] == 9
        and slots.output_pos[2] == 3
        and slots.stop_ids[2].tolist() == [7] + [-1] * 7
    )
    assert slots.sampling.seed[2].tolist() == [2**32 - 1, 2**32 - 3]
    none = SIZES["num_pages"]  # out of range: a write there is dropped
    assert slots.block_table[2].tolist() == [6, 14, none, none, none, none]
    assert slots.block_table[0].tolist() == [*PAGES[0], none, none]


# -- structure -----------------------------------------------------------------------------------------------------


def products(jaxpr):
    """Result shapes of all matrix products in a jaxpr, those in loops and calls included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.outvars[0].aval.shape
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner, "eqns"):
                    yield from products(inner)
                elif hasattr(inner, "jaxpr"):
                    yield from products(inner.jaxpr)


def test_logits_are_computed_only_for_rows_that_sample(model):
    chunks = Chunks.empty(2, 12, 4)
    jaxpr = jax.make_jaxpr(
        lambda p, s, c: prefill_chunk(model.graph, p, s, c, slots=3, features=Features(sampling="greedy"))
    )(model.params, init_state(model.config, **SIZES), chunks)
    shapes = list(products(jaxpr.jaxpr))
    vocab = model.config.vocab_size
    assert [shape for shape in shapes if shape[-1] == vocab] == [(3, vocab)]
    assert (3 + 12, 2 * model.config.intermediate_size) in shapes  # the other products have all rows


def test_the_old_state_is_given_away(model):
    """Each of the functions reuses the buffers of the state that it gets."""

    def check(old, new):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))
        return new

    state = filled_state(model)
    inputs = three_requests(state)
    state = check(state, update_slots(state, inputs.updates))
    state = check(state, prefill_chunk(model.graph, model.params, state, inputs.chunks, slots=4)[0])
    state = check(state, decode_steps(model.graph, model.params, state, steps=4, slots=4)[0])
    check(state, run_round(model.graph, model.params, state, inputs, shape=SHAPE)[0])


def test_fields_of_the_state_share_no_buffer(model):
    leaves = jax.tree.leaves(init_state(model.config, **SIZES))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 0, 0, 1), r"mixed_steps 0 must lie in 0..steps \(0 >= 1\)"),
        ((2, 3, 8, 1), r"mixed_steps 3 must lie in 0..steps \(2 >= 1\)"),
        ((2, -1, 8, 1), "mixed_steps -1"),
        ((2, 1, 0, 1), "chunk_tokens must be positive exactly when there are mixed steps"),
        ((2, 0, 8, 1), "chunk_tokens must be positive exactly when there are mixed steps"),
        ((2, 0, 0, 0), "slots is 0; it must be at least 1"),
    ],
)
def test_impossible_shapes(sizes, message):
    with pytest.raises(ValueError, match=message):
        RoundShape(*sizes)


def test_inputs_that_do_not_fit_the_shape(model):
    state = init_state(model.config, **SIZES)
    with pytest.raises(ValueError, match=r"chunks of shape \(0, 0\) for a RoundShape of \(2, 12\)"):
        run_round(model.graph, model.params, state, RoundInputs.empty(state), shape=SHAPE)


@pytest.mark.parametrize("name", SIZES)
def test_impossible_state(model, name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        init_state(model.config, **{**SIZES, name: 0})


def test_a_round_reports_its_prompt_rows(model):
    """Log-probabilities and hidden states of a round's chunks are those of its parts."""
    features = Features(logprobs=2, prompt="both")
    state = filled_state(model)
    inputs = three_requests(state)
    _, outputs = run_round(model.graph, model.params, state, inputs, shape=SHAPE, features=features)
    state = filled_state(model)
    inputs = three_requests(state)
    state = update_slots(state, inputs.updates)
    _, parts = prefill_chunk(model.graph, model.params, state, inputs.chunks, slots=4, features=features)
    for one, other in (
        (outputs.prompt_logprobs, parts.prompt_logprobs),
        (outputs.prompt_hidden, parts.prompt_hidden),
    ):
        assert one is not None
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), one, other)
    assert outputs.logprobs.chosen.shape == (SHAPE.steps, SHAPE.slots)


def test_controls_must_be_there(model):
    state = filled_state(model)
    inputs = three_requests(state)
    with pytest.raises(ValueError, match="the state has no controls"):
        run_round(model.graph, model.params, state, inputs, shape=SHAPE, features=Features(controls=True))


def test_unknown_features():
    with pytest.raises(ValueError, match="sampling 'beam' is unknown; known: auto, greedy, full"):
        Features(sampling="beam")


# -- the notebook --------------------------------------------------------------------------------------------------


def test_the_example_of_the_readme(model):
    """One request on two slots, by hand: a mixed step and seven decode steps in one round, then five more."""
    prompt = PROMPTS[2]
    n = len(prompt)
    state = init_state(model.config, num_slots=2, num_pages=32, page_size=16, pages_per_seq=8)
    inputs = RoundInputs.empty(state, mixed_steps=1, chunk_tokens=16, max_new_pages=4)
    updates, chunks = inputs.updates, inputs.chunks
    updates.admit[0], updates.tokens_left[0] = True, 20
    updates.page_slot[:], updates.page_index[:], updates.page_id[:] = 0, range(4), range(4)
    chunks.tokens[0, :n], chunks.positions[0, :n], chunks.slots[0, :n] = prompt, range(n), 0
    chunks.end_row[0, 0] = n - 1
    shape = RoundShape(steps=8, mixed_steps=1, chunk_tokens=16, slots=2)
    state, outputs = run_round(model.graph, model.params, state, inputs, shape=shape)
    state, more = decode_steps(model.graph, model.params, state, steps=12, slots=2)
    tokens = np.concatenate((outputs.tokens, more.tokens))
    want, _ = oracle(model, prompt, dataclasses.replace(GREEDY, max_tokens=20))
    assert tokens[:, 0].tolist() == want
    assert (tokens[:, 1] == NO_TOKEN).all() and int(state.slots.finish[0]) == FINISH_LENGTH

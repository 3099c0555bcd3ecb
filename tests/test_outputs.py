"""What users get back, and how pieces become a whole."""

import pickle

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsched
from jaxsched import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput, SamplingParams, ScoreOutput
from jaxsched.request import OutputBuilder, RequestMetrics


def test_public_names():
    """Each can be had from the package, and the old place of SamplingParams is still one."""
    for name in jaxsched.__all__:
        assert getattr(jaxsched, name) is not None
    assert jaxsched.request.SamplingParams is SamplingParams
    assert jaxsched.ScoreOutput is ScoreOutput and jaxsched.EmbeddingOutput is EmbeddingOutput


def test_small_outputs():
    assert pickle.loads(pickle.dumps(Logprob(-0.5, 2, "é"))) == Logprob(-0.5, 2, "é") != Logprob(-0.5, 1, "é")
    assert ScoreOutput([1], [2]) == ScoreOutput([1], [2], 0.0, [], False, None)
    vector = np.zeros(3, np.float32)
    assert EmbeddingOutput([1], vector).embedding is vector and EmbeddingOutput([1], vector).error is None


PLACES = st.dictionaries(
    st.integers(0, 9), st.builds(Logprob, st.floats(-9, 0), st.integers(1, 9)), max_size=2
)


@st.composite
def samples(draw):
    """A sample in pieces: (what the pieces say, the whole)."""
    count, asked = draw(st.integers(0, 6)), draw(st.booleans())
    ids = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    texts = draw(st.lists(st.text(max_size=2), min_size=count, max_size=count))
    places = draw(st.lists(PLACES, min_size=count, max_size=count)) if asked else None
    total = float(count) if asked else None
    reason = draw(st.sampled_from([7, "stop", None]))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=3)))
    index, pieces = draw(st.integers(0, 9)), []
    for low, high in zip([0, *cuts], [*cuts, count], strict=True):
        piece = CompletionOutput(index, "".join(texts[low:high]), ids[low:high])
        if places is not None:
            piece.cumulative_logprob, piece.logprobs = float(high), places[low:high]
        pieces.append(piece)
    pieces[-1].finish_reason, pieces[-1].stop_reason = "stop", reason
    return pieces, CompletionOutput(index, "".join(texts), ids, "stop", reason, total, places)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(samples(), min_size=1, max_size=3, unique_by=lambda s: s[1].index),
    st.sampled_from([None, [], [None], [None, {3: Logprob(-1.0, 1)}]]),
    st.sampled_from([None, "device", "host"]),
    st.data(),
)
def test_pieces_make_the_whole(made, prompt_logprobs, constraint, data):
    """However an output is cut, and however its samples take turns."""
    queues, pieces = [list(parts) for parts, _ in made], []
    while any(queues):
        taking = data.draw(st.sets(st.sampled_from([i for i, q in enumerate(queues) if q]), min_size=1))
        pieces.append(RequestOutput("id", "prompt", [1, 2], [queues[i].pop(0) for i in taking]))
    pieces[-1].finished = True
    pieces[data.draw(st.integers(0, len(pieces) - 1))].prompt_logprobs = prompt_logprobs
    pieces[0].constraint = constraint
    metrics = RequestMetrics(arrival=1.0)
    for piece in pieces:
        piece.metrics = metrics
    before = pickle.dumps(pieces)
    builder = OutputBuilder()
    for piece in pieces:
        builder.add(piece)
    wholes = sorted((whole for _, whole in made), key=lambda whole: whole.index)
    found = builder.output()
    assert found == RequestOutput(
        "id", "prompt", [1, 2], wholes, True, None, metrics, prompt_logprobs, constraint
    )
    for output in found.outputs:  # nothing of a piece is in the whole
        output.token_ids.append(5)
        if output.logprobs is not None:
            output.logprobs.append({})
    for values in (found.prompt_logprobs, found.prompt_token_ids):
        if values is not None:
            values.append(None)
    assert pickle.loads(before) == pieces


def test_what_was_said_once_stays():
    """A later piece that says nothing of it takes nothing back."""
    said = CompletionOutput(0, "a", [1], "stop", 5, -1.5, [{1: Logprob(-1.5)}])
    builder = OutputBuilder()
    builder.add(RequestOutput("id", None, [1], [said], prompt_logprobs=[None], constraint="device"))
    builder.add(RequestOutput("id", None, [1], [CompletionOutput(0)], error=(error := ValueError())))
    whole = builder.output()
    assert whole.outputs == [said] and whole.error is error
    assert (whole.prompt_logprobs, whole.constraint) == ([None], "device")

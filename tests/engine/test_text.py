"""O3: what is streamed, what is returned and what the ids decode to are one text."""

import dataclasses

import numpy as np
import pytest

from harness import GREEDY, Result, collect, make_engine, run_all, thrash
from jaxsched import SamplingParams
from toys import EOS, IM_END

LONG = SamplingParams(temperature=0, max_tokens=40)
TEXTS = {
    "plain": "hello world!",
    "split": "Grüße 世界 🙂.",
    "broken": "x\N{REPLACEMENT CHARACTER}yz\N{REPLACEMENT CHARACTER}",
    "special": "onetwosix",
}


@pytest.fixture(scope="module", params=[("dispatch", 3, 1), ("scan", 4, 0)], ids=["dispatch", "scan"])
def engine(request, script):
    executor, steps, run_ahead = request.param
    return make_engine(
        script[0], executor=executor, num_scheduler_steps=steps, run_ahead=run_ahead, num_pages=16
    )


def ask(engine, script, name, params):
    return run_all(engine, [(script[1][name][:1], params)])[0]


@pytest.mark.parametrize("name", TEXTS)
def test_pieces_joined_are_the_text(engine, script, name):
    """The ends: EOS after the chain, and <|im_end|>, which this checkpoint lists as end-of-sequence, too."""
    model, chains = script
    result = ask(engine, script, name, LONG)
    end = [] if chains[name][-1] == IM_END else [EOS]
    assert result.ids == chains[name][1:] + end
    assert result.text == model.tokenizer.decode(result.ids) == TEXTS[name]
    assert (result.finish_reason, result.stop_reason) == ("stop", None)


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_text_that_is_cut_off(engine, script, limit):
    """A character that is left incomplete comes out at the end, as the decoder shows it."""
    model, chains = script
    result = ask(engine, script, "split", dataclasses.replace(LONG, max_tokens=limit))
    assert result.ids == [*chains["split"][1:], EOS][:limit]
    assert result.text == model.tokenizer.decode(result.ids)
    assert result.finish_reason == ("length" if limit < 7 else "stop")


def test_no_piece_has_half_a_character(engine, script):
    pieces = []
    request_id = engine.add_request(script[1]["split"][:1], LONG)
    while engine.has_work:
        pieces += engine.step()
    assert all(p.request_id == request_id for p in pieces)
    assert not any("\N{REPLACEMENT CHARACTER}" in p.outputs[0].text for p in pieces)
    assert [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]
    tokens = len(script[1]["split"])  # EOS instead of the first
    if engine.resolved.executor == "dispatch":
        assert len(pieces) == tokens  # one by one
    else:
        assert len(pieces) < tokens


def test_special_tokens_are_shown_when_asked_for(engine, script):
    model = script[0]
    result = ask(engine, script, "special", dataclasses.replace(LONG, skip_special_tokens=False))
    assert result.text == "one<|im_start|>two<|pad|>six<|im_end|>"
    assert result.text == model.tokenizer.decode(result.ids, skip_special_tokens=False)


def test_no_text_when_not_asked_for(engine, script):
    result = ask(engine, script, "plain", dataclasses.replace(LONG, detokenize=False))
    assert (result.text, result.ids) == ("", [*script[1]["plain"][1:], EOS])


def test_a_stop_id_stays_in_the_output(engine, script):
    chains = script[1]
    stop = chains["endless"][4]
    result = ask(engine, script, "endless", dataclasses.replace(LONG, stop_token_ids=[stop]))
    assert result.ids == chains["endless"][1:5] and result.stop_reason == stop
    assert result.text == "to be or not "


def test_eos_can_be_ignored(engine, script):
    """EOS has no successor but EOS; all of them are counted, none is shown."""
    result = ask(engine, script, "plain", dataclasses.replace(GREEDY, max_tokens=9))
    assert result.ids == script[1]["plain"][1:] + [EOS] * 5 and result.text == TEXTS["plain"]
    assert (result.finish_reason, result.stop_reason) == ("length", None)


def test_a_batch_of_texts_with_preemption(script):
    """Output that is replayed as prompt is not streamed twice."""
    model, chains = script
    engine = make_engine(model, executor="dispatch", num_scheduler_steps=3, page_size=8, num_pages=16)
    names = [*TEXTS, "endless"] * 3
    params = dataclasses.replace(LONG, max_tokens=60)
    ids = [engine.add_request([65] * 30 + chains[name][:1], params) for name in names]
    results, rng = {}, np.random.default_rng(0)
    while engine.has_work:
        collect(engine, results)
        if rng.random() < 0.3:
            thrash(engine, rng)
    assert engine.scheduler.num_preemptions > 5
    for request_id, name in zip(ids, names, strict=True):
        result: Result = results[request_id]
        assert result.text == model.tokenizer.decode(result.ids)
        assert result.text == TEXTS.get(name, result.text)
        assert (result.finish_reason == "length") == (name == "endless")
        assert name != "endless" or len(result.ids) == 60

"""The LLM class: prompts in, outputs in their order; streams; threads; memory."""

import dataclasses
import gc
import threading
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

from harness import GREEDY, SMALL, assert_idle, oracle
from jaxsched import LLM, SamplingParams
from jaxsched.startup import default_model
from toys import BOS, EOS, IM_END

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=20, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def model(toy):
    return toy("base", add_bos=True)  # its tokenizer puts a BOS in front


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model.path, **SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def talker(script):
    with LLM(script[0].path, **SMALL) as made:
        yield made


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def check_clean(llm):
    """Nothing is left of any request, in the engine or in the mailboxes."""
    assert_idle(llm.engine)
    assert llm._mail == {} and not llm._abandoned


# -- prompts -------------------------------------------------------------------------------------------------------


def test_kinds_of_prompts(llm, model):
    """Text, ids, dicts, one or many: all the same request, and its output says what the prompt was."""
    text, ids = "hello", [BOS, *b"hello"]
    want = oracle(model, ids, GREEDY)[0]
    kinds = [
        # prompt, how the output shows its text
        (text, text), ([text], text), (ids, None), (tuple(ids), None), ([ids], None),
        (np.array(ids), None), ([np.array(ids)], None), (np.array([ids]), None),
        ({"prompt": text}, text), ([{"prompt": text}], text),
        ({"prompt_token_ids": ids}, None), ({"prompt_token_ids": np.array(ids)}, None),
        ({"prompt": "shown", "prompt_token_ids": ids}, "shown"),
    ]  # fmt: skip
    for prompt, shown in kinds:
        [output] = generate(llm, prompt)
        assert output.outputs[0].token_ids == want, prompt
        assert output.prompt_token_ids == ids and output.finished and output.error is None
        assert output.prompt == shown
    check_clean(llm)


def test_kinds_in_one_list(llm, model):
    outputs = generate(llm, ["hello", [1, 2, 3], {"prompt_token_ids": [4]}, np.array([5, 6])])
    prompts = [[BOS, *b"hello"], [1, 2, 3], [4], [5, 6]]
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert ids_of(outputs) == [oracle(model, p, GREEDY)[0] for p in prompts]
    assert [output.prompt for output in outputs] == ["hello", None, None, None]


def test_lists_of_arrays(llm, model):
    """Each array is a prompt, also where all have one token."""
    outputs = generate(llm, [np.array([1, 2, 3]), np.array([4, 5])])
    assert [output.prompt_token_ids for output in outputs] == [[1, 2, 3], [4, 5]]
    outputs = generate(llm, [np.array([1]), np.array([4])])
    assert [output.prompt_token_ids for output in outputs] == [[1], [4]]
    assert generate(llm, list(np.array([1, 2])))[0].prompt_token_ids == [1, 2]


def test_no_prompts(llm):
    assert generate(llm, []) == [] and list(llm.stream([])) == []
    assert llm.chat([[]] * 0, GREEDY, use_tqdm=False) == []


def test_an_empty_text(llm):
    assert generate(llm, "")[0].prompt_token_ids == [BOS]


def test_outputs_come_in_the_order_of_the_prompts(llm, model):
    """Short ones end first, but the list is the caller's."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n).tolist() for n in (60, 2, 30, 5, 1, 44, 8)]
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (3, 40, 1, 20, 0, 7, 33)]
    outputs = generate(llm, prompts, params)
    assert ids_of(outputs) == [oracle(model, *pair)[0] for pair in zip(prompts, params, strict=True)]
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    check_clean(llm)


def test_default_parameters(llm):
    """As in vLLM: 16 tokens at temperature 1. Seeds are drawn, so two runs differ."""
    prompts = [[1, 2, 3]] * 4
    one, two = llm.generate(prompts, use_tqdm=False), llm.generate(prompts, use_tqdm=False)
    assert {len(ids) for ids in ids_of(one)} <= set(range(1, 17))
    assert ids_of(one) != ids_of(two)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_parameters_of_the_wrong_number(llm, count):
    message = f"{count} sampling_params for 2 prompts; give one for all, or one for each"
    with pytest.raises(ValueError, match=message):
        generate(llm, [[1], [2]], [GREEDY] * count)
    with pytest.raises(ValueError, match=message):
        next(llm.stream([[1], [2]], [GREEDY] * count))
    check_clean(llm)


def test_parameters_of_the_wrong_type(llm):
    for params in ([{"temperature": 0}], ["x"], [None]):
        with pytest.raises(
            TypeError, match=f"sampling_params must be SamplingParams, not {type(params[0]).__name__}"
        ):
            generate(llm, [[1]], params)
    check_clean(llm)


# -- bad prompts among good ones -----------------------------------------------------------------------------------

BAD = {
    "too long": ([1] * 129, "the prompt has 129 tokens, but max_model_len is 128"),
    "out of range": ([1, 272], "prompt token id 272 is out of range; the model's vocabulary is 0..271"),
    "floats": ([1.0, 2.0], "prompt_token_ids must be a list of integers"),
    "nothing": (None, "prompt_token_ids must be a list of integers, not None"),
    "no prompt": ({}, "a prompt dict has 'prompt' or 'prompt_token_ids', not nothing"),
    "unknown key": ({"prompt": "a", "image": 1}, r"a prompt dict has 'prompt' or 'prompt_token_ids', not 'image'"),
    "half a character": ("\ud800", "half of a surrogate pair"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_alone_raises(llm, name):
    prompt, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        generate(llm, [prompt])
    with pytest.raises(ValueError, match=message):
        list(llm.stream([prompt], GREEDY))
    check_clean(llm)


def test_bad_prompts_do_not_stop_the_others(llm, model):
    prompts = [[1, 2], *[prompt for prompt, _ in BAD.values()], "hello"]
    with pytest.warns(
        UserWarning, match="7 of 9 prompts were refused; see .error of their outputs; first: the prompt has"
    ):
        outputs = generate(llm, prompts)
    good = [outputs[0], outputs[-1]]
    assert ids_of(good) == [oracle(model, p, GREEDY)[0] for p in ([1, 2], [BOS, *b"hello"])]
    assert all(output.error is None for output in good)
    for output, (_, message) in zip(outputs[1:-1], BAD.values(), strict=True):
        assert isinstance(output.error, ValueError) and output.finished
        assert output.outputs[0].finish_reason == "error" and output.outputs[0].token_ids == []
        with pytest.raises(ValueError, match=message):
            raise output.error
    check_clean(llm)


def test_bad_prompts_in_a_stream(llm, model):
    pieces = list(llm.stream([[272], [3], [273]], GREEDY))
    refused = {index: piece for index, piece in pieces if piece.error is not None}
    assert sorted(refused) == [0, 2] and all(p.finished for p in refused.values())
    ids = [t for index, piece in pieces if index == 1 for t in piece.outputs[0].token_ids]
    assert ids == oracle(model, [3], GREEDY)[0]


def test_all_prompts_are_bad(llm):
    with pytest.raises(ValueError, match="prompt token id 272"):
        generate(llm, [[272], [273]])
    check_clean(llm)


# -- text, chat, streams -------------------------------------------------------------------------------------------


def test_text_and_reasons(talker, script):
    outputs = generate(talker, ["A", "B", "D", "E"], SamplingParams(temperature=0, max_tokens=30))
    texts = ["hello world!", "Grüße 世界 🙂.", "onetwosix", "to" + " be or not to" * 7 + " be"]
    assert [output.outputs[0].text for output in outputs] == texts
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "stop", "stop", "length"]
    assert [output.outputs[0].token_ids[-1] for output in outputs[:3]] == [EOS, EOS, IM_END]
    assert all(
        talker.tokenizer.decode(output.outputs[0].token_ids) == output.outputs[0].text for output in outputs
    )


def test_stream_is_generate_in_pieces(talker):
    prompts = ["A", "B", "E", "C"]
    params = SamplingParams(temperature=0, max_tokens=23)
    whole = generate(talker, prompts, params)
    texts, ids, reasons = [""] * 4, [[] for _ in prompts], [None] * 4
    for index, piece in talker.stream(prompts, params):
        assert reasons[index] is None and piece.prompt == prompts[index]
        texts[index] += piece.outputs[0].text
        ids[index] += piece.outputs[0].token_ids
        reasons[index] = piece.outputs[0].finish_reason
    assert texts == [output.outputs[0].text for output in whole]
    assert ids == ids_of(whole)
    assert reasons == [output.outputs[0].finish_reason for output in whole]
    check_clean(talker)


CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"


def test_chat(llm, model):
    [output] = llm.chat(CONVERSATION, GREEDY, use_tqdm=False)
    assert output.prompt == RENDERED + "<|im_start|>assistant\n"
    assert output.prompt_token_ids == model.tokenizer.encode(output.prompt, add_special_tokens=False)
    assert output.prompt_token_ids[0] != BOS, "a template writes its own BOS"
    assert output.outputs[0].token_ids == oracle(model, output.prompt_token_ids, GREEDY)[0]


def test_chats_in_order(llm):
    conversations = [
        CONVERSATION,
        CONVERSATION[1:],
        [*CONVERSATION, {"role": "assistant", "content": "Yes?"}],
    ]
    outputs = llm.chat(conversations, GREEDY, add_generation_prompt=False, use_tqdm=False)
    assert [o.prompt for o in outputs] == [
        RENDERED,
        "<|im_start|>user\nHi!<|im_end|>\n",
        RENDERED + "<|im_start|>assistant\nYes?<|im_end|>\n",
    ]
    assert (
        ids_of(outputs)[1]
        == ids_of(llm.chat(CONVERSATION[1:], GREEDY, add_generation_prompt=False, use_tqdm=False))[0]
    )


def test_without_a_tokenizer(toy, tmp_path: Path):
    for file in toy("base").path.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    with LLM(tmp_path, **SMALL) as bare:
        [output] = generate(bare, [1, 2, 3])
        assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == GREEDY.max_tokens
        with pytest.raises(ValueError, match="no tokenizer; pass prompts as lists of token ids"):
            generate(bare, "hello")
        with pytest.raises(ValueError, match="no tokenizer, so there is no chat; pass token ids to generate"):
            bare.chat(CONVERSATION)


@pytest.mark.parametrize("show", [True, False])
def test_progress_bar(llm, capfd, show):
    llm.generate([[1], [2]], GREEDY, use_tqdm=show)
    shown = capfd.readouterr()
    assert ("2/2" in shown.err) is show and shown.out == ""


def test_stats(llm):
    before = llm.stats.generation_tokens
    generate(llm, [[1, 2], [3]])
    assert llm.stats.generation_tokens - before == 2 * GREEDY.max_tokens
    assert llm.stats.peak_pages <= llm.engine.resolved.limits.num_pages


# -- leaving early, several at once --------------------------------------------------------------------------------


def test_leaving_a_stream_aborts_it(llm):
    for index, piece in llm.stream([[1], [2], [3], [4], [5]], LONG):
        assert (index, piece.finished) == (0, False)
        break
    check_clean(llm)
    stream = llm.stream([[1], [2]], LONG)
    next(stream)
    stream.close()
    check_clean(llm)
    stream = llm.stream([[1], [2]], LONG)
    del stream  # it never began
    check_clean(llm)


def test_an_error_in_the_loop_aborts_too(llm):
    with pytest.raises(ZeroDivisionError):
        for _ in llm.stream([[1], [2]], LONG):
            1 / 0  # noqa: B018
    check_clean(llm)


def test_two_streams_take_turns(llm, model):
    """Whoever steps fills the other's mailbox; none loses or repeats anything."""
    requests = [[([1, 2], LONG), ([3], SAMPLED)], [([4], SAMPLED), ([5] * 40, LONG), ([6], GREEDY)]]
    streams = [llm.stream(*map(list, zip(*r, strict=True))) for r in requests]
    got = [{}, {}]
    waiting = [0, 0, 1]  # the first is asked twice as often
    while waiting:
        which = waiting.pop(0)
        piece = next(streams[which], None)
        if piece is not None:
            got[which].setdefault(piece[0], []).extend(piece[1].outputs[0].token_ids)
            waiting.append(which)
    for which, each in enumerate(requests):
        assert got[which] == {i: oracle(model, *request)[0] for i, request in enumerate(each)}
    check_clean(llm)


def test_one_of_two_streams_is_left(llm, model):
    left, kept = llm.stream([[1], [2]], LONG), llm.stream([[3]], LONG)
    next(left), next(kept)
    left.close()
    ids = [t for _, piece in kept for t in piece.outputs[0].token_ids]
    want = oracle(model, [3], LONG)[0]
    assert 0 < len(ids) < len(want) and ids == want[-len(ids) :]
    check_clean(llm)


def test_generate_while_a_stream_is_open(llm, model):
    stream = llm.stream([[1]], LONG)
    ids = next(stream)[1].outputs[0].token_ids
    [output] = generate(llm, [[2]], SAMPLED)
    assert output.outputs[0].token_ids == oracle(model, [2], SAMPLED)[0]
    for _, piece in stream:
        ids = ids + piece.outputs[0].token_ids
    assert ids == oracle(model, [1], LONG)[0]
    check_clean(llm)


def test_threads(llm, model):
    """Four threads at once, each with prompts of its own, one of them with a stream that it leaves."""
    prompts = [[[10 * t + i] * (1 + 9 * i) for i in range(5)] for t in range(4)]
    results, errors = {}, []

    def work(t):
        try:
            for _ in range(3):
                results[t] = ids_of(generate(llm, prompts[t], SAMPLED))
                for _ in llm.stream(prompts[t], LONG):
                    break
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert results == {t: [oracle(model, p, SAMPLED)[0] for p in prompts[t]] for t in range(4)}
    generate(llm, [[1]])  # lets what was left by the last one come to its end
    check_clean(llm)


def test_a_stream_found_by_the_garbage_collector(llm, monkeypatch):
    """It may strike at any moment, also while the engine steps: giving the stream up must not wait for that."""
    holder = {"stream": llm.stream([[1]], LONG)}
    holder["self"] = holder
    next(holder["stream"])
    advance = llm.engine.advance

    def collecting_advance():
        gc.collect()
        return advance()

    monkeypatch.setattr(llm.engine, "advance", collecting_advance)
    del holder
    thread = threading.Thread(target=generate, args=(llm, [[2]]), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "deadlock"
    monkeypatch.undo()
    generate(llm, [[3]])
    check_clean(llm)


# -- the end -------------------------------------------------------------------------------------------------------


def test_closing(model):
    with LLM(model.path, **SMALL) as short:
        generate(short, [[1]])
        stream = short.stream([[1], [2]], LONG)
        next(stream)
        later = short.stream([[1]], LONG)
    short.close()
    short.close()
    with pytest.raises(RuntimeError, match="this LLM was closed while requests were running"):
        list(stream)
    for use in (lambda: generate(short, [[1]]), lambda: next(later), lambda: short.chat(CONVERSATION)):
        with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
            use()


@pytest.mark.parametrize("how", ["del", "close", "with"])
def test_device_memory_is_freed(model, how):
    def use():
        llm = LLM(model.path, **SMALL)
        generate(llm, [[1, 2]], SAMPLED)
        for _ in llm.stream([[1]], LONG):
            break
        return llm

    gc.collect()
    before = {id(a) for a in jax.live_arrays()}
    llm = use()
    during = [a for a in jax.live_arrays() if id(a) not in before]
    pages = llm.engine.executor.state.k_pages[0].nbytes
    assert sum(a.nbytes for a in during) > 4 * pages
    del during
    if how == "close":
        llm.close()
    elif how == "with":
        with llm:
            pass
    else:
        del llm
        gc.collect()
    assert [a for a in jax.live_arrays() if id(a) not in before and not a.is_deleted()] == []


def test_a_knob_that_does_nothing_says_so(model):
    settings = {**SMALL, "gpu_memory_utilization": 0.5}
    with pytest.warns(
        UserWarning, match="gpu_memory_utilization does nothing on a CPU; num_pages sets the pool"
    ):
        LLM(model.path, **settings).close()


def test_half_precision_on_a_cpu_is_possible_and_slow(model):
    with pytest.warns(UserWarning, match="dtype bfloat16 is slower than float32 on a CPU"):
        half = LLM(model.path, dtype="bfloat16", executor="dispatch", **SMALL)
    with half:
        assert half.engine.executor.state.k_pages[0].dtype == "bfloat16"
        assert {a.dtype for a in jax.tree.leaves(half.engine.executor.params)} == {np.dtype("bfloat16")}
        [output] = generate(half, [[1, 2, 3]])
        assert len(output.outputs[0].token_ids) == GREEDY.max_tokens


def test_no_model(monkeypatch):
    monkeypatch.setattr("jaxsched.startup.embedded_model", lambda: None)
    with pytest.raises(
        FileNotFoundError, match="no model was named and the embedded SmolLM2 is not installed; pass model="
    ):
        default_model()
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        LLM("/no/such/folder")


def test_no_warnings(model):
    """Making and using an LLM in the ordinary way warns about nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LLM(model.path, **SMALL) as plain:
            generate(plain, ["a", [1]], [GREEDY, SAMPLED])

"""Adapters in an engine: every row through its own, against checkpoints into which they were merged."""

import asyncio
import dataclasses
import pickle
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from async_harness import result_of
from harness import (
    GREEDY,
    SMALL,
    Result,
    assert_idle,
    collect,
    dense_forward,
    drain,
    load,
    oracle,
    random_prompt,
    thrash,
)
from jaxsched import LLM, AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams
from jaxsched.engine.adapters import Adapters
from lora import ALL, merged, write_lora

LONG = dataclasses.replace(GREEDY, max_tokens=30)
SETTINGS = {**SMALL, "enable_lora": True, "max_loras": 2, "max_lora_rank": 4, "executor": "dispatch"}


@pytest.fixture(scope="module")
def folders(toy, tmp_path_factory):
    """Adapters 1, 2 and 3; the third changes little of the model."""
    base, root = toy("base").path, tmp_path_factory.mktemp("loras")
    wishes = ({"r": 4}, {"r": 2, "use_rslora": True}, {"targets": ALL[:1], "strength": 2.0})
    return [write_lora(root / f"lora{i}", base, seed=i, **wish) for i, wish in enumerate(wishes, 1)]


@pytest.fixture(scope="module")
def loras(folders):
    return [None, *(LoRARequest(f"lora{i}", i, folder) for i, folder in enumerate(folders, 1))]


@pytest.fixture(scope="module")
def models(toy, folders, tmp_path_factory):
    """The model alone, and with each adapter merged into it."""
    root = tmp_path_factory.mktemp("merged")
    return [
        toy("base"),
        *(load(merged(root / f"{i}", toy("base").path, f)) for i, f in enumerate(folders, 1)),
    ]


@pytest.fixture(scope="module")
def llm(toy):
    with LLM(toy("base").path, **SETTINGS, use_tqdm_on_load=False) as made:
        yield made


@pytest.fixture
def engine(llm):
    """The engine of ``llm``, without adapters and with an empty prefix cache. Every test leaves it idle."""
    for number in llm.list_loras():
        llm.remove_lora(number)
    llm.reset_prefix_cache()
    yield llm.engine
    assert_idle(llm.engine)


@pytest.fixture
def compiles():
    events = []

    def listen(event, duration, **_):
        if event.startswith("/jax/core/compile"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_rows_of_one_batch_go_through_different_adapters(engine, loras, models, compiles):
    """Loaded by the requests that name them, prompts in chunks, rows preempted; nothing is traced or compiled."""
    rng = np.random.default_rng(0)
    asked, results = [], {}
    with jax.no_tracing():
        for i in range(12):
            which, prompt = i % 3, random_prompt(rng, int(rng.integers(1, 80)))
            params = (
                GREEDY if i % 2 else SamplingParams(temperature=1.0, seed=i, max_tokens=12, ignore_eos=True)
            )
            number = engine.add_request(prompt, params, lora_request=loras[which])
            asked.append((number, which, prompt, params))
            collect(engine, results)
            if i % 4 == 3:
                thrash(engine, rng)
        drain(engine, results)
    assert compiles == [] and engine.scheduler.num_preemptions > 0 and engine.stats.mixed_steps
    assert engine.adapters.loaded() == {1: loras[1], 2: loras[2]}
    for number, which, prompt, params in asked:
        assert results[number].ids == oracle(models[which], prompt, params)[0], which
    assert oracle(models[1], [1], LONG) != oracle(models[0], [1], LONG) != oracle(models[2], [1], LONG)


def test_loading_while_others_run(engine, loras, models, compiles):
    """An adapter that nobody uses makes room in the middle of a generation, without compiling."""
    prompt, results = [1, 2, 3], {}
    going = engine.add_request(prompt, LONG, lora_request=loras[1])
    engine.add_request(prompt, dataclasses.replace(LONG, max_tokens=2), lora_request=loras[2])
    while len(results.get(going, Result()).ids) < 10:
        collect(engine, results)
    with jax.no_tracing():
        late = engine.add_request(prompt, LONG, lora_request=loras[3])
        assert list(engine.adapters.loaded()) == [1, 3]
        drain(engine, results)
    assert compiles == []
    assert results[going].ids == oracle(models[1], prompt, LONG)[0]
    assert results[late].ids == oracle(models[3], prompt, LONG)[0]


def test_samples_and_forks_keep_the_adapter(engine, loras, models):
    params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    results = {}
    number = engine.add_request([5, 6, 7], params, lora_request=loras[1])
    while len(results.get(number, Result()).ids) < 8:
        collect(engine, results)
    parent = engine.requests.by_id[number].sequences[0]
    prompt = parent.prompt + parent.output
    child = engine.fork(number, GREEDY)
    drain(engine, results)
    assert results[number].ids == oracle(models[1], [5, 6, 7], params)[0]
    assert results[number].ids != results[f"{number}#1"].ids
    assert results[child].ids == oracle(models[1], prompt, GREEDY)[0]


def test_a_snapshot_has_its_adapters(engine, loras, models):
    """It goes on where it was after all adapters were replaced, as in an engine that never had them."""
    results, ids = {}, {}
    for which in (1, 0, 2):
        ids[which] = engine.add_request([9, 8, 7], LONG, lora_request=loras[which])
    while len(results.get(ids[1], Result()).ids) < 8:
        collect(engine, results)
    saved = pickle.loads(pickle.dumps(engine.snapshot()))
    for which in (1, 0, 2):
        engine.abort(ids[which])
    drain(engine)
    assert engine.adapters.remove(1) and engine.adapters.place(loras[3]) == 1
    assert engine.adapters.place(loras[1]) == 2 and not engine.adapters.knows(loras[2])
    engine.restore(saved)
    assert engine.adapters.loaded() == {1: loras[1], 2: loras[2]}
    drain(engine, results)
    for which in (1, 0, 2):
        assert results[ids[which]].ids == oracle(models[which], [9, 8, 7], LONG)[0]


def test_adapters_outlive_sleep(llm, engine, loras, models):
    results = {}
    number = engine.add_request([4, 4], LONG, lora_request=loras[2])
    for _ in range(3):
        collect(engine, results)
    llm.sleep()
    llm.wake_up()
    drain(engine, results)
    assert results[number].ids == oracle(models[2], [4, 4], LONG)[0]


def test_cached_pages_belong_to_one_adapter(llm, engine, loras, models, folders, tmp_path):
    """Pages are found by the same load of the same adapter only: not by another under its id."""
    prompt = random_prompt(np.random.default_rng(3), 40)

    def ask(lora):
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=lora)
        return output.outputs[0].token_ids, output.num_cached_tokens

    for which in (0, 1, 2):
        for cached in (0, 32):
            assert ask(loras[which]) == (oracle(models[which], prompt, GREEDY)[0], cached)
    llm.add_lora(LoRARequest("other", 1, folders[2]))
    assert ask(LoRARequest("other", 1, folders[2])) == (oracle(models[3], prompt, GREEDY)[0], 0)
    folder = tmp_path / "changing"
    for source, want in ((folders[0], models[1]), (folders[1], models[2])):  # the same request, other files
        shutil.copytree(source, folder, dirs_exist_ok=True)
        llm.add_lora(LoRARequest("changing", 1, folder))
        assert ask(LoRARequest("changing", 1, folder)) == (oracle(want, prompt, GREEDY)[0], 0)


def test_room_for_adapters(llm, engine, loras):
    for which in (1, 2):
        llm.add_lora(loras[which])
    engine.add_request([1], dataclasses.replace(GREEDY, max_tokens=1), lora_request=loras[1])
    drain(engine)
    llm.add_lora(loras[3])  # in the place of the one used least recently
    assert llm.list_loras() == {1: loras[1], 3: loras[3]}
    used = engine.add_request([1], LONG, lora_request=loras[1])
    engine.add_request([1], LONG, lora_request=loras[3])
    refusals = [
        (
            lambda: llm.add_lora(loras[2]),
            "adapter 2 ('lora2') cannot be loaded: max_loras is 2, and adapter 1 ",
        ),
        (
            lambda: engine.add_request([1], lora_request=loras[2]),
            "all in use; wait for their requests, or raise max",
        ),
        (
            lambda: llm.remove_lora(1),
            f"cannot be removed: request {used!r} uses it; wait until that",
        ),
        (lambda: llm.add_lora(loras[1]), "adapter 1 ('lora1') cannot be replaced: request "),
        (
            lambda: engine.add_request([1], lora_request=LoRARequest("x", 1, loras[2].lora_path)),
            "is loaded under this id; give each an id of its own, or load it in the other's place with add_lora",
        ),
        (lambda: engine.add_request([1], lora_request="lora1"), "it must be a LoRARequest"),
        (
            lambda: llm.add_lora(LoRARequest("x", 7, "no/such/folder")),
            "no no/such/folder/adapter_config.json",
        ),
    ]
    for refused, message in refusals:
        with pytest.raises(ValueError) as error:
            refused()
        assert message in str(error.value), str(error.value)
    assert len(engine.requests.by_id) == 2 and llm.list_loras() == {1: loras[1], 3: loras[3]}
    drain(engine)
    assert llm.remove_lora(1) and not llm.remove_lora(1) and llm.list_loras() == {3: loras[3]}
    with pytest.raises(
        ValueError, match=r"adapter 1 .* enable_lora is False; make the engine with enable_lora=True"
    ):
        Adapters(engine, None).place(loras[1])


def test_the_ways_to_ask(llm, engine, loras, models):
    """One adapter for all prompts or one for each; streams; asyncio."""
    prompts = [[3, 1], [4, 1], [5, 9]]
    wants = [[oracle(models[w], p, GREEDY)[0] for p in prompts] for w in range(3)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[loras[1], None, loras[2]])
    assert [o.outputs[0].token_ids for o in outputs] == [wants[1][0], wants[0][1], wants[2][2]]
    streamed: dict[int, list[int]] = {}
    for index, piece in llm.stream(prompts, GREEDY, lora_request=loras[1]):
        streamed.setdefault(index, []).extend(piece.outputs[0].token_ids)
    assert [streamed[i] for i in range(3)] == wants[1]
    bad = LoRARequest("bad", 9, "nowhere")
    with pytest.warns(UserWarning, match="1 of 3 prompts were refused"):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=[bad, None, loras[2]])
    assert "nowhere" in str(outputs[0].error) and outputs[2].outputs[0].token_ids == wants[2][2]
    with pytest.raises(ValueError, match="2 values of lora_request for 3 prompts"):
        llm.generate(prompts, GREEDY, lora_request=[None, None])

    async def serve():
        async with AsyncLLM.from_engine(engine) as served:
            await served.add_lora(loras[3])
            with pytest.raises(ValueError, match="nowhere"):
                await anext(served.generate([1], GREEDY, lora_request=bad))
            streams = [served.generate(prompts[0], GREEDY, lora_request=lora) for lora in loras[1:3]]
            found = await asyncio.gather(*(result_of(stream) for stream in streams))
            assert await served.remove_lora(1) and list(served.list_loras()) == [2]
            return [result.ids for result in found]

    assert asyncio.run(serve()) == [wants[1][0], wants[2][0]]


@pytest.mark.slow
def test_other_tasks(llm, engine, loras, models):
    """Vectors, likelihoods and beams of an adapter are those of the merged model."""
    prompt, params = [1, 2, 3], BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    vectors, scores, beams = [], [], []
    for which in (1, 0):
        options = {"use_tqdm": False, "lora_request": loras[which]}
        hidden, logits = dense_forward(models[which].graph, models[which].params, np.array([1, 2, 3, 4]))
        vector = np.asarray(nnx.merge(models[which].graph, models[which].params).norm(hidden[-1][2]))
        vectors.append(llm.embed(prompt, normalize=False, **options)[0].embedding)
        np.testing.assert_allclose(vectors[-1], vector, atol=1e-4)
        scores.append(llm.score(prompt, [4], **options)[0].logprob)
        np.testing.assert_allclose(scores[-1], jax.nn.log_softmax(logits[2])[4], atol=1e-4)
        beams.append(llm.beam_search(prompt, params, **options)[0].outputs[0].token_ids)
    assert abs(scores[0] - scores[1]) > 1e-2 and beams[0] != beams[1]

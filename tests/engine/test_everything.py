"""All features at once, at random: whatever happens around a request, its tokens are those of the oracle (O1, O2, O5).

A few engines are compiled; a schedule changes everything else about one of them: policy, controller, run-ahead, pool
size, prefix caching, clock. Then requests come, with n samples, common beginnings and salts, and are aborted, evicted,
forked, put to sleep, saved and restored at random moments.
"""

import copy
import dataclasses
import functools
from collections import Counter

import jax
import numpy as np
import pytest

from controls_oracle import expected, log_softmax, logits_after
from harness import Result, assert_idle, collect, make_engine, random_prompt
from jaxsched import SamplingParams
from jaxsched.engine.entry import sample_seed
from jaxsched.schedule import Scheduler
from jaxsched.schedule.policies import POLICIES
from jaxsched.schedule.rounds import AdaptiveRounds, FixedRounds
from jaxsched.structured import ConstraintCompiler

MAX_LEN = 96

# What needs other programs; everything else changes from schedule to schedule.
ENGINES = {
    "auto": {"max_num_seqs": 4, "page_size": 8, "num_scheduler_steps": "auto", "prefill_chunk_size": "auto"},
    "dispatch": {"max_num_seqs": 5, "page_size": 4, "num_scheduler_steps": 3, "prefill_chunk_size": 16,
                 "executor": "dispatch"},
    "long rounds": {"max_num_seqs": 8, "page_size": 16, "num_scheduler_steps": 8, "prefill_chunk_size": 32},
    "whole prompts": {"max_num_seqs": 3, "page_size": 8, "num_scheduler_steps": 4, "prefill_chunk_size": None},
}  # fmt: skip


# -- requests --------------------------------------------------------------------------------------------------------


def random_params(rng, limit=None, rich=True):
    sampling = {"temperature": 0}
    if rng.random() < 0.6:
        sampling = {
            "temperature": float(rng.choice([0.5, 1.0, 2.0])),
            "top_k": int(rng.choice([0, 5, 40])),
            "top_p": float(rng.choice([1.0, 0.9])),
            "seed": int(rng.integers(-(2**63), 2**63)),
            "n": int(rng.choice([1, 1, 2, 3])),
        }
    stop = rng.integers(0, 256, rng.choice([0, 0, 8])).tolist()
    limit = limit or (int(rng.integers(1, 10)) if rng.random() < 0.5 else int(rng.integers(8, 40)))
    return SamplingParams(
        **sampling,
        **(random_controls(rng, limit) if rich else {}),
        max_tokens=limit,
        stop_token_ids=stop[:6],
        ignore_eos=bool(rng.random() < 0.5),
    )


CONSTRAINTS = [
    {"regex": r"[a-f]{2,4}(-[0-9]{1,3})*"},
    {"choice": ["yes", "no", "perhaps", "pérhaps"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}},
              "required": ["a", "b"]}},
    {"json": {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 40}, "maxItems": 3}},
]  # fmt: skip


def random_controls(rng, limit):
    """Some of the controls, half of the time none."""
    if rng.random() < 0.5:
        return {}
    texts = ["a", "e", "th", " ", "0", "Q"]
    choices = {
        "repetition_penalty": lambda: float(rng.choice([0.7, 1.4])),
        "presence_penalty": lambda: float(rng.choice([-1.5, 1.5])),
        "frequency_penalty": lambda: float(rng.choice([-0.5, 0.9])),
        "logit_bias": lambda: {int(t): float(rng.normal() * 5) for t in rng.integers(0, 268, 20)},
        "allowed_token_ids": lambda: rng.integers(0, 268, 60).tolist(),
        "bad_words": lambda: rng.choice(texts, 3).tolist(),
        "min_tokens": lambda: int(rng.integers(0, limit + 1)),
        "stop": lambda: rng.choice(texts, 2).tolist(),
        "include_stop_str_in_output": lambda: True,
        "logprobs": lambda: int(rng.integers(0, 6)),
        "prompt_logprobs": lambda: int(rng.integers(0, 4)),
        "logprob_token_ids": lambda: rng.integers(0, 268, 3).tolist(),
        "structured_outputs": lambda: CONSTRAINTS[rng.integers(len(CONSTRAINTS))],
    }
    return {name: make() for name, make in choices.items() if rng.random() < 0.25}


@functools.cache
def answer(model, prompt, params, index):
    """Tokens, finish reason and more of one sample of a request."""
    if not params.greedy:
        params = dataclasses.replace(params, n=1, seed=sample_seed(params.seed % 2**64, index))
    constraint = None
    if params.structured_outputs is not None:
        constraint = compiler_of(model).compile(params.structured_outputs)
    return expected(model, list(prompt), params, max_model_len=MAX_LEN, constraint=constraint)


@functools.cache
def compiler_of(model):
    return ConstraintCompiler(model.tokenizer, model.config.vocab_size, model.checkpoint.eos_token_ids)


@functools.cache
def prompt_answer(model, prompt):
    """Log-probabilities of all that could stand in the prompt's places, from the second on."""
    return [log_softmax(logits_after(model, list(prompt[:i]))) for i in range(1, len(prompt))]


def check_logprobs(entries, tokens, rows, width):
    """Each entry has its token, and the ``width`` best of the true distribution."""
    assert len(entries) == len(tokens)
    for entry, token, row in zip(entries, tokens, rows, strict=True):
        for other, found in entry.items():
            np.testing.assert_allclose(found.logprob, row[other], atol=2e-4)
        assert (
            abs(entry[token].rank - 1 - (row > row[token]).sum()) <= (abs(row - row[token]) < 1e-4).sum() - 1
        )
        best = np.sort([entry[t].logprob for t in entry if (entry[t].rank or width + 1) <= width])[::-1]
        np.testing.assert_allclose(best, np.sort(row)[::-1][: len(best)], atol=2e-4)
        assert len(best) == width


@functools.cache
def pool_of_requests(model, seed, rich=True):
    """Requests to draw from, so that the oracle has to answer each but once. Many begin alike or go on with a turn."""
    rng, requests = np.random.default_rng(seed), []
    prefixes = [random_prompt(rng, int(length)) for length in rng.integers(8, 50, 3)]
    while len(requests) < 40:
        kind = rng.random()
        prompt = random_prompt(rng, int(rng.integers(1, 60 if kind < 0.1 else 14)))
        if kind > 0.45:
            prefix = prefixes[rng.integers(3)]
            prompt = prefix if kind > 0.9 else prefix + prompt
        elif kind > 0.3 and requests:
            before, params = requests[rng.integers(len(requests))]
            prompt = [*before, *answer(model, tuple(before), params, 0).ids, *prompt[:5]]
        if len(prompt) < MAX_LEN - 2:
            requests.append((prompt, random_params(rng, rich=rich)))
    return requests


# -- one schedule ----------------------------------------------------------------------------------------------------


def random_controller(rng, engine):
    limits, resolved = engine.resolved.limits, engine.resolved
    if rng.random() < 0.5:
        chunk = int(rng.integers(4, limits.chunk_tokens + 1)) if limits.split_prompts else limits.chunk_tokens
        return FixedRounds(int(rng.integers(1, limits.num_steps + 1)), chunk)
    return AdaptiveRounds(
        step_sizes=tuple(sorted({1, limits.num_steps // 2 or 1, limits.num_steps})),
        chunk_sizes=resolved.chunk_buckets if limits.split_prompts else (limits.chunk_tokens,),
        slot_buckets=limits.slot_buckets,
        target_ttft=[None, 1e-3, 1.0][rng.integers(3)],
        target_itl=[None, 1e-3, 0.05][rng.integers(3)],
        prefill_share=[(0.3, 0.5), (0.0, 0.0), (1.0, 1.0)][rng.integers(3)],
        stream_interval=int(rng.choice([1, 3, 8])),
        run_ahead=engine.pipeline.run_ahead,
    )


def random_clock(rng):
    """Time that jumps: what the controller learns from it is nonsense, and must not matter."""
    now, scale = [0.0], float(rng.choice([1e-5, 1e-3, 1e-2]))

    def clock():
        now[0] += scale * rng.exponential()
        return now[0]

    return clock


def set_up(rng, engine, resolved):
    """Changes everything about an idle engine but its programs, which were made for ``resolved``."""
    limits, clock = resolved.limits, random_clock(rng)
    per_seq = -(-MAX_LEN // limits.page_size)
    pages = int(rng.choice([per_seq, per_seq + 1, 2 * per_seq, limits.num_pages]))
    limits = dataclasses.replace(limits, num_pages=pages, prefix_caching=bool(rng.random() < 0.75))
    engine.resolved = dataclasses.replace(resolved, limits=limits)
    engine.clock = engine.requests.clock = engine.executor.clock = engine.pipeline.clock = clock
    engine.pipeline.device.clock = clock
    engine.pipeline.run_ahead = int(rng.choice([0, 1, 1, 2]))
    engine.pipeline.just_in_time = bool(engine.pipeline.run_ahead and rng.random() < 0.5)
    policy = str(rng.choice([*POLICIES]))
    drops = (
        engine.scheduler._drops
    )  # slots of requests that were aborted last: nobody has told the device yet
    engine.scheduler = Scheduler(limits, policy, random_controller(rng, engine))
    engine.scheduler._drops = drops


class Schedule:
    """Everything that happens to one engine between two moments of idleness."""

    def __init__(self, model, engine, rng, requests, rich):
        self.model, self.engine, self.rng, self.rich = model, engine, rng, rich
        self.todo = [requests[i] for i in rng.integers(0, len(requests), rng.integers(3, 13))]
        self.asked: dict[str, tuple] = {}  # id -> (prompt, params)
        self.results: dict[str, Result] = {}
        self.aborted: set[str] = set()
        self.seen: Counter = Counter()
        rates = {"abort": 0.03, "evict": 0.1, "fork": 0.06, "sleep": 0.03, "reset": 0.03, "snapshot": 0.03}
        self.rates = {name: rate for name, rate in rates.items() if rng.random() < 0.5}
        self.evictions = 20

    def add(self):
        rng, (prompt, params) = self.rng, self.todo.pop()
        request_id = self.engine.add_request(
            prompt,
            params,
            priority=int(rng.integers(-1, 3)),
            client=str(rng.choice(["", "a", "b"])),
            deadline=None if rng.random() < 0.5 else float(rng.random()),
            cache_salt=str(rng.choice(["", "", "x"])),
            stream=bool(rng.random() < 0.5),
        )
        self.asked[request_id] = (tuple(prompt), params)

    def pick(self):
        ids = [*self.engine.requests.by_id]
        return ids[self.rng.integers(len(ids))] if ids else None

    def abort(self):
        name = self.pick()
        if name is not None:
            self.aborted.add(name)
            self.engine.abort(name)

    def evict(self):
        running = [*self.engine.scheduler.running]
        if running and self.evictions:
            self.evictions -= 1
            self.engine.scheduler.evict(running[self.rng.integers(len(running))], self.engine.clock())

    def fork(self):
        """The fork's answer is that of a new prompt: the parent's, and its output so far."""
        name = self.pick()
        if name is None or self.seen["fork"] > 2:
            return
        sequences = self.engine.requests.by_id[name].sequences
        sample = int(self.rng.integers(len(sequences)))
        prompt = [*sequences[sample].prompt, *sequences[sample].output]
        room = MAX_LEN - len(prompt)
        if room > 0:
            params = random_params(self.rng, limit=min(room, int(self.rng.integers(1, 9))), rich=self.rich)
            child = self.engine.fork(name, params, sample=sample, stream=bool(self.rng.random() < 0.5))
            self.asked[child] = (tuple(prompt), params)

    def sleep(self):
        engine = self.engine
        engine.sleep()
        engine.sleep()
        if self.todo:
            self.add()
        collect(engine, self.results)
        assert not engine.step() and not engine.pipeline.flights and not engine.scheduler.running
        engine.wake_up()
        engine.wake_up()

    def reset(self):
        self.engine.reset_prefix_cache()
        assert self.engine.scheduler.memory.pool.cached == 0

    def snapshot(self):
        """What is done after it is undone by going back to it."""
        saved, kept = self.engine.snapshot(), copy.deepcopy(self.results)
        hook, self.engine.before_plan = self.engine.before_plan, None
        for _ in range(self.rng.integers(4)):
            collect(self.engine, self.results)
        self.engine.restore(saved)
        self.results, self.engine.before_plan = kept, hook

    def before_plan(self):
        if self.todo and self.rng.random() < 0.1:
            self.add()

    def play(self):
        rng, engine = self.rng, self.engine
        burst = float(rng.choice([0.1, 0.5, 0.9]))
        if rng.random() < 0.3:
            engine.before_plan = self.before_plan
        for _ in range(3000):
            while self.todo and rng.random() < burst:
                self.add()
            for name, rate in self.rates.items():
                if rng.random() < rate and engine.has_work:
                    getattr(self, name)()
                    self.seen[name] += 1
            if not self.todo and not engine.has_work:
                break
            collect(engine, self.results)
        else:
            raise AssertionError("the engine comes to no end")
        engine.before_plan = None
        self.check()
        self.seen["preemptions"] += engine.scheduler.num_preemptions
        return self.seen

    def check(self):
        assert_idle(self.engine)
        for name, (prompt, params) in self.asked.items():
            for index in range(params.n):
                result = self.results[name if index == 0 else f"{name}#{index}"]
                want = answer(self.model, prompt, params, index)
                case = (name, index, prompt, params)
                if result.finish_reason == "abort":
                    assert name in self.aborted and result.ids == want.ids[: len(result.ids)], case
                else:
                    assert (result.ids, result.finish_reason) == (want.ids, want.finish_reason), case
                    assert result.text == want.text, case
                    if want.finish_reason == "error":
                        assert result.stop_reason.startswith(want.stop_reason)
                    else:
                        assert result.stop_reason == want.stop_reason, case
                if params.logprobs is not None:
                    check_logprobs(
                        result.logprobs, result.ids, want.logprobs[: len(result.ids)], params.logprobs
                    )
            first = self.results[name]
            if params.prompt_logprobs is not None and first.ids:
                rows = prompt_answer(self.model, prompt)
                assert first.prompt_logprobs[0] is None
                check_logprobs(first.prompt_logprobs[1:], prompt[1:], rows, params.prompt_logprobs)
        assert len(self.results) == sum(params.n for _, params in self.asked.values())


@functools.cache
def engine_of(model, name):
    pages = 4 * -(-MAX_LEN // ENGINES[name]["page_size"])
    engine = make_engine(model, **{**ENGINES[name], "max_model_len": MAX_LEN, "num_pages": pages})
    engine.empty_state = copy.copy(engine).empty_state  # the pool on the device keeps its size
    return engine, engine.resolved


def play(model, name, seed, pool=0, rich=True):
    rng = np.random.default_rng(seed)
    engine, resolved = engine_of(model, name)
    set_up(rng, engine, resolved)
    try:
        return Schedule(model, engine, rng, pool_of_requests(model, pool, rich), rich).play()
    except BaseException as error:
        error.add_note(f"engine {name!r}, seed {seed}, pool {pool}, {engine.scheduler.policy.name}")
        engine_of.cache_clear()
        raise


OFTEN = ("auto", "dispatch")
NAMES = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES]


@pytest.mark.parametrize("name", NAMES)
def test_everything(name, toy):
    model = toy("base", num_layers=1)
    rich = name == "dispatch"  # programs with controls take long to compile; at length all engines have them
    seen = sum((play(model, name, seed, rich=rich) for seed in range(12)), Counter())
    print(dict(seen))
    assert all(
        seen[what] for what in ("abort", "evict", "fork", "sleep", "reset", "snapshot", "preemptions")
    ), seen


@pytest.mark.slow
@pytest.mark.parametrize("block", range(40))
@pytest.mark.parametrize("name", ENGINES)
def test_everything_at_length(name, block, toy):
    model = toy(("base", "mqa", "gqa3", "all_biases")[block % 4])
    for seed in range(1000 + block * 50, 1050 + block * 50):
        play(model, name, seed, pool=block // 4)
    if (
        block % 8 == 7
    ):  # hundreds of programs in one process would run out of memory mappings (vm.max_map_count)
        engine_of.cache_clear()
        jax.clear_caches()

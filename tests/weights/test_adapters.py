"""Adapters in PEFT's format: damaged, unsupported or of another model, each is refused with file, name and remedy."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxsched import LoRARequest
from jaxsched.weights import CheckpointError, adapter_targets, read_adapter
from lora import ALL, PREFIX, rank_and_scale, write_lora

Q0 = PREFIX + "model.layers.0.self_attn.q_proj.lora_A.weight"
B0 = Q0.replace("_A", "_B")
FIRST = Q0.replace("self_attn.q_proj", "mlp.down_proj")  # in the file


@pytest.fixture(scope="module")
def targets(toy):
    return adapter_targets(toy("base").checkpoint, 2, 8, "float32")


@pytest.fixture
def folder(toy, tmp_path):
    return write_lora(tmp_path / "lora", toy("base").path)


def change_config(folder, **fields):
    file = folder / "adapter_config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps(config))


def change_tensors(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_an_adapter_as_arrays(folder, targets, toy):
    """Each fused tensor has columns of A and a block of B; the scale is in B."""
    change_config(folder, alpha_pattern={"k_proj": 6.0})
    tensors, adapter = load_file(folder / "adapter_model.safetensors"), read_adapter(folder, targets)
    a, b = adapter.kernels["layers.1.attention.qkv"]
    at, config = 0, json.loads((folder / "adapter_config.json").read_text())
    for part, name in enumerate(ALL[:3]):
        one = [tensors[f"{PREFIX}model.layers.1.self_attn.{name}.lora_{side}.weight"] for side in "AB"]
        _, scale = rank_and_scale(config, name)
        np.testing.assert_array_equal(a[:, 8 * part : 8 * part + 4], one[0].T)
        np.testing.assert_allclose(
            b[8 * part : 8 * part + 4, at : at + len(one[1])], scale * one[1].T, rtol=1e-6
        )
        at += len(one[1])
    assert at == b.shape[1] and np.count_nonzero(b) == sum(4 * n for n in (64, 32, 32))
    assert sorted(adapter.kernels) == sorted(targets.rules)


def test_half_precision(folder, toy):
    change_tensors(folder, lambda t: t.update({k: v.astype(ml_dtypes.bfloat16) for k, v in t.items()}))
    adapter = read_adapter(folder, adapter_targets(toy("base").checkpoint, 1, 4, "bfloat16"))
    assert {x.dtype.name for pair in adapter.kernels.values() for x in pair} == {"bfloat16"}


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"},
        {"target_modules": "all-linear"},
        {
            "target_modules": [f"model.layers.{i}.{m}" for i in (0, 1) for m in ("self_attn", "mlp")],
            "sub": True,
        },
        {"exclude_modules": ["embed_tokens"], "lora_dropout": 0.1, "base_model_name_or_path": "x/y"},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers", "init_lora_weights": "gaussian"},
    ],
    ids=str,
)
def test_other_ways_to_say_the_same(folder, targets, fields):
    if fields.pop("sub", False):
        attention, mlp = ALL[:4], ALL[4:]
        fields["target_modules"] = [
            f"{m}.{n}" for m in fields["target_modules"] for n in (attention if "attn" in m else mlp)
        ]
    want = read_adapter(folder, targets)
    change_config(folder, **fields)
    found = read_adapter(folder, targets)
    for path, pair in want.kernels.items():
        for a, b in zip(pair, found.kernels[path], strict=True):
            np.testing.assert_array_equal(a, b)


CONFIGS = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA' is supported"),
    ({"use_dora": True}, "use_dora is True, which is not supported in an adapter; merge it into the model"),
    ({"bias": "all"}, "bias is 'all', which is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which is not supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not supported"),
    ({"use_something_new": {"a": 1}}, "use_something_new is {'a': 1}, which is not supported"),
    (
        {"target_modules": [*ALL, "lm_head"]},
        "target_modules has 'lm_head', which is no layer that can be adapted here",
    ),
    ({"target_modules": [*ALL, "embed_tokens"]}, "target_modules has 'embed_tokens', which is no layer"),
    ({"target_modules": None}, "target_modules is None; it must be a list of names"),
    ({"target_modules": "(q_proj"}, "target_modules is '(q_proj'; it must be a regular expression"),
    (
        {"target_modules": ALL[1:]},
        f"tensor '{Q0}' is of a layer that target_modules in adapter_config.json leaves out",
    ),
    ({"layers_to_transform": [1]}, f"tensor '{FIRST}' is of a layer that target_modules"),
    ({"layers_to_transform": "1"}, "layers_to_transform is ['1']; it must be a number of a layer, or a list"),
    ({"r": 0}, "r is 0; it must be an integer of at least 1"),
    (
        {"r": 16},
        f"'{FIRST}' has rank 16, but max_lora_rank is 8; make the engine with max_lora_rank=16 or more",
    ),
    ({"r": 2}, f"tensor '{FIRST}' has shape (4, 128), but with rank 2 this model needs (2, 128)"),
    ({"lora_alpha": "8"}, "lora_alpha is '8'; it must be a number"),
    ({"rank_pattern": {"q_proj": 9}}, f"'{Q0}' has rank 9, but max_lora_rank is 8"),
    ({"rank_pattern": {"q_proj": -1}}, "rank_pattern['q_proj'] is -1; it must be an integer"),
    ({"alpha_pattern": {"(": 1}}, "alpha_pattern is '('; it must be a regular expression"),
]


@pytest.mark.parametrize(("fields", "message"), CONFIGS, ids=lambda x: str(x)[:40])
def test_configurations_that_are_refused(folder, targets, fields, message):
    change_config(folder, **fields)
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        read_adapter(folder, targets)
    assert str(folder / "adapter_") in str(error.value)


def spoil(key, value):
    return lambda tensors: tensors.update({key: np.array(value(tensors[key]))})


TENSORS = [
    (lambda t: t.pop(B0), "has no lora_B for model.layers.0.self_attn.q_proj; download it again"),
    (
        lambda t: (t.pop(B0), t.pop(Q0)),
        f"has no tensor '{Q0}', which target_modules in adapter_config.json promises",
    ),
    (
        spoil(B0, lambda x: x[:-1]),
        f"tensor '{B0}' has shape (63, 4), but with rank 4 this model needs (64, 4)",
    ),
    (spoil(Q0, lambda x: x * np.nan), f"tensor '{Q0}' has numbers that are NaN or infinite"),
    (spoil(B0, lambda x: x * np.inf), f"tensor '{B0}' has numbers that are NaN or infinite"),
    (spoil(Q0, lambda x: x.astype(np.int32)), f"tensor '{Q0}' has dtype int32"),
    (
        lambda t: t.update({PREFIX + "lm_head.lora_A.weight": t[Q0]}),
        f"tensor '{PREFIX}lm_head.lora_A.weight' is not lora_A or lora_B of a layer that can be adapted here (q_proj, ",
    ),
    (
        lambda t: t.update({PREFIX + "model.embed_tokens.lora_embedding_A": t[Q0]}),
        "model.embed_tokens.lora_embedding_A' is not lora_A or lora_B",
    ),
    (
        lambda t: t.update({Q0.replace("lora_A.weight", "lora_magnitude_vector"): t[Q0]}),
        "q_proj.lora_magnitude_vector' is not lora_A or lora_B",
    ),
    (
        lambda t: t.update({Q0.replace("model.layers", "layers"): t[Q0]}),
        "has two tensors for lora_A of model.layers.0.self_attn.q_proj; remove one",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), TENSORS, ids=lambda x: str(x)[:40] if isinstance(x, str) else ""
)
def test_tensors_that_are_refused(folder, targets, change, message):
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_adapter(folder, targets)


def test_numbers_that_the_scale_makes_too_large(folder, toy):
    change_config(folder, lora_alpha=1e9)
    with pytest.raises(
        CheckpointError, match=r"B.weight' times its scale has values that are not finite as float16"
    ):
        read_adapter(folder, adapter_targets(toy("base").checkpoint, 1, 4, "float16"))


def test_experts_and_routers_are_refused(family_toy, tmp_path):
    model = family_toy("mixtral")
    targets = adapter_targets(model.checkpoint, 1, 4, "float32")
    assert {name.rpartition(".")[2] for name in targets.linears} == set(ALL[:4])
    for wanted in (["w1"], ["gate"]):
        folder = write_lora(tmp_path / wanted[0], model.path, targets=wanted)
        with pytest.raises(
            CheckpointError, match=r"not lora_A or lora_B of a layer that can be adapted here \(q_proj"
        ):
            read_adapter(folder, targets)


def test_files_that_are_refused(folder, targets, tmp_path):
    cases = {
        "adapter_config.json": [
            (
                None,
                "no .*adapter_config.json; lora_path is a folder on this machine with adapter_config.json and",
            ),
            (b"{", "adapter_config.json is not valid JSON"),
            (b"[]", "adapter_config.json holds no JSON object"),
        ],
        "adapter_model.safetensors": [
            (None, "lora has no adapter_model.safetensors; give the folder that PEFT has saved"),
            (b"\x09\x00\x00\x00\x00\x00\x00\x00{", "adapter_model.safetensors is truncated"),
        ],
    }
    for name, contents in cases.items():
        good = (folder / name).read_bytes()
        for content, message in contents:
            (folder / name).unlink()
            if content is not None:
                (folder / name).write_bytes(content)
            with pytest.raises(CheckpointError, match=message):
                read_adapter(folder, targets)
            (folder / name).write_bytes(good)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="convert it, pickled weights are not read"):
        read_adapter(folder, targets)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("", 1, "x"), "lora_name is ''; it must be a string that is not empty"),
        (("a", 0, "x"), "lora_int_id is 0; it must be an integer of at least 1"),
        (("a", True, "x"), "lora_int_id is True"),
        (("a", 1, None), "lora_path is None; it must be the path of a folder"),
    ],
)
def test_requests_that_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        LoRARequest(*values)

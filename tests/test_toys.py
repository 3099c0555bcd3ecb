"""The checkpoints that other tests are built on: they say what they promise, and the goldens belong to them."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from toys import EOS, IM_END, TOYS, VOCAB_SIZE, make_tokenizer, write_script_model, write_toy

GOLDENS = Path(__file__).parent / "goldens"


@pytest.mark.parametrize("name", TOYS)
def test_goldens_belong_to_these_weights(name: str, tmp_path: Path) -> None:
    write_toy(tmp_path, **TOYS[name])
    goldens = np.load(GOLDENS / "toys.npz")
    tensors = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    embedded = tensors["model.embed_tokens.weight"][goldens[f"{name}/ids_0"]]
    np.testing.assert_array_equal(goldens[f"{name}/hidden"][0], embedded)
    assert all(t.dtype == np.float32 for t in tensors.values())
    assert ("lm_head.weight" in tensors) != TOYS[name].get("tied", False)
    assert goldens[f"{name}/gap_0"].min() > 0.02  # wide enough for float32 sums in any order


def test_tokenizer_is_bytes() -> None:
    tokenizer = make_tokenizer(add_bos=True, extra_tokens=[b"\x96\xc3", b"abc"])
    text = "Grüße, 世界 🙂\n"
    assert tokenizer.encode(text, add_special_tokens=False).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<|im_end|>").ids == [256, ord("a"), IM_END]
    assert tokenizer.get_vocab_size() < VOCAB_SIZE


def script_step(tensors: dict[str, np.ndarray], token: int) -> np.ndarray:
    hidden = tensors["model.embed_tokens.weight"][token]  # the layer adds nothing
    hidden = hidden / np.sqrt((hidden**2).mean() + 1e-6)
    return tensors["lm_head.weight"] @ hidden


def test_script_model_emits_its_chains(tmp_path: Path) -> None:
    chains = [[b"A", b"hel", b"lo \xe4\xb8", b"\x96!", IM_END], [b"B", b"x", b"y", b"x"]]
    ids = write_script_model(tmp_path, chains)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not any(tensors[n].any() for n in tensors if "o_proj" in n or "down_proj" in n)
    for chain in ids:
        for current, following in itertools.pairwise(chain):
            logits = script_step(tensors, current)
            assert logits.argmax() == following
            assert logits.max() == pytest.approx(20.0, rel=1e-5) and np.count_nonzero(logits) == 1
    assert script_step(tensors, IM_END).argmax() == script_step(tensors, ord("z")).argmax() == EOS
    text = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids[0][1:])
    assert text == "hello 世!"
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] % 16 == 0


def test_script_model_refuses_two_successors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token 65 is followed by 66 and by 67"):
        write_script_model(tmp_path, [[b"A", b"B"], [b"A", b"C"]])

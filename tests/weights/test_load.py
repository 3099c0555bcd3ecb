"""Parameters are what the checkpoint's tensors say, whatever the file format."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxsched.models import family_of
from jaxsched.weights import CheckpointError, load_model, load_params, open_checkpoint
from toy_gguf import tensors_of
from toys import TOYS, write_toy


def flat(params: nnx.State) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("name", TOYS)
def test_parameters_equal_the_tensors(tmp_path: Path, name: str) -> None:
    checkpoint = open_checkpoint(write_toy(tmp_path / "toy", **TOYS[name]))
    tensors = tensors_of(tmp_path / "toy")
    params = flat(load_params(checkpoint, dtype=jnp.dtype("float32")))
    table = family_of(checkpoint.config).weight_table(checkpoint.model_config)
    assert params.keys() == table.keys()
    used = set()
    for path, rule in table.items():
        expected = np.concatenate([tensors[source] for source in rule.sources])
        np.testing.assert_array_equal(params[path], expected.T if rule.transpose else expected, err_msg=path)
        used |= set(rule.sources)
    assert used == tensors.keys()
    assert sum(value.size for value in params.values()) == checkpoint.model_config.num_parameters


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    one, three = (
        load_params(open_checkpoint(write_toy(tmp_path / str(n), shards=n)), dtype="float32") for n in (1, 3)
    )
    jax.tree.map(np.testing.assert_array_equal, one, three)


def test_graphdef_is_static_and_params_are_pure(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_toy(tmp_path / "toy"))
    graphdef, params = load_model(checkpoint, jnp.dtype("float32"))
    assert hash(graphdef) == hash(load_model(checkpoint, jnp.dtype("float32"))[0])
    assert all(type(leaf).__name__ == "ArrayImpl" for leaf in jax.tree.leaves(params))

    traces = []

    def logits(graphdef: nnx.GraphDef, params: nnx.State, hidden: jax.Array) -> jax.Array:
        traces.append(1)
        return nnx.merge(graphdef, params).logits(hidden)

    run = jax.jit(logits, static_argnums=0)
    hidden = jnp.ones((1, checkpoint.model_config.hidden_size))
    first = run(graphdef, params, hidden)
    again = load_model(checkpoint, jnp.dtype("float32"))
    np.testing.assert_array_equal(first, run(*again, hidden))
    assert len(traces) == 1


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(tmp_path: Path, stored: type, dtype: str) -> None:
    folder = write_toy(tmp_path / "toy", num_layers=1)
    tensors = {
        name: tensor.astype(stored) for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    read = checkpoint.source.read("lm_head.weight")
    assert read.dtype == stored
    np.testing.assert_array_equal(read, tensors["lm_head.weight"])
    params = flat(load_params(checkpoint, dtype=jnp.dtype(dtype)))
    assert {value.dtype for value in params.values()} == {jnp.dtype(dtype)}
    np.testing.assert_array_equal(params["head.kernel"], tensors["lm_head.weight"].T.astype(jnp.dtype(dtype)))


def test_integer_dtype_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_toy(tmp_path / "toy"))
    with pytest.raises(ValueError, match="dtype int8 is not a floating-point type; use float32, bfloat16"):
        load_params(checkpoint, dtype=jnp.dtype("int8"))


def test_parameters_outlive_the_file(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy")
    params = load_params(open_checkpoint(folder), dtype="float32")
    before = flat(params)
    file = folder / "model.safetensors"
    with open(file, "r+b") as handle:  # in place: the mapping, were it aliased, would change
        handle.write(bytes(file.stat().st_size))
    for path, value in flat(params).items():
        np.testing.assert_array_equal(value, before[path])
        assert value.any()


def test_device(tmp_path: Path) -> None:
    device = jax.devices()[-1]
    params = load_params(open_checkpoint(write_toy(tmp_path / "toy")), dtype="float32", device=device)
    assert {d for leaf in jax.tree.leaves(params) for d in leaf.devices()} == {device}


def test_numbers_that_the_dtype_cannot_hold(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = -1e5
    save_file(tensors, file)
    load_params(open_checkpoint(folder), dtype="bfloat16")
    message = r"tensor 'model\.layers\.0\.mlp\.down_proj\.weight' has numbers up to 1e\+05, which float16 cannot hold"
    with pytest.raises(CheckpointError, match=message) as info:
        load_params(open_checkpoint(folder), dtype="float16")
    assert str(file) in str(info.value)


def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    folder = write_toy(tmp_path / "toy")
    checkpoint, file = open_checkpoint(folder), folder / "model.safetensors"
    with open(file, "r+b") as handle:
        handle.truncate(5000)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors ends before byte \d+, where a tensor should end"
    ):
        load_params(checkpoint, dtype="float32")

"""For all tests: a compilation cache that outlives the session, and the toy checkpoints."""

import functools
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before jax is imported anywhere. Compiling is most of the suite's time; the second run finds nearly all of it here.
os.environ.setdefault("JAXSCHED_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".jax_cache"))

import jax
from jaxtyping import install_import_hook

# Shapes and dtypes in the signatures of device functions are checked here and nowhere else.
DEVICE_CODE = ["jaxsched.step.round", "jaxsched.models.decoder", "jaxsched.pallas_kernels"]
install_import_hook(DEVICE_CODE, "beartype.beartype").__enter__()

from families import MAX_LEN, write_family_toy
from harness import Model, load
from jaxsched.startup import use_compilation_cache
from toys import TOYS, write_script_model, write_toy

use_compilation_cache()

# Text for tests of streaming: tokens that end inside a character, characters of two to four bytes, a turn's end.
SCRIPTS = {
    "plain": [b"A", b"hello", b" wor", b"ld", b"!"],
    "split": [b"B", b"Gr\xc3", b"\xbc\xc3\x9f", b"e \xe4", b"\xb8\x96\xe7", b"\x95\x8c \xf0\x9f", b"\x99\x82."],
    "broken": [b"C", b"x\xe4\xb8", b"yz", b"\xf0\x9f\x99"],  # bytes that never become a character
    "special": [b"D", b"one", 258, b"two", 260, b"six", 259],  # ends in <|im_end|>
    "endless": [b"E", b"to", b" be", b" or", b" not ", b"to"],
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each compiled program takes memory mappings, of which a process may have 65,530 (vm.max_map_count) on Linux.

    So what a module's tests have kept in functools caches goes with the module, and in need all of jax's caches.
    """
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    gc.collect()
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _interrupts_raise() -> Iterator[None]:
    """Ctrl-C is KeyboardInterrupt in every test, whatever the process or an earlier test has made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """``toy("mqa")`` or ``toy("base", num_layers=1)``: a toy checkpoint with its parameters loaded, made once."""
    made: dict[tuple, Model] = {}

    def make(name: str = "base", **options: int) -> Model:
        key = (name, *sorted(options.items()))
        if key not in made:
            path = tmp_path_factory.mktemp(name)
            made[key] = load(write_toy(path, **{**TOYS[name], **options}))
        return made[key]

    return make


@pytest.fixture(scope="session")
def family_toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """``family_toy("gemma2")``: a toy checkpoint of tests/families.py with its parameters loaded, made once."""

    @functools.cache
    def make(name: str) -> Model:
        return load(write_family_toy(tmp_path_factory.mktemp(name), name), max_model_len=MAX_LEN.get(name))

    return make


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, dict[str, list[int]]]:
    """The script model and its chains by name: a prompt that ends in a chain's first id gives the rest, then EOS."""
    path = tmp_path_factory.mktemp("script")
    chains = write_script_model(path, list(SCRIPTS.values()))
    return load(path), dict(zip(SCRIPTS, chains, strict=True))

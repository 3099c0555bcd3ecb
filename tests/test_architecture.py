"""The rules of ARCHITECTURE.md that a machine can check."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400

# Part of jaxsched -> what it must not import. A name stands for itself and everything below it.
TOP = {
    *("jaxsched.cli", "jaxsched.cli_answers", "jaxsched.cli_sampling", "jaxsched.llm", "jaxsched.tasks"),
    *("jaxsched.async_llm", "jaxsched.async_stream", "jaxsched.loading"),
}
HOST = {"jaxsched.engine", "jaxsched.schedule", *TOP}
FORBIDDEN = {
    "jaxsched.schedule": {
        *("jax", "jaxlib", "flax", "optax", "orbax", "jaxsched.step", "jaxsched.engine", *TOP),
        *("jaxsched.models", "jaxsched.pallas_kernels", "jaxsched.text", "jaxsched.weights"),
    },
    "jaxsched.step": HOST,
    "jaxsched.text": {*HOST, "jaxsched.step", "jax", "flax"},
    "jaxsched.weights": {*HOST, "jaxsched.step"},
    "jaxsched.engine": {"asyncio", *TOP},
    "jaxsched.metrics": {"jax", "jaxlib", "flax"},
    "jaxsched.llm": {"jaxsched.cli"},
    "jaxsched.config": {"jaxsched.engine", "jaxsched.step", *TOP},  # it makes the scheduler's limits
    "jaxsched.request": {*HOST, "jaxsched.step", "jax", "flax"},
    "jaxsched.sampling_params": {*HOST, "jaxsched.step", "jax", "flax"},
    "jaxsched.structured": {*HOST, "jaxsched.step", "jax", "jaxlib", "flax"},
    "jaxsched": {"torch", "transformers"},
}
# Part of jaxsched -> all that it may import of jaxsched.
ONLY = {
    "jaxsched.models": {"jaxsched.models", "jaxsched.pallas_kernels"},
    "jaxsched.pallas_kernels": {"jaxsched.pallas_kernels"},
    "jaxsched.metrics": {"jaxsched.metrics"},
    "jaxsched.schedule": {"jaxsched.schedule"},
    "jaxsched.structured": {"jaxsched.structured"},
    "jaxsched.checks": set(),
}


def under(name: str, packages: set[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def modules() -> Iterator[tuple[str, Path]]:
    for folder in ("jaxsched", "jaxsched/models", "jaxsched/pallas_kernels"):
        for path in sorted(
            (ROOT / folder).rglob("*.py")
        ):  # rglob does not follow symlinks, hence the two extra rows
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(name: str, path: Path) -> Iterator[str]:
    """Every module that the file names in an import, also inside functions and for type checking only."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            # "from jaxsched import step" imports jaxsched.step; for the other names it does no harm.
            yield from (f"{source}.{alias.name}" for alias in node.names)


MODULES = dict(modules())


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_arrows(name: str) -> None:
    found = sorted(set(imports(name, MODULES[name])))
    for part, forbidden in FORBIDDEN.items():
        if under(name, {part}):
            assert not [f for f in found if under(f, forbidden)], f"{part} must not import these"
    for part, allowed in ONLY.items():
        if under(name, {part}):
            inside = [f for f in found if under(f, {"jaxsched"})]
            assert not [f for f in inside if not under(f, allowed)], (
                f"{part} may import only {sorted(allowed)}"
            )


@pytest.mark.parametrize("name", MODULES)
def test_files_are_short(name: str) -> None:
    lines = len(MODULES[name].read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{MODULES[name]} has {lines} lines, the limit is {MAX_LINES}: split it"


def test_importing_has_no_side_effects(tmp_path: Path) -> None:
    """No backend starts (the platform does not exist), nothing is printed or written, no torch is loaded."""
    names = [n for n in MODULES if not n.endswith("__main__")]
    code = (
        f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    env = {**os.environ, "JAX_PLATFORMS": "no_such_platform", "PYTHONDONTWRITEBYTECODE": "1"}
    env["PYTHONPATH"] = str(ROOT)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert (run.stdout, list(tmp_path.iterdir())) == ("", [])

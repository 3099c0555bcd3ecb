"""Says what this interpreter can run: "cuda", "cpu" (jax without a CUDA plugin), or what it lacks. Imports no jax."""

import importlib.metadata
import importlib.util
import re
import sys

# What importing the kernels, the models and the step needs. The generation needs more and says so itself.
NEEDED = {"jax": (0, 11), "jaxlib": (0, 11), "flax": (0, 12), "numpy": (2, 0), "jaxtyping": (0, 3)}
MIN_PYTHON = (3, 12)
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def lacking() -> list[str]:
    """What is missing or too old, as text."""
    problems = []
    if sys.version_info < MIN_PYTHON:
        problems.append(f"Python 3.12 or newer (this is {sys.version_info[0]}.{sys.version_info[1]})")
    for name, least in NEEDED.items():
        wanted = ".".join(map(str, least))
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name}>={wanted}")
            continue
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < least:
            problems.append(f"{name}>={wanted} (has {version})")
    return problems


if __name__ == "__main__":
    missing = lacking()
    if missing:
        sys.exit(print("lacks " + ", ".join(missing)) or 1)
    print("cuda" if any(importlib.util.find_spec(name) for name in PLUGINS) else "cpu")

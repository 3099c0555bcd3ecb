"""The CUDA compiler for jax, in a folder of its own: in the environment itself jax would look for a GPU."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path


def install(root: Path) -> Path | None:
    """The folder below ``root`` with the packages for the installed jax, filled on first use (190 MB).

    None if they are not there and cannot be had; why is printed.
    """
    version = importlib.metadata.version("jax")
    folder, complete = root / version, root / version / ".complete"
    if complete.exists():
        return folder
    print(
        f"Installing the CUDA compiler for jax {version} into {root.name}/ (only this time)", file=sys.stderr
    )
    shutil.rmtree(root, ignore_errors=True)
    compiler = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt")
    wanted = [f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}", *compiler]
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *wanted], stdout=sys.stderr, check=False
    )
    if done.returncode:
        print("aot_check is skipped: these packages could not be installed, see above", file=sys.stderr)
        return None
    complete.touch()
    return folder

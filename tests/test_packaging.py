"""`models/` and `pallas_kernels/` live at the root and are installed inside jaxsched, never beside it."""

import importlib.util
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import jaxsched

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("models", "pallas_kernels")


@pytest.mark.parametrize("name", LINKED)
def test_layout(name: str) -> None:
    link = ROOT / "jaxsched" / name
    assert link.is_symlink(), (
        f"jaxsched/{name} must be a symlink: git config core.symlinks true, then check out again"
    )
    assert Path(os.readlink(link)) == Path("..", name)
    assert (ROOT / name / "__init__.py").is_file() and not (ROOT / name).is_symlink()


@pytest.mark.parametrize("name", LINKED)
def test_top_level_import_is_refused(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py")
    assert spec and spec.loader
    with pytest.raises(ImportError, match=f"jaxsched.{name}"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_guard_comes_first() -> None:
    """Before any import, so that the wrong name costs nothing and fails with our message."""
    for name in LINKED:
        text = (ROOT / name / "__init__.py").read_text(encoding="utf-8")
        first_import = min(text.find(f"\n{word} ") % (len(text) + 1) for word in ("import", "from"))
        assert text.index("if not __name__.startswith(") < first_import, name


def test_one_version_number() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" in project["dynamic"]
    assert f"## {jaxsched.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def expected_files() -> set[str]:
    files = {f"jaxsched/{p.relative_to(ROOT / 'jaxsched')}" for p in (ROOT / "jaxsched").rglob("*.py")}
    for name in LINKED:
        files |= {f"jaxsched/{name}/{p.relative_to(ROOT / name)}" for p in (ROOT / name).rglob("*.py")}
    return files | {"jaxsched/py.typed"}


def wheel_files(folder: Path) -> set[str]:
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    return {n for n in names if not n.split("/")[0].endswith(".dist-info")}


@pytest.mark.slow
def test_wheel_and_sdist(tmp_path: Path) -> None:
    """Needs a package index for hatchling. The wheel is used from a folder that has its own models/."""

    def run(*args: object, **kwargs: object) -> str:
        done = subprocess.run([str(a) for a in args], capture_output=True, text=True, **kwargs)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(python, "-m", "pip", "install", "hatchling")
    run(python, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "direct", cwd=ROOT)
    run(python, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path / "sdist", cwd=ROOT)
    (sdist,) = (tmp_path / "sdist").glob("*.tar.gz")
    run(python, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path / "via_sdist", sdist)
    assert wheel_files(tmp_path / "direct") == wheel_files(tmp_path / "via_sdist") == expected_files()

    (wheel,) = (tmp_path / "direct").glob("*.whl")
    run(python, "-m", "pip", "install", "--no-deps", "--target", tmp_path / "site", wheel)
    (tmp_path / "research" / "models").mkdir(parents=True)
    (tmp_path / "research" / "models" / "__init__.py").write_text("MINE = True\n", encoding="utf-8")
    code = (
        "import models, jaxsched.models, jaxsched.pallas_kernels; assert models.MINE; "
        "print(jaxsched.models.__file__)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    where = run(sys.executable, "-c", code, cwd=tmp_path / "research", env=env)
    assert Path(where.strip()).is_relative_to(tmp_path / "site")

"""The wheel: one top-level name, small, and at work beside a user's modules of the same names."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
LARGEST_BYTES = 21e6
OWN = ("eval.py", "microbench.py", "datasets.py", "compose/__init__.py", "learners/__init__.py")
SCRIPT = """
import compose, datasets, eval, learners, microbench
from itercast.api import predict

assert {m.MINE for m in (compose, datasets, eval, learners, microbench)} == {1}
print(predict("mlp-s", gpu="a10").iteration_us > 0)
"""


def checked(words: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """What a command prints; its error output is shown where it fails."""
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, built from the tracked files alone.

    What itercast needs is found where this Python has it; an editable itercast there is not: its
    file of paths counts in its own site-packages only.
    """
    folder = tmp_path_factory.mktemp("wheel")
    listed = checked(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    for name in filter(None, listed.split("\0")):
        if name.partition("/")[0] not in ("tests", "datasets", "docs"):
            copy = folder / "source" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                copy.symlink_to((ROOT / name).readlink())
            elif (ROOT / name).is_file():
                shutil.copyfile(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder)]
    checked([*pip, *build, str(folder / "source")], folder)
    checked([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], folder)
    (wheel,) = folder.glob("*.whl")
    python = str(folder / "venv/bin/python")
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = ["install", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    checked([*pip, "--python", python, *install], folder, plain)
    return folder / "venv"


def packages(venv: Path) -> Path:
    (found,) = venv.glob("lib/*/site-packages")
    return found


@pytest.fixture
def here(installed: Path, tmp_path: Path) -> Path:
    """A user's folder, with modules that have the names of our folders."""
    heavy = sysconfig.get_path("purelib")
    (packages(installed) / "heavy.pth").write_text(heavy + "\n")
    for name in OWN:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("MINE = 1\n")
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MLFLOW_TRACKING_URI")}
    return {**plain, "ITERCAST_CACHE": str(folder.with_name("cache"))}


def test_one_name_and_small(installed: Path) -> None:
    names = {p.name for p in packages(installed).iterdir() if p.suffix != ".pth"}
    assert {n for n in names if not n.endswith(".dist-info")} == {"itercast"}
    (wheel,) = installed.parent.glob("*.whl")
    assert wheel.stat().st_size <= LARGEST_BYTES


def test_the_start_page_of_the_ui_is_in_it(installed: Path) -> None:
    """``tests/extras/ui/test_ui.py`` opens it, and stops the UI."""
    assert (packages(installed) / "itercast/extras/ui/start_page.html").is_file()
    (found,) = distributions(name="itercast", path=[str(packages(installed))])
    (app,) = found.entry_points.select(group="mlflow.app")
    assert (app.name, app.attr) == ("itercast", "create_app")


def test_it_works_beside_a_users_modules_of_the_same_names(installed: Path, here: Path) -> None:
    command, python = str(installed / "bin/itercast"), str(installed / "bin/python")
    before = sorted(p.name for p in here.iterdir())
    env = environment(here)
    assert "iteration" in checked([command, "predict", "mlp-s", "--gpu", "a10"], here, env)
    assert "iteration" in checked([python, "-m", "itercast", "predict", "mlp-s"], here, env)
    (here / "mine.py").write_text(SCRIPT)
    assert checked([python, "mine.py"], here, env) == "True\n"
    (here / "mine.py").unlink()
    left = sorted(p.name for p in here.iterdir() if p.name != "__pycache__")
    assert left == before
    data = ["--data", str(ROOT / "datasets"), "--family", "random"]
    told = checked([command, "train", *data, "--out", "bundle", "--json"], here, env)
    assert '"random"' in told
    left = {p.name for p in here.iterdir() if p.name != "__pycache__"} - set(before)
    assert left <= {"bundle", "mlflow.db", "mlartifacts"} and "bundle" in left

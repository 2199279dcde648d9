"""What other packages add by entry points: the example package is installed and used."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoints
from pathlib import Path

import pandas as pd
import pytest

from itercast.capture.base import extensions

ADDED = "our-rtx-6000-ada"  # the GPU of the example
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "examples/own-package"
BROKEN = {
    "itercast_gone:FAMILY": "ModuleNotFoundError: No module named 'itercast_gone'",
    "itercast_fft.fft:NOTHING": "has no attribute 'NOTHING'",
    "itercast_fft.fft:flops": "function is not what itercast.families holds",
    "itercast_fft.fft:FAMILY": "what it adds is called 'fft'; name both alike",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the package, installed from a copy of its folder."""
    folder = tmp_path_factory.mktemp("installed")
    copy = shutil.copytree(PACKAGE, folder / "source")
    install = "-m pip install -q --no-deps --no-index --no-build-isolation --target"
    words = [sys.executable, *install.split(), str(folder / "lib"), str(copy)]
    subprocess.run(words, check=True)
    return {**os.environ, "PYTHONPATH": f"{folder / 'lib'}{os.pathsep}{ROOT}"}


def run(env: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``python -m WORDS`` in a folder."""
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True)


def test_an_installed_package_adds_a_family_and_a_gpu(
    installed: dict[str, str], tmp_path: Path
) -> None:
    """A kernel takes 2 us to start; 16 reals of 4 B and 10 complex of 8 B at 960 GB/s 0.15 ns."""
    assert "fft" in run(installed, tmp_path, "itercast", "list", "families").stdout.split()
    row = {"family": "fft", "op": "r2c", "gpu": ADDED, "dtype": "fp32", "rows": 2, "size": 8}
    pd.DataFrame([row]).to_parquet(tmp_path / "rows.parquet")
    done = run(installed, tmp_path, "itercast", "price", "rows.parquet", "--out", "out.parquet")
    assert done.returncode == 0, done.stderr
    assert pd.read_parquet(tmp_path / "out.parquet")["predicted_us"].item() == pytest.approx(
        2.0 + 1e6 * 144 / 960e9
    )


def test_an_installed_package_adds_a_plan_key(installed: dict[str, str], tmp_path: Path) -> None:
    """Smaller buckets are sent earlier and more often: another time, the same memory."""
    code = "from itercast.api import predict\nimport json\n"
    code += "for plan in ('dp=8', 'dp=8,bucket=1', 'bucket=1'):\n"
    code += "    one = predict('gpt-m', gpu='a10', plan=plan)\n"
    code += "    print(json.dumps([one.plan, one.comm_us, one.memory_bytes]))"
    words, env = [sys.executable, "-c", code], installed
    done = subprocess.run(words, cwd=tmp_path, env=env, text=True, capture_output=True)
    (plan, comm_us, nbytes), (other, more_us, same) = map(json.loads, done.stdout.splitlines())
    assert (plan, other) == ("dp=8", "dp=8,bucket=1")
    assert comm_us < more_us and nbytes == same
    assert "bucket=1 needs dp > 1" in done.stderr


@pytest.mark.slow
def test_all_tests_of_families_pass_for_the_added_one(installed: dict[str, str]) -> None:
    """Those of every file that loops over families, and the package's own."""
    files = [
        p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "families()" in p.read_text()
    ]
    words = ["-q", "-p", "no:cacheprovider", "-k", "fft or own-package", "-o", "addopts="]
    done = run(installed, ROOT, "pytest", *words, str(PACKAGE / "tests"), *map(str, files))
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert "[fft]" not in done.stdout and passed and int(passed[1]) >= 8


def test_a_checkout_that_is_not_installed_has_its_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU machine to which the repository was copied."""
    monkeypatch.setattr(extensions, "_installed", lambda: EntryPoints([]))
    found = extensions._added.__wrapped__("case_files")
    assert found.keys() >= {"example_cases", "policy_cases"}
    assert extensions._added.__wrapped__("nothing") == {}


def test_files_of_packages_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all groups: there may be hundreds of packages."""
    asked = list[str]()
    monkeypatch.setattr(extensions, "_installed", cache(extensions._installed.__wrapped__))
    monkeypatch.setattr(extensions, "entry_points", lambda: asked.append("") or EntryPoints([]))
    for group in ("cases", "families"):
        extensions._added.__wrapped__(group)
    assert len(asked) == 1


@pytest.mark.slow
def test_its_family_is_measured_and_trained_into_a_bundle(
    installed: dict[str, str], tmp_path: Path, known_cpu: Callable[[Path], None]
) -> None:
    """The bundle keeps the families that it had, and its scores."""
    known_cpu(tmp_path / "rows")
    shutil.copytree(ROOT / "learners/shipped-cpu", tmp_path / "bundle")
    before = json.loads((tmp_path / "bundle/bundle.json").read_text())
    (tmp_path / "bundle/scores.json").write_text('{"gemm": {}}')
    points = [{"rows": n, "size": 64, "op": "r2c", "dtype": "fp32"} for n in range(1, 25)]
    (tmp_path / "points.json").write_text(json.dumps({"fft": points}))
    for command in (
        "collect --family fft --points points.json --budget 2m --out rows",
        "train --data rows --family fft --into bundle",
    ):
        done = run(installed, tmp_path, "itercast", *command.split())
        assert done.returncode == 0, done.stderr
    after = json.loads((tmp_path / "bundle/bundle.json").read_text())
    assert after["families"].keys() == {*before["families"], "fft"}
    assert after["families"]["gemm"] == before["families"]["gemm"]
    assert after["families"]["fft"]["facts"]["rows"] >= 20
    scores = json.loads((tmp_path / "bundle/scores.json").read_text())
    assert scores.keys() == {"gemm", "fft"}


@pytest.mark.parametrize("value", BROKEN)
def test_a_broken_entry_point_is_one_line(
    installed: dict[str, str], tmp_path: Path, value: str
) -> None:
    """It names the package, which can then be mended or uninstalled."""
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[itercast.families]\nbroken = {value}\n")
    env = {**installed, "PYTHONPATH": f"{tmp_path}{os.pathsep}{installed['PYTHONPATH']}"}
    done = run(env, tmp_path, "itercast", "list", "families")
    start = "itercast: entry point 'broken' of itercast.families in package 'broken'"
    assert done.returncode == 2 and done.stderr.startswith(start)
    assert BROKEN[value] in done.stderr and done.stderr.count("\n") == 1

"""What tests share: a folder to write to, the same random numbers, and what is slow to make."""

import fcntl
import gc
import json
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.testing
import yaml
from browser import browser
from plan_case import capture_at
from toy_products import write_products

from itercast.capture.base.files import write_atomic
from itercast.capture.base.yaml_text import made_of
from itercast.capture.opcall import StepCapture
from itercast.microbench.hardware import machine
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.sweep import cards

ROOT = Path(__file__).parents[1]
THREADS = torch.get_num_threads()
gc.set_threshold(50_000, 20, 100)  # of objects: 700 would cost 7 % of all time


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder that all workers of this run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def working_folder(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of all tests: logs are written here. Workers share captures and prices.

    Processes that tests start find the packages by PYTHONPATH.
    """
    before, folder = Path.cwd(), tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("ITERCAST_CACHE", str(shared_folder / "cache"))
        os.chdir(folder)
        yield folder
        os.chdir(before)
    gc.unfreeze()  # what is freed at the end is found


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of captures and prices for one test alone."""
    monkeypatch.setenv("ITERCAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def same_start() -> None:
    """Seeds and threads of every test, whatever ran before: workers run in-process set both.

    On one thread torch picks other convolution kernels, which leave gradients in another layout.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """What is alive before a module's tests is looked through once, not by every collection.

    With torch and transformers imported a collection takes a quarter of a second, and a sweep
    collects between chunks.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def measured_cpu(shared_folder: Path) -> Iterator[Callable[[], Gpu]]:
    """This CPU, measured once for all workers, not at the start of every sweep (10 s each)."""
    path = shared_folder / "cpu.json"

    def measured() -> Gpu:
        with (shared_folder / "cpu.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                path.write_text(json.dumps(machine.measure_cpu().to_dict()))
        return made_of(Gpu, json.loads(path.read_text()), str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cards, "measure_cpu", measured)
        yield measured


@pytest.fixture
def known_cpu(measured_cpu: Callable[[], Gpu]) -> Callable[[Path], None]:
    """Lets sweeps of other processes into a folder know this CPU, as after a sweep before."""

    def write(root: Path) -> None:
        cpu = measured_cpu()
        card = root / "norm" / cpu.name / "before" / "card.yaml"
        write_atomic(card, yaml.safe_dump({"hardware": cpu.to_dict()}).encode())

    return write


@pytest.fixture(scope="session", autouse=True)
def command_line_built_once() -> Iterator[None]:
    """Typer would build all commands anew for every call that a test makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session")
def gpt() -> StepCapture:
    """A training step of a GPT: two layers, four heads, four sequences of 64 tokens."""
    return capture_at(4, 64)


def _empty_store(folder: Path) -> bytes:
    """An MLflow SQLite store without experiments."""
    from mlflow.tracking import MlflowClient

    path = folder / "empty.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    with closing(sqlite3.connect(path)) as whole:  # with what lies in its log beside it
        return whole.serialize()


@pytest.fixture(scope="session")
def empty_mlflow_store(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with MLflow's tables, made once for all workers (7 s); to be copied."""
    path = shared_folder / "mlflow-empty.db"
    with (shared_folder / "mlflow-empty.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            path.write_bytes(_empty_store(tmp_path_factory.mktemp("mlflow")))
    return path


@pytest.fixture(scope="session")
def learned(shared_folder: Path, empty_mlflow_store: Path) -> Path:
    """Rows of products and ``bundle``, trained on them: all learners, two trials; once for all."""
    from itercast.commands.shared import fit
    from itercast.learners.train import SCORES

    folder = shared_folder / "learned"
    with (shared_folder / "learned.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "bundle" / SCORES).is_file():
            write_products(folder, 160)
            (folder / "mlflow.db").write_bytes(empty_mlflow_store.read_bytes())
            patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
            patch.setenv("ITERCAST_CACHE", str(folder / ".cache"))
            patch.chdir(folder)
            fit([folder], folder / "bundle", None, 2, storage=f"sqlite:///{folder}/trials.db")
    return folder


@pytest.fixture
def mlflow_store(empty_mlflow_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs are logged to a new SQLite file in ``tmp_path``, artifacts beside it; its URI."""
    (tmp_path / "mlflow.db").write_bytes(empty_mlflow_store.read_bytes())
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    return uri


@pytest.fixture
def flags_of_the_test() -> Iterator[None]:
    """The flags that a script sets end with the test, as with the process of a real one."""
    yield
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def groups_end() -> Iterator[None]:
    """Process groups that a script leaves end with the test."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real browser with a fresh profile for the tests of a file."""
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found

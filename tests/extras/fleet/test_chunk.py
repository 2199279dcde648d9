"""Chunks of a fleet whose process or command was killed late: nothing is measured twice."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from itercast.capture.base.files import write_atomic
from itercast.capture.base.yaml_text import load_yaml
from itercast.extras.fleet.chunk import ChunkOrder, measure, own_cores
from itercast.extras.fleet.chunks import Chunk
from itercast.extras.fleet.driver import write_cards
from itercast.microbench import store


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Locks of cores in a folder of the test's own; all cores are this process's again."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


def order_at(root: Path, cores: int) -> ChunkOrder:
    """An hour of norms on a CPU."""
    chunk = Chunk(
        machines="here",
        kind="ops",
        families=("norm",),
        points={},
        seconds=3600.0,
        name="abc",
        seed=0,
        share=(0, 1),
    )
    rows, work = str(root / "rows"), str(root / "work")
    return ChunkOrder(chunk=chunk, root=rows, work=work, gpu="cpu", cores=cores, until=4e9)


def test_a_chunk_that_another_attempt_finished_is_left(tmp_path: Path) -> None:
    """An hour of work, were it not for the result at the root."""
    done = {"chunk": "abc", "state": "done", "rows": 7}
    write_atomic(tmp_path / "rows/.fleet/abc.json", json.dumps(done).encode())
    assert measure(order_at(tmp_path, cores=10_000)) == done


def test_chunks_on_one_machine_have_cores_of_their_own() -> None:
    """Another process holds the first core; without it both would measure on that."""
    words = "from itercast.extras.fleet.chunk import own_cores; print(own_cores(1)); input()"
    with subprocess.Popen([sys.executable, "-c", words], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout and other.stdin
        theirs = json.loads(other.stdout.readline())
        mine = own_cores(1)
        cores = os.sched_getaffinity(0)
        assert len(theirs) == len(mine) == 1 and (mine != theirs or len(cores) < 2)
        other.communicate("\n")


def test_a_folder_that_is_not_the_commands_gets_no_rows(tmp_path: Path) -> None:
    """A node that does not share the command's folder: what it measured would stay there."""
    found = measure(order_at(tmp_path, cores=1))
    assert found["state"] == "refused" and "give a shared one, or a URL" in found["reason"]


def test_cards_of_finished_chunks_are_written_after_a_kill(tmp_path: Path) -> None:
    """Of two parts one has a result; a part of something else has none and gets no card."""
    rows = pd.DataFrame([{"key": "k", "status": "ok"}])
    for family, chunk in (("norm", "one"), ("norm", "two"), ("gemm", "other")):
        store.write_part(tmp_path, family, "toy", rows, chunk, facts={"what": "test"})
    write_atomic(tmp_path / ".fleet/one.json", b"{}")
    write_cards(str(tmp_path))
    card = load_yaml((tmp_path / "norm/toy/itercast/card.yaml").read_text())
    assert card["rows"] == {"ok": 2} and len(card["sha256"]) == 2
    assert not (tmp_path / "gemm/toy/itercast/card.yaml").exists()

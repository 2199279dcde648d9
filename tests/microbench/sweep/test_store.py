"""Journals, parts, cards and archives: nothing lost, nothing torn, nothing twice."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from full_disk import full_disk

from itercast.capture.base.files import write_atomic
from itercast.extras.campaign import archive
from itercast.extras.campaign.archive import pack, unpack
from itercast.extras.programs import run_program
from itercast.microbench import store

FACTS = {"what": "test", "hardware": {"name": "toy", "peak_flops_per_s": {"fp32": 1e12}}}


def row(key: str, **extra: Any) -> dict[str, Any]:
    return {"family": "gemm", "gpu": "toy", "key": key, "status": "ok", "time_us": 1.0, **extra}


def test_a_torn_last_line_costs_only_the_point_being_written(tmp_path: Path) -> None:
    journal = store.Journal(tmp_path, "run")
    journal.append([row("a"), row("b")])
    journal.close()
    path = tmp_path / ".journal" / "run.jsonl"
    path.write_bytes(path.read_bytes() + b'{"family": "gemm", "gp')
    again = store.Journal(tmp_path, "run")  # the restarted worker goes on in the same file
    again.append([row("c")])
    again.close()
    assert [r["key"] for r in store.read_journal(path)] == ["a", "b", "c"]


def test_compaction_writes_whole_parts_and_can_be_repeated(tmp_path: Path) -> None:
    journal = store.Journal(tmp_path, "run")
    journal.append([row("a"), row("b", status="oom")])
    journal.close()
    copy = (tmp_path / ".journal" / "run.jsonl").read_bytes()
    assert store.compact(tmp_path, FACTS) == 2
    (tmp_path / ".journal" / "run.jsonl").write_bytes(copy)  # killed before the journal was removed
    store.compact(tmp_path, FACTS)
    rows = store.read_rows([tmp_path], "gemm")
    assert sorted(rows["key"]) == ["a", "b"]
    assert not list((tmp_path / ".journal").glob("*.jsonl"))
    assert store.read_hardware([tmp_path])["toy"].peak("fp32") == 1e12


def test_rows_that_make_no_table_stay_in_their_journal(tmp_path: Path) -> None:
    """A column of texts and numbers is none; the other journal's rows are moved."""
    for name, clock in (("bad", ["fast", 1.0]), ("good", [2.0, 1.0])):
        journal = store.Journal(tmp_path, name)
        journal.append([row(f"{name}{n}", clock=value) for n, value in enumerate(clock)])
        journal.close()
    assert store.compact(tmp_path, FACTS) == 2
    assert list(store.read_rows([tmp_path], "gemm")["key"]) == ["good0", "good1"]
    assert [r["key"] for r in store.read_journal(tmp_path / ".journal/bad.jsonl")] == [
        "bad0",
        "bad1",
    ]


def test_point_key_depends_on_what_was_asked_only() -> None:
    asked = {"family": "gemm", "gpu": "g", "threads": 1, "cache": "warm", "repeat": 0}
    a = store.point_key({**asked, "point": {"m": 1, "n": 2}, "time_us": 3.0})
    b = store.point_key({**asked, "point": {"n": 2, "m": 1}, "time_us": 4.0})
    assert a == b
    assert a != store.point_key({**asked, "point": {"m": 1, "n": 3}})


def test_a_missing_archive_is_named_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["archive", str(tmp_path / "gone.tar.gz"), str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        run_program(archive.main)
    assert "gone.tar.gz' is missing" in capsys.readouterr().err


def rows(root: Path, run_id: str, *keys: str) -> None:
    """A part of such rows, with its card."""
    journal = store.Journal(root, run_id)
    journal.append(
        [{"family": "gemm", "gpu": "toy", "key": k, "status": "ok", "time_us": 1.0} for k in keys]
    )
    journal.close()


def keys(root: Path) -> list[str]:
    return sorted(store.read_rows([root], "gemm")["key"])


def test_rows_journals_and_logs_go_home_and_back(tmp_path: Path) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    rows(root, "one", "a", "b")
    store.compact(root, {"what": "test"})
    rows(root, "two", "c")  # a worker at work: its journal travels as it is
    write_atomic(root / "logs/one.log", b"words")
    write_atomic(root / "secret.txt", b"not ours")
    assert pack(root, tmp_path / "box.tar.gz") == [tmp_path / "box.tar.gz"]
    assert unpack(tmp_path / "box.tar.gz", home) == 4  # a part, its card, a journal, a log
    assert not (home / "secret.txt").exists()
    store.compact(home, {"what": "test"})
    assert keys(home) == ["a", "b", "c"]
    assert unpack(tmp_path / "box.tar.gz", root) == 0  # all there


def test_what_is_there_stays_and_cards_count_all_parts(tmp_path: Path) -> None:
    for name, key in (("first", "a"), ("second", "b")):
        rows(tmp_path / name, name, key)
        store.compact(tmp_path / name, {"what": name})
    pack(tmp_path / "second", tmp_path / "box.tar.gz")
    unpack(tmp_path / "box.tar.gz", tmp_path / "first")
    assert keys(tmp_path / "first") == ["a", "b"]
    card = (tmp_path / "first/gemm/toy/itercast/card.yaml").read_text()
    assert "what: first" in card and "ok: 2" in card


def test_a_large_archive_is_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """70,000 random bytes do not compress: pieces of 30,000 are three."""
    monkeypatch.setattr(archive, "LARGEST_BYTES", 50_000)
    monkeypatch.setattr(archive, "PIECE_BYTES", 30_000)
    noise = os.urandom(70_000)
    box = tmp_path / "box.tar.gz"
    write_atomic(box, b"of an earlier, smaller root")
    write_atomic(tmp_path / "root/logs/one.log", noise)
    pieces = pack(tmp_path / "root", box)
    assert [p.name for p in pieces] == [f"box.tar.gz.00{n}" for n in range(3)]
    assert not box.exists()
    unpack(pieces[1], tmp_path / "home")
    assert (tmp_path / "home/logs/one.log").read_bytes() == noise
    pieces[1].unlink()
    with pytest.raises(ValueError, match="is missing, or one of its pieces"):
        unpack(pieces[0], tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "name",
    ["../out.txt", "/tmp/out.txt", "gemm/../../part-x.parquet", "gemm/toy/itercast/x.py", "a.pkl"],
)
def test_odd_files_are_refused(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "box.tar.gz", "w:gz") as tar:
        header = tarfile.TarInfo(name)
        header.size = 1
        tar.addfile(header, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match="does not belong to a root of rows"):
        unpack(tmp_path / "box.tar.gz", tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_links_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "box.tar.gz", "w:gz") as tar:
        header = tarfile.TarInfo("logs/one.log")
        header.type, header.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(header)
    with pytest.raises(ValueError, match="not a plain file"):
        unpack(tmp_path / "box.tar.gz", tmp_path / "root")


def test_rows_cannot_lead_out_of_the_root(tmp_path: Path) -> None:
    """Families and GPUs of a journal that came in an archive name folders."""
    journal = store.Journal(tmp_path / "root", "run")
    journal.append([{"family": "../..", "gpu": "toy", "status": "ok"}])
    journal.close()
    assert store.compact(tmp_path / "root", {}) == 0
    with pytest.raises(ValueError, match="folder names have letters"):
        store.write_part(tmp_path / "root", "gemm", "..", pd.DataFrame(), "run")
    assert [p.name for p in tmp_path.iterdir()] == ["root"]


def test_a_disk_that_is_full_keeps_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with full_disk(), pytest.raises(OSError, match=r"File too large: '.*/file'"):
        write_atomic(path, bytes(10_000))
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old"

"""What a campaign carries home: whole, nothing but rows, in one file or in pieces."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pandas as pd
import pytest

from itercast.microbench import store
from itercast.microbench.campaign import archive
from itercast.microbench.campaign.archive import pack, unpack


def test_a_missing_archive_is_named_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["archive", str(tmp_path / "gone.tar.gz"), str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        archive.main()
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
    store.write_atomic(root / "logs/one.log", b"words")
    store.write_atomic(root / "secret.txt", b"not ours")
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
    store.write_atomic(box, b"of an earlier, smaller root")
    store.write_atomic(tmp_path / "root/logs/one.log", noise)
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

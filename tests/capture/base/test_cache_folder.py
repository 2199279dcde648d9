"""What is kept in the cache folder, and for how long."""

import os
from pathlib import Path

import pytest

from itercast.capture.base import cache_folder


def test_the_oldest_files_beyond_a_total_size_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three files of 4 bytes and a new one of 4, 8 bytes stay: the new one and the youngest."""
    monkeypatch.setattr(cache_folder, "MOST_BYTES", 8)
    for age, name in enumerate("abc"):
        (tmp_path / name).write_bytes(b"kept")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    assert cache_folder.kept(tmp_path / "new", lambda: b"made", bytes, bytes) == b"made"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "new"]


def test_a_digest_of_code_is_of_all_code_and_data_in_a_folder(tmp_path: Path) -> None:
    digest_of_code = cache_folder.digest_of_code.__wrapped__
    (tmp_path / "room").mkdir()
    for name in ("code.py", "room/facts.yaml"):
        before = digest_of_code(tmp_path)
        (tmp_path / name).write_text("changed: 1")
        assert digest_of_code(tmp_path) != before
    (tmp_path / "room/notes.md").write_text("no code")
    (tmp_path / "other").mkdir()
    assert digest_of_code(tmp_path) == digest_of_code(tmp_path, tmp_path / "other") != before

"""What is kept in the cache folder, and for how long."""

from __future__ import annotations

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

"""Journals, parts and cards: nothing lost, nothing torn, nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

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


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    store.write_atomic(tmp_path / "x", b"old")
    store.write_atomic(tmp_path / "x", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"new"


def test_point_key_depends_on_what_was_asked_only() -> None:
    asked = {"family": "gemm", "gpu": "g", "threads": 1, "cache": "warm", "repeat": 0}
    a = store.point_key({**asked, "point": {"m": 1, "n": 2}, "time_us": 3.0})
    b = store.point_key({**asked, "point": {"n": 2, "m": 1}, "time_us": 4.0})
    assert a == b
    assert a != store.point_key({**asked, "point": {"m": 1, "n": 3}})


def test_read_rows_of_nothing_is_an_empty_frame(tmp_path: Path) -> None:
    assert isinstance(store.read_rows([tmp_path], "gemm"), pd.DataFrame)
    assert store.read_rows([tmp_path], "gemm").empty

"""Files that are cut, broken or made to hurt: counted or refused in one line, no traceback."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from itercast.__main__ import app
from itercast.eval.public.readers import PUBLISHED, SOURCES, read_source
from itercast.learners.features.table import columns
from itercast.microbench.importers.base import MAX_REASONS, Hints, Imported
from itercast.microbench.importers.mapped.source import load
from itercast.microbench.ops import families

OPS = "OPName,Latency,Device,Torch Version,CUDNN Version,CUDA Version"
OPS += ",B,M,N,K,Input_Channel,Output_Channel,Kernel_Szie,Input_Size,Stride,Padding"
GOOD = "linear,0.05,Tesla T4,p2.1.0,8902,cu121,1,58,13,141,1,1,1,1,1,1"
COLLECT = "scripts/asplos/data/dataset/train/collect/linear/p2.1.0/x.csv"
ODD_NUMBERS = ("nan", "-5", "inf", "", "1e999", "1e300", "9" * 400, "0", "0x10", "=1+1", "\x1b[31m")
PLACES = {
    "nccl-tests": "run.txt",
    "kineto": "trace.json",
    "iterations": "table.csv",
    "kineto-traces": "ops_x.csv",
}
PLACES |= {
    name: load(path).tables[0].files[0].replace("*", "x")
    for name, path in PUBLISHED.items()
    if isinstance(path, Path)
}
JUNK: dict[str, bytes] = {
    "nothing": b"",
    "zeros": bytes(1000),
    "noise": np.random.default_rng(0).bytes(5000),
    "half a gzip": gzip.compress(b"OPName,Latency\n" * 1000)[:40],
    "a gzip of noise": gzip.compress(np.random.default_rng(1).bytes(500)),
    "a broken gzip": b"\x1f\x8b\x08\x00" + bytes(range(200)),
    "deep JSON": b"[" * 100_000,
    "deep objects": b'{"traceEvents":' * 50_000,
    "a long number": b'{"results": [' + b"9" * 10_000 + b"]}",
    "wrong JSON": b'{"traceEvents": {"a": 1}, "results": 3}',
    "odd JSON": b'{"traceEvents": [1, null, {"ph": "X", "cat": "kernel", "dur": NaN, "ts": 1e999}],'
    b' "results": [1, null, {"size": -1, "type": []}]}',
    "one long line": b"a," * 500_000,
    "a huge field": b'"' + b"x" * 300_000,
    "half a Parquet": b"PAR1" + bytes(200) + b"PAR1",
    "surrogates": b'{"traceEvents": [], "deviceProperties": [{"name": "\\ud800"}]}',
}


def put(path: Path, data: bytes | str) -> Path:
    """A file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def neusight(folder: Path, text: str) -> Imported:
    """One table of NeuSight, imported."""
    put(folder / COLLECT, text)
    return read_source("neusight", folder, Hints())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("junk", JUNK)
def test_junk_in_the_right_place_is_refused_in_one_line(
    tmp_path: Path, source: str, junk: str
) -> None:
    """Nothing readable at all: exit code 2, or 1 where the file was read and held no row."""
    put(tmp_path / "in" / PLACES[source], JUNK[junk])
    words = ["import", source, str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit)
    assert len(result.output.strip().splitlines()) <= (1 if result.exit_code == 2 else 4)
    assert result.output.isprintable() or "\x1b" not in result.output
    assert not (tmp_path / "out").exists()


def test_a_bad_file_beside_a_good_one_is_counted(tmp_path: Path) -> None:
    for at, data in enumerate(JUNK.values()):
        put((tmp_path / COLLECT).with_name(f"{at}.csv"), data)
    found = neusight(tmp_path, f"{OPS}\n{GOOD}\n")
    assert len(found.rows["gemm"]) == 1
    assert sum(found.dropped.values()) == len(JUNK)


@pytest.mark.parametrize("column", ["Latency", "B", "M", "N", "K"])
def test_odd_numbers_are_counted_row_by_row(tmp_path: Path, column: str) -> None:
    """Every odd value costs its own row and no other."""
    at = OPS.split(",").index(column)
    lines = [GOOD]
    for value in (*ODD_NUMBERS, "1.5e18" if column == "Latency" else "4e18"):
        cells = GOOD.split(",")
        cells[at] = value
        lines.append(",".join(cells))
    found = neusight(tmp_path, "\n".join([OPS, *lines, ""]))
    assert list(found.rows["gemm"]["time_us"]) == [50.0]
    assert sum(found.dropped.values()) == len(lines) - 1


def test_products_of_sizes_do_not_overflow(tmp_path: Path) -> None:
    """2^21 three times is 2^63, more than an integer holds: 2^64 flops."""
    large = GOOD.replace("58,13,141", ",".join([str(2**21)] * 3))
    rows = neusight(tmp_path, "\n".join([OPS, large, ""])).rows["gemm"]
    family = families()["gemm"]
    assert list(family.flops(columns(rows, family))) == [2.0**64]


def test_a_table_cut_off_loses_its_last_row_only(tmp_path: Path) -> None:
    """0.05 may be the start of 0.0567, also where the columns happen to be enough."""
    found = neusight(tmp_path, f"{OPS}\n{GOOD}\n{GOOD}")
    assert len(found.rows["gemm"]) == 1
    assert found.dropped == {"last row without a line end: the file may be truncated": 1}
    found = neusight(tmp_path, f"{OPS}\n{GOOD}\n{GOOD[:20]}\n")
    assert found.dropped == {"row with a wrong number of columns": 1}


def test_reasons_stay_printable_and_few(tmp_path: Path) -> None:
    """A thousand made-up ops do not print a thousand lines, nor escape sequences."""
    names = ["evil\x1b[2J", *(f"op{i}" for i in range(1000))]
    rows = [GOOD.replace("linear", name) for name in names]
    found = neusight(tmp_path, "\n".join([OPS, *rows, GOOD, ""]))
    assert len(found.dropped) == MAX_REASONS + 1
    assert sum(found.dropped.values()) == 1001
    assert all(reason.isprintable() for reason in found.dropped)


def test_names_of_files_and_gpus_cannot_leave_the_folder(tmp_path: Path) -> None:
    """Upstream's words never become paths: only names of ours and digests do."""
    base = tmp_path / "in"
    evil = os.fsdecode(b"\xff\n..\x1b.csv")
    path = (base / COLLECT).with_name(evil)
    put(path, f"{OPS}\n{GOOD}\n{GOOD.replace('Tesla T4', '../../T4')}\n")
    words = ["import", "neusight", str(base), "--out", str(tmp_path / "out/deep")]
    assert CliRunner().invoke(app, words).exit_code == 0
    parts = list(tmp_path.rglob("part-*.parquet"))
    assert [p.parent for p in parts] == [tmp_path / "out/deep/gemm/t4/neusight"]
    assert pd.read_parquet(parts[0])["origin"].map(str.isprintable).all()
    facts = "peak_flops_per_s: {fp32: 1e12}\nsm_count: 8\nhbm_bytes_per_s: 1e11\n"
    own = put(tmp_path / "gpu.yaml", f"name: ../../x\n{facts}")
    result = CliRunner().invoke(app, ["import", "kineto", str(base), "--gpu", str(own)])
    assert (result.exit_code, "lower-case letters" in result.output) == (2, True)


def test_pipes_folders_and_links_to_nowhere_are_not_opened(tmp_path: Path) -> None:
    """Opening a pipe would wait for ever."""
    folder = (tmp_path / COLLECT).parent
    folder.mkdir(parents=True)
    os.mkfifo(folder / "pipe.csv")
    (folder / "folder.csv").mkdir()
    (folder / "link.csv").symlink_to(tmp_path / "nowhere")
    found = neusight(tmp_path, f"{OPS}\n{GOOD}\n")
    assert found.dropped == {"file unreadable: not a regular file": 2}


def _nested(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(m=[[1, 2]])


def _texts(table: pd.DataFrame) -> pd.DataFrame:
    return table.astype(str).assign(latency="fast")


def _dates(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(latency=pd.Timestamp("2024-01-01"))


@pytest.mark.parametrize("change", [_nested, _texts, _dates])
def test_parquet_columns_of_other_kinds_give_no_rows(
    tmp_path: Path, change: Callable[[pd.DataFrame], pd.DataFrame]
) -> None:
    good = pd.DataFrame([{"framework": "VLLM", "version": "1", "latency": 0.25}])
    good = good.assign(gemm_dtype="bfloat16", m=3, n=5, k=7)
    path = put(tmp_path / "systems/data/h100_sxm/gemm/vllm/1/gemm_perf.parquet", b"")
    change(good).to_parquet(path)
    other = path.with_name("gemm_perf.csv")
    good.to_csv(other, index=False)
    found = read_source("aiconfigurator", tmp_path, Hints())
    assert list(found.rows["gemm"]["time_us"]) == [250.0]
    assert sum(found.dropped.values()) == 1


BOMB = "- &a0 [x]\n" + "".join(f"- &a{i + 1} [{f'*a{i},' * 9}]\n" for i in range(20))
ODD_YAML = {
    "tags": "- !!bool x\n",
    "a time": "- !!timestamp x\n",
    "a cycle": "a: &a [*a]\n",
    "depth": "[" * 1000,
    "half": "{1: 2",
    "a day too many": "- 2020-13-45\n",
    "a bomb": BOMB + "- {file: run.txt, gpu: *a20, gpu_variant: *a20, nic: *a20, nodes: *a20}\n",
}


@pytest.mark.parametrize("text", ODD_YAML.values(), ids=ODD_YAML)
def test_an_odd_sources_yaml_states_nothing(tmp_path: Path, text: str) -> None:
    """Aliases, tags and lists where a word belongs; the flags still count."""
    log = "all_reduce_perf\n 1024 256 float sum -1 30.5 0.03 0.05 0 29.5 0.03 0.05 0\n"
    put(tmp_path / "run.txt", log)
    put(tmp_path / "sources.yaml", text)
    hints = Hints(gpu="t4", nodes=2, gpus_per_node=4)
    rows = read_source("nccl-tests", tmp_path, hints).rows["collective"]
    assert list(rows["time_us"]) == [30.5, 29.5]
    assert set(rows["world_size"]) == {8}


@pytest.mark.parametrize(
    "args",
    [
        {"Input Dims": [[-4, 8], [8, 16]], "Input type": ["float", "float"]},
        {"Input Dims": [[10**30, 8], [8, 16]], "Input type": ["float", "float"]},
        {"Input Dims": [["x", 8], [8, 16]], "Input type": ["float", "float"]},
        {"Input Dims": "none", "Input type": 3},
        {"Input Dims": [[4, 8]], "Input type": ["float", "float"]},
        {},
    ],
)
def test_impossible_shapes_of_a_trace_are_counted(tmp_path: Path, args: dict[str, object]) -> None:
    common = {"ph": "X", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    ids = {"External id": 3, "correlation": 1}
    events = [{**common, "cat": "cpu_op", "name": "aten::mm", "args": ids | args}]
    events += [{**common, "cat": "kernel", "name": "k", "args": ids}]
    found = {"deviceProperties": [{"name": "Tesla T4"}], "traceEvents": events}
    put(tmp_path / "trace.json", json.dumps(found))
    dropped = read_source("kineto", tmp_path, Hints()).dropped
    assert list(dropped.values()) == [1]
    assert all(reason.startswith("op ") for reason in dropped)

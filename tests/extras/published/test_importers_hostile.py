"""Files in their owners' forms, whole and made to hurt: rows, counted lines or one line."""

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from typed_commands import typed
from typer.testing import CliRunner

from itercast.capture.plan import ParallelPlan
from itercast.command_line import app
from itercast.extras.imports.base import MAX_REASONS, Hints, Imported
from itercast.extras.imports.sources import read_source
from itercast.extras.published.mapped.source import load
from itercast.extras.published.readers import MAPPINGS
from itercast.learners.features.table import columns
from itercast.microbench.ops import families
from itercast.microbench.store import read_rows

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
    path.stem: load(path).tables[0].files[0].replace("*", "x") for path in MAPPINGS.glob("*.yaml")
}
# The readers in Python, and mappings of each form of file.
READERS = ("nccl-tests", "kineto", "iterations", "kineto-traces", "neusight", "aiconfigurator")
READERS += ("megatron-lm", "kernelbench", "liger-kernel", "deepbench")
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


@pytest.mark.parametrize("source", READERS)
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
    typed(*words)
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


ROWS_OF_LN = "OPName,Latency,Device,Torch Version,CUDNN Version,Kernel Name,CUDA Version"
T4 = "Tesla T4,p2.1.0,8902,some_kernel,cu121"
COLLECTED = "scripts/asplos/data/dataset/train/collect"


def packed(path: Path, text: str) -> Path:
    """A file with its folders; packed where its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def holds(row: Mapping[str, Any], **expected: Any) -> None:
    """Every expected value stands in the row."""
    assert {name: row[name] for name in expected} == expected


def test_labels_of_neusight_are_iterations_that_can_be_built(tmp_path: Path) -> None:
    """Global batch 8 over dp=4 is 2 a replica; the configuration travels with the row."""
    base = tmp_path / "scripts/asplos"
    packed(base / "data/DLmodel_configs/tiny.json", '{"architectures": ["GPT2LMHeadModel"]}')
    label = json.dumps({"e2e_latency": 3.0, "fw_latency": 1.0, "bwall_latency": 2.0})
    for name in ("tiny-train-64-8-dp4", "tiny-inf-64-8-fusion", "tiny-train-64-8-pp4_1"):
        packed(base / "label/NVIDIA_A100-SXM4-40GB" / f"{name}.json", label)
    packed(base / "label/NVIDIA_A100-SXM4-40GB/tiny-train-64-9-dp4.json", label)
    packed(base / "label/NVIDIA_A100-SXM4-40GB/other-train-64-8.json", label)
    packed(base / "label/Sharp_Calculator/tiny-train-64-8.json", label)
    found = read_source("neusight", tmp_path, Hints())
    rows = found.rows["iteration"].set_index("plan")
    holds(rows.loc["dp=4"], batch=2, seq=64, world_size=4, mode="train", time_us=3000.0)
    holds(rows.loc["dp=4"], loss="none", optimizer="none", attn="eager", compile=False)
    holds(rows.loc["dp=4"], forward_us=1000.0, backward_us=2000.0, gpu="a100-sxm-40gb")
    holds(rows.loc[""], batch=8, mode="infer", compile=True, engine="compile", world_size=1)
    assert ParallelPlan.parse("pp=4,micro=1").world_size == rows.loc["pp=4,micro=1", "world_size"]
    assert json.loads(rows.loc[""]["hf_config"]) == {"architectures": ["GPT2LMHeadModel"]}
    assert found.dropped == {
        "unknown gpu: 'Sharp_Calculator'": 1,
        "batch is not a positive whole number": 1,
        "no readable file '../../data/DLmodel_configs/other.json'": 1,
    }


def test_import_writes_a_dataset_and_again_the_same(tmp_path: Path) -> None:
    """Rows, cards with licence and hardware, counts; a second import replaces the first."""
    packed(
        tmp_path / COLLECTED / "ln/p2.1.0/x.csv",
        f"{ROWS_OF_LN},B,H\nln,1,{T4},4,6\nln,-1,{T4},4,6\n",
    )
    packed(tmp_path / ".git/HEAD", "ref: refs/heads/main\n")
    packed(tmp_path / ".git/refs/heads/main", "0123456789" * 4)
    out = tmp_path.with_name("imported")
    words = ["import", "neusight", str(tmp_path), "--out", str(out), "--json"]
    for _ in range(2):
        result = typed(*words)
    report = json.loads(result.output)
    assert report["rows"] == {"norm": 1}
    assert report["dropped"] == {"time is not a positive number below 1e+12 us": 1}
    assert len(read_rows([out], "norm")) == 1
    card = yaml.safe_load((out / "norm/t4/neusight/card.yaml").read_text())
    assert (card["licence"], card["commit"]) == ("MIT", "0123456789" * 4)
    assert "https://github.com/sitar-lab/NeuSight" in card["where"]
    assert card["hardware"]["name"] == "t4"
    assert card["rows"] == {"ok": 1}
    assert card["dropped_in_this_import"] == report["dropped"]

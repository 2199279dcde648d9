"""Outputs of nccl-tests as people keep them: text, a launcher's prefix, JSON, several runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from nccl_logs import wrong_rows
from typed_commands import typed

from itercast.extras.imports.base import Hints, Imported
from itercast.extras.nccl.nccl_text import version
from itercast.extras.published.readers import read_source
from itercast.microbench.hardware.node import load_node
from itercast.microbench.store import read_rows

LOG = """\
# nccl-tests version 2.17.4 nccl-headers=22907 nccl-library=22907
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 1024 maxBytes 2048 step: 2(factor) warmup iters: 1 iters: 20
# Using devices
#  Rank  0 Group  0 Pid  11 on     hosta device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  12 on     hosta device  1 [0000:05:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  11 on     hostb device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  12 on     hostb device  1 [0000:05:00] NVIDIA H100 80GB HBM3
#
#                                        out-of-place                   in-place
#  size  count   type  redop  root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
#   (B) (elements)                   (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)
      0      0  float    sum    -1   0.10   0.00   0.00      0   0.10   0.00   0.00      0
   1024    256  float    sum    -1   30.5   0.03   0.05      0   29.5   0.03   0.05    N/A
   2048    512  float    sum    -1   31.5   0.06   0.09      3   1.5e+2  0.01   0.02      0
# Out of bounds values : 0 OK
"""
HEAD = LOG.splitlines()[10]
HERE = Hints(gpu="a100-sxm-80gb", nodes=2, gpus_per_node=8)


def imported(folder: Path, text: str, hints: Hints = Hints(), name: str = "run.txt") -> Imported:  # noqa: B008
    """One output, imported."""
    (folder / name).write_text(text)
    return read_source("nccl-tests", folder, hints)


def times(found: Imported) -> list[tuple[int, bool, float, str]]:
    """What the rows measured."""
    columns = ["message_bytes", "in_place", "time_us", "status"]
    return list(found.rows["collective"][columns].itertuples(index=False, name=None))


EXPECTED = [
    (1024, False, 30.5, "ok"),
    (1024, True, 29.5, "ok"),
    (2048, False, 31.5, "error"),  # three wrong values
    (2048, True, 150.0, "ok"),
]


@pytest.mark.parametrize(
    "prefix",
    [
        *("", "0: ", "[1,0]<stdout>:", "[0]: ", "[0] ", "2026-11-26T08:00:01.123Z "),
        *("[pod/mpi-0/worker] ", "mpi-0 | ", "12 ", "Nov 26 08:00:01 host[123]: "),
    ],
)
def test_text_with_and_without_a_launchers_prefix(tmp_path: Path, prefix: str) -> None:
    """Two hosts with two ranks each, by the log's own rank lines; an empty message is counted."""
    text = "".join(prefix + line for line in LOG.splitlines(keepends=True))
    found = imported(tmp_path, text)
    assert times(found) == EXPECTED
    assert found.dropped == {"message of 0 bytes": 1}
    row = found.rows["collective"].to_dict("records")[0]
    expected: dict[str, Any] = {"op": "all_reduce", "gpu": "h100-sxm-80gb", "world_size": 4}
    expected |= {"ranks_per_node": 2, "dtype": "fp32", "stack": "nccl-2.29.7", "samples": 20}
    expected |= {"origin": "run.txt:14", "link": "network", "timer": "device"}
    assert {name: row[name] for name in expected} == expected


def test_links_within_a_node_are_what_its_kind_has(tmp_path: Path) -> None:
    """A bridge joins two; of a card whose node nobody states there may be none."""
    text = "".join(line for line in LOG.splitlines(keepends=True) if "Rank" not in line)
    asked = [("a100-pairwise", 2), ("a100-pairwise", 4), ("", 2)]
    links = []
    for name, gpus in asked:
        node = load_node(name) if name else None
        hints = Hints(gpu="a100-pcie-80gb", nodes=1, gpus_per_node=gpus, node=node)
        rows = imported(tmp_path, text, hints).rows["collective"]
        links += list(rows[["node", "link"]].drop_duplicates().itertuples(index=False, name=None))
    assert links == [("a100-pairwise", "pairwise"), ("a100-pairwise", "bridged"), ("", "pcie")]


def test_a_rack_is_one_link_domain(tmp_path: Path) -> None:
    """Ranks count by domain of 72 GPUs, not by host of four: 2 hosts are one, 32 two racks."""
    text = "".join(line for line in LOG.splitlines(keepends=True) if "Rank" not in line)
    found = []
    for hosts in (2, 32):
        hints = Hints(gpu="gb200", nodes=hosts, gpus_per_node=4, node=load_node("gb200-nvl72"))
        row = imported(tmp_path, text, hints).rows["collective"].iloc[0]
        found.append((row["world_size"], row["ranks_per_node"], row["link"]))
    assert found == [(8, 8, "nvlink"), (128, 64, "network")]


def test_json_says_the_same_as_text(tmp_path: Path) -> None:
    """The report that -J writes, where an infinite rate is a bare inf."""
    ranks = [(host, i) for host in ("hosta", "hostb") for i in (0, 1)]
    devices = [{"hostname": h, "device": i, "device_info": "NVIDIA H100 PCIe"} for h, i in ranks]

    def result(size: int, out: tuple[float, Any], inside: tuple[float, Any]) -> dict[str, Any]:
        names = (("out_of_place", out), ("in_place", inside))
        both = {k: {"time": t, "alg_bw": 1.5, "nwrong": n} for k, (t, n) in names}
        return {"size": size, "count": size // 4, "type": "float", **both}

    results = [result(0, (0.1, 0), (0.1, 0)), result(1024, (30.5, 0.0), (29.5, None))]
    report = {"version": 2, "args": ["/opt/build/all_reduce_perf", "-b", "8"]}
    report |= {"env": ["A=b"], "nccl_version": 22907}
    report |= {"config": {"iterations": 20, "devices": devices}}
    report |= {"results": [*results, result(2048, (31.5, 3.0), (150.0, 0.0))]}
    text = json.dumps(report).replace('"alg_bw": 1.5', '"alg_bw":inf', 1)
    found = imported(tmp_path, text, name="run.json")
    assert times(found) == EXPECTED
    row = found.rows["collective"].to_dict("records")[0]
    expected: dict[str, Any] = {"op": "all_reduce", "gpu": "h100-pcie-80gb", "world_size": 4}
    expected |= {"ranks_per_node": 2, "stack": "nccl-2.29.7", "samples": 20}
    assert {name: row[name] for name in expected} == expected


def gathered(log: str) -> str:
    """The log of an all_reduce as that of an all_gather, whose bus rates are half as high."""
    log = log.replace("all_reduce", "all_gather").replace("sum ", "none")
    return log.replace("0.05 ", "0.02 ").replace("0.09 ", "0.05 ")


def test_several_runs_in_one_log_keep_their_collective(tmp_path: Path) -> None:
    second = gathered(LOG).replace("30.5   0.03", "99.0   0.01")
    rows = imported(tmp_path, LOG + second).rows["collective"]
    found = rows[~rows["in_place"] & (rows["message_bytes"] == 1024)]
    assert dict(zip(found["op"], found["time_us"], strict=True)) == {
        "all_reduce": 30.5,
        "all_gather": 99.0,
    }


COMMANDS = ("srun ./all_reduce_perf -b 1K", "srun ./all_gather_perf -b 1K")
TABLE = LOG[LOG.index("#  size") :]


def test_a_command_after_rows_begins_a_run(tmp_path: Path) -> None:
    """Without "Collective test starting", as older versions print; and a head without any name."""
    text = f"{COMMANDS[0]}\n{TABLE}{COMMANDS[1]}\n{gathered(TABLE)}"
    rows = imported(tmp_path, text, HERE).rows["collective"]
    assert rows["op"].value_counts().to_dict() == {"all_reduce": 4, "all_gather": 4}
    (tmp_path / "glued").mkdir()
    glued = imported(tmp_path / "glued", f"{COMMANDS[0]}\n{TABLE}{TABLE}", HERE)
    assert len(glued.rows["collective"]) == 4
    assert glued.dropped["collective is not stated: the file's name or a sources.yaml can"] == 4


@pytest.mark.parametrize(
    "text",
    [
        LOG.replace("1024    256", "24    256"),  # the line's begin is lost
        LOG.replace("30.5 ", "0.5 "),
        LOG.replace("#  Rank  1", "#"),  # one of the ranks is lost
        f"{COMMANDS[1]}\n{LOG}",  # two collectives before one table
    ],
)
def test_lines_and_headers_that_do_not_fit_are_not_stored(tmp_path: Path, text: str) -> None:
    found = imported(tmp_path, text)
    assert found.dropped["line of an unknown layout"] >= 1
    stored = times(found) if found.rows else []
    assert set(stored) <= set(EXPECTED) and len(stored) <= 2


def test_glued_prefixed_and_cut_logs_store_nothing_wrong() -> None:
    """Two hundred here; `python tests/endurance/nccl_logs.py` reads 10,000."""
    assert wrong_rows(200, seed=0) == 0


@pytest.mark.parametrize(
    ("head", "line", "expected"),
    [
        ("#  size type redop time algbw busbw", " 1024 float sum 30.5 0.03 0.05", [30.5]),
        (
            "# size count type redop time algbw busbw error time algbw busbw error",
            " 1024 256 float sum 30.5 0.03 0.05 2e-07 29.5 0.03 0.05 2e-07",
            [30.5, 29.5],
        ),
        (
            "# size count type redop root time algbw busbw #wrong i_min i_max i_p99 i_cv% "
            "time algbw busbw #wrong i_min i_max i_p99 i_cv%",
            " 1024 256 float sum -1 30.5 .03 .05 0 1 2 3 4 29.5 .03 .05 0 1 2 3 4",
            [30.5, 29.5],
        ),
        ("", " 1024 256 float sum -1 30.5 0.03 0.05 0 29.5 0.03 0.05 0", [30.5, 29.5]),
        (HEAD, " 1024 256 half sum -1 30.5 0.03 0.05 0 29.5 0.03", [30.5]),  # cut off
    ],
)
def test_times_stand_where_the_head_says(
    tmp_path: Path, head: str, line: str, expected: list[float]
) -> None:
    text = f"all_reduce_perf\n{head}\n{line}\n"
    assert [row[2] for row in times(imported(tmp_path, text, HERE))] == expected


def test_times_of_the_host_are_no_times_of_the_gpu(tmp_path: Path) -> None:
    found = imported(tmp_path, LOG.replace("  time", "  cputime"))
    assert found.rows == {}
    assert found.dropped == {"message of 0 bytes": 1, "time of the host, not of the GPU": 2}


def test_sources_yaml_states_hardware_and_doubts(tmp_path: Path) -> None:
    """A network rate, the instance and its node file; who published it."""
    bare = "\n".join(LOG.splitlines()[9:])
    entry = {"file": "run.txt", "gpu": "a100", "gpu_variant": "A100-SXM4-40GB (2x p4d.24xlarge)"}
    entry |= {"nodes": 2, "gpus_per_node": 8, "collective": "all_reduce", "nic": "4 x 100 Gb/s"}
    entry |= {"nic_bytes_per_s_per_gpu": 6.25e9, "from": "https://example.org", "doubts": "one run"}
    (tmp_path / "sources.yaml").write_text(yaml.safe_dump([entry]))
    row = imported(tmp_path, bare).rows["collective"].to_dict("records")[0]
    expected: dict[str, Any] = {"gpu": "a100-sxm-40gb", "node": "aws-p4d", "world_size": 16}
    expected |= {"network_bytes_per_s": 6.25e9, "link": "network", "doubts": "one run"}
    expected |= {"published": "https://example.org", "ranks_per_node": 8}
    assert {name: row[name] for name in expected} == expected


def test_a_table_that_contradicts_its_average_is_told_from_no_table(tmp_path: Path) -> None:
    """Bus rates of 0.05, 0.05, 0.09 and 0.02 GB/s: 0.0525 on average, not 9."""
    table = [line for line in LOG.splitlines() if "   0.10 " not in line]
    text = "\n".join([*table, "# Avg bus bandwidth    : {}\n"])
    assert len(imported(tmp_path, text.format(0.0525)).rows["collective"]) == 4
    with pytest.raises(ValueError, match="no table of nccl-tests whose numbers fit together in it"):
        imported(tmp_path, text.format(9))
    with pytest.raises(ValueError, match="no table of nccl-tests in it"):
        imported(tmp_path, "make: *** [all] Error 2\n")


def test_what_nobody_states_is_counted_and_flags_supply_it(tmp_path: Path) -> None:
    bare = "all_reduce_perf\n" + "\n".join(LOG.splitlines()[9:]) + "\n"
    (tmp_path / "in").mkdir()
    found = imported(tmp_path / "in", bare)
    assert found.rows == {}
    assert found.dropped["gpu is not stated: an option or a sources.yaml can"] == 4
    words = ["import", "nccl-tests", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    typed(*words, rc=1)
    flags = ["--node", "aws-p5", "--nodes", "4"]
    typed(*words, *flags)
    rows = read_rows([tmp_path / "out"], "collective")
    assert set(rows["gpu"]) == {"h100-sxm-80gb"}
    assert set(rows["world_size"]) == {32}
    assert set(rows["node"]) == {"aws-p5"}
    assert set(rows["network_bytes_per_s"]) == {50e9}  # 32 x 100 Gb/s over 8 GPUs


def test_versions_of_nccl_by_code() -> None:
    assert (version(22907), version(2708)) == ("2.29.7", "2.7.8")

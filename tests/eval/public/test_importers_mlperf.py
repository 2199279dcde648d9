"""Results of MLPerf Training: what a step is taken from, and the word for what cannot be said."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest

from itercast.eval.public.readers import read_source
from itercast.microbench.importers.base import Hints, Imported
from itercast.microbench.plan import ParallelPlan

CELL = {
    **{"version": "v3.1", "submitter": "X", "system": "dgxh100_n2", "benchmark": "bert"},
    **{"accelerator": "NVIDIA H100-SXM5-80GB", "nodes": "2", "per_node": "8"},
    **{"framework": "NGC PyTorch 23.09", "global_batch": "1536", "grad_accum": "1"},
    **{"step_ms_from_throughput": "103.5", "epoch_ms_median": ""},
}
RESNET = {"benchmark": "resnet", "step_ms_from_throughput": "", "epoch_ms_median": "1281167"}


def imported(folder: Path, *cells: dict[str, str]) -> Imported:
    """The cells as a table, imported."""
    text = io.StringIO()
    writer = csv.DictWriter(text, sorted(CELL))
    writer.writeheader()
    writer.writerows(cells)
    (folder / "cells.csv.gz").write_bytes(gzip.compress(text.getvalue().encode()))
    return read_source("mlperf-training", folder, Hints())


def test_bert_is_taken_at_its_mean_length(tmp_path: Path) -> None:
    """1536 samples over 16 GPUs are 96 each; fp8 on Hopper, fp16 before."""
    a100 = CELL | {"accelerator": "NVIDIA A100-SXM4-80GB", "system": "y", "nodes": "1"}
    found = imported(tmp_path, CELL, a100)
    row, older = found.rows["iteration"].to_dict("records")
    expected = {"gpu": "h100-sxm-80gb", "batch": 96, "seq": 256, "dtype": "fp8"}
    expected |= {"plan": "dp=16,node=dgx-h100", "time_us": 103_500.0, "optimizer": "lamb"}
    expected |= {"engine": "compile+graph"}
    assert {name: row[name] for name in expected} == expected
    assert json.loads(row["hf_config"])["num_hidden_layers"] == 24
    assert (older["dtype"], older["plan"], older["doubts"]) == ("fp16", "dp=8", "")
    assert ParallelPlan.parse(row["plan"]).world_size == 16


def test_a_list_of_containers_is_no_stack(tmp_path: Path) -> None:
    """Bert runs none of HugeCTR's kernels, although its submission names HugeCTR's container."""
    listed = "NGC MXNet 23.09, NGC PyTorch 23.09, NGC HugeCTR 23.09"
    found = imported(tmp_path, CELL, CELL | {"framework": listed, "system": "y"})
    one, other = found.rows["iteration"].to_dict("records")
    assert (other["framework"], other["stack"]) == (listed, "")
    assert other["stack"] == one["stack"]


def test_an_epoch_of_resnet_is_as_many_steps_as_batches(tmp_path: Path) -> None:
    """1 ms an image, so 1536 ms a batch of 1536; accumulation is said."""
    found = imported(tmp_path, CELL | RESNET | {"grad_accum": "2", "system": "z"})
    (row,) = found.rows["iteration"].to_dict("records")
    expected = {"time_us": 1_536_000.0, "plan": "dp=16,accumulate=2", "optimizer": "sgd"}
    expected |= {"memory_format": "nhwc", "dtype": "fp16"}
    assert {name: row[name] for name in expected} == expected
    assert "network not known" in row["doubts"]


@pytest.mark.parametrize(
    ("benchmark", "case"), [("dlrm", "dlrm-mlperf"), ("dlrm_dcnv2", "dlrm-dcnv2")]
)
def test_recommenders_spread_their_tables_over_all_gpus(
    tmp_path: Path, benchmark: str, case: str
) -> None:
    """55,296 samples over 8 GPUs are 6,912 each; the sharding, which is not stated, is a doubt."""
    one = CELL | {"benchmark": benchmark, "nodes": "1", "global_batch": "55296", "system": "x"}
    found = imported(tmp_path, one | {"step_ms_from_throughput": "4.085"})
    (row,) = found.rows["iteration"].to_dict("records")
    expected = {"case": case, "plan": "dp=8,shard=greedy", "batch": 6912, "stack": "hugectr"}
    expected |= {"time_us": 4085.0, "dtype": "fp16", "optimizer": "sgd", "engine": "compile+graph"}
    assert {name: row[name] for name in expected} == expected
    assert "hf_config" not in row and "sharding of tables" in row["doubts"]
    assert ParallelPlan.parse(row["plan"]).shard == "greedy"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"benchmark": "ssd"}, "ssd: no configuration for the model: RetinaNet"),
        ({"benchmark": "llama2_70b_lora"}, "llama2_70b_lora: only a part of the weights"),
        ({"benchmark": "chess"}, "unknown benchmark: 'chess'"),
        ({"accelerator": "Gaudi2"}, "unknown gpu: 'Gaudi2'"),
        ({"step_ms_from_throughput": ""}, "bert: throughput is not logged"),
        ({"framework": "tinygrad, commit 1"}, "software is not known: tinygrad"),
        ({"per_node": "4"}, "hosts of 4 GPUs, whose links are not known"),
        ({"per_node": "0"}, "number of GPUs is not stated"),
        ({"global_batch": "1537"}, "global batch is not a multiple of dp"),
    ],
)
def test_what_cannot_be_said_is_counted_by_its_word(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    found = imported(tmp_path, CELL, CELL | change)
    assert len(found.rows["iteration"]) == 1
    ((said, count),) = found.dropped.items()
    assert said.startswith(reason)
    assert count == 1


def test_a_power_limit_of_its_own_is_a_doubt(tmp_path: Path) -> None:
    found = imported(tmp_path, CELL | {"accelerator": "NVIDIA A100-SXM-80GB CTS", "system": "x"})
    (row,) = found.rows["iteration"].to_dict("records")
    assert row["gpu"] == "a100-sxm-80gb"
    assert row["doubts"].startswith("custom cooling and power limit")


def test_eos_is_made_of_dgx_h100(tmp_path: Path) -> None:
    found = imported(tmp_path, CELL | {"system": "eos_n2_ngc23.09"})
    (row,) = found.rows["iteration"].to_dict("records")
    assert (row["plan"], row["doubts"]) == ("dp=16,node=dgx-h100", "")

"""Files of published sources whose cards are renamed to other known GPUs: imported all the same."""

from __future__ import annotations

import gzip
from pathlib import Path

import pandas as pd
import pytest
from public_data import PUBLIC, needs_public

from itercast.eval.public.readers import read_source
from itercast.microbench.importers.base import Hints

pytestmark = needs_public()
LINES = 4000  # of a text file that are copied
# source: (a file, by a glob; (name there, another card)... ; the card's hardware file)
RENAMED = {
    "neusight": (
        "NeuSight/**/train/collect/linear/*/*.csv*",
        [("NVIDIA A100-PCIE-40GB", "NVIDIA H800")],
        "h800-sxm-80gb",
    ),
    "aiconfigurator": (
        "aiconfigurator/systems/data/h100_sxm/gemm/*/*/gemm_perf.parquet",
        [("h100_sxm", "h200_sxm")],
        "h200-sxm-141gb",
    ),
    "aiconfigurator-more": (
        "aiconfigurator-more/systems/data/h100_sxm/comm/*/*/*.parquet",
        [("h100_sxm", "NVIDIA H800")],
        "h800-sxm-80gb",
    ),
    "vidur": (
        "vidur/data/profiling/network/a100_dgx/all_reduce.csv",
        [("a100_dgx", "b200_dgx")],
        "b200-sxm",
    ),
    "pipeweave": (
        "pipeweave/dataset/collective/H20/all_reduce.csv.gz",
        [("H20/", "H200/")],
        "h200-sxm-141gb",
    ),
    "deepbench": (
        "deepbench/results/train/DeepBench_NV_P100__Results_FP32.csv",
        [("P100", "A6000")],
        "rtx-a6000",
    ),
    "gpu-benches": (
        "gpu-benches/small_kernels.csv.gz",
        [("a100_80,", "NVIDIA Blackwell GPU (B200-SXM-180GB),")],
        "b200-sxm",
    ),
    "llmcompass": (
        "llmcompass/ae/figure5/ab/real_hardware/matmul_A100.csv",
        [("A100", "H100")],
        "h100-sxm-80gb",
    ),
    "llmservingsim": (
        "llmservingsim/profiler/*/*/RTX3090/*/Llama-3.1-8B/tp1/layers.csv.gz",
        [("RTX3090", "RTX 5090")],
        "rtx-5090",
    ),
    "miopen": (
        "miopen/gfx90a68-MI210.csv.gz",
        [("gfx90a68-MI210", "gfx942130-MI300X")],
        "mi300x",
    ),
    "liger-kernel": (
        "liger-kernel/all_history.csv.gz",
        [("NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X VF")],
        "mi300x",
    ),
    "cudnn-frontend": (
        "cudnn-frontend/benchmark/*/results/dsv3/gb200/*.csv",
        [("gb200", "h100"), ("GB200", "H100 80GB HBM3")],
        "h100-sxm-80gb",
    ),
    "kernelbench": (
        "kernelbench/timing_all_history.csv.gz",
        [("NVIDIA H100 80GB HBM3", "A40")],
        "a40",
    ),
    "peft": ("peft/method_comparison.csv.gz", [("NVIDIA L40S", "NVIDIA L4")], "l4"),
    "deepgemm": ("deepgemm/gemm.csv", [("H800", "H20")], "h20"),
    "vtrain": (
        "vtrain/trace/a100/AR_GPU8_1M_1024M_LUT.gz",
        [("trace/a100", "trace/h100")],
        "h100-sxm-80gb",
    ),
}


def renamed(folder: Path, name: str) -> Path:
    """The first file of a source in its folder, with another card in path and text."""
    pattern, names, _ = RENAMED[name]
    file = sorted(PUBLIC.glob(pattern))[0]
    place = file.relative_to(PUBLIC).as_posix()
    parquet = file.suffix == ".parquet"
    data = file.read_bytes()
    text = "" if parquet else (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    text = "".join(text.splitlines(keepends=True)[:LINES])
    for theirs, other in names:
        place, text = place.replace(theirs, other), text.replace(theirs, other)
    copy = folder / place.removesuffix(".gz")
    copy.parent.mkdir(parents=True)
    copy.write_bytes(data if parquet else text.encode())
    if name == "kernelbench":
        for archive in (PUBLIC / name).glob("problems-*.tar.gz"):
            (copy.parent / archive.name).symlink_to(archive)
        copy.write_bytes(b"")
        (copy.parent / file.name).write_bytes(gzip.compress(text.encode()))
    return folder / name if (folder / name).is_dir() else folder


@pytest.mark.parametrize("name", sorted(RENAMED))
def test_cards_that_no_importer_was_written_for_are_imported(name: str, tmp_path: Path) -> None:
    """Rows of the other card, and no more lines left out than of the card that is renamed."""
    found = read_source(name, renamed(tmp_path, name), Hints())
    gpus = pd.concat([rows["gpu"] for rows in found.rows.values()])
    assert RENAMED[name][2] in set(gpus)
    assert not [reason for reason in found.dropped if "unknown gpu" in reason]

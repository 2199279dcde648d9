"""The public tables themselves through their importers, where they are at hand."""

import json
from dataclasses import asdict, fields
from functools import cache

import numpy as np
import pandas as pd
import pytest
from public_data import PUBLIC, needs_public

from itercast.capture.cases.registry import case_names
from itercast.capture.opcall import OpCall, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import priceable
from itercast.extras.imports.base import Hints, Imported
from itercast.extras.imports.sources import read_source
from itercast.learners.features.table import feature_table, is_number
from itercast.learners.known_bundles import find_bundle, find_gpu
from itercast.microbench.hardware.node import node_names
from itercast.microbench.hardware.spec import gpu_names, load_gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.family import parameter_types
from itercast.microbench.ops.matrix.recurrent import CALL, Recurrent
from itercast.microbench.ops.step.collective import OPS
from itercast.names import importers

pytestmark = needs_public()
LARGE = ("neusight", "aiconfigurator", "aiconfigurator-more", "miopen", "vidur")
READ = [
    pytest.param(name, marks=pytest.mark.slow if name in LARGE else ())
    for name in sorted(importers())
    if name != "kineto"  # traces, which nobody published
]


@cache
def imported(name: str) -> Imported:
    """A source's rows; skips where its folder is not at hand."""
    folder = PUBLIC / ("NeuSight" if name == "neusight" else name)
    if not folder.is_dir():
        pytest.skip(f"no public data at {folder}")
    return read_source(name, folder, Hints())


@pytest.mark.parametrize("name", READ)
def test_all_files_are_read_and_rows_are_what_learners_take(name: str) -> None:
    """Every parameter stands in every row, known GPUs, finite features.

    No row is twenty times faster than its roofline. Rows and reasons are printed with -s.
    """
    found = imported(name)
    print(name, {k: len(v) for k, v in found.rows.items()}, dict(found.dropped))
    wrong = ("unreadable", "wrong number of columns")
    assert found.rows and not [r for r in found.dropped if any(word in r for word in wrong)]
    for family, rows in found.rows.items():
        assert set(rows["gpu"]) <= set(gpu_names())
        if family in ("iteration", "host"):
            continue
        types = parameter_types(families()[family].params)
        names = [name for name, kind in types.items() if kind is not float]
        known = rows[[n for n in names if n in rows]]  # a rate may be unknown
        assert known.notna().all().all() and "f" not in {t.kind for t in known.dtypes}, family
        some = rows.sample(min(len(rows), 5000), random_state=0)
        gpus = {gpu: load_gpu(gpu) for gpu in some["gpu"].unique()}
        table, roofline_us = feature_table(some, families()[family], gpus)
        assert all(np.isfinite(v).all() for v in table.values() if is_number(v)), family
        assert (roofline_us > 0).all()
        assert (some["time_us"].to_numpy() > 0.05 * roofline_us).all(), family


@pytest.mark.parametrize("name", READ)
def test_collectives_and_iterations_can_be_forecast(name: str) -> None:
    """Our nodes, links and ops; plans that parse; a configuration, a model of timm or a case."""
    rows = imported(name).rows
    if "collective" in rows:
        found = rows["collective"]
        assert set(found["link"]) <= {"bridged", "network", "nvlink", "pairwise", "pcie"}
        assert set(found["node"]) - {""} <= set(node_names())
        assert (found["world_size"] >= found["ranks_per_node"]).all()
        assert set(found["op"]) <= {*OPS, "moe_dispatch", "moe_combine"}
    if "iteration" in rows:
        found = rows["iteration"]
        for plan, mine in found.groupby("plan"):
            assert set(mine["world_size"]) == {ParallelPlan.parse(str(plan)).world_size}
        assert set(found["builder"]) <= {"hf", "timm", "case", "problem", "layer"}
        assert set(found["case"][found["builder"] == "case"]) <= set(case_names())
        if (built := found[found["builder"] == "hf"]).size:
            assert all("architectures" in json.loads(text) for text in built["hf_config"].unique())
        assert set(found["mode"]) <= {"train", "infer"}
        known = {"adamw", "adamw_fused", "lamb", "muon", "sgd", "sgd_momentum", "none"}
        assert {name.removesuffix("+clip") for name in found["optimizer"]} <= known


TABLES = {
    "iterations/llm_foundry.csv": "",
    "iterations/others.csv": "",
    "miopen": "*.csv.gz",
    "deepgemm": "gemm.csv",
    "aiconfigurator": "**/*.parquet",
}


@pytest.mark.slow
@pytest.mark.parametrize("place", TABLES)
def test_every_line_is_a_row_or_counted(place: str) -> None:
    name, path, files = place.partition("/")[0], PUBLIC / place, TABLES[place]
    found = imported(name) if files else read_source(name, path, Hints())
    tables = [
        pd.read_parquet(p, columns=["latency"]) if p.suffix == ".parquet" else pd.read_csv(p)
        for p in (path.glob(files) if files else [path])
    ]
    assert sum(map(len, found.rows.values())) + sum(found.dropped.values()) == sum(map(len, tables))


@needs_public("flashsparse")
def test_sparse_products_without_a_model_take_what_no_cache_holds() -> None:
    """No number is fitted. A row read for each value would be 2.3 times off in geometric mean."""
    rows = imported("flashsparse").rows["sparse"].query("stack == 'torch'")
    bundle = find_bundle("h100-pcie-80gb")[1]
    book = PriceBook(bundle, find_gpu("h100-pcie-80gb", bundle), 0)
    calls = [
        OpCall(
            op="aten.mm.default",
            args=(
                TensorSpec(shape=(row.rows, row.cols), dtype="fp32", layout="csr", nnz=row.nnz),
                TensorSpec(shape=(row.cols, row.width), dtype="fp32"),
            ),
        )
        for row in rows.itertuples()
    ]
    forecast_us = [op.duration_us for op in book.price([priceable(call) for call in calls])]
    ratio = np.log(forecast_us / rows["time_us"].to_numpy())
    print(f"mean log error {np.abs(ratio).mean():.2f}, median {np.median(ratio):+.2f}")
    assert len(rows) == 998  # of 999, one failed run
    assert np.abs(ratio).mean() < 0.6 and abs(np.median(ratio)) < 0.2


@needs_public("deepbench")
@pytest.mark.parametrize(
    ("gpu", "dtype", "middle"),
    [
        ("v100-sxm-16gb", "fp32", 1.2),
        ("v100-sxm-16gb", "fp16", 1.2),
        ("p100-pcie-16gb", "fp32", 1.4),
    ],
)
def test_recurrent_networks_without_a_model_take_their_products_and_launches(
    gpu: str, dtype: str, middle: float
) -> None:
    """How many kernels a step starts was chosen on the V100; the products' model saw none of it."""
    rows = imported("deepbench").rows["recurrent"].query("gpu == @gpu and dtype == @dtype")
    bundle = find_bundle(gpu)[1]
    book = PriceBook(bundle, find_gpu(gpu, bundle), 0)
    names = [f.name for f in fields(Recurrent)]
    calls = [
        OpCall(op=CALL, args=(), kwargs=asdict(Recurrent(**row)))
        for row in rows[names].to_dict("records")
    ]
    forecast_us = [op.duration_us for op in book.price([priceable(call) for call in calls])]
    ratio = np.log(forecast_us / rows["time_us"].to_numpy())
    print(f"{np.exp(np.median(np.abs(ratio))):.2f} times off, {np.exp(np.median(ratio)):.2f}")
    assert len(rows) == 106
    assert np.median(np.abs(ratio)) < np.log(middle)

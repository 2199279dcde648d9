"""Imports of the public measurements themselves, where they are at hand."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pandas as pd
import pytest
from public_data import PUBLIC, needs_public

from itercast.eval.public.readers import SOURCES, read_source
from itercast.learners.features.table import feature_table, is_number
from itercast.microbench.cases.registry import case_names
from itercast.microbench.hardware.node import node_names
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.importers.base import Hints, Imported
from itercast.microbench.ops import families
from itercast.microbench.ops.step.collective import OPS
from itercast.microbench.plan import ParallelPlan

FOLDERS = {"neusight": "NeuSight"}
pytestmark = needs_public()


@pytest.fixture(scope="module")
def imports() -> dict[str, Imported]:
    """Every source but traces, which nobody published."""
    names = [name for name in SOURCES if name != "kineto"]
    return {n: read_source(n, PUBLIC / FOLDERS.get(n, n), Hints()) for n in names}


def rows(imports: dict[str, Imported], family: str) -> pd.DataFrame:
    """All rows of a family."""
    found = [i.rows[family] for i in imports.values() if family in i.rows]
    return pd.concat(found, ignore_index=True)


@pytest.mark.parametrize(
    "family", ["gemm", "attention", "conv", "norm", "reduction", "elementwise", "collective"]
)
def test_rows_are_what_learners_take(imports: dict[str, Imported], family: str) -> None:
    """Every parameter stands in every row, known GPUs, finite features, a roofline above 0."""
    found = rows(imports, family)
    op = families()[family]
    names = [f.name for f in fields(op.params) if f.type != "float"]  # a rate may be unknown
    assert found[names].notna().all().all()
    assert not found[[n for n in names if found[n].dtype.kind == "f"]].columns.tolist()
    some = found.sample(min(len(found), 20_000), random_state=0)
    gpus = {name: load_gpu(name) for name in found["gpu"].unique()}
    table, roofline = feature_table(some, op, gpus)
    assert all(np.isfinite(values).all() for values in table.values() if is_number(values))
    assert (roofline > 0).all()
    assert found["time_us"].between(0.1, 1e8).all()


def test_collectives_name_our_nodes_and_links(imports: dict[str, Imported]) -> None:
    found = rows(imports, "collective")
    assert set(found["link"]) == {"bridged", "network", "nvlink", "pairwise", "pcie"}
    assert set(found["node"]) - {""} <= set(node_names())
    assert (found["world_size"] >= found["ranks_per_node"]).all()
    assert set(found["op"]) <= {*OPS, "moe_dispatch", "moe_combine"}


def test_iterations_have_plans_that_parse_and_models_to_build(imports: dict[str, Imported]) -> None:
    """World sizes agree; a row has a configuration, names a model of timm or one of our cases."""
    found = rows(imports, "iteration")
    for plan, mine in found.groupby("plan"):
        assert set(mine["world_size"]) == {ParallelPlan.parse(str(plan)).world_size}
    assert set(found["builder"]) == {"hf", "timm", "case", "problem", "layer"}
    ours = found[found["builder"] == "case"]
    assert (
        {"dlrm-criteo", "transformer-xl-base", "ssd300"} <= set(ours["case"]) <= set(case_names())
    )
    built = found[found["builder"] == "hf"]
    assert all("architectures" in json.loads(text) for text in built["hf_config"].unique())
    assert set(found["mode"]) == {"train", "infer"}
    assert set(found["optimizer"]) == {"adamw", "adamw_fused", "lamb", "sgd", "none"}
    assert set(found["attn"].dropna()) == {"sdpa", "eager"}


def test_nothing_is_lost_silently(imports: dict[str, Imported]) -> None:
    """Rows and counted reasons add up to the rows of the tables."""
    for table in ("llm_foundry.csv", "others.csv"):
        lines = len(pd.read_csv(PUBLIC / "iterations" / table, dtype=str))
        found = read_source("iterations", PUBLIC / "iterations" / table, Hints())
        assert len(found.rows["iteration"]) + sum(found.dropped.values()) == lines
    stated = imports["aiconfigurator"]
    tables = (PUBLIC / "aiconfigurator").rglob("*.parquet")
    kept = sum(len(r) for r in stated.rows.values()) + sum(stated.dropped.values())
    assert kept == sum(len(pd.read_parquet(t, columns=["latency"])) for t in tables)

"""Ops that both an H100 and an H200 measured (datasets/gpu): how their times move between them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from itercast.learners.bundle import SHIPPED, Bundle
from itercast.learners.transfer.source_gpus import _moved_us
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops import families
from itercast.microbench.store import read_rows

ROWS = Path(__file__).parents[3] / "datasets/gpu"
H100, H200 = load_gpu("h100-sxm-80gb"), load_gpu("h200-sxm-141gb")
EDGES = [0, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9]


def pairs() -> pd.DataFrame:
    """Of each op above 10 us: share of the H100's bandwidth, time on the H200 over the H100's."""
    found = []
    for name, family in families().items():
        rows = read_rows([ROWS], name)
        if rows.empty or family.on_host or "cache" not in rows or family.ranks > 1:
            continue
        rows = rows[rows["status"] == "ok"].reset_index(drop=True)
        asked = SimpleNamespace(**{c: rows[c].to_numpy() for c in rows.columns})
        memory_us = np.asarray(family.bytes_moved(asked), dtype=float) / H100.hbm_bytes_per_s * 1e6
        rows = rows.assign(share=memory_us / rows["time_us"])
        shape = [c for c in family.params.__dataclass_fields__ if c in rows] + ["cache"]
        rows[shape] = rows[shape].astype(str)
        both = (
            rows[rows["gpu"] == gpu.name].groupby(shape)[["time_us", "share"]].median()
            for gpu in (H100, H200)
        )
        one, other = both
        joined = one.assign(ratio=other["time_us"] / one["time_us"]).dropna()
        found.append(joined[joined["time_us"] > 10][["share", "ratio"]])
    return pd.concat(found, ignore_index=True)


def test_bytes_move_with_memory_and_the_rest_with_the_sms() -> None:
    """By the law within 4 %; a constant multiple of the roofline would say 0.70 of all of them."""
    ops = pairs()
    table = ops.groupby(pd.cut(ops["share"], EDGES), observed=True).median()
    memory, ones = H100.hbm_bytes_per_s / H200.hbm_bytes_per_s, np.ones(len(table))
    share, measured = table["share"].to_numpy(), table["ratio"].to_numpy()
    law = _moved_us(1 / share, ones, memory * ones, ones) * share
    print(f"{len(ops)} ops: median time on an H200 over that on an H100", table.assign(law=law))
    assert len(ops) > 400
    assert np.abs(law / measured - 1).max() < 0.04
    assert measured[0] > 0.97 and memory < 0.7


@pytest.mark.parametrize(("name", "most"), [("attention", 6), ("gemm", 6)])
def test_products_of_an_h200_too_are_moved_from_the_h100_by_its_sms(name: str, most: int) -> None:
    """No row of an H200 was learned; a multiple of the roofline would say 10 and 4 % too little."""
    rows = read_rows([ROWS], name).query("status == 'ok' and gpu == @H200.name and time_us > 10")
    asked = rows.reset_index(drop=True).assign(stack_wanted="torch-2.11")
    forecast = Bundle.load(SHIPPED).price(name, asked, {H200.name: H200})["predicted_us"]
    error = 100 * (forecast / asked["time_us"] - 1)
    print(f"{name}: {len(error)} rows, {error.abs().median():.1f} % off, bias {error.mean():+.1f}")
    assert error.abs().median() < most and abs(error.mean()) < 3

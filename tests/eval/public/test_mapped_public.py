"""The public tables themselves through their mappings, where they are at hand."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest
from public_data import PUBLIC, needs_public

from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import priceable
from itercast.eval.public.readers import MAPPINGS, READER_OF, read_source
from itercast.learners.features.table import feature_table, is_number
from itercast.learners.known_bundles import find_bundle, find_gpu
from itercast.microbench.hardware.spec import gpu_names, load_gpu
from itercast.microbench.importers.base import Hints, Imported
from itercast.microbench.opcall import OpCall, TensorSpec
from itercast.microbench.ops import families

SOURCES = sorted([*(path.stem for path in MAPPINGS.glob("*.yaml")), "kineto-traces"])
pytestmark = needs_public()


@cache
def imported(name: str) -> Imported:
    """A source's rows; skips where its folder is not at hand."""
    folder = PUBLIC / next((key for key, source in READER_OF.items() if source == name), name)
    if not folder.is_dir():
        pytest.skip(f"no public data at {folder}")
    return read_source(name, folder, Hints())


@pytest.mark.parametrize("name", SOURCES)
def test_all_files_are_read_and_rows_found(name: str) -> None:
    """Printed with -s: rows by family, lines left out by reason."""
    found = imported(name)
    print(name, {k: len(v) for k, v in found.rows.items()}, dict(found.dropped))
    assert found.rows and not [reason for reason in found.dropped if "unreadable" in reason]
    assert not [reason for reason in found.dropped if "wrong number of columns" in reason]


@pytest.mark.parametrize("name", SOURCES)
def test_rows_have_features_and_a_roofline(name: str) -> None:
    """On GPUs with a hardware file; no row is twenty times faster than its roofline."""
    for family, rows in imported(name).rows.items():
        assert set(rows["gpu"]) <= set(gpu_names())
        if family == "iteration":
            continue
        some = rows.sample(min(len(rows), 5000), random_state=0)
        gpus = {gpu: load_gpu(gpu) for gpu in some["gpu"].unique()}
        table, roofline_us = feature_table(some, families()[family], gpus)
        assert all(np.isfinite(v).all() for v in table.values() if is_number(v)), family
        assert (roofline_us > 0).all()
        assert (some["time_us"].to_numpy() > 0.05 * roofline_us).all(), family


@pytest.mark.parametrize(("name", "files"), [("miopen", "*.csv.gz"), ("deepgemm", "gemm.csv")])
def test_every_line_is_a_row_or_counted(name: str, files: str) -> None:
    found = imported(name)
    lines = sum(len(pd.read_csv(path, dtype=str)) for path in (PUBLIC / name).glob(files))
    assert sum(map(len, found.rows.values())) + sum(found.dropped.values()) == lines


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
    assert len(rows) == 999
    assert np.abs(ratio).mean() < 0.6 and abs(np.median(ratio)) < 0.2

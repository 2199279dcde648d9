"""A Gaussian process along stated_kernel: what it carries on, what it shrugs off, what it keeps."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from itercast.learners.family_model import prepare
from itercast.learners.features.table import origins
from itercast.learners.models.ensemble import cross_fit, refit
from itercast.learners.models.gaussian_process import GaussianProcess, fit_process
from itercast.learners.models.interpolate import interpolated
from itercast.learners.models.training_table import Table
from itercast.learners.models.trees import default_options
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops import families

CURVE = {0: (4.0, 24.0, 2.0), 1: (4.0, 1.0, 1.0)}


def points(sizes: np.ndarray, offset: float, who: float) -> tuple[np.ndarray, np.ndarray]:
    """A curve that saturates with size, some way above or below another's."""
    return np.c_[sizes, np.full(len(sizes), who)], offset + 2 / (1 + np.exp((sizes - 20) / 2))


def test_a_curve_carries_on_as_its_neighbour_did() -> None:
    """One curve is known to 2^29, the other, a third higher, to 2^24 only."""
    long, short = points(np.arange(10.0, 30), 0.0, 0), points(np.arange(10.0, 25), 0.3, 1)
    x, y = np.concatenate([long[0], short[0]]), np.concatenate([long[1], short[1]])
    beyond, truth = points(np.arange(25.0, 30), 0.3, 1)
    found = fit_process(x, y, CURVE).predict(beyond)
    assert np.abs(found - truth).max() < 0.1
    assert np.abs(short[1][-1] - truth).max() > 0.2  # staying level would be worse


def test_a_single_stray_measurement_counts_little() -> None:
    x, y = points(np.arange(10.0, 30), 0.0, 0)
    spoiled = y.copy()
    spoiled[10] += 1.0
    kernel = fit_process(x, y, CURVE).kernel
    kept = fit_process(x, spoiled, CURVE, kernel).predict(x[10:11])[0]
    assert abs(kept - y[10]) < 0.2


def test_a_process_is_the_same_after_a_round_trip() -> None:
    x, y = points(np.arange(10.0, 30), 0.0, 0)
    first = fit_process(x, y, CURVE)
    second = GaussianProcess.from_arrays(first.to_arrays())
    assert second.predict(x) == pytest.approx(first.predict(x), abs=1e-4)


def test_what_crosses_a_network_is_known_by_its_cluster() -> None:
    common = {"gpu": "h100-sxm-80gb", "op": "all_reduce", "message_bytes": 2**20}
    rows = pd.DataFrame(
        [
            {**common, "world_size": 8, "ranks_per_node": 8, "node": "dgx-h100"},
            {**common, "world_size": 16, "ranks_per_node": 8, "node": "aws-p5"},
            {**common, "world_size": 16, "ranks_per_node": 8, "network_bytes_per_s": 5e10},
        ]
    )
    found = origins(rows, families()["collective"], {})["gpu"].tolist()
    one = "h100-sxm-80gb"
    assert found == [one, f"{one} over aws-p5", f"{one} over 50000000000.0"]


def test_a_kind_held_out_while_learning_counts_in_the_end() -> None:
    """A kind of op that only the last rows are of keeps its own level, here a factor of e."""
    rng = np.random.default_rng(0)
    size = rng.uniform(4, 20, 60)
    rare = np.arange(60) >= 54
    table = Table(
        x=np.c_[size, rare, ~rare].astype(np.float32),
        roofline_us=np.ones(60),
        time_us=np.exp(0.1 * size + rare),
        group=np.arange(60).astype(str),
    )
    crossed = cross_fit(table.take(np.arange(54)), default_options(table))
    ensemble = refit(table, default_options(table), replace(crossed, share=1.0))
    found = ensemble.predict(table.x[54:], np.ones(6))
    assert found == pytest.approx(table.time_us[54:], rel=0.1)


def curve(gpu: str, op: str, latency_us: float, busbw_bytes_per_s: float) -> pd.DataFrame:
    """Two ranks, 512 B to 512 MiB: a latency and a bandwidth."""
    size = 2.0 ** np.arange(9, 30)
    share = 1.0 if op == "all_reduce" else 0.5
    common = {"gpu": gpu, "op": op, "stack": "nccl", "world_size": 2, "ranks_per_node": 2}
    time_us = latency_us + share * size / busbw_bytes_per_s * 1e6
    return pd.DataFrame({**common, "message_bytes": size, "time_us": time_us})


def fitted(
    rows: pd.DataFrame, known: np.ndarray, gpus: dict[str, Gpu]
) -> tuple[GaussianProcess, Table]:
    """The process of the known rows, and the table of all."""
    table = prepare(rows, families()["collective"], gpus).table
    stated = table.stated_kernel
    assert stated is not None
    columns: dict[int, tuple[float, ...]] = dict.fromkeys(stated.columns, ())
    return fit_process(table.x[known], table.log_ratio[known], columns, stated.kernel), table


def left_out_pct(rows: pd.DataFrame, known: np.ndarray, gpus: dict[str, Gpu]) -> np.ndarray:
    """Absolute errors of the rows that are not known, in per cent."""
    found, table = fitted(rows, known, gpus)
    guess = table.roofline_us[~known] * np.exp(found.predict(table.x[~known]))
    return np.asarray(100 * np.abs(guess / table.time_us[~known] - 1))


def test_a_system_never_seen_does_as_one_that_is_as_fast() -> None:
    """H200 links are as fast as H100's: its latency is theirs, not the mean with A100's."""
    half = {"a100-sxm-80gb": (12.0, 200e9), "h100-sxm-80gb": (6.0, 350e9)}
    half["h200-sxm-141gb"] = half["h100-sxm-80gb"]
    rows = pd.concat([curve(gpu, "all_reduce", *facts) for gpu, facts in half.items()])
    rows = rows.reset_index(drop=True)
    known = (rows["gpu"] != "h200-sxm-141gb").to_numpy()
    assert left_out_pct(rows, known, {gpu: load_gpu(gpu) for gpu in half}).mean() < 4


def test_gather_and_scatter_tell_of_each_other() -> None:
    """The large sizes of reduce_scatter were not measured, those of all_gather were."""
    pair = [curve("h100-sxm-80gb", op, 6.0, 250e9) for op in ("all_gather", "reduce_scatter")]
    rows = pd.concat(pair, ignore_index=True)
    known = ~((rows["op"] == "reduce_scatter") & (rows["message_bytes"] > 2**20)).to_numpy()
    gpus = {"h100-sxm-80gb": load_gpu("h100-sxm-80gb")}
    assert left_out_pct(rows, known, gpus).max() < 6


def test_few_points_stand_for_a_curve_of_many() -> None:
    """A thousand sizes of two curves take 4 points a quarter octave, and a cubic is exact."""
    asked: list[int] = []

    def cubic(z: np.ndarray) -> np.ndarray:
        asked.append(len(z))
        return np.asarray(0.01 * z[:, 0] ** 3 + z[:, 1] - z[:, 0] + 5 * z[:, 2])

    size = np.random.default_rng(0).uniform(10, 20, 1000)
    kind = np.repeat([0.0, 1.0], 500)
    z = np.c_[size, size - 2 - kind, kind]
    assert interpolated(z, 2, cubic) == pytest.approx(cubic(z))
    assert asked[0] <= 2 * (10 * 4 + 4)


def test_a_forecast_is_the_sum_over_all_points() -> None:
    rows = pd.concat(
        [curve("h100-sxm-80gb", op, 6.0, 250e9) for op in ("all_gather", "all_reduce")]
    ).reset_index(drop=True)
    gpus = {"h100-sxm-80gb": load_gpu("h100-sxm-80gb")}
    found, table = fitted(rows, np.arange(len(rows)), gpus)
    z = found.kernel.saturated(table.x[:, found.columns])
    whole = found.centre + found.kernel(z, found.at) @ found.weight
    assert found.predict_rows(z) == pytest.approx(whole, abs=1e-3)


def test_far_from_all_rows_the_roofline_is_the_forecast() -> None:
    """A slow cluster says less than half of it about another kind over another network."""
    slow = curve("h100-sxm-80gb", "all_reduce", 6.0, 200e9)
    slow = slow.assign(world_size=16, ranks_per_node=8, node="aws-p5", time_us=2 * slow["time_us"])
    asked = slow.assign(op="send_recv", node="alps", link="network", network_bytes_per_s=12.5e9)
    rows = pd.concat([slow, asked], ignore_index=True)
    gpus = {"h100-sxm-80gb": load_gpu("h100-sxm-80gb")}
    known = np.arange(len(slow))
    found, table = fitted(rows, known, gpus)
    of = np.abs(found.predict(table.x))
    own, others = of[known].mean(), of[known + len(slow)].mean()
    assert found.centre == 0.0
    assert others < 0.5 * own

"""The public benchmark: splits without leaks, baselines and widths that answer by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from public_data import PUBLIC, needs_public

from itercast.extras.imports.base import Hints
from itercast.extras.imports.sources import read_source
from itercast.extras.published.baselines import alpha_beta, interpolation
from itercast.extras.published.benchmark import calibrated, run_line
from itercast.extras.published.fits.widths import by_source, coverage, half_width
from itercast.extras.published.lines import LineResult, OpLine, op_lines
from itercast.extras.published.report import markdown, run
from itercast.microbench.hardware.spec import load_gpu

SIZES = [2.0**i for i in range(10, 28)]


def curve(gpu: str, op: str = "all_reduce", world_size: int = 2) -> pd.DataFrame:
    """alpha 10 us, beta 1e-4 us per byte, in two dtypes."""
    rows = [
        {"gpu": gpu, "op": op, "world_size": world_size, "ranks_per_node": world_size}
        | {"message_bytes": size, "dtype": dtype, "time_us": 10 + 1e-4 * size}
        for size in SIZES
        for dtype in ("fp16", "int8")
    ]
    return pd.DataFrame(rows)


def named(text: str) -> OpLine:
    return next(x for x in op_lines() if text in x.name)


def test_no_row_is_on_both_sides_and_every_cell_is_held_out_once() -> None:
    """A cell is a collective of one size on one GPU, in all dtypes."""
    rows = pd.concat([curve("a"), curve("b")], ignore_index=True)
    held = np.zeros(len(rows), dtype=int)
    for split in named("cells left out").splits(rows):
        assert not (split.known & split.held).any()
        for side in (split.known, split.held):
            sizes = rows[side].groupby(["gpu", "message_bytes"])["dtype"].nunique()
            assert (sizes == 2).all()
        held += split.held
    assert (held == 1).all()


def test_a_site_is_left_out_on_every_gpu_and_stack() -> None:
    sites = [(n, k) for n in (32, 64, 128) for k in (32, 64, 128)]
    rows = pd.DataFrame(
        {"gpu": gpu, "stack": stack, "n": n, "k": k, "source": "aiconfigurator"}
        for gpu in ("a", "b")
        for stack in ("x", "y")
        for n, k in sites
    )
    splits = list(named("sites").splits(rows))
    held = [set(zip(rows["n"][s.held], rows["k"][s.held], strict=True)) for s in splits]
    known = [set(zip(rows["n"][s.known], rows["k"][s.known], strict=True)) for s in splits]
    assert held[0] == held[1]
    assert not held[0] & (known[0] | known[1])


def test_baselines_along_a_curve() -> None:
    rows = curve("a").iloc[::2].reset_index(drop=True)
    known, asked = np.arange(0, len(rows), 2), np.arange(1, len(rows) - 1, 2)
    found = alpha_beta(rows, known, asked)
    assert found == pytest.approx(rows["time_us"].to_numpy()[asked], rel=1e-3)
    middle = interpolation(rows, known, asked[-1:])
    left, right = rows["time_us"].to_numpy()[[asked[-1] - 1, asked[-1] + 1]]
    assert middle[0] == pytest.approx((left * right) ** 0.5)


def test_which_stack_is_the_fastest_for_shapes_left_out() -> None:
    """ "small" is the fastest below 2**20 values, "large" from there on; "never" and "twice" never.

    The usual winner is right for one side only; forecasts and the ranker tell both sides apart.
    """
    sides = np.geomspace(2**10, 2**26, 61).round()
    slow = {"small": lambda n: 1 + n / 2**20, "large": lambda n: 2.0, "never": lambda n: 9.0}
    slow["twice"] = lambda n: 2 * min(slow["small"](n), slow["large"](n))
    rows = pd.DataFrame(
        {"gpu": "h100-sxm-80gb", "stack": stack, "op": "relu", "dtype": "fp32", "numel": n}
        | {"time_us": (5 + n / 2**18) * factor(n), "timer": "device", "source": "toy"}
        for n in sides
        for stack, factor in slow.items()
    )
    line = OpLine(
        name="toy",
        family="elementwise",
        folds=("numel",),
        all_folds=True,
        fewest=4,
        baselines=("usual winner", "rank:pairwise", "rank:ndcg"),
        metric="median_ape_pct",
        targets={"top1_pct": 90.0},
    )
    results = {r.metric: r for r in run_line(line, rows)}
    scores, top = results["top1_pct"].scores, results["top1_pct"].target
    assert top == 90.0 and results["slower_pct"].target is None
    usual = max(np.mean(sides < 2**20), np.mean(sides >= 2**20))
    assert scores["usual winner"]["top1_pct"] == pytest.approx(100 * usual)
    assert "median_ape_pct" not in scores["rank:pairwise"]
    for name in ("itercast", "rank:pairwise", "rank:ndcg"):
        assert scores[name]["top1_pct"] > 90 and scores[name]["top3_pct"] == 100, name
    assert "| toy | all | top1 |" in markdown(list(results.values()))


def test_a_few_rows_of_a_gpu_left_out_calibrate_it() -> None:
    """Every forecast is half of what is measured: four rows tell, and are not judged themselves."""
    table = SimpleNamespace(time_us=np.full(40, 20.0), roofline_us=np.full(40, 5.0))
    prepared: Any = SimpleNamespace(table=table, kind=np.full(40, "a"), at=np.zeros((40, 1)))
    found = calibrated(prepared, np.arange(40), np.full(40, 10.0), 4)
    assert np.isnan(found).sum() == 4
    assert np.nanmean(found) == pytest.approx(20, rel=0.02)


def test_the_report_says_what_fell_short() -> None:
    """The signed bias stands beside every mean; -4.5 % misses a target of 4, whatever its sign."""
    ours = {"mape_pct": 5.0, "bias_pct": -4.5, "median_ape_pct": 4.0, "p90_ape_pct": 9.0}
    ours |= {"worst_ape_pct": 12.0, "coverage_pct": 81.0}
    facts: dict[str, Any] = {"line": "x", "part": "p", "known_best": "6", "rows": 3, "seconds": 1.0}
    scores = {"itercast": ours, "roofline": {"mape_pct": 20.0}}
    row = LineResult(**facts, metric="mape_pct", target=4.0, scores=scores)
    text = markdown([row, replace(row, metric="bias_pct")])
    assert "| mean | bias | median | p90 | worst | covered | rows | s |" in text
    assert "| x | p | mape | 6 | 4 | no | 5.0 |  |  |  |  | 20.0 |" in text
    assert "| bias | 6 | 4 | no | -4.5 |" in text
    assert "| 5.0 | -4.5 | 4.0 | 9.0 | 12.0 | 81 | 3 | 1 |" in text
    tau = replace(row, metric="kendall_tau", target=0.85, scores={"itercast": {"kendall_tau": 0.9}})
    assert "| kendall_tau | 6 | 0.85 | yes | 0.90 |" in markdown([tau])


def products() -> pd.DataFrame:
    """Half of the peak and 5 us, in bf16 and fp8; a B200 loses half of its speed in fp8."""
    rng, rows = np.random.default_rng(0), []
    for gpu in ("h100-sxm-80gb", "b200-sxm"):
        for m, n, k in 2 ** rng.integers(8, 14, (120, 3)):
            for dtype in ("bf16", "fp8"):
                us = 2e6 * m * n * k / load_gpu(gpu).peak(dtype) / 0.5 + 5
                slow = 2 if (gpu, dtype) == ("b200-sxm", "fp8") else 1
                op = "scaled_mm" if dtype == "fp8" else "mm"
                sizes = {"m": int(m), "n": int(n), "k": int(k), "batch": 1, "layout": "nt"}
                rows.append({"gpu": gpu, "dtype": dtype, "op": op, "time_us": us * slow} | sizes)
    return pd.DataFrame(rows).assign(family="gemm", source="aiconfigurator", stack="", status="ok")


def test_a_dtype_left_out_is_lent_by_who_was_measured_in_it() -> None:
    """The B200 tells the H100 that fp8 reaches a quarter of the peak: twice as slow as it is."""
    line = next(x for x in op_lines() if x.name.startswith("GEMM fp8"))
    results = {r.part: r.scores for r in run_line(replace(line, baselines=()), products())}
    assert list(results) == ["b200-sxm", "h100-sxm-80gb"]
    assert all("stated rate" in scores for scores in results.values())  # priced as what ships
    assert results["h100-sxm-80gb"]["itercast"]["bias_pct"] == pytest.approx(100, abs=30)
    assert results["b200-sxm"]["itercast"]["bias_pct"] == pytest.approx(-50, abs=10)


@pytest.mark.slow
@needs_public("NeuSight")
def test_layernorm_of_the_public_data_beats_its_baselines() -> None:
    """On 600 of the V100's 1,478 rows: the least median error of all learners, below 2 %."""
    line = next(x for x in op_lines() if "layernorm" in x.name)
    rows = (
        read_source("neusight", PUBLIC / "NeuSight", Hints()).rows["norm"].assign(source="NeuSight")
    )
    small = rows[rows["gpu"] == "v100-pcie-32gb"].sample(600, random_state=0)
    small = small.reset_index(drop=True)
    result = next(iter(run_line(line, small)))
    ours = result.scores["itercast"]["median_ape_pct"]
    assert ours == min(s["median_ape_pct"] for s in result.scores.values())
    assert ours < 2


@pytest.mark.slow
@needs_public("aiconfigurator")
def test_collectives_of_a_system_left_out() -> None:
    """GB200 is as fast as B200; nothing measured is like A100: there others do as well."""
    line = next(x for x in op_lines() if x.name == "NCCL, system left out")
    rows = read_source("aiconfigurator", PUBLIC / "aiconfigurator", Hints())
    rows = rows.rows["collective"]
    line = replace(line, baselines=("alpha_beta", "nearest"))
    results = {r.part: r.scores for r in run_line(line, rows.assign(source="aiconfigurator"))}
    ours, *others = (score["mape_pct"] for score in results["gb200"].values())
    assert ours < min(*others, 6.0)
    assert results["a100-sxm-80gb"]["itercast"]["mape_pct"] < 23


def test_a_shapes_forward_is_never_known_while_its_backward_is_scored() -> None:
    """Ten lengths, both directions each."""
    line = replace(named("SDPA backward"), folds=("q_len",))
    rows = pd.DataFrame({"op": op, "q_len": n} for n in range(10) for op in ("forward", "backward"))
    held = np.zeros(len(rows), dtype=int)
    for split in line.splits(rows):
        assert set(rows["op"][split.held]) == {"backward"}
        assert not set(rows["q_len"][split.held]) & set(rows["q_len"][split.known])
        held += split.held
    assert (held == (rows["op"] == "backward")).all()


@pytest.mark.slow
@needs_public("cudnn-frontend")
def test_attention_backwards_of_left_out_shapes_are_forecast() -> None:
    (found,) = run(PUBLIC, "SDPA backward of cuDNN")
    assert found.rows == 140 and found.scores["itercast"]["median_ape_pct"] < 6


def test_a_source_has_one_vote_however_much_it_measured() -> None:
    """Five sources are off by 0 to 0.99, evenly; the sixth by 3, with nine tenths of the rows.

    The five must be covered to 96 %, so that the mean with the sixth, 5 / 6 of it, is 80 %.
    """
    near = {f"s{i}": np.arange(100) / 100 for i in range(5)}
    parts = [pd.Series(v, index=[n] * 100) for n, v in near.items()]
    errors = pd.concat([*parts, pd.Series(-3.0, index=["far"] * 4500)])
    assert half_width(errors) == pytest.approx(0.95, abs=0.011)
    assert coverage(errors, 0.495) == pytest.approx(5 / 6 * 0.5)


def test_each_source_is_judged_by_what_the_others_say() -> None:
    """A source five times as far off as the rest is covered to a fifth, and widens the others'."""
    even = np.arange(100) / 100
    errors = pd.concat([pd.Series(even, index=["a"] * 100), pd.Series(5 * even, index=["b"] * 100)])
    found = by_source(errors)
    assert found.loc["b", "half_width"] == pytest.approx(0.79)
    assert found.loc["b", "covered_pct"] == pytest.approx(16)
    assert found.loc["a", "covered_pct"] == 100

"""Which points a sweep of a GPU measures: sizes, dtypes, weights, points measured elsewhere."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from clockwork import order
from op_calls import logged

from itercast.capture.opcall import OpCall, TensorSpec
from itercast.extras.campaign.prepare import points_of_rows, write_measured_points
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.iterations.gpu_list import gpu_iterations
from itercast.microbench.ops import families, find_family
from itercast.microbench.ops.family import itemsize_bytes
from itercast.microbench.ops.matrix.attention import Attention
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.memory import norm
from itercast.microbench.ops.memory.elementwise import Elementwise
from itercast.microbench.ops.memory.norm import Norm
from itercast.microbench.ops.memory.random import DROPOUT, RandomOp
from itercast.microbench.store import write_part
from itercast.microbench.sweep.captured_points import read_points
from itercast.microbench.sweep.gpu_space import fits, grid, limits_us, on_gpu, roofline_us
from itercast.microbench.sweep.rows import failure_status
from itercast.microbench.sweep.scheduler import Sweep

H100 = load_gpu("h100-sxm-80gb")
A100 = load_gpu("a100-sxm-80gb")
TINY = ("host",)  # its points have no work on the GPU at all
SWEPT_ALONE = [n for n, f in families().items() if f.ranks == 1 and not f.on_demand]
DENSE = sorted(set(SWEPT_ALONE) - set(TINY))
SWEPT = 400


@cache
def swept(name: str) -> list[Any]:
    return list(islice(on_gpu(name, grid(name, 0), H100, 0), SWEPT))


def rooflines_us(name: str, points: list[Any]) -> np.ndarray[Any, Any]:
    return np.array([roofline_us(families()[name], p, H100) for p in points])


@pytest.mark.parametrize("name", DENSE)
def test_few_points_are_small_and_the_others_spread_up_to_the_limit(name: str) -> None:
    """At most 15 % below 3 us; of the others enough in each third of the log range."""
    found_us = rooflines_us(name, swept(name))
    low, high = limits_us(families()[name], H100)
    assert low == 3.0 and 400 <= high <= 10_000
    assert np.mean(found_us < low) <= 0.15
    large = np.log(found_us[found_us >= low] / low) / np.log(high / low)
    thirds = np.histogram(large, bins=[0, 1 / 3, 2 / 3, 1.1])[0] / len(large)
    assert thirds.min() > 0.15, thirds  # products of few flops a byte end at 4 % of memory
    assert all(fits(families()[name], p, H100) for p in swept(name))


def test_rooflines_by_hand_end_where_slow_kernels_take_20_ms_or_memory_does() -> None:
    """8192^3 in bf16: 2 * 5.5e11 flop at 989.4e12 a second; 3.35 MB at 3.35e12 B/s take 1 us.

    5 % of the roofline: 20 ms are 1 ms; 4 % of 80 GiB take 1026 us; products half: 10 ms.
    """
    known = families()
    square = Gemm(m=8192, n=8192, k=8192, dtype="bf16")
    assert roofline_us(known["gemm"], square, H100) == pytest.approx(1111.3, rel=1e-3)
    copied = Elementwise(op="clone", numel=418_750, inner=418_750)
    assert roofline_us(known["elementwise"], copied, H100) == pytest.approx(1.0)
    assert limits_us(known["index"], H100) == (3.0, 1000.0)
    memory_us = 0.04 * 80 * 2**30 / 3.35e12 * 1e6
    assert limits_us(known["elementwise"], H100)[1] == pytest.approx(memory_us)
    assert limits_us(known["gemm"], H100) == (3.0, 10_000.0)
    assert not fits(known["gemm"], Gemm(m=32768, n=32768, k=32768, dtype="fp16"), H100)


@pytest.mark.parametrize("name", DENSE)
def test_dtypes_are_those_of_iterations(name: str) -> None:
    asked = {i.dtype for i in gpu_iterations()}
    assert asked == {"fp32", "tf32", "bf16"}
    dtypes, stated = Counter(p.dtype for p in swept(name)), families()[name].gpu_sweep.dtypes
    if len(stated) == 1:  # kernels of this one alone
        assert dtypes.keys() == stated.keys()
        return
    for dtype in asked if name in ("gemm", "conv", "attention") else {"fp32", "bf16"}:
        assert dtypes[dtype] > 0.05 * SWEPT
    assert 0 < dtypes["fp16"] <= 0.05 * SWEPT
    assert (0.02 * SWEPT < dtypes["fp8"] < 0.1 * SWEPT) == (name == "gemm")


def test_fp8_products_are_what_captures_ask_for() -> None:
    """``scaled_mm`` of a row-major and a column-major matrix, sides of whole 16 bytes."""
    products = [p for p in swept("gemm") if p.dtype == "fp8"]
    assert {(p.op, p.layout, p.batch) for p in products} == {("scaled_mm", "nt", 1)}
    assert all(p.m % 16 == p.n % 16 == p.k % 16 == 0 for p in products)
    p = Gemm(op="scaled_mm", m=32, n=48, k=64, layout="nt", dtype="fp8")
    factors = (TensorSpec(shape=(32, 64), dtype="fp8"), TensorSpec(shape=(64, 48), dtype="fp8"))
    assert find_family(OpCall(op="aten.mm.default", args=factors))[1] == p
    result: Any = families()["gemm"].build(p, "cpu").run()
    assert result.shape == (32, 48) and result.dtype == torch.bfloat16


def test_products_by_expert_are_in_bf16_on_gpus_that_run_them_as_one() -> None:
    """Elsewhere torch loops over experts and waits for the GPU: a point is refused, not timed."""
    experts = [p for p in swept("gemm") if p.op == "grouped_mm"]
    assert {p.dtype for p in experts} == {"bf16"}
    assert all(side % 8 == 0 for p in experts for side in (p.m, p.n, p.k))
    on_a100 = islice(on_gpu("gemm", grid("gemm", 0), A100, 0), SWEPT)
    assert {p.op for p in on_a100} == {"mm", "addmm", "bmm"}  # nor has it fp8
    with pytest.raises(NotImplementedError, match="bf16 alone"):
        families()["gemm"].build(Gemm(op="grouped_mm", m=8, n=8, k=8, batch=2), "cuda")


def test_what_a_gpu_never_calls_is_left_out_or_exchanged() -> None:
    """Allocations launch nothing; a mask drawn by a CPU's dropout is part of its kernel there."""
    assert not [p for p in swept("elementwise") if p.op == "empty_like"]
    drawn = RandomOp(op="bernoulli_", size=10_000_000)
    (found,) = on_gpu("random", iter([drawn]), H100, 0, captured=True)
    assert found.op in DROPOUT and found.size == drawn.size


def test_fused_points_keep_whole_inputs_and_results() -> None:
    """Larger and in other dtypes, too: what is built reads and writes what the row says."""
    for p in swept("fused"):
        one = p.numel * itemsize_bytes(p.dtype)
        inputs, results = p.read_bytes / one, p.written_bytes / one
        assert inputs in range(1, 5) and results in range(1, 3)
        assert p.ops >= max(inputs, results)


@pytest.mark.parametrize("name", sorted(set(DENSE) - {"fused"}))
def test_points_of_any_size_build_and_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are drawn for a limit of 0.2 us, so that a CPU builds them."""
    monkeypatch.setattr("itercast.microbench.sweep.gpu_space.MAX_ROOFLINE_US", 0.2)
    monkeypatch.setattr("itercast.microbench.sweep.gpu_space.MAX_BYTES_FRAC", 7e5 / H100.hbm_bytes)
    for p in islice(on_gpu(name, grid(name, 1), H100, 1), 30):
        try:
            families()[name].build(p, "cpu").run()
        except (NotImplementedError, RuntimeError) as exc:  # kernels that only GPUs have
            half = p.dtype in ("fp16", "bf16")
            assert half and failure_status(exc) == "unsupported", (p, exc)


def test_a_batch_norm_on_a_gpu_is_what_a_module_calls() -> None:
    """torch.batch_norm picks cuDNN there; forward and backward compute what the CPU's path does."""
    build = families()["norm"].build
    for op in ("batch", "batch_eval", "batch_backward", "batch_eval_backward"):
        p = Norm(op=op, rows=4, cols=9, channels=3)
        torch.manual_seed(0)
        plain: Any = build(p, "cpu").run()
        torch.manual_seed(0)
        chosen = on_device(build, p)
        called: Any = chosen.run()
        assert (chosen.baseline is not None) == op.endswith("backward")
        if op.endswith("backward"):
            for one, other in zip(plain, called, strict=True):
                torch.testing.assert_close(one, other)
        else:  # the CPU's path uses the scale as the shift, too; a shift of 0 is subtracted here
            shift: Any = (plain[0] - called)[:, :, 0, 0]
            torch.testing.assert_close(shift, shift[:1].expand_as(shift))


def on_device(build: Any, p: Any) -> Any:
    """Built as for a GPU, on the CPU's tensors."""
    made: list[Any] = []

    def kept(*given: Any) -> Any:
        made.extend(given)
        return None

    with pytest.MonkeyPatch.context() as patched:
        real = norm._batch_of_models
        patched.setattr(norm, "_batch_of_models", kept)
        build(p, "meta")
    assert made[0] == p and made[1].is_meta
    shape = made[1].shape
    x, grad = torch.randn(shape), torch.randn(shape)
    return real(p, x, grad, torch.rand(p.channels))


def test_a_batch_norm_s_backward_runs_no_forward() -> None:
    for cols in (1, 9):  # one position: two axes, as BatchNorm1d has
        p = Norm(op="batch_backward", rows=8, cols=cols, channels=3)
        (call,) = logged(on_device(families()["norm"].build, p).run)
        assert call.op == "aten.native_batch_norm_backward.default"
        assert len(call.args[0].shape) == (2 if cols == 1 else 4)
        assert find_family(call)[1] == p


def test_attention_on_a_gpu_wants_gradients_as_in_training() -> None:
    """Which kernel torch takes may depend on it; one query is decoded without."""
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 2, "kv_len": 16, "head_dim": 16}
    p = Attention(op="forward", q_len=16, causal=False, **sizes)
    build = families()["attention"].build
    results: list[Any] = [
        build(p, "meta").run(),
        build(replace(p, q_len=1), "meta").run(),
        build(p, "cpu").run(),
    ]
    assert [r.requires_grad for r in results] == [True, False, False]


@pytest.fixture
def measured(tmp_path: Path) -> tuple[Path, list[Gemm], list[Norm]]:
    """Rows of an H100: products warm and cold, norms; what failed, another GPU."""
    kinds = [(op, dtype) for op in ("mm", "addmm") for dtype in ("bf16", "fp32")]
    products = [
        Gemm(op=op, m=64 * n, n=64, k=64, dtype=dtype) for op, dtype in kinds for n in range(1, 6)
    ]
    norms = swept("norm")[:9]
    write_rows(tmp_path, "gemm", "one", [(p, "ok", H100.name) for p in products * 2])
    failed, elsewhere = (replace(products[0], m=17, n=n) for n in (18, 19))
    odd = [(failed, "oom", H100.name), (elsewhere, "ok", A100.name)]
    write_rows(tmp_path, "gemm", "two", odd)
    write_rows(tmp_path, "norm", "one", [(p, "ok", H100.name) for p in norms])
    return tmp_path, list(dict.fromkeys(products)), list(dict.fromkeys(norms))


def write_rows(root: Path, family: str, part: str, rows: list[Any]) -> None:
    """A part file whose empty cells turn whole numbers into floats."""
    given = [{**asdict(p), "status": status, "gpu": gpu, "time_us": 1.0} for p, status, gpu in rows]
    gap = {"status": "error", "gpu": H100.name, "time_us": np.nan}
    write_part(root, family, H100.name, pd.DataFrame([*given, gap]), part)


def test_measured_points_are_listed_once_with_their_own_types(
    measured: tuple[Path, list[Gemm], list[Norm]],
) -> None:
    root, products, norms = measured
    found = points_of_rows(root, H100.name)
    assert found.keys() == {"gemm", "norm"}
    assert set(found["gemm"]) == set(products) and len(found["gemm"]) == len(products)
    assert set(found["norm"]) == set(norms)
    assert all(type(p.m) is int for p in found["gemm"])


def test_another_gpu_measures_the_same_points_in_the_same_order(
    measured: tuple[Path, list[Gemm], list[Norm]], tmp_path: Path
) -> None:
    root, products, norms = measured
    path = tmp_path / "again.json"
    assert write_measured_points(root, H100.name, path) == len(products) + len(norms)
    asked = replace(
        order(tmp_path, "gemm", "norm"),
        device="cuda",
        gpu="h200-sxm-141gb",
        hardware=load_gpu("h200-sxm-141gb").to_dict(),
        points=str(path),
        only=True,
    )
    chosen = list(all_of(Sweep(asked, set())))
    for name in ("gemm", "norm"):
        assert [p for f, p in chosen if f == name] == read_points(path, name)
    kinds = [(p.op, p.dtype) for f, p in chosen if f == "gemm"]
    assert len(set(kinds[:4])) == 4  # of five each, which lay kind by kind in the file


def all_of(sweep: Sweep) -> Iterator[tuple[str, Any]]:
    while (found := sweep.choose(0.0)) is not None:
        family, point, repeat = found
        sweep.charge(family)
        if not repeat:
            yield family.name, point

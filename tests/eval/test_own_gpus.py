"""The shipped bundle against iterations that we measured on an H100 and an H200 (datasets/gpu)."""

from pathlib import Path

import numpy as np
import pytest

from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import Priceable
from itercast.eval.compare import compare_all, measured_rows
from itercast.extras.published.fits.shipped import own_rows
from itercast.learners.bundle import SHIPPED, Bundle
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.matrix.attention import Attention
from itercast.microbench.store import read_rows

ROWS = Path(__file__).parents[2] / "datasets/gpu"
CASES = ("gpt2-small", "vit-b", "resnet-50", "unet", "dlrm-r00", "dlrm-r07")


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "most"), [("h100-sxm-80gb", 12.0), ("h200-sxm-141gb", 14.0)])
def test_measured_iterations_are_forecast(gpu: str, most: float) -> None:
    """Ops of the H100 were measured, none of the H200 was trained on; public rows alone: 34 %."""
    rows = measured_rows(ROWS, CASES)
    found = compare_all(rows[(rows["gpu"] == gpu) & (rows["repeat"] == 0)], SHIPPED)
    errors = np.array([result.error_pct for result in found])
    assert len(found) >= 9
    assert np.abs(errors).mean() < most
    assert max(result.unmodelled_frac for result in found) < 0.02


def test_no_model_is_trained_on_the_h200() -> None:
    """Its rows judge what forecasts of a GPU without rows are worth."""
    assert set(own_rows("gemm")["gpu"]) == {"h100-sxm-80gb"}
    assert "h200-sxm-141gb" in set(read_rows([ROWS], "gemm")["gpu"])
    models = Bundle.load(SHIPPED).models
    measured = {name: model.source_gpus.measured for name, model in models.items() if model}
    assert all("h200-sxm-141gb" not in measured[name] for name in ("gemm", "norm", "optimizer"))
    assert {"forward", "backward"} <= set(measured["embedding_bag"]["h100-sxm-80gb"]["fp32"])


def test_attention_backward_of_an_a100_rests_on_no_newer_gpu() -> None:
    """Three times its forward; an H100's was measured, and differs."""
    sizes = {"batch": 4, "heads": 16, "kv_heads": 16, "head_dim": 64, "q_len": 8192}

    def us(gpu: str, op: str) -> float:
        call = Attention(op=op, kv_len=8192, causal=True, dtype="bf16", **sizes)
        wanted = Priceable(
            op=op, phase=op, family=families()["attention"], params=call, bytes_moved=0, cold=1.0
        )
        return PriceBook(Bundle.load(SHIPPED), load_gpu(gpu), 0).price([wanted])[0].duration_us

    assert us("a100-sxm-80gb", "backward") == pytest.approx(3 * us("a100-sxm-80gb", "forward"))
    assert us("h100-sxm-80gb", "backward") < 2.9 * us("h100-sxm-80gb", "forward")


def test_halves_of_several_rounds_are_compared() -> None:
    """1, 4, 9 and 16 s: medians in log time are 2, 12 and 6 s."""
    measured = measured_rows(ROWS, CASES)
    rows = measured.iloc[[0] * 4].assign(time_us=[1e6, 4e6, 9e6, 16e6], repeat=range(4))
    [result] = compare_all(rows, SHIPPED)
    assert result.rounds_us == pytest.approx((2e6, 12e6))
    assert result.retest_ape_pct == pytest.approx(500.0)
    assert result.measured_us == pytest.approx(6e6)

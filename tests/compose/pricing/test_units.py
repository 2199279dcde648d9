"""Products in dtypes that a GPU has no units for."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_scripts import captured, written

from itercast.compose.pricing.priced_op import Priceable
from itercast.compose.programs.forecast import forecast_program
from itercast.compose.programs.price import product_dtypes
from itercast.compose.target import find_target
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops.matrix.attention import FAMILY, Attention
from itercast.options import without_units

SCALED = """
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer, one = torch.optim.SGD(model.parameters()), torch.ones((), device="cuda")
for step in range(10):
    x = torch.randn(64, 64, device="cuda")
    kept = x.to(torch.float8_e4m3fn)
    if KIND == "products":
        torch._scaled_mm(kept, kept.t(), one, one, out_dtype=torch.bfloat16)
    model(x).sum().backward()
    optimizer.step()
"""
LACKS = (
    "gpu 'a100-sxm-80gb': no units for dtype 'fp8'; it has ['bf16', 'fp16', 'fp32', 'fp64', 'tf32']"
)


@pytest.mark.parametrize("kind", ["products", "casts"])
def test_scripts_with_products_in_fp8_need_units_for_them(tmp_path: Path, kind: str) -> None:
    """As ``predict --dtype fp8``; numbers that are only kept in fp8 need none."""
    program = captured(written(tmp_path, SCALED.replace("KIND", repr(kind))), gpus=1)
    old, new = (find_target(gpu, "", None, "", "") for gpu in ("a100-sxm-80gb", "h100-sxm-80gb"))
    assert forecast_program(program, new).iteration_us > 0
    if kind == "casts":
        assert forecast_program(program, old).iteration_us > 0
        return
    with pytest.raises(ValueError, match=re.escape(LACKS)):
        forecast_program(program, old)


def test_products_in_bf16_on_volta_are_named(tmp_path: Path) -> None:
    """Torch runs them there, at the rate of fp32; Ampere has units."""
    text = SCALED.replace("KIND", "''").replace("model(x)", "model.bfloat16()(x.bfloat16())")
    program = captured(written(tmp_path, text), gpus=1)
    old, new = (load_gpu(name) for name in ("v100-sxm-16gb", "a100-sxm-80gb"))
    (told,) = without_units(product_dtypes(program, old), old)
    assert told.startswith("v100-sxm-16gb has no bf16 units (fp32, fp16, fp64)")
    assert not without_units(product_dtypes(program, new), new)
    assert not without_units(["bf16"], replace(old, kind="cpu"))


@pytest.mark.parametrize(("gpu", "fused"), [("v100-sxm-32gb", False), ("a100-sxm-80gb", True)])
def test_grouped_queries_are_fused_by_flash_kernels_alone(gpu: str, fused: bool) -> None:
    """Which need Ampere; heads of their own take the memory-efficient kernels of Volta."""
    target = find_target(gpu, "", None, "", "")
    sizes: dict[str, Any] = {"batch": 2, "heads": 16, "q_len": 1024, "kv_len": 1024, "head_dim": 64}
    grouped = Attention(op="forward", kv_heads=4, causal=True, dtype="fp16", **sizes)
    asked = [
        Priceable(op="", phase="forward", family=FAMILY, params=p, bytes_moved=1e6, cold=1.0)
        for p in (grouped, replace(grouped, kv_heads=16))
    ]
    few, all_heads = (op.duration_us for op in target.book.price(asked))
    assert (few < 1.5 * all_heads) == fused

"""Rules of forecasts are switched off by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from itercast.compose.graph.attention_kernels import kernel_ratio
from itercast.compose.pricing.power_limit import sustained_flops_per_s
from itercast.microbench.assumptions import FILE, assumed
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.matrix.attention import Attention
from itercast.microbench.switches import is_on, switching_off


def test_a_rule_is_off_inside_alone() -> None:
    found = [is_on("power_limit")]
    with switching_off("power_limit"):
        found += [is_on("power_limit"), is_on("cache_reuse")]
    assert [*found, is_on("power_limit")] == [True, False, True, True]
    with pytest.raises(ValueError, match=r"unknown rule 'latency'; known: \['achieved_rate'"):
        is_on("latency")


def test_rules_of_whole_steps_are_switched_off() -> None:
    """No power limit: no rate is too high; every attention kernel as fast as the measured one."""
    h100, family = load_gpu("h100-pcie-80gb"), families()["attention"]
    heads = {"batch": 8, "heads": 32, "kv_heads": 32, "head_dim": 128, "causal": True}
    p = Attention(op="forward", q_len=4096, kv_len=4096, dtype="bf16", **heads)
    rows = {("h100-sxm-80gb", "torch-2.9"): 1.0}
    gpus = {"h100-sxm-80gb": load_gpu("h100-sxm-80gb"), h100.name: h100}
    assert sustained_flops_per_s(h100, "bf16") < 1e15
    assert kernel_ratio("flash-1", family, p, h100, rows, gpus) != 1.0
    with switching_off("power_limit"):
        assert sustained_flops_per_s(h100, "bf16") == float("inf")
    with switching_off("attention_kernels"):
        assert kernel_ratio("flash-1", family, p, h100, rows, gpus) == 1.0


def test_a_number_switched_off_takes_its_value_without(tmp_path: Path) -> None:
    """4, or 2 where it is switched off, or left out as checked on a source."""
    entry = "{value: 4, unit: us, source: a test, holds: here, checked_on: [timm], without: 2}"
    (tmp_path / FILE).write_text(f"host:\n  launch_us: {entry}\n")
    found = []
    for name in ("host.launch_us", "host.other", ""):
        with switching_off(name):
            found.append(assumed(str(tmp_path / "host.py"), "launch_us"))
    assert found == [2, 4, 4]

"""recompute=budget: which results a checkpoint saves, and torch's own run of that policy."""

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch
from typed_commands import typed

from itercast.api import checkpoint, predict
from itercast.capture.cases.registry import case
from itercast.capture.plan import ParallelPlan
from itercast.compose.pricing.recompute import Item
from itercast.extras.checkpoints.front import Front, bundled


def item(number: int, nbytes: int, time_us: float) -> Item:
    return Item(calls=(number,), nbytes=nbytes, time_us=time_us)


def test_the_most_time_is_saved_within_the_bytes() -> None:
    """5 bytes: 3 + 2 save 7 us; the one of 4 bytes that saves most alone saves 6."""
    items = [item(0, 4, 6.0), item(1, 3, 4.0), item(2, 2, 3.0)]
    front = Front.of(items, 9)
    found = front.best(5)
    assert (found.calls, found.nbytes, found.time_us) == ((1, 2), 5, 7.0)
    assert front.best(1).calls == front.best(-1).calls == ()
    assert front.best(9).calls == (0, 1, 2)


def test_no_other_subset_saves_more() -> None:
    """All 2^10 subsets of drawn items."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 20, (10,), generator=generator).tolist()
    times = torch.rand(10, generator=generator).tolist()
    subsets = [s for n in range(11) for s in combinations(range(10), n)]
    front = Front.of([item(i, sizes[i], times[i]) for i in range(10)], 80)
    for room in (7, 30, 80):
        fit = [s for s in subsets if sum(sizes[i] for i in s) <= room]
        best = max(sum(times[i] for i in s) for s in fit)
        found = front.best(room)
        assert found.time_us == pytest.approx(best) and found.nbytes <= room


def test_of_equal_items_any_number_is_saved() -> None:
    """Six of 3 bytes and 2 us, as 1 + 2 + 3 of them, beside one of 2 bytes and 1 us."""
    items = [*(item(i, 3, 2.0) for i in range(6)), item(6, 2, 1.0)]
    bundles = bundled(items)
    assert [b.calls for b in bundles] == [(0,), (1, 2), (3, 4, 5), (6,)]
    whole, front = (Front.of(some, 20) for some in (items, bundles))
    for room in range(21):
        assert (
            front.best(room).time_us
            == whole.best(room).time_us
            == (room // 3) * 2 + (room % 3 == 2)
        )


def test_more_bytes_recompute_less() -> None:
    """Compute and memory lie between those of full recomputation and of none."""
    plans = ("recompute=full", "recompute=budget:0.6", "recompute=budget:0.9", "")
    found = [predict("gpt-m", gpu="h100-sxm-80gb", plan=plan) for plan in plans]
    memory = [f.memory_bytes for f in found]
    assert memory == sorted(memory) and memory[0] < memory[2] < memory[3]
    assert found[0].by_family_us["gemm"] > found[3].by_family_us["gemm"]
    assert found[1].by_family_us["gemm"] <= found[0].by_family_us["gemm"]
    assert str(ParallelPlan.parse("recompute=budget:0.6")) == "dp=1,recompute=budget:0.6"


def test_torch_runs_the_policy(tmp_path: Path) -> None:
    """Some results are saved, and gradients are those of the model without checkpoints."""
    path = tmp_path / "policy.json"
    words = ["predict", "gpt-m", "--gpu", "h100-sxm-80gb", "--policy", str(path), "--plan"]
    typed(*words, "recompute=budget:0.8")
    assert any(entry["kept"] for entry in json.loads(path.read_text())["layers"])
    chosen = case("gpt-m")
    given, model = chosen.inputs(2, 32), chosen.build()
    chosen.loss(model(**given), given).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    checkpoint(model, path)
    chosen.loss(model(**given), given).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, found, strict=True))
    refused = typed(*words, "recompute=full", rc=2)
    assert "needs a plan with recompute=budget:SHARE" in refused.stderr
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"policy .* KeyError 'layers'"):
        checkpoint(model, path)

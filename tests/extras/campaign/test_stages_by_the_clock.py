"""Sweeps of a campaign's stage, which end by the clock: on workers that only take time."""

import json
from pathlib import Path

import pytest
import torch

from itercast.extras.campaign import run
from itercast.microbench.sweep import collect as collect_module
from itercast.microbench.sweep.orders import WorkerOrder


def fake_workers(monkeypatch: pytest.MonkeyPatch, took_s: dict[str, float]) -> list[WorkerOrder]:
    """Workers that take so long on a clock of their own; the orders they got."""
    now, orders = [1000.0], []
    monkeypatch.setattr(collect_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    facts = {"hardware": {"name": "toy"}}
    monkeypatch.setattr(run, "card_facts", lambda root, device: facts)

    def ran(order: WorkerOrder, *_: object) -> None:
        orders.append(order)
        now[0] += took_s[order.families[0]]

    monkeypatch.setattr(collect_module, "run_worker", ran)
    return orders


def test_a_sweep_by_the_clock_hands_on_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 360 s the host has 0.05 / 0.9 = 20 s and takes 6: 354 are left for the others."""
    points = tmp_path / "points.json"
    points.write_text(json.dumps({"gemm": [], "host": [{"op": "launch"}], "norm": [{"rows": 1}]}))
    orders = fake_workers(monkeypatch, {"host": 6.0, "norm": 354.0})
    monkeypatch.setattr(collect_module, "check_points", lambda path: 2)
    campaign = run.Run(root=tmp_path, seed=0, points=None)
    assert campaign.sweep(None, 360.0, 20.0, points) == 0
    host, rest = orders
    assert (host.families, host.begin_s, host.budget_s) == (("host",), 1000.0, pytest.approx(20))
    assert (rest.families, rest.begin_s, rest.budget_s) == (("norm",), 1006.0, pytest.approx(354))
    assert rest.only

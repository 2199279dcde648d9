"""The group of one rank in which parallel wrappers are timed."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest

from itercast.microbench.ops.step import _wrappers as wrappers


def test_nccl_alone_looks_for_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a box without one it would wait for minutes; if it still waits, then not for long."""
    asked: dict[str, Any] = {}
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    monkeypatch.setattr(wrappers.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(
        wrappers.dist, "init_process_group", lambda backend, **more: asked.update(more, b=backend)
    )
    monkeypatch.setitem(wrappers.WRAPPERS, "toy", (lambda tensors, device: (print, print), 1))
    wrappers.wrapper_workload("toy", 1, "cuda")
    assert (asked["b"], asked["world_size"]) == ("nccl", 1)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert asked["timeout"] <= timedelta(seconds=30)

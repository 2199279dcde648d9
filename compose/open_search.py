"""Opens a plan search from the names of a model, a GPU and a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from itercast.compose.capture_model import capture, optimizer_of
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.search import Search
from itercast.compose.target import find_host, find_stack
from itercast.learners.known_bundles import find_bundle, find_gpu
from itercast.microbench.cases.registry import case
from itercast.microbench.hardware.node import Node, load_node
from itercast.microbench.hardware.spec import Gpu


def open_search(
    model: str | Path,
    gpu: str,
    gpus: int,
    *,
    node: str,
    batch: int | None,
    seq: int | None,
    dtype: str,
    optimizer: str,
    bundle: Path | None,
    amp: bool = False,
    host: str = "",
    stack: str = "",
) -> tuple[Search, str]:
    """Returns a search over plans of a model, and the name of the bundle that prices them.

    ``model`` is the name of a case or the path of a Hugging Face configuration. ``batch`` counts
    samples of a step over all GPUs; without it and ``seq`` a case has its own batch on each GPU.
    """
    batch, seq = _size(model, gpus, batch, seq)
    optimizer = optimizer or optimizer_of(model)
    folder, models = find_bundle(gpu, bundle)
    device = find_gpu(gpu, models)
    threads = max(1, device.sm_count // gpus) if device.kind == "cpu" else 0

    def capture_at(samples: int, length: int) -> Any:
        size: dict[str, Any] = {"batch": samples, "seq": length or None}
        return capture(model, dtype=dtype, optimizer=optimizer, amp=amp, **size)

    search = Search(
        capture_at=capture_at,
        book=PriceBook(
            models,
            device,
            threads,
            stack=find_stack(stack, device),
            host=find_host(host, device),
        ),
        node=_node(node, device),
        batch=batch,
        seq=seq,
        optimizer=optimizer,
        amp=amp,
    )
    return search, str(folder)


def _size(model: str | Path, gpus: int, batch: int | None, seq: int | None) -> tuple[int, int]:
    """Returns samples per step and tokens per sample, those of a case where none are stated."""
    if isinstance(model, str):
        chosen = case(model)
        batch, seq = batch or chosen.batch * gpus, seq or chosen.seq
    if not batch:
        raise ValueError("--hf-config needs --batch, and --seq for text")
    return batch, seq or 0


def _node(name: str, gpu: Gpu) -> Node | None:
    """Loads the node, if any; ValueError where it holds other GPUs."""
    if not name:
        return None
    node = load_node(name)
    if node.gpu != gpu.name:
        raise ValueError(f"node {node.name!r} holds {node.gpu}, not {gpu.name}")
    return node

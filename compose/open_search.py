"""A plan search, opened by the names of a model, a GPU and a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compose.capture_model import capture
from compose.pricing.price_book import PriceBook
from compose.search import Search
from compose.target import find_bundle, find_gpu
from microbench.cases.registry import case
from microbench.hardware.node import load_node


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
) -> tuple[Search, str]:
    """A search over plans of a case or of a Hugging Face configuration, and the bundle's name.

    ``batch`` and ``seq`` are a case's own unless given; a configuration has none.
    """
    if isinstance(model, str):
        chosen = case(model)
        batch, seq = batch or chosen.batch * gpus, seq or chosen.seq
    if not batch:
        raise ValueError("--hf-config needs --batch, and --seq for text")
    folder, found = find_bundle(gpu, bundle)
    device = find_gpu(gpu, found)
    place = load_node(node) if node else None
    if place is not None and place.gpu != device.name:
        raise ValueError(f"node {place.name!r} holds {place.gpu}, not {device.name}")
    threads = max(1, device.sm_count // gpus) if device.kind == "cpu" else 0

    def capture_at(samples: int, length: int) -> Any:
        size: dict[str, Any] = {"batch": samples, "seq": length or None}
        return capture(model, dtype=dtype, optimizer=optimizer, amp=amp, **size)

    search = Search(
        capture_at=capture_at,
        book=PriceBook(found, device, threads),
        node=place,
        batch=batch,
        seq=seq or 0,
        optimizer=optimizer,
        amp=amp,
    )
    return search, str(folder)

"""Imports outputs of nccl-tests, text or JSON; hardware from sources.yaml, the log, or hints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.capture.base.yaml_text import facts_of
from itercast.extras.imports.base import (
    About,
    Hints,
    Imported,
    RowCollector,
    Unreadable,
    number,
    read_text,
    read_yaml,
    refuse,
    text_of,
    whole,
)
from itercast.extras.nccl.nccl_text import Log, parse_json, parse_text
from itercast.microbench.hardware.names import gpu_named
from itercast.microbench.hardware.node import Node, load_node, node_named
from itercast.microbench.hardware.spec import gpu_names, load_gpu
from itercast.microbench.store import Facts, Row

FACTS = facts_of(__file__)
ABOUT = About(**FACTS["about"])
OPS: Mapping[str, str] = FACTS["ops"]
VARIANT = re.compile(r"[A-Z]+\d+-SXM\d?-\d+GB")  # at the start of a longer text


def read(path: Path, hints: Hints = Hints()) -> Imported:  # noqa: B008  # frozen
    """Read the collectives in one output file, or in a folder of them."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    logs = [p for p in files if re.search(r"\.(txt|log|out|json)(\.gz)?$", p.name)]
    if path.is_dir() and not logs:
        raise refuse(path, "a folder of nccl-tests outputs", "*.txt, *.log, *.out and *.json")
    collector = RowCollector(ABOUT, path)
    stated = _stated(collector, path if path.is_dir() else path.parent)
    for log in logs or files:
        _file(collector, log, stated.get(log.name.removesuffix(".gz"), {}), hints)
    return collector.done()


def _stated(collector: RowCollector, folder: Path) -> dict[str, Row]:
    """Entries of sources.yaml by file name; empty without a readable one."""
    path = folder / "sources.yaml"
    if not path.exists():
        return {}
    try:
        entries = read_yaml(path)
        if not isinstance(entries, list):
            raise Unreadable("not a list")
    except Unreadable as exc:
        collector.drop(f"sources.yaml unreadable: {exc}")
        return {}
    return {text_of(e.get("file")): e for e in entries if isinstance(e, dict)}


def _file(collector: RowCollector, path: Path, stated: Facts, hints: Hints) -> None:
    """Collect the rows of all runs in one file."""
    try:
        text = read_text(path)
        is_json = text.lstrip()[:1] == "{"
        logs = [parse_json(text)] if is_json else parse_text(text)
        if not any(log.rows or log.empty or log.host_times for log in logs):
            fits = " whose numbers fit together" if any(log.unknown for log in logs) else ""
            raise Unreadable(f"no table of nccl-tests{fits} in it")
    except Unreadable as exc:
        return collector.unreadable(str(exc))
    collector.readable += 1
    run_id = collector.run_id(path, text)
    for log in logs:
        _log(collector, path, log, stated, hints, run_id)
    return None


def _log(
    collector: RowCollector, path: Path, log: Log, stated: Facts, hints: Hints, run_id: str
) -> None:
    """Collect the rows of one run, or count why it has none."""
    collector.drop("message of 0 bytes", log.empty)
    collector.drop("time of the host, not of the GPU", log.host_times)
    collector.drop("line of an unknown layout", log.unknown)
    if not log.rows:
        return None
    facts = machine(log, stated, hints)
    in_name = next((op for op in OPS if op in path.name), "")
    op = log.collective or text_of(stated.get("collective")) or in_name
    if not op or not all(facts.values()):
        lacking = next((name for name, value in facts.items() if not value), "collective")
        where = "an option" if lacking in facts else "the file's name"
        reason = f"{lacking} is not stated: {where} or a sources.yaml can"
        return collector.drop(reason, len(log.rows))
    if op not in OPS:
        return collector.drop(f"unknown collective: {op[:40]!r}", len(log.rows))
    rows = _rows(log, stated, hints, facts)
    places = [f"{collector.name(path)}:{row[0]}" for row in log.rows]
    rows = rows.assign(op=OPS[op], run_id=run_id, origin=places)
    return collector.add("collective", rows, ("world_size", "ranks_per_node", "message_bytes"))


def machine(log: Log, stated: Facts, hints: Hints) -> Row:
    """gpu, nodes and gpus_per_node of a run; empty or 0 where they are not stated."""
    variant, short = text_of(stated.get("gpu_variant")), text_of(stated.get("gpu"))
    part = VARIANT.match(variant)
    gpu = gpu_named(part[0]) if part else gpu_named(log.gpu)
    hosts = set(log.ranks.values())
    per_node = len(log.ranks) // len(hosts) if hosts else 0
    return {
        "gpu": gpu or gpu_named(short) or hints.gpu,
        "nodes": whole(stated.get("nodes")) or len(hosts) or hints.nodes,
        "gpus_per_node": whole(stated.get("gpus_per_node")) or per_node or hints.gpus_per_node,
    }


def _rows(log: Log, stated: Facts, hints: Hints, facts: Facts) -> pd.DataFrame:
    """A row for each message size of a run; status error where nccl-tests found wrong values.

    ``facts``: GPU and size of the job. What ``stated``, the file's entry in sources.yaml, says
    comes before the log, and before what the user said (``hints``).
    """
    _, sizes, dtypes, in_place, times, wrong = zip(*log.rows, strict=True)
    variant = text_of(stated.get("gpu_variant"))
    named = node_named(variant)
    node = load_node(named) if named else hints.node
    nic = number(stated.get("nic_bytes_per_s_per_gpu"))
    nic = nic or (hints.node.network_bytes_per_s if hints.node else 0.0)
    version = text_of(stated.get("nccl")) or log.nccl
    frame = pd.DataFrame({"message_bytes": sizes, "dtype": dtypes, "in_place": in_place})
    failed, world_size = np.array(wrong) > 0, facts["nodes"] * facts["gpus_per_node"]
    local = _ranks_per_domain(world_size, facts["gpus_per_node"], node)
    return frame.assign(
        gpu=facts["gpu"],
        stack=f"nccl-{version.split()[0]}" if version.split() else "nccl",
        timer="device",
        status=np.where(failed, "error", "ok"),
        reason=[f"{n} wrong values" if n else "" for n in wrong],
        time_us=times,
        samples=log.iters or None,
        world_size=float(world_size),
        ranks_per_node=local,
        node=node.name if node else "",
        link=_link(facts["gpu"], world_size, local, node),
        network_bytes_per_s=nic or None,
        network=text_of(stated.get("nic")),
        network_fact=text_of(stated.get("nic_fact")),
        settings=text_of(stated.get("settings")),
        doubts=text_of(stated.get("doubts")),
        published=text_of(stated.get("from")),
    )


def _ranks_per_domain(world_size: int, gpus_per_node: int, node: Node | None) -> float:
    """Ranks that reach each other without the network: of a host, or of a rack's link domain.

    Ranks over several racks are spread evenly.
    """
    if node is None or node.topology == "pcie" or not node.gpus_per_domain:
        return gpus_per_node
    return world_size / math.ceil(world_size / node.gpus_per_domain)


def _link(gpu: str, world_size: int, local: float, node: Node | None) -> str:
    """Kind of the slowest link in the ring."""
    if world_size > local:
        return "network"
    if node is not None:
        return node.link_among(world_size)
    return load_gpu(gpu).usual_link if gpu in gpu_names() else "pcie"

"""nccl-tests outputs of several nodes, text or JSON, with a sources.yaml beside them or hints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from microbench.hardware.names import gpu_named
from microbench.importers.base import (
    Gathering,
    Hints,
    Imported,
    Unreadable,
    number,
    read_text,
    refuse,
    text_of,
    whole,
)
from microbench.importers.nccl_text import Log, parse_json, parse_text

CONVENTIONS = (
    "Times in us and sizes in bytes as nccl-tests prints them: the size is the whole gathered "
    "output of all_gather, the whole input of reduce_scatter. Out-of-place and in-place times are "
    "rows of their own (column in_place). Hardware from sources.yaml, the log's rank lines, or "
    "hints of the user, in this order; network rates are per GPU and one direction."
)
OPS = {"sendrecv": "send_recv", "alltoall": "all_to_all"}
OPS |= {op: op for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")}
OPS |= {op: op for op in ("send_recv", "all_to_all")}
NODES = (
    (r"p4de\.", "aws-p4de"),
    (r"p4d\.", "aws-p4d"),
    (r"p5\.", "aws-p5"),
    (r"A3 High", "gcp-a3-high"),
    (r"A3 Mega", "gcp-a3-mega"),
    (r"A3 Ultra", "gcp-a3-ultra"),
    (r"GCP A4", "gcp-a4"),
    (r"A100.*OCI", "oci-bm-gpu4-8"),
    (r"Alps", "alps-gh200"),
    (r"Kestrel", "kestrel-h100"),
    (r"GB200", "gb200-nvl72"),
    (r"GB300", "gb300-nvl72"),
)
FALLBACK = {"h100": "h100-sxm-80gb", "h200": "h200-sxm-141gb", "b200": "b200-sxm"}
FALLBACK |= {"b300": "b300-sxm"}


def read(path: Path, hints: Hints = Hints()) -> Imported:  # noqa: B008  # frozen
    """Collective rows of one output file, or of a folder of them."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    logs = [p for p in files if re.search(r"\.(txt|log|out|json)(\.gz)?$", p.name)]
    if path.is_dir() and not logs:
        raise refuse(path, "a folder of nccl-tests outputs", "*.txt, *.log, *.out and *.json")
    gather = Gathering("nccl-tests", path)
    stated = _stated(gather, path if path.is_dir() else path.parent)
    for log in logs or files:
        _file(gather, log, stated.get(log.name.removesuffix(".gz"), {}), hints)
    return gather.done("facts, each file names its origin", CONVENTIONS)


def _stated(gather: Gathering, folder: Path) -> dict[str, dict[str, Any]]:
    """sources.yaml by file name; empty where there is none or it cannot be read."""
    path = folder / "sources.yaml"
    if not path.is_file():
        return {}
    try:
        entries = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, Unreadable, RecursionError):
        gather.drop("file unreadable: sources.yaml")
        return {}
    if not isinstance(entries, list):
        gather.drop("file unreadable: sources.yaml is not a list")
        return {}
    return {text_of(e.get("file")): e for e in entries if isinstance(e, dict)}


def _file(gather: Gathering, path: Path, stated: dict[str, Any], hints: Hints) -> None:
    try:
        text = read_text(path)
        is_json = text.lstrip()[:1] == "{"
        log = parse_json(text) if is_json else parse_text(text)
    except (ValueError, RecursionError) as exc:
        reason = str(exc) if isinstance(exc, Unreadable) else "not an nccl-tests report"
        return gather.unreadable(reason)
    if not log.rows and not log.empty:
        return gather.unreadable("no table of nccl-tests in it")
    gather.readable += 1
    gather.drop("message of 0 bytes", log.empty)
    gather.drop("line of an unknown layout", log.unknown)
    facts = machine(log, stated, hints)
    op = OPS.get(text_of(stated.get("collective")) or log.collective or _named(path.name))
    lacking = "collective" if op is None else next((k for k, v in facts.items() if not v), "")
    if lacking:
        count = len(log.rows)
        return gather.drop(f"{lacking} is not stated: pass it, or write a sources.yaml", count)
    run_id = gather.run_id(path, text)
    rows = _rows(log, stated, facts, {"op": op, "run_id": run_id})
    rows["origin"] = [f"{gather.name(path)}:{row[0]}" for row in log.rows]
    return gather.add("collective", rows, ("world_size", "ranks_per_node", "message_bytes"))


def _named(file_name: str) -> str:
    """The collective a file name mentions."""
    return next((op for op in OPS if op in file_name), "")


def machine(log: Log, stated: Mapping[str, Any], hints: Hints) -> dict[str, Any]:
    """gpu, nodes and gpus_per_node of a run; empty where nobody says."""
    variant, short = text_of(stated.get("gpu_variant")), text_of(stated.get("gpu"))
    part = re.match(r"[A-Z]+\d+-SXM\d?-\d+GB", variant)
    gpu = gpu_named(part[0]) if part else FALLBACK.get(short) or gpu_named(short)
    hosts = set(log.ranks.values())
    per_node = len(log.ranks) // len(hosts) if hosts else 0
    return {
        "gpu": gpu or gpu_named(log.gpu) or hints.gpu,
        "nodes": whole(stated.get("nodes")) or len(hosts) or hints.nodes,
        "gpus_per_node": whole(stated.get("gpus_per_node")) or per_node or hints.gpus_per_node,
    }


def _rows(
    log: Log, stated: Mapping[str, Any], facts: Mapping[str, Any], common: Mapping[str, Any]
) -> pd.DataFrame:
    """All rows of a run; a row whose data came out wrong is an error row."""
    _, sizes, dtypes, in_place, times, wrong = zip(*log.rows, strict=True)
    nic = number(stated.get("nic_bytes_per_s_per_gpu"))
    link = "network" if facts["nodes"] > 1 and (nic or not stated) else "nvlink"
    variant = text_of(stated.get("gpu_variant"))
    node = next((name for pattern, name in NODES if re.search(pattern, variant)), "")
    version = text_of(stated.get("nccl")) or log.nccl
    frame = pd.DataFrame({"message_bytes": sizes, "dtype": dtypes, "in_place": in_place})
    failed = np.array(wrong) > 0
    return frame.assign(
        **common,
        gpu=facts["gpu"],
        stack=f"nccl-{version.split()[0]}" if version else "nccl",
        timer="device",
        status=np.where(failed, "error", "ok"),
        reason=[f"{n} wrong values" if n else "" for n in wrong],
        time_us=times,
        samples=log.iters or None,
        world_size=facts["nodes"] * facts["gpus_per_node"],
        ranks_per_node=facts["gpus_per_node"],
        node=node,
        link=link,
        network_bytes_per_s=nic or None,
        network=text_of(stated.get("nic")),
        network_fact=text_of(stated.get("nic_fact")),
        settings=text_of(stated.get("settings")),
        doubts=text_of(stated.get("doubts")),
        published=text_of(stated.get("from")),
    )

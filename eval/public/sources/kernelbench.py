"""Imports KernelBench's baselines: one forward of each of 100 small modules, level 1."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.microbench.hardware.names import gpu_named, unknown_gpu
from itercast.microbench.importers.base import (
    About,
    Imported,
    RowCollector,
    positive,
    refuse,
    text_of,
)
from itercast.microbench.store import Row
from itercast.microbench.yaml_text import facts_of

FACTS = facts_of(__file__)
ABOUT = About(**FACTS["about"])
TIMINGS = "timing_all_history.csv.gz"
COLUMNS = ("file", "problem", "mean_ms", "hardware", "problems_tree")
ENGINES: Mapping[str, str] = FACTS["engines"]
# Its times are those of the first, small shapes (a product by a number 219 us, as elsewhere), while
# the problems of its commit are larger: 8.6 GB read and written in that time would be 39 TB/s.
OTHER_SHAPES = ("H100_modal/baseline_time_torch_compile_inductor_default.json",)
MOST_BYTES = 2**16  # of a problem's text


def read(path: Path) -> Imported:
    """Read the timings and the archives of problems beside them."""
    if not (path / TIMINGS).is_file():
        raise refuse(path, "a folder of KernelBench's timings", TIMINGS)
    collector = RowCollector(ABOUT, path)
    frame = collector.csv(path / TIMINGS, COLUMNS)
    if frame is None or not len(frame):
        return collector.done()
    sources = _problems(collector, path)
    frame["gpu"] = frame["hardware"].map(lambda name: gpu_named(str(name)) or "")
    frame["engine"] = frame["file"].str.extract(r"/([a-z0-9_-]+)\.json$")[0].map(ENGINES)
    keys = zip(frame["problems_tree"], frame["problem"], strict=True)
    frame["problem_source"] = [sources.get(key) for key in keys]
    unknown = frame["hardware"][frame["gpu"] == ""].map(str).unique()
    reasons = {
        **{unknown_gpu(name): frame["hardware"].map(str) == name for name in unknown},
        "compiled in a way that no engine states": frame["engine"].isna(),
        "timed with other shapes than those of its commit": frame["file"].isin(OTHER_SHAPES),
        "problem is not in its archive": frame["problem_source"].isna(),
    }
    kept = np.ones(len(frame), dtype=bool)
    for reason, left_out in reasons.items():
        collector.drop(reason, int((kept & left_out).sum()))
        kept &= ~left_out.to_numpy()
    if kept.any():
        collector.add("iteration", _columns(collector, frame[kept], path), ("world_size",))
    return collector.done()


def _columns(collector: RowCollector, frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Columns of the dataset."""
    columns: Row = {
        "op": "forward",
        "gpu": frame["gpu"],
        "timer": "with_launch",
        "stack": "torch",
        "dtype": frame["problem_source"].map(dtype_of),
        "time_us": positive(frame["mean_ms"]) * 1e3,
        "samples": 100,
        "case": "kernelbench " + frame["problem"].map(text_of),
        "builder": "problem",
        "problem_source": frame["problem_source"],
        "mode": "infer",
        "plan": "",
        "loss": "none",
        "optimizer": "none",
        "engine": frame["engine"],
        "source": "kernelbench",
        "batch": 1,
        "seq": 0,
        "world_size": 1,
        "run_id": collector.run_id(path / TIMINGS),
        "machine": frame["file"].str.partition("/")[0],
        "origin": f"{TIMINGS}:" + frame["line"].astype(str),
    }
    return pd.DataFrame(columns, index=frame.index)


def dtype_of(source: str) -> str:
    """Guess the dtype of a problem's matrix products from its source code.

    fp16 if the source names it; tf32 if it has convolutions, for which PyTorch allows TF32 by
    default; else fp32.
    """
    if "float16" in source:
        return "fp16"
    return "tf32" if re.search(r"\bnn\.Conv", source) else "fp32"


def _problems(collector: RowCollector, folder: Path) -> dict[tuple[str, str], str]:
    """Texts of the problems by archive and file name; nothing is extracted to disk."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted(folder.glob("problems-*.tar.gz")):
        tree = path.name.removeprefix("problems-").removesuffix(".tar.gz")
        try:
            with tarfile.open(path) as archive:
                for member in archive:
                    file = archive.extractfile(member) if member.isfile() else None
                    if file is not None and member.size <= MOST_BYTES:
                        name = member.name.rpartition("/")[2]
                        found[tree, name] = file.read().decode("utf-8", "replace")
        except (tarfile.TarError, OSError, EOFError) as exc:
            collector.unreadable(f"not an archive ({type(exc).__name__})")
    return found

"""Mutates real files and reads them: each is accepted or refused in one line, whatever was done.

`python tests/endurance/hostile.py [--files 100000] [--public FOLDER]`. Files are read in processes
of their own, so that a crash is seen; what fails is kept in runs/hostile. Without FOLDER importers
get the few lines that are written here.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import typer

from itercast.capture.plan import ParallelPlan
from itercast.extras.imports.base import Hints
from itercast.extras.imports.sources import read_source
from itercast.extras.priced.forecasts import write_forecasts
from itercast.learners.bundle import FACTS, SHIPPED_CPU, Bundle
from itercast.learners.score_file import read_file
from itercast.microbench.hardware.node import load_node
from itercast.microbench.hardware.spec import load_gpu
from itercast.names import importers

ROOT = Path(__file__).parents[2]
KEPT = Path("runs/hostile")
CHUNK = 500  # files of a process
SLOW_S = 20.0  # of CPU, for one file
MAX_SAMPLE = 30_000  # bytes: the beginning of a larger text
TOKENS = (b"nan", b"-1", b"1e999", b"9" * 40, b"[", b"]", b"{", b"}", b"\x00", b"\xff\xfe", b'"')
TOKENS += (b",", b"\n", b":", b"- ", b"null", b"=", b"0", b"&a *a", b"!!bool x", b"1" * 400)
PLANS = ("dp=8,zero=3", "pp=4,micro=8,sched=1f1b", "tp=8,sp,amp", "dp=2,ep=2", "bucket=25,dp=4")
NEUSIGHT = "OPName,Latency,Device,Torch Version,CUDNN Version,CUDA Version,B,M,N,K\n"
NEUSIGHT += "linear,0.05,Tesla T4,p2.1.0,8902,cu121,1,58,13,141\n" * 3
NCCL = "all_reduce_perf\n 1024 256 float sum -1 30.5 0.03 0.05 0 29.5 0.03 0.05 0\n" * 3
TRACE = {
    "deviceProperties": [{"name": "Tesla T4"}],
    "traceEvents": [
        {"ph": "X", "pid": 1, "tid": 1, "ts": 1, "dur": 5, "cat": cat, "name": name, "args": args}
        for cat, name, args in (
            ("cpu_op", "aten::mm", {"External id": 3, "Input Dims": [[4, 8], [8, 16]]}),
            ("kernel", "k", {"External id": 3, "correlation": 1}),
        )
    ],
}


@dataclass(frozen=True)
class Sample:
    """A real file: its place below a folder, its content, and what reads the folder."""

    place: str
    content: bytes
    read: Callable[[Path], object]


def hardware(load: Callable[[str], object], folder: Path, place: str) -> object:
    """A GPU's or a node's file."""
    return load(str(folder / place))


def plan(folder: Path) -> object:
    """The text of a plan, as the command line gives it."""
    return str(ParallelPlan.parse((folder / "plan").read_bytes().decode(errors="replace")))


@cache
def cpu_bundle() -> Bundle:
    """The CPU bundle that ships."""
    return Bundle.load(SHIPPED_CPU)


def rows(folder: Path) -> None:
    """Rows in dataset form, priced."""
    write_forecasts(read_file(folder / "rows.parquet"), cpu_bundle(), folder / "out.parquet")


def bundle(whole: Path, folder: Path) -> None:
    """A bundle with one other file, and no digests; a row of each family is priced."""
    for path in whole.iterdir():
        if not (folder / path.name).exists():
            shutil.copy(path, folder)
    found = Bundle.load(folder)
    for name in found.models:
        found.price(name, few_rows()[name])


@cache
def few_rows() -> dict[str, pd.DataFrame]:
    """Three rows of each family in ``datasets``."""
    parts = sorted(ROOT.glob("datasets/*/*/itercast/part-*.parquet"))
    return {p.parts[-4]: pd.read_parquet(p).head(3) for p in parts}


def imported(source: str, folder: Path) -> object:
    """A source of published measurements."""
    return read_source(source, folder, Hints())


def samples(public: Path | None, whole: Path) -> dict[str, list[Sample]]:
    """Real files by kind; ``whole`` is a folder for a bundle that is mutated."""
    found: dict[str, list[Sample]] = {"plans": [], "importers": []}
    for kind, pattern, load in (
        ("gpus", "microbench/hardware/*.yaml", load_gpu),
        ("nodes", "microbench/hardware/nodes/*.yaml", load_node),
    ):
        paths = [
            p
            for p in sorted(ROOT.glob(pattern))
            if p.name not in ("assumptions.yaml", "names.yaml")
        ]
        found[kind] = [
            Sample(p.name, p.read_bytes(), partial(hardware, load, place=p.name)) for p in paths
        ]
    found["plans"] = [Sample("plan", text.encode(), plan) for text in PLANS]
    parts = sorted(ROOT.glob("datasets/*/*/itercast/part-*.parquet"))[::5]
    found["rows"] = [Sample("rows.parquet", p.read_bytes(), rows) for p in parts]
    models = {name: cpu_bundle().models[name] for name in ("attention", "embedding", "host")}
    Bundle(models=models, gpus=cpu_bundle().gpus, anchors=cpu_bundle().anchors).save(whole)
    facts = json.loads((whole / FACTS).read_text())
    del facts["digests"]
    (whole / FACTS).write_text(json.dumps(facts))
    found["bundles"] = [
        Sample(p.name, p.read_bytes(), partial(bundle, whole)) for p in sorted(whole.iterdir())
    ]
    found["importers"] = [*few_lines(), *(published(public) if public else ())]
    return found


def few_lines() -> list[Sample]:
    """Files of three sources that need no clone."""
    texts = {
        "neusight": ("scripts/asplos/data/dataset/train/collect/x.csv", NEUSIGHT),
        "nccl-tests": ("run.txt", NCCL),
        "kineto": ("trace.json", json.dumps(TRACE)),
    }
    return [
        Sample(place, text.encode(), partial(imported, name))
        for name, (place, text) in texts.items()
    ]


def published(public: Path) -> list[Sample]:
    """The first small files of every source, in their places."""
    found = []
    for source in sorted(importers()):
        files = [p for p in sorted((public / source).rglob("*")) if p.is_file()]
        small = [p for p in files if p.stat().st_size < MAX_SAMPLE * 10][:40]
        for path in small:
            place = str(path.relative_to(public / source))
            content = path.read_bytes()
            if path.suffix in (".csv", ".json", ".txt", ".jsonl"):
                content = content[:MAX_SAMPLE]
            found.append(Sample(place, content, partial(imported, source)))
    return found


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """One to three changes: bits, slices, tokens, lines, an end cut off; gzip's content, too."""
    if content[:2] == b"\x1f\x8b" and rng.random() < 0.8:
        packer = zlib.compressobj(1, wbits=31)
        inner = mutated(zlib.decompress(content, wbits=31), rng)
        return packer.compress(inner) + packer.flush()
    for _ in range(int(rng.integers(1, 4))):
        at, length = int(rng.integers(len(content) + 1)), int(rng.integers(1, 40))
        before, after = content[:at], content[at:]
        kind = int(rng.integers(6))
        if kind == 0 and after:
            content = before + bytes([after[0] ^ (1 << int(rng.integers(8)))]) + after[1:]
        elif kind == 1:
            content = before + after[length:]
        elif kind == 2:
            content = before + after[:length] + after
        elif kind == 3:
            content = before + TOKENS[int(rng.integers(len(TOKENS)))] + after[length % 3 :]
        elif kind == 4:
            lines = content.split(b"\n")
            content = b"\n".join(lines[i] for i in rng.permutation(len(lines)))
        elif rng.random() < 0.2:
            content = before
    return content


def read_one(sample: Sample, seed: Sequence[int], folder: Path) -> str:
    """How reading a mutated file ends: '' where it is accepted or refused in one line."""
    path = folder / sample.place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(mutated(sample.content, np.random.default_rng(seed)))
    begin_s = time.process_time()  # other load on the machine does not count
    try:
        sample.read(folder)
    except (ValueError, OSError) as exc:  # what the command line answers in one line
        if not str(exc).strip():
            return f"no word: {exc!r}"
    except BaseException as exc:
        return f"{type(exc).__name__}: {exc}"[:300]
    return "took too long" if time.process_time() - begin_s > SLOW_S else ""


def read_many(kind: str, first: int, count: int, public: Path | None) -> None:
    """Read files and print a line of JSON before each, and one for each that fails."""
    with tempfile.TemporaryDirectory() as whole:
        known = samples(public, Path(whole) / "bundle")[kind]
        for number in range(first, first + count):
            print(json.dumps({"at": number}), flush=True)
            sample = known[number % len(known)]
            with tempfile.TemporaryDirectory() as folder:
                reason = read_one(sample, (number, *kind.encode()), Path(folder))
                if reason:
                    kept = KEPT / kind / f"{number}-{Path(sample.place).name}"
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(Path(folder) / sample.place, kept)
                    print(json.dumps({"failed": number, "file": str(kept), "why": reason}))


def failures(kind: str, first: int, count: int, public: Path | None) -> list[str]:
    """A line for each file of a chunk that was answered by a traceback or a crash."""
    words = [sys.executable, __file__, "--kind", kind, "--first", str(first), "--files", str(count)]
    words += ["--public", str(public)] if public else []
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
    found = [f"{kind} {x['failed']}: {x['why']} ({x['file']})" for x in lines if "failed" in x]
    if done.returncode:
        at = lines[-1]["at"] if lines and "at" in lines[-1] else first
        end = (done.stderr.strip().splitlines() or [""])[-1]
        found.append(f"{kind} {at}: the process ended with {done.returncode} {end[:200]}")
        if at + 1 < first + count and lines:
            found += failures(kind, at + 1, first + count - at - 1, public)
    return found


SHARES: Mapping[str, float] = {
    "importers": 0.4,
    "bundles": 0.1,
    "gpus": 0.15,
    "nodes": 0.1,
    "plans": 0.15,
    "rows": 0.1,
}


def main(files: int = 100_000, public: Path | None = None, kind: str = "", first: int = 0) -> None:
    """Read all files, two processes at a time; exit code 1 if any was not answered in one line.

    ``public``: folder with clones of published sources. ``kind``: read so many files of this kind
    from the ``first`` on, in this process.
    """
    if kind:
        read_many(kind, first, files, public)
        return
    chunks = [
        (kind, first, min(CHUNK, count - first), public)
        for kind, share in SHARES.items()
        if (count := round(files * share))
        for first in range(0, count, CHUNK)
    ]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        failed = [line for some in pool.map(lambda c: failures(*c), chunks) for line in some]
    print("\n".join(failed))
    print(f"{files} files, {len(failed)} not answered in one line")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)

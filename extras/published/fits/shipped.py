"""Rebuilds the shipped bundles.

`python -m itercast.extras.published.fits.shipped PUBLIC` for GPUs, with `--cpu` for CPUs.

The GPU bundle is trained on datasets/gpu and on measurements that others published
(learners/shipped/CARD.md names them), read from clones under PUBLIC; the CPU bundle on datasets/.
Families are trained one by one
into OUT/families, so that a run that was stopped goes on where it was; the bundle is then compared
with the shipped one, and takes its place only with --replace. Of single families (--family) these
alone are replaced.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

from itercast.capture.base.yaml_text import facts_of, made_of
from itercast.extras.imports.base import Hints, Imported
from itercast.extras.imports.sources import read_source
from itercast.extras.imports.write import write
from itercast.extras.programs import run_program
from itercast.learners.bundle import SHIPPED, SHIPPED_CPU, Bundle
from itercast.learners.train import TrainSettings, joined, train, train_tables
from itercast.learners.training_rows import subsample_evenly, with_mean_times
from itercast.microbench.hardware.spec import gpu_names, load_gpu
from itercast.microbench.ops import families
from itercast.microbench.store import read_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A clone to import, and the families that its rows teach; all where none is named."""

    importer: str
    families: tuple[str, ...] = ()


FACTS = facts_of(__file__)
SOURCES = {name: made_of(Source, facts, name) for name, facts in FACTS["sources"].items()}
WIDTH = {"fp16": "16 bit"}  # rows in fp16 and bf16 count as one
MAX_ROWS: Mapping[str, int] = FACTS["max_rows"]
OWN, OWN_GPUS = str(FACTS["own"]), FACTS["own_gpus"]
OWN_ROWS = Path(__file__).resolve().parents[3] / "datasets/gpu"
CPU_TRIALS = 3  # of Optuna per family
SHOWN = ("median_ape_pct", "mape_pct", "geomean_ape_pct")


def import_public(public: Path, out: Path) -> None:
    """Write the rows of all sources under ``public`` to a dataset; ValueError if one is missing."""
    for folder, source in SOURCES.items():
        imported = taught(read_source(source.importer, public / folder, Hints()), source)
        count = write(imported, out)
        log.info("%s: %d rows", folder, count)


def taught(imported: Imported, source: Source) -> Imported:
    """Keeps the rows of the families that a source is used for."""
    rows = {
        name: part for name, part in imported.rows.items() if name in (source.families or MAX_ROWS)
    }
    return replace(imported, rows=rows)


def own_rows(name: str) -> pd.DataFrame:
    """The rows of a family under datasets/gpu that teach the shipped bundle."""
    rows = read_rows([OWN_ROWS], name)
    if not len(rows):
        return rows
    taught = rows["gpu"].isin(OWN_GPUS) & (rows["status"] == "ok")
    return with_mean_times(rows[taught].reset_index(drop=True))


def train_apart(data: Path, out: Path, names: Sequence[str]) -> Bundle:
    """Train each family on ``data`` and our own rows, into a bundle of its own; join them.

    Families that are there already are not trained again. ValueError where our rows are missing.
    """
    if not OWN_ROWS.is_dir():
        raise ValueError(f"{str(OWN_ROWS)!r}: no such folder; train from a checkout")
    for name in names:
        folder = out / name
        if not (folder / "bundle.json").is_file():
            log.info("training %s", name)
            rows = [read_rows([data], name), own_rows(name)]
            both = pd.concat([part[part["status"] == "ok"] for part in rows if len(part)])
            some = subsample_evenly(both.reset_index(drop=True), MAX_ROWS[name])
            train_tables({name: some}, TrainSettings(roots=[data, OWN_ROWS]), folder)
    return without_shapes(joined([Bundle.load(out / name) for name in names]))


def without_shapes(bundle: Bundle) -> Bundle:
    """A bundle without the hashes of its training shapes: 2 MB of what each install would load."""
    models = {
        name: replace(model, facts={k: v for k, v in model.facts.items() if k != "shapes"})
        for name, model in bundle.models.items()
    }
    return replace(bundle, models=models)


def comparison(old: Bundle, new: Bundle) -> Table:
    """Table by family: equal rows or not, held-out errors, interval on unseen GPUs (log)."""
    table = Table("family", "rows", "digest", *SHOWN, "unseen GPUs", title="shipped > rebuilt")
    for name in dict.fromkeys([*old.models, *new.models]):
        facts = [b.models[name].facts if name in b.models else None for b in (old, new)]
        before, after = facts
        if before is None or after is None:
            table.add_row(name, "only rebuilt" if before is None else "not rebuilt")
            continue
        same = before["digest"] == after["digest"]
        errors = [f"{before['errors'][e]:.4f} > {after['errors'][e]:.4f}" for e in SHOWN]
        low_high = [b.models[name].unseen_offsets for b in (old, new)]  # log(measured / forecast)
        errors.append(" > ".join(f"{low:+.2f} {high:+.2f}" for low, high in low_high))
        table.add_row(name, f"{after['rows']:,}", "equal" if same else "differs", *errors)
    return table


def measured_table(bundle: Bundle) -> str:
    """Markdown by ops and dtype: GPUs with rows, and the generations on which they are assumed.

    On all other GPUs their model is lent from those with rows (``FamilyModel.covers``).
    """
    lines = ["| op | measured on | assumed on |", "| --- | --- | --- |"]
    gpus = [load_gpu(name) for name in gpu_names() if name != "cpu"]
    for name, model in sorted(bundle.models.items()):
        gpus_of: dict[tuple[str, str], list[str]] = {}
        for gpu, by_dtype in sorted(model.source_gpus.measured.items()):
            for dtype, op in ((d, op) for d, by_op in by_dtype.items() for op in by_op):
                gpus_of.setdefault((op, dtype), []).append(gpu)
        alike: dict[tuple[str, str, str], list[str]] = {}
        for (op, dtype), on in sorted(gpus_of.items()):
            assumed = {g.architecture for g in gpus if not model.covers(g, op, dtype)}
            key = (WIDTH.get(dtype, dtype), ", ".join(on), ", ".join(sorted(assumed)))
            alike.setdefault(key, []).append(op)
        for (width, on_gpus, on_others), ops in alike.items():
            words = " ".join(dict.fromkeys([name, ", ".join(ops), width]))
            lines.append(f"| {words} | {on_gpus} | {on_others} |")
    called = {name for name, family in families().items() if family.answers and not family.on_host}
    unknown = sorted(called - {"fused"} - set(bundle.models))
    lines.append(f"| {', '.join(unknown)} | none | all |")
    return "\n".join(lines)


def keep_others(new: Path, shipped: Path) -> None:
    """Add to a new bundle of single families the shipped models of all others."""
    joined([Bundle.load(shipped), Bundle.load(new)]).save(new)


def replace_bundle(new: Path, shipped: Path) -> None:
    """Put a bundle in the place of the shipped one, whose CARD.md is kept."""
    fresh = shipped.with_name(f".{shipped.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(new, fresh)
    shutil.copy2(shipped / "CARD.md", fresh / "CARD.md")
    shutil.rmtree(shipped)
    os.replace(fresh, shipped)


def rebuild(public: Path | None, out: Path, names: Sequence[str], replace: bool) -> None:
    """Train the GPU bundle from ``public``, or the CPU bundle (None), into OUT/bundle; compare.

    ``names``: families to train. ``replace``: put it in place of the shipped one, which gives the
    other families.
    """
    shipped = SHIPPED_CPU if public is None else SHIPPED
    if public is None:
        train([Path("datasets")], out / "bundle", None, CPU_TRIALS)
    else:
        import_public(public, out / "imported")
        train_apart(out / "imported", out / "families", names).save(out / "bundle")
    rebuilt = Bundle.load(out / "bundle")
    Console(width=140).print(comparison(Bundle.load(shipped), rebuilt))
    if public is not None:
        print(measured_table(rebuilt))  # for CARD.md
    if replace:
        if public is not None and set(names) != set(MAX_ROWS):
            keep_others(out / "bundle", shipped)
        replace_bundle(out / "bundle", shipped)


def main(
    public: Annotated[Path | None, typer.Argument(help=f"folder of {', '.join(SOURCES)}")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="the CPU bundle, from datasets/")] = False,
    out: Annotated[Path | None, typer.Option(help="default: runs/shipped, -cpu")] = None,
    family: Annotated[list[str] | None, typer.Option(help="only this family; repeatable")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="then replace what ships")] = False,
) -> None:
    """Rebuild the bundle that the command line names and compare it with the one that ships."""
    if (public is None) != cpu:
        raise ValueError("give either the folder of public data or --cpu")
    if strange := set(family or ()) - MAX_ROWS.keys():
        raise ValueError(f"--family {strange.pop()!r}: allowed are {', '.join(MAX_ROWS)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out = out or Path("runs/shipped-cpu" if cpu else "runs/shipped")
    rebuild(public, out, family or list(MAX_ROWS), replace)


if __name__ == "__main__":
    run_program(main)

"""Writes the pages of a comparison, and of one family's held-out forecasts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd

from itercast.capture.base.files import write_atomic
from itercast.eval.evaluation import FILE, Evaluation
from itercast.eval.systematic import systematic_errors
from itercast.extras.pages.blocks import Device
from itercast.extras.pages.op_sections import condition_section, ops_section
from itercast.extras.pages.page import render
from itercast.extras.pages.sections import sections, tiles, worst_section
from itercast.learners.held_out import load_held_out

PAGE = "report.html"


def write_pages(folder: Path) -> Path:
    """Write the page of every device that a comparison in ``folder`` is about.

    One device: report.html; several: a folder each, and report.html with links.
    """
    found = Evaluation.load(folder)
    names = sorted({r.gpu for r in found.results})
    devices = [_device(name, found) for name in names]
    if len(devices) == 1:
        return _write(folder / PAGE, devices[0], found.machine, {})
    for device in devices:
        others = {d.name: f"../{d.name}/{PAGE}" for d in devices if d is not device}
        _write(folder / device.name / PAGE, device, found.machine, others)
    links = {d.name: f"{d.name}/{PAGE}" for d in devices}
    first = {device.name: tiles(device)[0] for device in devices}
    shown = [replace(tile, label=f"{name}: {tile.label}") for name, tile in first.items()]
    warnings = [warned.text for warned in systematic_errors(found.results)]
    page = render("All devices", shown, [], found.machine, links, warnings)
    write_atomic(folder / PAGE, page.encode())
    return folder / PAGE


def family_page(held_out: pd.DataFrame) -> str:
    """The page of one family's held-out forecasts: predicted over measured, groups, the worst."""
    if held_out.empty:
        return render("No forecasts of held-out rows", [], [], {}, {})
    name = ", ".join(sorted(set(held_out["family"])))
    device = Device(name=name, ops=held_out.reset_index(drop=True))
    drawn = [ops_section(device.ops), condition_section(device.ops)]
    title = f"How well held-out ops of {name} are forecast"
    return render(title, tiles(device), [*drawn, worst_section(device)], {}, {})


def _device(name: str, found: Evaluation) -> Device:
    ops = load_held_out(Path(found.bundle)) if found.bundle else pd.DataFrame()
    ops = ops[ops["gpu"] == name].reset_index(drop=True) if len(ops) else ops
    return Device(
        name=name, results=[r for r in found.results if r.gpu == name], ops=ops, fit=found.fit
    )


def _write(
    path: Path, device: Device, machine: Mapping[str, str], links: Mapping[str, str]
) -> Path:
    title = f"How well itercast forecasts {device.name or 'this machine'}"
    warnings = [warned.text for warned in systematic_errors(device.results)]
    page = render(title, tiles(device), sections(device), machine, links, warnings)
    write_atomic(path, page.encode())
    return path


def rewrite(reports: Path) -> list[Path]:
    """Write the pages of all comparisons below a folder anew; ValueError where there are none."""
    folders = sorted(path.parent for path in reports.glob(f"*/{FILE}"))
    if not folders:
        raise ValueError(
            f"reports {str(reports)!r}: no comparison there; run `itercast demo` first"
        )
    return [write_pages(folder) for folder in folders]

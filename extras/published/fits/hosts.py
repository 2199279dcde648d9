"""Fits hosts to published rows: `python -m itercast.extras.published.fits.hosts PUBLIC [FOLDER]`.

Prints each host's slowdown, and errors under the usual host with the row's source left out; writes
host files where a folder is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from itercast.capture.base.yaml_text import facts_of, made_of
from itercast.compose.measured_step import MeasuredStep
from itercast.extras.calibration.host_fit import fit_host, host_yaml, log_error
from itercast.extras.programs import run_program
from itercast.extras.published.lines import selected
from itercast.extras.published.models import measured_steps
from itercast.extras.published.readers import read_iterations
from itercast.learners.bundle import SHIPPED
from itercast.microbench.hardware.host import REFERENCE, HostMachine, usual_host

ROWS = 40  # of a source that has many
COMMAND = "python -m itercast.extras.published.fits.hosts PUBLIC"
FACTS = facts_of(__file__)
console = Console()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSource:
    """A host of published rows: their source, the machine, its GPUs, and which rows they are.

    ``rows``: an expression (``itercast.extras.published.lines.selected``).
    """

    source: str
    cpu: str
    rows: str
    gpus: str


HOSTS = {name: made_of(HostSource, host, f"host {name}") for name, host in FACTS["hosts"].items()}


def read_rows(public: Path, source: HostSource) -> list[MeasuredStep]:
    """The rows of a host, at most ROWS of them; ValueError where their folder is missing."""
    table = read_iterations(public, source.source)
    if table is None:
        raise ValueError(f"{str(public)!r} has no folder {source.source}")
    mine = table[selected(table, source.rows)].sort_values(["plan", "time_us"])
    return measured_steps(mine.iloc[:: max(1, len(mine) // ROWS)], SHIPPED)


def main(
    public: Annotated[
        Path, typer.Argument(help="folder of published measurements", exists=True, file_okay=False)
    ],
    out: Annotated[Path | None, typer.Argument(help="folder for host files")] = None,
) -> None:
    """Fit every host, print errors before and after, and write host files to a folder."""
    rows, hosts = dict[str, list[MeasuredStep]](), dict[str, HostMachine]()
    for name, source in HOSTS.items():
        rows[name] = read_rows(public, source)
        what = f"{COMMAND}, {len(rows[name])} rows of {source.source}; launches as slow as events"
        facts = {"source": what, "cpu": source.cpu, "fitted_on": source.source}
        hosts[name] = replace(fit_host(name, rows[name], **facts), gpus=source.gpus)
        if out is not None:
            (out / f"{name}.yaml").write_text(host_yaml(hosts[name]))
    for name, source in HOSTS.items():
        console.print(f"{name}: {len(rows[name])} rows of {source.source}, median error and bias")
        usual = usual_host([h for h in hosts.values() if source.source not in h.sources])
        for kind, host in {
            "reference": REFERENCE,
            "left out": usual,
            "fitted": hosts[name],
        }.items():
            pct = 100 * np.expm1([log_error(row, host) for row in rows[name]])
            median, bias = np.median(np.abs(pct)), np.median(pct)
            slow = f"{kind}, slowdown {host.slowdown:.2f}"
            console.print(f"  {slow}: {median:.0f} %, {bias:+.0f} %")


if __name__ == "__main__":
    run_program(main)

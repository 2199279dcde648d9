"""The command ``itercast replay``: what a scheduler gains from a table of throughputs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from itercast.capture.base.durations import counted
from itercast.eval.tables import headed, print_tables
from itercast.options import Json


def replay(
    trace: Annotated[Path, typer.Argument(help="jobs in the layout of Gavel's traces")],
    throughputs: Annotated[
        list[Path],
        typer.Option(help="gavel.json of `itercast throughput`, or a folder of such; repeatable"),
    ],
    gpus: Annotated[str, typer.Option(help="the cluster, e.g. v100-sxm-16gb=4,a100-sxm-80gb=4")],
    as_json: Json = False,
) -> None:
    """Replay jobs on a cluster, first come first served and by forecast throughputs."""
    from itercast.extras.schedulers.jobs import read_cluster, read_rates, read_trace
    from itercast.extras.schedulers.replay import NAMES
    from itercast.extras.schedulers.replay import replay as run

    cluster = read_cluster(gpus)
    jobs = read_trace(trace, read_rates(throughputs), cluster)
    found = [run(jobs, cluster, name) for name in NAMES]
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found]))
        return
    title = f"{counted(len(jobs), 'job')} on {gpus}, hours"
    heads = ("policy", "mean completion", "longest", "makespan", "GPU hours")
    table = headed(title, *heads, texts=("policy",))
    for one in found:
        seconds = (one.mean_completion_s, one.max_completion_s, one.makespan_s)
        hours = [f"{s / 3600:.2f}" for s in seconds]
        table.add_row(one.policy, *hours, f"{one.gpu_hours:.1f}")
    print_tables(table)

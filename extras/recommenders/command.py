"""The command ``itercast shard``: choose how embedding tables are sharded, without running it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from itercast.eval.tables import headed, output, print_tables
from itercast.options import Bundle, GpuName, Json, NodeName
from itercast.outputs import file_to_write

if TYPE_CHECKING:  # the command line starts without pandas
    from itercast.extras.recommenders.sharding.forecast import Forecaster, ShardingForecast
    from itercast.microbench.store import Row

BAR = 32  # characters of the longest step
Ranking = Sequence[tuple[str, "ShardingForecast"]]


def shard(
    tables: Annotated[Path, typer.Argument(help="YAML file of embedding tables and MLPs")],
    gpu: GpuName,
    gpus: Annotated[int, typer.Option(min=1, help="number of ranks")],
    node: NodeName = "",
    bundle: Bundle = None,
    sharding: Annotated[
        Path | None, typer.Option(help="torchrec's JSON of one to rank too")
    ] = None,
    out: Annotated[
        Path | None, file_to_write("JSON file to write: the fastest, in torchrec's form")
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the random proposals")] = 0,
    as_json: Json = False,
) -> None:
    """Rank shardings of embedding tables by forecast iteration time; nothing is run."""
    from itercast.capture.base.files import write_atomic
    from itercast.compose.target import find_target
    from itercast.extras.recommenders.sharding.forecast import Forecaster
    from itercast.extras.recommenders.sharding.propose import choose
    from itercast.extras.recommenders.sharding.tables import read_model
    from itercast.extras.recommenders.tables.placement import to_torchrec
    from itercast.stated import stated

    model = read_model(tables)
    target = find_target(gpu, f"dp={gpus},node={node}" if node else f"dp={gpus}", bundle)
    forecaster = Forecaster(model, target, gpus)
    ranking = choose(forecaster, seed, _given(sharding, model) if sharding else None)
    name, fastest = ranking[0]
    device = "cpu" if target.gpu.kind == "cpu" else "cuda"
    plan = to_torchrec(fastest.sharding, model.tables, forecaster.per_node, device)
    if out is not None:
        write_atomic(out, plan.encode())
    if as_json:
        asked: Row = {"case": tables, "gpu": gpu, "gpus": gpus, "node": node, "sharding": sharding}
        asked |= {"bundle": target.bundle_name, "seed": seed}
        typer.echo(json.dumps(stated(asked, "shard") | _facts(forecaster, ranking, plan)))
        return
    console, steps_us = output(), forecaster.steps_us(fastest.sharding)
    print_tables(_ranking_table(forecaster, ranking), _steps_table(name, steps_us))
    console.print(advice(fastest, steps_us, forecaster))
    if out is not None:
        console.print(f"plan written to {out}")


def _given(path: Path, model: Any) -> Any:
    from itercast.extras.recommenders.tables.placement import from_torchrec

    try:
        return from_torchrec(path.read_text(), model.tables)
    except (OSError, UnicodeDecodeError, ValueError) as exc:
        raise ValueError(f"sharding {str(path)!r}: {exc}") from None


def _facts(forecaster: Forecaster, ranking: Ranking, plan: str) -> dict[str, Any]:
    """What ``--json`` prints: all candidates, fastest first, and the fastest one's plan."""
    entries = [
        {
            "name": name,
            "iteration_us": found.iteration_us,
            "fits": found.fits,
            "steps_us": forecaster.steps_us(found.sharding),
            "lookup_us": found.lookup_us,
            "memory_bytes": found.memory_bytes,
        }
        for name, found in ranking
    ]
    return {
        "gpu": forecaster.book.gpu.name,
        "gpus": forecaster.world_size,
        "bundle": forecaster.target.bundle_name,
        "network": forecaster.cluster.network,
        "shardings": entries,
        "plan": json.loads(plan),
    }


def _ranking_table(forecaster: Forecaster, ranking: Ranking) -> Table:
    title = f"{len(forecaster.model.tables)} tables on {forecaster.world_size} ranks"
    heads = ("proposed by", "step ms", "lookups ms", "imbalance", "memory GB")
    table = headed(title, *heads, texts=("proposed by",))
    for name, found in ranking:
        mean_us = sum(found.lookup_us) / len(found.lookup_us)
        memory = f"{max(found.memory_bytes) / 1e9:.2f}" + ("" if found.fits else " too much")
        times = (f"{us / 1e3:.2f}" for us in (found.iteration_us, max(found.lookup_us)))
        table.add_row(name, *times, f"{max(found.lookup_us) / mean_us:.2f}", memory)
    return table


def _steps_table(name: str, steps_us: Mapping[str, float]) -> Table:
    """The slowest rank's steps as bars, one after the other."""
    table = Table(title=f"slowest rank under {name!r}", show_header=False)
    longest_us = max(steps_us.values())
    for step, us in steps_us.items():
        bar = "█" * round(BAR * us / longest_us) if longest_us else ""
        table.add_row(step, f"{max(0.0, us) / 1e3:.2f} ms", bar)
    return table


def advice(found: ShardingForecast, steps_us: Mapping[str, float], forecaster: Forecaster) -> str:
    """What to change first: the longest step, and the costliest table of the slowest rank."""
    step, us = max(steps_us.items(), key=lambda item: item[1])
    share = 100 * us / found.iteration_us
    text = f"first: {step}, {share:.0f} % of the iteration"
    table, table_us = _costliest_table(found, forecaster)
    mean_us = sum(found.lookup_us) / len(found.lookup_us)
    return text + (
        f"; the slowest rank spends most on table {table!r}: {table_us / 1e3:.2f} ms of "
        f"{max(found.lookup_us) / 1e3:.2f} ms (mean of ranks {mean_us / 1e3:.2f} ms)"
    )


def _costliest_table(found: ShardingForecast, forecaster: Forecaster) -> tuple[str, float]:
    """Name of the table that the slowest rank spends most time on, and that time in us."""
    slowest, times = found.lookup_us.index(max(found.lookup_us)), forecaster.times
    mine = [(time.work_us, s.table) for s, time in times.held(found.sharding) if s.rank == slowest]
    us, table = max(mine)
    return forecaster.model.tables[table].name, us

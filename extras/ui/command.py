"""The command ``itercast ui``: what is logged to MLflow, in a browser."""

from __future__ import annotations

from typing import Annotated

import typer


def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="port on this machine")] = 5000,
) -> None:
    """Serve the MLflow UI of this project; its first page compares learners."""
    from itercast.eval.tracking.store import is_server, tracking_uri
    from itercast.extras.ui.start_page import HOST, run_server

    if is_server(uri := tracking_uri()):
        typer.echo("\n".join(addresses(uri)))
    else:
        typer.echo(f"MLflow UI: http://{HOST}:{port}  (Ctrl-C ends it)")
        raise typer.Exit(run_server(port))


def addresses(uri: str) -> list[str]:
    """Name and address, on the server ``uri``, of every experiment of learners."""
    from itercast.eval.tracking.store import TRAINING_VIEW, connect

    found = connect().search_experiments(order_by=["last_update_time DESC"])
    return [
        f"{one.name}: {uri}/#/experiments/{one.experiment_id}/runs?{TRAINING_VIEW}"
        for one in found
        if one.name.startswith("ops/")
    ]

"""`itercast explore`: a page with sliders that forecasts as they move."""

from __future__ import annotations

from typing import Annotated

import typer


def explore(
    port: Annotated[int, typer.Option(min=1, max=65535, help="port on this machine")] = 5001,
) -> None:
    """Serve a page with sliders (model, GPU, number of GPUs, batch, plan) that shows forecasts."""
    from itercast.extras.explore.server import serve

    serve(port)

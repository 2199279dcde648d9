"""The command ``itercast report``: pages anew from what comparisons left on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    reports: Annotated[Path, typer.Option(help="folder that holds the report folders")] = Path(
        "reports"
    ),
) -> None:
    """Write the report pages of demo and evaluate again, from the files that these left."""
    from itercast.extras.pages.write import rewrite

    for page in rewrite(reports):
        typer.echo(page)

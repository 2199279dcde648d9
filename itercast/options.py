"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Bundle = Annotated[Path | None, typer.Option(help="bundle folder; default: local, else shipped")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]
Families = Annotated[
    list[str] | None, typer.Option("--family", help="only this family; repeatable")
]

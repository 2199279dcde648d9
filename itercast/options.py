"""Command-line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Bundle = Annotated[
    Path | None,
    typer.Option(help="bundle folder; default: a local one that knows the GPU, else a shipped one"),
]
HfConfig = Annotated[
    Path | None, typer.Option(help="Hugging Face config.json; needs --batch and --seq")
]
Host = Annotated[
    str,
    typer.Option(help="the GPU's host, a name or YAML file; `itercast list hosts`, default: usual"),
]
Stack = Annotated[
    str,
    typer.Option(
        help="software with release; `itercast list stacks`, default: torch-2.11 on a GPU"
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(help="adamw, adamw_fused, sgd, lamb or none; default: the case's own, else adamw"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Families = Annotated[
    list[str] | None, typer.Option("--family", help="only this op family; repeatable")
]

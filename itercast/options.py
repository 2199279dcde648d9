"""Command-line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Bundle = Annotated[
    Path | None,
    typer.Option(
        help="bundle folder; default: runs/demo/bundle or bundles/local if it has rows of the GPU, "
        "else a shipped one"
    ),
]
HfConfig = Annotated[
    Path | None,
    typer.Option(help="Hugging Face or timm config.json; needs --batch, and --seq for text"),
]
Host = Annotated[
    str,
    typer.Option(
        help="host of the GPU: a name of `itercast list hosts` or a YAML file; default: usual"
    ),
]
Stack = Annotated[
    str,
    typer.Option(
        help="software and version, of `itercast list stacks`; default: torch-2.11 on a GPU"
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

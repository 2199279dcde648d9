"""`itercast predict`: its options, checks and output."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from itercast.errors import one_line_errors
from itercast.options import Bundle, Json


@one_line_errors
def predict(
    case: Annotated[str, typer.Argument(help="a named case; `itercast list cases`")],
    gpu: Annotated[str, typer.Option(help="GPU name, YAML file, or cpu")] = "cpu",
    bundle: Bundle = None,
    batch: Annotated[int | None, typer.Option(min=1, help="samples per replica and step")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="sequence length")] = None,
    mode: Annotated[str, typer.Option(help="train or infer")] = "train",
    loss: Annotated[str, typer.Option(help="default or none")] = "default",
    dtype: Annotated[str, typer.Option(help="fp32, tf32, bf16 or fp16")] = "fp32",
    attn: Annotated[str, typer.Option(help="sdpa or eager")] = "sdpa",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd or none")] = "adamw",
    plan: Annotated[str, typer.Option(help='parallel plan, e.g. "dp=2"')] = "",
    strict: Annotated[bool, typer.Option(help="fail if an op has no model")] = False,
    as_json: Json = False,
) -> None:
    """Forecast one iteration of a model."""
    from dataclasses import asdict

    from itercast.api import forecast_case
    from itercast.steps import forecast_table

    found = forecast_case(
        case,
        gpu=gpu,
        plan=plan,
        bundle=bundle,
        batch=batch,
        seq=seq,
        mode=mode,
        loss=loss,
        dtype=dtype,
        attn=attn,
        optimizer=optimizer,
    )
    if strict and found.unmodelled_frac > 0:
        raise ValueError(f"{100 * found.unmodelled_frac:.1f} % of the time has no learned model")
    if as_json:
        typer.echo(json.dumps({"case": case, **asdict(found)}))
    else:
        Console().print(forecast_table(case, found))

"""`itercast predict`: its options, checks and output."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from itercast.errors import one_line_errors
from itercast.options import Bundle, Json
from microbench.cases.external.huggingface import read_config

if TYPE_CHECKING:  # no command but predict pays for these
    from compose.forecast import Forecast
    from compose.target import Target
    from microbench.opcall import StepCapture


@one_line_errors
def predict(
    case: Annotated[str, typer.Argument(help="a named case; `itercast list cases`")] = "",
    hf_config: Annotated[
        Path | None, typer.Option(help="Hugging Face config.json; needs --batch and --seq")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="a function that returns a module, (module, inputs) or (module, inputs, loss): "
            "inputs are a tensor, a tuple of arguments or a dict by name, loss(output) is a "
            "scalar; it is given batch and seq where it has such parameters. A module alone is a "
            "transformers model or takes no inputs.",
        ),
    ] = "",
    gpu: Annotated[str, typer.Option(help="GPU name, YAML file, or cpu")] = "cpu",
    bundle: Bundle = None,
    batch: Annotated[int | None, typer.Option(min=1, help="samples per replica and step")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="sequence length")] = None,
    mode: Annotated[str, typer.Option(help="train or infer")] = "train",
    loss: Annotated[
        str, typer.Option(help="default, or none: backward from the output")
    ] = "default",
    dtype: Annotated[str, typer.Option(help="fp32, tf32, bf16, fp16 or fp8")] = "fp32",
    attn: Annotated[str, typer.Option(help="sdpa or eager")] = "sdpa",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd or none")] = "adamw",
    plan: Annotated[str, typer.Option(help='parallel plan, e.g. "dp=2" or "dp=8,amp"')] = "",
    compiled: Annotated[
        bool, typer.Option("--compile", help="as torch.compile fuses and launches it")
    ] = False,
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="the whole step launched as one CUDA graph")
    ] = False,
    strict: Annotated[bool, typer.Option(help="fail if an op has no model")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="write the timeline here, for Perfetto or chrome://tracing")
    ] = None,
    as_json: Json = False,
) -> None:
    """Forecast one iteration of a model: a named case, a configuration, or a function's module."""
    from itercast.commands.shared import forecast_table
    from microbench.slow_imports import without_scikit_learn

    if not model:  # a function of one's own may need it
        without_scikit_learn()
    from compose.capture_model import capture, micro_size
    from compose.graph.launch_modes import with_engine
    from compose.parallel.plan import ParallelPlan
    from compose.simulate.timeline import trace_json
    from compose.target import find_target, forecast_step, timeline_of
    from microbench.store import write_atomic

    if compiled and cuda_graph:
        raise ValueError("--compile and --cuda-graph: only one of them")
    engine = "compile" if compiled else "graph" if cuda_graph else "eager"
    if sum(map(bool, (case, hf_config, model))) != 1:
        raise ValueError("predict takes one of CASE, --hf-config and --model")
    if hf_config is not None and batch is None:
        raise ValueError("--hf-config needs --batch, and --seq for text")
    asked = case or hf_config or _function(model)
    split = ParallelPlan.parse(plan)
    size = micro_size(asked, split, batch, seq)
    target = find_target(gpu, plan, bundle)
    step = capture(
        asked,
        loss=loss,
        mode=mode,
        optimizer=optimizer,
        dtype=dtype,
        attn=attn,
        amp=split.amp,
        whole=trace is not None,  # a timeline shows every op
        **size,
    )
    step = with_engine(step, engine)
    found = forecast_step(step, target)
    if strict and found.unmodelled_frac > 0:
        raise typer.Exit(_not_modelled(found, step, target))
    if trace is not None:
        write_atomic(trace, json.dumps(trace_json(*timeline_of(step, target))).encode())
    name = read_config(hf_config).name if hf_config else case or model
    if as_json:
        typer.echo(json.dumps({"case": name, **asdict(found)}))
    else:
        Console().print(forecast_table(name, found))


def _function(name: str) -> Any:
    from microbench.cases.external.user_module import load_function  # lazy: needs torch

    return load_function(name)


def _not_modelled(found: Forecast, step: StepCapture, target: Target) -> int:
    """Says which ops have no model; exit code 1."""
    from compose.pricing.price_book import UNMODELLED, price_book, priceable

    book = price_book(target.bundle, target.gpu, target.threads)
    ops = book.price([priceable(c) for c in step.calls])
    names = sorted({op.op for op in ops if op.family == UNMODELLED})
    share = f"{100 * found.unmodelled_frac:.1f} % of the time has no learned model"
    typer.echo(f"itercast: {share}: {', '.join(names or ['collectives'])}", err=True)
    return 1

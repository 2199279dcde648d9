"""`itercast predict`: its options, checks and output."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from itercast.errors import one_line_errors
from itercast.microbench.cases.external.huggingface import read_config
from itercast.options import Bundle, HfConfig, Host, Json, Optimizer, Stack

if TYPE_CHECKING:  # no command but predict pays for these
    from itercast.compose.forecast import Forecast
    from itercast.compose.target import Target
    from itercast.microbench.opcall import StepCapture

Model = Annotated[
    str,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="a function that returns a module, (module, inputs) or (module, inputs, loss). "
        "inputs: a tensor, a tuple of arguments or a dict by name; loss(output) is a scalar. "
        "Parameters batch and seq of the function get these options. A module without inputs "
        "is a transformers model, or takes none.",
    ),
]
Trace = Annotated[
    Path | None, typer.Option(help="timeline to write, for Perfetto or chrome://tracing")
]
Indices = Annotated[
    str,
    typer.Option(
        help="which rows embedding bags look up: uniform, zipf:1.05, or a file of lookups"
    ),
]
Lora = Annotated[
    int,
    typer.Option(
        min=0, help="train LoRA adapters of this rank on --hf-config, its own weights frozen"
    ),
]
Compiled = Annotated[bool, typer.Option("--compile", help="the model under torch.compile")]
CudaGraph = Annotated[
    bool, typer.Option("--cuda-graph", help="the whole step launched as one CUDA graph")
]
Explain = Annotated[
    bool,
    typer.Option(
        "--explain-assumptions",
        help="list the assumed numbers, the time that rests on each, and their sources",
    ),
]


@one_line_errors
def predict(
    case: Annotated[
        str, typer.Argument(help="name of a model; `itercast list cases` prints them")
    ] = "",
    hf_config: HfConfig = None,
    model: Model = "",
    gpu: Annotated[str, typer.Option(help="GPU name, YAML file, or cpu")] = "cpu",
    bundle: Bundle = None,
    batch: Annotated[int | None, typer.Option(min=1, help="samples per replica and step")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="sequence length")] = None,
    mode: Annotated[str, typer.Option(help="train or infer")] = "train",
    loss: Annotated[
        str, typer.Option(help="default, or none: backward starts at the output")
    ] = "default",
    dtype: Annotated[str, typer.Option(help="fp32, tf32, bf16, fp16 or fp8")] = "fp32",
    attn: Annotated[str, typer.Option(help="sdpa or eager")] = "sdpa",
    optimizer: Optimizer = "",
    lora: Lora = 0,
    plan: Annotated[str, typer.Option(help='parallel plan, e.g. "dp=2" or "dp=8,amp"')] = "",
    compiled: Compiled = False,
    cuda_graph: CudaGraph = False,
    host: Host = "",
    stack: Stack = "",
    indices: Indices = "",
    strict: Annotated[bool, typer.Option(help="exit code 1 if an op has no learned model")] = False,
    trace: Trace = None,
    explain_assumptions: Explain = False,
    as_json: Json = False,
) -> None:
    """Forecast one iteration of a model: a named case, a configuration, or a model of your own."""
    if sum(map(bool, (case, hf_config, model))) != 1:
        raise ValueError("predict takes one of CASE, --hf-config and --model")
    if hf_config is not None and batch is None:
        raise ValueError("--hf-config needs --batch, and --seq for text")
    step, target = prepared(
        case or hf_config or named_function(model),
        batch=batch,
        seq=seq,
        gpu=gpu,
        plan=plan,
        bundle=bundle,
        host=host,
        stack=stack,
        indices=indices,
        engine=engine_name(compiled, cuda_graph),
        loss=loss,
        mode=mode,
        optimizer=optimizer,
        dtype=dtype,
        attn=attn,
        lora=lora,
        whole=trace is not None,  # a timeline shows every op
    )
    from itercast.compose.target import forecast_step

    found = forecast_step(step, target)
    if strict and found.unmodelled_frac > 0:
        raise typer.Exit(_not_modelled(found, step, target))
    if trace is not None:
        _write_trace(trace, step, target)
    name = read_config(hf_config).name if hf_config else case or model
    _print(name, found, as_json=as_json, explain=explain_assumptions)


def prepared(asked: Any, **question: Any) -> tuple[StepCapture, Target]:
    """The captured micro-batch of a rank, and the target; arguments are those of ``predict``."""
    from itercast.microbench.slow_imports import without_scikit_learn

    if not callable(asked):  # a function of one's own may need it
        without_scikit_learn()
    from itercast.compose.predict import prepare

    return prepare(asked, **question)


def engine_name(compiled: bool, cuda_graph: bool) -> str:
    """How the step is launched, as ``with_engine`` names it."""
    names = ["compile"] * compiled + ["graph"] * cuda_graph
    return "+".join(names) or "eager"


def named_function(name: str) -> Any:
    from itercast.microbench.cases.external.user_module import load_function  # lazy: needs torch

    return load_function(name)


def _write_trace(path: Path, step: StepCapture, target: Target) -> None:
    """Write the timeline of the slowest rank as a Chrome trace."""
    from itercast.compose.simulate.timeline import trace_json
    from itercast.compose.target import timeline_of
    from itercast.microbench.store import write_atomic

    write_atomic(path, json.dumps(trace_json(*timeline_of(step, target))).encode())


def _print(name: str, found: Forecast, *, as_json: bool, explain: bool) -> None:
    """Print a forecast as one JSON object or as tables."""
    from itercast.commands.shared import assumption_sources, assumptions_table, forecast_table
    from itercast.compose.explain.assumptions import assumed_parts

    parts = assumed_parts(found) if explain else []
    if as_json:
        assumptions = {"assumptions": [asdict(part) for part in parts]} if explain else {}
        typer.echo(json.dumps({"case": name, **asdict(found), **assumptions}))
        return
    console = Console()
    console.print(forecast_table(name, found))
    if explain:
        console.print(assumptions_table(parts))
        for line in assumption_sources(parts):
            console.print(line, markup=False, highlight=False)


def _not_modelled(found: Forecast, step: StepCapture, target: Target) -> int:
    """Print which ops have no model; returns exit code 1."""
    from itercast.compose.graph.launch_modes import as_launched
    from itercast.compose.pricing.price_book import UNMODELLED, price_book, priceable

    book = price_book(target.bundle, target.gpu, target.threads, target.stack, target.host)
    ops = book.price([priceable(c) for c in as_launched(step).calls])
    names = sorted({op.op for op in ops if op.family == UNMODELLED})
    share = f"{100 * found.unmodelled_frac:.1f} % of the time has no learned model"
    typer.echo(f"itercast: {share}: {', '.join(names or ['collectives'])}", err=True)
    return 1

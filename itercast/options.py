"""Command-line options that several commands share, and the question that some of them make up."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import typer

from itercast.capture.base.extensions import function_of
from itercast.capture.base.slow_imports import without_scikit_learn
from itercast.capture.cases.external.huggingface import read_config
from itercast.capture.opcall import NARROW
from itercast.capture.plan import ParallelPlan
from itercast.capture.step import ALLOWED
from itercast.names import completing
from itercast.outputs import file_to_write

if TYPE_CHECKING:  # the command line starts without pandas
    from itercast.capture.opcall import StepCapture
    from itercast.compose.machines.file import KnownMachine
    from itercast.compose.target import Target
    from itercast.microbench.hardware.spec import Gpu
    from itercast.microbench.store import Row

MOST = 99_999_999  # samples, tokens or GPUs that an option may state
P = ParamSpec("P")
R = TypeVar("R")


def fetched_root(text: str) -> Path:
    """Parses an option that names a dataset root: the folder, or a local copy of the URL."""
    try:
        root: Path = function_of("roots", "fetched")(text)
        return root
    except (ValueError, OSError) as exc:
        raise typer.BadParameter(str(exc)) from exc


def each_named(values: list[str] | None) -> list[str] | None:
    """The names of an option that is repeated, or that takes several between commas."""
    return [name.strip() for value in values for name in value.split(",")] if values else None


def whole_number(text: str | int) -> int:
    """Parses an option that counts: samples, tokens, GPUs."""
    plain = str(text).strip()
    if not (plain.isascii() and plain.isdecimal() and 1 <= int(plain) <= MOST):
        raise typer.BadParameter(f"{text!r} is no whole number from 1 to {MOST:,}")
    return int(plain)


Case = Annotated[
    str,
    typer.Argument(
        help="name of a model; `itercast list cases` prints them",
        autocompletion=completing("cases"),
    ),
]
GpuName = Annotated[
    str, typer.Option(help="GPU name, YAML file, or cpu", autocompletion=completing("gpus"))
]
NodeName = Annotated[
    str, typer.Option(help="node name or YAML file", autocompletion=completing("nodes"))
]
Bundle = Annotated[
    Path | None,
    typer.Option(
        help="bundle folder; default: the newest of runs/demo/bundle and bundles/local that has "
        "rows of the GPU, else a shipped one"
    ),
]
Hardware = Annotated[
    Path | None,
    typer.Option(help="hardware file (YAML) of a GPU that `itercast list gpus` lacks"),
]
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
HfConfig = Annotated[
    Path | None,
    typer.Option(help="Hugging Face or timm config.json; needs --batch, and --seq for text"),
]
counting = functools.partial(typer.Option, parser=whole_number, metavar="N")
Gpus = Annotated[int | None, counting(help="number of GPUs")]
Batch = Annotated[int | None, counting(help="samples per replica and step")]
GlobalBatch = Annotated[
    int | None, counting(help="samples per step over all replicas, for --batch")
]
Seq = Annotated[int | None, counting(help="sequence length")]
Lengths = Annotated[
    str,
    typer.Option(
        help="lengths of sequences up to --seq: a file of numbers, uniform:LOW:HIGH or "
        "lognormal:MEDIAN:SIGMA; padded to the longest of a micro-batch"
    ),
]
Packed = Annotated[
    bool, typer.Option("--packed", help="with --lengths: rows of --seq tokens hold several")
]
Dtype = Annotated[
    str,
    typer.Option(
        help="fp32 (without TF32), tf32, bf16, fp16, fp8, nvfp4 or mxfp4; default: fp32, under amp "
        "bf16, or fp16 on a GPU without bf16"
    ),
]
ChannelsLast = Annotated[
    bool, typer.Option("--channels-last", help="model and images in torch.channels_last (NHWC)")
]
Host = Annotated[
    str,
    typer.Option(
        help="host of the GPU: a name of `itercast list hosts` or a YAML file; default: usual",
        autocompletion=completing("hosts"),
    ),
]
Stack = Annotated[
    str,
    typer.Option(
        help="software and version, of `itercast list stacks`; default: torch-2.11 on a GPU",
        autocompletion=completing("stacks"),
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(ALLOWED['optimizer'])}; +clip: gradients are clipped to a norm, "
        "+ema: a moving average of parameters is kept; default: the case's own, else adamw"
    ),
]
Cluster = Annotated[
    Path | None,
    typer.Option(help="YAML file of unlike GPUs and the links between them, instead of --gpu"),
]
Cores = Annotated[
    int | None, typer.Option(min=1, help="CPU cores of the host; default: as its node's file")
]
Machine = Annotated[
    Path | None,
    typer.Option(
        help="machine file of the GPUs, as `itercast calibrate --iterations` writes it; default: "
        "a typical machine"
    ),
]
Anchor = Annotated[
    Path | None,
    typer.Option(help="measured steps of the machine: a YAML list, or rows of `itercast collect`"),
]
Input = Annotated[Path | None, typer.Option(help="its DataLoader, of `itercast input --out`")]
Prices = Annotated[Path | None, typer.Option(help="YAML file of GPUs and USD per hour of one")]
Trace = Annotated[Path | None, file_to_write("timeline to write, for Perfetto or chrome://tracing")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Families = Annotated[
    list[str] | None,
    typer.Option(
        "--family",
        help="only these op families: a,b, or repeated",
        callback=each_named,
        autocompletion=completing("families"),
    ),
]


@dataclass(frozen=True, kw_only=True)
class CaseDefaults:
    """Values of options that are not given; 0: the model says."""

    batch: int = 0
    seq: int = 0
    optimizer: str = "adamw"


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which model, trained how and where: the options that ``predict`` and ``explain`` share."""

    case: Case = ""
    hf_config: HfConfig = None
    model: Model = ""
    gpu: GpuName = "cpu"
    bundle: Bundle = None
    batch: Batch = None
    global_batch: GlobalBatch = None
    seq: Seq = None
    mode: Annotated[str, typer.Option(help="train or infer")] = "train"
    loss: Annotated[str, typer.Option(help="default, or none: backward starts at the output")] = (
        "default"
    )
    dtype: Dtype = ""
    attn: Annotated[str, typer.Option(help="sdpa or eager")] = "sdpa"
    optimizer: Optimizer = ""
    lora: Annotated[
        str,
        typer.Option(
            help="train LoRA adapters on --hf-config, its own weights frozen: their rank, or "
            "rank=16,layers=all-linear,weights=nf4 (QLoRA)"
        ),
    ] = ""
    channels_last: ChannelsLast = False
    plan: Annotated[str, typer.Option(help='parallel plan, e.g. "dp=2" or "dp=8,amp"')] = ""
    compile: Annotated[bool, typer.Option("--compile", help="the model under torch.compile")] = (
        False
    )
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="the whole step launched as one CUDA graph")
    ] = False
    host: Host = ""
    stack: Stack = ""
    indices: Annotated[
        str,
        typer.Option(
            help="which rows embedding bags look up: uniform, zipf:1.05, or a file of lookups"
        ),
    ] = ""

    lengths: Lengths = ""
    packed: Packed = False
    machine: Machine = None
    anchor: Anchor = None
    input: Input = None

    def __post_init__(self) -> None:
        if sum(map(bool, (self.case, self.hf_config, self.model))) != 1:
            raise ValueError("a model is one of CASE, --hf-config and --model: give one of them")
        if self.batch and self.global_batch:
            raise ValueError("--batch is a replica's, --global-batch that of all: give one of them")
        if self.dtype and self.dtype not in (known := (*ALLOWED["dtype"], *NARROW)):
            raise ValueError(f"dtype {self.dtype!r}: allowed are {', '.join(known)}")
        if self.optimizer not in ("", "none") and self.mode == "infer":
            raise ValueError(f"--optimizer {self.optimizer}: inference (--mode infer) has none")

    @property
    def name(self) -> str:
        """The model's name, as reports say it."""
        return read_config(self.hf_config).name if self.hf_config else self.case or self.model

    def asked(self) -> Any:
        """The model as ``itercast.api.predict`` takes it: a name, a config file, or a function."""
        if not self.model:
            return self.case or self.hf_config
        from itercast.capture.cases.external.user_module import load_function  # needs torch

        return load_function(self.model)

    def arguments(self) -> Row:
        """The other arguments of ``itercast.api.predict``, by name."""
        options = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("case", "hf_config", "model", "compile", "cuda_graph", "global_batch"):
            del options[name]
        options["machine"] = self.known_machine()
        del options["anchor"], options["input"]
        if self.input:
            from itercast.capture.input.lane import read_lane

            options["lane"] = read_lane(self.input)
        options["batch"] = self.replica_batch()
        engines = ["compile"] * self.compile + ["graph"] * self.cuda_graph
        return {**options, "engine": "+".join(engines) or "eager"}

    def known_machine(self) -> KnownMachine | None:
        """Speed factors of the machine, from --machine and --anchor; None without either."""
        if not (self.machine or self.anchor):
            return None
        from itercast.anchors import known_machine  # imports NumPy

        return known_machine(self.machine, self.anchor, Question)

    def replica_batch(self) -> int | None:
        """Samples of a replica: --batch, or its share of --global-batch; None: the case's own."""
        if not self.global_batch:
            return self.batch
        dp = ParallelPlan.parse(self.plan).dp
        if self.global_batch % dp:
            raise ValueError(f"--global-batch {self.global_batch} does not divide by dp={dp}")
        return self.global_batch // dp

    def samples_over(self, gpus: int) -> int | None:
        """Samples per step of all plans of a search: --batch on each GPU, or --global-batch."""
        return self.batch * gpus if self.batch else self.global_batch

    def seq_asked(self) -> int:
        """Tokens of a sample: --seq, else the case's, 0 without any."""
        return self.seq or self.case_defaults.seq

    @property
    def case_defaults(self) -> CaseDefaults:
        """Batch, sequence length and optimizer of the case; other models have but an optimizer."""
        if not self.case:
            return CaseDefaults()
        from itercast.capture.cases.registry import case  # imports NumPy

        chosen = case(self.case)
        return CaseDefaults(batch=chosen.batch, seq=chosen.seq, optimizer=chosen.optimizer)

    def dtype_on(self, gpus: Sequence[Gpu]) -> str:
        """The dtype of the step on these GPUs."""
        from itercast.compose.target import step_dtype

        return step_dtype(self.dtype, ParallelPlan.parse(self.plan).amp, gpus) or "fp32"

    def prepared(self, **more: Any) -> tuple[StepCapture, Target]:
        """The captured micro-batch of a rank, and the target; ``more``: arguments of ``prepare``.

        What the user's own code prints goes to the error output, away from the answer.
        """
        if self.hf_config is not None and not (self.batch or self.global_batch):
            raise ValueError("--hf-config needs --batch, and --seq for text")
        with prints_aside(), nullcontext() if self.model else without_scikit_learn():
            from itercast.compose.predict import prepare

            step, target = prepare(self.asked(), **self.arguments(), **more)
        self._check_seq(step, target.plan)
        warn_of_dtype(self.dtype_on([target.gpu]), target)
        return step, target

    def _check_seq(self, step: StepCapture, plan: ParallelPlan) -> None:
        """ValueError for a length that no input of the model has."""
        if self.seq and not (self.model or self.lengths):
            length, takes_one = self.seq // plan.cp, not self.case or self.case_defaults.seq
            if not takes_one or not any(length in x.shape[1:] for x in step.inputs):
                problem = f"no input of {self.name} has that length; it takes no sequence"
                raise ValueError(f"--seq {self.seq}: {problem}")


@contextmanager
def prints_aside() -> Iterator[None]:
    """Send what is printed inside the context to the error output."""
    with redirect_stdout(sys.stderr):
        yield


def without_units(dtypes: Sequence[str], gpu: Gpu) -> list[str]:
    """A line for each dtype that a GPU has no units for: the rate its products are forecast at."""
    if gpu.kind != "gpu":
        return []
    dtype_names = ", ".join(gpu.peak_flops_per_s)
    rest = "its products are forecast at the rate of fp32"
    lacking = [d for d in dtypes if d not in ("fp32", *NARROW, *gpu.peak_flops_per_s)]
    return [f"{gpu.name} has no {d} units ({dtype_names}): {rest}" for d in lacking]


def warn_of_dtype(dtype: str, target: Target) -> None:
    """Say in one line that a GPU has no units for a dtype, and at which rate it is forecast."""
    for line in without_units([dtype], target.gpu):
        typer.echo(f"itercast: {line}", err=True)


def asks(
    command: Callable[Concatenate[Any, P], R], only: Sequence[str] = (), without: Sequence[str] = ()
) -> Callable[..., R]:
    """Decorate a command whose first parameter is a ``Question``: it gets the question's options.

    typer reads the options from the signature, which is made here. ``only``: these options instead
    of all, ``without``: all but these. An option that the command defines itself (such as --gpu for
    several GPUs) replaces the question's. The first parameter is None if no model is named and its
    type allows that.
    """
    hints = get_type_hints(Question, include_extras=True)
    first, *own = inspect.signature(command, eval_str=True).parameters.values()
    may_be_none = first.annotation == Question | None
    taken = {*without, *(p.name for p in own)}
    asked = [f for f in fields(Question) if f.name not in taken and (not only or f.name in only)]

    @functools.wraps(command)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        values: Row = {field.name: options.pop(field.name) for field in asked}
        named = any(values.get(name) for name in ("case", "hf_config", "model"))
        return command(Question(**values) if named or not may_be_none else None, *args, **options)

    keyword = inspect.Parameter.KEYWORD_ONLY
    of_question = [
        inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name])
        for f in asked
    ]
    needed = [p for p in own if p.default is inspect.Parameter.empty]  # come first, as in Python
    optional = [p for p in own if p.default is not inspect.Parameter.empty]
    ordered = [p.replace(kind=keyword) for p in (*needed, *of_question, *optional)]
    signature = inspect.Signature(ordered)
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return wrapped

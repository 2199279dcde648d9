"""What a forecast is of: one line above each answer, and all options with ``--json``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from itercast.capture.base.durations import counted
from itercast.capture.base.extensions import function_of
from itercast.capture.plan import ParallelPlan

if TYPE_CHECKING:  # the command line starts without pandas
    from itercast.capture.opcall import StepCapture
    from itercast.compose.forecast import Forecast
    from itercast.compose.programs.samples import Batch
    from itercast.compose.target import Target
    from itercast.microbench.hardware.spec import Gpu
    from itercast.microbench.store import Facts, Row
    from itercast.options import Question

HALF = ("bf16", "fp16")


def question_facts(
    question: Question, step: StepCapture, target: Target, forecast: Forecast
) -> Row:
    """What ``--json`` says of the question: ``question``, ``command``, ``step``, ``unusual``...

    ``question`` has all options by name, with the defaults of those not given; ``command`` is the
    command line that repeats the forecast with them; ``step`` has the sizes; ``unusual`` and
    ``assumes`` are lines for the user.
    """
    size = sizes(question, step, target.plan)
    values = {
        **options(question),
        "dtype": question.dtype_on([target.gpu]),
        "optimizer": step.optimizer,
        "compile": "compile" in step.engine,
        "cuda_graph": "graph" in step.engine,
        "plan": str(target.plan),
        "bundle": target.bundle_name,
        "host": "" if target.gpu.kind == "cpu" else target.host.name,
        "stack": target.stack,
    }
    if not question.model:  # the user's function has sizes of its own
        values |= {"batch": size["batch"], "seq": size["seq"], "global_batch": None}
    lines = unusual(values, size, target.plan, target.gpu)
    may_use_tf32 = values["dtype"] == "fp32" and "tf32" in target.gpu.peak_flops_per_s
    kinds = ["convolutions"] * any("convolution" in call.op for call in step.calls)
    kinds += ["recurrent layers"] * bool(step.networks)
    if may_use_tf32 and not mixed(values) and kinds:
        names = " and ".join(kinds)
        lines.append(f"{names} are in fp32, too; torch's default is TF32 (--dtype tf32)")
    return {**stated(values), "step": size, "unusual": lines, "assumes": assumes([forecast])}


def options(question: Question) -> Row:
    """All options of a question by name, as they were given."""
    return {f.name: getattr(question, f.name) for f in fields(question)}


def stated(values: Facts, name: str = "predict") -> Row:
    """``question``: the options that have a value; ``command``: ``itercast name`` with them."""
    stated_values = {n: str(v) if isinstance(v, Path) else v for n, v in values.items() if v}
    return {"question": stated_values, "command": command(name, stated_values)}


def sizes(question: Question, step: StepCapture, plan: ParallelPlan) -> Row:
    """Sizes of a step: samples of a replica and of all, micro-batches of one, tokens of a sample.

    A captured step is one micro-batch of a rank, whose sequence ``cp`` ranks share.
    """
    batch = step.samples * plan.microbatches
    seq = question.seq_asked() or round(step.tokens / max(1, step.samples)) * plan.cp
    return {
        "batch": batch,
        "replicas": plan.dp,
        "global_batch": batch * plan.participants,
        "microbatches": plan.microbatches,
        "seq": seq,
    }


def command(name: str, asked: Facts) -> str:
    """The command line ``itercast name`` with these options, by their Python names."""
    words = ["itercast", name, *([str(asked["case"])] if asked.get("case") else [])]
    for option, value in asked.items():
        if option != "case":
            flag = f"--{option.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


def assumes(forecasts: Sequence[Forecast]) -> str:
    """What forecasts take for granted, and how much of their time no measurement decides."""
    stack, host, network, bundle = (
        _distinct(forecasts, name) for name in ("stack", "host", "network", "bundle")
    )
    hint = "no node named (--node, or node= of --plan): "
    network = network.replace("no node named: ", hint, 1).replace("no node named: ", "")
    parts = [f"software {stack} (--stack)"] * bool(stack) + [f"host {host} (--host)"] * bool(host)
    parts += [network] * bool(network)
    most = max(forecasts, key=lambda f: f.assumed_frac)
    assumed_pct = f"{100 * most.assumed_frac:.0f}"
    unmodelled_pct = 100 * max(f.unmodelled_frac for f in forecasts)
    upto = "up to " if len(forecasts) > 1 and assumed_pct != "0" else ""
    shares = f"{upto}{assumed_pct} % of the time rests on assumed numbers"
    if assumed_pct != "0" and (assumed_us := most.assumed_by_us):
        most_on = max(assumed_us, key=assumed_us.__getitem__)
        shares += f", most on {most_on}: predict and run --explain-assumptions say why"
    shares += f" (ops without a trained model: {unmodelled_pct:.0f} %)"
    return f"assumes {', '.join(parts)}; {shares}; bundle {bundle}"


def _distinct(forecasts: Sequence[Forecast], field: str) -> str:
    """The distinct values of a field: the first two, and how many more there are.

    A value that another value begins with is left out, such as a node without what lies beyond it.
    """
    found = dict.fromkeys(filter(None, (str(getattr(f, field)) for f in forecasts)))
    values = [v for v in found if not any(other.startswith(f"{v},") for other in found)]
    others = [counted(len(values) - 2, "other")] * (len(values) > 2)
    return " or ".join([*values[:2], *others])


def say_step(facts: Facts) -> None:
    """Print the line of ``step_line``, and below it what is unusual and what is assumed."""
    say(step_line(facts["question"], facts["step"]), facts)


def say(line: str, facts: Facts) -> None:
    """Print what is forecast, what is unusual about it and what is assumed, one line each.

    Lines on what is known of the machine follow, if anything is.
    """
    assumed, unusual = facts["assumes"].replace("; ", "\n  "), facts["unusual"]
    lines = [line, *(f"note: {x}" for x in unusual), assumed, *facts.get("machine", ())]
    typer.echo("\n".join(lines))


def machine_lines(target: Target) -> list[str]:
    """What measured steps said of the machine; none where none is known."""
    if target.known is None:
        return []
    return list(function_of("anchors", "in_words")(target.known, target.gpu.name))


def script_line(
    name: str, batch: Batch, worlds: Sequence[int], products: Sequence[str], engine: str
) -> str:
    """What is forecast of a script, in one line.

    ``worlds``: numbers of ranks; ``products``: dtypes of its products.
    """
    samples = "samples not known"
    if batch.own_samples:
        samples = f"{batch.own_samples:,} sample{'' if batch.own_samples == 1 else 's'} a rank"
    if batch.samples and batch.grouped and len(worlds) == 1 < worlds[0]:
        samples += f", {batch.samples:,.0f} in all"
        sharing = round(batch.own_samples * worlds[0] / batch.samples)
        samples += f", each shared by {sharing} ranks" if sharing > 1 else ""
    ranks = f"one of {' or '.join(map(str, worlds))} ranks" if max(worlds) > 1 else "one process"
    parts = [f"matrix products in {' and '.join(products)}"] * bool(products)
    parts.append(launches("compile" in engine, "graph" in engine))
    return f"a step of {name} as {ranks}: {samples}; {', '.join(parts)}"


def step_line(asked: Facts, size: Mapping[str, int]) -> str:
    """What is forecast of a model, in one line; ``size`` as of ``sizes``."""
    tokens = f" x {size['seq']:,} tokens" if size["seq"] else ""
    samples = f"{size['batch']:,} samples{tokens} per replica"
    if size["replicas"] > 1:
        samples += f", {size['global_batch']:,} in all"
    if size["microbatches"] > 1:
        samples += f", in {size['microbatches']} micro-batches"
    return f"{asked.get('mode', 'train')}: {samples}; {settings(asked)}"


def settings(asked: Facts) -> str:
    """Precision, optimizer, attention, launches and the like of a step."""
    dtype, trained = asked["dtype"], asked.get("mode", "train") == "train"
    casts = "by FSDP" if "zero=" in str(asked.get("plan", "")) else "autocast"
    parts = [f"{dtype} {casts}, fp32 weights" if mixed(asked) else f"{dtype} throughout"]
    parts += [asked["optimizer"]] if trained else []
    if asked.get("seq") or asked.get("attn") == "eager":
        parts.append(f"{asked.get('attn', 'sdpa')} attention")
    parts.append(launches(asked.get("compile"), asked.get("cuda_graph")))
    parts += [f"LoRA {asked['lora']}"] if asked.get("lora") else []
    parts += ["channels last"] if asked.get("channels_last") else []
    parts += ["backward from the output"] if trained and asked.get("loss") == "none" else []
    return ", ".join(parts)


def launches(compiled: bool | None, graphed: bool | None) -> str:
    """How a step is launched, in words."""
    words = ["torch.compile"] * bool(compiled) + ["one CUDA graph"] * bool(graphed)
    return " in ".join(words) or "eager launches"


def mixed(asked: Facts) -> bool:
    """Whether a step is of mixed precision."""
    return bool(asked.get("amp")) or "amp" in str(asked.get("plan", "")).split(",")


def unusual(asked: Facts, size: Mapping[str, int], plan: ParallelPlan, gpu: Gpu) -> list[str]:
    """What of the question differs from how models are usually trained, a line each."""
    return list(filter(None, (unusual_dtype(asked, gpu), *_unusual_plan(asked, size, plan))))


def unusual_dtype(asked: Facts, gpu: Gpu) -> str:
    """A line where fp32 leaves tensor cores idle, or weights have 16 bits; else empty."""
    dtype = asked["dtype"]
    faster = next((d for d in HALF if gpu.peak(d) > gpu.peak("fp32")), "")
    if dtype == "fp32" and faster and gpu.kind == "gpu":
        usual = f"usual is mixed precision (amp, autocast) or {faster} throughout (--dtype)"
        return f"fp32 leaves the tensor cores idle; {usual}"
    if dtype in HALF and not mixed(asked) and asked.get("mode", "train") == "train":
        return f"weights and optimizer state are in {dtype}, too; usual is mixed precision (amp)"
    return ""


def _unusual_plan(asked: Facts, size: Mapping[str, int], plan: ParallelPlan) -> list[str]:
    """Lines about eager attention, and about pipelines with fewer micro-batches than stages."""
    lines = []
    if asked.get("attn") == "eager":
        lines.append("attention is eager; usual is sdpa")
    if size.get("microbatches", plan.pp) < plan.pp:
        few = f"{counted(size['microbatches'], 'micro-batch')} for {plan.pp} stages"
        lines.append(f"{few}: most of the pipeline waits; usual is several per stage (micro=...)")
    return lines

"""A user's measured steps (anchors): what they tell of the machine, what to measure next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import exp, log
from statistics import geometric_mean, mean

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import Forecast
from itercast.compose.machines.factors import NAMES, Factors
from itercast.compose.machines.file import KnownMachine
from itercast.compose.machines.state import Anchor, Machine
from itercast.compose.machines.typical import typical
from itercast.compose.measured_step import MeasuredStep
from itercast.compose.parallel.device_memory import MEMORY_ERROR
from itercast.compose.target import Target, forecast_step

RAISED = 0.25  # no assumption: by which log factors are raised for a finite difference
OTHER_MEMORY = 5  # no assumption: times a forecast's error beyond which memory is not believed
ALIKE = 2.5  # no assumption: interval ends of a step beyond which two are not of one configuration
ABSURD = 6.5  # no assumption: deviations of a new machine beyond which a step is not believed
WORDS = {
    "products": "products",
    "memory": "other kernels",
    "links": "messages within a node",
    "network": "messages between nodes",
    "host": "the host",
    "ranks": "messages at twice the nodes",
}
UNKNOWN = 0.95  # no assumption: a factor is unknown whose interval is this wide of a new machine's


def sensitivity(step: StepCapture, target: Target) -> tuple[float, ...]:
    """Derivative of the log forecast by the log of each factor, in the order of ``NAMES``.

    By finite differences, so that messages and host work count that a slower machine no longer
    hides.
    """
    return tuple(map(sum, zip(*_sensitivities(step, target), strict=True)))


def _sensitivities(step: StepCapture, target: Target) -> list[tuple[float, ...]]:
    """What messages that compute waits for add to ``sensitivity``, and what all else adds."""
    logs, base = target.machine.logs, forecast_step(step, target)
    found = []
    for at, name in enumerate(NAMES):
        if base.comm_us == 0 and name in ("links", "network", "ranks"):
            found.append((0.0, 0.0))
            continue
        raised = [x + RAISED * (at == i) for i, x in enumerate(logs)]
        book = target.book.on(Factors.of_logs(raised), target.known, target.model)
        slower = forecast_step(step, target, book)
        change, waiting = _log_changes(base, slower.iteration_us, slower.exposed_comm_us)
        found.append((waiting / RAISED, (change - waiting) / RAISED))
    return list(zip(*found, strict=True))


def _log_changes(base: Forecast, time_us: float, exposed_us: float) -> tuple[float, float]:
    """Log of a step's time over its forecast, and the part that its exposed messages add to it."""
    change, more_us = log(time_us / base.iteration_us), time_us - base.iteration_us
    mean_us = more_us / change if change else time_us  # the logarithmic mean of both
    return change, (exposed_us - base.exposed_comm_us) / mean_us


def told(steps: Sequence[MeasuredStep], known: KnownMachine | None = None) -> KnownMachine:
    """What is known of a machine after measured steps; ValueError for a step not to be believed."""
    if not steps:
        raise ValueError("an anchor file has no measured steps")
    gpus = sorted({s.target.gpu.name for s in steps} | ({known.gpu} if known else set()))
    if len(gpus) > 1 or steps[0].target.gpu.kind == "cpu":
        raise ValueError(f"anchors are of GPUs of one kind, got {', '.join(gpus)}")
    machine, anchors = (known.machine, known.anchors) if known else (typical(), ())
    for one in steps:
        if run_of(one.step, one.target) in machine.measured:
            raise ValueError(f"anchor {one.label!r}: the machine file was told of this run already")
        anchors += (f"{one.label}: {one.time_us / 1e3:.6g} ms",)
    for one in map(_mean, _runs(steps)):
        machine = machine.told(anchors_of(one))
        machine = replace(machine, measured=(*machine.measured, run_of(one.step, one.target)))
    return KnownMachine(gpu=gpus[0], machine=machine, anchors=anchors)


def _runs(steps: Sequence[MeasuredStep]) -> list[list[MeasuredStep]]:
    """Steps of one configuration together: what their forecast lacks is the same in all of them."""
    runs = dict[tuple[str, str], list[MeasuredStep]]()
    for one in steps:
        runs.setdefault((run_of(one.step, one.target), repr(one.target.node)), []).append(one)
    return list(runs.values())


def _mean(run: Sequence[MeasuredStep]) -> MeasuredStep:
    """One step for those of a run: the geometric mean of times, the mean share of messages.

    ValueError where times differ by more than such steps do.
    """
    usual = typical().typical
    limit = ALIKE * 2**0.5 * usual.deviates * usual.row
    one, other = (of(run, key=lambda step: step.time_us) for of in (min, max))
    if log(other.time_us / one.time_us) > limit:
        raise ValueError(
            f"anchors {one.label!r} and {other.label!r} are of one configuration, but take "
            f"{one.time_us / 1e3:.4g} and {other.time_us / 1e3:.4g} ms: up to "
            f"{exp(limit):.2g} times as long is believed"
        )
    time_us = geometric_mean([step.time_us for step in run])
    shares = [step.exposed_us / step.time_us for step in run if step.exposed_us is not None]
    exposed_us = time_us * mean(shares) if shares else None
    peak_bytes = max(step.peak_bytes or 0.0 for step in run) or None
    return replace(one, time_us=time_us, exposed_us=exposed_us, peak_bytes=peak_bytes)


def anchors_of(one: MeasuredStep) -> list[Anchor]:
    """A measured step beside its forecast, in two parts where its exposed messages were measured.

    ValueError where it must be of another configuration. A part's share of the step is the mean of
    its measured and its forecast one, so that both add up to 1.
    """
    target, model = replace(one.target, known=None, model=""), one.target.model
    found = forecast_step(one.step, target)
    _believe_memory(one, found.memory_bytes)
    waiting, other = _sensitivities(one.step, target)
    ratio, more = _log_changes(found, one.time_us, one.exposed_us or 0.0)
    whole = tuple(map(sum, zip(waiting, other, strict=True)))
    limit = ABSURD * typical().log_deviation(whole, model)
    if abs(ratio) > limit:
        mfu_pct = 100 * found.mfu_frac / exp(ratio)
        peak = f" and {mfu_pct:.4g} % of the GPU's peak rate" if mfu_pct > 100 else ""
        raise ValueError(
            f"anchor {one.label!r}: {one.time_us / 1e3:.4g} ms is {exp(ratio):.2g} times the "
            f"forecast{peak}, between {exp(-limit):.2g} and {exp(limit):.2g} are believed: another "
            f"configuration than stated? Likeliest: {misreading(one, target, ratio)}"
        )
    if one.exposed_us is None:
        return [Anchor(model=model, sensitivity=whole, log_ratio=ratio)]
    _believe_exposed(one, found, limit)
    share = (one.exposed_us / one.time_us + found.exposed_comm_us / found.iteration_us) / 2
    parts = ((waiting, more, share), (other, ratio - more, 1 - share))
    return [
        Anchor(model=model, sensitivity=j, log_ratio=change, share=of)
        for j, change, of in parts
        if of
    ]


def _believe_exposed(one: MeasuredStep, found: Forecast, limit: float) -> None:
    """ValueError for exposed messages that leave a time for all else that cannot be."""
    exposed_us = one.exposed_us or 0.0
    if exposed_us and not found.comm_us:
        raise ValueError(f"anchor {one.label!r}: its step sends no messages to wait for")
    left_us, forecast_us = one.time_us - exposed_us, found.iteration_us - found.exposed_comm_us
    if abs(log(left_us / forecast_us)) > limit:
        raise ValueError(
            f"anchor {one.label!r}: without exposed messages {left_us / 1e3:.4g} ms, forecast "
            f"{forecast_us / 1e3:.4g}: only messages count that compute waits for"
        )


def _believe_memory(one: MeasuredStep, forecast_bytes: float) -> None:
    """ValueError for a peak of memory, which tells of no time, of another configuration."""
    peak = one.peak_bytes or forecast_bytes
    if abs(peak / forecast_bytes - 1) > OTHER_MEMORY * MEMORY_ERROR:
        raise ValueError(
            f"anchor {one.label!r}: peak memory of {peak / 1e9:.4g} GB, forecast "
            f"{forecast_bytes / 1e9:.4g}, the GPU has {one.target.gpu.hbm_bytes / 1e9:.4g}: "
            "another configuration than stated? Likeliest: recomputation, batch, dtype or sharding"
        )


def misreading(one: MeasuredStep, target: Target, ratio: float) -> str:
    """What of a step's statement, if it were otherwise, explains its log ratio best."""
    plan = target.plan
    tried = {
        "time in seconds, not milliseconds": ratio + log(1e3),
        "time in microseconds, not milliseconds": ratio - log(1e3),
    }
    if plan.microbatches > 1:
        tried["the time of one micro-batch, not of the step"] = ratio + log(plan.microbatches)
    if plan.dp > 1:
        tried["a batch of all replicas, not of each"] = ratio + log(plan.dp)
    tried |= dict(_other_plans(one, target))
    tried |= {
        "a dtype of half the rate": ratio - log(2),
        "a dtype of twice the rate": ratio + log(2),
        "a dtype of a sixteenth of the rate": ratio - log(16),
        "accumulation over 8 micro-batches": ratio - log(8),
    }
    return min(tried, key=lambda words: abs(tried[words]))


def _other_plans(one: MeasuredStep, target: Target) -> Iterator[tuple[str, float]]:
    """The log ratio with recomputation, or without that of the plan."""
    other = "" if target.plan.recompute else "full"
    try:
        plan = replace(target.plan, recompute=other, recomputed=1.0)
        found = forecast_step(one.step, replace(target, plan=plan))
    except ValueError:  # a rule forbids it
        return
    words = "recomputation" if other else "no recomputation"
    yield words, log(one.time_us / found.iteration_us)


def in_words(machine: Machine, gpu: str) -> list[str]:
    """One line for each factor: how many times as long as on a typical machine, and how sure."""
    lines = []
    for at, name in enumerate(NAMES):
        spread, left = machine.typical.spread[at], machine.covariance[at][at] ** 0.5
        if left > UNKNOWN * spread:
            lines.append(f"{WORDS[name]}: unknown")
            continue
        time, low, high = machine.interval(name)
        factor = f"{time:.2f} ({low:.2f} to {high:.2f})"
        lines.append(f"{WORDS[name]}: {factor} times as long as with a typical {gpu}")
    return lines


def run_of(step: StepCapture, target: Target) -> str:
    """A name of a run: equal for runs of one model in the same way, on whichever nodes."""
    dtypes = sorted({t.dtype for call in step.calls for t in call.outputs})
    size, how = (step.samples, step.tokens), (step.engine, step.optimizer, *dtypes)
    return " ".join(map(str, (target.model, replace(target.plan, node=""), *size, *how)))


def next_run(step: StepCapture, target: Target) -> str:
    """The cheaper run of the same micro-batch that would narrow the forecast's interval most.

    None that was measured.
    """
    machine = target.known or typical()
    asked = tuple(forecast_step(step, target).parts_frac.values())
    now = machine.half_width(asked, target.model)
    widths: dict[str, float] = {}
    for plan in _cheaper(target):
        cheaper = replace(target, plan=plan)
        if run_of(step, cheaper) in machine.measured:
            continue
        try:
            parts = forecast_step(step, cheaper).parts_frac
        except ValueError:  # it does not run on so few
            continue
        told_by = Anchor(model=target.model, sensitivity=tuple(parts.values()), log_ratio=0.0)
        widths[str(plan) or "one GPU"] = machine.told([told_by]).half_width(asked, target.model)
    if not widths:
        return ""
    best = min(widths, key=lambda name: widths[name])
    return (
        f"measure next: plan {best}; the 80 % interval, now within {_percent(now)}, "
        f"would be within {_percent(widths[best])}"
    )


def _percent(half_width: float) -> str:
    return f"{100 * (1 - exp(-half_width)):.0f} % below and {100 * (exp(half_width) - 1):.0f} above"


def _cheaper(target: Target) -> Iterator[ParallelPlan]:
    """The plan on fewer replicas: as few as possible, a node, two nodes; none of a plan on one."""
    plan, each = target.plan, target.plan.world_size // target.plan.dp
    node = target.node.gpus_per_node if target.node else 8
    for gpus in sorted({each, node, 2 * node}):
        replicas = gpus // each
        if gpus % each or not 1 <= replicas < plan.dp:
            continue
        try:
            fewer = replace(plan, dp=replicas, zero=plan.zero if replicas > 1 else 0)
        except ValueError:  # a key of the plan needs more replicas
            continue
        yield fewer

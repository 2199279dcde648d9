"""Infers a machine's factors from a user's measured steps (anchors); says what to measure next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import exp, log
from statistics import geometric_mean, mean

from itercast.compose.forecast import Forecast
from itercast.compose.machines.factors import NAMES
from itercast.compose.machines.file import KnownMachine
from itercast.compose.machines.state import Anchor, Machine
from itercast.compose.machines.typical import typical
from itercast.compose.measured_step import Measured, MeasuredStep
from itercast.compose.parallel.device_memory import MEMORY_ERROR
from itercast.compose.target import Target

LOG_STEP = 0.25  # no assumption: by which a log factor is raised for a finite difference
MAX_MEMORY_ERRORS = 5  # no assumption: a peak further off, in typical errors, is not believed
MAX_HALF_WIDTHS = 2.5  # no assumption: of a step's interval, between two of one configuration
MAX_DEVIATIONS = 6.5  # no assumption: of a typical machine; a step further off is not believed
FACTOR_WORDS = {
    "products": "products",
    "memory": "other kernels",
    "links": "messages within a node",
    "network": "messages between nodes",
    "host": "the host",
}
UNKNOWN_FRAC = 0.95  # no assumption: a factor is unknown if this much of its deviation is left


def sensitivity(forecast: Callable[[Target], Forecast], target: Target) -> tuple[float, ...]:
    """Derivative of the log forecast by the log of each factor, in the order of ``NAMES``.

    By finite differences, so that messages and host work count that a slower machine no longer
    hides. ``forecast``: that of the step, on any target.
    """
    exposed, other = _sensitivity_parts(forecast, target)
    return _sum(exposed, other)


def _sum(exposed: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(exposed, other, strict=True))


def _sensitivity_parts(
    forecast: Callable[[Target], Forecast], target: Target
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The two summands of ``sensitivity``: of messages that compute waits for, and of all else."""
    machine, base = target.known or typical(), forecast(target)
    exposed, other = [0.0] * len(NAMES), [0.0] * len(NAMES)
    for i, name in enumerate(NAMES):
        if base.comm_us == 0 and name in ("links", "network"):
            continue
        raised = [log + LOG_STEP * (i == j) for j, log in enumerate(machine.mean)]
        slower = forecast(replace(target, known=replace(machine, mean=tuple(raised))))
        change, by_messages = _log_change(base, slower.iteration_us, slower.exposed_comm_us)
        exposed[i], other[i] = by_messages / LOG_STEP, (change - by_messages) / LOG_STEP
    return tuple(exposed), tuple(other)


def _log_change(base: Forecast, time_us: float, exposed_us: float) -> tuple[float, float]:
    """log(time_us / forecast) of a step, and the part of it that exposed messages cause.

    The part is the difference of their times over the logarithmic mean of both steps.
    """
    change, more_us = log(time_us / base.iteration_us), time_us - base.iteration_us
    mean_us = more_us / change if change else time_us
    return change, (exposed_us - base.exposed_comm_us) / mean_us


def infer_machine(steps: Sequence[Measured], known: KnownMachine | None = None) -> KnownMachine:
    """The machine's factors after measured steps; ``known``: what earlier steps told of it.

    ValueError for a step whose time cannot be right.
    """
    if not steps:
        raise ValueError("an anchor file has no measured steps")
    gpus = sorted({s.target.gpu.name for s in steps} | ({known.gpu} if known else set()))
    if len(gpus) > 1 or steps[0].target.gpu.kind == "cpu":
        raise ValueError(f"anchors are of GPUs of one kind, got {', '.join(gpus)}")
    machine, anchors = (known.machine, known.anchors) if known else (typical(), ())
    for step in steps:
        if step.run in machine.measured:
            raise ValueError(
                f"anchor {step.label!r}: the machine file was told of this run already"
            )
        anchors += (f"{step.label}: {step.time_us / 1e3:.6g} ms",)
    for step in map(_mean_step, _by_configuration(steps)):
        machine = machine.updated(anchors_of(step))
        machine = replace(machine, measured=(*machine.measured, step.run))
    return KnownMachine(gpu=gpus[0], machine=machine, anchors=anchors)


def _by_configuration(steps: Sequence[Measured]) -> list[list[Measured]]:
    """Groups steps of one run on one node: their forecasts share one error."""
    groups = dict[tuple[str, str], list[Measured]]()
    for step in steps:
        key = (step.run, repr(step.target.node))
        groups.setdefault(key, []).append(step)
    return list(groups.values())


def _mean_step(run: Sequence[Measured]) -> Measured:
    """Joins the steps of a run to one: geometric mean of times, mean share of messages.

    ValueError where times differ by more than such steps do.
    """
    usual = typical().typical
    limit = MAX_HALF_WIDTHS * 2**0.5 * usual.deviates * usual.row  # of a difference of two
    fastest, slowest = (choose(run, key=lambda step: step.time_us) for choose in (min, max))
    if log(slowest.time_us / fastest.time_us) > limit:
        raise ValueError(
            f"anchors {fastest.label!r} and {slowest.label!r} are of one configuration, but take "
            f"{fastest.time_us / 1e3:.4g} and {slowest.time_us / 1e3:.4g} ms: up to "
            f"{exp(limit):.2g} times as long is believed"
        )
    time_us = geometric_mean([step.time_us for step in run])
    shares = [step.exposed_us / step.time_us for step in run if step.exposed_us is not None]
    exposed_us = time_us * mean(shares) if shares else None
    peak_bytes = max(step.peak_bytes or 0.0 for step in run) or None
    return replace(fastest, time_us=time_us, exposed_us=exposed_us, peak_bytes=peak_bytes)


def anchors_of(step: Measured) -> list[Anchor]:
    """A measured step beside its forecast; in two parts if its exposed messages were measured.

    ValueError if it must have been measured in another configuration. A part's share of the step is
    the mean of its measured and forecast share, so that both add up to 1.
    """
    target, model = replace(step.target, known=None, model=""), step.target.model
    priced = step.forecast(target)
    _check_memory(step, priced.memory_bytes)
    exposed, other = _sensitivity_parts(step.forecast, target)
    ratio, by_messages = _log_change(priced, step.time_us, step.exposed_us or 0.0)
    whole = _sum(exposed, other)
    limit = MAX_DEVIATIONS * typical().log_deviation(whole, model)
    if abs(ratio) > limit:
        mfu_pct = 100 * priced.mfu_frac / exp(ratio)
        peak = f" and {mfu_pct:.4g} % of the GPU's peak rate" if mfu_pct > 100 else ""
        raise ValueError(
            f"anchor {step.label!r}: {step.time_us / 1e3:.4g} ms is {exp(ratio):.2g} times the "
            f"forecast{peak}, between {exp(-limit):.2g} and {exp(limit):.2g} are believed: another "
            f"configuration than stated? Likeliest: {misreading(step, target, ratio)}"
        )
    if step.exposed_us is None:
        return [Anchor(model=model, sensitivity=whole, log_ratio=ratio)]
    _check_exposed(step, priced, limit)
    share = (step.exposed_us / step.time_us + priced.exposed_comm_us / priced.iteration_us) / 2
    parts = (
        Anchor(model=model, sensitivity=exposed, log_ratio=by_messages, share=share),
        Anchor(model=model, sensitivity=other, log_ratio=ratio - by_messages, share=1 - share),
    )
    return [part for part in parts if part.share]


def _check_exposed(step: Measured, priced: Forecast, limit: float) -> None:
    """ValueError where the step without its exposed messages is too far from its forecast.

    ``limit``: of abs(log(measured / forecast)).
    """
    exposed_us = step.exposed_us or 0.0
    if exposed_us and not priced.comm_us:
        raise ValueError(f"anchor {step.label!r}: its step sends no messages to wait for")
    left_us, forecast_us = step.time_us - exposed_us, priced.iteration_us - priced.exposed_comm_us
    if abs(log(left_us / forecast_us)) > limit:
        raise ValueError(
            f"anchor {step.label!r}: without exposed messages {left_us / 1e3:.4g} ms, forecast "
            f"{forecast_us / 1e3:.4g}: only messages count that compute waits for"
        )


def _check_memory(step: Measured, forecast_bytes: float) -> None:
    """ValueError if the measured peak memory differs so much that the configuration must differ."""
    peak = step.peak_bytes or forecast_bytes
    if abs(peak / forecast_bytes - 1) > MAX_MEMORY_ERRORS * MEMORY_ERROR:
        raise ValueError(
            f"anchor {step.label!r}: peak memory of {peak / 1e9:.4g} GB, forecast "
            f"{forecast_bytes / 1e9:.4g}, the GPU has {step.target.gpu.hbm_bytes / 1e9:.4g}: "
            "another configuration than stated? Likeliest: recomputation, batch, dtype or sharding"
        )


def misreading(step: Measured, target: Target, ratio: float) -> str:
    """The likeliest mistake in how a step was stated: the one that explains its time best."""
    plan = target.plan
    tried = {  # log(measured / forecast) with the mistake undone
        "time in seconds, not milliseconds": ratio + log(1e3),
        "time in microseconds, not milliseconds": ratio - log(1e3),
    }
    if plan.microbatches > 1:
        tried["the time of one micro-batch, not of the step"] = ratio + log(plan.microbatches)
    if plan.dp > 1:
        tried["a batch of all replicas, not of each"] = ratio + log(plan.dp)
    tried |= _other_recomputation(step, target)
    tried |= {
        "a dtype of half the rate": ratio - log(2),
        "a dtype of twice the rate": ratio + log(2),
        "a dtype of a sixteenth of the rate": ratio - log(16),
        "accumulation over 8 micro-batches": ratio - log(8),
    }
    return min(tried, key=lambda words: abs(tried[words]))


def _other_recomputation(step: Measured, target: Target) -> dict[str, float]:
    """The log ratio if the step recomputed fully, or not as planned, by a name for the change.

    Empty if the plan cannot run so, and for a script, which recomputes as it says.
    """
    if not isinstance(step, MeasuredStep):
        return {}
    recompute = "" if target.plan.recompute else "full"
    try:
        plan = replace(target.plan, recompute=recompute, recomputed=1.0)
        other = step.forecast(replace(target, plan=plan))
    except ValueError:
        return {}
    words = "recomputation" if recompute else "no recomputation"
    return {words: log(step.time_us / other.iteration_us)}


def factor_lines(machine: Machine, gpu: str) -> list[str]:
    """One line per factor: how many times as long as on a typical machine, and how sure."""
    lines = []
    for i, name in enumerate(NAMES):
        spread, left = machine.typical.spread[i], machine.covariance[i][i] ** 0.5
        if left > UNKNOWN_FRAC * spread:
            lines.append(f"{FACTOR_WORDS[name]}: unknown")
            continue
        factor, low, high = machine.interval(name)
        words = f"{factor:.2f} ({low:.2f} to {high:.2f}) times as long as with a typical {gpu}"
        lines.append(f"{FACTOR_WORDS[name]}: {words}")
    return lines


def next_run(asked: Measured, others: Iterable[Measured] = ()) -> str:
    """Advice which run would, as an anchor, narrow the 80 % interval of the one asked for most.

    Their times are not read. ``others``: the runs to choose from; without any those of the asked
    plan on fewer replicas, with the same micro-batch. "" where all of them were measured already.
    """
    model, machine = asked.target.model, asked.target.known or typical()
    parts_frac = tuple(asked.forecast(asked.target).parts_frac.values())
    now = machine.half_width(parts_frac, model)
    widths: dict[str, float] = {}
    for run in others or (_fewer_replicas(asked) if isinstance(asked, MeasuredStep) else ()):
        if run.run in (asked.run, *machine.measured):
            continue
        try:
            parts = run.forecast(run.target).parts_frac
        except ValueError:  # it does not run on so few
            continue
        anchor = Anchor(model=model, sensitivity=tuple(parts.values()), log_ratio=0.0)
        after = replace(machine.updated([anchor]), seen=machine.seen)  # it may take any time
        widths[run.name] = after.half_width(parts_frac, model)
    if not widths:
        return ""
    best = min(widths, key=lambda name: widths[name])
    return (
        f"measure next: {best}; the 80 % interval, now within {_percent(now)}, "
        f"would be within {_percent(widths[best])}"
    )


def _percent(half_width: float) -> str:
    return f"{100 * (1 - exp(-half_width)):.0f} % below and {100 * (exp(half_width) - 1):.0f} above"


def _fewer_replicas(asked: MeasuredStep) -> Iterator[MeasuredStep]:
    """Yields the step with its plan on fewer replicas: one, a node's worth, two nodes' worth."""
    target = asked.target
    plan, gpus_per_replica = target.plan, target.plan.world_size // target.plan.dp
    node = target.node.gpus_per_node if target.node else 8
    for gpus in sorted({gpus_per_replica, node, 2 * node}):
        replicas = gpus // gpus_per_replica
        if gpus % gpus_per_replica or not 1 <= replicas < plan.dp:
            continue
        try:
            fewer = replace(plan, dp=replicas, zero=plan.zero if replicas > 1 else 0)
        except ValueError:  # a key of the plan needs more replicas
            continue
        name = f"plan {fewer}" if str(fewer) else "one GPU"
        yield replace(asked, name=name, target=replace(target, plan=fewer))

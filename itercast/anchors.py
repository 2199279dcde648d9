"""Reads measured steps of a user's machine: a YAML list, or rows of ``itercast collect``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from itercast.capture.base.extensions import function_of

if TYPE_CHECKING:  # the command line starts without pandas
    from itercast.compose.machines.file import KnownMachine
    from itercast.compose.measured_step import Measured

RATES = ("samples_per_s", "tokens_per_s", "mfu_pct")  # of all GPUs
TIMES = ("step_ms", "trace", *RATES)  # trace: a file of torch.profiler, whose steps are marked
BESIDE = ("exposed_comm_ms", "peak_memory_gb")  # what may be stated beside a step's time
FILES = ("bundle", "hf_config", "input", "script", "trace")  # paths from the folder of the file
OF_SCRIPT = (  # of ``itercast run``
    *("script", "module", "arguments", "gpu", "gpus", "node", "bundle", "host", "stack"),
    *("steps", "limit"),
)


def known_machine(
    machine: Path | None, anchor: Path | None, ask: Callable[..., Any]
) -> KnownMachine | None:
    """A machine's speed factors, from a machine file and measured steps; None without either.

    ``ask``: the class ``itercast.options.Question``, whose options a measured step states.
    """
    from itercast.compose.machines.file import read_machine

    known = read_machine(machine) if machine else None
    if anchor:
        known = function_of("anchors", "told")(measured_steps(anchor, ask), known)
    return known


def measured_steps(
    path: Path, ask: Callable[..., Any], bundle: Path | None = None
) -> Sequence[Measured]:
    """Read the measured steps of a file; ValueError says what is wrong in which of them.

    ``ask``: as for ``known_machine``; ``bundle``: the bundle of steps that name none.
    """
    if path.suffix == ".parquet":
        from itercast.eval import compare
        from itercast.learners.score_file import read_few

        return compare.measured_steps(read_few([path]), bundle)
    from itercast.capture.base.yaml_text import read_values

    values = read_values(path, "anchor file")
    entries = values if isinstance(values, list) else [values] * (values is not None)
    if not entries:
        raise ValueError(f"anchor file {str(path)!r}: no measured steps in it")
    usual = {"bundle": bundle} if bundle else {}
    return [_step(entry, path, f"step {n}", ask, usual) for n, entry in enumerate(entries, start=1)]


def _step(
    entry: Any, path: Path, which: str, ask: Callable[..., Any], usual: Mapping[str, Any]
) -> Measured:
    """The measured step of one entry of a file, which ``which`` names in errors.

    An entry has options of ``itercast predict``, or of ``itercast run`` (``OF_SCRIPT``), one of
    ``TIMES``, and maybe some of ``BESIDE``. ``usual``: values of options that it leaves out.
    """
    where, stated = f"{path.name}, {which}", (*TIMES, *BESIDE, "source")
    if isinstance(entry, Mapping):
        entry = {str(name).replace("-", "_"): value for name, value in entry.items()}
    of_script = isinstance(entry, Mapping) and not {"script", "module"}.isdisjoint(entry)
    options = OF_SCRIPT if of_script else set(signature(ask).parameters) - {"machine", "anchor"}
    if not isinstance(entry, Mapping) or set(entry) - {*options, *stated}:
        unknown = sorted({*entry} - {*options, *stated}) if isinstance(entry, Mapping) else entry
        known = ", ".join(OF_SCRIPT) if of_script else "options of predict"
        problem = f"unknown {unknown!r}; known: {known}, and {', '.join(stated)}"
        raise ValueError(f"anchor {where}: {problem}")
    entry = {n: path.parent / str(v) if n in FILES else v for n, v in entry.items()}
    times = {name: _number(entry[name]) for name in TIMES if name in entry}
    if len(times) != 1 or not ("trace" in times or _positive(*times.values())):
        raise ValueError(
            f"anchor {where}: one of {', '.join(TIMES)}, a positive number or a file, got {times}"
        )
    if "mfu_pct" in times and times["mfu_pct"] > 100:
        raise ValueError(f"anchor {where}: mfu_pct is of the GPU's peak, 100 at most, got {times}")
    beside = {name: _number(entry[name]) for name in BESIDE if name in entry}
    if not all(value == 0 or _positive(value) for value in beside.values()):
        raise ValueError(f"anchor {where}: {', '.join(BESIDE)} are numbers from 0, got {beside}")
    asked = {**usual, **{name: value for name, value in entry.items() if name in options}}
    untimed = _of_script(where, asked) if of_script else _of_model(ask(**asked))
    ((name, value),) = times.items()
    time_us, exposed_us = _time_us(name, value, untimed), _scaled(beside, "exposed_comm_ms", 1e3)
    if (exposed_us or 0.0) >= time_us:
        raise ValueError(f"anchor {where}: exposed_comm_ms is less than the step, got {beside}")
    peak_bytes = _scaled(beside, "peak_memory_gb", 1e9)
    return replace(untimed, time_us=time_us, exposed_us=exposed_us, peak_bytes=peak_bytes)


def _of_model(question: Any) -> Measured:
    """The step of a question (``itercast.options.Question``), without a time yet."""
    from itercast.compose.measured_step import MeasuredStep

    step, target = question.prepared()
    return MeasuredStep(name=question.name, time_us=1.0, step=step, target=target)


def _of_script(where: str, asked: Mapping[str, Any]) -> Measured:
    """The step of a script as ``itercast run`` captures it, without a time yet.

    Waits for its DataLoader are not in it: that was timed on this machine.
    """
    from itercast.compose.programs.measured_script import untimed
    from itercast.script_orders import captured, script_order

    facts = {"arguments": (), "gpus": 1, "steps": 3, "limit": 600, **asked}
    script, module = facts.pop("script", ""), facts.pop("module", "")
    words, steps, limit_s = facts.pop("arguments"), facts.pop("steps"), facts.pop("limit")
    counts = (facts["gpus"], steps, limit_s)
    if any(type(n) is not int or n < 1 for n in counts) or isinstance(words, float | int):
        told = f"got {counts} and {words!r}"
        raise ValueError(f"anchor {where}: gpus, steps, limit from 1, arguments as text, {told}")
    if script and module:
        raise ValueError(f"anchor {where}: a script or a module, got both")
    try:
        words = shlex.split(words) if isinstance(words, str) else [*map(str, words)]
        order = script_order(str(script or module), words, module=bool(module), **facts)
        program = captured(replace(order, steps=steps, limit_s=limit_s))
    except ValueError as exc:
        raise ValueError(f"anchor {where}: {exc}") from None
    return untimed(order, program)


def _scaled(stated: Mapping[str, Any], name: str, unit: float) -> float | None:
    """The value stated under a name, times its unit; None where it is not stated."""
    return unit * float(stated[name]) if name in stated else None


def _number(stated: Any) -> Any:
    """The number that a text is, such as 1e9, which YAML 1.1 reads as text; else the value."""
    try:
        return float(stated) if isinstance(stated, str) else stated
    except ValueError:
        return stated


def _positive(value: Any) -> bool:
    """Whether a value is a number above 0, below 1e15."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e15


def _time_us(name: str, value: Any, measured: Measured) -> float:
    """A step's time from the value of one of ``TIMES``; ``measured`` has no time yet.

    A rate (of all GPUs) gives the time by what the forecast counts of a step: time = forecast
    time * forecast rate / stated rate, in which the forecast time cancels out.
    """
    if name == "step_ms":
        return float(value) * 1e3
    if name == "trace":
        return float(function_of("profiled_steps", "step_us")(Path(str(value))))
    forecast = measured.forecast(measured.target)
    rates = {"samples_per_s": forecast.samples_per_s, "tokens_per_s": forecast.tokens_per_s}
    rates["mfu_pct"] = 100 * forecast.mfu_frac
    if not rates[name]:
        raise ValueError(f"anchor {measured.label!r}: its step has none of {name}; state step_ms")
    return forecast.iteration_us * rates[name] / float(value)

"""Runs ``itercast run`` on unchanged scripts that strangers published, and prints a table.

``python tests/endurance/scripts_of_others.py [--only NAME] [--limit SECONDS]`` takes the list
``tests/scripts.yaml``: where scripts are (repositories at a commit, installed packages), their
arguments, and small files that they read, which are made here. Repositories are downloaded by git,
or taken from ``--mirrors``, a folder of bare clones ``owner+name/repo``. A script whose packages
are not installed is skipped and counted. Each runs below ``runs/scripts``, with limits on memory
and time. With ``--plan dp=64`` it is the model that a script trains, under a plan: how far its step
on one GPU is from the script's own, and what it takes under the plan. Where somebody published how
fast a script is (``measured``), how far the forecast is from that is printed, of those that judge
only as a mean, a median and a bias (``role: judges``): nobody shall tune a forecast to them.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer
import yaml
from made_files import make
from packaging.requirements import InvalidRequirement, Requirement

HERE = Path(__file__).resolve().parents[2]
LIST = HERE / "tests" / "scripts.yaml"
MEMORY_KB, LIMIT_S = 12_000_000, 300
PLAUSIBLE = (0.20, 0.65)  # model FLOPs utilisation of a step that its products fill
NEAR = 0.10  # of the script's step, its model's on one GPU
FEW = 4  # scripts that judge: sums of fewer would tell their errors
OUTCOMES = {"forecast": "plausible", "odd": "not plausible", "line": "one line", "no": "no answer"}

FORECASTS = ("all", "without waits for input", "in practice")  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A script of the list; ``source`` is a repository's name or ``packages``."""

    source: str
    script: str  # its path there, or -m and a module
    arguments: str = ""
    name: str = ""
    gpu: str = "h100-sxm-80gb"
    gpus: int = 1
    stack: str = ""  # software of the time, where an older torch than 2.2 was used
    folder: str = "."  # in which it runs, in its repository
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    expected: str = "forecast"  # or words of the one line
    # step_s, samples_per_s or epoch_s with epoch_steps and evaluation_batches; source, role
    measured: dict[str, Any] = field(default_factory=dict)


def checked_out(facts: dict[str, str], folder: Path, mirrors: Path | None) -> None:
    """Lay a repository's files at its commit into a folder, unless they are there."""
    if (folder / ".done").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    owner, name = facts["git"].removesuffix(".git").split("/")[-2:]
    bare = mirrors / f"{owner}+{name}" / "repo" if mirrors else folder / ".git"
    git = ["git", f"--git-dir={bare}", f"--work-tree={folder}"]
    environment = {**os.environ, "GIT_INDEX_FILE": str(folder / ".index")}
    if not mirrors:
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
        fetch = ["fetch", "-q", "--depth=1", facts["git"], facts["commit"]]
        subprocess.run([*git, *fetch], check=True)
    subprocess.run([*git, "read-tree", facts["commit"]], env=environment, check=True)
    lay = [*git, "checkout-index", "--all", "--force"]  # a mirror may lack large files
    subprocess.run(lay, env=environment, check=False, stderr=subprocess.DEVNULL)
    (folder / ".done").touch()


def command(one: Listed, root: Path, free_s: int, plan: str) -> list[str]:
    """``itercast run`` of a script, or of its model under a plan, under the limits."""
    where = root if one.source != "packages" else Path(sysconfig.get_path("purelib"))
    script = one.script.split() if one.script.startswith("-m") else [str(where / one.script)]
    size = ["--plan", plan] if plan else ["--gpus", str(one.gpus)]
    size += ["--stack", one.stack] if one.stack else []
    options = ["--gpu", one.gpu, *size, "--limit", str(free_s), "--json"]
    run = [sys.executable, "-m", "itercast", "run", *options, *script, *shlex.split(one.arguments)]
    limits = f"ulimit -v {MEMORY_KB}; exec timeout -k 5 {free_s + 20} {shlex.join(run)}"
    return ["bash", "-c", limits]


def answer(
    one: Listed, root: Path, limit_s: int = LIMIT_S, plan: str = ""
) -> tuple[str, str, tuple[float, ...]]:
    """The kind of a script's outcome, what was said, and the errors against what was measured."""
    work = root / one.folder
    work.mkdir(parents=True, exist_ok=True)
    make(work, one.files)
    paths = [str(HERE), *(str(work / p) for p in one.variables.get("PYTHONPATH", "").split())]
    environment = {**os.environ, **one.variables, "PYTHONPATH": os.pathsep.join(paths)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command(one, root, limit_s, plan),
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    (root / f"{one.name}.log").write_text(done.stderr)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        return ("line" if done.returncode == 2 else "no"), last, ()
    found = json.loads(done.stdout)
    if plan:
        return (*compared(found), ())
    errors = errors_pct(one.measured, found)
    kind, said = judged(found)
    if errors:
        told = (f"{x:+.1f} % {name}" for x, name in zip(errors, FORECASTS, strict=True))
        finds = one.measured["role"] == "finds causes"
        said = f"{said}  measured: {', '.join(told)}" if finds else "judges: only sums are shown"
    return kind, said, errors


def errors_pct(measured: dict[str, Any], found: dict[str, Any]) -> tuple[float, ...]:
    """100 x (forecast / measured - 1) of a step's time, or an epoch's, by its three forecasts.

    With waits for its batches, without them, and without them as trainings take in practice. Data
    that are made here are fewer than those measured, which say how many batches an epoch has.
    """
    if not measured:
        return ()
    step_s = found["iteration_us"] / 1e6
    practised_us = found["in_practice"] * found["step_us"]
    forecasts_us = (found["iteration_us"], found["step_us"], practised_us)
    if epoch_s := measured.get("epoch_s"):
        passes, evaluation_s = sum(found["evaluation_batches"]), found["evaluation_s"]
        between_s = found["workers_start_s"] + found["saving_s"]
        between_s += measured.get("evaluation_batches", 0) * evaluation_s / max(1, passes)
        epochs_s = (measured["epoch_steps"] * us / 1e6 + between_s for us in forecasts_us)
        return tuple(100 * (forecast_s / epoch_s - 1) for forecast_s in epochs_s)
    rate = measured.get("samples_per_s")
    if rate and not found["samples_per_s"]:
        return ()
    took_s = found["samples_per_s"] * step_s / rate if rate else measured["step_s"]
    return tuple(100 * (us / 1e6 / took_s - 1) for us in forecasts_us)


def summary(role: str, errors: list[tuple[float, ...]]) -> str:
    """Mean and median absolute error and the bias of what one role's scripts took."""
    words = []
    for name, some in zip(FORECASTS, zip(*errors, strict=True), strict=True):
        size = [abs(error) for error in some]
        mean, median = statistics.mean(size), statistics.median(size)
        bias = statistics.mean(some)
        words.append(f"{name}: mean {mean:.1f} %, median {median:.1f} %, bias {bias:+.1f} %")
    return f"{role}, {len(errors)} scripts beside published speeds: {'; '.join(words)}"


def judged(found: dict[str, Any]) -> tuple[str, str]:
    """Whether a forecast is plausible: products fill the step, or it says what else does."""
    step, mfu = found["iteration_us"], found["mfu_frac"]
    limit, share = max(found["limits_frac"].items(), key=lambda part: part[1])
    said = f"{step / 1e3:10.2f} ms  {100 * mfu:5.1f} % of peak  {100 * share:3.0f} % {limit}"
    low, high = PLAUSIBLE
    fills = low <= mfu <= high
    return ("forecast" if fills or (mfu < low and limit != "products") else "odd"), said


def compared(found: dict[str, Any]) -> tuple[str, str]:
    """Whether a model's step on one GPU is near the script's, and its step under the plan."""
    facts = found["script"]
    alone = facts["script_gpus"] == 1
    rest = facts["model_us"] / facts["script_us"] - 1 if alone else 0.0
    size = f"{facts['parameters'] / 1e6:.1f} M, {facts['micro']} x {facts['batch']} samples"
    words = [
        f"{facts['script_us'] / 1e3:10.2f} ms  {100 * rest:+5.1f} %"
        + ("" if alone else " of many"),
        facts["model"],
        size,
    ]
    words += [f"{found['iteration_us'] / 1e3:.2f} ms {found['plan']}", *facts["notes"]]
    return "forecast" if abs(rest) <= NEAR else "odd", "  ".join(words)


def missing(one: Listed) -> list[str]:
    """What a script needs that is not installed, or in another version than stated (timm==0.4.12).

    Data and weights, which are named in words, always are missing.
    """
    lacks = []
    for need in one.needs:
        try:
            wanted = Requirement(need)
            is_there = version(wanted.name) in wanted.specifier
        except (InvalidRequirement, PackageNotFoundError):
            is_there = False
        lacks += [] if is_there else [need]
    return lacks


def main(only: str = "", mirrors: Path | None = None, limit: int = LIMIT_S, plan: str = "") -> None:
    """Print the table and how often each outcome was met.

    ``limit``: seconds for each; ``plan``: of the models that they train.
    """
    known, outcomes = yaml.safe_load(LIST.read_text()), Counter[str]()
    errors: dict[str, list[tuple[float, ...]]] = {"judges": [], "finds causes": []}
    named = [
        {**facts, "name": facts.get("name") or Path(facts["script"]).stem}
        for facts in known["scripts"]
    ]
    listed = [one for one in (Listed(**facts) for facts in named) if only in one.name]
    if not listed:
        names = ", ".join(facts["name"] for facts in named)
        raise typer.BadParameter(f"no script has {only!r} in its name; they are {names}")
    for one in listed:
        if lacks := missing(one):
            outcomes["skipped"] += 1
            print(f"{one.name:28} skipped: {', '.join(lacks)} not installed", flush=True)
            continue
        root = HERE / "runs" / "scripts" / one.source
        if one.source != "packages":
            checked_out(known["sources"][one.source], root, mirrors)
        kind, said, off = answer(one, root, limit, plan)
        if off:
            errors[one.measured["role"]].append(off)
        as_listed = kind == "forecast" if one.expected == "forecast" else one.expected in said
        outcomes[OUTCOMES[kind]] += 1
        print(f"{one.name:28} {'' if as_listed else 'UNEXPECTED '}{said}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in outcomes.most_common()))
    for role, some in errors.items():
        if len(some) >= (FEW if role == "judges" else 1):
            print(summary(role, some))


if __name__ == "__main__":
    typer.run(main)

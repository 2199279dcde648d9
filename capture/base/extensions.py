"""Finds what other installed packages add, by their entry points.

The name of an entry point is the name of what it adds. Its group says what that is:

- ``itercast.families``: a ``Family``; ``itercast.cases``: an ``EvalCase``;
  ``itercast.case_files``: the ``Path`` of a file in the form of ``capture/cases/cases.yaml``.
- ``itercast.commands``: a function that typer runs as ``itercast NAME``.
- ``itercast.importers``: a function ``read(path)`` or ``read(path, hints)``;
  ``itercast.importer_tables``: a dict of such by name.
- ``itercast.checkpoints``: ``front``, the search of what layers save under ``recompute=budget``;
  ``write`` and ``apply``, files that say it (``itercast.extras.checkpoints`` has all three).
- ``itercast.anchors``: ``told``, what measured steps tell of a machine, ``in_words``, and
  ``next_run``, which step to measure next (all are in ``itercast.extras.anchors.infer_machine``).
- ``itercast.assumed_parts``: ``list`` and ``print`` the assumed numbers of a forecast
  (``itercast.extras.explain.assumed`` has both).
- ``itercast.configurations``: ``timm``, which makes a case of the name, values and digest of
  timm's ``config.json`` (``itercast.extras.images.timm_config.timm_case``).
- ``itercast.learners``: a ``Fit`` of ``itercast.learners.models.compared``.
- ``itercast.trainers``: ``ray``, which makes a ``FitAll`` of ``itercast.learners.train`` from an
  address and dataset roots: it trains families elsewhere.
- ``itercast.index_streams``: ``stated``, which tells embedding bags of a captured step how they
  look rows up (``itercast.extras.recommenders.tables.known_streams.with_indices``).
- ``itercast.roots``: ``fetched`` and ``written``, the local folder of a dataset root to read or to
  write, which may be at a URL (``itercast.extras.roots.urls`` has both).
- ``itercast.spreads``: ``step``, the distribution of a forecast step whose ranks are noisy
  (``itercast.extras.noise.spread.spread_of``).
- ``itercast.tables_elsewhere``: a function that says what one rank does of a step whose embedding
  tables are spread over ranks (``itercast.compose.pricing.layer_prices.TablesElsewhere``).
- ``itercast.unlike_gpus``: ``predict`` and ``plan``, functions that answer ``--cluster FILE`` of
  these commands (``itercast.extras.clusters.questions`` has both).
- ``itercast.plan_steps``: ``torch``, which makes the step of a rank under a plan, to be measured
  (``itercast.extras.measured_plans.steps.make_plan_step``).
- ``itercast.profiled_steps``: ``ops``, which measures the ops of a profiled iteration
  (``itercast.extras.kineto.in_step.measure_ops``), and ``step_us``, the time of a traced step.
- ``itercast.optimizers``: ``lamb``, the class of ``--optimizer lamb``.
- ``itercast.pages``: ``comparison``, ``family`` and ``plan``, which make the HTML pages of
  `itercast evaluate`, of a family's training, and of `itercast plan --report`.
- ``itercast.inputs``: ``with_input``, which feeds a forecast step by a DataLoader, and ``advice``,
  how many workers hide it (``itercast.extras.input.pipeline`` has both); ``training_facts`` and
  ``training_rows``, how long an epoch takes (``itercast.extras.input.training``).
- ``itercast.lengths``: ``stated``, which rewrites a step whose sequences have unlike lengths
  (``itercast.extras.lengths.sequences.unlike_lengths``).
- ``itercast.traces``: ``step`` and ``program``, which make the timelines that ``--trace`` writes
  (``itercast.extras.trace.forecasts`` has both).
- ``itercast.plan_keys``: a ``PlanKey`` of ``itercast.capture.plan_keys``.
- ``itercast.gpus``, ``itercast.nodes``, ``itercast.stacks``: the ``Path`` of a YAML file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
OWN = "itercast"
CHECKOUT = Path(__file__).resolve().parents[2] / "pyproject.toml"  # absent where it is installed


def with_added(group: str, own: Mapping[str, T], kind: Any = Path) -> dict[str, T]:
    """``own`` objects and those that packages add to ``itercast.GROUP``, by name.

    ValueError, in one line, for an entry point that cannot be loaded, is no instance of ``kind``,
    or has a name that is taken.
    """
    objects = dict(own)
    for name, (value, where) in _added(group).items():
        if not isinstance(value, kind):
            raise ValueError(f"{where}: {type(value).__name__} is not what itercast.{group} holds")
        stated = value.stem if isinstance(value, Path) else getattr(value, "name", name)
        if stated != name:
            raise ValueError(f"{where}: what it adds is called {stated!r}; name both alike")
        if name in own:
            raise ValueError(f"{where}: {name!r} is a name that itercast has; take another")
        objects[name] = value
    return objects


def function_of(group: str, name: str) -> Callable[..., Any]:
    """The function that a package adds to ``itercast.GROUP``; ValueError where none does."""
    added: dict[str, Callable[..., Any]] = with_added(group, {}, Callable)
    if name not in added:
        raise ValueError(f"no installed package adds {name!r} to itercast.{group}")
    return added[name]


@cache
def _added(group: str) -> dict[str, tuple[Any, str]]:
    """The loaded objects that packages add to a group, by name, and where each comes from."""
    added: dict[str, tuple[Any, str]] = {}
    for point in sorted(_points(f"itercast.{group}"), key=lambda point: point.value):
        package = _package(point.dist) or OWN
        where = f"entry point {point.name!r} of itercast.{group} in package {package!r}"
        if point.name in added:
            raise ValueError(f"{where}: added twice, also by {added[point.name][1]}")
        added[point.name] = (_loaded(point, where), where)
    return added


def _points(group: str) -> list[EntryPoint]:
    """Entry points of a group; in a checkout our own are read from its pyproject.toml.

    What is installed may be older than the checkout, or nothing.
    """
    installed = list(_installed().select(group=group))
    if not CHECKOUT.is_file():
        return installed
    others = [point for point in installed if _package(point.dist) != OWN]
    stated = _stated().get(group, {})
    return [*others, *(EntryPoint(name, value, group) for name, value in stated.items())]


@cache
def _installed() -> Any:  # EntryPoints, before Python 3.12 SelectableGroups
    """The entry points of all packages, whose files are read once."""
    return entry_points()


@cache
def _package(dist: Distribution | None) -> str:
    """The name of a package, which is read from its metadata; empty for no package."""
    return dist.name if dist else ""


@cache
def _stated() -> dict[str, dict[str, str]]:
    """The entry points in the checkout's pyproject.toml, by group and name."""
    project = tomllib.loads(CHECKOUT.read_text())["project"]
    stated: dict[str, dict[str, str]] = project["entry-points"]
    return stated


def _loaded(point: EntryPoint, where: str) -> Any:
    """Import what an entry point names; ValueError, which says ``where``, if that fails."""
    try:
        return point.load()
    except Exception as exc:  # whatever the other package's modules raise
        reason = " ".join(f"{type(exc).__name__}: {exc}".split())
        raise ValueError(f"{where} cannot be loaded: {reason}; mend or uninstall it") from exc

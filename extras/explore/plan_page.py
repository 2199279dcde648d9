"""The page of a plan search: all plans tried, the memory of the chosen one, time by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from textwrap import wrap

from itercast.capture.base.files import write_atomic
from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import Forecast
from itercast.compose.parallel.device_memory import FITS, MISFITS, room_bytes, verdict
from itercast.compose.plan_search.candidates import Search
from itercast.compose.plan_search.search import SearchResult
from itercast.extras.pages import charts
from itercast.extras.pages.blocks import Section, Table, Tile, number
from itercast.extras.pages.charts import Chart, Figure, Trace
from itercast.extras.pages.page import render
from itercast.extras.trace.forecasts import shown_rank
from itercast.extras.trace.plan import plan_trace
from itercast.microbench.store import Facts

Tried = tuple[str, float, int, str]  # plan, time in us, bytes of memory, ``verdict`` on them
Held = Mapping[str, Sequence[tuple[float, float]]]  # by rank, times in us and bytes
PARTS = ("compute", "exposed communication", "bubble", "host gaps", "waiting")
CLOSE = "too close to tell"  # memory within the memory model's error of what there is
LABEL_WIDTH, LINE_PX = 20, 16  # characters of a line of a plan beside its bar, and its height
MOST_REPORTS = 100  # of plans tried, the best ones have all numbers on a page
MOST_RANKS = 8  # lines of a memory chart
MOST_POINTS = 400  # of a line


def write_page(
    path: Path, search: Search, found: SearchResult, facts: Facts, reports: Sequence[Forecast]
) -> None:
    """Write the page of a search; ``reports``: of plans that were forecast already."""
    gpu = search.book.gpu
    known = {r.plan: r for r in reports}
    order = sorted(found.tried, key=lambda s: s.score(facts["objective"]))
    for scored in order[:MOST_REPORTS]:
        if str(scored.plan) not in known:
            known[str(scored.plan)] = search.report(scored.plan, facts["bundle"])
    best = found.best[0].plan
    simple = found.simplest.plan if found.simplest else best
    held = {str(plan): memory_held(search, plan) for plan in dict.fromkeys((best, simple))}
    rooms = [room_bytes(gpu, s.plan) for s in found.tried]
    told = [
        verdict(s.memory_bytes, room) if s.fits or s.memory_bytes > room else MISFITS
        for s, room in zip(found.tried, rooms, strict=True)
    ]
    tried = [
        (str(s.plan), s.iteration_us, s.memory_bytes, memory)
        for s, memory in zip(found.tried, told, strict=True)
    ]
    text = plan_page(facts, tried, known, [str(s.plan) for s in found.best], str(simple), held)
    write_atomic(path, text.encode())


def memory_held(search: Search, plan: ParallelPlan) -> Held:
    """The memory of each rank over an iteration under a plan."""
    step = search.captures.at(search.size(plan))
    rank = shown_rank(step, plan, search.book, search.node)
    return plan_trace(rank, step.optimizer).held()


def plan_page(
    facts: Facts,
    tried: Sequence[Tried],
    reports: Mapping[str, Forecast],
    best: Sequence[str],
    simple: str,
    held: Mapping[str, Held],
) -> str:
    """The page as HTML.

    ``facts``: what was searched. ``reports`` by plan, of the best of those tried; ``best``: the
    best ones in order; ``simple``: the simplest one that may be as good. ``held``: memory over a
    step of the first and of the simplest plan.
    """
    title = f"Plans of {facts['case']} on {facts['gpus']} x {facts['gpu']}"
    sections = [
        _tried(facts, tried, reports, best, simple),
        _parts([reports[plan] for plan in dict.fromkeys([*best, simple])], simple),
        _memory(reports, held),
    ]
    tiles = [_tile("Best", reports[best[0]])]
    if simple != best[0]:
        tiles.append(_tile("Simplest that may be as good", reports[simple]))
    about = {name: str(facts[name]) for name in ("global_batch", "seq", "dtype", "optimizer")}
    return render(title, tiles, sections, {k.replace("_", " "): v for k, v in about.items()}, {})


def _short(plan: str) -> str:
    """A plan without its node, which all have."""
    return plan.partition(",node=")[0] or "one process"


def _tile(label: str, r: Forecast) -> Tile:
    """A plan with its time, memory and utilisation."""
    memory = f"{r.memory_bytes / 1e9:.1f} of {r.memory_room_bytes / 1e9:.1f} GB"
    sure = r.memory_verdict == FITS
    memory += "" if sure else f" ({r.memory_verdict})"
    beside = f"{_short(r.plan)}; {memory}; MFU {100 * r.mfu_frac:.0f} %"
    return Tile(label=label, value=f"{r.iteration_us / 1e3:.1f} ms", beside=beside, off=not sure)


def _hover(one: Tried, r: Forecast | None) -> str:
    """What hovering over a plan shows."""
    plan, us, nbytes, memory = one
    told = f"{us / 1e3:.4g} ms, {nbytes / 1e9:.3g} GB"
    lines = [f"<b>{_short(plan)}</b>", told if memory == FITS else f"{told} ({memory})"]
    if r is not None:
        lines[1] += f", MFU {100 * r.mfu_frac:.1f} %"
        pairs = zip(PARTS, r.lanes_us, strict=True)
        lines += [f"{name} {us / 1e3:.3g} ms" for name, us in pairs if us > 0]
    return "<br>".join(lines)


def _tried(
    facts: Facts,
    tried: Sequence[Tried],
    reports: Mapping[str, Forecast],
    best: Sequence[str],
    simple: str,
) -> Section:
    """Time against memory, and against GPU time, of all plans that were simulated."""
    groups: dict[str, list[Tried]] = {
        name: []
        for name in ("best", "simplest that may be as good", "others", CLOSE, "too much memory")
    }
    for one in {one[0]: one for one in tried}.values():
        plan, _, _, memory = one
        name = {FITS: "others", MISFITS: "too much memory"}.get(memory, CLOSE)
        name = "best" if plan == best[0] else name
        name = "simplest that may be as good" if plan == simple != best[0] else name
        groups[name].append(one)
    ranks = {plan: r.world_size for plan, r in reports.items()}
    samples, gpus = int(facts["global_batch"]), int(facts["gpus"])

    def cost(one: Tried) -> float:
        return ranks.get(one[0], gpus) * one[1] / 1e6 / samples

    ways = {
        "time against memory": (lambda one: one[2] / 1e9, "memory of the fullest GPU, GB"),
        "time against cost": (cost, "GPU seconds a sample"),
    }
    figures: dict[str, Figure] = {}
    for way, (across, axis) in ways.items():
        traces = []
        for n, (name, some) in enumerate(groups.items()):
            size = 14 if n < 2 else 7
            x = charts.short([across(p) for p in some])
            y = charts.short([p[1] / 1e3 for p in some])
            trace = charts.dots_of(n, name, x, y, "%{text}", size)
            trace["text"] = [_hover(p, reports.get(p[0])) for p in some]
            traces.append(trace)
        y_axis = {"title": {"text": "iteration, ms"}, "type": "log"}
        figures[way] = charts.figure(traces, {"title": {"text": axis}}, y_axis)
    rows = [
        [_short(p), *map(number, (us / 1e3, nbytes / 1e9)), memory]
        for p, us, nbytes, memory in sorted(set(tried), key=lambda one: (one[3] == MISFITS, one[1]))
    ]
    text = (
        "Plans that the search simulated; of the others a lower bound of the time was too long. "
        "The simplest plan that may be as good has the fewest keys of those nearly as fast as the "
        "best: the difference is within the usual error between two plans of a model."
    )
    return Section(
        anchor="tried",
        title="All plans tried",
        text=[text],
        chart=Chart(figures=figures, height_px=460),
        table=Table(head=["plan", "ms", "GB", "memory"], rows=rows),
    )


def _parts(reports: Sequence[Forecast], simple: str) -> Section:
    """Section: where the slowest rank's time goes, as stacked bars; * marks the plan ``simple``."""
    names = [_short(r.plan) + (" *" if r.plan == simple else "") for r in reports]
    labels = ["<br>".join(wrap(name.replace(",", ", "), LABEL_WIDTH)) for name in names]
    traces: list[Trace] = []
    for n, part in enumerate(PARTS):
        bar: Trace = {"type": "bar", "orientation": "h", "name": part, "y": labels}
        bar |= {"marker": {"color": charts.COLOURS[n]}, "hovertemplate": f"{part} %{{x}} ms"}
        traces.append({**bar, "x": charts.short([r.lanes_us[n] / 1e3 for r in reports])})
    figure = charts.figure(traces, {"title": {"text": "ms"}}, charts.NAMED_ROWS)
    figure = {**figure, "layout": {**figure["layout"], "barmode": "stack"}}  # type: ignore[dict-item]
    lines = 1 + max(label.count("<br>") for label in labels)
    row_px = max(2 * charts.ROW_PX, LINE_PX * lines)
    rows = [
        [
            name,
            *(number(us / 1e3) for us in (r.iteration_us, *r.lanes_us)),
            number(r.memory_bytes / 1e9),
            r.memory_verdict,
            number(100 * r.mfu_frac),
        ]
        for name, r in zip(names, reports, strict=True)
    ]
    return Section(
        anchor="parts",
        title="Where the time of the best plans goes",
        text=["Of the slowest rank; the parts add up to the iteration. * marks the simplest plan."],
        chart=Chart(figures={"": figure}, height_px=charts.FRAME_PX + row_px * len(reports)),
        table=Table(head=["plan", "ms", *PARTS, "GB", "memory", "MFU %"], rows=rows),
    )


def _memory(reports: Mapping[str, Forecast], held: Mapping[str, Held]) -> Section:
    """Section: memory over a step of the best and the simplest plan, a curve per rank.

    ``held``: by plan; the table shows the peak in GB by purpose.
    """
    figures = {_short(plan): _curves(ranks) for plan, ranks in held.items()}
    purposes = {name: n for plan in held for name, n in reports[plan].memory_by_bytes.items()}
    rows = [
        [name, *(number(reports[p].memory_by_bytes.get(name, 0) / 1e9, 2) for p in held)]
        for name in purposes
    ]
    return Section(
        anchor="memory",
        title="Memory over a step",
        text=[
            "Activations grow with the time of forwards and go with that of backwards; their peak "
            "is the forecast's. All else is held throughout. Ranks that do the same share a line."
        ],
        chart=Chart(figures=figures),
        table=Table(head=["purpose, GB", *map(_short, held)], rows=rows),
    )


def _curves(ranks: Held) -> Figure:
    """A line per rank whose memory differs, at most MOST_RANKS."""
    distinct = {tuple(curve): name for name, curve in reversed(list(ranks.items())) if curve}
    traces = []
    for n, (curve, name) in enumerate(list(reversed(distinct.items()))[:MOST_RANKS]):
        each = max(1, len(curve) // MOST_POINTS)
        highest = (max(curve[i : i + each], key=itemgetter(1)) for i in range(0, len(curve), each))
        some = list(highest)
        x, y = charts.short([us / 1e3 for us, _ in some]), charts.short([b / 1e9 for _, b in some])
        line = charts.curve_of(n, name, x, y, f"{name}<br>%{{x}} ms<br>%{{y}} GB")
        traces.append({**line, "mode": "lines"})
    x_axis, y_axis = ({"title": {"text": text}} for text in ("ms of the step", "GB"))
    return charts.figure(traces, x_axis, {**y_axis, "rangemode": "tozero"})

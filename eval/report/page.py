"""Renders a device's page: one HTML file with all its charts and their library."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from string import Template

from itercast.eval.report.blocks import Section, Table, Tile
from itercast.eval.report.charts import Chart


def render(
    title: str,
    tiles: Sequence[Tile],
    sections: Sequence[Section],
    machine: Mapping[str, str],
    links: Mapping[str, str],
) -> str:
    """The page as HTML; ``links``: pages of other devices by name."""
    folder = files("itercast.eval.report")
    shown = [chart for section in sections for chart in section.charts]
    figures = {f"chart-{i}": asdict(chart) for i, chart in enumerate(shown)}
    numbers = iter(range(len(shown)))
    return Template((folder / "page.html").read_text()).substitute(
        title=escape(title),
        style=(folder / "page.css").read_text(),
        script=(folder / "page.js").read_text(),
        machine=escape(", ".join(f"{k} {v}" for k, v in machine.items())),
        links=_links(links),
        contents="".join(f'<a href="#{s.anchor}">{escape(s.title)}</a>' for s in sections),
        tiles="".join(map(_tile, tiles)),
        sections="".join(_section(section, numbers) for section in sections),
        figures=_packed(json.dumps(figures, separators=(",", ":")).encode()),
        library=_packed(_library()) if shown else "",
    )


def _library() -> bytes:
    """The code of plotly.js (4.8 MB)."""
    return (files("plotly") / "package_data" / "plotly.min.js").read_bytes()


def _packed(data: bytes) -> str:
    """Compressed by gzip and written as base64 text, which a browser takes apart again."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def _links(links: Mapping[str, str]) -> str:
    if not links:
        return ""
    named = ", ".join(f'<a href="{escape(to)}">{escape(name)}</a>' for name, to in links.items())
    return f"<p>Other devices: {named}</p>"


def _tile(tile: Tile) -> str:
    label, value, beside = map(_text, (tile.label, tile.value, tile.beside))
    return f"<div class=tile><span>{label}</span><b>{value}</b><small>{beside}</small></div>"


def _section(section: Section, numbers: Iterator[int]) -> str:
    text = "".join(f"<p>{_inline(line)}</p>" for line in section.text)
    charts = "".join(_chart(chart, next(numbers)) for chart in section.charts)
    table = _table(section.table, not section.folded) if section.table else ""
    if table and section.folded:
        table = f"<details><summary>All numbers</summary>{table}</details>"
    heading = f"<h2>{escape(section.title)}</h2>"
    return f"<section id={section.anchor}>{heading}{text}{charts}{table}</section>"


def _text(text: str) -> str:
    """Escaped text in which no line breaks before a % sign."""
    return escape(text).replace(" %", "&nbsp;%")


def _inline(text: str) -> str:
    """Escaped text; words in backquotes are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text))


def _chart(chart: Chart, number: int) -> str:
    """Where a chart is drawn, with a choice above it if it has several figures."""
    name = f"chart-{number}"
    choice = ""
    if len(chart.figures) > 1:
        options = "".join(f"<option>{escape(key)}</option>" for key in chart.figures)
        choice = f"<label>Show <select data-for={name}>{options}</select></label>"
    drawn = (
        f'<div id={name} class=chart role=img aria-label="{escape(chart.name)}" '
        f'style="height:{chart.height_px}px"></div>'
    )
    return f"<figure>{choice}{drawn}</figure>"


def _table(table: Table, stacks: bool) -> str:
    """A table with escaped cells.

    On narrow screens it scrolls sideways or, if it ``stacks``, shows each row as a block.
    """
    wide = [" class=words" if i in table.wide else "" for i in range(len(table.head))]
    heads = [f"<th{w}>{_text(cell)}</th>" for cell, w in zip(table.head, wide, strict=True)]
    named = [f'{w} data-head="{escape(h)}"' for h, w in zip(table.head, wide, strict=True)]
    rows = [
        "".join(f"<td{n}>{_text(cell)}</td>" for cell, n in zip(cells, named, strict=True))
        for cells in table.rows
    ]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    kind = "stacks" if stacks else "scrolls"
    return f"<div class={kind}><table><tr>{''.join(heads)}</tr>{body}</table></div>"

"""Renders a device's page: one HTML file with all its charts and their library."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from itercast.extras.pages.blocks import Section, Tile


def render(
    title: str,
    tiles: Sequence[Tile],
    sections: Sequence[Section],
    machine: Mapping[str, str],
    links: Mapping[str, str],
    warnings: Sequence[str] = (),
) -> str:
    """The page as HTML; ``links``: pages of other devices by name; ``warnings``: at the top."""
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        finalize=_unbroken,
    )
    pages.filters["code"] = _code
    library = files("plotly") / "package_data" / "plotly.min.js"  # 4.8 MB
    figures = {f"chart-{s.anchor}": asdict(s.chart) for s in sections if s.chart}
    return pages.get_template("page.html").render(
        title=title,
        tiles=tiles,
        warnings=warnings,
        sections=sections,
        machine=", ".join(f"{k} {v}" for k, v in machine.items()),
        links=links,
        figures=_packed(json.dumps(figures, separators=(",", ":")).encode()),
        library=_packed(library.read_bytes()) if figures else "",
    )


def _packed(data: bytes) -> str:
    """Compressed by gzip and written as base64 text, which a browser takes apart again."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def _unbroken(value: Any) -> Any:
    """Text in which no line breaks before a % sign; other values as they are."""
    return value.replace(" %", "\N{NO-BREAK SPACE}%") if isinstance(value, str) else value


def _code(text: str) -> Markup:
    """Escaped text whose words in backquotes are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))

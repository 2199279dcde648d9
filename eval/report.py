"""Write the report of a comparison: a self-contained HTML page, plots and evaluation.json."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from eval import plots
from eval.ranking import choices, ranking_lines, ranking_metrics, rankings
from eval.results import CaseResult, grouped, in_words, summary
from microbench.store import write_atomic

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; background: white; border-radius: 6px; }
.lead { font-size: 1.2rem; }
"""
LEARNERS = ("blend", "nearest", "linear", "roofline")


def png(figure: Any) -> bytes:
    """Render a figure as PNG bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130)
    return buffer.getvalue()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of a head and rows; cells are escaped."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def case_rows(results: Sequence[CaseResult]) -> list[list[str]]:
    """Cells of the table of cases: a row per measured iteration."""
    return [
        [
            r.label,
            f"{r.predicted_us / 1e3:.2f}",
            f"{r.predicted_us_p10 / 1e3:.2f} to {r.predicted_us_p90 / 1e3:.2f}",
            f"{r.measured_us / 1e3:.2f}",
            f"{r.error_pct:+.1f}",
            r.retest_text,
            f"{100 * r.unmodelled_frac:.1f}",
        ]
        for r in results
    ]


def family_rows(fit: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the table of op models: a row per family, median errors in % by learner."""
    rows = []
    for name, entry in fit.items():
        floor = entry["retest_ape_pct"]
        medians = [f"{entry['learners'][k]['median_ape_pct']:.1f}" for k in LEARNERS]
        cells = [name, str(entry["rows"]), "-" if floor is None else f"{floor:.1f}"]
        p90 = f"{entry['learners']['blend']['p90_ape_pct']:.1f}"
        rows.append([*cells, f"{entry['coverage_pct']:.0f}", *medians, p90])
    return rows


def write_report(
    folder: Path, results: Sequence[CaseResult], fit: Mapping[str, Any], machine: Mapping[str, str]
) -> Path:
    """Write report.html, evaluation.json and the plots to a folder; returns the page's path."""
    facts = evaluation(results, machine)
    figures = {"scatter": plots.scatter(results), "breakdown": plots.breakdown(results)}
    images = {name: png(figure) for name, figure in figures.items()}
    for name, data in images.items():
        write_atomic(folder / f"{name}.png", data)
    write_atomic(folder / "evaluation.json", json.dumps(facts, indent=1).encode())
    write_atomic(folder / "report.html", html_page(results, fit, machine, images).encode())
    return folder / "report.html"


def evaluation(results: Sequence[CaseResult], machine: Mapping[str, str]) -> dict[str, Any]:
    """The content of evaluation.json: cases, error summaries, how plans rank, the machine."""
    return {
        "cases": [{**asdict(r), "error_pct": r.error_pct} for r in results],
        "summary": summary(results),
        "groups": {name: summary(group) for name, group in grouped(results).items()},
        "plans": {
            **ranking_metrics(results),
            "rankings": [asdict(r) for r in rankings(results)],
            "choices": [asdict(c) for c in choices(results)],
        },
        "machine": dict(machine),
    }


def html_page(
    results: Sequence[CaseResult],
    fit: Mapping[str, Any],
    machine: Mapping[str, str],
    images: Mapping[str, bytes],
) -> str:
    """The report as HTML with its images inside; ``fit`` is empty where nothing was trained."""
    pictures = "".join(
        f'<p><img alt="{name}" src="data:image/png;base64,{base64.b64encode(data).decode()}"></p>'
        for name, data in images.items()
    )
    lead = "".join(
        f"<p class=lead><b>{name.capitalize()}, {len(group)} cases:</b> {in_words(group)}.</p>"
        for name, group in grouped(results).items()
    )
    lead += "".join(f"<p>{escape(line)}.</p>" for line in ranking_lines(results))
    machine_line = ", ".join(f"{k} {v}" for k, v in machine.items())
    head = ["case", "predicted ms", "80 % interval", "measured ms", "error %", "retest %"]
    fit_head = ["family", "rows", "retest %", "coverage %", *LEARNERS, "blend p90"]
    fits = table(fit_head, family_rows(fit)) if fit else "<p>No model was trained in this run.</p>"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>itercast</title>"
        f"<style>{STYLE}</style><h1>Predicted against measured iterations</h1>"
        f"{lead}<p>{escape(machine_line)}</p>{pictures}"
        f"<h2>Cases</h2>{table([*head, 'no model %'], case_rows(results))}"
        f"<h2>Op models</h2><p>Median error in % on held-out shapes.</p>{fits}</html>"
    )

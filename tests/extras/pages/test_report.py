"""The report on disk: evaluation.json, pages with every section, the command."""

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from report_facts import DEVICE, FIT, OPS, RESULTS
from typed_commands import typed

from itercast.eval.evaluation import Evaluation
from itercast.eval.iteration_parts import PARTS
from itercast.eval.systematic import systematic_errors
from itercast.extras.pages.blocks import Device
from itercast.extras.pages.page import render
from itercast.extras.pages.sections import sections, tiles
from itercast.extras.pages.write import rewrite, write_pages
from itercast.extras.published.report import write_public_pages
from itercast.learners.held_out import save_held_out

LINES = ("step", "memory")
EVALUATION = Evaluation(results=RESULTS, fit=FIT, machine={"measured on": "<toy>"})


def page_of(device: Device) -> str:
    return render("t", tiles(device), sections(device), {"cpu": "<toy>"}, {})


def figures(page: str) -> list[dict[str, Any]]:
    """The charts of a page, unpacked as its script does."""
    packed = re.search(r"id=figures>([^<]*)<", page)
    assert packed is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return list(found.values())


def rows_of(page: str, anchor: str) -> list[list[str]]:
    """Cells of a section's table, without its head."""
    section = re.search(rf"<section id={anchor}>.*?</section>", page, re.S)
    assert section is not None
    rows = re.findall(r"<tr>(.*?)</tr>", section[0], re.S)[1:]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in rows]


def test_a_comparison_is_read_as_it_was_written(tmp_path: Path) -> None:
    EVALUATION.save(tmp_path)
    assert Evaluation.load(tmp_path) == EVALUATION
    plain = json.loads((tmp_path / "evaluation.json").read_text())
    assert [c["case"] for c in plain["cases"]] == ["a", "b<i>", "plan-c"]
    assert plain["summary"]["median_ape_pct"] == pytest.approx(10)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"cases": [{"new": 1}], "machine": {}}'])
def test_what_is_no_comparison_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(ValueError, match=r"evaluation\.json.*no readable comparison"):
        Evaluation.load(tmp_path)


def test_every_section_is_on_the_page_with_its_numbers() -> None:
    page = page_of(DEVICE)
    anchors = re.findall(r"<section id=(\w+)>", page)
    assert anchors == re.findall(r'<a href="#(\w+)">', page)
    assert anchors == [
        *("iterations", "kinds", "waterfall", "ops", "families", "conditions", "learners"),
        *("calibration", "worst"),
    ]
    assert rows_of(page, "iterations")[0][:5] == ["a", "1.10", "0.99 to 1.21", "1.00", "+10.0"]
    errors = ["10.0", "10.0", "10.0", "10.0", "+0.0", "10.0", "2.0"]  # of +10 and -10 %
    assert rows_of(page, "kinds")[0] == ["one process", "2", *errors, "50"]
    assert ["gemm", "4", "15.0", "146.0", "3.0", "+55.0"] in rows_of(page, "families")
    assert ["size: up to 4 KiB", "4"] in [row[:2] for row in rows_of(page, "conditions")]
    assert ["80", "33.3", "50.0"] in rows_of(page, "calibration")  # a; +10, -10, +20 %
    told = {t.label: (t.value, t.beside) for t in tiles(DEVICE)}
    assert told["Iterations, DDP"][0] == "20.0 %"  # the geometric mean of one
    assert (
        "bias +0 %; retests differ by 2.0 %; 80 % intervals cover 50 %"
        in (told["Iterations, one process"][1])
    )
    assert told["Ops"][0] == "35.0 %"
    assert told["Ops"][1].endswith("retests differ by 5.0 %; 80 % intervals cover 50 %")
    worst = rows_of(page, "worst")
    assert worst[0][0].startswith("gemm mm fp32 m=4") and worst[0][3] == "+200"
    assert worst[0][4].startswith("out of envelope")
    assert len(worst) == 6 + 3


def test_what_is_off_by_more_than_chance_is_said_first() -> None:
    """Before any number, in the tile of its kind, and in the file; else there is no such place."""
    off = [replace(RESULTS[2], case=f"plan-{i}", predicted_us=1500 + i) for i in range(8)]
    device = replace(DEVICE, results=[*RESULTS[:2], *off])
    warnings = [w.text for w in systematic_errors(device.results)]
    page = render("t", tiles(device), sections(device), {}, {}, warnings)
    assert page.index("DDP: all 8 forecasts are too short") < page.index("class=tiles")
    assert re.findall(r'class="tile off"><span>([^<]*)', page) == ["Iterations, DDP"]
    assert "Off by more than chance" not in page_of(DEVICE)


def test_warnings_are_in_the_file_and_on_its_page(tmp_path: Path) -> None:
    off = [replace(RESULTS[2], case=f"plan-{i}", predicted_us=1500 + i) for i in range(8)]
    replace(EVALUATION, results=off).save(tmp_path)
    said = json.loads((tmp_path / "evaluation.json").read_text())["warnings"]
    assert len(said) == 1 and said[0] in write_pages(tmp_path).read_text().replace("\xa0", " ")


def test_charts_have_axis_titles_legends_and_all_points() -> None:
    found = figures(page_of(DEVICE))
    assert len(found) == 7
    assert next(iter(found[0]["figures"])) == "ratio of the two"  # two log axes hide 20 %
    for chart in found:
        for figure in chart["figures"].values():
            x, y = figure["layout"]["xaxis"], figure["layout"]["yaxis"]
            named_rows = y.get("type") == "category"  # whose names say what they are
            assert x["title"]["text"] and (y["title"]["text"] or named_rows)
            assert any("name" in trace for trace in figure["data"])
    texts = str(found[0])
    assert all(text in texts for text in ("<b>a</b>", "<b>plan-c dp=2</b>", "retest 2.0 %"))
    ops = found[2]["figures"]["predicted and measured"]["data"]
    assert sum(len(trace["x"]) for trace in ops if trace["mode"] == "markers") == len(OPS)
    ratio = found[2]["figures"]["ratio of the two"]["data"]
    products = next(trace for trace in ratio if trace.get("name") == "matrix products")
    assert sorted(products["y"]) == pytest.approx([0.9, 1.1, 1.2, 3.0])


def test_names_from_outside_are_escaped() -> None:
    page = page_of(DEVICE)
    assert "&lt;toy&gt;" in page and "b&lt;i&gt;" in page
    assert "<toy>" not in page and "b<i>" not in page


def test_nothing_is_loaded_from_outside() -> None:
    """Neither images nor scripts nor styles have an address."""
    page = re.sub(r"<script type=.application/gzip.*?</script>", "", page_of(DEVICE), flags=re.S)
    assert not re.search(r"(src=|url\(|@import|https?://)", page)


def test_what_is_not_known_is_said() -> None:
    """Without held-out rows, without a comparison."""
    page = page_of(Device(name="toy", results=RESULTS))
    assert "no forecasts of held-out rows are on disk" in page
    assert "Calibration" in page and "Against other learners" not in page
    assert "iteration a" in page
    assert "Predicted against measured ops" in page_of(Device(name="toy", ops=OPS))


def test_a_page_for_every_device(tmp_path: Path) -> None:
    """One device: report.html; several: a folder each, linked to each other."""
    save_held_out(tmp_path / "bundle", OPS)
    facts = replace(EVALUATION, bundle=str(tmp_path / "bundle"))
    facts.save(tmp_path / "one")
    page = write_pages(tmp_path / "one").read_text()
    assert "forecasts toy" in page and "norm" in page
    other = replace(RESULTS[0], gpu="other")
    replace(facts, results=[*RESULTS, other]).save(tmp_path / "two")
    index = write_pages(tmp_path / "two").read_text()
    assert 'href="toy/report.html"' in index and 'href="other/report.html"' in index
    both = [(tmp_path / "two" / name / "report.html").read_text() for name in ("toy", "other")]
    assert 'href="../other/report.html"' in both[0] and "norm" in both[0]
    assert "no forecasts of held-out rows" in both[1]
    assert rewrite(tmp_path) == [tmp_path / n / "report.html" for n in ("one", "two")]


def test_published_iterations_get_a_page_per_gpu(tmp_path: Path) -> None:
    """Forecast 90 of 100 ms; a row that two lines share is one case, peak memory is none."""
    row = {"case": "gpt2", "gpu": "toy", "plan": "dp=2", "batch": 4, "seq": 0, "mode": "train"}
    row |= {"dtype": "fp16", "engine": "eager", "time_us": 1e5, "step": 9e4}
    row |= {"step_p10": 8e4, "step_p90": 12e4, **dict.fromkeys(PARTS, 15e3)}
    rows = pd.DataFrame([row, {**row, "gpu": "other", "time_us": 2e5}])
    step, memory = (SimpleNamespace(line=SimpleNamespace(part=p), rows=rows) for p in LINES)
    assert write_public_pages(tmp_path, [memory], Path("shipped")) is None
    page = write_public_pages(tmp_path, [step, step, memory], Path("shipped"))
    assert page == tmp_path / "report.html"
    found = (tmp_path / "toy" / "report.html").read_text()
    cells = ["gpt2 batch 4 mode train dtype fp16 engine eager dp=2", "90.00", "80.00 to 120.00"]
    assert rows_of(found, "iterations") == [[*cells, "100.00", "-10.0", "-", "16.7"]]
    assert "forecasts other" in (tmp_path / "other" / "report.html").read_text()


def test_the_command_writes_pages_anew(tmp_path: Path) -> None:
    EVALUATION.save(tmp_path / "demo")
    found = typed("report", "--reports", str(tmp_path))
    assert str(tmp_path / "demo" / "report.html") in found.output

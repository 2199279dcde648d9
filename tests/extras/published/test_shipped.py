"""Rebuilding the shipped bundles: families trained apart are joined, compared and put in place."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from itercast.extras.published.fits.shipped import (
    MAX_ROWS,
    comparison,
    joined,
    keep_others,
    measured_table,
    rebuild,
    replace_bundle,
    without_shapes,
)
from itercast.learners.bundle import SHIPPED, Bundle

WHOLE = Bundle.load(SHIPPED)


def one_family(name: str) -> Bundle:
    """The shipped bundle with one family alone."""
    return replace(WHOLE, models={name: WHOLE.models[name]})


def test_families_trained_apart_make_the_whole_bundle() -> None:
    again = joined([one_family(name) for name in MAX_ROWS])
    assert list(again.models) == list(MAX_ROWS) and again.gpus == WHOLE.gpus
    for name, model in WHOLE.models.items():
        assert again.models[name].unseen_offsets == model.unseen_offsets


def test_a_comparison_names_digests_and_errors() -> None:
    norm = WHOLE.models["norm"]
    worse = {**norm.facts, "digest": "0", "errors": {**norm.facts["errors"], "mape_pct": 99.0}}
    new = {"norm": replace(norm, facts=worse), "reduction": WHOLE.models["reduction"]}
    printed = io.StringIO()
    Console(width=160, file=printed).print(comparison(WHOLE, replace(WHOLE, models=new)))
    lines = {x.split()[1]: x for x in printed.getvalue().splitlines() if "│" in x}
    assert "differs" in lines["norm"] and "> 99.0000" in lines["norm"]
    assert "equal" in lines["reduction"] and "not rebuilt" in lines["gemm"]


def test_what_ships_has_no_hashes_of_shapes() -> None:
    norm = WHOLE.models["norm"]
    hashed = replace(norm, facts={**norm.facts, "shapes": "AAAA"})
    light = without_shapes(replace(WHOLE, models={"norm": hashed}))
    assert light.models["norm"].facts == norm.facts
    assert not any("shapes" in model.facts for model in WHOLE.models.values())


def test_a_replaced_bundle_keeps_its_card(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    one_family("reduction").save(old)
    (old / "CARD.md").write_text("who measured it\n")
    one_family("norm").save(new)
    replace_bundle(new, old)
    assert list(Bundle.load(old).models) == ["norm"]
    assert (old / "CARD.md").read_text() == "who measured it\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "old"]


def test_a_single_family_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    """Optimizers change; the files of dropout do not by a byte."""
    old, new = tmp_path / "old", tmp_path / "new"
    joined([one_family("random"), one_family("optimizer")]).save(old)
    (old / "CARD.md").write_text("who measured it\n")
    steps = WHOLE.models["optimizer"]
    changed = replace(steps, facts={**steps.facts, "digest": "0"})
    replace(WHOLE, models={"optimizer": changed}).save(new)
    before = {p.name: p.read_bytes() for p in old.glob("random*")}
    keep_others(new, old)
    replace_bundle(new, old)
    found = Bundle.load(old).models
    assert set(found) == {"random", "optimizer"} and found["optimizer"].facts["digest"] == "0"
    assert before == {p.name: p.read_bytes() for p in old.glob("random*")} != {}


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"NeuSight': no such file or folder"):
        rebuild(tmp_path, tmp_path / "out", list(MAX_ROWS), replace=False)


def test_the_card_says_what_is_measured_and_what_is_assumed() -> None:
    """A backward of GB200 alone is lent to Hopper, the generation before, and to no Ampere."""
    table = measured_table(WHOLE)
    assert table in (SHIPPED / "CARD.md").read_text()
    (line,) = (x for x in table.splitlines() if x.startswith("| attention backward, forward fp8"))
    _, _, measured, assumed, _ = (x.strip() for x in line.split("|"))
    assert measured == "gb200" and "ampere" in assumed and "hopper" not in assumed
    assert table.splitlines()[-1].startswith("| sparse |")

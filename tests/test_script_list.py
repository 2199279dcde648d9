"""The list of strangers' scripts can be read: what it says of each is known."""

import hashlib

import pytest
import yaml
from made_files import KINDS
from scripts_of_others import LIST, Listed, errors_pct, missing, summary


def test_each_listed_script_has_a_source_and_files_that_can_be_made() -> None:
    known = yaml.safe_load(LIST.read_text())
    listed = [Listed(**facts) for facts in known["scripts"]]
    assert {one.source for one in listed} == {*known["sources"], "packages"}
    assert {kind for one in listed for file in one.files.values() for kind in file} <= set(KINDS)


def test_a_script_lacks_what_is_not_installed_in_the_stated_version() -> None:
    needs = ("pytest", "pytest>1", "pytest==0.1.*", "no-such-package-anywhere", "data of ImageNet")
    assert missing(Listed(source="", script="", needs=needs)) == [*needs[2:]]


def test_errors_are_of_a_step_or_an_epoch_with_its_waits_for_batches_without_and_in_practice() -> (
    None
):
    found = {"iteration_us": 120_000.0, "step_us": 90_000.0, "samples_per_s": 100.0}
    found["in_practice"] = 1.5
    assert errors_pct({"step_s": 0.1}, found) == pytest.approx((20, -10, 35))
    # 100 samples/s x 0.12 s = 12 samples a step, of which 80 a second take 0.15 s
    assert errors_pct({"samples_per_s": 80}, found) == pytest.approx((-20, -40, -10))
    assert errors_pct({}, found) == ()
    # 100 steps of 0.12 s, 10 batches of 2 s / 4, 1 s + 2 s between them: 20 s for 16 measured ones
    found |= {"evaluation_batches": [3, 1], "evaluation_s": 2, "workers_start_s": 1, "saving_s": 2}
    epoch = {"epoch_s": 16, "epoch_steps": 100, "evaluation_batches": 10}
    assert errors_pct(epoch, found) == pytest.approx((25, 6.25, 34.375))


def test_a_summary_tells_no_single_error() -> None:
    said = summary("judges", [(20.0, 10.0, 1.0), (-50.0, -30.0, 1.0), (40.0, 2.0, 4.0)])
    assert said == (
        "judges, 3 scripts beside published speeds: all: mean 36.7 %, median 40.0 %, bias +3.3 %; "
        "without waits for input: mean 14.0 %, median 10.0 %, bias -6.0 %; "
        "in practice: mean 2.0 %, median 1.0 %, bias +2.0 %"
    )


def test_half_of_the_published_speeds_judge() -> None:
    """Drawn by the names' SHA-256: sorted by it, the first and every second finds causes.

    One whose error was seen no longer judges; as what it was ``drawn`` stays written.
    """
    known = yaml.safe_load(LIST.read_text())
    measured = {one["name"]: one["measured"] for one in known["scripts"] if "measured" in one}
    order = sorted(measured, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    drawn = {name: ("finds causes", "judges")[at % 2] for at, name in enumerate(order)}
    assert {name: facts.get("drawn", facts["role"]) for name, facts in measured.items()} == drawn
    assert {facts["role"] for facts in measured.values() if "drawn" in facts} == {"finds causes"}

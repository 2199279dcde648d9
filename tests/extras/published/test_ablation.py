"""What a rule buys is judged by sources that it has not seen."""

import math
import re
from pathlib import Path

import pytest

from itercast.capture.base.assumptions import Assumption
from itercast.capture.base.switches import RULES
from itercast.capture.plan import ParallelPlan
from itercast.extras.published.ablation import ablate
from itercast.extras.published.ablation.ablate import (
    Row,
    forecast_and_read,
    forecast_us,
    gain,
    in_processes,
    is_read,
    line_of,
    named_switches,
    switches,
)
from itercast.extras.published.left_out import assumptions
from itercast.extras.published.models import captured_step
from itercast.learners.bundle import SHIPPED
from itercast.microbench.store import Facts

ROOT = Path(__file__).parents[3]
NUMBER = Assumption(
    module="m", name="n", value=2, unit="-", source="-", holds="-", checked_on=("Seen",), without=1
)
WITH_IT = {"seen": 10.0, "a": 10.0, "b": 20.0}
WITHOUT = {"seen": 30.0, "a": 11.0, "b": 20.0}


def test_sources_that_a_number_was_checked_on_have_no_vote() -> None:
    """Of a and b the mean goes from 15 to 15.5; a rule that has seen nothing counts all three."""
    assert gain(NUMBER, WITH_IT, WITHOUT) == pytest.approx(0.5)
    assert gain(None, WITH_IT, WITHOUT) == pytest.approx((20 + 1 + 0) / 3)
    assert math.isnan(gain(NUMBER, {"seen": 1.0}, {"seen": 2.0}))


def test_a_line_names_the_sources_that_change() -> None:
    found = line_of("m.n", 0.5, WITH_IT, WITHOUT)
    assert found == "| m.n | +0.50 | pays | seen 10.0 -> 30.0, a 10.0 -> 11.0 |"
    assert line_of("m.n", 0.2, {"b": 20.0}, {"b": 20.0}) == "| m.n | +0.20 |  |  |"


def test_rules_and_numbers_with_a_neutral_value_are_switched_off() -> None:
    found = switches(assumptions())
    assert set(RULES) < set(found) and found["power_limit"] is None
    assert all(number is None or number.without is not None for number in found.values())
    assert list(named_switches(["power_limit"])) == ["power_limit"]
    with pytest.raises(ValueError, match="unknown rule 'gravity'"):
        named_switches(["gravity"])
    with pytest.raises(ValueError, match="'nowhere': no published iterations of a line named 'x'"):
        ablate.main(Path("nowhere"), line="x")


def test_other_processes_find_what_they_are_to_run() -> None:
    """Python lets no process import the ``__main__`` of a package that another one runs."""
    assert "def " not in Path(ablate.__file__).with_name("__main__.py").read_text()


def test_a_number_is_a_constant_of_its_name() -> None:
    """So that code that reads it is known by the names in it."""
    for number in filter(None, switches(assumptions()).values()):
        bound = re.compile(rf"^.*\b{number.name.upper()}\b.*= .*assumed", re.M)
        files = [path for path in ROOT.glob(f"[!.]*/**/{number.module}.py")]
        assert any(bound.search(path.read_text()) for path in files), number.name


CASES = (("batch_norm", "v100-pcie-32gb"), ("swiglu", "h100-sxm-80gb"))


def test_rows_that_read_a_rule_are_forecast_without_it() -> None:
    """A V100's batch norm of 1 MiB is priced by its passes; an H100's product of silu has rows."""
    asked = {"rows": 4096, "cols": 64, "inner": 0, "plan": ""}
    asked |= {"mode": "infer", "dtype": "fp32", "engine": "eager", "timer": "device"}
    facts: Facts = {"source": "s", "measured_us": 1.0, "bundle": SHIPPED, "left_out": ""}
    rows = {}
    for number, (case, gpu) in enumerate(CASES):
        mine = {**asked, "case": case, "gpu": gpu}
        rows[number] = Row(asked=mine, step=captured_step(mine, ParallelPlan()), **facts)
    (norm, norm_texts), (swiglu, swiglu_texts) = dict(
        in_processes(forecast_and_read, rows)
    ).values()
    assert is_read("norm.passes", norm_texts) and is_read("fallbacks", norm_texts)
    for texts in (norm_texts, swiglu_texts):
        assert not is_read("conv.terms_of_pass", texts) and not is_read("power_limit", texts)
    without = dict(in_processes(forecast_us, rows, "fallbacks"))
    assert without[0] != norm and without[1] == swiglu

"""What sources are used for: each for one thing; errors of untouched ones stand apart."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from itercast.extras.published.left_out import (
    LEFT_OUT,
    assumptions,
    compared,
    fitted_sources,
    left_out_markdown,
)
from itercast.extras.published.lines import LineResult
from itercast.extras.published.roles import ROLES, role_of, summary


def result(line: str, source: str, guess_us: list[float], covered: float) -> LineResult:
    """Forecasts of steps that took 10 us each."""
    guess = np.array(guess_us)
    coverage = {"coverage_pct": covered}
    return compared(
        line, source, np.full(len(guess), 10.0), guess, guess, 0.0, (coverage, coverage)
    )


def test_a_source_has_one_role() -> None:
    named = Counter(source.casefold() for sources in ROLES.values() for source in sources)
    assert set(named.values()) == {1}
    with pytest.raises(ValueError, match=r"source 'abacus' has no role .* 'zeus'"):
        role_of("abacus")


def test_files_of_measured_steps_have_the_roles_that_their_folders_say() -> None:
    """The last column of the README's table begins with the role of the file."""
    for readme in Path("datasets").glob("*_runs/README.md"):
        lines = [line.strip(" |").split("|") for line in readme.read_text().splitlines()]
        said = {line[0].strip(" `"): line[-1].strip() for line in lines if "`" in line[0][:1]}
        assert set(said) == {path.stem for path in readme.parent.glob("*.yaml")}
        assert all(role.startswith(role_of(name)) for name, role in said.items()), readme


def test_numbers_are_fitted_and_checked_on_sources_that_find_causes_alone() -> None:
    seen = fitted_sources(assumptions())
    judging = {s.casefold() for role in ("untouched", "judges") for s in ROLES[role]}
    assert not seen & judging
    assert "megatron-lm" in seen


def test_sources_count_alike_and_lines_of_one_by_their_rows() -> None:
    """dlperf: 10 % and -10 % over one and three rows; sia: 30 % too long. Mean (10 + 30) / 2."""
    found = [
        result("a", "dlperf", [11.0], 100.0),
        result("b", "dlperf", [9.0] * 3, 50.0),  # with the first 62.5 % are covered
        result("c", "sia", [13.0], 0.0),
    ]
    text = summary(found, LEFT_OUT)  # bias of dlperf (10 - 3 * 10) / 4 = -5
    assert text == (
        "2 sources, 5 rows: mean of the sources' mean errors 20.0 %, bias +12.5, "
        "80 % intervals cover 31 %, less than 60 % of 1 sources"
    )


def test_untouched_sources_come_first_and_apart() -> None:
    found = [result("x", "vtrain", [9.0], 100.0), result("y", "qwen-docs", [11.0], 0.0)]
    text = left_out_markdown(found, [])
    first, second = text.index("Sources: untouched. 1 sources"), text.index("Sources: finds causes")
    assert first < text.index("| y | qwen-docs |") < second < text.index("| x | vtrain |")

"""Assumed numbers are data: each has a unit, a source and where it holds, and each is used."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
import yaml
from numbers_in_code import Name, numbers

from itercast.microbench.assumptions import (
    FILE,
    all_assumptions,
    assumed,
    assumptions_in,
    leaving_out,
)

ROOT = Path(__file__).parents[1]
PACKAGES = ("microbench", "learners", "compose", "eval", "itercast")
EXPLAINED = Path(__file__).with_suffix("").with_name("numbers_in_code.yaml")
KINDS = ("unit", "definition", "limit", "tolerance", "hyperparameter", "search")


def uses() -> set[tuple[Path, str, str]]:
    """(folder, module, name) of every ``assumed(__file__, name)`` in the code."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                if called and node.func.id == "assumed":
                    found.add((path.parent, path.stem, ast.literal_eval(node.args[1])))
    return found


def stated() -> set[tuple[Path, str, str]]:
    """(folder, module, name) of every entry of every file."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob(FILE)]
    return {(path.parent, *key) for path in files for key in assumptions_in(path.parent)}


def test_every_assumption_is_used_and_every_use_is_stated() -> None:
    assert uses() == stated()


def test_every_assumption_says_where_it_comes_from() -> None:
    for one in all_assumptions(ROOT):
        for text in (one.unit, one.source, one.holds):
            assert isinstance(text, str) and text.strip(), (one.module, one.name)


def test_an_entry_without_a_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("host:\n  launch_us: {value: 5, unit: us, holds: everywhere}\n")
    with pytest.raises(ValueError, match=r"host\.launch_us: missing \['source'\]"):
        assumptions_in(tmp_path)


def test_a_value_is_found_by_module_and_name(tmp_path: Path) -> None:
    entry = "{value: [1, 2], unit: us, source: a test, holds: here, fitted_on: [x]}"
    (tmp_path / FILE).write_text(f"host:\n  launch_us: {entry}\n")
    assert assumed(str(tmp_path / "host.py"), "launch_us") == [1, 2]
    with pytest.raises(ValueError, match=r"no assumption other\.launch_us"):
        assumed(str(tmp_path / "other.py"), "launch_us")


FITTED = (
    "value: 4, unit: us, source: a test, holds: here, fitted_on: [NeuSight], checked_on: [timm]"
)


def test_a_source_left_out_takes_the_value_without_it(tmp_path: Path) -> None:
    """2 where the source it was fitted or checked on is left out, in any case; else 4."""
    (tmp_path / FILE).write_text(f"host:\n  launch_us: {{{FITTED}, without: 2}}\n")

    def value() -> object:
        return assumed(str(tmp_path / "host.py"), "launch_us")

    found = [value()]
    for source in ("neusight", "timm", "vidur", ""):
        with leaving_out(source):
            found.append(value())
    assert [*found, value()] == [4, 2, 2, 4, 4, 4]


def test_a_fitted_value_without_a_neutral_one_stays(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(f"host:\n  launch_us: {{{FITTED}}}\n")
    with leaving_out("timm"):
        assert assumed(str(tmp_path / "host.py"), "launch_us") == 4


def test_a_neutral_value_needs_sources(tmp_path: Path) -> None:
    entry = "{value: 4, unit: us, source: a test, holds: here, without: 2}"
    (tmp_path / FILE).write_text(f"host:\n  launch_us: {entry}\n")
    with pytest.raises(ValueError, match="'without' needs sources in fitted_on"):
        assumptions_in(tmp_path)


def test_a_neutral_value_has_the_form_of_the_value() -> None:
    """The same keys, or as many numbers; a table whose entries default to 1 may be empty."""
    for one in all_assumptions(ROOT):
        if isinstance(one.value, dict) and one.without:
            assert set(one.without) == set(one.value), one.name
        if one.without is not None:
            assert isinstance(one.without, type(one.value) | float), one.name


def listed() -> dict[Name, tuple[float, ...] | None]:
    """Numbers that tests/numbers_in_code.yaml explains; None for constants, whatever they are."""
    found: dict[Name, tuple[float, ...] | None] = {}
    for file, entries in yaml.safe_load(EXPLAINED.read_text()).items():
        for entry in entries:
            assert set(entry) <= {"kind", "reason", "constants", "functions"}, (file, entry)
            assert entry["kind"] in KINDS and entry["reason"].strip(), (file, entry)
            found |= dict.fromkeys(Name(file, name) for name in entry.get("constants", ()))
            for name, values in entry.get("functions", {}).items():
                assert Name(file, name) not in found, (file, name)
                found[Name(file, name)] = tuple(sorted(values))
    return found


def test_every_number_in_code_is_an_assumption_or_explained() -> None:
    found, explained = numbers(), listed()
    new = {k: v for k, v in found.items() if k not in explained or explained[k] not in (None, v)}
    assert not new, (
        f"numbers without a source: {new}. What decides a forecast belongs into assumptions.yaml "
        f"beside the code; units, definitions and the like into {EXPLAINED.name} beside this test"
    )
    gone = sorted(set(explained) - set(found))
    assert not gone, f"not in the code: {gone}; take them out of {EXPLAINED.name}"


def test_numbers_are_found_where_they_decide_and_not_where_they_are_measured() -> None:
    source = """
    from itercast.microbench.ops.family import Family
    SHARE, ROWS = 0.3, 2**14
    COUNT: int = 2
    MAX_SIZE = 4096
    TABLE = {"a": 2, "b": 5}
    TABLE |= {"c": 7}
    KNOWN = assumed(__file__, "known")
    @dataclass
    class Facts:
        count: int = 2
        delay_us: float = 7.5
    def flops(p):
        return 2.0 * p.m * SHARE + 0.7 * p.n[5] / 1e6 + 2**20 * KNOWN
    def sweep():
        yield 512 * MAX_SIZE
    FAMILY = Family(name="x", weight=0.3, sweep=sweep, flops=flops)
    """
    found = numbers({"microbench/ops/x.py": ast.parse(textwrap.dedent(source))})
    assert {key.name: values for key, values in found.items()} == {
        "SHARE": (0.3, 14),
        "ROWS": (0.3, 14),
        "COUNT": (2,),
        "TABLE": (5, 7),
        "Facts": (7.5,),
        "flops": (0.7,),
    }

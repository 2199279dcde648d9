"""Tables in files, on wide terminals and on narrow ones: nothing is cut."""

import pytest
from rich.table import Table

from itercast.eval.tables import output, print_tables, sized

PLAN = "dp=64,tp=8,pp=4,zero=1,micro=32,schedule=interleaved:4,recompute=selective"
NUMBER = "123,456.78"


def printed(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Cells of the rows that a table of a plan and six numbers is printed as, borders left out."""
    table = Table(title="plans")
    table.add_column("plan")
    for _ in range(6):
        table.add_column("samples per second", justify="right")
    table.add_row(PLAN, *[NUMBER] * 6)
    print_tables(table)
    lines = capsys.readouterr().out.splitlines()
    return [line.strip("│").split("│") for line in lines if line.startswith("│")]


def test_a_file_has_whole_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    """A table there is as wide as on a terminal of 120 columns; lines are never broken."""
    inside = printed(capsys)
    monkeypatch.setenv("COLUMNS", "120")
    assert printed(capsys) == inside and sum(map(len, inside[0])) + len(inside[0]) + 1 == 120
    monkeypatch.delenv("COLUMNS")
    output().print(PLAN * 3)
    assert capsys.readouterr().out == f"{PLAN * 3}\n"


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_on_a_narrow_terminal_plans_go_on_and_numbers_stay_whole(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 40 columns six numbers of 10 do not fit: the terminal breaks the lines."""
    monkeypatch.setenv("COLUMNS", str(columns))
    first, *others = printed(capsys)
    assert [cell.strip() for cell in first[1:]] == [NUMBER] * 6
    assert "".join(row[0].strip() for row in (first, *others)) == PLAN
    assert sum(map(len, first)) + len(first) + 1 == max(columns, 96)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (4, "4 B"), (8_388_608, "8.39 MB"), (24.3e9, "24.3 GB"), (2.1e12, "2,100 GB")],
)
def test_bytes_have_three_digits_in_a_unit_of_theirs(nbytes: float, text: str) -> None:
    assert sized(nbytes) == text


def test_brackets_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Names, plans and errors of users may have them; read as markup [torch] would vanish."""
    table = Table("[red]head[/]", title="a[title]", caption="[caption]")
    table.add_row("pip install transformers[torch]")
    print_tables(table)
    output().print("a[line]")
    out = capsys.readouterr().out
    for text in ("[red]head[/]", "a[title]", "[caption]", "transformers[torch]", "a[line]"):
        assert text in out

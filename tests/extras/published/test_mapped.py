"""The mechanism of mappings: conversions by hand, what is left out and why, wrong mappings."""

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from itercast.extras.imports.base import Imported
from itercast.extras.published.mapped import reader
from itercast.extras.published.mapped.conversions import ARITHMETIC, Cells, Place, known
from itercast.extras.published.mapped.source import load
from itercast.extras.published.readers import MAPPINGS

TINY = """
where: https://example.org
licence: MIT
conventions: made up
values:
  dtypes: {half: fp16, float: fp32}
tables:
- files: ["products_*.csv", "products_*.csv.gz"]
  path: 'products_(?P<card>[^.]+)\\.csv'
  skip:
  - {column: note, is: throttled, reason: the GPU was throttled}
  rules:
  - family: gemm
    where: {what: mm}
    constants: {op: mm, stack: mine-1, timer: device}
    columns:
      gpu: {gpu: card}
      dtype: {of: type, values: dtypes}
      m: M
      n: N
      k: K
      time_us: {ms: t}
- files: ["specs.csv"]
  leave_out: no times in it
"""
HEADER = "what,type,M,N,K,t,note\n"
GOOD = "mm,half,2,3,4,0.5,\n"


def tiny(folder: Path, text: str = TINY, **files: str | bytes) -> Imported:
    """Files imported by a mapping; ``__`` in a name is a point."""
    mapping = folder / "tiny.yaml"
    mapping.write_text(text)
    data = folder / "data"
    data.mkdir()
    for name, content in files.items():
        raw = content.encode() if isinstance(content, str) else content
        (data / name.replace("__", ".")).write_bytes(raw)
    return reader.read(load(mapping), data)


def test_columns_become_parameters_and_us(tmp_path: Path) -> None:
    """0.5 ms are 500 us; the GPU stands in the file's name; defaults are the family's."""
    found = tiny(tmp_path, products_T4__csv=HEADER + GOOD)
    (row,) = found.rows["gemm"].to_dict("records")
    assert (row["m"], row["n"], row["k"], row["time_us"]) == (2, 3, 4, 500.0)
    assert (row["gpu"], row["dtype"], row["batch"], row["layout"]) == ("t4", "fp16", 1, "nn")
    assert (row["run_id"], row["origin"]) == ("tiny:products_T4.csv", "products_T4.csv:2")
    assert not found.dropped


def test_iterations_of_whole_models_are_rows_too(tmp_path: Path) -> None:
    """Their columns are free but for a few; a batch of half a sample is left out."""
    text = TINY.replace("family: gemm", "family: iteration").replace("      n: N\n      k: K\n", "")
    facts = "op: train_step, case: gpt2-small, mode: train, plan: '', world_size: 1, amp: true"
    text = text.replace("op: mm", facts).replace("m: M", "batch: M")
    found = tiny(tmp_path, text, products_T4__csv=HEADER + GOOD + GOOD.replace("2,", "2.5,"))
    (row,) = found.rows["iteration"].to_dict("records")
    assert (row["batch"], row["amp"], row["time_us"]) == (2, True, 500.0)
    assert found.dropped == {"batch is not a positive whole number": 1}


def test_gzip_is_read_as_plain_text_is(tmp_path: Path) -> None:
    found = tiny(tmp_path, products_T4__csv__gz=gzip.compress((HEADER + GOOD).encode()))
    assert len(found.rows["gemm"]) == 1


def test_every_line_left_out_has_a_reason(tmp_path: Path) -> None:
    """A value that no table of values knows is never taken as it is."""
    lines = [GOOD, GOOD.replace("half", "quarter"), GOOD.replace("mm,", "fft,")]
    lines += [GOOD.replace("\n", "throttled\n"), GOOD.replace("2,", "two,"), "mm,half\n"]
    lines += [GOOD.replace("0.5", "inf"), GOOD.replace("0.5", "")]
    found = tiny(
        tmp_path,
        products_T4__csv=HEADER + "".join(lines),
        products_Z9__csv=HEADER + GOOD,
        other__csv="a,b\n",
        specs__csv="a,b\n",
        products_P4__csv="what,type\nmm,half\n",
        products_A40__csv__gz=gzip.compress(HEADER.encode() * 99)[:30],
    )
    assert len(found.rows["gemm"]) == 1
    assert found.dropped == {
        "unknown type: 'quarter'": 1,
        "no rule for what=fft": 1,
        "the GPU was throttled": 1,
        "m is not a positive whole number": 1,
        "row with a wrong number of columns": 1,
        "time is not a positive number below 1e+12 us": 2,
        "unknown gpu: 'Z9'": 1,
        "file not imported: 'other.csv'": 1,
        "file not imported: no times in it": 1,
        "file unreadable: no column 'note'": 1,
        "file unreadable: truncated gzip": 1,
    }


def test_a_folder_without_such_files_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a folder of tiny; looked for products_\*\.csv"):
        tiny(tmp_path, readme__txt="hello")


def test_a_file_of_another_name_is_known_by_its_columns(tmp_path: Path) -> None:
    """All columns that the table needs; what lacks one of them is left out and counted."""
    text = TINY.replace("  path: 'products_(?P<card>[^.]+)\\.csv'\n", "")
    head, line = HEADER.replace("what", "card,what"), "A6000," + GOOD
    short = head.replace(",note", "") + line.replace(",\n", "\n")
    found = tiny(tmp_path, text, renamed__csv=head + line, notes__csv=short)
    assert list(found.rows["gemm"]["gpu"]) == ["rtx-a6000"]
    assert found.dropped == {"file not imported: 'notes.csv'": 1}


def test_parquet_has_numbers_and_text(tmp_path: Path) -> None:
    frame = pd.DataFrame({"what": ["mm"], "type": ["half"], "M": [2], "N": [3], "K": [4.0]})
    frame = frame.assign(t=[0.5], note=[""])
    frame.to_parquet(tmp_path / "products_T4.parquet", compression="zstd")
    text = TINY.replace('["products_*.csv", "products_*.csv.gz"]', '["*.parquet"]')
    content = (tmp_path / "products_T4.parquet").read_bytes()
    text = text.replace("[^.]+)\\.csv", "[^.]+)\\.parquet")
    found = tiny(tmp_path, text, products_T4__parquet=content, products_P4__parquet=b"PAR1" * 9)
    assert list(found.rows["gemm"]["k"]) == [4]
    assert found.dropped == {"file unreadable: not a Parquet table": 1}


CELLS = pd.DataFrame(
    {"a": ["6", "x"], "b": ["4", "2"], "t": ["(128, 8192)", "0.19ms"], "e": ["", "1"]}
)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ({"ns": "a"}, [0.006, np.nan]),
        ({"us": "a"}, [6.0, np.nan]),
        ({"ms": "a"}, [6e3, np.nan]),
        ({"s": "a"}, [6e6, np.nan]),
        ({"product": [2, "a", "b"]}, [48.0, np.nan]),
        ({"sum": ["a", "b"]}, [10.0, np.nan]),
        ({"difference": ["a", "b"]}, [2.0, np.nan]),
        ({"quotient": ["a", "b"]}, [1.5, np.nan]),
        ({"ceil_quotient": ["a", "b"]}, [2.0, np.nan]),
        ({"giga_per_s": [{"product": ["a", 1e9]}, "b"]}, [1.5e6, np.nan]),  # 6e9 at 4e9/s: 1.5 s
        ({"tera_per_s": [{"product": ["a", 1e12]}, "b"]}, [1.5e6, np.nan]),
        ({"round": {"product": ["b", 0.4]}}, [2.0, 1.0]),  # 1.6 and 0.8
        ({"number": "t"}, [128.0, 0.19]),
        ({"number": ["t", 1]}, [8192.0, np.nan]),
        ({"first": ["e", "b"]}, ["4", "1"]),
        ({"text": "v{b}-{e}"}, ["v4-", "v2-1"]),
        ({"lower": {"text": "V{b}"}}, ["v4", "v2"]),
        ({"of": "b", "values": {"4": True, "2": 7}}, [True, 7]),
        ({"of": "b", "values": {"4": "four", "*": "other"}}, ["four", "other"]),
        ({"node": {"text": "h{b}00_sxm"}}, ["", "dgx-h200"]),  # no GPU is called H400
        ({"link": [{"text": "a40_pairwise"}, "b"]}, ["bridged", "pairwise"]),
        ({"plan": {"dp": "b", "tp": 1, "micro": 8}}, ["dp=4,accumulate=8", "dp=2,accumulate=8"]),
        ({"plan": {"sp": True, "zero": 1, "amp": False}}, ["sp,zero=1"] * 2),
        (
            {"plan": {"pp": "b", "micro": 1, "recompute": {"text": "full"}}},
            ["pp=4,micro=1,recompute=full", "pp=2,micro=1,recompute=full"],
        ),
        (
            {"json": [{"kind": "t5"}, {"n": "b"}]},
            ['{"kind": "t5", "n": 4}', '{"kind": "t5", "n": 2}'],
        ),
    ],
)
def test_conversions_by_hand(expression: object, expected: list[object]) -> None:
    found = list(Cells(CELLS).value(expression))
    if isinstance(expected[0], float):
        np.testing.assert_allclose(np.array(found, dtype=float), np.array(expected, dtype=float))
    else:
        assert found == expected


def test_every_conversion_is_tested() -> None:
    """Those above; ``gpu`` by the first test, ``file`` by the next, ``packed`` by KernelBench's."""
    marks = test_conversions_by_hand.pytestmark  # type: ignore[attr-defined]
    tested = {name for expression, _ in marks[0].args[1] for name in expression}
    assert {*ARITHMETIC} <= tested
    assert {*known()} - tested == {"gpu", "of + values", "file", "packed"}


def test_a_file_is_read_inside_the_imported_folder_only(tmp_path: Path) -> None:
    """Two folders up is the imported folder, three are outside; a list is no object."""
    (tmp_path / "in/a/b").mkdir(parents=True)
    for folder in ("in", "."):
        (tmp_path / folder / "config.json").write_text('{"layers": 2, "heads": 4}')
    (tmp_path / "in/list.json").write_text("[1]")
    place = Place(folder=tmp_path / "in/a/b", root=tmp_path / "in")
    names = ["../../config.json", "../../../config.json", "../../list.json", "none.json"]
    cells = Cells(pd.DataFrame({"name": names}), place)
    assert list(cells.value({"file": "{name}"})) == ['{"heads": 4, "layers": 2}', "", "", ""]
    assert list(cells.why) == ["", *(f"no readable file {name!r}" for name in names[1:])]


def test_degrees_of_a_plan_are_whole_numbers() -> None:
    cells = Cells(pd.DataFrame({"dp": ["4", "2.5", ""]}))
    assert list(cells.value({"plan": {"dp": "dp"}}))[::2] == ["dp=4", ""]
    assert list(cells.why) == ["", "dp is not a whole number", ""]


def test_a_json_file_is_a_table_of_one_line_and_a_reason_may_name_columns(tmp_path: Path) -> None:
    text = TINY.replace('["products_*.csv", "products_*.csv.gz"]', '["products_*.json"]')
    text = text.replace("[^.]+)\\.csv", "[^.]+)\\.json")
    text = text.replace("the GPU was throttled", '"{what} was throttled"')
    text = text.replace("      note: note\n", "")
    good = '{"what": "mm", "type": "half", "M": 2, "N": 3, "K": 4, "t": 0.5, "note": ""}'
    slow, half = good.replace('""}', '"throttled"}'), good.replace('"t": 0.5, ', "")
    files = {"products_T4__json": good, "products_P4__json": slow, "products_L4__json": half}
    found = tiny(tmp_path, text, **files)
    (row,) = found.rows["gemm"].to_dict("records")
    assert (row["k"], row["time_us"], row["origin"]) == (4, 500.0, "products_T4.json:1")
    assert found.dropped == {"mm was throttled": 1, "file unreadable: no key 't'": 1}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("family: gemm", "family: gem", "unknown family 'gem'"),
        ("m: M", "q: M", "gemm has no ['q']"),
        ("      k: K\n", "", "rows of gemm lack ['k']"),
        ("{ms: t}", "{minutes: t}", "unknown conversion 'minutes'"),
        ("{ms: t}", "{ms: [t, t]}", "takes 1 operands, got 2"),
        ("{ms: t}", "[t]", "neither a column, a number nor a mapping"),
        ("values: dtypes}", "values: types}", "unknown table of values 'types'"),
        ("half: fp16", "half: fp17", "unknown dtype 'fp17'"),
        ("{of: type, values: dtypes}", "type", "dtype must be a constant, a table of values"),
        ("gpu: {gpu: card}", "gpu: card", "gpu must be a constant, a table of values"),
        ("m: M", "m: M\n      layout: note", "layout must be a constant, a table of values"),
        ("op: mm,", "op: mm, layout: true,", "layout: True is no str"),
        ("timer: device", "timer: sundial", "unknown timer 'sundial'"),
        ("licence: MIT", "license: MIT", "no 'licence'"),
        ("is: throttled", "was: throttled", "unknown key 'was'"),
        ("where: {what: mm}", "when: {what: mm}", "unknown key 'when'"),
        ("  leave_out: no times in it\n", "", "need either rules or leave_out"),
        ("is: throttled", "unlike: '('", "missing )"),
        ("m: M", "m: {json: [{}]}", "takes 2 operands, got 1"),
        ("path: 'products_(", "path: 'products_((", "missing )"),
        ("tables:", "tables: [", "mapping tiny.yaml"),
        ("values:\n", "values: !!python/name:os.system\n", "mapping tiny.yaml"),
    ],
)
def test_a_wrong_mapping_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Also tags that would run code."""
    assert old in TINY
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace(old, new, 1))
    with pytest.raises(ValueError) as caught:
        load(path)
    assert message in str(caught.value) and "mapping tiny.yaml: " in str(caught.value)


def test_the_mapping_in_the_documentation_works(tmp_path: Path) -> None:
    """2 * 2 * 3 * 4 operations at 0.024e12/s take 0.002 us; a throttled line is counted."""
    page = (Path(__file__).parents[3] / "docs/extending.md").read_text()
    (text,) = [part.split("```")[0] for part in page.split("```yaml\n")[1:]]
    lines = "what,type,M,N,K,TFLOPS,note\nmm,bfloat16,2,3,4,0.024,\nmm,float16,2,3,4,1,throttled\n"
    found = tiny(tmp_path, text, products_T4__csv=lines)
    (row,) = found.rows["gemm"].to_dict("records")
    assert (row["m"], row["n"], row["k"], row["dtype"]) == (2, 3, 4, "bf16")
    assert row["time_us"] == pytest.approx(0.002)
    assert found.dropped == {"the GPU was throttled": 1}


@pytest.mark.parametrize("path", MAPPINGS.glob("*.yaml"), ids=lambda path: path.stem)
def test_mappings_that_ship_are_right(path: Path) -> None:
    """They load, and say origin, licence and units."""
    source = load(path)
    assert source.about.source == path.stem and "https://" in source.about.where
    assert len(source.about.conventions) > 60
    assert "eval" not in yaml.safe_dump(yaml.safe_load(path.read_text()))

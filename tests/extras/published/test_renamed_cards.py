"""Files of published sources whose cards are renamed to other known GPUs: imported all the same."""

import gzip
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest
import yaml
from public_data import PUBLIC, needs_public

from itercast.extras.imports.base import Hints, Imported
from itercast.extras.published.readers import read_source

pytestmark = needs_public()
LINES = 4000  # of a text file that are copied
RENAMED = yaml.safe_load(Path(__file__).with_name("renamed_cards.yaml").read_text())


def imported(folder: Path, source: str, names: Mapping[str, str]) -> Imported:
    """A copy of the first file of a source, with other names in path and text, imported."""
    file = sorted(PUBLIC.glob(RENAMED[source]["file"]))[0]
    place = file.relative_to(PUBLIC).as_posix().removesuffix(".gz")
    data, parquet = file.read_bytes(), file.suffix == ".parquet"
    text = "" if parquet else (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    text = "".join(text.splitlines(keepends=True)[:LINES])
    for theirs, other in names.items():
        place, text = place.replace(theirs, other), text.replace(theirs, other)
    copy = folder / place
    copy.parent.mkdir(parents=True)
    copy.write_bytes(data if parquet else text.encode())
    if source == "kernelbench":
        for archive in (PUBLIC / source).glob("problems-*.tar.gz"):
            (copy.parent / archive.name).write_bytes(archive.read_bytes())
        copy.rename(copy.with_name(file.name))
    whole = folder / source
    return read_source(source, whole if whole.is_dir() else folder, Hints())


@pytest.mark.parametrize("source", sorted(RENAMED))
def test_a_card_that_no_importer_was_written_for_is_imported(source: str, tmp_path: Path) -> None:
    """As many rows of the other card, and no line left out that was not before."""
    known = imported(tmp_path / "known", source, {})
    found = imported(tmp_path / "renamed", source, RENAMED[source]["names"])
    ours = pd.concat([rows["gpu"] for rows in found.rows.values()])
    assert RENAMED[source]["gpu"] in set(ours)
    assert found.dropped.keys() == known.dropped.keys()
    assert {k: len(rows) for k, rows in found.rows.items()} == {
        k: len(rows) for k, rows in known.rows.items()
    }

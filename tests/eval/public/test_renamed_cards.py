"""Files of published sources whose cards are renamed to other known GPUs: imported all the same."""

from __future__ import annotations

import gzip
from pathlib import Path

import pandas as pd
import pytest
import yaml
from public_data import PUBLIC, needs_public

from itercast.eval.public.readers import read_source
from itercast.microbench.importers.base import Hints

pytestmark = needs_public()
LINES = 4000  # of a text file that are copied
RENAMED = yaml.safe_load(Path(__file__).with_name("renamed_cards.yaml").read_text())


def renamed(folder: Path, name: str) -> Path:
    """The first file of a source in its folder, with another card in path and text."""
    file = sorted(PUBLIC.glob(RENAMED[name]["file"]))[0]
    place = file.relative_to(PUBLIC).as_posix()
    parquet = file.suffix == ".parquet"
    data = file.read_bytes()
    text = "" if parquet else (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    text = "".join(text.splitlines(keepends=True)[:LINES])
    for theirs, other in RENAMED[name]["names"].items():
        place, text = place.replace(theirs, other), text.replace(theirs, other)
    copy = folder / place.removesuffix(".gz")
    copy.parent.mkdir(parents=True)
    copy.write_bytes(data if parquet else text.encode())
    if name == "kernelbench":
        for archive in (PUBLIC / name).glob("problems-*.tar.gz"):
            (copy.parent / archive.name).write_bytes(archive.read_bytes())
        copy.write_bytes(b"")
        (copy.parent / file.name).write_bytes(gzip.compress(text.encode()))
    return folder / name if (folder / name).is_dir() else folder


@pytest.mark.parametrize("name", sorted(RENAMED))
def test_cards_that_no_importer_was_written_for_are_imported(name: str, tmp_path: Path) -> None:
    """Rows of the other card, and no more lines left out than of the card that is renamed."""
    found = read_source(name, renamed(tmp_path, name), Hints())
    gpus = pd.concat([rows["gpu"] for rows in found.rows.values()])
    assert RENAMED[name]["gpu"] in set(gpus)
    assert not [reason for reason in found.dropped if "unknown gpu" in reason]

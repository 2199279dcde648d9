"""Packs a folder of measured rows into a tar archive, and unpacks it.

``python -m itercast.extras.campaign.archive ARCHIVE ROOT`` unpacks an archive; a campaign
writes it. It holds Parquet parts, cards, journals and logs as plain files, and no code.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from itercast.capture.base.files import write_atomic
from itercast.extras.campaign.drawn_from import FILE
from itercast.extras.programs import run_program
from itercast.microbench import store

NAME = r"[\w+-][\w.+-]*"
KINDS = re.compile(
    rf"{NAME}/{NAME}/{NAME}/(part-[\w.+-]+\.parquet|card\.yaml)"
    rf"|\.journal/{NAME}\.jsonl?"
    rf"|logs/{NAME}\.log"
    rf"|{re.escape(FILE)}"
)
LARGEST_BYTES = 16 * 2**20 - 2**16  # of one file; larger archives are split
PIECE_BYTES = 15 * 2**20
UNPACKED_BYTES = 4 * 2**30  # of all files; no campaign writes as much


def pack(root: Path, archive: Path) -> list[Path]:
    """Write the archive of a root; in numbered pieces where it is too large for one file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as tar:
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not path.is_symlink() and KINDS.fullmatch(name):
                data = path.read_bytes()  # journals may grow while they are read
                header = tarfile.TarInfo(name)
                header.size = len(data)
                tar.addfile(header, io.BytesIO(data))
    data = packed.getvalue()
    pieces = [data]
    if len(data) > LARGEST_BYTES:
        pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
    paths = [archive]
    if len(pieces) > 1:
        paths = [archive.with_name(f"{archive.name}.{n:03d}") for n in range(len(pieces))]
    for path, piece in zip(paths, pieces, strict=True):
        write_atomic(path, piece)
    for path in {archive, *_pieces(archive)} - set(paths):
        path.unlink(missing_ok=True)
    return paths


def unpack(archive: Path, root: Path) -> int:
    """Unpack the archive's files that are missing under the root; returns their number.

    Existing files stay. A folder that gets Parquet files gets a new card.yaml, which names the
    machines of all its parts. ValueError where the archive holds any other kind of file.
    """
    packed: dict[str, bytes] = {}
    for name, data in _members(archive):
        if not KINDS.fullmatch(name):
            raise ValueError(
                f"archive {str(archive)!r}: {name!r} does not belong to a root of rows"
            )
        packed[name] = data
    missing = [name for name in packed if not (root / name).exists()]
    for name in missing:
        write_atomic(root / name, packed[name])
    for folder in {(root / name).parent for name in missing if name.endswith(".parquet")}:
        store.write_card(folder)
    return len(missing)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files in an archive."""
    total_bytes = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(_whole(archive)), mode="r:gz") as tar:
            for member in tar:
                total_bytes += member.size
                file = tar.extractfile(member) if member.isreg() else None
                if file is None or total_bytes > UNPACKED_BYTES:
                    wrong = f"{member.name!r} is not a plain file, or too large"
                    raise ValueError(f"archive {str(archive)!r}: {wrong}")
                yield member.name, file.read()
    except (tarfile.TarError, EOFError, OSError) as exc:
        raise ValueError(f"archive {str(archive)!r} cannot be read: {exc}") from exc


def _whole(archive: Path) -> bytes:
    """The bytes of an archive; ``archive`` may be any of its pieces."""
    archive = archive.with_name(re.sub(r"\.\d{3}$", "", archive.name))
    if archive.is_file():
        return archive.read_bytes()
    pieces = _pieces(archive)
    numbers = [int(path.suffix[1:]) for path in pieces]
    if not pieces or numbers != list(range(len(pieces))):
        raise ValueError(f"archive {str(archive)!r} is missing, or one of its pieces is")
    return b"".join(path.read_bytes() for path in pieces)


def _pieces(archive: Path) -> list[Path]:
    return sorted(archive.parent.glob(f"{archive.name}.[0-9][0-9][0-9]"))


def main(
    archive: Annotated[Path, typer.Argument(help="what a campaign wrote, e.g. runs/gpu.tar.gz")],
    root: Annotated[Path, typer.Argument(help="dataset root to write")],
) -> None:
    """Unpack an archive."""
    print(unpack(archive, root), "files unpacked")


if __name__ == "__main__":
    run_program(main)

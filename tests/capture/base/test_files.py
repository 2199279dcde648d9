"""Files are replaced at once; links, FIFOs and devices stay what they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from itercast.capture.base.files import real_path, stream_of, write_atomic


def test_a_file_is_made_in_a_new_folder_and_replaced(tmp_path: Path) -> None:
    """Nothing is left beside it."""
    path = tmp_path / "new" / "file"
    for data in (b"first", b"second"):
        write_atomic(path, data)
        assert path.read_bytes() == data
    assert list(path.parent.iterdir()) == [path]


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    """Also through two links, relative ones, and where the file is not there yet."""
    there, link, second = tmp_path / "there", tmp_path / "folder/link", tmp_path / "second"
    there.mkdir()
    link.parent.mkdir()
    link.symlink_to("../there/file")
    second.symlink_to(link)
    for path, data in ((link, b"first"), (second, b"second")):
        write_atomic(path, data)
        assert link.is_symlink() and second.is_symlink()
        assert (there / "file").read_bytes() == data
    assert [p.name for p in there.iterdir()] == ["file"]


def test_a_fifo_is_written_and_stays(tmp_path: Path) -> None:
    """Also through a link."""
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # so that no writer waits for one
    for path in (fifo, link):
        write_atomic(path, b"written")
        assert os.read(reader, 100) == b"written"
    os.close(reader)
    assert fifo.is_fifo() and link.is_symlink() and len(list(tmp_path.iterdir())) == 2


def test_nothing_takes_the_place_of_a_folder_or_of_a_link_to_itself(tmp_path: Path) -> None:
    folder, loop = tmp_path / "folder", tmp_path / "loop"
    folder.mkdir()
    loop.symlink_to(loop)
    for path in (folder, loop):
        with pytest.raises(OSError, match=f"{path}"):
            write_atomic(path, b"lost")
    assert folder.is_dir() and loop.is_symlink() and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "{}"])
def test_a_stream_is_written_between_what_is_printed(tmp_path: Path, path: str) -> None:
    """Also where it goes to a file, which stays the same one: ``--trace /dev/stdout > FILE``."""
    code = "import sys; from pathlib import Path; from itercast.capture.base.files import *\n"
    code += "print('before'); write_atomic(Path(sys.argv[1]), b'data\\n'); print('after')"
    out = tmp_path / "out"
    out.touch()
    number = out.stat().st_ino
    with out.open("w") as file:
        command = [sys.executable, "-c", code, path.format(out)]
        subprocess.run(command, stdout=file, check=True)
    assert out.read_text() == "before\ndata\nafter\n" and out.stat().st_ino == number
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_other_processes_streams_are_no_streams_of_ours() -> None:
    assert stream_of(Path(f"/proc/{os.getppid()}/fd/1")) is None


def test_real_paths_are_those_of_the_operating_system(tmp_path: Path) -> None:
    """Links of files and of folders are followed, and ".." is of what a link leads to."""
    file, link = tmp_path / "one" / "two" / "a.py", tmp_path / "link"
    file.parent.mkdir(parents=True)
    file.touch()
    link.symlink_to(file.parent)
    (tmp_path / "b.py").symlink_to(file)
    for path in (file, link / "a.py", link / ".." / "a.py", tmp_path / "b.py", Path("none.py")):
        assert real_path(str(path)) == os.path.realpath(path)

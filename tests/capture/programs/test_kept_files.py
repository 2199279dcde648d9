"""A forecast of a script leaves the files that lay there as they were."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_scripts import TRAINING, captured, written

from itercast.capture.programs.kept_files import KEPT, KeptFiles, give_back

SAVES = """
    with open("model.pt", "wb") as file:
        torch.save(model.state_dict(), file)
    with open("new.pt", "wb") as file:
        torch.save(model.state_dict(), file)
    import json, os, pathlib
    pathlib.Path("log.json").write_text(json.dumps([step]))
    assert pathlib.Path("log.json").read_text() == f"[{step}]"
    pathlib.Path("best.tmp").write_text("of this step")
    os.replace("best.tmp", "best.txt")
    with open("link.txt", "a") as file:
        file.write("more")
    with open("header.bin", "r+b") as file:
        file.write(b"of this run")
    import numpy, sqlite3
    numpy.memmap("latents.bin", dtype="u1")[:] = 0
    with sqlite3.connect("runs.db") as runs:
        runs.execute("create table if not exists of_this_run (step)")
"""


def test_files_that_a_script_writes_over_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = written(tmp_path, TRAINING + SAVES)
    before = {"model.pt": "trained for a week", "log.json": "[9]", "best.txt": "of a week"}
    before |= {name: "of a week" for name in ("history.txt", "header.bin", "latents.bin")}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.txt").symlink_to(tmp_path / "history.txt")
    (tmp_path / "runs.db").touch()
    # left by a run that was killed: what lies at its place is not the user's
    (tmp_path / ".log.json.before-itercast").write_text("[8]")

    captured(script)

    found = {p.name: p.read_text() for p in tmp_path.iterdir() if p.is_file()}
    assert found.pop("train.py")
    assert found == before | {"log.json": "[8]", "link.txt": "of a week", "runs.db": ""}
    assert (tmp_path / "link.txt").is_symlink()


DELETES = """
    import os, pathlib, shutil, tempfile
    if step == 0:
        os.remove("oldest.pt")
        pathlib.Path("older.pt").unlink()
        os.rename("last.pt", "previous.pt")
        pathlib.Path("out/log.txt").write_text("of this run")
        shutil.rmtree("out")
        os.makedirs("out")
        pathlib.Path("out/new.txt").write_text("of this run")
    with open("last.pt", "wb") as file:
        torch.save(model.state_dict(), file)
    pathlib.Path("scratch.txt").open("a").close()
    os.remove("scratch.txt")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        pathlib.Path(folder, "a").write_text("")
"""


def test_files_that_a_script_deletes_or_moves_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it deletes of its own stays deleted, and what it moved is at both places."""
    monkeypatch.chdir(tmp_path)
    script = written(tmp_path, TRAINING + DELETES)
    before = {name: f"{name} of a week" for name in ("oldest.pt", "older.pt", "last.pt")}
    before |= {name: f"{name} of a week" for name in ("out/log.txt", "out/deep/model.pt")}
    for name, text in before.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    captured(script)

    files = {p: p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    found = {str(p.relative_to(tmp_path)): text for p, text in files.items()}
    assert found.pop("train.py")
    assert found == before | {"previous.pt": before["last.pt"]}
    assert not (tmp_path / "last.pt").samefile(tmp_path / "previous.pt")


CACHES = """
import os, torch
class Cached(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        path = f"sample{i}.pt"
        if not os.path.exists(path):
            torch.save(torch.full((8,), float(i)), path)
        assert torch.load(path).tolist() == [i] * 8
        return torch.load(path)
loader = torch.utils.data.DataLoader(Cached(), batch_size=4, num_workers=1)
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in loader:
    model(batch.cuda()).sum().backward()
    optimizer.step()
"""


def test_what_a_dataset_caches_is_read_and_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that a forecast left would be read by a training."""
    monkeypatch.chdir(tmp_path)
    captured(written(tmp_path, CACHES))
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


def test_files_are_given_back_by_a_command_that_is_asked_to_end(tmp_path: Path) -> None:
    text = "open('model.pt', 'w').close()\nimport time\ntime.sleep(300)\n"
    script, model = written(tmp_path, text), tmp_path / "model.pt"
    model.write_text("trained for a week")
    command = [sys.executable, "-m", "itercast", "run", "--gpu=h100-sxm-80gb", str(script)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as run:
        while not (tmp_path / ".model.pt.before-itercast").exists() and run.poll() is None:
            time.sleep(0.05)
        run.terminate()
        run.wait()
    assert [p.name for p in tmp_path.glob("*model*")] == ["model.pt"]
    assert model.read_text() == "trained for a week"


def test_a_copy_that_was_not_finished_is_not_given_back(tmp_path: Path) -> None:
    """The disk was full, or the process ended meanwhile."""
    trained, listed = tmp_path / "model.pt", tmp_path / KEPT
    trained.write_bytes(bytes(10_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            KeptFiles(listed).about_to_move(trained)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    give_back(listed)
    assert trained.stat().st_size == 10_000
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", KEPT}

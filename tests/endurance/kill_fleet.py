"""Kill a fleet at random moments and look at what came home: `make endurance`.

Victims are the command, the raylet of its node, a Ray task, a chunk's process and its sweep's
worker. The command is started again where it ended. When all chunks of a plan are done, every row
that a kill left on disk must be at the root, once, and cards must state the parts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from kill_sweep import keys_on_disk

from itercast.microbench.yaml_text import load_yaml

ROOT = Path(__file__).parents[2]
PLAN = """
root: rows
points: captured.json
chunk: 6s
seed: {seed}
machines:
  boxes:
    gpu: cpu
    count: 2
    minutes: 0.5
    families: [norm, elementwise, gemm]
"""
VICTIMS = {
    "command": "itercast fleet",
    "node": "raylet/raylet",
    "task": "ray::run_chunk",
    "chunk": "itercast.microbench.fleet.chunk",
    "sweep": "itercast.microbench.sweep.worker",
}
MEASURING = ("chunk", "sweep")  # victims that must not survive the command
MOST_STARTS = 30  # of one plan's command
LATEST_S = 9.0  # of a kill, after a chunk's process is there
DIES_S = 150.0  # for a command to see that its node died
END_S = 20.0  # for what a killed command had started


def kind_of(process: psutil.Process) -> str:
    """Which kind of victim a process is; empty for others."""
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    return next((kind for kind, text in VICTIMS.items() if text in words), "")


def below(command: psutil.Popen) -> list[psutil.Process]:
    """All processes that a command, or one of these, has started; none once it has ended."""
    try:
        return list(command.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


class Fleet:
    """A plan in a folder, its command, and what kills left on disk."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seen: set[str] = set()
        self.survivors = self.starts = 0
        (folder / "captured.json").write_text('{"models": 40, "norm": [], "gemm": []}')
        (folder / "plan.yaml").write_text(PLAN.format(seed=seed))

    def start(self) -> psutil.Popen:
        """Start the command, or continue it."""
        self.starts += 1
        own = {"ITERCAST_CACHE": f"{self.folder}/cache"}
        own |= {
            "PYTHONPATH": str(ROOT),
            "MLFLOW_TRACKING_URI": f"sqlite:///{self.folder}/mlflow.db",
        }
        with (self.folder / "log").open("ab") as log:
            return psutil.Popen(
                [sys.executable, "-m", "itercast", "fleet", "plan.yaml", "--address", "local"],
                cwd=self.folder,
                env={**os.environ, **own},
                stdout=log,
                stderr=log,
            )

    def kill(self, command: psutil.Popen, moments: random.Random) -> str:
        """Kill one process of a kind that is drawn, some time after a chunk began; its kind.

        Empty where the command ended before.
        """
        while not any(kind_of(p) == "chunk" for p in below(command)):
            if command.poll() is not None:
                return ""
            time.sleep(0.3)
        time.sleep(moments.uniform(0.0, LATEST_S))
        if command.poll() is not None:
            return ""
        started = below(command)
        running: dict[str, list[psutil.Process]] = {"command": [command]}
        for process in started:
            if kind := kind_of(process):
                running.setdefault(kind, []).append(process)
        kind = moments.choice(sorted(running))
        moments.choice(running[kind]).kill()
        if kind in ("command", "node"):
            command.wait(DIES_S)
            self._await(started, [p for k in MEASURING for p in running.get(k, ())])
        self.seen |= self.on_disk()
        return kind

    def _await(self, started: list[psutil.Process], measuring: list[psutil.Process]) -> None:
        """Wait until what the command had started has ended; count what measures on."""
        _, alive = psutil.wait_procs(started, END_S)
        self.survivors += len(set(alive) & set(measuring))
        for process in alive:
            process.kill()

    def on_disk(self) -> set[str]:
        """Keys of the rows in the chunks' folders; a sweep that runs may move some meanwhile."""
        found: set[str] = set()
        for folder in (self.folder / "cache").glob("fleet/chunks*/*/"):
            try:
                found |= set(keys_on_disk(folder))
            except FileNotFoundError:
                continue
        return found

    def found(self) -> Counter[str]:
        """What is at the root at the end: rows, those lost or twice, torn parts and cards."""
        root = self.folder / "rows"
        keys = keys_on_disk(root)  # reads each part whole
        wrong = 0
        for folder in {p.parent for p in root.glob("*/*/*/part-*.parquet")}:
            card = folder / "card.yaml"
            stated = load_yaml(card.read_text())["sha256"] if card.is_file() else {}
            parts = {p.name: p.read_bytes() for p in folder.glob("part-*.parquet")}
            wrong += stated != {n: hashlib.sha256(b).hexdigest() for n, b in parts.items()}
        lost = len(self.seen - set(keys))
        counts = {"rows": len(keys), "unsent": len(self.seen), "lost": lost, "torn": wrong}
        return Counter(**counts, doubled=len(keys) - len(set(keys)))


def run_plan(folder: Path, seed: int, moments: random.Random, most: int) -> Counter[str]:
    """Measure a plan to its end, with kills on the way, ``most`` of them; what was found."""
    fleet, kills = Fleet(folder, seed), Counter[str]()
    while fleet.starts < MOST_STARTS:
        command = fleet.start()
        while kills.total() < most and (kind := fleet.kill(command, moments)):
            kills[kind] += 1
        if command.wait() == 0:
            break
    found = fleet.found() + Counter(finished=int(command.returncode == 0))
    return found + kills + Counter(kills=kills.total(), survivors=fleet.survivors)


def main() -> None:
    """Print what was found after each plan, summed up; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="no plan is begun afterwards")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    moments, whole, plans = random.Random(asked.seed), Counter[str](), 0
    until = time.monotonic() + 60 * asked.minutes
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory() as folder:
            plans += 1
            found = run_plan(Path(folder), asked.seed + plans, moments, most=5)
            if not found["finished"] or found["lost"] or found["torn"] or found["survivors"]:
                print((Path(folder) / "log").read_text()[-2000:])
        whole += found
        print(f"plan {plans}: {dict(found)}", flush=True)
    print(
        f"{whole['finished']} of {plans} plans finished after {whole['kills']} kills "
        f"({', '.join(f'{kind} {whole[kind]}' for kind in VICTIMS)}): {whole['rows']} rows, "
        f"{whole['unsent']} of them not sent yet at a kill, "
        f"{whole['lost']} lost, {whole['doubled']} doubled, {whole['torn']} parts or cards torn, "
        f"{whole['survivors']} processes that measured on"
    )
    wrong = sum(whole[name] for name in ("lost", "doubled", "torn", "survivors"))
    if wrong or whole["finished"] < plans or not whole["rows"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Kill a fleet at random moments and look at what came home: `make endurance`.

Victims are the command, the raylet of its node, a Ray task, a chunk's process and its sweep's
worker. Every other plan runs on a standing cluster of three nodes, where the victim may be another
node: all its processes, and its disk. It comes back some seconds later. The command is started
again where it ended. When all chunks of a plan are done, every row that a kill left on a disk must
be at the root, once, and cards must state the parts.
"""

import hashlib
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pandas as pd
import psutil
import typer

from itercast.capture.base.yaml_text import load_yaml
from itercast.microbench import store

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
OTHER = "other node"
VICTIMS = {
    "command": "itercast fleet",
    "node": "raylet/raylet",
    "task": "ray::run_chunk",
    "chunk": "itercast.extras.fleet.chunk",
    "sweep": "itercast.microbench.sweep.worker",
}
MEASURING = ("chunk", "sweep")  # victims that must not survive the command
MOST_STARTS = 30  # of one plan's command
LATEST_S = 9.0  # of a kill, after a chunk's process is there
DIES_S = 600.0  # for a command to see that its node died, on a machine that may pause jobs
AWAY_S = 10.0  # at most, of a node that was killed
CORES = (0, 1, 1)  # of a standing cluster's nodes; the command is on the first
END_S = 20.0  # for what a killed command had started


def keys_on_disk(root: Path) -> list[str]:
    """Keys of all rows: part files first, then journals whose part is not there yet."""
    parts = list(root.glob("*/*/*/part-*.parquet"))
    keys = [key for path in parts for key in pd.read_parquet(path, columns=["key"])["key"]]
    compacted = {path.stem.removeprefix("part-") for path in parts}
    for path in (root / ".journal").glob("*.jsonl"):
        if path.stem not in compacted:  # a compaction killed half-way is repeated as a whole
            keys += [row["key"] for row in store.read_journal(path)]
    return keys


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


class Cluster:
    """Ray nodes on this machine, with a disk each, that stand while commands come and go."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder, self.address = folder, f"127.0.0.1:{port}"
        self.own = {"RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "token", "PYTHONPATH": str(ROOT)}
        self.own |= {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        for number in range(len(CORES)):
            self.start(number)

    def start(self, number: int) -> None:
        """Start a node; the first one is the head."""
        head = ["--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false"]
        words = [f"--address={self.address}"] if number else head
        words += [f"--node-ip-address=127.0.0.{number + 1}", f"--num-cpus={CORES[number]}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words]
        own = self.own | {"ITERCAST_CACHE": str(self.disk(number))}
        done = subprocess.run(
            [*command, "--object-store-memory=100000000", "--disable-usage-stats"],
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=DIES_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"node {number} did not start: {(done.stdout + done.stderr)[-800:]}")

    def disk(self, number: int) -> Path:
        """The folder of a node's chunks."""
        return self.folder / f"cache{number}"

    def processes(self, only: str = "") -> list[psutil.Process]:
        """All processes of the nodes, or of the node with this in its raylet's command."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline()) + " "
                if f"{self.folder}/ray/" in words and only in words:
                    found += [process, *process.children(recursive=True)]
            except psutil.Error:
                continue
        return found

    def kill(self, number: int) -> None:
        """End a node at once, with its disk."""
        for process in self.processes(f"node_ip_address=127.0.0.{number + 1} "):
            with suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self.disk(number), ignore_errors=True)

    def end(self) -> None:
        """End all nodes."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()


class Fleet:
    """A plan in a folder, its command, and what kills left on disk."""

    def __init__(self, folder: Path, seed: int, cluster: Cluster | None = None) -> None:
        self.folder, self.cluster = folder, cluster
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
        own |= self.cluster.own if self.cluster else {}
        where = self.cluster.address if self.cluster else "local"
        with (self.folder / "log").open("ab") as log:
            return psutil.Popen(
                [sys.executable, "-m", "itercast", "fleet", "plan.yaml", "--address", where],
                cwd=self.folder,
                env={**os.environ, **own},
                stdout=log,
                stderr=log,
            )

    def kill(self, command: psutil.Popen, moments: random.Random) -> str:
        """Kill one process of a kind that is drawn, some time after a chunk began; its kind.

        Empty where the command ended before.
        """
        while not any(kind_of(p) == "chunk" for p in self.started(command)):
            if command.poll() is not None:
                return ""
            time.sleep(0.3)
        time.sleep(moments.uniform(0.0, LATEST_S))
        if command.poll() is not None:
            return ""
        started = self.started(command)
        running: dict[str, list[psutil.Process]] = {"command": [command]}
        for process in started:
            if kind := kind_of(process):
                running.setdefault(kind, []).append(process)
        if self.cluster:  # its first node is not killed
            running[OTHER] = running.pop("node")
        kind = moments.choice(sorted(running))
        if kind == OTHER:
            self._kill_node(moments)
        else:
            moments.choice(running[kind]).kill()
        if kind in ("command", "node"):
            command.wait(DIES_S)
            measuring = [p for k in MEASURING for p in running.get(k, ())]
            self._await(measuring if self.cluster else started, measuring)
        self.seen |= self.on_disk()
        return kind

    def started(self, command: psutil.Popen) -> list[psutil.Process]:
        """Processes of the command, and of a standing cluster."""
        return self.cluster.processes() if self.cluster else below(command)

    def _kill_node(self, moments: random.Random) -> None:
        """End another node with its disk; it comes back with an empty one."""
        assert self.cluster
        number = moments.randrange(1, len(CORES))
        self.seen -= self.on_disk(self.cluster.disk(number).name)
        self.cluster.kill(number)
        time.sleep(moments.uniform(0.0, AWAY_S))
        self.cluster.start(number)

    def _await(self, started: list[psutil.Process], measuring: list[psutil.Process]) -> None:
        """Wait until what the command had started has ended; count what measures on."""
        _, alive = psutil.wait_procs(started, END_S)
        self.survivors += len(set(alive) & set(measuring))
        for process in alive:
            process.kill()

    def on_disk(self, disks: str = "cache*") -> set[str]:
        """Keys of the rows in the chunks' folders; a sweep that runs may move some meanwhile."""
        found: set[str] = set()
        for folder in self.folder.glob(f"{disks}/fleet/chunks*/*/"):
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


def run_plan(
    folder: Path, seed: int, moments: random.Random, most: int, cluster: Cluster | None
) -> Counter[str]:
    """Measure a plan to its end, with kills on the way, ``most`` of them; what was found."""
    fleet, kills = Fleet(folder, seed, cluster), Counter[str]()
    while fleet.starts < MOST_STARTS:
        command = fleet.start()
        while kills.total() < most and (kind := fleet.kill(command, moments)):
            kills[kind] += 1
        if command.wait() == 0:
            break
    found = fleet.found() + Counter(finished=int(command.returncode == 0))
    return found + kills + Counter(kills=kills.total(), survivors=fleet.survivors)


def main(minutes: float = 10.0, seed: int = 0, standing: bool = False) -> None:
    """Print what was found after each plan, summed up; exit code 1 if anything was wrong.

    No plan is begun after ``minutes``. ``standing``: all plans on a standing cluster.
    """
    moments, whole, plans = random.Random(seed), Counter[str](), 0
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory() as folder:
            plans += 1
            cluster = Cluster(Path(folder)) if plans % 2 or standing else None
            try:
                found = run_plan(Path(folder), seed + plans, moments, 5, cluster)
            finally:
                if cluster:
                    cluster.end()
            if not found["finished"] or found["lost"] or found["torn"] or found["survivors"]:
                print((Path(folder) / "log").read_text()[-2000:])
        whole += found
        print(f"plan {plans}: {dict(found)}", flush=True)
    print(
        f"{whole['finished']} of {plans} plans finished after {whole['kills']} kills "
        f"({', '.join(f'{kind} {whole[kind]}' for kind in (*VICTIMS, OTHER))}): "
        f"{whole['rows']} rows, "
        f"{whole['unsent']} of them not sent yet at a kill, "
        f"{whole['lost']} lost, {whole['doubled']} doubled, {whole['torn']} parts or cards torn, "
        f"{whole['survivors']} processes that measured on"
    )
    wrong = sum(whole[name] for name in ("lost", "doubled", "torn", "survivors"))
    if wrong or whole["finished"] < plans or not whole["rows"]:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)

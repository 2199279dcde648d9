"""Reads nccl-tests logs that are glued, prefixed and cut: none may store a wrong row.

``python tests/endurance/nccl_logs.py [--files 10000] [--seed 0]`` makes logs of several runs over
random ranks, as nccl-tests prints them, cuts pieces at random bytes out of them, glues those and
puts prefixes before the lines. Each time tells the collective and size that it belongs to. Prints
how many rows were stored, and how many under another collective or size.
"""

import random
import sys

import typer

from itercast.extras.nccl.nccl_text import parse_text

OPS = {  # bus rate over rate, by ranks; reduction; whether a row counts the elements of one rank
    "all_reduce": (lambda n: 2 * (n - 1) / n, "sum", False),
    "all_gather": (lambda n: (n - 1) / n, "none", True),
    "reduce_scatter": (lambda n: (n - 1) / n, "sum", True),
    "alltoall": (lambda n: (n - 1) / n, "none", True),
    "broadcast": (lambda n: 1.0, "none", False),
    "sendrecv": (lambda n: 1.0, "none", False),
}
PREFIXES = (
    "",
    "",
    "0: ",
    "[0] ",
    "[1,0]<stdout>:",
    "[pod/a/b] ",
    "2026-11-26 08:00:01 ",
    "node1 | ",
)
HEAD = "#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong"
Times = dict[float, tuple[str, int]]


def a_run(rng: random.Random, truth: Times) -> str:
    """The log of one run; ``truth`` gets what each of its times measured."""
    op, ranks = rng.choice(list(OPS)), rng.choice((2, 4, 8, 16))
    factor, redop, of_one = OPS[op]
    low, high = 2 ** rng.randint(12, 18), 2 ** rng.randint(20, 30)
    lines = [f"srun ./{op}_perf -b {low} -e {high}"] if rng.random() < 0.5 else []
    lines += [f"# Collective test starting: {op}_perf"] if rng.random() < 0.5 or not lines else []
    lines += [f"# nThread 1 nGpus 1 minBytes {low} maxBytes {high} step: 2(factor) iters: 20"]
    lines += [
        f"#  Rank {r:2} Group  0 Pid  {r} on  host{r // 8} device  {r % 8} [0x00] NVIDIA H100"
        for r in range(ranks)
    ]
    lines += ["#", HEAD]
    size, rates = low, list[float]()
    while size <= high:
        words = [f"{size:12}", f"{size // 4 // (ranks if of_one else 1):12}", "float", redop, "-1"]
        for _ in range(2):
            time = round(20 + size / rng.uniform(1e4, 4e5) + rng.random(), 4)
            while time in truth:
                time = round(time + 1e-4, 4)
            truth[time] = (op, size)
            rate = size / time * 1e-3
            rates.append(rate * factor(ranks))
            words += [f"{time}", f"{rate:.2f}", f"{rates[-1]:.2f}", "0"]
        lines.append("  ".join(words))
        size *= 2
    lines += [
        "# Out of bounds values : 0 OK",
        f"# Avg bus bandwidth    : {sum(rates) / len(rates)}",
    ]
    return "\n".join(lines) + "\n"


def a_log(rng: random.Random, truth: Times) -> str:
    """Several runs; of some only a piece is left."""
    pieces = []
    for _ in range(rng.randint(1, 4)):
        text = a_run(rng, truth)
        cut = rng.random() < 0.6
        begin = rng.randint(0, len(text)) if cut and rng.random() < 0.5 else 0
        end = rng.randint(begin, len(text)) if cut else len(text)
        pieces.append(text[begin:end])
    prefix = rng.choice(PREFIXES)
    return "".join(prefix + line for line in "".join(pieces).splitlines(keepends=True))


def read(files: int, seed: int) -> tuple[int, int]:
    """Rows that were stored of so many logs, and those that are wrong."""
    rng, stored, wrong = random.Random(seed), 0, 0
    for _ in range(files):
        truth: Times = {}
        for log in parse_text(a_log(rng, truth)):
            for _, size, _, _, time_us, _ in log.rows if log.collective in OPS else ():
                stored += 1
                wrong += truth.get(time_us) != (log.collective, size)
    return stored, wrong


def wrong_rows(files: int, seed: int) -> int:
    """Rows of so many logs that are stored under a wrong collective, size or time."""
    return read(files, seed)[1]


def main(files: int = 10_000, seed: int = 0) -> None:
    """Print both numbers."""
    stored, wrong = read(files, seed)
    print(f"{files} logs: {stored} rows stored, {wrong} under a wrong collective or size")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)

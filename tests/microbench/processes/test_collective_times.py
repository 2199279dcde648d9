"""Real ranks over gloo: what a message between them is timed as."""

import subprocess
import sys

SLEEPS = """
import time
from functools import partial
import torch
from itercast.microbench.processes.ranks import join_process_group, time_collective
torch.set_num_threads(1)
rank, ranks = join_process_group("cpu")
sleep = partial(time.sleep, 2e-3 + 4e-3 * rank)  # 2 and 6 ms: their mean, and the shortest
mean_us, shortest_us = (time_collective(sleep, "cpu", waits).time_us for waits in (True, False))
assert 2e3 <= shortest_us < mean_us and mean_us >= 4e3, (shortest_us, mean_us)
torch.distributed.destroy_process_group()
"""

# The shortest of 25 each, in turns: other processes only lengthen them.
BOTH_WAYS = """
import time
import torch
import torch.distributed as dist
from itercast.microbench.ops.step.collective import Collective, build
from itercast.microbench.processes.ranks import max_over_ranks
torch.set_num_threads(1)
dist.init_process_group("gloo")
ops = ("send_recv", "exchange")
runs = {op: build(Collective(op=op, message_bytes=2**24), "cpu").run for op in ops}
times_us = {op: [] for op in runs}
for _ in range(25):
    for op, run in runs.items():
        dist.barrier()
        begin_ns = time.perf_counter_ns()
        run()
        times_us[op].append((time.perf_counter_ns() - begin_ns) / 1e3)
one_way, both = (min(max_over_ranks(times_us[op])) for op in ops)
assert 1.4 < both / one_way < 2.8, (one_way, both)
dist.destroy_process_group()
"""


def on_two_ranks(program: str) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [sys.executable, *launch, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_message_counts_as_its_mean_over_ranks_or_as_on_the_last_to_arrive() -> None:
    on_two_ranks(SLEEPS)


def test_gloo_takes_about_twice_as_long_both_ways_as_one_way() -> None:
    """16 MiB: what goes both ways between two processes takes turns. 2.1 times, measured."""
    on_two_ranks(BOTH_WAYS)

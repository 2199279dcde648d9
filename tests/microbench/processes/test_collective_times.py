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

SENT = """
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from itercast.microbench.ops.step.collective import Collective, build
torch.set_num_threads(1)
dist.init_process_group("gloo")
one_way = [["gloo:send"], ["gloo:recv"]][dist.get_rank()]
for op, names in (("send_recv", one_way), ("exchange", ["gloo:send", "gloo:recv"])):
    run = build(Collective(op=op, message_bytes=2**14), "cpu").run
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    seen = [event.name for event in profiled.events() if event.name.startswith("gloo:")]
    assert seen == names, (op, seen)
dist.destroy_process_group()
"""


def on_two_ranks(program: str) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [sys.executable, *launch, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_message_counts_as_its_mean_over_ranks_or_as_on_the_last_to_arrive() -> None:
    on_two_ranks(SLEEPS)


def test_one_rank_sends_one_way_and_both_in_an_exchange() -> None:
    on_two_ranks(SENT)

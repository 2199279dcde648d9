"""Ray tasks of a fleet: one runs a chunk's process; one leads the nodes of a collective.

They get and return JSON as bytes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

from itercast.capture.base.cache_folder import cache_folder
from itercast.extras.fleet.chunks import Plain
from itercast.microbench.processes.child_processes import START, ended_with_this
from itercast.microbench.processes.watch import end_group, log_tail
from itercast.microbench.store import Facts


def run_chunk(order: bytes) -> bytes:
    """Run the chunk's process with its software on this node; returns its result."""
    import ray  # a task of it

    plain: Plain = json.loads(order)
    python, place = plain.pop("python") or sys.executable, plain.pop("place", "")
    work = cache_folder("fleet") / f"chunks{place}"
    work.mkdir(parents=True, exist_ok=True)
    path = work / f"{plain['chunk']['name']}.json"
    result, printed = path.with_suffix(".result"), path.with_suffix(".log")
    result.unlink(missing_ok=True)
    path.write_text(json.dumps({**plain, "work": str(work)}))
    words = ["-m", START, "itercast.extras.fleet.chunk"]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}  # Ray sets it
    environment |= ended_with_this()
    with printed.open("wb") as output:
        process = subprocess.Popen(
            [python, *words, str(path)],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            end_group(process)
    failed = {"state": "failed", "reason": f"exit code {code}: {log_tail(printed)}"}
    outcome = json.loads(result.read_text()) if result.is_file() else failed
    return json.dumps({**outcome, "node": ray.get_runtime_context().get_node_id()}).encode()


def begun_chunks() -> bytes:
    """Names of the chunks that have a journal or parts on this node, and no result yet."""
    folders = (cache_folder("fleet") / "chunks").glob("*/")
    return json.dumps([f.name for f in folders if any(p.is_dir() for p in f.iterdir())]).encode()


def free_address() -> bytes:
    """Address and a free port of this node, for torchrun's rendezvous."""
    import ray  # a task of it

    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return f"{ray.util.get_node_ip_address()}:{port}".encode()


def bundle_of(options: Facts) -> dict[str, float]:
    """The bundle of a placement group that holds a task with these options."""
    resources = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]}
    if kind := options.get("accelerator_type"):
        resources[f"accelerator_type:{kind}"] = 0.001  # Ray's own share
    return {name: count for name, count in resources.items() if count}


def over_nodes(request: bytes) -> bytes:
    """Reserve nodes, run a chunk under torchrun on all at once; returns the first one's result."""
    import ray  # a task of it
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    plain = json.loads(request)
    order, options, nodes = plain["order"], plain["options"], plain["nodes"]
    group = placement_group([bundle_of(options)] * nodes, strategy="STRICT_SPREAD")

    def task(function: Any, number: int, more: Facts) -> Any:
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        return ray.remote(function).options(scheduling_strategy=where, **more)

    try:
        ray.get(group.ready())
        address = ray.get(task(free_address, 0, {"num_cpus": 0}).remote()).decode()
        words = f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-id={order['chunk']['name']}"
        order["torchrun"] = f"{words} --rdzv-endpoint={address}"
        orders = [json.dumps({**order, "place": f"-{n}"}).encode() for n in range(nodes)]
        tasks = [task(run_chunk, n, options).remote(sent) for n, sent in enumerate(orders)]
        results = ray.get(tasks)
        return bytes(
            next((result for result in results if json.loads(result).get("rows")), results[0])
        )
    finally:
        remove_placement_group(group)

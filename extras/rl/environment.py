"""Measures an environment of reinforcement learning: its steps, and messages to its processes.

An environment has ``reset()``, ``step(action)`` and ``action_space.sample()``, as Gymnasium's
(https://gymnasium.farama.org/api/env). It is stepped at random, and reset where an episode ends.
``python -m itercast.extras.rl.environment ORDER RESULT`` measures as
``itercast.extras.input.measure`` does.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from torch.utils._pytree import tree_leaves

from itercast.capture.base.cores import cores
from itercast.capture.input.lane import Batches, InputLane
from itercast.capture.input.timers import Clock, LoaderError
from itercast.extras.input.measure import Alive, attribute, main
from itercast.extras.input.process import measured_lane

MIN_STEPS, MAX_STEPS = 20, 5000  # of one way to step
SEVERAL = 8  # environments of a process whose messages are compared with those of one
NEEDED = ("reset", "step", "action_space")
ENVIRONMENT = "an environment as Gymnasium's"
GYMNASIUM = "(observation, reward, terminated, truncated, info)"

Make = Callable[[], Any]


def measured_environment(name: str, seconds: float, limit_s: float) -> InputLane:
    """The lane of the environment that function ``module:name`` makes, from an own process."""
    words = ("environment", "step", "steps")
    return measured_lane(name, seconds, limit_s, "itercast.extras.rl.environment", words)


def measure_environment(name: str, seconds: float, alive: Alive) -> InputLane:
    """The lane of an environment, a batch being one step: alone, and in one and in many processes.

    ``worker``: time of a step and of sending its observation; ``receive_us``: time of the policy's
    process per message. Stages are that process's time per observation (``observation``) and its
    wait per message (``waking``), from messages of one and of ``SEVERAL`` environments.
    """
    make = attribute(name)
    if not callable(make):
        raise LoaderError(f"is a {type(make).__name__}, allowed is a function")
    alone, nbytes = _stepped(make, seconds / 4, alive)
    crowd = cores()
    one, several, many = (
        _exchanged(make, workers, envs, seconds / 4, alive)
        for workers, envs in ((1, 1), (1, SEVERAL), (crowd, 1))
    )
    more = np.maximum(0.0, (several.mean(1) - one.mean(1)) / (SEVERAL - 1))
    wall_us, host_us, worker_us = more
    step_us = max(alone.mean_us, wall_us - host_us)
    return InputLane(
        loader=name,
        workers=1,
        prefetch=1,
        batch_samples=1,
        batch_bytes=nbytes,
        cores=crowd,
        alone=alone,
        worker=Batches(wall_us=(step_us,), cpu_us=(max(alone.mean_cpu_us, worker_us),)),
        receive_us=max(0.0, float(one[1].mean() - host_us)),
        crowd=crowd,
        crowding=max(1.0, float(many[2].mean() / one[2].mean())),
        stages_us={
            "observation": float(host_us),
            "waking": max(0.0, float(one[0].mean() - one[1].mean() - step_us)),
        },
    )


def observations(environment: Any) -> Iterator[Any]:
    """Step at random, endlessly; an episode's end yields the next one's first observation."""
    if lacking := [name for name in NEEDED if not hasattr(environment, name)]:
        kind = type(environment).__name__
        raise LoaderError(f"returns a {kind}, which has no {lacking[0]}; allowed is {ENVIRONMENT}")
    environment.reset()
    while True:
        stepped = environment.step(environment.action_space.sample())
        if not isinstance(stepped, tuple) or len(stepped) != 5:
            raise LoaderError(f"step returns {stepped!r:.40}, allowed is {GYMNASIUM}")
        yield environment.reset()[0] if stepped[2] or stepped[3] else stepped[0]


def _turns(seconds: float, alive: Alive) -> Iterator[None]:
    end = time.monotonic() + seconds
    for done in range(MAX_STEPS):
        if time.monotonic() > end and done >= MIN_STEPS:
            return
        yield
        alive()


def _stepped(make: Make, seconds: float, alive: Alive) -> tuple[Batches, int]:
    """Times of steps in this process, and bytes of an observation."""
    seen, times = observations(make()), list[tuple[float, float]]()
    nbytes = sum(np.asarray(x).nbytes for x in tree_leaves(next(seen)))
    for _ in _turns(seconds, alive):
        clock = Clock()
        next(seen)
        times.append(clock.read())
    wall_us, cpu_us = zip(*times, strict=True)
    return Batches(wall_us=wall_us, cpu_us=cpu_us), nbytes


def _exchanged(make: Make, workers: int, envs: int, seconds: float, alive: Alive) -> Any:
    """Measures rounds in which workers get a message, step ``envs`` each, and send observations.

    Returns three arrays in us: time of a round, CPU time of this process per worker, CPU time of a
    worker.
    """
    found = list[tuple[float, float, float]]()
    with _served(make, workers, envs) as pipes:
        for _ in _turns(seconds, alive):
            clock = Clock()
            for pipe in pipes:
                pipe.send(0)
            try:
                replies = [pipe.recv() for pipe in pipes]
            except EOFError:
                raise LoaderError("a process that steps it died") from None
            wall_us, host_us = clock.read()
            if failed := [error for _, _, error in replies if error]:
                raise failed[0]
            found.append((wall_us, host_us / workers, sum(us for _, us, _ in replies) / workers))
    return np.array(found).T


@contextmanager
def _served(make: Make, workers: int, envs: int) -> Iterator[list[Connection]]:
    """Pipes to forked processes with environments of their own, which end with the context."""
    forked = multiprocessing.get_context("fork")
    ends = [forked.Pipe() for _ in range(workers)]
    processes = [forked.Process(target=_serve, args=(end, make, envs)) for _, end in ends]
    try:
        for process, (_, theirs) in zip(processes, ends, strict=True):
            process.start()
            theirs.close()
        yield [ours for ours, _ in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, make: Make, envs: int) -> None:
    """In a worker: step whenever an action comes; send observation, CPU time in us, error."""
    try:
        seen, spent_ns = [observations(make()) for _ in range(envs)], time.process_time_ns()
        while True:
            pipe.recv()
            stepped, now_ns = [next(one) for one in seen], time.process_time_ns()
            pipe.send((stepped, (now_ns - spent_ns) * 1e-3, None))
            spent_ns = now_ns
    except Exception as exc:  # whatever the user's environment raises
        pipe.send((None, 0.0, exc))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], "environment", measure_environment))

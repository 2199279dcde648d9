"""An iteration of reinforcement learning: rollouts of environments and a policy, then a learner.

Rollouts step all environments ``horizon`` times; before each step the policy's forward gives each
an action. The learner then updates the policy from what they saw. Both take turns on the same
GPUs, or the next rollouts run beside the learner, with weights that are one iteration old.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from itercast.capture.input.lane import InputLane
from itercast.capture.opcall import StepCapture
from itercast.compose.simulate.rank import host_copy_us
from itercast.compose.target import Target, forecast_step
from itercast.extras.input.pipeline import ALIKE, MAX_WORKERS, cores_of_a_rank, crowding

MAX_ENVS = 2**18  # also times that are drawn to find the slowest worker of a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """``workers`` processes step ``envs`` environments ``horizon`` times; then come ``updates``.

    Without workers the process of the policy steps them. ``policy_us``: a forward for all
    environments, with the copy to its GPU. ``update_us``: of the learner, which keeps
    ``learner_cores`` of the host's ``cores`` busy. ``apart``: rollouts have a GPU of their own,
    to which new weights are copied in ``weights_us``.
    """

    envs: int
    workers: int
    horizon: int
    updates: int
    policy_us: float
    update_us: float
    cores: float
    learner_cores: float = 1.0
    apart: bool = False
    weights_us: float = 0.0

    def __post_init__(self) -> None:
        for name, least, most in (("envs", 1, MAX_ENVS), ("workers", 0, self.envs)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} {getattr(self, name)}; allowed are {least} to {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTime:
    """An iteration of a loop, its stages as long as each takes alone, and the longest of them."""

    loop: Loop
    iteration_us: float
    stages_us: dict[str, float]
    limit: str


def make_loop(
    captures: tuple[StepCapture, StepCapture],
    target: Target,
    lane: InputLane,
    *,
    epochs: int,
    cores: int = 0,
    apart: bool = False,
    **sizes: Any,
) -> Loop:
    """The loop of a captured forward of the policy for all environments and a captured update.

    The learner passes ``epochs`` times over all steps. Two programs on a CPU share its threads.
    """
    if apart and target.threads:
        target = replace(target, threads=max(1, target.threads // 2))
    acting, learning = (forecast_step(step, target) for step in captures)
    batch, steps = captures[1].samples * target.plan.microbatches, sizes["envs"] * sizes["horizon"]
    if batch > steps:
        raise ValueError(f"batch {batch}; allowed are 1 to {steps}, all steps of an iteration")
    copy_us = host_copy_us(sizes["envs"] * lane.batch_bytes, target.gpu)
    weights_us = host_copy_us(acting.memory_by_bytes["parameters"], target.gpu)
    return Loop(
        **sizes,
        updates=epochs * math.ceil(steps / batch),
        policy_us=acting.iteration_us + (copy_us if target.gpu.kind == "gpu" else 0.0),
        update_us=learning.iteration_us,
        cores=cores_of_a_rank(lane, target, learning.world_size, cores),
        learner_cores=max(1, target.threads),
        apart=apart,
        weights_us=weights_us if apart else 0.0,
    )


def loop_time(lane: InputLane, loop: Loop) -> LoopTime:
    """Forecast an iteration of environments whose steps are a measured lane's batches."""
    messages_us = _messages_us(lane, loop)
    steps_us = _round_us(lane, loop, loop.cores)
    rounds = {"environments": steps_us, "messages": messages_us, "policy": loop.policy_us}
    rollouts = {name: loop.horizon * us for name, us in rounds.items()}
    learner_us, rollouts_us = (
        loop.updates * loop.update_us + loop.weights_us,
        sum(rollouts.values()),
    )
    slowest = max(rollouts, key=lambda name: rollouts[name])
    waited_us = rollouts_us if loop.apart else rollouts[slowest]
    return LoopTime(
        loop=loop,
        iteration_us=_beside_us(lane, loop, rollouts_us, learner_us)
        if loop.apart
        else rollouts_us + learner_us,
        stages_us={**rollouts, "learner": learner_us},
        limit=slowest if waited_us > learner_us else "learner",
    )


def _round_us(lane: InputLane, loop: Loop, cores: float) -> float:
    """Time in us until all environments stepped once, limited by the slowest worker or the cores.

    Step times are drawn from measured ones for each environment. A worker's step takes longer than
    one in the policy's process, by sending its observation; a message wakes two processes.
    """
    alone, sent = lane.alone, lane.worker
    draws = (max(1, MAX_ENVS // loop.envs), loop.envs)
    drawn = np.random.default_rng(0).choice(np.array(alone.wall_us, dtype=float), draws)
    if not loop.workers:
        return float(drawn.sum(axis=1).mean())
    drawn += max(0.0, sent.mean_us - alone.mean_us)
    starts = [worker * loop.envs // loop.workers for worker in range(loop.workers)]
    slowest_us = float(np.add.reduceat(drawn, starts, axis=1).max(axis=1).mean())
    crowded = crowding(lane, loop.workers, cores)
    slowest_us *= 1 + (crowded - 1) * _computing(lane)
    computing_us = crowded * loop.envs * max(alone.mean_cpu_us, sent.mean_cpu_us)
    return max(slowest_us, computing_us / cores) + lane.stages_us.get("waking", 0.0)


def _messages_us(lane: InputLane, loop: Loop) -> float:
    """What the policy's process takes for the messages of a round, and what they hold."""
    held_us = loop.envs * lane.stages_us.get("observation", 0.0)
    return loop.workers * lane.receive_us + held_us if loop.workers else 0.0


def _computing(lane: InputLane) -> float:
    """The share of a step in which it computes; it waits in the rest."""
    return min(1.0, lane.alone.mean_cpu_us / lane.alone.mean_us) if lane.alone.mean_us else 0.0


def _beside_us(lane: InputLane, loop: Loop, rollouts_us: float, learner_us: float) -> float:
    """Time in us of an iteration whose rollouts and learner run at once on the host's cores.

    Where more processes are busy than there are cores, each gets an equal share. Whichever of the
    two ends first waits for the other, which has the cores for itself then.
    """
    busy = max(1, loop.workers) * _computing(lane)
    share = min(1.0, loop.cores / (busy + loop.learner_cores))
    host_share = min(1.0, loop.cores / (1 + loop.learner_cores))
    host_us = loop.horizon * (loop.policy_us + _messages_us(lane, loop))
    rest = loop.cores - loop.learner_cores * share if busy else loop.cores
    steps_us = loop.horizon * _round_us(lane, loop, rest) if loop.workers else 0.0
    steps_us = steps_us or (rollouts_us - host_us) / share
    learned_us = share * steps_us + host_us
    shared_us = steps_us + host_us / host_share
    if learner_us > learned_us:
        return shared_us + learner_us - learned_us
    return rollouts_us + learner_us / learned_us * (shared_us - rollouts_us)


def best_workers(lane: InputLane, loop: Loop) -> list[LoopTime]:
    """Iterations with 0, 1, 2, 4 ... workers, up to the fewest that are alike to the best."""
    counts = [0, *(2**i for i in range(MAX_WORKERS.bit_length()) if 2**i <= loop.envs)]
    tried = [loop_time(lane, replace(loop, workers=n)) for n in counts]
    best_us = min(one.iteration_us for one in tried)
    last = next(i for i, one in enumerate(tried) if one.iteration_us <= ALIKE * best_us)
    return tried[: last + 1]

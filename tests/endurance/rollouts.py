"""Holds forecasts of PPO loops with environment processes against the loops, in turns and apart.

Run as ``python tests/endurance/rollouts.py BUNDLE`` on two cores, with a bundle of this machine; it
takes three minutes. Every loop is measured twice, far apart.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from itercast.capture.cases.registry import case
from itercast.compose.predict import prepare
from itercast.extras.rl.rollouts import loop_time, make_loop
from itercast.microbench.input.environment import measure_environment
from itercast.microbench.timing.clock import keep_freed_memory

FORKED, SECONDS, EPOCHS, BATCH = get_context("fork"), 3.0, 2, 64


class Bodies:
    """Eight bodies that attract each other, ten substeps a step; an action pushes one of them."""

    action_space = SimpleNamespace(sample=lambda: np.random.randint(6))

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self.at, self.places, self.speeds = 0, np.random.randn(8, 2), np.zeros((8, 2))
        return self.seen(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        self.speeds[action] += 0.01
        for _ in range(10):
            apart = self.places[None] - self.places[:, None]
            self.speeds += 0.001 * (apart / (0.1 + (apart**2).sum(-1, keepdims=True))).sum(1)
            self.places += 0.01 * self.speeds
        return self.seen(), -float(abs(self.places).mean()), False, self.at == 300, {}

    def seen(self) -> Any:
        return np.append(self.places, self.at).astype(np.float32)


class Frames(Bodies):
    """The same, seen as four frames of 84 x 84, blurred."""

    def seen(self) -> Any:
        frame = np.zeros((84, 84), dtype=np.float32)
        for x, y in (40 + 10 * self.places).astype(int) % 76:
            frame[x : x + 8, y : y + 8] += 20
        for axis in (0, 1) * 8:
            frame = (frame + np.roll(frame, 1, axis)) / 2
        return np.repeat(frame[None].astype(np.uint8), 4, 0)


FRAMES, BODIES = ("ppo-atari", Frames, 8, 16), ("ppo-vector", Bodies, 16, 64)
LOOPS = [(*kind, apart, n) for kind in (FRAMES, BODIES) for apart in (0, 1) for n in (1, 2, 4)]


def serve(pipe: Any, kind: Any, count: int) -> None:
    """Step a worker's environments, one after the other, whenever actions come."""
    envs = [kind() for _ in range(count)]
    pipe.send((np.stack([env.reset()[0] for env in envs]), [0.0] * count))
    while True:
        stepped = [env.step(int(a)) for env, a in zip(envs, pipe.recv(), strict=True)]
        seen = [env.reset()[0] if s[3] else s[0] for env, s in zip(envs, stepped, strict=True)]
        pipe.send((np.stack(seen), [s[1] for s in stepped]))


class Gatherer:
    """A policy that acts in environments of worker processes."""

    def __init__(self, model: Any, kind: Any, envs: int, workers: int) -> None:
        self.model, self.parts = model, np.array_split(range(envs), workers)
        self.pipes, ends = zip(*[FORKED.Pipe() for _ in self.parts], strict=True)
        for end, part in zip(ends, self.parts, strict=True):
            FORKED.Process(target=serve, args=(end, kind, len(part))).start()
        self.seen = self.received()[0]

    def received(self) -> list[torch.Tensor]:
        both = zip(*[pipe.recv() for pipe in self.pipes], strict=True)
        return [torch.from_numpy(np.concatenate(part)) for part in both]

    def gather(self, horizon: int) -> dict[str, torch.Tensor]:
        """One rollout; advantages are the rewards to come, discounted, less the values."""
        rows, rewards = [], []
        for _ in range(horizon):
            with torch.no_grad():
                log_probs, values, actions = self.model(observed=self.seen)
            for pipe, part in zip(self.pipes, self.parts, strict=True):
                pipe.send(actions.numpy()[part, 0])
            rows.append((self.seen, actions, log_probs.gather(-1, actions).squeeze(-1), values))
            self.seen, reward = self.received()
            rewards.append(reward.float())
        for at in range(horizon - 2, -1, -1):
            rewards[at] = rewards[at] + 0.99 * rewards[at + 1]
        seen, actions, log_probs, values = (torch.cat(column) for column in zip(*rows, strict=True))
        found = {"observed": seen, "actions": actions, "log_probs": log_probs}
        return {**found, "returns": torch.cat(rewards), "advantages": torch.cat(rewards) - values}


def act(pipe: Any, horizon: int, *sizes: Any) -> None:
    """Gather beside the learner, with the weights that it sends before."""
    gatherer = Gatherer(*sizes)
    while True:
        gatherer.model.load_state_dict(pipe.recv())
        pipe.send(gatherer.gather(horizon))


def run(out: Any, name: str, kind: Any, envs: int, horizon: int, apart: int, workers: int) -> None:
    """Run a loop for a while in a process group of its own; send the median iteration in us."""
    os.setsid()
    torch.set_num_threads(1)  # idle threads of torch would take cores from the environments
    keep_freed_memory()
    chosen, took, (ours, theirs) = case(name), list[float](), FORKED.Pipe()
    model, seen = chosen.build().eval(), dict[str, torch.Tensor]()
    sizes = (model, kind, envs, workers)
    if apart:
        FORKED.Process(target=act, args=(theirs, horizon, *sizes)).start()
    else:
        gatherer = Gatherer(*sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    while sum(took) < SECONDS or len(took) < 5:
        start = time.perf_counter()
        if apart:
            ours.send({key: value.clone() for key, value in model.state_dict().items()})
        else:
            seen = gatherer.gather(horizon)
        model.train()
        for _ in range(EPOCHS if seen else 0):
            for at in torch.randperm(envs * horizon).split(BATCH):
                batch = {key: value[at] for key, value in seen.items()}
                optimizer.zero_grad()
                chosen.loss(model(**batch), batch).backward()
                optimizer.step()
        model.eval()
        seen = ours.recv() if apart else seen
        took.append(time.perf_counter() - start)
    out.send(1e6 * statistics.median(took[2:]))


def measured_us(*loop: Any) -> float:
    """The loop in new processes, which are gone then."""
    ours, theirs = FORKED.Pipe()
    process = FORKED.Process(target=run, args=(theirs, *loop))
    process.start()
    found: float = ours.recv()
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return found


def main(bundle: Path) -> None:
    """Print each loop's forecast, its two times and the error."""
    lanes = {k: measure_environment(k, k.__name__, 9.0, lambda: None) for k in (Bodies, Frames)}
    twice = [[measured_us(*loop) for loop in LOOPS] for _ in range(2)]
    errors, noise = [], []
    for (name, kind, envs, horizon, apart, workers), *us in zip(LOOPS, *twice, strict=True):
        acting, target = prepare(name, gpu="cpu", bundle=bundle, batch=envs, mode="infer")
        target = replace(target, threads=2 if apart else 1)  # of both programs, or of the one
        learning, _ = prepare(name, gpu="cpu", bundle=bundle, batch=BATCH)
        sizes = {"envs": envs, "horizon": horizon, "workers": workers, "epochs": EPOCHS}
        how = make_loop((acting, learning), target, lanes[kind], apart=bool(apart), **sizes)
        found = loop_time(lanes[kind], how)
        errors.append(100 * (2 * found.iteration_us / sum(us) - 1))
        noise.append(100 * abs(us[0] / us[1] - 1))
        ms = [f"{x / 1e3:.1f}" for x in (found.iteration_us, *us)]
        print(
            f"{name}, {workers} workers, {('in turns', 'apart')[apart]}: forecast {ms[0]} ms, "
            f"measured {ms[1]} and {ms[2]}: {errors[-1]:+.1f} %, limited by {found.limit}"
        )
    print(f"error {np.mean(np.abs(errors)):.1f} %, retest {np.mean(noise):.1f} % (means)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

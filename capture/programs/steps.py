"""Finds the iterations of a script: where one ends and the next begins."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

from torch.optim import Optimizer

from itercast.capture.base.durations import counted
from itercast.capture.input.batches import TakenBatches
from itercast.capture.opcall import Kwargs, OpCall, changed
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.repeated.evaluations import (
    Evaluations,
    Inference,
    Lines,
    calls_training,
    in_one_loop,
    learned_from,
    rounds,
)
from itercast.capture.programs.reports.epoch import EnoughSteps, Epoch
from itercast.capture.programs.trained.finder import trains
from itercast.capture.programs.trained.loss import tensors_of

# What ends a step, from what says least. CUDA graphs are warmed up on a stream of their own.
KINDS = ("forward", "backward", "update", "warm-up", "optimizer")
PATIENCE = 4  # times the steps asked for, until a script without an optimizer updates nothing
LONGEST = 20  # times the steps asked for, within which what an iteration runs once comes again
# Backwards, and passes over DataLoaders, after which no step of an optimizer is waited for.
WAITED = 1000
PREPARE = Optimizer._patch_step_function
AVERAGES = -1  # no kind: updates of most weights that not each step makes, as a moving average's
NOT_LOADED = "no DataLoader makes its input: the time that this takes is not in the step"
NOT_REACHED = "training that the script calls was not reached: a longer --limit waits for it"
UPDATES = 0  # no id of an optimizer, but a key beside them in ``Step.stepped``

Place = tuple[int, Lines]  # the index in KINDS of what ended, and where


class Step(NamedTuple):
    """What a rank launched in a step, and what happened in it.

    ``places``: (kind of end, lines) of each forward, backward or update. ``stepped``: how often
    each optimizer stepped, by its id; under ``UPDATES``: how often one stepped after a backward,
    not counting others right after it. ``passes``: backwards and updates with the lines that called
    them, in order. ``inferences``: forwards of models in evaluation mode; ``evaluated``: where such
    a model is one that is trained, and its outputs are not learned from. ``updated``: number of
    tensors written in place outside modules and backward. ``on_gpu``: number of ops that read a
    tensor on the GPU. ``fed``: the lines that copied each tensor from the host.
    """

    calls: list[OpCall]
    networks: list[Kwargs]
    host: dict[str, int]
    peak_bytes: int
    least_bytes: int
    samples: list[int]
    places: set[Place]
    stepped: Counter[int]
    passes: list[tuple[str, Lines]]
    inferences: list[Inference]
    evaluated: set[Place]
    updated: int
    on_gpu: int
    fed: list[Lines]


class Steps:
    """Finds the steps of a running script, and keeps what its rank launched in one iteration.

    A step ends where the optimizer that steps first does so again on the same line. A script
    without optimizers has steps that end where a line begins to update parameters by hand after a
    backward; without such updates, with each backward of one line; without backwards, with each
    forward of a module. ``on_gpu``: steps without an optimizer count only once the script computes
    on a GPU. ``lines`` returns the lines that run now, ``quoted`` turns them into text; ``notes``
    say what ends a step, if no optimizer does.

    An iteration is one step, or several where a loop runs some lines less often, as with rollouts,
    or a generator trained once for several critics. It ends when the rarest of them has run again;
    the search ends after ``LONGEST`` steps, or ``patience_s`` seconds after the script's begin. A
    later iteration is taken if a trained model was evaluated in this one and not in others, or if
    most others have another number of micro-batches.
    """

    def __init__(
        self,
        wanted: int,
        log: ProgramLog,
        taken: TakenBatches,
        lines: Callable[[], Lines],
        quoted: Callable[[Lines], str],
        evaluations: Evaluations,
        patience_s: float,
        on_gpu: bool,
    ) -> None:
        self.on_gpu, self.late_s = on_gpu, time.monotonic() + patience_s
        self.wanted, self.log, self.taken = wanted, log, taken
        self.lines, self.quoted, self.evaluations = lines, quoted, evaluations
        self.kind, self.ends = 0, Counter[Hashable]()
        self.ended, self.kept = list[Step](), list[Step]()
        self.places, self.stepped, self.trained = set[Place](), Counter[int](), set[int]()
        self.passes = list[tuple[str, Lines]]()
        self.inferences, self.earlier = list[Inference](), list[OpCall]()
        self.enough, self.notes = False, list[str]()
        self.optimizers = WeakSet[Any]()  # that the script made, while they live
        self.waited, self.new_gradients = 0, False
        self.gpu_ops, self.fed = 0, list[Lines]()  # ops before the step that runs; copies in it
        self.epoch = Epoch(log, taken, lines, evaluations.outside_torch, self._waits)
        log.ended, taken.given = self.end, log.loaded.add
        log.gpu_memory.came = lambda: self.fed.append(self.lines())

    @property
    def done(self) -> int:
        """How many steps ended."""
        return max(self.ends.values(), default=0)

    @property
    def optimizer_steps(self) -> int:
        """How many steps of optimizers the iteration that was kept has.

        Steps without a backward between them count as one: ZeRO-3's groups, or one model's
        optimizers.
        """
        stepped = sum((step.stepped for step in self.kept), Counter[int]())
        return stepped[UPDATES] or max(stepped.values(), default=1)

    @property
    def computes_on_gpu(self) -> bool:
        """Whether the iteration that was kept does, in a CUDA graph that it launches or outside."""
        return any(step.on_gpu or any(c.graphed for c in step.calls) for step in self.kept)

    def kept_passes(self, named: Callable[[Lines], str]) -> tuple[str, ...]:
        """Which line calls how many backwards and updates of the kept iteration, in words.

        Updates that other optimizers make before the first backward come last: they end the one
        before.
        """
        passes = [(what, named(lines)) for step in self.kept for what, lines in step.passes]
        first = next((i for i, (what, _) in enumerate(passes) if what == "backward"), 0)
        times = Counter(map(" ".join, passes[first:] + passes[:first]))
        return tuple(f"{n} x {text}" if n > 1 else text for text, n in times.items())

    def own_input(self) -> list[str]:
        """A note where the kept iteration copies tensors to the GPU, and no DataLoader made any."""
        fed = [x for step in self.kept for x in step.fed if self.taken.loader is None]
        return [f"{NOT_LOADED}{self.quoted(lines)}" for lines in fed[-1:]]

    def trains_later(self) -> bool:
        """Whether a step of an optimizer comes before the iteration that is kept."""
        trains = KINDS[self.kind] == "optimizer" and self.done < self.wanted - 1
        return trains if self.kind else bool(self.optimizers)

    def made(self, optimizer: Any) -> None:
        """As ``Optimizer._patch_step_function``, which an optimizer that is made calls first."""
        self.optimizers.add(optimizer)
        PREPARE(optimizer)

    def end(self, kind: str, owner: Any) -> None:
        """Note the end of one of ``KINDS``; ``owner``: the optimizer, or the module."""
        self.epoch.ended(kind, owner)
        if self.epoch.follows:
            return
        if kind == "forward":
            self.evaluations.ran(owner, self.trains_later)
            if not owner.training:
                self._note_inference(owner)
            elif self.taken.loader is None and self.log.phase == "forward" and trains(owner):
                self.taken.samples += [len(t) for t in tensors_of(self.log.ran[0])[:1] if t.ndim]
        is_warm_up = kind == "optimizer" and self.log.stream
        self._end(KINDS.index("warm-up" if is_warm_up else kind), owner, self.lines())

    def _note_inference(self, model: Any) -> None:
        """Note the outputs of a model in evaluation mode: a loss may read them, as in RL."""
        outputs = [getattr(t, "_local_tensor", t) for t in tensors_of(self.log.ran[1])]
        inference = Inference(
            calls=len(self.earlier) + len(self.log.calls),
            storages=set(map(self.log.storage, outputs)),
            place=(KINDS.index("forward"), self.lines()),
            parameters=set(map(id, model.parameters())),
        )
        self.inferences.append(inference)

    def _end(self, kind: int, owner: Any, lines: Lines) -> None:
        """Note that ``KINDS[kind]`` ended at these lines; this may end the step.

        It does unless ends of a later kind were seen, and if none came more often than at these
        lines.
        """
        if self.log.after_graph is not None:  # it ends whenever the graph is launched
            self.log.after_graph.append(partial(self._end, kind, owner, lines))
            return
        if getattr(owner, "training", True):  # no evaluation
            self.places.add((kind, lines))
        if kind >= KINDS.index("backward"):
            self.evaluations.training.update(lines)
            self.passes.append((KINDS[kind] if owner is None else type(owner).__name__, lines))
        if KINDS[kind] == "backward":
            self.new_gradients = True
        if KINDS[kind] == "optimizer":
            self.waited = 0
            self.stepped[id(owner)] += 1
            self.stepped[UPDATES] += self.new_gradients
            self.new_gradients = False
            self.trained |= _trained_by(owner)
        if kind < self.kind:
            return
        if kind > self.kind:
            self._join(self.ended)
            self.kind, self.ends, self.ended, self.kept = kind, Counter(), [], []
        place = (id(owner), lines)
        self.ends[place] += 1
        if place == max(self.ends, key=self.ends.__getitem__):  # the first of the most frequent
            self._next(lines)
        if KINDS[kind] == "backward":
            self._waits()

    def _join(self, ended: Sequence[Step]) -> None:
        """Merge steps that an earlier one of ``KINDS`` had ended into the running step."""
        for step in ended[::-1]:
            self.places |= step.places
            self.passes[:0] = step.passes
            moved = [replace(x, calls=x.calls + len(step.calls)) for x in self.inferences]
            self.inferences, self.earlier[:0] = [*step.inferences, *moved], step.calls
            self.gpu_ops -= step.on_gpu

    def _waits(self) -> None:
        """Count a backward, or a pass over a DataLoader.

        After ``WAITED`` of them without an optimizer's step, end the script.
        """
        self.waited += 1
        if self.waited == WAITED:
            taken = f"over DataLoaders, of {self.taken.count:,} batches in all"
            note = f"no step of an optimizer in {WAITED:,} backwards and passes {taken}"
            self.notes.insert(0, f"{note}{self.quoted(self.lines())}")
            self.enough = True
            raise EnoughSteps

    def so_far(self) -> str:
        """How far the script is, in words."""
        if KINDS[self.kind] == "optimizer":
            return f"{self.done} of {self.wanted} steps"
        ran = f"{counted(self.done, KINDS[self.kind])}, " if self.done else ""
        return f"{ran}no step of an optimizer yet"

    def _next(self, lines: Lines) -> None:
        """Keep the step that ended, and begin the next one or end the script."""
        if self.enough:
            raise EnoughSteps
        log, inferences = self.log, self.inferences
        learned = learned_from([*self.earlier, *log.calls], inferences)
        of_trained = {x.place for x in inferences if not self.trained.isdisjoint(x.parameters)}
        self.ended.append(
            Step(
                calls=log.calls,
                networks=log.networks,
                host=log.host,
                peak_bytes=log.peak_bytes,
                least_bytes=log.least_bytes,
                samples=self.taken.samples,
                places=self.places | learned,
                stepped=self.stepped,
                passes=self.passes,
                inferences=inferences,
                evaluated=of_trained - learned,
                updated=_updated(log.calls),
                on_gpu=log.gpu_memory.ops - self.gpu_ops,
                fed=self.fed,
            )
        )
        self.gpu_ops, self.fed = log.gpu_memory.ops, []
        self.places, self.stepped, self.passes = set(), Counter(), []
        self.inferences, self.earlier = [], []
        self.epoch.step_ended()
        log.reset()
        self.taken.begin_step()
        kind = KINDS[self.kind]
        if self.done == self.wanted:
            self.kept = self.ended[-1:]
            note = f"a step is taken to be from one {kind} to the next{self.quoted(lines)}"
            self.notes = [] if kind == "optimizer" else [note]
        if self.kept and kind == "optimizer":
            self.enough = self._is_whole(lines)
        elif self.kept and kind != "warm-up":  # until nothing that says more is expected
            times = 1 if kind == "update" else PATIENCE
            begun = self.log.gpu_memory.ops or not self.on_gpu  # before, it prepares its data
            if begun and self.done >= times * self.wanted and not self.optimizers:
                later = kind == "forward" and calls_training(self.lines())
                self.enough = not later or time.monotonic() > self.late_s
                self.notes += [NOT_REACHED] * (later and self.enough)
        if self.enough:
            at_once = len(self.kept) if kind == "optimizer" else 0
            self.epoch.follow(len(self.ended), at_once, rounds(self.kept, lines))

    def _is_whole(self, lines: Lines) -> bool:
        """Whether to stop: an iteration is complete (it becomes ``kept``), or it takes too long.

        An iteration lies between two visits of the loop's rarest place.
        """
        averages = self._averages(lines)
        steps = [step.places | more for step, more in zip(self.ended, averages, strict=True)]
        often = Counter(place for places in steps for place in places)
        once = {place for place in steps[0] if often[place] == 1}
        before_loop = {place for place in once if not in_one_loop(place[1], lines)}
        rarest = min(often.keys() - before_loop, key=often.__getitem__)
        last = [i for i, places in enumerate(steps) if rarest in places][-2:]
        again = len(last) == 2 and last[1] == len(steps) - 1 and not self._awaits_optimizers()
        looked_at_all = len(steps) == LONGEST * self.wanted
        late = looked_at_all or time.monotonic() > self.late_s
        one_step = again and last[0] == len(steps) - 2
        unlike = self._is_evaluated() or (one_step and self._is_uneven())
        if again and (late or not unlike):
            self.kept = self.ended[last[0] + 1 :]
            return True
        if self.kept[-1].evaluated and not unlike:
            self.kept = self.ended[-1:]
        if late:
            more = f"--steps {2 * self.wanted} looks at twice as many"
            more = more if looked_at_all else "a longer --limit looks at more"
            self.notes.append(f"the loop did not repeat in {len(steps)} steps: one is kept; {more}")
        return late

    def _averages(self, lines: Lines) -> list[set[Place]]:
        """By step, the place ``AVERAGES`` if it moves averages of the weights (EMA), else no place.

        Such a step writes many more tensors than others: at least half as many more as are trained.
        The first step never counts, as the model is made in it.
        """
        counts = [step.updated for step in self.ended]
        enough = min(counts[1:] or counts) + max(1, len(self.trained) / 2)
        later = [{(AVERAGES, lines)} if n >= enough else set[Place]() for n in counts[1:]]
        return [set[Place](), *later]

    def _is_evaluated(self) -> bool:
        """Whether what is trained was evaluated in the last step, and not in all others."""
        always = len(self.ended) > self.wanted + 1 and all(x.evaluated for x in self.ended[1:])
        return bool(self.ended[-1].evaluated) and not always

    def _is_uneven(self) -> bool:
        """Whether the last step has another number of micro-batches than most."""
        counts = Counter(len(step.passes) for step in self.ended)
        return counts[len(self.ended[-1].passes)] < max(counts.values())

    def _left_out(self) -> list[str]:
        """Notes on what the loop runs in other steps than those of the iteration that was kept."""
        n, lines = len(self.ended), self.kept[-1].passes[-1][1]
        averages = zip(self.ended, self._averages(lines), strict=True)
        ran = {id(step): step.places | step.evaluated | more for step, more in averages}
        kept = set[Place]().union(*(ran[id(step)] for step in self.kept))
        others = Counter(place for places in ran.values() for place in places - kept)
        notes = list[str]()
        for place, times in others.most_common():
            if in_one_loop(place[1], lines):
                notes = [f"what ran in {times} of {n} steps is left out{self.quoted(place[1])}"]
                break
        counts = [len(step.passes) for step in self.ended[1:]]
        if len(self.kept) == 1 and (unlike := n - 1 - counts.count(len(self.kept[0].passes))):
            notes.append(f"{unlike} of {n} steps have other numbers of micro-batches")
        return notes

    def _awaits_optimizers(self) -> bool:
        """Whether an optimizer was made that has not stepped, nor another with its parameters."""
        owned = map(_trained_by, self.optimizers)
        return any(own and not own & self.trained for own in owned)

    def restore(self) -> None:
        """Put the kept iteration back into the log, and into the record of batches."""
        if KINDS[self.kind] == "optimizer":
            self.notes += self._left_out()
        log, host = self.log, Counter[str]()
        log.calls, log.networks = [], []
        for step in self.kept:
            host.update(step.host)
            offset = len(log.networks)  # ``within`` counts recurrent passes in each step anew
            log.calls += [
                changed(c, within=c.within + offset) if c.within else c for c in step.calls
            ]
            log.networks += step.networks
        log.host, log.peak_bytes = dict(host), max(step.peak_bytes for step in self.kept)
        log.least_bytes = min(step.least_bytes for step in self.kept)
        self.taken.samples = [n for step in self.kept for n in step.samples]


def _updated(calls: Sequence[OpCall]) -> int:
    """Number of tensors that calls outside modules and backward write in place."""
    own = (call for call in calls if not call.module and call.phase != "backward" and call.args)
    written = (call.args[0] for call in own if call.op.split(".")[1].endswith("_"))
    return sum(len(tensors) if isinstance(tensors, tuple) else 1 for tensors in written)


def _trained_by(optimizer: Any) -> set[int]:
    """The ids of an optimizer's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}

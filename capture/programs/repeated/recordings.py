"""Notes what passes of layers and models launch in backward."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from itercast.capture.opcall import OpCall
from itercast.capture.programs.backward import LASTING
from itercast.capture.programs.gpus.devices import parts
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.reducer import edges
from itercast.capture.programs.repeated.alike import Model
from itercast.capture.programs.repeated.forms import Form, gradient_form, unlogged
from itercast.capture.programs.repeated.passes import (
    COMPILED,
    STORAGE,
    Inputs,
    Kind,
    Launched,
    Measured,
    Numbers,
    ReachedGradient,
)


class Recording:
    """Notes what the backward of a pass launches, beginning with the gradient of its output.

    ``output``: the output's number among the tensors returned. ``apart``: begin and end of launches
    that are left out, as each pass makes them anew (those of gradient hooks).
    """

    def __init__(self, log: ProgramLog, kind: Kind, forward: Launched, names: Numbers) -> None:
        self.log, self.kind, self.forward, self.names = log, kind, forward, names
        self.handles, self.apart = list[Any](), list[tuple[int, int, ReachedGradient]]()
        self.measured: Measured | None = None
        self.output = 0

    def _forward_ran(self, output: torch.Tensor) -> None:
        """Note what forward launched, and which compiled function made this output."""
        self.kind.compiled = self.names.of(self.log.compiled.of(output.grad_fn), COMPILED)
        self.kind.note("forward", self.forward)

    def _begins(self, at: int, gradients: Any) -> None:
        """Begin to measure; ``gradients[at]`` is the gradient of the output."""
        self.measured = Measured(self.log)
        named = self.names.maps[STORAGE].items()
        self.kind.alive = {name for number, name in named if number in self.log.sizes}
        self.gradient = Form.of(gradients[at], self.log)
        self.number = self.names.of(self.log.storage(gradients[at]))

    def end(self, *result: Any) -> None:
        """Note what was launched; ``result``: form and storage of the gradient returned, if any.

        A ``ReachedGradient`` stands for the calls of each parameter that are left out.
        """
        for handle in self.handles:
            handle.remove()
        measured, log = self.measured, self.log
        if measured is None or log.calls is not measured.calls:
            return
        calls, start = list[OpCall | ReachedGradient](), measured.start
        for begin, end, reached in (*self.apart, (len(log.calls), -1, None)):
            calls += map(self.names.call, log.calls[start:begin])
            calls += [replace(reached, number=self.names.of(reached.number))] if reached else []
            start = end
        numbers = [self.number, *map(self.names.of, result[1:])]
        results = self.output, self.gradient, *result[:1]
        launched = measured.launched(calls, results, numbers, self.forward)
        shown = self.kind.shown.get("forward", self.forward)
        if launched.can_repeat() and self.forward == shown:
            self.kind.note("backward", launched)


class LayerPass(Recording):
    """Notes what a layer launches in backward, up to the gradient of its input.

    What is done with gradients of its parameters, as hooks do, is left out.
    """

    def watch(self, inputs: Inputs, output: torch.Tensor, first_node: int) -> None:
        """Hook the nodes of autograd at which backward begins, comes to parameters, and ends."""
        self._forward_ran(output)
        numbers = {id(p): i for i, p in enumerate(inputs.parameters)}
        self.kind.watched |= watched(self.log, (output,), range(first_node))
        source: Any = inputs.trained
        hooks: list[Any] = [(output.grad_fn, partial(self._begins, output.output_nr))]
        hooks += [(source.grad_fn, partial(self._ends, source.output_nr))]
        for node, _ in edges((output,), range(first_node)):
            at = numbers.get(id(getattr(node, "variable", None)))
            if at is not None:
                hooks.append((node, partial(self._reaches, at)))
                self.handles.append(node.register_hook(self._left))
        self.handles += [node.register_prehook(hook) for node, hook in hooks]

    def _reaches(self, at: int, gradients: Any) -> None:
        """Note that backward has parameter ``at``'s gradient; leave out calls until ``_left``."""
        (gradient,) = gradients
        if self.measured is None or gradient is None:
            return
        (part,) = parts(gradient) or [gradient]  # on the meta device it has no parts
        reached = ReachedGradient(
            at=at, form=gradient_form(gradient, self.log), number=self.log.storage(part)
        )
        self.apart.append((len(self.log.calls), -1, reached))  # its end is not known yet
        self.host = Counter(self.log.host)

    def _left(self, *gradients: Any) -> None:
        """Note that autograd has added the parameter's gradient: calls count from here again."""
        if self.measured is not None and self.apart and self.apart[-1][1] < 0:
            begin, _, reached = self.apart.pop()
            self.apart.append((begin, len(self.log.calls), reached))
            self.measured.others += Counter(self.log.host) - self.host

    def _ends(self, at: int, gradients: Any) -> None:
        """Keep what was launched, at the node that gets the gradient of the layer's input."""
        self.end(Form.of(gradients[at], self.log), self.log.storage(gradients[at]))


class ModelPass(Recording):
    """Notes what the backward of a model launches, if it enters the model by one output.

    ``nodes``: the range of sequence numbers of its forward's autograd nodes; ``ends``: the nodes
    that made outputs, each with the index of its result.
    """

    def watch(self, model: Model, outputs: Sequence[Any], first_node: int) -> None:
        """Note the autograd nodes of this pass, by which its backward is known."""
        self._forward_ran(next(t for t in outputs if t.grad_fn is not None))
        self.model, self.gradients = model, model.gradients()
        self.nodes = range(first_node, next_node())
        self.ends = [
            (t.grad_fn._sequence_nr(), t.output_nr) if t.grad_fn else (-1, 0) for t in outputs
        ]

    def enter(self, roots: tuple[Any, ...]) -> bool:
        """Hook the autograd node by which backward enters; returns whether it can be repeated.

        For this, backward enters by one output, and all nodes outside of the pass are younger, so
        that they run before it, and add to no gradient that the pass reaches. What a library's
        ``backward`` does after autograd is known only if ``LASTING`` has it.
        """
        reached_nodes = [(node, (node._sequence_nr(), at)) for node, at in edges(roots, self.nodes)]
        entered = [(node, end) for node, end in reached_nodes if end[0] in self.nodes]
        ends_unseen = self.model.library and not LASTING
        if ends_unseen or len(entered) != 1 or entered[0][1] not in self.ends:
            return False
        added = {id(node.variable) for node, _ in reached_nodes if hasattr(node, "variable")}
        added |= {p for node, _ in reached_nodes for p in getattr(node, "reaches", ())}
        older = any(number < self.nodes.start for _, (number, _) in reached_nodes)
        if older or added & self.kind.reaches.keys():
            return False
        node, end = entered[0]
        self.output = self.ends.index(end)
        self.handles.append(node.register_prehook(partial(self._begins, end[1])))
        return True

    def leave(self) -> None:
        """Keep what was launched when backward is over, if gradients are still the same tensors."""
        if self.gradients == self.model.gradients():
            self.end()


def next_node() -> int:
    """The number of autograd's next node."""
    return int(torch._C._autograd._get_sequence_nr())


def watched(log: ProgramLog, outputs: Sequence[torch.Tensor], beyond: range = range(0)) -> bool:
    """Whether Python holds references to the nodes that accumulate gradients, as FSDP's hooks do.

    Compares their reference counts with that of a node that nobody hooks into; ``beyond``: see
    ``edges``.
    """
    with unlogged(log):
        unwatched = _most_references([torch.empty(()).requires_grad_() + 1])
    return _most_references(outputs, beyond) > unwatched


def _most_references(outputs: Sequence[torch.Tensor], beyond: range = range(0)) -> int:
    """The most references to a node that adds to a parameter's gradient; see ``edges``."""
    nodes = (node for node, _ in edges(outputs, beyond) if hasattr(node, "variable"))
    return max(map(sys.getrefcount, nodes), default=0)

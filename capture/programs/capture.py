"""Captures a training step of a distributed program, for each rank that does different work.

The Python of torch's parallel wrappers is logged too: FSDP2's hooks of a layer, a pipeline's
schedule of a micro-batch, and checkpoints take host time that no op stands for. DTensor's dispatch
is logged by ``ProgramLog``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, partialmethod, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.opcall import StepCapture
from itercast.capture.programs.attempts import Attempt, CapturedRank, KnownRanks, Row
from itercast.capture.programs.backward import Backward, backward_passes, lasts_longer
from itercast.capture.programs.fake_ranks import one_rank_of
from itercast.capture.programs.gpus.loaded import load_to_devices
from itercast.capture.programs.gpus.streams import recorded_streams
from itercast.capture.programs.kernels.fused import ShardedAttention
from itercast.capture.programs.kernels.packed import packed_sequences
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.objects import Mailbox, objects_through
from itercast.capture.programs.program import ProgramCapture
from itercast.capture.programs.reducer import reached
from itercast.capture.programs.repeated.fold import folded
from itercast.capture.programs.repeated.passes import stood_for
from itercast.capture.programs.repeated.watch import Repeats
from itercast.capture.programs.trained.bare import is_wrapper
from itercast.capture.recorder.fake_patches import (
    behave_like_real_tensors,
    modes_in_backward,
    run_uncompiled,
)
from itercast.capture.recorder.recurrent import recurrent_networks
from itercast.capture.recorder.watch import ModuleTracker

OPTIMIZERS = {"SGD": "sgd", "LAMB": "lamb", "Muon": "muon"}  # of measured Python; else as AdamW's
GRAPHED = ("reduce-overhead", "max-autotune")  # modes of torch.compile


def capture_program(
    program: Callable[[], Callable[[], Any]], world_size: int, ranks: Sequence[int] = ()
) -> ProgramCapture:
    """Capture the second step of ``program`` on some ranks; nothing is computed or sent.

    ``program`` builds and parallelises the model as it would under torchrun, and returns a function
    that runs one training step. Without ``ranks`` rank 0 is captured, and all that it exchanges
    messages with, and those in turn: one rank of every pipeline stage.
    """

    def run(rank: int, log: ProgramLog) -> None:
        """Run two steps; the first makes the optimizer's state, and its log is dropped."""
        step = program()
        with runs_of_steps(log):
            step()
            log.reset()
            log.phase = "forward"
            step()

    return capture_ranks(run, world_size, ranks)


def capture_ranks(
    run: Callable[[int, ProgramLog], Row | None],
    world_size: int,
    ranks: Sequence[int] = (),
    *,
    lasting: bool = False,
    make: Callable[[Attempt], KnownRanks] = lambda attempt: attempt(),
) -> ProgramCapture:
    """Capture what ``run`` launches as each rank after its last ``reset`` of the log.

    Without ``ranks``: rank 0, and all that captured ranks exchange messages with. ``run`` returns
    further fields of ``ProgramCapture``. ``lasting``: process groups stay, for one rank. ``make``
    makes an attempt to run a rank, maybe in a process of its own.
    """
    wanted = list(ranks) or [0]
    if not all(0 <= rank < world_size for rank in wanted):
        raise ValueError(f"ranks {wanted}: allowed are 0 to {world_size - 1}")
    known = KnownRanks(wanted=wanted, follows=not ranks)
    while not known.complete:
        known = make(partial(known.attempt, partial(_capture_rank, run, world_size, lasting)))
    return known.program(world_size)


def _capture_rank(
    run: Callable[[int, ProgramLog], Row | None],
    world_size: int,
    lasting: bool,
    rank: int,
    mailbox: Mailbox,
    repeats: bool,
) -> CapturedRank:
    """What ``run`` launches as this rank, see ``capture_ranks``."""
    log = ProgramLog(repeats=repeats)
    mailbox.begin(rank)
    with ExitStack() as stack:
        stack.enter_context(one_rank_of(world_size, rank, log, lasting=lasting))
        stack.enter_context(objects_through(mailbox))
        stack.enter_context(recorded_streams(log))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(behave_like_real_tensors())
        stack.enter_context(load_to_devices())
        stack.enter_context(recurrent_networks(log))
        stack.enter_context(packed_sequences())
        stack.enter_context(run_uncompiled(log.guesses))
        numbers = partialmethod(_numbers, log)
        stack.enter_context(patch.object(FakeTensor, "numpy", numbers, create=True))
        with log:
            fields = run(rank, log) or {}
    networks, calls = tuple(log.networks), folded(log.calls, partial(stood_for, log=log))
    return CapturedRank(
        step=StepCapture(calls=tuple(calls), host=log.host, networks=networks),
        peak_bytes=log.peak_bytes,
        least_bytes=max(0, log.least_bytes - log.graph_bytes),
        grouped=log.grouped,
        fields=fields,
    )


def _numbers(tensor: FakeTensor, log: ProgramLog, *, force: bool = False) -> Any:
    """As ``Tensor.numpy``, noted as a read by the host: the known values, or ones."""
    log.read_by_host(tensor)
    values = log.routing.known_values(tensor)
    with _disable_current_modes():
        known = torch.ones(tensor.shape, dtype=tensor.dtype) if values is None else values.clone()
        return known.numpy()


@contextmanager
def runs_of_steps(log: ProgramLog) -> Iterator[None]:
    """Log modules, attention as one op, and the phases of steps that run inside the context."""
    contexts = (
        ModuleTracker(log),
        Repeats(log).watched() if log.repeats else nullcontext(),
        _phases(log),
        _logged_wrappers(log),
        patch.object(torch, "compile", partial(_compile, log, torch.compile)),
        patch.object(torch.cuda, "make_graphed_callables", partial(_graphed, log)),
        ShardedAttention(log),
        modes_in_backward(),
        _recomputations(log),
        warnings.catch_warnings(),
    )
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global")
        stack.callback(setattr, log, "over", True)
        yield


def _compile(
    log: ProgramLog, compile_: Callable[..., Any], model: Any = None, **options: Any
) -> Any:
    """torch.compile whose result runs op by op, and tells the log when it is called."""
    if model is None:
        return partial(_compile, log, compile_, **options)
    compiled = compile_(model, **options) if isinstance(model, torch.nn.Module) else model
    graphed = options.get("mode") in GRAPHED
    return _run_inside(partial(log.whole, graphed=graphed), compiled)


def _graphed(log: ProgramLog, callables: Any, *args: Any, **options: Any) -> Any:
    """As ``torch.cuda.make_graphed_callables``: a call launches a graph, and so does backward."""
    if isinstance(callables, tuple):
        return tuple(_graphed(log, function) for function in callables)
    return _run_inside(partial(log.whole, fused=False, graphed=True), callables)


def _run_inside(context: Callable[[], Any], function: Any) -> Any:
    """The function, made to run inside a context; for a module, its forward runs inside."""
    run = function.forward if isinstance(function, torch.nn.Module) else function

    @wraps(run)
    def called(*args: Any, **kwargs: Any) -> Any:
        with context():
            return run(*args, **kwargs)

    if not isinstance(function, torch.nn.Module):
        return called
    function.forward = called
    return function


@contextmanager
def _backward(log: ProgramLog, backward: Backward) -> Iterator[None]:
    """Log calls inside as backward's; a later write to a parameter that it reaches is an update."""
    before, log.phase = log.phase, "backward"
    recomputing, log.recomputing = log.recomputing, False
    reaches = backward.inputs or reached(backward.roots).values()
    if backward.accumulates:
        for event, times in (("backward", 1), ("accumulate_grad", len(reaches))):
            log.host[event] = log.host.get(event, 0) + times
    try:
        yield
    finally:
        log.phase, log.recomputing = before, recomputing
    if before != "backward":
        log.awaits_update(reaches)
        log.ended("backward", None)


@contextmanager
def _recomputations(log: ProgramLog) -> Iterator[None]:
    """Tell the log which ops of a backward pass are forward's, run again.

    Those inside ``torch.enable_grad`` are: checkpoints of all kinds enable gradients to recompute,
    and the backward pass itself does not.
    """
    original_enter, original_exit = torch.enable_grad.__enter__, torch.enable_grad.__exit__
    outer = list[bool]()

    def enter(context: Any) -> None:
        outer.append(log.recomputing)
        log.recomputing = log.phase == "backward"
        original_enter(context)

    def exit_(context: Any, *exc: Any) -> None:
        log.recomputing = outer.pop()
        original_exit(context, *exc)

    changed: dict[str, Any] = {"__enter__": enter, "__exit__": exit_}
    with patch.multiple(torch.enable_grad, **changed):
        yield


@contextmanager
def _phases(log: ProgramLog) -> Iterator[None]:
    """Tell the log which calls are backward's and the optimizer's, and when each pass ends.

    It also counts the Python work of ``step`` and ``zero_grad``.
    """

    def in_forward(closure: Any) -> Any:
        """The optimizer's closure, with its ops logged as forward and backward."""

        def run() -> Any:
            log.phase = "forward"
            loss = closure()
            log.phase = "optimizer"
            return loss

        return run

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin phase "optimizer", and count the Python of this step."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS runs the model as often as its loss needs, which nobody knows")
        log.phase = "optimizer"
        log.awaits_update(())  # no update by hand
        kind = OPTIMIZERS.get(type(optimizer).__name__, "adamw")
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        log.python(f"{kind}_step", len(trained))
        sharded = sum(isinstance(p, DTensor) for p in trained)
        log.foreach_event = (f"{kind}_dtensor_step", sharded) if sharded else None
        log.host["zero_grad"] = log.host.get("zero_grad", 0) + len(trained)
        named = {n: in_forward(x) if callable(x) else x for n, x in kwargs.items()}
        return (optimizer, *(in_forward(x) if callable(x) else x for x in args[1:])), named

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        log.phase = "forward"
        log.updates += 1
        log.ended("optimizer", optimizer)

    def after_forward(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not log.module:
            if is_wrapper(module):
                lasts_longer(module)
            log.ran = (args, kwargs), output
            log.ended("forward", module)
            log.ran = None

    with ExitStack() as stack:
        for hook in (
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
            register_module_forward_hook(after_forward, with_kwargs=True),
        ):
            stack.callback(hook.remove)
        stack.enter_context(backward_passes(partial(_backward, log)))
        yield


def _layer(group: Any) -> tuple[str, int]:
    """The event of a hook of FSDP2 on a layer, and its number of parameters."""
    kept = not group._reshard_after_forward
    return ("fsdp_layer_kept" if kept else "fsdp_layer", len(group.fsdp_params))


def _micro_batch(stage: Any) -> tuple[str, int]:
    """The event of a pipeline stage that runs a micro-batch."""
    return ("pipeline_micro", 1)


def _recomputed(frame: Any) -> tuple[str, int]:
    """The event of a checkpoint whose forward was run again, and its number of saved tensors."""
    return ("checkpoint_layer", max(1, len(frame.weak_holders)))


# Classes, their methods, and functions that make a host event and its count of the object.
METHODS: tuple[tuple[Any, str, Callable[[Any], tuple[str, int]]], ...] = (
    (FSDPParamGroup, "pre_forward", _layer),
    (FSDPParamGroup, "pre_backward", _layer),
    (_PipelineStageBase, "forward_one_chunk", _micro_batch),
    (_PipelineStageBase, "backward_one_chunk", _micro_batch),
    (checkpoint._CheckpointFrame, "check_recomputed_tensors_match", _recomputed),
)


@contextmanager
def _logged_wrappers(log: ProgramLog) -> Iterator[None]:
    """Log an event whenever one of ``METHODS`` is called inside the context."""

    def logging(method: Callable[..., Any], event: Callable[[Any], tuple[str, int]]) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.python(*event(self))
            return method(self, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name, event in METHODS:
            patched = logging(getattr(owner, name), event)
            stack.enter_context(patch.object(owner, name, patched))
        yield

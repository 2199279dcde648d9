"""DataLoaders run for real while a program is captured; their batches become fake tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.multiprocessing as multiprocessing
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from itercast.capture.base.cores import cores, cpu_model
from itercast.capture.input.lane import Batches, InputLane
from itercast.capture.input.timers import (
    BatchLog,
    BatchTime,
    Clock,
    batch_size,
    own_times,
    timed_batches,
    with_tensors,
    worker_times,
)
from itercast.capture.recorder.facts import Known, is_small_integer
from itercast.capture.recorder.fake import fake_tensor

CONTEXT = "_DataLoader__multiprocessing_context"
CALL = torch.nn.Module._call_impl  # torch's own, without what repeats passes in a capture
MOST_PLACES = 1000  # of a list or dict that are searched where none holds a tensor without data


class TakenBatches:
    """The batches that a program took from its DataLoaders, and how long each took.

    ``samples``: of each batch since the last ``begin_step``; without a DataLoader the first axis of
    what models in training are given. ``loader``: of the last batch. ``copied_ahead``: see
    ``InputLane``.
    """

    def __init__(self) -> None:
        self.log = BatchLog()
        self.of = dict[Any, OfLoader]()  # by DataLoader
        self.loader: Any = None
        self.copied_ahead = False
        # Called at each batch, with each tensor of one, and where a DataLoader has none left.
        self.came: Callable[[], None] = lambda: None
        self.given: Callable[[torch.Tensor], None] = lambda tensor: None
        self.passed: Callable[[Any], None] = lambda loader: None
        # Whether a DataLoader has none left, though it may have.
        self.ends: Callable[[Any], bool] = lambda loader: False
        self.begin_step()

    def begin_step(self) -> None:
        """Forget how many samples were taken so far."""
        self.samples: list[int] = []

    def started(self, loader: Any, took_us: float) -> None:
        """Note that a loader began a pass, for which its first worker was started."""
        self.of.setdefault(loader, OfLoader()).start_us = took_us

    def note(self, loader: Any, took_us: float, batch: Any) -> None:
        """Note a batch that a loader gave, for which this process's thread worked ``took_us``."""
        of = self.of.setdefault(loader, OfLoader())
        of.samples, of.nbytes = batch_size(batch, loader)
        self.samples.append(of.samples)
        of.took_us.append(took_us)
        self.loader = loader
        self.log.collect()
        of.batches += self.log.batches
        self.log.batches = []
        self.came()

    @property
    def count(self) -> int:
        """How many batches came."""
        return sum(len(of.took_us) for of in self.of.values())

    def lane(self, name: str, loader: Any = None) -> InputLane | None:
        """The input lane of a loader, by default that of the last batch; None where none was timed.

        Its first batch warms up.
        """
        loader = self.loader if loader is None else loader
        if loader is None or not (of := self.of[loader]).batches:
            return None
        timed, took_us = of.batches[1:] or of.batches, of.took_us[1:] or of.took_us
        workers = loader.num_workers
        stay = getattr(loader, "persistent_workers", False)
        return InputLane(
            loader=name,
            workers=workers,
            prefetch=loader.prefetch_factor or 1,
            batch_samples=of.samples,
            batch_bytes=of.nbytes,
            cores=cores(),
            alone=Batches() if workers else own_times(timed),
            worker=worker_times(timed) if workers else Batches(),
            receive_us=sum(took_us) / len(took_us) if workers else 0.0,
            copied_ahead=self.copied_ahead,
            cpu=cpu_model(),
            start_us=0.0 if stay or not workers else of.start_us,
        )


@dataclass(slots=True)
class OfLoader:
    """Batches of one DataLoader, in us; ``took_us``: this process's time for each.

    ``samples``, ``nbytes``: of the last one. ``start_us``: to start a worker for a pass.
    """

    batches: list[BatchTime] = field(default_factory=list)
    took_us: list[float] = field(default_factory=list)
    samples: int = 0
    nbytes: int = 0
    start_us: float = 0.0


def _faked(value: Any) -> Any:
    """A fake tensor of the same form; small integers stay real, as programs may read them."""
    if not isinstance(value, torch.Tensor) or is_small_integer(value):
        return value
    return fake_tensor(value, None)


@contextmanager
def _for_real(mode: TorchFunctionMode | None = None) -> Iterator[None]:
    """Run without the modes of a capture, those of torch functions included, and its hooks.

    Modules that a dataset calls, such as torchvision's transforms, are no part of a step. ``mode``
    stays on, which takes time at every call of torch.
    """
    unhooked = patch.multiple(module, _global_forward_hooks={}, _global_forward_pre_hooks={})
    plain = patch.object(torch.nn.Module, "_call_impl", CALL)
    with _disable_current_modes(), _only_mode(mode), unhooked, plain:
        yield


@contextmanager
def _only_mode(mode: TorchFunctionMode | None) -> Iterator[None]:
    """Run under this mode of torch functions alone, or none; tensor subclasses keep their own."""
    others = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        with mode or nullcontext():
            yield
    finally:
        for other in reversed(others):
            _push_mode(other)


KnownValues = Callable[[torch.Tensor], torch.Tensor | None]  # of a fake tensor, where known


def _fill(owner: Any, seen: set[int], known_values: KnownValues) -> bool:
    """Replace the fake tensors inside a dataset by real ones; returns whether it holds any.

    They may be in attributes, lists and dicts at any depth; ``seen``: ids of objects visited. A
    tensor whose values ``known_values`` has gets those, others get zeros.
    """
    if id(owner) in seen or isinstance(owner, type | str | bytes):
        return False
    seen.add(id(owner))
    if isinstance(owner, list | dict):
        held: Any = owner
    else:
        held = getattr(owner, "__dict__", {})
    has_fakes = False
    for number, place in enumerate(range(len(held)) if isinstance(held, list) else list(held)):
        if number >= MOST_PLACES and not has_fakes:
            break
        value = held[place]
        if isinstance(value, FakeTensor | tuple):
            has_fakes |= any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value))
            held[place] = tree_map(partial(_with_data, known_values), value)
        else:
            has_fakes |= _fill(value, seen, known_values)
    return has_fakes


def _fill_collator(collate: Any, known_values: KnownValues) -> None:
    """As ``_fill`` for tensors that a collator has itself; other attributes may be the model."""
    owner = getattr(collate, "__self__", collate)
    _fill(owner, {id(value) for value in getattr(owner, "__dict__", {}).values()}, known_values)


def _with_data(known_values: KnownValues, value: Any) -> Any:
    """A real tensor for a fake one, with its known values or zeros; other values as they are."""
    if not isinstance(value, FakeTensor):
        return value
    values = known_values(value)
    return torch.zeros(value.shape, dtype=value.dtype) if values is None else values


@contextmanager
def _one_worker(loader: Any) -> Iterator[None]:
    """Let a loader with workers make its iterator with one worker, which is timed for all.

    The worker is forked whatever the loader asks, so that timers are patched in it, too.
    """
    values: dict[str, Any] = {"pin_memory": False}
    if loader.num_workers:
        values |= {"num_workers": 1, "timeout": 0, CONTEXT: multiprocessing.get_context("fork")}
    before = {name: vars(loader)[name] for name in values}
    vars(loader).update(values)
    try:
        yield
    finally:
        vars(loader).update(before)


@contextmanager
def loaders_give_real_batches(taken: TakenBatches, known: Known, gpu: Any = None) -> Iterator[None]:
    """Let DataLoaders load real data inside the context, although all else is fake.

    A dataset that holds fake tensors gets data: the values that are ``known``, else zeros. Small
    batches stay known. ``gpu`` is the mode (``OnCpu``) that emulates a GPU, and has its
    ``memory``: a loader without workers runs under it for its first batch, and for all batches if
    that one puts a tensor there.
    """
    from torch.utils.data import dataloader

    iterators = dataloader._BaseDataLoaderIter
    kinds = dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter
    original_init, original_next = iterators.__init__, iterators.__next__
    loaders: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of iterators
    on_host: WeakSet[Any] = WeakSet()  # loaders that put nothing on a GPU

    def init(iterator: Any, loader: Any) -> None:
        original_init(iterator, loader)
        loaders[iterator] = loader

    def next_batch(iterator: Any) -> Any:
        """As ``next`` of a DataLoader's iterator: load a real batch, note it, return it as fake."""
        loader = loaders[iterator]
        if taken.ends(loader):
            taken.passed(loader)
            raise StopIteration
        mode = None if loader.num_workers or loader in on_host else gpu
        puts_before = mode and mode.memory.puts
        try:
            with _for_real(mode):
                start_ns = time.thread_time_ns()  # of no other thread, such as a progress bar's
                batch = original_next(iterator)
                took_us = (time.thread_time_ns() - start_ns) * 1e-3
        except StopIteration:
            taken.passed(loader)
            raise
        taken.note(loader, took_us, batch)
        memory = mode.memory if mode and mode.memory.puts > puts_before else None
        if memory is None:
            on_host.add(loader)

        def fake(value: torch.Tensor) -> Any:
            tensor = memory.put(_faked(value)) if memory is not None else _faked(value)
            known.keep(tensor, value)
            taken.given(tensor)
            return tensor

        return with_tensors(fake, batch)

    def starting(start: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def call(iterator: Any, loader: Any) -> None:
            with _for_real(), _one_worker(loader):
                _fill(loader.dataset, set(), known.known_values)
                _fill_collator(loader.collate_fn, known.known_values)
                clock = Clock()
                start(iterator, loader)
                taken.started(loader, clock.read()[0])

        return call

    many = kinds[1]
    begin_again = many._reset  # the next pass of workers that stay

    def reset(iterator: Any, *args: Any, **options: Any) -> None:
        with _for_real():
            begin_again(iterator, *args, **options)

    contexts: list[AbstractContextManager[Any]] = [
        timed_batches(taken.log.note),
        patch.object(many, "_reset", reset),
        patch.object(iterators, "__init__", init),
        patch.object(iterators, "__next__", next_batch),
        *(patch.object(kind, "__init__", starting(kind.__init__)) for kind in kinds),
    ]
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield

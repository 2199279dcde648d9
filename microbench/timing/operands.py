"""What a timed call reads, and in which core's caches its operands lie before the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from itercast.capture.base.slow_imports import torch
from itercast.microbench.ops.family import Tensor

# no assumption: elements that ATen always leaves to one thread (at::internal::GRAIN_SIZE / 2)
PIECE = 2**14
NEAR_BYTES = 2.0**23  # no assumption: operands of more bytes leave the caches of single cores


def rewritten_by_one_core(run: Callable[[], object]) -> Callable[[], object] | None:
    """A function that writes all operands of a run anew, unchanged, from the calling thread.

    In a step other ops wrote the operands, with another division of work among cores: most of what
    a core reads is in another core's cache. None for operands that are too large for this to
    matter, or that are no dense floating-point tensors.
    """
    pieces = [piece for t in _operands(run) for piece in t.split(PIECE)]
    if not pieces or sum(p.nbytes for p in pieces) > NEAR_BYTES:
        return None
    return lambda: torch._foreach_add_(pieces, 0.0)


def _operands(run: Callable[[], object]) -> list[Tensor]:
    """The floating-point tensors that a run reads and does not make itself, each as one dimension.

    Runs it once to find out.
    """
    read: dict[int, Tensor] = {}
    written: set[int] = set()

    class Reads(torch.utils._python_dispatch.TorchDispatchMode):
        """Keeps, by address, the tensors that ops read before an op has written there."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            for t in _tensors((args, kwargs or {})):
                if t.data_ptr() not in written:
                    read.setdefault(t.data_ptr(), t)
            result = func(*args, **(kwargs or {}))
            written.update(t.data_ptr() for t in _tensors(result) if t.data_ptr() not in read)
            return result

    with Reads():
        run()
    return [flat for t in read.values() for flat in _flat(t)]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors with memory of their own: DTensor and its like wrap others."""
    leaves = torch.utils._pytree.tree_leaves(value)
    tensors = (t for t in leaves if isinstance(t, torch.Tensor) and t.layout == torch.strided)
    wraps = torch.utils._python_dispatch.is_traceable_wrapper_subclass
    return (t for t in tensors if not wraps(t))


def _flat(t: Tensor) -> list[Tensor]:
    """All elements of a dense tensor in the order of memory; none of any other tensor."""
    if not t.is_floating_point() or t.untyped_storage().nbytes() != t.nbytes:
        return []
    return [t.data.as_strided((t.numel(),), (1,))]  # .data: autograd does not see the writes

"""Makes torch look like a machine with GPUs, while all tensors stay fake and on the CPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from itercast.capture.recorder.autocast import autocast_as_on_cuda

BF16_FROM = 8  # major compute capability of the first GPUs with bf16: Ampere


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedGpu:
    """What programs can ask of a GPU that is not there; ``kind`` is "gpu" or "cpu"."""

    name: str
    kind: str
    memory_bytes: int
    sm_count: int
    compute_capability: tuple[int, int]


@contextmanager
def gpus_that_are_not_there(gpu: EmulatedGpu, per_node: int, local_rank: int) -> Iterator[None]:
    """Let programs find ``per_node`` such GPUs in ``torch.cuda`` inside the context.

    Tensors that they put on a GPU are on the CPU; autocast, foreach optimizers and gradient scalers
    do as they do on GPUs.
    """
    with ExitStack() as stack:
        stack.enter_context(
            patch.multiple(torch.cuda, create=True, **_cuda(gpu, per_node, local_rank))
        )
        stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(patch.object(torch, "Generator", GeneratorOnCpu))
        for owner in (torch.Tensor, torch.nn.Module):
            stack.enter_context(patch.object(owner, "cuda", _stay))
        on_gpu: dict[str, Any] = {
            "is_cuda": property(lambda tensor: isinstance(tensor, FakeTensor))
        }
        stack.enter_context(patch.multiple(torch.Tensor, create=True, pin_memory=_stay, **on_gpu))
        stack.enter_context(patch.object(torch.nn.RNNBase, "flatten_parameters", _stay))
        stack.enter_context(patch.object(torch._C._nn, "_parse_to", _parse_to))
        stack.enter_context(_optimizers_as_on_gpus())
        for place in (torch, torch.amp, torch.cuda.amp):
            stack.enter_context(patch.object(place, "autocast", AutocastAsOnGpus))
        stack.enter_context(_collectives_as_on_gpus())
        stack.enter_context(OnCpu())
        yield


def _parse_to(*args: Any, **kwargs: Any) -> Any:
    """What ``Module.to`` makes of its arguments; the number of a GPU is a device."""
    args = tuple("cpu" if isinstance(value, int) else value for value in args[:1]) + args[1:]
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = "cpu"
    return PARSE_TO(*args, **kwargs)


class GeneratorOnCpu(torch.Generator):
    """A generator of random numbers on the CPU, whichever device is asked for."""

    def __new__(cls, device: Any = None) -> GeneratorOnCpu:
        """As ``torch.Generator``."""
        return super().__new__(cls)


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


class OnCpu(TorchFunctionMode):
    """Takes every CUDA device that torch is given as the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:  # a program may look at the name of its device
            return func("cuda", *args) if isinstance(args[0], int) else func(*args, **kwargs)
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], "cpu", *args[2:])
        kwargs = {name: _on_cpu(value) for name, value in kwargs.items()}
        return func(*map(_on_cpu, args), **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


SILENT = (
    *("init", "set_device", "empty_cache", "reset_peak_memory_stats", "ipc_collect"),
    *("reset_max_memory_allocated", "reset_accumulated_memory_stats", "manual_seed"),
    *("manual_seed_all", "set_per_process_memory_fraction", "_lazy_init", "set_rng_state"),
    *("seed", "seed_all", "set_rng_state_all", "_sleep", "memory_snapshot"),
)
PARSE_TO = torch._C._nn._parse_to
ZERO = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def _cuda(gpu: EmulatedGpu, per_node: int, local_rank: int) -> dict[str, Any]:
    """What programs ask ``torch.cuda``, by name."""
    major, minor = gpu.compute_capability
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": per_node,
        "current_device": local_rank,
        "get_device_name": f"NVIDIA {gpu.name}",
        "get_device_capability": (major, minor),
        "get_device_properties": _properties(gpu),
        "get_arch_list": [f"sm_{major}{minor}"],
        "is_bf16_supported": major >= BF16_FROM,
        "mem_get_info": (gpu.memory_bytes, gpu.memory_bytes),
        "memory_stats": Counter(),
        "memory_summary": "",
        "get_rng_state_all": [],
        "utilization": 0,
        **dict.fromkeys(ZERO, 0),
        **dict.fromkeys(SILENT),
    }
    found: dict[str, Any] = {name: _answering(value) for name, value in answers.items()}
    found["device"] = found["device_of"] = nullcontext
    found["get_rng_state"] = lambda *args, **kwargs: torch.get_rng_state()
    return found


def _properties(gpu: EmulatedGpu) -> SimpleNamespace:
    return SimpleNamespace(
        name=gpu.name,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.sm_count,
        major=gpu.compute_capability[0],
        minor=gpu.compute_capability[1],
        warp_size=32,
        gcnArchName="",
        uuid="",
    )


def _answering(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


@contextmanager
def _optimizers_as_on_gpus() -> Iterator[None]:
    """Optimizers take the foreach kernels that they take on GPUs; a scaler skips no step."""
    from torch.amp import grad_scaler
    from torch.optim import optimizer as base
    from torch.utils import _foreach_utils

    def step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    types, more = base._foreach_supported_types, _foreach_utils._foreach_supported_types
    capturable = "_get_capturable_supported_devices"
    loaded = [m for name, m in sys.modules.items() if name.startswith("torch.optim.")]
    with ExitStack() as stack:
        for owner, name, value in (
            (base, "_get_foreach_kernels_supported_devices", lambda: devices),
            (base, "_foreach_supported_types", [*types, FakeTensor]),
            (_foreach_utils, "_foreach_supported_types", [*more, FakeTensor]),
            (grad_scaler.GradScaler, "_maybe_opt_step", step),
            *((m, capturable, lambda *_, **__: devices) for m in loaded if hasattr(m, capturable)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


class AutocastAsOnGpus(ContextDecorator):
    """A context or a decorator, as ``torch.autocast``; it casts what GPUs cast.

    So it does where "cpu" is named: that is where ``torch.utils.checkpoint`` finds the tensors.
    """

    def __init__(
        self,
        device_type: str = "cuda",
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if isinstance(device_type, bool):  # torch.cuda.amp.autocast(enabled)
            enabled = device_type
        self.dtype, self.enabled = dtype or torch.float16, enabled
        self.entered: list[Any] = []

    def __enter__(self) -> Any:
        one = autocast_as_on_cuda(self.dtype, self.enabled)
        self.entered.append(one)
        one.__enter__()
        return self

    def __exit__(self, *exc: Any) -> Any:
        return self.entered.pop().__exit__(*exc)


class Synced(torch.autograd.Function):
    """Sends what the ranks of ``SyncBatchNorm`` tell each other: in forward the means, deviations
    and counts, in backward two sums per channel."""

    @staticmethod
    def forward(ctx: Any, x: Any, layer: Any) -> Any:
        """Gather what each rank has."""
        ctx.layer = layer
        own = x.new_empty(2 * layer.num_features + 1, dtype=torch.float32)
        ranks = dist.get_world_size(layer.process_group)
        whole = own.new_empty(ranks * len(own))
        dist.all_gather_into_tensor(whole, own, layer.process_group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Add the ranks' sums up."""
        sums = gradients[0].new_empty(2 * ctx.layer.num_features, dtype=torch.float32)
        dist.all_reduce(sums, group=ctx.layer.process_group)
        return gradients[0], None


def _sync_batch_norm(layer: Any, x: Any) -> Any:
    """As ``SyncBatchNorm``, whose kernels no CPU has: its messages, and a batch norm."""
    synced = layer.training and dist.is_initialized()
    x = Synced.apply(x, layer) if synced else x
    return torch.nn.modules.batchnorm._BatchNorm.forward(layer, x)


@contextmanager
def _collectives_as_on_gpus() -> Iterator[None]:
    """NCCL is there; DDP and FSDP take modules that they find on the CPU as on their GPU."""
    from torch.distributed.fsdp import _init_utils as fsdp
    from torch.nn.parallel import DistributedDataParallel as Ddp

    make = Ddp.__init__

    def making(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("output_device", None)
        make(self, module, None, *(args[1:] if args else ()), **kwargs)

    there: dict[str, Any] = {
        "is_nccl_available": _answering(True),
        "get_backend": _answering("nccl"),
    }
    with (
        patch.object(Ddp, "__init__", making),
        patch.object(Ddp, "_passing_sync_batchnorm_handle", _stay),
        patch.object(torch.nn.SyncBatchNorm, "forward", _sync_batch_norm),
        patch.object(fsdp, "_get_compute_device", _answering(torch.device("cpu"))),
        patch.multiple(dist, **there),
    ):
        yield

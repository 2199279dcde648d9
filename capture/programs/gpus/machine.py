"""Makes torch look like a machine with GPUs, while all tensors stay fake and on the CPU."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from itercast.capture.programs.gpus.asked import Asked, EmulatedGpu
from itercast.capture.programs.gpus.devices import GeneratorOnCpu, stay, tensors_on_gpus
from itercast.capture.programs.gpus.host_memory import host_memory
from itercast.capture.programs.gpus.storages import storages_of_programs
from itercast.capture.programs.log import ProgramLog
from itercast.capture.recorder.autocast import autocast_as_on_cuda
from itercast.capture.recorder.log import ITEM

PAGE_BYTES = 2**21  # by which torch's allocator takes memory from the driver
NCCL = (2, 29, 7)  # of torch 2.13's wheels for CUDA 13


@contextmanager
def gpus_that_are_not_there(
    gpu: EmulatedGpu | Asked, per_node: int, local_rank: int, log: ProgramLog
) -> Iterator[None]:
    """Let programs find ``per_node`` such GPUs in ``torch.cuda`` inside the context.

    So do ``torch.accelerator`` and the parts of ``torch._C`` that a CPU's build lacks. Tensors that
    programs put on a GPU are on the CPU; autocast, foreach optimizers and gradient scalers do as
    they do on GPUs. Memory in use is that of the log's tensors.
    """
    fakes = _cuda(gpu, per_node, local_rank) | _memory(gpu, log)
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, create=True, **fakes))
        for inner in (torch.cuda.random, torch.cuda.memory):  # where programs import them from, too
            own = {name: value for name, value in fakes.items() if hasattr(inner, name)}
            stack.enter_context(patch.multiple(inner, **own))
        accelerator = _accelerator(fakes, local_rank)
        stack.enter_context(patch.multiple(torch.accelerator, create=True, **accelerator))
        stack.enter_context(patch.multiple(torch._C, create=True, **_only_in_cuda_builds()))
        stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(patch.object(torch.cuda.nvtx, "_nvtx", Library()))
        stack.enter_context(patch.object(torch.cuda, "_cudart", Library()))
        stack.enter_context(patch.object(torch.backends.cuda, "is_built", _answering(True)))
        stack.enter_context(patch.object(torch.nn.RNNBase, "flatten_parameters", stay))
        stack.enter_context(_optimizers_as_on_gpus(log))
        for module in (torch, torch.amp, torch.amp.autocast_mode, torch.cuda.amp):
            stack.enter_context(patch.object(module, "autocast", AutocastAsOnGpus))
        stack.enter_context(_collectives_as_on_gpus())
        stack.enter_context(tensors_on_gpus(local_rank, log.gpu_memory))
        stack.enter_context(storages_of_programs(log.gpu_memory))
        stack.enter_context(host_memory(log))
        cpu_count = os.cpu_count  # by which scripts choose how many workers a DataLoader has
        stack.enter_context(patch.object(os, "cpu_count", lambda: gpu.host_cores or cpu_count()))
        stack.enter_context(patch.object(DataLoader, "check_worker_number_rationality", stay))
        yield


SENSORS = (  # that the driver's library reads
    *("utilization", "memory_usage", "device_memory_used", "temperature", "power_draw"),
    "clock_rate",
)
SILENT = (
    *("init", "set_device", "empty_cache", "reset_peak_memory_stats", "ipc_collect"),
    *("reset_max_memory_allocated", "reset_accumulated_memory_stats", "manual_seed"),
    *("manual_seed_all", "set_per_process_memory_fraction", "_lazy_init", "set_rng_state"),
    *("seed", "seed_all", "set_rng_state_all", "_sleep", "memory_snapshot"),
    *("set_sync_debug_mode", "caching_allocator_delete", "caching_allocator_enable"),
    *("reset_max_memory_cached", "reset_accumulated_host_memory_stats"),
    *("reset_peak_host_memory_stats", "change_current_allocator"),
)
OF_MEMORY = ("_record_memory_history", "_dump_snapshot", "_set_allocator_settings")  # do nothing
ALIKE = (  # in torch.cuda and torch.accelerator
    *("is_available", "device_count", "empty_cache", "memory_allocated", "max_memory_allocated"),
    *("memory_reserved", "max_memory_reserved", "memory_stats", "reset_peak_memory_stats"),
    "reset_accumulated_memory_stats",
)


class _Device(nullcontext[Any]):
    """As ``torch.cuda.device``: inside it the process's own GPU stays the current one."""

    @property
    def idx(self) -> int:
        """The number of the device that was given; -1 for none."""
        number: int = torch.cuda._utils._get_device_index(self.enter_result, optional=True)
        return number


def _cuda(gpu: EmulatedGpu | Asked, per_node: int, local_rank: int) -> dict[str, Any]:
    """Functions and values that stand in for those of ``torch.cuda``, by name."""
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": per_node,
        "current_device": local_rank,
        "can_device_access_peer": True,
        "current_blas_handle": 0,
        "caching_allocator_alloc": 0,
        "get_per_process_memory_fraction": 1.0,
        "get_allocator_backend": "native",
        "list_gpu_processes": "",
        "get_sync_debug_mode": 0,
        "memory_summary": "",
        "get_rng_state_all": [],
        **dict.fromkeys(SENSORS, 0),
        **dict.fromkeys(SILENT),
    }
    functions: dict[str, Any] = {name: _answering(value) for name, value in answers.items()}
    return {
        **functions,
        "get_device_name": lambda *args: gpu.name,
        "get_device_capability": lambda *args: tuple(gpu.compute_capability),
        "get_device_properties": lambda *args: Properties(gpu),
        "get_arch_list": lambda: ["sm_{}{}".format(*gpu.compute_capability)],
        "device": _Device,
        "device_of": nullcontext,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "default_generators": tuple(GeneratorOnCpu(f"cuda:{n}") for n in range(per_node)),
    }


def _memory(gpu: EmulatedGpu | Asked, log: ProgramLog) -> dict[str, Any]:
    """Functions of ``torch.cuda`` on memory: bytes of the program's tensors, by name.

    Reserved memory is the same in whole pages of ``PAGE_BYTES``.
    """

    def pages(nbytes: int) -> int:
        return -(-nbytes // PAGE_BYTES) * PAGE_BYTES

    def stats(*args: Any) -> Counter[str]:
        stats = Counter[str]()  # other statistics are 0
        for when, nbytes in (("current", log.live_bytes), ("peak", log.peak_bytes)):
            stats[f"allocated_bytes.all.{when}"] = stats[f"active_bytes.all.{when}"] = nbytes
            stats[f"reserved_bytes.all.{when}"] = pages(nbytes)
        return stats

    def reserved(*args: Any) -> int:
        return pages(log.live_bytes)

    def most_reserved(*args: Any) -> int:
        return pages(log.peak_bytes)

    return {
        **dict.fromkeys(OF_MEMORY, _answering(None)),
        "memory_allocated": lambda *args: log.live_bytes,
        "max_memory_allocated": lambda *args: log.peak_bytes,
        **dict.fromkeys(("memory_reserved", "memory_cached"), reserved),
        **dict.fromkeys(("max_memory_reserved", "max_memory_cached"), most_reserved),
        **dict.fromkeys(("memory_stats", "memory_stats_as_nested_dict"), stats),
        **dict.fromkeys(("host_memory_stats", "host_memory_stats_as_nested_dict"), Counter),
        "_snapshot": lambda *args: {"segments": [], "device_traces": []},
        "MemPool": Pool,
        "use_mem_pool": nullcontext,
        "mem_get_info": lambda *args: (
            max(0, gpu.memory_bytes - pages(log.live_bytes)),
            gpu.memory_bytes,
        ),
    }


def _accelerator(cuda: dict[str, Any], local_rank: int) -> dict[str, Any]:
    """Functions in place of ``torch.accelerator``'s, many of which are ``torch.cuda``'s."""
    index, gpu = _answering(local_rank), torch.device("cuda")
    return {
        **{name: cuda[name] for name in ALIKE},
        "current_accelerator": lambda check_available=False: gpu,
        "current_device_index": index,
        "current_device_idx": index,
        "set_device_index": cuda["set_device"],
        "set_device_idx": cuda["set_device"],
        "device_index": nullcontext,
        "get_memory_info": cuda["mem_get_info"],
    }


def _only_in_cuda_builds() -> dict[str, Any]:
    """Functions of ``torch._C`` that libraries call, by name."""
    return {
        "_get_accelerator": lambda *args: torch.device("cuda"),
        "_nccl_version": lambda: NCCL[0] << 32 | NCCL[1] << 16 | NCCL[2],
        "_nccl_version_suffix": lambda: b"",
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_is_flash_attention_available": lambda: True,
    }


class Library:
    """Stands in for ``torch._C._nvtx`` and CUDA's runtime, which mark parts of a step.

    Each function does nothing and says that it succeeded.
    """

    success = 0

    def __getattr__(self, name: str) -> Library:
        return self

    def __call__(self, *args: Any) -> int:
        return self.success


class Pool:
    """As ``torch.cuda.MemPool``, which a program may let tensors be in; ``id``: of its first."""

    id = (0, 1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args


class Properties:
    """As those of a device in ``torch.cuda``."""

    warp_size = 32
    max_threads_per_block, max_threads_per_multi_processor = 1024, 2048
    regs_per_multiprocessor = 65_536
    shared_memory_per_block = 49_152  # without opting in
    is_integrated = is_multi_gpu_board = pci_bus_id = pci_device_id = pci_domain_id = 0
    gcnArchName = uuid = ""  # torch's name
    name = property(lambda self: self.gpu.name)
    L2_cache_size = property(lambda self: self.gpu.l2_bytes)
    total_memory = property(lambda self: self.gpu.memory_bytes)
    multi_processor_count = property(lambda self: self.gpu.sm_count)
    major = property(lambda self: self.gpu.compute_capability[0])
    minor = property(lambda self: self.gpu.compute_capability[1])

    def __init__(self, gpu: EmulatedGpu | Asked) -> None:
        self.gpu = gpu


def _answering(value: Any) -> Callable[..., Any]:
    """A function that returns ``value`` whatever its arguments are."""
    return lambda *args, **kwargs: value


@contextmanager
def _optimizers_as_on_gpus(log: ProgramLog) -> Iterator[None]:
    """Let optimizers take foreach kernels as on GPUs, and gradient scalers skip no step.

    The host waits for the scaler's check for infinities, unless the optimizer's kernel makes it.
    """
    from torch.amp import grad_scaler
    from torch.optim import optimizer as base
    from torch.utils import _foreach_utils

    def step(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        for found in state["found_inf_per_device"].values():
            log.add(ITEM, (found,), {}, ())
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

    Autocast for "cpu" casts as on GPUs too: ``torch.utils.checkpoint`` finds the tensors on the CPU
    and asks for it.
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
        self.entered.append(autocast_as_on_cuda(self.dtype, self.enabled))
        self.entered[-1].__enter__()
        return self

    def __exit__(self, *exc: Any) -> Any:
        return self.entered.pop().__exit__(*exc)


class Synced(torch.autograd.Function):
    """Sends what the ranks of ``SyncBatchNorm`` tell each other: in forward the means, deviations
    and counts, in backward two sums per channel."""

    @staticmethod
    def forward(ctx: Any, x: Any, layer: Any) -> Any:
        """Gather the statistics of all ranks, and return ``x`` as it is."""
        ctx.layer = layer
        statistics = x.new_empty(2 * layer.num_features + 1, dtype=torch.float32)
        ranks = dist.get_world_size(layer.process_group)
        gathered = statistics.new_empty(ranks * len(statistics))
        dist.all_gather_into_tensor(gathered, statistics, layer.process_group)
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


def _data_parallel(model: Any, *inputs: Any, **options: Any) -> Any:
    """As ``nn.DataParallel`` on one GPU, moving inputs there; refused on several GPUs."""
    if len(model.device_ids) > 1:
        raise ValueError("nn.DataParallel runs several GPUs in one process: DDP can be forecast")
    moved, named = tree_map_only(torch.Tensor, torch.Tensor.cuda, (inputs, options))
    return model.module(*moved, **named)


@contextmanager
def _collectives_as_on_gpus() -> Iterator[None]:
    """Let NCCL seem installed; DDP and FSDP take modules on the CPU as modules on their GPU."""
    from torch.distributed.fsdp import _init_utils as fsdp
    from torch.nn.parallel import DistributedDataParallel as Ddp

    original_init = Ddp.__init__

    def init(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("output_device", None)
        original_init(self, module, None, *(args[1:] if args else ()), **kwargs)

    functions: dict[str, Any] = {
        "is_nccl_available": _answering(True),
        "get_backend": _answering("nccl"),
    }
    with (
        patch.object(Ddp, "__init__", init),
        patch.object(Ddp, "_passing_sync_batchnorm_handle", stay),
        patch.object(torch.nn.SyncBatchNorm, "forward", _sync_batch_norm),
        patch.object(torch.nn.DataParallel, "forward", _data_parallel),
        patch.object(fsdp, "_get_compute_device", _answering(torch.device("cpu"))),
        patch.object(fsdp, "_check_module_states_for_sync_module_states", _answering(None)),
        patch.multiple(dist, **functions),
    ):
        yield

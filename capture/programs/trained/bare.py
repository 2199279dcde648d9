"""Removes wrappers that split a model over GPUs (DDP, FSDP, DeepSpeed), as a plan replaces them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.fully_sharded_data_parallel import FLAT_PARAM
from torch.distributed.tensor import DTensor

# Modules that hold a model, by the names of their classes, most of which are not installed.
WRAPPERS = frozenset(
    (
        *("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"),
        *("OptimizedModule", "DeepSpeedEngine", "_FabricModule", "Float16Module"),
    )
)
LIBRARIES = ("torch.distributed.", "deepspeed.")  # whose hooks gather, shard and send


def is_wrapper(module: torch.nn.Module) -> bool:
    """Whether a module only calls the model that it holds.

    Lightning's modules do so where the loop has replaced their ``forward``, to call a step through
    DDP.
    """
    names = {cls.__name__ for cls in type(module).__mro__}
    replaced = "LightningModule" in names and "forward" in module.__dict__
    return replaced or not names.isdisjoint(WRAPPERS)


def make_bare(model: torch.nn.Module) -> torch.dtype | None:
    """Make a model one of a single process, in place: whole parameters, no hooks of wrappers.

    Parameters that were sharded become ``meta`` tensors, to be made anew: FSDP, DTensor and ZeRO-3
    know their whole shapes. Returns the dtype in which FSDP gathers, if it is another than the
    parameters' own.
    """
    gathered: torch.dtype | None = None
    for module in list(model.modules()):
        if isinstance(module, FullyShardedDataParallel):
            _give_back(module)
            gathered = module.mixed_precision.param_dtype or gathered
        if isinstance(module, FSDPModule):
            gathered = module._get_fsdp_state()._mp_policy.param_dtype or gathered
            module.__class__ = type(module).__bases__[1]  # fully_shard made a class of both
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if str(getattr(hook, "__module__", "")).startswith(LIBRARIES):
                    del hooks[key]
    whole: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, child in module._modules.items():
            if isinstance(child, FullyShardedDataParallel):
                module._modules[name] = child._fsdp_wrapped_module
        for name, p in module._parameters.items():
            if isinstance(p, DTensor) or hasattr(p, "ds_shape"):
                module._parameters[name] = whole.setdefault(id(p), _whole(p))
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DTensor):
                module._buffers[name] = buffer._local_tensor
    return gathered


def _whole(p: Any) -> torch.nn.Parameter:
    """A parameter on ``meta`` of the shape that a shard's whole has."""
    shape = getattr(p, "ds_shape", p.shape)
    whole = torch.empty(shape, dtype=p.dtype, device="meta")
    return torch.nn.Parameter(whole, p.requires_grad)


def _give_back(wrapper: FullyShardedDataParallel) -> None:
    """Give modules inside an FSDP wrapper their own parameters, in place of views of a flat one."""
    handle = wrapper._handle
    if handle is None:
        return
    flat = handle.flat_param
    wrapper._fsdp_wrapped_module._parameters.pop(FLAT_PARAM, None)
    for (name, module, _), shape in zip(flat._param_infos, flat._shapes, strict=True):
        own = torch.empty(shape, dtype=flat.dtype, device="meta")
        module.__dict__.pop(name, None)
        module._parameters[name] = torch.nn.Parameter(own, flat.requires_grad)
    for shared in flat._shared_param_infos:
        first = shared.prim_module._parameters[shared.prim_param_name]
        shared.module.__dict__.pop(shared.param_name, None)
        shared.module._parameters[shared.param_name] = first

"""Mixed precision that casts more than autocast does: experts, or a whole module.

``torch._grouped_mm`` is no op of autocast's lists (torch 2.13, aten/src/ATen/autocast_mode.h), so
that under plain autocast experts stay in fp32. FSDP's mixed precision casts all parameters of a
module and its inputs, once they are gathered, so that all of a step but the loss of logits and the
optimizer is in half precision; Megatron-LM and NeMo hold weights in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec, changed
from itercast.capture.plan import ParallelPlan
from itercast.compose.graph.cross_entropy import loss_in_fp32
from itercast.compose.graph.identity_cache import once_of
from itercast.compose.graph.product_roles import DTYPE_CAST, LINEAR_PRODUCTS
from itercast.compose.graph.rewrite import StepBuilder, fresh_storages, with_tensors
from itercast.microbench.hardware.stack import stack_of_row
from itercast.microbench.ops.matrix.gemm import GROUPED

WIDE = "fp32"
HALF = ("bf16", "fp16")


def wide_experts(capture: StepCapture) -> bool:
    """Casts that mixed precision may add to autocast's: of experts, or of a whole module."""
    experts = (c for c in capture.calls if c.op == GROUPED)
    return half_dtype(capture) != "" and any(c.args[0].dtype == WIDE for c in experts)


def experts_in_half(capture: StepCapture) -> StepCapture:
    """The step with its experts' products in the dtype of its linear layers.

    Weights and inputs in fp32 are cast once. What is computed from half precision alone is in half
    precision, too, as PyTorch promotes dtypes; gradients of what was cast are cast back.
    """
    return _ExpertCasts(capture).step() if wide_experts(capture) else capture


def module_in_half(capture: StepCapture) -> StepCapture:
    """The step of a module in half precision as FSDP2's mixed precision runs it.

    Parameters are those that a rank gathers. The optimizer is in fp32, as the shards are, and so
    is the loss of logits, which training code casts: ``pred.float()`` in
    torchtitan/components/loss.py, ``logits.float()`` in transformers/loss/loss_utils.py.
    Source: torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype).
    """
    made = loss_in_fp32(capture)
    return replace(made, calls=tuple(map(_updated_in_fp32, made.calls)))


def _updated_in_fp32(call: OpCall) -> OpCall:
    """An optimizer's call with its tensors in fp32; any other call unchanged."""
    if call.phase not in ("optimizer", "zero_grad"):
        return call
    wide = (t for t in call.touched if t.dtype in HALF)
    return with_tensors(call, {t: replace(t, dtype=WIDE) for t in wide})


IN_HALF = {"module": module_in_half, "experts": experts_in_half}


def casts(capture: StepCapture, plan: ParallelPlan, stack: str) -> str:
    """What mixed precision casts that autocast does not: a key of ``IN_HALF``, or "" for nothing.

    FSDP casts a whole module (captured in half precision: ``ParallelPlan.autocast``); some software
    casts experts.
    """
    if plan.amp and plan.zero:
        return "module"
    if not (plan.amp and stack_of_row(stack).casts_experts):
        return ""
    has_wide_experts = once_of(capture)("wide experts", partial(wide_experts, capture))
    return "experts" if has_wide_experts else ""


def half_dtype(capture: StepCapture) -> str:
    """The dtype that autocast casts linear layers to; empty where it casts none."""
    casts = {t.storage for c in capture.calls if c.op == DTYPE_CAST for t in c.outputs}
    factors = (c.args[-1] for c in capture.calls if c.op in LINEAR_PRODUCTS)
    return next((t.dtype for t in factors if t.dtype in HALF and t.storage in casts), "")


class _ExpertCasts:
    """Rewrites a step call by call so that experts' products run in half precision."""

    def __init__(self, capture: StepCapture) -> None:
        self.capture, self.dtype = capture, half_dtype(capture)
        self.builder, self.fresh = StepBuilder(capture), fresh_storages(capture)
        self.expert_shapes = {p.shape for p in capture.parameters if len(p.shape) == 3}
        self.copies: dict[int, int] = {}  # storage -> that of its copy in half precision
        # Weights whose inputs were cast: the gradients of these inputs are cast back.
        self.weights_after_cast: set[int] = set()
        self.in_half: set[int] = set()  # storages that are in half precision now

    def step(self) -> StepCapture:
        """The rewritten step."""
        for i, call in enumerate(self.capture.calls):
            is_wide_product = call.op == GROUPED and WIDE in {t.dtype for t in call.args[:2]}
            self.builder.calls += self._product(call) if is_wide_product else [self._promoted(call)]
            self.builder.done(i)
        return self.builder.step()

    def _half(self, t: TensorSpec) -> TensorSpec:
        return replace(t, dtype=self.dtype)

    def _product(self, call: OpCall) -> Sequence[OpCall]:
        """The product in half precision between the casts of its inputs and of its gradient."""
        calls, change = list[OpCall](), dict[TensorSpec, TensorSpec]()
        for t in call.args[:2]:
            if t.dtype == WIDE and t.storage not in self.in_half | self.copies.keys():
                self.copies[t.storage] = next(self.fresh)
                whole = t if t.contiguous else _as_stored(t)
                copy = self._half(replace(whole, storage=self.copies[t.storage]))
                calls.append(replace(call, op=DTYPE_CAST, args=(whole,), outputs=(copy,)))
            change[t] = self._half(changed(t, storage=self.copies.get(t.storage, t.storage)))
        (a, b), result = call.args[:2], call.outputs[0]
        is_backward = call.phase == "backward"
        if not is_backward and a.storage in self.copies:
            self.weights_after_cast.add(b.storage)
        is_weight_gradient = result.shape in self.expert_shapes
        if is_backward and (is_weight_gradient or b.storage in self.weights_after_cast):
            gradient = self._half(replace(result, storage=next(self.fresh)))
            calls.append(replace(with_tensors(call, change), outputs=(gradient,)))
            back = OpCall(op=DTYPE_CAST, args=(gradient,), outputs=(result,), phase=call.phase)
            return [*calls, back]
        self.in_half.add(result.storage)
        return [*calls, with_tensors(call, change | {result: self._half(result)})]

    def _promoted(self, call: OpCall) -> OpCall:
        """A call whose inputs are now in half precision: so are its results, if all inputs are."""
        tensors = call.tensors()
        if self.in_half.isdisjoint(t.storage for t in tensors):
            self.in_half.difference_update(t.storage for t in call.outputs)
            return call
        change = {t: self._half(t) for t in tensors if t.storage in self.in_half}
        has_wide_input = any(t.dtype == WIDE and t.storage not in self.in_half for t in tensors)
        if not has_wide_input and call.op != DTYPE_CAST:
            results = [t for t in call.outputs if t.dtype == WIDE]
            self.in_half.update(t.storage for t in results)
            change |= {t: self._half(t) for t in results}
        return with_tensors(call, change)


def _as_stored(t: TensorSpec) -> TensorSpec:
    """The tensor in the order in which it lies in memory."""
    order = sorted(range(len(t.shape)), key=lambda d: -t.stride[d])
    return replace(t, shape=tuple(t.shape[d] for d in order), stride=())

"""Weights in 4 bits as bitsandbytes has them; its two ops are declared here as there."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from small_scripts import captured, written

IN_4_BITS = """
import torch
from torch.library import register_fake

library = torch.library.Library("bitsandbytes", "FRAGMENT")
library.define("gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, "
               "str quant_type, Tensor? bias=None) -> Tensor")
library.define("dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, "
               "int[] shape, ScalarType dtype) -> Tensor")

library.define("optimizer_update_8bit(Tensor g, Tensor(a0!) p, Tensor(a1!) state) -> ()")

@register_fake("bitsandbytes::optimizer_update_8bit", lib=library)
def _(g, p, state):
    pass

@register_fake("bitsandbytes::gemm_4bit", lib=library)
def _(A, B, shapeB, absmax, blocksize, quant_type, bias=None):
    return torch.empty((*A.shape[:-1], shapeB[0]), dtype=A.dtype, device=A.device)

@register_fake("bitsandbytes::dequantize_4bit", lib=library)
def _(A, absmax, blocksize, quant_type, shape, dtype):
    return torch.empty(shape, dtype=dtype, device=A.device)

class Packed(torch.nn.Parameter):
    def __new__(cls, data, kind="nf4"):
        self = torch.Tensor._make_subclass(cls, data, False)
        self.kind = kind
        return self

    def doubled(self):
        return type(self)(torch.cat([self.data, self.data]), self.kind)

class Sharded(torch.nn.Parameter):  # as nanotron's
    def __new__(cls, tensor):
        self = torch.nn.Parameter.__new__(cls, data=tensor.data.detach(), requires_grad=True)
        self.ranks = [0, 1]
        return self

    def count(self):
        return len(self.ranks)

shard = Sharded(torch.zeros(4, 2, device="cuda"))
assert isinstance(shard, Sharded) and isinstance(shard, torch.nn.Parameter) and shard.is_cuda
assert shard.count() == 2 and shard.requires_grad and shard.is_leaf
holder = torch.nn.Module()
holder.weight = shard
assert [*holder.parameters()][0] is shard

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, scales):
        ctx.save_for_backward(weight, scales)
        return torch.ops.bitsandbytes.gemm_4bit(x, weight, [16, 8], scales, 64, weight.kind)

    @staticmethod
    def backward(ctx, g):
        weight, scales = ctx.saved_tensors
        ops = torch.ops.bitsandbytes
        return g @ ops.dequantize_4bit(weight, scales, 64, "nf4", [16, 8], g.dtype), None, None

replaced = torch.arange(2).cuda()
replaced.data = torch.arange(8).cuda()  # as a parameter's when it is quantised
assert len(replaced.chunk(4)) == 4
weight = Packed(torch.zeros(32, 1, dtype=torch.uint8).cuda()).doubled()
assert isinstance(weight, Packed) and isinstance(weight, torch.nn.Parameter), type(weight)
assert weight.is_cuda and weight.kind == "nf4" and weight.shape == (64, 1), weight.shape
scales, x = torch.zeros(2).cuda(), torch.zeros(3, 4, 8).cuda()
adapter = torch.nn.Linear(8, 8).cuda()
state = torch.zeros(64, dtype=torch.uint8).cuda()

class In8Bits(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        p = adapter.weight
        torch.ops.bitsandbytes.optimizer_update_8bit(p.grad, p, state)

optimizer = In8Bits(adapter.parameters())
for step in range(3):
    y = Product.apply(adapter(x), weight, scales)
    assert y.is_cuda and y.shape == (3, 4, 16)
    y.sum().backward()
    optimizer.step()
"""


def test_weights_in_4_bits_are_made_whole_and_multiplied(tmp_path: Path) -> None:
    """16 x 8 weights in 64 bytes and two scales of 4: read forward and backward, 512 bytes made.

    The product of 12 rows of 8 is one of torch's, forward, and backward the gradient of its rows.
    The update in 8 bits writes the weight and its state.
    """
    program = captured(written(tmp_path, IN_4_BITS), gpus=1)
    calls = program.ranks[0].calls
    passes = [c for c in calls if c.op == "itercast.fused"]
    assert [c.phase for c in passes] == ["forward", "backward", "optimizer"]
    *passes, update = passes
    for call in passes:
        assert [t.nbytes for t in call.args] == [64, 8]
        assert [t.nbytes for t in call.outputs] == [512]
    made = {c.outputs[0].storage for c in passes}
    products = [c for c in calls if c.op == "aten.mm.default" and c.args[1].storage in made]
    shapes = [(c.phase, *(t.shape for t in c.args), c.outputs[0].shape) for c in products]
    assert shapes == [
        ("forward", (12, 8), (8, 16), (12, 16)),
        ("backward", (12, 16), (16, 8), (12, 8)),
    ]
    assert [t.nbytes for t in update.args] == [256, 256, 64]  # gradient, weight, state of a byte
    assert [t.nbytes for t in update.outputs] == [256, 64]
    assert "bitsandbytes" in program.notes[0]


IN_8_BITS = """
import torch
from torch.library import register_fake

library = torch.library.Library("bitsandbytes", "FRAGMENT")
library.define("int8_vectorwise_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)")
library.define("int8_mixed_scaled_mm(Tensor A, Tensor CA, Tensor CB, Tensor SCA, Tensor SCB, "
               "Tensor? outlier_cols=None, Tensor? bias=None) -> (Tensor, Tensor?)")
library.define("int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, "
               "Tensor? bias=None, ScalarType? dtype=None) -> Tensor")

@register_fake("bitsandbytes::int8_vectorwise_quant", lib=library)
def _(A, threshold=0.0):
    codes, scales = A.to(torch.int8), A.new_empty(A.shape[0], dtype=torch.float32)
    many = None if threshold == 0.0 else torch.library.get_ctx().new_dynamic_size()
    return codes, scales, None if many is None else A.new_empty(many, dtype=torch.int64)

@register_fake("bitsandbytes::int8_mixed_scaled_mm", lib=library)
def _(A, CA, CB, SCA, SCB, outlier_cols=None, bias=None):
    raise AssertionError("its result depends on data")

@register_fake("bitsandbytes::int8_scaled_mm", lib=library)
def _(A, B, row_stats, col_stats, bias=None, dtype=None):
    return torch.empty((*A.shape[:-1], B.shape[0]), device=A.device, dtype=dtype or torch.float16)

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, scales):
        ops = torch.ops.bitsandbytes
        codes, sizes, outliers = ops.int8_vectorwise_quant(x, 6.0)
        assert outliers is None
        return ops.int8_mixed_scaled_mm(x, codes, weight, sizes, scales, outliers)[0]

    @staticmethod
    def backward(ctx, g):
        return g[:, :8], None, None

weight, scales = torch.zeros(16, 8, dtype=torch.int8).cuda(), torch.zeros(16).cuda()
adapter, x = torch.nn.Linear(8, 8).cuda(), torch.zeros(4, 8).cuda()
optimizer = torch.optim.SGD(adapter.parameters())
for step in range(3):
    Product.apply(adapter(x), weight, scales).sum().backward()
    optimizer.step()
"""


def test_products_in_8_bits_have_no_outliers(tmp_path: Path) -> None:
    """4 rows of 8 by 16 x 8, as in 16 bits; before it a pass that makes codes and scales."""
    program = captured(written(tmp_path, IN_8_BITS), gpus=1)
    calls = [c for c in program.ranks[0].calls if c.phase == "forward"]
    (cast,) = (c for c in calls if c.op == "itercast.fused")
    assert [t.nbytes for t in cast.outputs] == [32, 16]
    (product,) = (c for c in calls if c.op == "aten.mm.default")
    assert [(t.shape, t.dtype) for t in product.args] == [((4, 8), "fp16"), ((8, 16), "fp16")]
    assert any("8 bits take the time of 16" in note for note in program.notes)


EXTENSION = """
import torch
from torch.utils.cpp_extension import load, load_inline

updates = load("fused_adam", ["adam.cpp", "adam.cu"])  # as DeepSpeed's
others = load_inline("others", "", cuda_sources="...", functions=["scale_"])
import flash_attn_2_cuda  # of a package that is installed without
weight = torch.nn.Parameter(torch.zeros(1024, device="cuda"))

class FusedAdam(torch.optim.Optimizer):
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
            lists = [[p.grad], [p.data], [state["m"]], [state["v"]]]
            seen = torch.zeros(1, dtype=torch.int, device="cuda")
            updates.multi_tensor_adam(65536, seen, lists, 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)

optimizer = FusedAdam([weight], {})
for step in range(3):
    scaled = weight * 2
    others.scale_(scaled.data, 0.5)
    flash_attn_2_cuda.passes(scaled.data[:256])
    scaled.sum().backward()
    optimizer.step()
"""


def test_extensions_in_cuda_are_not_compiled(tmp_path: Path) -> None:
    """An update of 1,024 numbers reads four tensors of 4,096 bytes, as torch's fused one."""
    program = captured(written(tmp_path, EXTENSION), gpus=1)
    assert "flash_attn_2_cuda" not in sys.modules
    calls = program.ranks[0].calls
    (update,) = (c for c in calls if c.op.startswith("aten._fused_adamw_"))
    sizes = [t.nbytes for t in update.tensors()]
    assert sizes.count(4096) >= 4 and update.phase == "optimizer"
    others = [c for c in calls if c.op == "itercast.fused"]
    assert [t.nbytes for c in others for t in c.args] == [4096, 1024]
    assert {c.phase for c in others} == {"forward"}
    assert "kernels in Triton or CUDA" in program.notes[0]


def test_what_is_not_installed_is_told_with_what_a_forecast_needs(tmp_path: Path) -> None:
    with (
        patch.dict(sys.modules, flash_attn=None),
        pytest.raises(ValueError, match=r"its Python is enough: .*SKIP_CUDA_BUILD=TRUE pip"),
    ):
        captured(written(tmp_path, "from flash_attn import flash_attn_func"), gpus=1)

"""What backward keeps of a compiled forward, beside torch's own partitioner and by hand."""

from typing import Any

import pytest
import torch
from test_fusion_order import Norm
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_utils import get_node_storage
from torch.nn import functional as F

from itercast.api import capture
from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.compiled.kept import NEEDED, Flow
from itercast.compose.graph.launch_modes import as_launched, with_engine

TOKENS, WIDTH, HEADS, WORDS = 32, 64, 2, 512


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class Attention(nn.Module):
    """With rotary embeddings; ``joined``: as nanochat's, joined of halves and then normed."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qkvo")
        self.joined = joined
        half = WIDTH // HEADS // 2
        self.register_buffer("cos", torch.ones(TOKENS, 1, half if joined else 2 * half))
        self.register_buffer("sin", torch.ones(TOKENS, 1, half if joined else 2 * half))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = self.cos, self.sin
        if self.joined:
            return norm(torch.cat([a * cos + b * sin, b * cos - a * sin], -1)) * 1.2
        return x * cos + torch.cat([-b, a], -1) * sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(*x.shape[:2], HEADS, -1) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (self.turned(q), self.turned(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(x.shape))


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square())


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in "gu")
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.attention = Attention(joined)
        self.mlp = Squared() if joined else Gated()
        self.norms = nn.ModuleList([nn.Identity() if joined else Norm(WIDTH) for _ in "ab"])
        self.norm = norm if joined else nn.Identity()
        self.scales = nn.Parameter(torch.ones(2)) if joined else None

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        if self.scales is not None:
            x = self.scales[0] * x + self.scales[1] * first
        x = x + self.attention(self.norm(self.norms[0](x)))
        return x + self.mlp(self.norm(self.norms[1](x)))


class Head(nn.Module):
    """Loss of logits in fp32, which ``cap`` bounds."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.project, self.cap = nn.Linear(WIDTH, WORDS, bias=False), cap

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.project(x).float()
        if self.cap:
            logits = self.cap * torch.tanh(logits / self.cap)
        return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


class Model(nn.Module):
    def __init__(self, joined: bool, layers: int, cap: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(joined) for _ in range(layers)])
        self.head = Head(cap)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in self.layers:
            h = layer(h, x)
        return self.head(h, labels)


class Softmax(nn.Module):
    """Attention by softmax, some of whose weights are dropped, behind a norm of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.all = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("hidden", torch.zeros(TOKENS, TOKENS, dtype=torch.bool))
        self.register_buffer("left", torch.ones(TOKENS, TOKENS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.all(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) * 0.1).masked_fill(self.hidden, -1e9)
        return x + (scores.softmax(-1) * self.left) @ v


class Convolutions(nn.Module):
    """Batch norms, and what overwrites its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1, bias=False) for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(2) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None].expand(-1, 2, -1, -1) * 1
        h = F.relu(self.norms[0](self.layers[0](x)), inplace=True)
        h = self.norms[1](self.layers[1](h))
        h += x
        return self.layers[2](F.relu(h, inplace=True))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.zeros(2, TOKENS, dtype=torch.int64)


def given_to(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """A model's inputs: labels only for a loss."""
    return inputs() if isinstance(model, Head | Model) else inputs()[:1]


def kept_by_torch(model: nn.Module) -> list[int]:
    """Bytes of what torch's partitioner saves; no inputs, no numbers of attention's rows."""
    found: dict[Any, int] = {}

    def partition(joint: Any, given: Any, *, num_fwd_outputs: int, **how: Any) -> Any:
        joint_graph_passes(joint)
        how["compiler"] = "inductor"
        made = min_cut_rematerialization_partition(
            joint, given, num_fwd_outputs=num_fwd_outputs, **how
        )
        graph = made[0].graph
        weights = {get_node_storage(n) for n in graph.nodes if n.op == "placeholder"}
        for node in graph.output_node().args[0][num_fwd_outputs:]:
            value, storage = node.meta["val"], get_node_storage(node)
            rows_of_attention = value.shape == (2, HEADS, TOKENS)
            if storage not in weights and not rows_of_attention:
                found[storage] = value.untyped_storage().nbytes()
        return made

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    torch.compile(model.to(torch.bfloat16), backend=backend)(*given_to(model))
    return sorted(found.values())


def kept_by_forecast(model: nn.Module) -> list[int]:
    """Bytes of what forward makes and backward reads."""
    given = {"dtype": "bf16", "optimizer": "none", "loss": "none"}
    step = as_launched(with_engine(capture(lambda: (model, given_to(model)), **given), "compile"))
    made = {t.storage: t for c in step.calls if c.phase == "forward" for t in c.outputs}
    read = {t.storage for c in step.calls if c.phase == "backward" for t in c.tensors()}
    return sorted(t.nbytes for s, t in made.items() if s in read)


def together(sizes: list[int]) -> list[int]:
    """Sizes of tensors of activations, and the sum of smaller ones: numbers for each row."""
    few = 2 * TOKENS * WIDTH
    return [sum(n for n in sizes if n < few), *(n for n in sizes if n >= few)]


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize(("joined", "cap"), [(True, 15.0), (False, 0.0)])
def test_backward_keeps_what_torch_keeps(joined: bool, cap: float, layers: int) -> None:
    """Blocks as nanochat's and Llama's, and a loss of their logits."""
    model = Model(joined, layers, cap)
    assert together(kept_by_forecast(model)) == together(kept_by_torch(model))


@pytest.mark.parametrize("make", [Softmax, Convolutions])
def test_backward_keeps_what_torch_keeps_of_other_layers(make: type[nn.Module]) -> None:
    model = make()
    assert together(kept_by_forecast(model)) == together(kept_by_torch(model))


def test_a_loss_keeps_its_logits_and_two_numbers_a_row() -> None:
    """Of 64 rows of 512 words: bf16 logits, 8 B for each row, a number; no softmax in fp32."""
    assert kept_by_forecast(Head(15.0)) == [4, 64 * 8, 64 * 512 * 2]


def tensor(storage: int, *shape: int, dtype: str = "bf16") -> TensorSpec:
    return TensorSpec(shape=shape, dtype=dtype, storage=storage)


def kept_of(*forward: tuple[str, tuple[Any, ...], TensorSpec], read: list[TensorSpec]) -> set[int]:
    """Storages of forward that backward reads where one fused call of it asks for these tensors."""
    made = [OpCall(op=f"aten.{op}", args=args, outputs=(t,)) for op, args, t in forward]
    grad = OpCall(
        op="aten.addcmul.default", args=tuple(read), outputs=(tensor(91, 8, 8),), phase="backward"
    )
    found = as_launched(with_engine(StepCapture(calls=(*made, grad)), "compile"))
    return {t.storage for c in found.calls if c.phase == "backward" for t in c.tensors()}


def product(made: TensorSpec) -> tuple[str, tuple[Any, ...], TensorSpec]:
    return "mm.default", (tensor(50, 8, 8), tensor(51, 8, 8)), made


def test_a_join_is_kept_and_what_is_pointwise_is_not() -> None:
    """relu(x) is made of x again, cat(relu(x), relu(x)) is not; their squares are not needed."""
    x, y, z, last = tensor(0, 8, 8), tensor(1, 8, 8), tensor(2, 16, 8), tensor(3, 16, 8)
    relu, join = ("relu.default", (x,), y), ("cat.default", ((y, y), 0), z)
    square = ("mul.Tensor", (y, y), last)
    assert kept_of(product(x), relu, square, read=[y]) == {x.storage}
    square = ("mul.Tensor", (z, z), last)
    assert kept_of(product(x), relu, join, square, read=[z]) == {z.storage}


@pytest.mark.parametrize(("dtype", "is_kept"), [("fp32", True), ("bf16", False)])
def test_what_is_four_times_smaller_than_its_inputs_is_kept(dtype: str, is_kept: bool) -> None:
    """A mask of 64 B, of two tensors that are kept: both are 512 B in fp32, 256 B in bf16."""
    x, y = (tensor(n, 8, 8, dtype=dtype) for n in range(2))
    mask, last = tensor(2, 8, 8, dtype="bool"), tensor(3, 8, 8, dtype=dtype)
    made = ("gt.Tensor", (x, y), mask), ("where.self", (mask, x, y), last)
    found = kept_of(product(x), product(y), *made, read=[x, y, mask])
    assert found == {0, 1, 2} if is_kept else {0, 1}


def test_the_least_cut_is_the_one_nearest_to_what_is_needed() -> None:
    """a -3-> b -2-> c -2-> needed, and d -1-> c: of both cuts of 2 the later one, behind c."""
    flow = Flow()
    for start, end, most in (("a", "b", 3), ("b", "c", 2), ("c", NEEDED, 2), ("d", "c", 1)):
        flow.edge(start, end, most)
    assert flow.behind_cut(["a", "d"]) == {NEEDED}
    wider = Flow()
    for start, end, most in (("a", "b", 3), ("b", "c", 2), ("c", NEEDED, 9), ("d", "c", 1)):
        wider.edge(start, end, most)
    assert wider.behind_cut(["a", "d"]) == {"c", NEEDED}

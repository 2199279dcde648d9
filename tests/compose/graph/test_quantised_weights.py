"""QLoRA: what is stored in 4 bits, the kernels that make it whole, messages and memory."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from itercast.capture.cases.external.adapters import Adapters
from itercast.capture.opcall import OpCall, StepCapture
from itercast.compose.capture_model import capture
from itercast.compose.target import find_target, forecast_step
from itercast.microbench.ops import find_family
from itercast.microbench.ops.memory.fused import CALL

LLAMA: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128},
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_hidden_layers": 2, "intermediate_size": 96, "max_position_embeddings": 64},
}
# numbers of a layer's linear layers: queries and output, keys and values, three of the MLP
MATRICES = [64 * 64, 64 * 64, 32 * 64, 32 * 64, 96 * 64, 96 * 64, 96 * 64]


def step(folder: Path, lora: str, **options: Any) -> StepCapture:
    """A step of two samples of 16 tokens in bf16, both layers captured."""
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA))
    return capture(path, batch=2, seq=16, lora=lora, **{"dtype": "bf16", "whole": True, **options})


def kernels(found: StepCapture, phase: str) -> list[OpCall]:
    return [c for c in found.calls if c.op == CALL and c.phase == phase]


def block_bytes(found: StepCapture) -> int:
    return sum(p.nbytes for p in found.parameters if p.layer and p.ready_after < 0)


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4 + 32 / 64), ("nf4-dq", 4.12695)])
def test_four_bits_and_a_scale_per_number(tmp_path: Path, kind: str, bits: float) -> None:
    """nf4: a scale in fp32 per 64 numbers; nf4-dq: in 8 bits, and one in fp32 per 256 of these."""
    whole, small = (step(tmp_path, f"rank=4{more}") for more in ("", f",weights={kind}"))
    numbers = 2 * sum(MATRICES)
    norms = 2 * 2 * 64 * 2
    assert block_bytes(whole) == 2 * numbers + norms
    assert block_bytes(small) - norms == pytest.approx(numbers * bits / 8, rel=0.03)
    kept = {p.name: p.nbytes for p in small.parameters if not p.layer}
    assert kept == {p.name: p.nbytes for p in whole.parameters if not p.layer}  # head, embedding


def test_a_kernel_makes_a_matrix_whole_before_each_product(tmp_path: Path) -> None:
    """Forward all seven of a layer; backward too, but queries, keys, values of the first layer."""
    found = step(tmp_path, "rank=4,weights=nf4")
    forward, backward = kernels(found, "forward"), kernels(found, "backward")
    assert sorted(c.kwargs["numel"] for c in forward) == sorted(2 * MATRICES)
    below = [64 * 64, 32 * 64, 32 * 64]  # nothing under them is trained
    expected = sorted(2 * MATRICES)
    for numel in below:
        expected.remove(numel)
    assert sorted(c.kwargs["numel"] for c in backward) == expected
    for call in forward:
        family, params = find_family(call)
        assert family is not None
        assert params.written_bytes == 2 * params.numel
        assert params.read_bytes == pytest.approx(params.numel * 4.5 / 8, rel=0.02)
    doubly = step(tmp_path, "rank=4,weights=nf4-dq")
    assert len(kernels(doubly, "forward")) == 3 * len(forward)


def test_products_are_the_same(tmp_path: Path) -> None:
    def flops(found: StepCapture) -> float:
        pairs = map(find_family, found.calls)
        return sum(float(f.flops(p)) for f, p in pairs if f is not None and f.name == "gemm")

    assert flops(step(tmp_path, "rank=4,weights=nf4")) == flops(step(tmp_path, "rank=4"))


def test_under_autocast_no_copy_of_the_weights_is_made(tmp_path: Path) -> None:
    """The matrix is made in the dtype of the product; the norms stay in fp32."""
    whole, small = (step(tmp_path, f"rank=4{more}", amp=True) for more in ("", ",weights=nf4"))
    casts = [sum(c.op == "aten._to_copy.default" for c in s.calls) for s in (whole, small)]
    assert casts[0] - casts[1] == 2 * len(MATRICES)
    assert {c.outputs[0].dtype for c in kernels(small, "forward")} == {"bf16"}


def test_shards_gather_what_is_stored(tmp_path: Path) -> None:
    """FSDP's gathers shrink with the weights: bf16 to 4.5 bits, but for head and embedding."""
    target = find_target("h100-sxm-80gb", "dp=2,zero=3", None, "", "")
    whole, small = (
        forecast_step(step(tmp_path, f"rank=4{more}"), target) for more in ("", ",weights=nf4")
    )
    assert small.comm_us < whole.comm_us
    saved = 2 * sum(MATRICES) * (2 - 4.5 / 8) / 2  # half on each rank
    stored = [f.memory_by_bytes["parameters"] for f in (whole, small)]
    assert stored[0] - stored[1] == pytest.approx(saved, rel=0.05)


def test_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    target = find_target("h100-sxm-80gb", "tp=2", None, "", "")
    with pytest.raises(ValueError, match=r"tp=2.*weights in 4 bits"):
        forecast_step(step(tmp_path, "rank=4,weights=nf4"), target)


def test_all_linear_layers_but_the_head_are_adapted(tmp_path: Path) -> None:
    """As peft's all-linear: rank * (inputs + outputs) numbers each, in the asked dtype."""
    found = step(tmp_path, "rank=4,layers=all-linear,dtype=bf16")
    trained = [p for p in found.parameters if p.ready_after >= 0]
    sides = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96)
    assert sum(p.shape[0] * p.shape[1] for p in trained) == 2 * 4 * sides
    assert {p.dtype for p in trained} == {"bf16"}
    both = step(tmp_path, "rank=4,layers=all-linear+q_proj,dtype=bf16")
    assert both.parameters == found.parameters
    some = step(tmp_path, "rank=4,layers=q_proj+down_proj")
    names = {p.name.split(".")[-3] for p in some.parameters if p.ready_after >= 0}
    assert names == {"q_proj", "down_proj"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank=0", "rank is a whole number above 0"),
        ("-4", "rank is a whole number above 0"),
        ("layers=all-linear", "rank is a whole number above 0"),
        ("rank=4,weights=int3", "weights is one of nf4, nf4-dq, got 'int3'"),
        ("rank=4,dtype=fp64", "dtype is one of fp32, bf16, fp16, got 'fp64'"),
        ("rank=4,layer=q_proj", "unknown key of lora 'layer'; known: rank, layers"),
    ],
)
def test_what_lora_does_not_know_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Adapters.parse(text)


def test_layers_that_a_model_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no linear layers named 'c_attn'; it has .*q_proj"):
        step(tmp_path, "rank=4,layers=c_attn")


def test_a_number_is_a_rank() -> None:
    assert Adapters.parse("16") == Adapters.parse(16) == Adapters(rank=16)
    assert Adapters.parse("") is None and Adapters.parse(0) is None

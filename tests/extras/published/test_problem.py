"""Models of published benchmarks: interpreted from text, built from configurations, or plans."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from public_data import PUBLIC, needs_public

from itercast.capture.plan import ParallelPlan
from itercast.extras.imports.base import Hints
from itercast.extras.published.readers import read_source
from itercast.extras.published.sources.models import model_of
from itercast.extras.published.sources.plans import plan_of
from itercast.extras.published.sources.problem import problem
from itercast.extras.published.sources.timm_models import timm_config

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
CONV = f"""{HEAD}
class Model(nn.Module):
    \"\"\"A convolution and a scale.\"\"\"
    def __init__(self, width: int, scale: float = 2.0):
        super(Model, self).__init__()
        self.conv = nn.Conv2d(3, width, kernel_size=(1, 1), bias=False)
        self.scale = scale

    def forward(self, x):
        y = F.elu(self.conv(x) * self.scale)
        return torch.sum(y ** 2, dim=1)[:, 0]

size = 4 * 2

def get_inputs():
    shape = (2, 3, size)
    return [torch.rand(*shape, 5)]

def get_init_inputs():
    return [7]
"""


def body(line: str) -> str:
    """A problem whose forward is this line."""
    return f"""{HEAD}
class Model(nn.Module):
    def forward(self, x):
        {line}
def get_inputs():
    return [torch.rand(2, 3)]
"""


def test_a_problem_computes_what_its_text_says() -> None:
    """The same numbers as the module written out."""
    module, (x,) = problem(CONV)
    assert tuple(x.shape) == (2, 3, 8, 5)
    weight = module.get_parameter("conv.weight")
    expected = torch.nn.functional.elu(torch.einsum("oi,nihw->nohw", weight[:, :, 0, 0], x) * 2)
    assert torch.allclose(module(x), expected.pow(2).sum(1)[:, 0], atol=1e-4)


def test_norms_take_the_statistics_of_their_batch() -> None:
    """Problems are timed without eval()."""
    norm = CONV.replace("nn.Conv2d(3, width, kernel_size=(1, 1), bias=False)", "nn.BatchNorm2d(3)")
    module, (x,) = problem(norm)
    module.eval()
    first = module(x)
    assert torch.allclose(module(x * 10 + 3), first, rtol=1e-2)


@pytest.mark.parametrize(
    "line",
    [
        "return __import__('os').system('true')",
        "return torch.load('x')",
        "return torch.hub.load('a', 'b')",
        "return torch.ops.aten.relu(x)",
        "return nn.Module()",
        "return open('x')",
        "return x.__class__",
        "return x.numpy()",
        "return self._modules",
        "return self.register_buffer",
        "return self.scope",
        "return [y for y in x]",
        "return (lambda: x)()",
        "return 'a' * 10 ** 9",
        "return 9 ** 9 ** 9",
        "return f'{x}'",
        "self.forward = x",
        "self.__class__ = x",
        "x.data = x",
        "while True: x = x",
        "import os",
        "return unknown",
    ],
)
def test_what_is_not_listed_is_refused(line: str) -> None:
    module, inputs = problem(body(line))
    with pytest.raises(ValueError, match="not allowed"):
        module(*inputs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no Model with forward"),
        ("def", "problem is not Python"),
        ("x = [" + "(" * 10_000, "problem is not Python"),
        ("x = open('y')", "not allowed"),
        (body("return x").replace("return [torch.rand", "return [torch.load"), "torch.load"),
    ],
)
def test_a_text_that_is_no_problem_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problem(text)


@needs_public("kernelbench")
def test_every_published_problem_can_be_read() -> None:
    """Each has a module and inputs; on fake tensors, as some inputs take gigabytes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    rows = read_source("kernelbench", PUBLIC / "kernelbench", Hints()).rows["iteration"]
    texts = set(rows["problem_source"])
    assert len(texts) >= 100
    with FakeTensorMode():
        for text in sorted(texts):
            module, inputs = problem(text)
            assert module.forward(*inputs) is not None


PLANS = yaml.safe_load(Path(__file__).with_name("stated_plans.yaml").read_text())


MPT = {"model": "125m", "model_note": "MPT (mpt_causal_lm)", "layers": "12", "d_model": "768"}
MPT |= {"heads": "12", "ffn": "3072", "vocab": "50368"}
LANGUAGE = {
    "125m": 125.311,
    "Qwen3_30B_a3B": 30_530,
    "Qwen3_235B_a22B": 235_090,
    "GPT OSS 120B": 116_830,
    "DeepSeekV3": 671_030,
}
TIMM = {
    "resnet18": 11.69,
    "vit_base_patch16_224": 86.57,
    "beit_base_patch16_224": 86.53,
    "tf_efficientnet_b4_ns": 19.34,
    "mobilenetv2_035": 1.68,
    "resnetv2_50x3_bitm": 217.32,
}


@pytest.mark.parametrize(("name", "millions"), [*LANGUAGE.items(), *TIMM.items()])
def test_a_model_has_as_many_parameters_as_published(name: str, millions: float) -> None:
    """Built for real, without memory; a part that is left out is a doubt."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if name in TIMM:
        config = timm_config(name, 224)
    else:
        sizes = MPT if name == "125m" else {"model": name}
        found = model_of(sizes | {"seq_len_tokens": "2048"})
        config = found.hf_config or ""
        assert ("without" in found.doubt) == (name in ("GPT OSS 120B", "DeepSeekV3"))
    facts = json.loads(config)
    with torch.device("meta"):
        made = transformers.AutoConfig.for_model(**facts)
        model = getattr(transformers, facts["architectures"][0])(made)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=3e-3)


@pytest.mark.parametrize(("given", "text"), PLANS)
def test_plans_are_texts_that_parse(given: dict[str, str], text: str) -> None:
    assert plan_of(given)[0] == text
    assert ParallelPlan.parse(text).world_size == int(given["n_gpus"])


def test_timm_states_its_conditions_in_the_file_name(tmp_path: Path) -> None:
    """fp16 autocast and SGD on one RTX 3090; 57.0 ms; a file with an unknown GPU is counted."""
    head = "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count"
    text = f"{head}\ntinynet_e,8879.06,57.0,512,106,2.04\n"
    (tmp_path / "benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv").write_text(text)
    (tmp_path / "benchmark-train-amp-nhwc-pt112-cu113-abacus.csv").write_text(text)
    found = read_source("iterations", tmp_path, Hints())
    (row,) = found.rows["iteration"].to_dict("records")
    expected: dict[str, Any] = {"case": "tinynet_e", "builder": "timm", "batch": 512}
    expected |= {"image_size": 106, "memory_format": "nhwc", "stack": "torch-1.12+cu113"}
    expected |= {"time_us": 57_000.0, "gpu": "rtx-3090", "dtype": "fp16", "amp": True}
    assert {name: row[name] for name in expected} == expected
    assert found.dropped == {"file of timm whose name states no layout, torch and known gpu": 1}


def test_a_fine_tuned_bert_has_the_sizes_of_its_name() -> None:
    sizes = {"layers": "24", "d_model": "1024", "heads": "16", "ffn": "4096"}
    tuned = {"model": "BERT", "section": "Fine-tuning", "seq_len_tokens": "384"}
    for row in (tuned, {"model": "bert_large_squad", "seq_len_tokens": "384"}):
        found = model_of(row | sizes)
        assert json.loads(found.hf_config)["num_hidden_layers"] == 24
        assert found.attn == "eager"
    assert model_of(tuned).doubt.startswith("taken as BERT-large, the default of the recipe; opt")
    assert "fp32 and TF32 ran BertAdam, a Python loop over parameters" in found.doubt


def test_transformer_xl_is_a_case_on_one_gpu() -> None:
    """Runs of more exchanged nothing: their steps are as long as those of one."""
    row = {"model": "transformerxlbase", "n_gpus": "1"}
    found = model_of(row)
    assert (found.case, found.builder) == ("transformer-xl-base", "case")
    assert (found.optimizer, "not blind" in found.doubt) == ("lamb", True)
    with pytest.raises(ValueError, match="gradients are not exchanged"):
        model_of(row | {"n_gpus": "8"})


def test_a_detector_is_a_case_unless_one_process_alone_was_counted() -> None:
    row = {"model": "SSD", "n_gpus": "8", "set": "v1"}
    assert model_of(row).case == "ssd300"
    assert model_of(row | {"n_gpus": "1", "set": "v0"}).optimizer == "sgd"
    with pytest.raises(ValueError, match="throughput is of one process"):
        model_of(row | {"set": "v0"})


@pytest.mark.parametrize(
    "name", ["resnet50d", "resnet77", "efficientnet_b0_gn", "beit_tall_patch16_224"]
)
def test_other_networks_are_named_as_on_the_hub(name: str) -> None:
    found = json.loads(timm_config(name, 176))
    assert found["architecture"] == name
    assert found["pretrained_cfg"] == {"input_size": [3, 176, 176]}

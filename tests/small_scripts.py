"""Small scripts, and what a step of them launches."""

import math
from pathlib import Path

from itercast.capture.input.batches import TakenBatches
from itercast.capture.programs.gpus.machine import EmulatedGpu
from itercast.capture.programs.program import ProgramCapture
from itercast.capture.programs.script import Script, capture_script
from itercast.compose.programs.scripts import emulated
from itercast.microbench.hardware.spec import load_gpu

H100 = emulated(load_gpu("h100-sxm-80gb"))
ITEM = "aten._local_scalar_dense.default"  # the host reads a number
TRAINING = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def captured(
    path: Path,
    *arguments: str,
    gpu: EmulatedGpu = H100,
    gpus: int = 64,
    steps: int = 3,
    patience_s: float = math.inf,
) -> ProgramCapture:
    script = Script(path=path, arguments=arguments, steps=steps, patience_s=patience_s)
    return capture_script(script, gpu, gpus, 8, TakenBatches())


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path

"""Sets how a step is run on a device: default device and dtype, TF32, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from itercast.capture.base.slow_imports import torch
from itercast.capture.opcall import torch_dtype

ENGINES = ("eager", "graph", "compile", "compile+graph")


@contextmanager
def on_device(device: str, dtype: str) -> Iterator[None]:
    """A context in which tensors are created on the device, in the storage type of the dtype.

    Also turns TF32 products on for dtype tf32, and off for others; this outlasts the context.
    """
    from itercast.capture.recorder.watch import default_dtype

    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    with torch.device(device), default_dtype(torch_dtype(dtype)):
        yield


def captured_in_graph(step: Callable[[], None], device: str, warmup: int) -> Callable[[], None]:
    """Capture a step in one CUDA graph; returns a function that replays the graph.

    Warm-up steps run on a side stream, as PyTorch requires:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
    """
    if device != "cuda":
        raise NotImplementedError("engine 'graph' is not supported on a CPU")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(kept: Callable[[], None] = step) -> None:
        """Replay; ``kept`` keeps the parameters and inputs alive, which the graph does not own."""
        graph.replay()

    return replay

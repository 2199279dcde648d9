"""How a step is run on a device: where tensors go, TF32, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENGINES = ("eager", "graph", "compile")


@contextmanager
def placed(device: str, dtype: str) -> Iterator[None]:
    """Inside, tensors are made on the device and in what the dtype is stored in.

    From here on products use TF32 on a GPU for dtype tf32 and for no other.
    """
    import torch  # lazy: iterations are listed without torch

    from microbench.capture.watch import default_dtype, storage_dtype

    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    with torch.device(device), default_dtype(storage_dtype(dtype)):
        yield


def graphed(step: Callable[[], None], device: str, warmup: int) -> Callable[[], None]:
    """The step captured once in a CUDA graph; what is returned replays it.

    Warm-up runs on a side stream, as torch asks for:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
    """
    import torch  # lazy, as above

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
        """A graph does not own what it reads and writes: ``kept`` holds parameters and inputs."""
        graph.replay()

    return replay

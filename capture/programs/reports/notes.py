"""What a reader should know about how a script ran, in one line each."""

from __future__ import annotations

from collections.abc import Iterator

from itercast.capture.opcall import AS_IN_16_BITS, BY_INTEGERS
from itercast.capture.programs.program import COLLECTIVE, ProgramCapture
from itercast.capture.recorder.log import TF32_OPS

TF32_NAMES = {"conv": "convolutions", "matmul": "matrix products", "rnn": "recurrent layers"}


def script_notes(captured: ProgramCapture) -> Iterator[str]:
    """Yields notes on TF32, integers, async tensor parallelism, and ranks that send nothing."""
    calls = [call for rank in captured.ranks.values() for call in rank.calls]
    networks = [network for rank in captured.ranks.values() for network in rank.networks]
    kinds = {TF32_OPS[c.op] for c in calls if "tf32" in (t.dtype for t in c.tensors())}
    kinds |= {"rnn" for network in networks if network["dtype"] == "tf32"}
    if kinds:
        names = " and ".join(TF32_NAMES[kind] for kind in sorted(kinds))
        yield f"fp32 {names} run in TF32 where the GPU has it, as torch's flags allow"
    if any(c.op in BY_INTEGERS for c in calls):
        yield AS_IN_16_BITS
    if parts := sum("in_parts" in call.kwargs for call in calls):
        beside = "sent in parts beside products, as torch.compile's async tensor parallelism does"
        yield f"{parts} messages are {beside}"
    if captured.world_size > 1 and COLLECTIVE not in (call.op for call in calls):
        silent = f"{captured.world_size} ranks, no message seen: each makes a step of its own"
        yield silent if captured.grouped else f"{silent}; rates are of one process"

"""A captured program: what the ranks that do different work launch in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from itercast.capture.base.cache_folder import packed, unpacked
from itercast.capture.base.files import write_atomic
from itercast.capture.base.garbage import without_garbage_collection
from itercast.capture.base.yaml_text import made_of, typed
from itercast.capture.input.lane import InputLane
from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.recorder.cache import pack, unpack

COLLECTIVE = "itercast.collective"
HOST = "itercast.host"
RECORD, WAIT, HOST_WAIT = "itercast.record", "itercast.wait", "itercast.host_wait"
AGAIN, HOST_COPY, BATCH = "itercast.again", "itercast.host_copy", "itercast.batch"
MARKS = (RECORD, WAIT, HOST_WAIT, AGAIN, HOST_COPY, BATCH)
ON_CPU = -1  # stream of ops on tensors in host memory, which the host itself computes
FIRST_GROUP_STREAM = 1000  # the streams of groups are numbered from here


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCapture:
    """One step of a program over ``world_size`` ranks: the launches of some, by their number.

    Beside op calls the launches are Python of parallel wrappers, ``itercast.host`` with the name of
    an event and its number of tensors, and marks of six kinds, of which a copy takes its link's
    time. A *point* is a number:

        itercast.record      (point,)  all that its stream was given so far is done at this point
        itercast.wait        (point,)  what its stream is given from now on waits for the point
        itercast.host_wait   (point,)  the host waits for the point
        itercast.again       (times,)  what follows, up to the next such mark, is launched so many
                                       times, each on memory of its own (``launch_order``)
        itercast.host_copy   (way, bytes)  its stream copies to the GPU ("h2d") or back ("d2h")
        itercast.batch       ()       the host takes a batch from a DataLoader

    A collective is one call, ``itercast.collective``. If the program goes on beside it, it is on a
    stream of its group's own, between the marks that make it wait for its input and others for it;
    messages to and from a rank have a stream each, since NCCL runs them side by side.

    ``peak_bytes``: the most memory that a rank's tensors take during the step; ``held_bytes``: the
    least, of the rank that takes most. ``samples``: how many DataLoaders give a rank in the step, 0
    without DataLoaders. Then ``rows_given`` counts them by the first axes of the model's inputs; 0
    where not each backward has one forward. ``grouped``: whether the ranks made a process group.
    ``optimizer_steps``: how many steps optimizers make in it; those without a backward between them
    count as one. ``passes``: its backwards and updates, and the lines that call them. ``notes``:
    what was assumed, in sentences. ``training``: the steps that follow, and what is between them.
    """

    world_size: int
    ranks: Mapping[int, StepCapture]
    peak_bytes: Mapping[int, int]
    held_bytes: int = 0
    samples: int = 0
    rows_given: int = 0
    grouped: bool = True
    optimizer_steps: int = 1
    passes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    training: Training | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """An evaluation in an epoch, over another DataLoader: what a rank launches for one batch."""

    batches: int
    program: ProgramCapture
    lane: InputLane | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is known of a script's whole training, as its first rank sees it; unknown numbers are 0.

    ``epoch_steps``: steps like the captured one in a pass over the DataLoader that feeds them;
    ``steps``: in all passes. ``evaluations``: of one epoch. ``followed``: the script was followed
    to the end of the epoch, so that it has no other evaluations; ``saved_bytes``: what it gives
    ``torch.save``.
    """

    epoch_steps: int = 0
    steps: int = 0
    evaluations: tuple[Evaluation, ...] = ()
    followed: bool = False
    saved_bytes: int = 0


def launch_order(calls: Sequence[OpCall]) -> list[int]:
    """Indices of the launches in the order in which they are made: repeated ones several times.

    A mark ``AGAIN`` with a number of times stands before what is repeated, up to the next mark.
    """
    marks = [i for i, call in enumerate(calls) if call.op == AGAIN]
    order = list(range(marks[0] if marks else len(calls)))
    for mark, end in pairwise([*marks, len(calls)]):
        order += [*range(mark + 1, end)] * calls[mark].args[0]
    return order


@without_garbage_collection()
def write_program(program: ProgramCapture, path: Path, lane: InputLane | None = None) -> None:
    """Write a captured program, with the measured times of its DataLoader, as gzip JSON."""
    write_atomic(path, packed(_plain(program, lane)))


def _plain(program: ProgramCapture, lane: InputLane | None) -> dict[str, Any]:
    """A program and its lane as plain values, its evaluations among them."""
    plain = {f.name: pack(getattr(program, f.name)) for f in fields(program)}
    if training := program.training:
        passes = [[x.batches, _plain(x.program, x.lane)] for x in training.evaluations]
        others = {f.name: getattr(training, f.name) for f in fields(training)}
        plain["training"] = {**others, "evaluations": passes}
    return {**plain, "input": asdict(lane) if lane else None}


def read_program(path: Path) -> tuple[ProgramCapture, InputLane | None]:
    """A captured program and its input lane; ValueError for any other file."""
    try:
        return _program_of(unpacked(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"{path}: not a captured program: {exc}") from exc


def _program_of(plain: dict[str, Any]) -> tuple[ProgramCapture, InputLane | None]:
    """The program and the lane that ``_plain`` was given."""
    lane, ranks = plain.pop("input"), plain.pop("ranks").items()
    by_rank = {int(r): typed(StepCapture, unpack(s), f"rank {r}") for r, s in ranks}
    peaks = {int(r): n for r, n in plain.pop("peak_bytes").items()}
    texts = {name: tuple(map(str, plain.pop(name))) for name in ("notes", "passes")}
    if training := plain.pop("training"):
        passes = [(n, *_program_of(one)) for n, one in training.pop("evaluations")]
        evaluations = tuple(Evaluation(batches=n, program=p, lane=x) for n, p, x in passes)
        training = Training(**training, evaluations=evaluations)
    others = {**plain, **texts, "training": training}
    program = ProgramCapture(**others, ranks=by_rank, peak_bytes=peaks)
    return program, made_of(InputLane, lane, "input") if lane else None

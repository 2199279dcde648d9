"""A script's step as numbers of ranks between two that were captured, by hand."""

from dataclasses import replace

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.capture.programs.program import COLLECTIVE, Evaluation, ProgramCapture, Training
from itercast.compose.programs.several import program_between


def program(ranks: int, size: int = 64, group: int = 0, scale: float = 0.0) -> ProgramCapture:
    """Gradients divided by the number of ranks and summed among all, or the first ``group``."""
    gradients = TensorSpec(shape=(size,), dtype="fp32", stride=(1,), storage=0)
    among = {"kind": "all_reduce", "ranks": tuple(range(group or ranks)), "peer": -1, "rank": 0}
    calls = (
        OpCall(op="aten.mul.Tensor", args=(gradients, scale or 1 / ranks), outputs=(gradients,)),
        OpCall(op="aten.div.Tensor", args=(gradients, 3 * ranks), outputs=(gradients,)),
        OpCall(op=COLLECTIVE, args=(gradients,), kwargs={**among, "bytes": 4 * size}),
    )
    step = StepCapture(calls=calls)
    return ProgramCapture(world_size=ranks, ranks={0: step}, peak_bytes={0: 4 * size}, samples=8)


def test_groups_of_all_ranks_and_factors_follow_the_number_of_ranks() -> None:
    assert program_between(program(1), program(64), 6) == program(6)
    assert program_between(program(8, scale=0.5), program(64, scale=0.5), 16) == program(
        16, scale=0.5
    )


def test_steps_that_differ_by_more_say_nothing_of_those_between() -> None:
    """Shards of other sizes, groups within a node, numbers that follow no rule."""
    assert program_between(program(8, size=512), program(64), 16) is None
    assert program_between(program(8, group=4), program(64, group=32), 16) is None
    assert program_between(program(8, scale=0.5), program(64, scale=0.4), 16) is None


def test_an_epoch_is_shared_by_all_ranks_where_their_sampler_shares_it() -> None:
    """1,000 samples by 8, evaluated by 16: 125 and 63 batches of one rank, 32 and 16 of four."""

    def trained(ranks: int, epoch_steps: int, batches: int) -> ProgramCapture:
        evaluation = Evaluation(batches=batches, program=program(ranks))
        training = Training(
            epoch_steps=epoch_steps, steps=3 * epoch_steps, evaluations=(evaluation,)
        )
        return replace(program(ranks), training=training)

    assert program_between(trained(1, 125, 63), trained(8, 16, 8), 4) == trained(4, 32, 16)
    assert program_between(trained(1, 125, 63), trained(8, 125, 63), 4) == trained(4, 125, 63)
    by_steps = [
        replace(trained(*of), training=Training(epoch_steps=of[1], steps=100))
        for of in ((1, 125, 63), (8, 16, 8), (4, 32, 16))
    ]
    assert program_between(*by_steps[:2], 4) == by_steps[2]
    unlike = replace(trained(8, 16, 8), training=Training(epoch_steps=16, steps=48))
    assert program_between(trained(1, 125, 63), unlike, 4) is None

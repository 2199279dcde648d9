"""A user's measured steps: what they change of forecasts, and which are not believed."""

import json
from dataclasses import fields, replace
from math import exp
from pathlib import Path

import pandas as pd
import pytest
import yaml
from typed_commands import typed
from typer.main import get_command
from typer.testing import CliRunner

from itercast import anchors
from itercast.command_line import app
from itercast.compose.machines.factors import NAMES, Factors
from itercast.compose.machines.file import read_machine
from itercast.compose.machines.typical import typical
from itercast.compose.measured_step import MeasuredStep
from itercast.compose.predict import predict, prepare
from itercast.compose.target import Target, forecast_step
from itercast.eval import compare
from itercast.extras.anchors.infer_machine import (
    anchors_of,
    factor_lines,
    infer_machine,
    next_run,
    sensitivity,
)
from itercast.options import Question

GPU = "a100-sxm-80gb"


def measured(plan: str, times: float, batch: int = 64) -> MeasuredStep:
    """A step of a perceptron that takes ``times`` as long as its forecast."""
    step, target = prepare("mlp-l", gpu=GPU, plan=plan, batch=batch, dtype="bf16")
    us = times * forecast_step(step, target).iteration_us
    return MeasuredStep(name="mlp-l", time_us=us, step=step, target=target)


@pytest.fixture(scope="module")
def alone() -> MeasuredStep:
    return measured("", 1.2)


@pytest.fixture(scope="module")
def far() -> MeasuredStep:
    return measured("dp=16", 1.0)


def test_a_step_as_long_as_forecast_changes_no_forecast(far: MeasuredStep) -> None:
    known = infer_machine([far])
    assert known.machine.factors("mlp-l").logs == pytest.approx(typical().factors().logs)
    after = replace(far.target, known=known.machine)
    assert forecast_step(far.step, after).iteration_us == pytest.approx(far.time_us)


def test_exposed_messages_tell_of_links_and_network(alone: MeasuredStep, far: MeasuredStep) -> None:
    """As long as forecast they change no factor, but narrow the network's; longer ones slow it."""
    found = forecast_step(far.step, far.target)
    at, exposed_us = NAMES.index("network"), found.exposed_comm_us
    plain, same = (
        infer_machine([replace(far, exposed_us=us)]).machine for us in (None, exposed_us)
    )
    assert same.factors("mlp-l").logs == pytest.approx(plain.factors("mlp-l").logs, abs=1e-9)
    assert same.covariance[at][at] < plain.covariance[at][at]
    time_us = far.time_us + exposed_us / 2
    slow = infer_machine([replace(far, time_us=time_us, exposed_us=exposed_us * 1.5)]).machine
    assert slow.mean[at] > 3 * abs(slow.mean[NAMES.index("products")])
    with pytest.raises(ValueError, match="only messages count that compute waits for"):
        infer_machine([replace(far, exposed_us=0.99 * far.time_us)])
    assert infer_machine([replace(alone, exposed_us=0.0)]).machine.mean == pytest.approx(
        infer_machine([alone]).machine.mean
    )
    with pytest.raises(ValueError, match="its step sends no messages to wait for"):
        infer_machine([replace(alone, exposed_us=0.1 * alone.time_us)])


def test_memory_of_another_configuration_is_refused(alone: MeasuredStep) -> None:
    peak = forecast_step(alone.step, alone.target).memory_bytes
    same, other = (replace(alone, peak_bytes=x * peak) for x in (1.2, 1.3))
    assert infer_machine([same]).machine == infer_machine([alone]).machine
    with pytest.raises(ValueError, match=r"peak memory of .* another configuration than stated"):
        infer_machine([other])


def test_two_times_of_one_configuration_agree(alone: MeasuredStep, far: MeasuredStep) -> None:
    """Two steps differ by the root of two of what one does: 2.5 times its interval is believed."""
    usual = typical().typical
    limit = exp(2.5 * 2**0.5 * usual.deviates * usual.row)
    near, other = (replace(alone, time_us=x * alone.time_us) for x in (0.99 * limit, 1.01 * limit))
    infer_machine([alone, near, replace(far, time_us=5 * far.time_us)])
    with pytest.raises(
        ValueError, match=rf"one configuration, but take .* up to {limit:.2g} times"
    ):
        infer_machine([other, alone])


def test_a_run_counts_once(alone: MeasuredStep, far: MeasuredStep) -> None:
    """Times of 1.1 and 1.2 are as one of their geometric mean; a known run is told of once."""
    twice = infer_machine([replace(alone, time_us=x * alone.time_us) for x in (1.1, 1.2)])
    once = infer_machine([replace(alone, time_us=1.32**0.5 * alone.time_us)])
    assert twice.machine.covariance == once.machine.covariance
    assert twice.machine.mean == pytest.approx(once.machine.mean)
    assert len(twice.anchors) == 2 and len(once.anchors) == 1
    parts = [replace(far, time_us=x * far.time_us, exposed_us=far.time_us / 10) for x in (1.0, 1.2)]
    share = (0.1 + 0.1 / 1.2) / 2
    mean_us = 1.2**0.5 * far.time_us
    whole = infer_machine([replace(far, time_us=mean_us, exposed_us=share * mean_us)]).machine
    assert infer_machine(parts).machine.mean == pytest.approx(whole.mean)
    with pytest.raises(ValueError, match=r"mlp-l.*: the machine file was told of this run already"):
        infer_machine([far, alone], once)


def on(target: Target, machine: Factors) -> Target:
    """The target on a machine whose factors are known for sure."""
    mean = (*machine.logs,)
    return replace(target, known=replace(typical(), mean=mean), model="")


def test_a_network_factor_does_not_move_a_forecast_of_one_gpu(
    alone: MeasuredStep, far: MeasuredStep
) -> None:
    slow = Factors(network=3.0)
    for one, same in ((alone, True), (far, False)):
        plain, other = (on(one.target, x) for x in (Factors(), slow))
        us = [forecast_step(one.step, target).iteration_us for target in (plain, other)]
        assert (us[0] == us[1]) == same


def test_a_step_of_one_gpu_tells_of_kernels_and_host_alone(alone: MeasuredStep) -> None:
    j = dict(zip(NAMES, sensitivity(alone.forecast, alone.target), strict=True))
    assert j["links"] == j["network"] == 0
    assert sum(j.values()) == pytest.approx(1, abs=0.05)
    machine = infer_machine([alone]).machine
    lines = factor_lines(machine, GPU)
    longer = machine.interval("host")[0]  # of a step that took 1.2 times as long as forecast
    assert 1 < longer < 1.2
    assert any(f"the host: {longer:.2f} (" in one and "times as long as" in one for one in lines)
    assert "messages between nodes: unknown" in lines
    assert "messages within a node: unknown" in lines


def test_a_slow_machine_s_forecasts_are_longer_and_surer(alone: MeasuredStep) -> None:
    before = forecast_step(alone.step, alone.target)
    after = forecast_step(alone.step, replace(alone.target, known=infer_machine([alone]).machine))
    assert before.iteration_us < after.iteration_us <= 1.01 * alone.time_us

    def wide(one: object) -> float:
        return one.iteration_us_p90 / one.iteration_us_p10  # type: ignore[attr-defined, no-any-return]

    assert wide(after) < wide(before)


@pytest.mark.parametrize(
    ("plan", "times", "words"),
    [
        ("", 1e-3, "time in seconds, not milliseconds"),
        ("", 1e3, "time in microseconds, not milliseconds"),
        ("accumulate=32", 1 / 32, "the time of one micro-batch, not of the step"),
        ("dp=32", 1 / 32, "a batch of all replicas, not of each"),
    ],
)
def test_an_absurd_step_is_refused_with_the_likeliest_misreading(
    plan: str, times: float, words: str
) -> None:
    with pytest.raises(ValueError, match=f"another configuration than stated.*{words}"):
        anchors_of(measured(plan, times, batch=1024))


def test_a_rate_beyond_the_peak_is_called_so(alone: MeasuredStep) -> None:
    """A time of MFU / 5 of the forecast is 500 % of the peak."""
    forecast = forecast_step(alone.step, alone.target)
    fast = replace(alone, time_us=forecast.iteration_us * forecast.mfu_frac / 5)
    with pytest.raises(ValueError, match=r" times the forecast and 500 % of the GPU's peak rate,"):
        anchors_of(fast)


def test_a_cheaper_run_is_advised(far: MeasuredStep) -> None:
    assert next_run(far).startswith("measure next: plan ")


def test_what_was_measured_is_not_advised_again(far: MeasuredStep, tmp_path: Path) -> None:
    """Each advice is followed until none is left; a machine file keeps what was measured."""
    known, advised = infer_machine([far]), list[str]()
    while words := next_run(replace(far, target=replace(far.target, known=known.machine))):
        advised.append(words.split("measure next: ")[1].split(";")[0].removeprefix("plan "))
        assert len(set(advised)) == len(advised) <= 3, advised
        plan = "" if advised[-1] == "one GPU" else advised[-1]
        known = infer_machine([measured(plan, 1.0)], known)
        path = tmp_path / "machine.yaml"
        path.write_text(known.text())
        known = read_machine(path)
    assert advised


def test_advice_leaves_out_plans_that_need_more_replicas() -> None:
    """hsdp=8 needs zero, which one replica has not: of 32 replicas a node or two are advised."""
    one = measured("dp=32,hsdp=8,zero=3,node=dgx-a100", 1.0)
    assert "hsdp=8" in next_run(one)


def test_a_machine_file_is_written_read_and_used(tmp_path: Path) -> None:
    entry = {"case": "mlp-l", "gpu": GPU, "batch": 64, "dtype": "bf16"}
    steps, machine = tmp_path / "steps.yaml", tmp_path / "machine.yaml"
    ms = measured("", 1.2).time_us / 1e3
    gb = forecast_step(*prepare("mlp-l", gpu=GPU, batch=64, dtype="bf16")).memory_bytes / 1e9
    steps.write_text(yaml.safe_dump([{**entry, "step_ms": ms, "peak_memory_gb": gb}]))
    run = typed("calibrate", str(steps), "--iterations", str(machine))
    assert "messages between nodes: unknown" in run.output
    known = read_machine(machine)
    assert known.gpu == GPU
    assert known.machine.models == ("mlp-l",)
    asked = ["predict", "mlp-l", "--gpu", GPU, "--batch", "64", "--dtype", "bf16", "--json"]
    by_option = (("--machine", machine), ("--anchor", steps))
    runs = [CliRunner().invoke(app, [*asked, option, str(file)]) for option, file in by_option]
    one, other = (json.loads(run.output.splitlines()[-1]) for run in runs)
    for name in ("iteration_us", "iteration_us_p90", "machine"):
        assert one[name] == other[name]
    assert one["iteration_us"] > ms * 1e3 / 1.2  # slower than on a typical machine


def test_a_measured_step_states_each_option_of_predict_by_its_name(tmp_path: Path) -> None:
    """``--channels-last --compile`` in YAML, as on the command line."""
    path = tmp_path / "steps.yaml"
    path.write_text("- {case: mlp-l, gpu: a10, channels-last: true, compile: true, step_ms: 9}")
    (one,) = anchors.measured_steps(path, Question)
    assert one.step.engine == "compile"
    command = get_command(app).commands["predict"]  # type: ignore[attr-defined]
    options = {opt for param in command.params for opt in param.opts}
    assert {f"--{f.name.replace('_', '-')}" for f in fields(Question)} - {"--case"} <= options


def test_what_the_page_of_machines_shows_is_what_commands_print(tmp_path: Path) -> None:
    """Its steps, what they tell, and the forecasts for 1,024 GPUs with and without them."""
    page = (Path(__file__).parents[3] / "docs/machines.md").read_text()
    steps, machine = tmp_path / "steps.yaml", tmp_path / "machine.yaml"
    steps.write_text(page.split('```yaml title="steps.yaml"\n')[1].split("```")[0])
    run = CliRunner().invoke(app, ["calibrate", str(steps), "--iterations", str(machine)])
    assert "\n".join(run.stdout.splitlines()[: len(NAMES)]) in page
    shown = {
        "forecasts {} ms (80 % interval: {} to {})": read_machine(machine),
        "it is {} ms ({} to {})": None,
    }
    for words, known in shown.items():
        plan = "dp=1024,amp,node=dgx-a100"
        found = predict("gpt2-small", gpu=GPU, plan=plan, batch=16, machine=known)
        times = found.iteration_us, found.iteration_us_p10, found.iteration_us_p90
        assert words.format(*(round(us / 1e3) for us in times)) in page


def test_rows_of_two_models_are_of_two_runs() -> None:
    """A perceptron that takes 3 times as long as another one of the same batch is believed."""
    cases = ["mlp-s", "mlp-l"]
    how = {"gpu": GPU, "batch": 8192, "optimizer": "adamw", "dtype": "fp32"}
    rows = pd.DataFrame({"family": "iteration", "case": cases, **how})
    steps = compare.measured_steps(rows.assign(time_us=1.0), None)
    times = [1.2 * forecast_step(one.step, one.target).iteration_us for one in steps]
    assert times[1] > 3 * times[0]
    known = infer_machine(compare.measured_steps(rows.assign(time_us=times), None))
    assert sorted(known.machine.models) == sorted(cases)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {case: mlp-l, gpu: a100-sxm-80gb}", "one of step_ms"),
        ("- {case: mlp-l, step_ms: -1}", "one of step_ms"),
        ("- {case: mlp-l, tokens_per_s: -1}", "one of step_ms"),
        ("- {case: mlp-l, mfu_pct: 500}", "mfu_pct is of the GPU's peak, 100 at most, got .*500"),
        ("- {case: mlp-l, gpu: a100-sxm-80gb, tokens_per_s: 3}", "has none of tokens_per_s; state"),
        ("- {case: mlp-l, gpu: a100-sxm-80gb, trace: gone.json}", "gone.json"),
        ("- {case: mlp-l, stepms: 3}", r"step 1: unknown \['stepms'\]; known: options of predict"),
        ("- {case: mlp-l, step_ms: 3, peak_memory_gb: x}", "numbers from 0"),
        ("- {case: mlp-l, gpu: a100-sxm-80gb, step_ms: 3, exposed_comm_ms: 3}", "less than the"),
        ("- 3", "3; known: options of predict"),
        ("- {case: mlp-l, gpu: a100-sxm-80gb, step_ms: 1e9}", r"1e\+09 ms is .* are believed"),
        (
            "- {case: mlp-l, gpu: a100-sxm-80gb, step_ms: fast}",
            "one of step_ms.* a positive number",
        ),
        ("[]", "steps.yaml': no measured steps in it"),
        ("a: [", "not a readable anchor file"),
    ],
)
def test_a_wrong_anchor_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "steps.yaml"
    path.write_text(text)
    from itercast.anchors import known_machine
    from itercast.options import Question

    with pytest.raises(ValueError, match=words):
        known_machine(None, path, Question)


def test_a_trace_tells_the_time_of_its_steps(tmp_path: Path) -> None:
    """Marks of 30, 50 and 40 ms: 40; a trace without marks is refused."""
    trace, steps = tmp_path / "trace.json", tmp_path / "steps.yaml"
    marks = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": at, "dur": dur}
        | {"pid": 1, "tid": 1}
        for n, at, dur in ((3, 0, 30e3), (4, 30e3, 50e3), (5, 80e3, 40e3))
    ]
    entry = {"case": "mlp-l", "gpu": GPU, "batch": 64, "dtype": "bf16", "trace": str(trace)}
    steps.write_text(yaml.safe_dump([entry]))
    from itercast.anchors import measured_steps
    from itercast.options import Question

    trace.write_text(json.dumps({"traceEvents": marks}))
    (one,) = measured_steps(steps, Question)
    assert one.time_us == 40e3
    trace.write_text(json.dumps({"traceEvents": marks[:0]}))
    with pytest.raises(ValueError, match="trace"):
        measured_steps(steps, Question)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("mean", [0.0], "are of 5 numbers"),
        ("covariance", [[-1.0 * (a == b) for a in range(5)] for b in range(5)], "negative"),
        ("gpus", "x", "keys are"),
        ("typical", {"products": 0.1, "ranks": 0.2}, "makes files of older versions anew"),
    ],
)
def test_a_wrong_machine_file_is_refused(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    from itercast.compose.machines.file import KnownMachine

    facts = yaml.safe_load(KnownMachine(gpu=GPU, machine=typical()).text())
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump({**facts, key: value}))
    with pytest.raises(ValueError, match=words):
        read_machine(path)

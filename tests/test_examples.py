"""Every script in examples/ runs as it stands, and prints what it promises."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTS = {
    "forecast_own_model": "samples/s",
    "price_ops": "of the peak",
}


def test_every_example_is_run() -> None:
    """``train_gpt`` needs GPUs; ``tests/itercast/test_run.py`` forecasts it."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTS, "train_gpt"}


@pytest.mark.parametrize("name", sorted(PRINTS))
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``python examples/NAME.py``, in a folder of its own so that no local bundle is found."""
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert PRINTS[name] in capsys.readouterr().out

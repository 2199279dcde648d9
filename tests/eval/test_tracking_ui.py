"""The MLflow UI in a real browser, as ``make ui`` starts it: what is seen without a click."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from itercast.eval.tracking import store, views
from itercast.eval.tracking.logs import iterations_experiment

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PATIENCE_S = 60  # given to a loaded machine; a free one answers within 15
FLAGS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
FLAGS += " disable-component-update disable-sync window-size=1440,1000"
LEARNERS = {"blend": 4.2, "nearest": 9.9, "roofline": 40.0}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here"),
]


@pytest.fixture(scope="module")
def address(empty_mlflow_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of ``itercast ui`` on a store with two families and three learners."""
    folder = tmp_path_factory.mktemp("ui")
    (folder / "mlflow.db").write_bytes(empty_mlflow_store.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        fill()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
    command = [sys.executable, "-m", "itercast", "ui", "--port", str(port)]
    root = str(Path(__file__).parents[2])
    environment |= {"PYTHONPATH": root}
    server = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE)
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/health"), lambda: "no answer")
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait()


def fill() -> None:
    """Log two families and three learners as a training does, the best last."""
    from mlflow.entities import Metric

    client = store.connect()
    iterations_experiment(client)
    note = store.note(
        "ops",
        device="toy",
        training="t",
        answers="blend in 2 of 2 families",
        table="",
        iterations="1",
    )
    place = store.experiment(client, "ops/toy", views.OPS, note)
    for family in ("norm", "gemm"):
        for rank, (name, error) in reversed(list(enumerate(LEARNERS.items(), start=1))):
            tags = {"family": family, "learner": name, "training": "t", "runner_up": "next 9 %"}
            now = store.now_ms()
            run = client.create_run(place, now, tags, run_name=f"{family} · {name}")
            shown = {"rank": rank, "median_ape_pct": error, "p90_ape_pct": 2 * error, "rows": 99}
            metrics = [Metric(key, float(value), now, 0) for key, value in shown.items()]
            client.log_batch(run.info.run_id, metrics=metrics)
            client.set_terminated(run.info.run_id)


def answers(url: str) -> bool:
    """Whether a page answers."""
    try:
        urllib.request.urlopen(url, timeout=5).read()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless browser with an empty profile, which records all requests of its pages."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in FLAGS.split():
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def until(true: Callable[[], bool], found: Callable[[], object]) -> None:
    """Wait until something is true; fails with what was found instead."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, found()
        time.sleep(0.3)


def shown(browser: Any, url: str, *words: str) -> str:
    """Open an address and return the page's text once it has these words."""
    browser.get(url)

    def text() -> str:
        return str(browser.execute_script("return document.body.innerText"))

    until(lambda: all(word in text() for word in words), text)
    return text()


def listed(browser: Any) -> list[str]:
    """Names of the runs in the list, from the top; rows may stand in another order on the page."""
    rows = "document.querySelectorAll('.ag-pinned-left-cols-container .ag-row')"
    texts = f"return [...{rows}].map(r => [Number(r.getAttribute('row-index')), r.innerText])"
    lines = ((number, text.splitlines()) for number, text in browser.execute_script(texts))
    return [next((t for t in some if " · " in t), "") for _, some in sorted(lines)]


def requested(browser: Any) -> set[str]:
    """Hosts that pages asked since the last call; those inside the browser left out."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    return {u.split("/")[2] for u in urls if u.startswith(("http:", "https:", "ws:", "wss:"))}


def test_the_start_page_answers_without_a_click(browser: Any, address: str) -> None:
    """The best learner of each family with its numbers; no assistant; no request elsewhere."""
    text = shown(browser, address, "gemm · blend", "norm · blend", "median_ape_pct", "4.2")
    assert "Which learner forecasts which op family best on toy?" in text
    assert "gemm · nearest" not in text  # the second best is the other view's
    for column in ("family", "learner", "runner_up", "p90_ape_pct", "next 9 %", "8.4"):
        assert column in text, column
    assert "Assistant" not in text and "Traces" in text  # training mode: runs first
    assert requested(browser) == {address.split("/")[2]}


def test_an_experiment_opened_by_its_number_shows_the_view(browser: Any, address: str) -> None:
    shown(browser, f"{address}#/experiments/2", "gemm · blend", "median_ape_pct", "4.2")


def test_all_learners_stand_side_by_side_in_their_view(browser: Any, address: str) -> None:
    """In the order of families and errors, from the top of the list."""
    names = [f"{family} · {name}" for family in ("gemm", "norm") for name in LEARNERS]
    browser.get(f"{address}#/experiments/2/runs?viewStateShareKey=all-learners")
    until(lambda: listed(browser) == names, lambda: listed(browser))


def test_errors_are_drawn_as_bars(browser: Any, address: str) -> None:
    url = f"{address}#/experiments/2/runs?viewStateShareKey=all-learners&compareRunsMode=CHART"
    shown(browser, url, "Errors", "median_ape_pct", "p90_ape_pct")
    bars = "return document.querySelectorAll('.bars .point').length"
    until(lambda: browser.execute_script(bars) >= 2 * len(LEARNERS), lambda: "no bars")


def test_the_server_has_no_assistant(address: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{address}ajax-api/3.0/mlflow/assistant/config")

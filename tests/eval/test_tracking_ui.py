"""The MLflow UI in a real browser, as ``make ui`` starts it: what is seen without a click."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from itercast.eval.tracking import store
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
    """Log two families and three learners as a training does, and an older training of one."""
    from mlflow.entities import Metric

    client = store.connect()
    iterations_experiment(client)
    place = store.experiment(
        client, "ops/toy", store.note("ops", device="toy", training="t", iterations="1")
    )
    for family, newest in (("norm", False), ("norm", True), ("gemm", True)):
        for rank, (name, error) in enumerate(LEARNERS.items(), start=1):
            tags = {"family": family, "learner": name, "training": "t"}
            tags |= {"newest": "yes"} if newest else {}
            tags |= {"prices": "yes"} if name == "blend" else {}
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
    """The best learner of each family once, with its runner-up; no request elsewhere."""
    text = shown(browser, address, "gemm", "norm", "nearest 9.9 %")
    assert text.count("norm") == text.count("gemm") == 1
    assert text.count("4.2 %") == 2 and "roofline" not in text  # the third best is not named
    assert requested(browser) == {address.split("/")[2]}


def test_addresses_of_mlflow_lead_to_its_pages(browser: Any, address: str) -> None:
    shown(browser, f"{address}#/experiments/2/runs", "gemm · blend", "norm · nearest")

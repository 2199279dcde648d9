"""The page with sliders in a real browser: forecasts follow the sliders, on a desk and a phone."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from browser import console_errors, requests, serious_findings, shown_as
from servers import answering, free_port, until

from itercast.extras.explore.server import Handler

ASKED = {"case": "gpt-s", "gpu": "h100-sxm-80gb", "batch": "8", "plan": "dp=8,amp", "dtype": "bf16"}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of ``itercast explore``."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "itercast", "explore", "--port", str(port)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    try:
        answering(f"http://127.0.0.1:{port}/")
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait()


def asked(address: str, host: str = "", **more: str) -> tuple[int, dict[str, Any]]:
    """Status and answer of a forecast."""
    request = urllib.request.Request(f"{address}forecast?{urlencode({**ASKED, **more})}")
    if host:
        request.add_header("Host", host)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as exc:
        text = exc.read().decode()
        return exc.code, json.loads(text) if text.startswith("{") else {"error": text}


def test_the_answer_is_that_of_predict(address: str) -> None:
    from itercast.api import predict

    found = predict("gpt-s", gpu="h100-sxm-80gb", plan="dp=8,amp", batch=8, dtype="bf16")
    status, answer = asked(address)
    assert status == 200 and answer["iteration_us"] == pytest.approx(found.iteration_us, rel=1e-12)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"batch": "many"}, "invalid literal"),
        ({"batch": "0"}, "allowed are 1 to"),
        ({"gpu": "/etc/passwd"}, "none of `itercast list gpus`"),
        ({"case": "os:getcwd"}, "none of `itercast list cases`"),
        ({"plan": "dp=8,node=/etc/passwd"}, "takes no files"),
        ({"plan": "dp=8,dp"}, "plan"),
    ],
)
def test_what_cannot_be_asked_is_said(address: str, more: dict[str, str], said: str) -> None:
    status, answer = asked(address, **more)
    assert status == 400 and said in answer["error"]


def test_a_page_that_asks_anew_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """Each move of a slider closes the connection of the forecast before."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    ours, theirs = socket.socketpair()
    with server, theirs:
        ours.sendall(b"GET /names HTTP/1.0\r\nHost: localhost\r\n\r\n")
        ours.close()
        server.process_request_thread(theirs, ("", 0))
    assert capfd.readouterr().err == ""


def test_pages_of_other_hosts_are_refused(address: str) -> None:
    assert asked(address, host="example.org") == (403, {"error": "only for this machine"})


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_sliders_are_moved_by_keys(driver: Any, address: str, width: int, dark: bool) -> None:
    """Eight GPUs, then sixteen; a plan of one's own that is wrong is said."""
    shown_as(driver, width=width, dark=dark)
    driver.get(address)

    def text(part: str = "said") -> str:
        return str(driver.execute_script(f"return document.getElementById('{part}').innerText"))

    until(lambda: "gpt2-small on h100-sxm-80gb, dp=8,amp" in text(), text)
    before = text("tiles")
    assert "iteration" in before and "model FLOPs utilisation" in before
    driver.find_element("name", "gpus").send_keys("\ue014")  # the right arrow key
    until(lambda: "dp=16,amp" in text(), text)
    assert text("tiles") != before
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert serious_findings(driver) == []
    assert console_errors(driver) == []
    assert all(url.startswith(address) for url in requests(driver))
    driver.execute_script(
        "const f = document.getElementById('asked'); f.elements.way.value = 'own';"
        "f.elements.plan.value = 'dp=8,what'; f.dispatchEvent(new Event('input'))"
    )
    until(lambda: "what" in text() and text() != "Forecasting ...", text)
    assert driver.execute_script("return document.getElementById('said').className") == "bad"
    (refused,) = console_errors(driver)
    assert "400 (Bad Request)" in refused

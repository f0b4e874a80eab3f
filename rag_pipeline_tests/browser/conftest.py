"""Headless Chromium, and a `dagster dev` of its own on a free loopback port."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rag_pipeline.index import lite_server
from rag_pipeline_tests.conftest import PROJECT, write

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1500,1300",
)  # fmt: skip
PATIENCE_S = 60.0
RUN_LIMIT_S = 240.0


class Pages:
    """A browser on one web server."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, path: str, *, expect: str) -> str:
        """Open a page, wait until it shows a text, and give all of its text."""
        self.driver.get(self.url + path)
        return self.wait_for(expect)

    def wait_for(self, expect: str) -> str:
        """Wait until the page shows a text; gives all of its text."""
        deadline = time.monotonic() + PATIENCE_S
        while expect not in (text := self.text()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{expect!r} did not appear on {self.driver.current_url}, which shows:\n{text}")
            time.sleep(0.3)
        return text

    def text(self) -> str:
        """All text that is shown."""
        return str(self.driver.execute_script("return document.body.innerText"))

    def click(self, text: str) -> None:
        """Click the first element with exactly this text."""
        self.driver.find_element("xpath", f"//*[normalize-space(text())={text!r}]").click()

    def script(self, code: str) -> Any:
        """What a script gives."""
        return self.driver.execute_script(code)

    def shoot(self, name: str) -> None:
        """Keep a picture of the page, when the environment says where."""
        if folder := os.environ.get("SCREENSHOTS"):
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))

    def errors(self) -> list[str]:
        """Errors on the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    """Headless Chromium; without it the test is skipped."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    chromedriver = shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.skip("Chromium and its driver are not installed (Debian: apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield browser
    browser.quit()


class Dagster:
    """A running `dagster dev` and its GraphQL interface."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.process = process

    def ask(self, query: str, **variables: object) -> dict[str, Any]:
        """One GraphQL question."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
        return data

    def launch(self, job: str) -> str:
        """Start a job; gives its run id."""
        selector = {
            "repositoryLocationName": "rag_pipeline", "repositoryName": "__repository__", "jobName": job,
        }  # fmt: skip
        answer = self.ask(
            "mutation($p: ExecutionParams!) { launchRun(executionParams: $p) { __typename"
            " ... on LaunchRunSuccess { run { runId } } } }",
            p={"selector": selector, "runConfigData": {}},
        )["launchRun"]
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return str(answer["run"]["runId"])

    def end_of(self, run: str) -> str:
        """Wait for a run to end; gives its status."""
        deadline = time.monotonic() + RUN_LIMIT_S
        while time.monotonic() < deadline:
            answer = self.ask("query($r: ID!) { runOrError(runId: $r) { ... on Run { status } } }", r=run)
            if (status := str(answer["runOrError"]["status"])) in ("SUCCESS", "FAILURE", "CANCELED"):
                return status
            time.sleep(1.0)
        raise AssertionError(f"run {run} is still {status} after {RUN_LIMIT_S} s")

    def run_number(self, number: int) -> str:
        """Id of the first, second, … run; waits for it to be started."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = self.ask("{ runsOrError { ... on Runs { results { runId } } } }")["runsOrError"]["results"]
            if len(found) >= number:
                return str(found[-number]["runId"])
            time.sleep(0.5)
        raise AssertionError(f"run number {number} was not started within {PATIENCE_S} s")


@contextmanager
def dagster_dev(
    home: Path, *arguments: str, knowledge: Path, state: Path, model: Path, **settings: str
) -> Iterator[Dagster]:
    """Run ``dagster dev`` in the project's folder over other knowledge; it is stopped by its process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    write(home / "dagster.yaml", "telemetry:\n  enabled: false\nnux:\n  enabled: false\n")
    environment = {
        **os.environ,
        "DAGSTER_HOME": str(home),
        "RAG_STATE_DIR": str(state),
        "RAG_KNOWLEDGE__ROOTS": str(knowledge),
        "RAG_EMBEDDING__MODEL": str(model),
        "RAG_CHUNKING__SOFT_TOKENS": "80",
        "RAG_CHUNKING__HARD_TOKENS": "120",
        "RAG_RETRIEVAL__MILVUS__LITE_IDLE_S": "30",
        **settings,
    }
    with (home / "dev.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dagster", "dev", *arguments, "-h", "127.0.0.1", "-p", str(port)],
            cwd=PROJECT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process, home / "dev.log")
        yield Dagster(url, process)
    finally:
        _stop(process)
        lite_server.stop(state / "milvus")


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/server_info", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"dagster dev did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    # Started with SIGINT ignored (a shell's background job), `dagster dev` ignores SIGTERM too: so kill what is left.
    try:
        family = psutil.Process(process.pid)
        members = [*family.children(recursive=True), family]
    except psutil.NoSuchProcess:
        return
    process.terminate()
    _, alive = psutil.wait_procs(members, timeout=20)
    for member in alive:
        member.kill()
    process.wait(timeout=10)

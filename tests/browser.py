"""A Chromium without a window, driven by chromedriver over plain HTTP (W3C WebDriver)."""
from __future__ import annotations

import base64
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Iterator

import httpx

from tests.saved import wait_until

MISSING = next((f"there is no {name}" for name in ("chromedriver", "chromium") if shutil.which(name) is None), "")
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
             "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")


class Browser:
    """One window."""

    def __init__(self, client: httpx.Client, path: str) -> None:
        self._client, self._path = client, path

    def do(self, what: str, **body: Any) -> Any:
        """A command of WebDriver; its value."""
        got = self._client.post(f"{self._path}/{what}", json=body).json()["value"]
        assert not (isinstance(got, dict) and "error" in got), got
        return got

    def open(self, url: str) -> None:
        self.do("url", url=url)

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self.do("execute/sync", script=script, args=[])

    def accessible(self, selector: str) -> tuple[str, str]:
        """The role and the name of an element, as a screen reader says them."""
        [element] = self.do("element", using="css selector", value=selector).values()
        said = [self._client.get(f"{self._path}/element/{element}/computed{kind}").json() for kind in ("role", "label")]
        return said[0]["value"], said[1]["value"]

    def resize(self, width: int, height: int) -> None:
        """Show pages as on a screen of this many pixels; on a phone, if it is narrow."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.do("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=screen)

    def press(self, *keys: str) -> None:
        """Press keys one after the other in what has the focus."""
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.do("actions", actions=[{"type": "key", "id": "keys", "actions": steps}])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._client.get(f"{self._path}/screenshot").json()["value"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A window, which is closed in the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client, TemporaryDirectory() as profile:
            assert wait_until(lambda: _ready(client), 60)
            arguments = [*ARGUMENTS, f"--user-data-dir={profile}"]
            asked = {"alwaysMatch": {"goog:chromeOptions": {"args": arguments}}}
            session = client.post("/session", json={"capabilities": asked}).json()["value"]
            assert "sessionId" in session, session
            path = f"/session/{session['sessionId']}"
            yield Browser(client, path)
            client.delete(path)
    finally:
        driver.terminate()
        driver.wait()


def _ready(client: httpx.Client) -> bool:
    try:
        return bool(client.get("/status").json()["value"]["ready"])
    except httpx.HTTPError:
        return False

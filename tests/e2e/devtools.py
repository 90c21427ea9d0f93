"""A real browser, driven over its own debugging port: for pages that are served and change."""

import base64
import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress

from websockets.sync.client import connect

from tests.e2e.browser import FLAGS, browser

DEADLINE_S = 60.0


class Tab:
    """One open page."""

    def __init__(self, socket):
        self._socket, self._last, self._session = socket, 0, None
        self.console = []
        """What the page said there: errors, and what it was not allowed to load."""
        (target,) = [
            one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"
        ]
        about = {"targetId": target["targetId"], "flatten": True}
        self._session = self.call("Target.attachToTarget", **about)["sessionId"]
        for domain in ("Runtime", "Page", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._last += 1
        session = {} if self._session is None else {"sessionId": self._session}
        told = {"id": self._last, "method": method, "params": params, **session}
        self._socket.send(json.dumps(told))
        end_s = time.monotonic() + DEADLINE_S
        while True:
            told = json.loads(self._socket.recv(timeout=end_s - time.monotonic()))
            if told.get("id") == self._last:
                assert "error" not in told, told["error"]
                return told["result"]
            self._hear(told)

    def _hear(self, told):
        about = told.get("params", {})
        if told.get("method") == "Runtime.exceptionThrown":
            self.console.append(about["exceptionDetails"]["exception"]["description"])
        elif told.get("method") == "Log.entryAdded":
            self.console.append(about["entry"]["text"])

    def find(self, script):
        """What an expression is worth in the page; it may be a promise."""
        told = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait_for(self, script):
        """Wait until an expression is true; its value."""
        end_s = time.monotonic() + DEADLINE_S
        while not (found := self.find(script)):
            assert time.monotonic() < end_s, f"{script} did not become true; {self.console}"
            time.sleep(0.05)
        return found

    def go(self, url):
        """Open another page in it, and wait until it is there."""
        self.call("Page.navigate", url=url)
        there = json.dumps(url.partition("#")[0])
        self.wait_for(f"location.href.startsWith({there}) && document.readyState === 'complete'")

    def picture(self, path):
        """Keep what it looks like as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def open_tab(folder, *flags, width=1280, height=900):
    """An empty page in a browser of its own, which reaches this machine only and is then ended."""
    profile = folder / "profile"
    command = [
        *(browser(), *FLAGS, "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"),
        *("--remote-debugging-port=0", f"--user-data-dir={profile}"),
        *(f"--window-size={width},{height}", *flags, "about:blank"),
    ]
    running = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        start_new_session=True,
    )
    try:
        with connect(_address(running, profile / "DevToolsActivePort"), max_size=None) as socket:
            yield Tab(socket)
    finally:
        with suppress(ProcessLookupError):  # its helpers are in its group
            os.killpg(running.pid, signal.SIGKILL)
        running.wait(DEADLINE_S)


def _address(running, port_file):
    end_s = time.monotonic() + DEADLINE_S
    while not port_file.exists() or len(port_file.read_text().splitlines()) < 2:
        assert running.poll() is None, "the browser has ended"
        assert time.monotonic() < end_s, "the browser does not start"
        time.sleep(0.05)
    port, path = port_file.read_text().splitlines()[:2]
    return f"ws://127.0.0.1:{port}{path}"

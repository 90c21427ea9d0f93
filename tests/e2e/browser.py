"""A real browser, driven without a driver: a page in, what it made of it and said about it out.

A page is asked questions by a script that is appended to it; what the script finds is read from the
dumped document.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # a browser does not start for root with it
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-breakpad",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # neither a page nor the browser gets anywhere
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--log-level=0",
)


@dataclass(frozen=True)
class Seen:
    """What became of a page."""

    document: str
    answers: Any
    """What the script found."""
    console: list[str]
    """What the page said there: errors, blocked loads."""


def browser() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.fail(
            "these tests look at pages in Chromium, and there is none; install it with: "
            "apt-get install chromium"
        )
    return found


def look(page: str, script: str, folder: Path, *flags: str, width: int | None = None) -> Seen:
    """Open a page, let a script look around in it, and bring back what it found.

    Args:
        page: The document.
        script: The body of an async function; what it returns is what was found.
        folder: Where files may be put.
        flags: More for the browser.
        width: Of the window in pixels, if it matters; windows of a browser are never this narrow,
            so the page is put into a frame.
    """
    asking = (
        "<script>addEventListener('load', () => setTimeout(async () => {"
        "const answer = document.createElement('pre'); answer.id = 'answer';"
        f"const find = async () => {{ {script} }};"
        "try { answer.textContent = JSON.stringify({found: await find()}); }"
        "catch (exc) { answer.textContent = JSON.stringify({failed: String(exc)}); }"
        "parent.document.body.append(parent.document.adoptNode(answer));"
        "}, 100))</script></body>"
    )
    before, end, after = page.rpartition("</body>")
    assert end
    asked = before + asking + after
    if width is not None:
        asked = (
            f'<!doctype html><body style="margin:0"><iframe width="{width}" height="4000" '
            f'style="border:0" srcdoc="{escape(asked)}"></iframe></body>'
        )
    path = folder / "page.html"
    path.write_text(asked)
    done = open_in_browser(
        path.as_uri(), folder, "--dump-dom", "--virtual-time-budget=5000", *flags
    )
    found = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, f"the page was not asked: {done.stdout[-2000:]} {done.stderr[-4000:]}"
    answer = json.loads(unescape(found.group(1)))
    assert "failed" not in answer, answer["failed"]
    console = re.findall(r"CONSOLE[^\]]*\] (.*)", done.stderr)
    return Seen(done.stdout, answer["found"], console)


def picture(page: Path, path: Path, folder: Path, *flags: str) -> Path:
    """What the page looks like."""
    open_in_browser(page.as_uri(), folder, f"--screenshot={path}", *flags)
    return path


def open_in_browser(url: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the browser to its end, and end it if that does not come."""
    profile = folder / "profile"
    command = [browser(), *FLAGS, f"--user-data-dir={profile}", *flags, url]
    running = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=folder,
        start_new_session=True,
    )
    try:
        output, errors = running.communicate(timeout=DEADLINE_S)
    finally:
        with suppress(ProcessLookupError):  # its helpers are in its group
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    assert running.returncode == 0, errors
    return subprocess.CompletedProcess(command, 0, output, errors)

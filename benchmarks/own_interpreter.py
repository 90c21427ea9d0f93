"""Virtual environments for packages that the project does not depend on, and programs run in them.

Every package, or family of packages, gets a virtual environment of its own, with envfleet as it is
in this checkout. What cannot be installed is answered by pip's reason. A program has a deadline,
and its whole process group ends with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALL_S = 1800.0
"""Longest that one installation may take; some packages are compiled."""


def default_folder(name: str) -> Path:
    """Where virtual environments are kept unless another folder is named."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "envfleet" / name


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended, and what it said."""

    code: int | None
    """Its exit code, negative for a signal; None if it was ended at its deadline."""
    out: str
    err: str

    @property
    def how(self) -> str:
        """In a few words, if it did not end well."""
        if self.code is None:
            return "no end before its deadline"
        if self.code < 0:
            return f"ended by {signal.Signals(-self.code).name}"
        return f"exit code {self.code}"


def wheel(folder: Path) -> Path:
    """Build a wheel of this checkout into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("envfleet-*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
    built = run([*command, str(ROOT)], INSTALL_S)
    if built.code != 0:
        raise RuntimeError(f"envfleet cannot be built ({built.how}): {built.err[-2000:]}")
    return next(folder.glob("envfleet-*.whl"))


def interpreter(folder: Path, packages: Sequence[str], own: Path) -> tuple[Path, str | None]:
    """The Python of a virtual environment with these packages, and why they are missing, if so.

    Args:
        folder: Of the virtual environment; it is made if it is not there.
        packages: What pip is asked for; installed once.
        own: The wheel of envfleet, which is installed each time.
    """
    python = folder / "bin" / "python"
    asked = "\n".join(packages)
    done = folder / "installed.txt"  # an installation may have been interrupted
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if not done.exists() or done.read_text() != asked:
        made = run([sys.executable, "-m", "venv", "--clear", str(folder)], INSTALL_S)
        if made.code != 0:
            return python, f"no virtual environment: {made.err.strip()[-200:]}"
        installed = run([*pip, "setuptools", "wheel", str(own), *packages], INSTALL_S)
        if installed.code != 0:
            return python, _reason(installed)
        done.write_text(asked)
    installed = run([*pip, "--force-reinstall", "--no-deps", str(own)], INSTALL_S)
    return python, None if installed.code == 0 else _reason(installed)


def run(
    command: Sequence[str],
    limit_s: float,
    *,
    stdin: str = "",
    folder: Path = ROOT,
    **variables: str,
) -> Ended:
    """Run a program in a process group of its own; past `limit_s` the group is killed.

    Args:
        command: The program and its arguments.
        limit_s: Its deadline.
        stdin: What it reads.
        folder: Where it runs; some packages write files there.
        **variables: Added to its environment variables.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(stdin, limit_s)
        return Ended(process.returncode, out, err)
    except subprocess.TimeoutExpired:
        _kill(process)
        out, err = process.communicate()
        return Ended(None, out, err)
    finally:
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _reason(installed: Ended) -> str:
    """Pip's own reason, in one line."""
    lines = [line.strip() for line in installed.err.splitlines() if line.strip()]
    said = [line for line in lines if re.match(r"(ERROR|error|.*[Ee]rror:)", line)]
    return f"pip: {(said or lines or [installed.how])[0][:200]}"

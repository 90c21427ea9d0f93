"""What a result depends on besides its options: versions, machine, state of the working directory.

Every fact is looked up here and nowhere else; what cannot be found out is left out, quickly.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["collect", "git_state", "machine", "versions"]

GIT_TIMEOUT_S = 2.0
"""A working directory may lie on a slow disk, and no run should wait for it."""


def collect(packages: Iterable[str]) -> dict[str, Any]:
    """All facts, as JSON has them."""
    facts: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(packages),
        "machine": machine(),
    }
    git = git_state(Path.cwd())
    return facts if git is None else facts | {"git": git}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Platform, CPU and cores; the name of the machine is private."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"platform": platform.platform(), "cpu": _cpu(), "cores": cores}


def git_state(folder: Path, timeout_s: float = GIT_TIMEOUT_S) -> dict[str, Any] | None:
    """Commit, and whether tracked files differ from it; None where there is no commit."""
    commit = _git(folder, timeout_s, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changed = _git(folder, timeout_s, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit} | ({} if changed is None else {"is_dirty": bool(changed)})


def _git(folder: Path, timeout_s: float, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=folder,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # looking must not touch the index
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

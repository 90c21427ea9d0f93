"""The machine, versions and commit that a benchmark ran on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import envfleet
from envfleet.engine.machine import usable_cores
from envfleet.observe.facts import git_state

PACKAGES = ("envfleet", "gymnasium", "numpy", "mujoco", "stable_baselines3", "torch", "envpool")
ROOT = Path(__file__).resolve().parents[1]
CODE = Path(envfleet.__file__).resolve()
WRITTEN = (":(exclude)benchmarks/results", ":(exclude)*.md")
"""Tracked files that benchmarks write themselves; a change of these is no change of code."""
GIT_TIMEOUT_S = 30.0
"""Generous, because the machine may be busy."""


def facts() -> dict[str, Any]:
    """What a reader needs to know about the machine, as plain data."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "load_before": os.getloadavg()[0],
    }


def describe(found: Mapping[str, Any]) -> list[str]:
    """The facts as two lines."""
    gigabytes = found["memory_bytes"] / 2**30
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    return [
        f"{found['cores']} cores of {found['processor']}, {gigabytes:.0f} GB, {found['system']}",
        f"Python {found['python']}, {packages}",
    ]


def kind(found: Mapping[str, Any]) -> list[str]:
    """What must be equal for figures to stand in one table: the facts, but for a kernel's build."""
    return describe({**found, "system": found["system"].partition("-")[0]})


def commit(root: Path = ROOT, code: Path = CODE) -> str | None:
    """The short commit of the measured code, with a + if tracked code has uncommitted changes.

    None outside a checkout, and if envfleet was imported from another place.
    """
    # the first check keeps a copy inside another project's checkout from using its commits
    if not (root / ".git").exists() or not code.is_relative_to(root / "src"):
        return None
    state = git_state(root, GIT_TIMEOUT_S)
    if state is None:
        return None
    is_changed = state.get("is_dirty", True) and _is_changed(root)
    return f"{state['commit'][:7]}{'+' if is_changed else ''}"


def processor() -> str:
    """The name of the processor."""
    try:
        listing = Path("/proc/cpuinfo").read_text()
    except OSError:
        listing = ""
    match = re.search(r"^model name\s*:\s*(.+)$", listing, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _is_changed(root: Path) -> bool:
    """Whether code differs from its commit. True if git does not answer."""
    try:
        done = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN],
            cwd=root,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},  # git status must not write the index
            capture_output=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return True
    return bool(done.stdout)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""On what a benchmark ran: the machine and the versions, as plain data and as two lines of text."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from envfleet.engine.machine import usable_cores

PACKAGES = ("envfleet", "gymnasium", "numpy", "mujoco", "stable_baselines3", "torch", "envpool")


def facts() -> dict[str, Any]:
    """Everything a reader needs to place the figures."""
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


def processor() -> str:
    """The name of the processor."""
    try:
        listing = Path("/proc/cpuinfo").read_text()
    except OSError:
        listing = ""
    match = re.search(r"^model name\s*:\s*(.+)$", listing, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

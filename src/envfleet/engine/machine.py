"""What this machine lets us use: cores, memory, descriptors; containers' limits count."""

from __future__ import annotations

import math
import os
import resource
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores this process may run on at once: the least of affinity and cgroup quota, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cgroup_cores()
    return max(1, min(affinity or 1, math.ceil(quota) if quota is not None else sys.maxsize))


def cgroup_cores() -> float | None:
    """The cgroup's CPU quota in cores, or None where there is none."""
    fields = _read(_CGROUP / "cpu.max").split()
    if len(fields) == 2 and fields[0] != "max":
        return int(fields[0]) / int(fields[1])
    quota = _read(_CGROUP / "cpu" / "cpu.cfs_quota_us")
    period = _read(_CGROUP / "cpu" / "cpu.cfs_period_us")
    if quota and period and int(quota) > 0:
        return int(quota) / int(period)
    return None


def available_memory() -> tuple[int, str]:
    """Bytes that can still be used, and which limit that is."""
    limits = [
        (int(line.split()[1]) * 1024, "memory of the machine")
        for line in _read(Path("/proc/meminfo")).splitlines()
        if line.startswith("MemAvailable:")
    ]
    for limit, used in (
        (_CGROUP / "memory.max", _CGROUP / "memory.current"),
        (
            _CGROUP / "memory" / "memory.limit_in_bytes",
            _CGROUP / "memory" / "memory.usage_in_bytes",
        ),
    ):
        limit_text, used_text = _read(limit), _read(used)
        if limit_text.isdigit() and used_text.isdigit():
            limits.append((max(0, int(limit_text) - int(used_text)), "memory limit of the cgroup"))
    if not limits:
        return sys.maxsize, "no limit known"
    return min(limits)


def open_files() -> tuple[int, int]:
    """(descriptors in use, descriptors allowed)."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = 0
    return used, allowed if allowed != resource.RLIM_INFINITY else sys.maxsize


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""What this machine lets us use: cores, memory, descriptors; containers' limits count."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

_CGROUP, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


NO_CHILDREN = "this process is daemonic, as those of multiprocessing.Pool are, and starts no others"


def may_have_children() -> bool:
    """Whether this process may start others by multiprocessing."""
    return not multiprocessing.current_process().daemon


def usable_cores() -> int:
    """Cores this process may run on at once: the least of affinity and cgroup quota, at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cgroup_cores()
    return max(1, min(affinity or 1, math.ceil(quota) if quota is not None else sys.maxsize))


def cgroup_cores() -> float | None:
    """The least CPU quota, in cores, of the groups this process is in, or None without any."""
    quotas = []
    for group in _cgroups("cpu"):
        fields = _read_machine_file(group / "cpu.max").split()
        if not fields:
            fields = [
                _read_machine_file(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")
            ]
        if len(fields) == 2 and all(map(str.isdigit, fields)):  # neither "max" nor -1
            quotas.append(int(fields[0]) / int(fields[1]))
    return min(quotas, default=None)


def available_memory() -> tuple[int, str]:
    """Bytes that can still be used, and which limit that is."""
    limits = [
        (int(line.split()[1]) * 1024, "memory of the machine")
        for line in _read_machine_file(Path("/proc/meminfo")).splitlines()
        if line.startswith("MemAvailable:")
    ]
    for group in _cgroups("memory"):
        for names in _MEMORY_FILES:
            limit, used = (_read_machine_file(group / name) for name in names)
            if limit.isdigit() and used.isdigit():
                limits.append((max(0, int(limit) - int(used)), "memory limit of the cgroup"))
    if not limits:
        return sys.maxsize, "no limit known"
    return min(limits)


def _cgroups(controller: str) -> Iterator[Path]:
    """The control groups this process is in: its own, and all around it; each has its limits."""
    for line in _read_machine_file(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = _CGROUP
        elif controller in controllers.split(","):
            root = _CGROUP / controller
        else:
            continue
        # in a container the path may be the host's, or lead out of what is seen: the root is there
        own = Path(os.path.normpath(f"{root}/{path}"))
        yield root
        yield from (group for group in (own, *own.parents) if root in group.parents)


def open_files() -> tuple[int, int]:
    """(descriptors in use, descriptors allowed)."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = 0
    return used, allowed if allowed != resource.RLIM_INFINITY else sys.maxsize


def _read_machine_file(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

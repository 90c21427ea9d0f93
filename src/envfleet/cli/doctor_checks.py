"""What the numbers of a machine mean for running environments in parallel.

Pure: every function takes what ``doctor_probe.py`` read and returns a ``Finding``. Law: a finding
that is not ok says what to change, in words or in a command that can be typed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envfleet.cli.report import Finding, Level, plural
from envfleet.engine.backends.process.backend import FILES_PER_WORKER, SPARE_FILES

_MEBI = 2**20
_GIBI = 2**30
_WORKER_BYTES = 60 * _MEBI
"""A worker that imported numpy and gymnasium, and nothing heavier."""


def _warn_if(name: str, text: str, remedy: str | None) -> Finding:
    """A warning if there is something to change."""
    return Finding(name, "warn" if remedy else "ok", text, remedy)


def format_bytes(num_bytes: float) -> str:
    """Bytes in the unit people would use."""
    if num_bytes >= 10 * _GIBI:
        return f"{num_bytes / _GIBI:.0f} GiB"
    if num_bytes >= _GIBI:
        return f"{num_bytes / _GIBI:.1f} GiB"
    return f"{num_bytes / _MEBI:.0f} MiB"


def check_cores(in_machine: int, affinity: int | None, quota: float | None, usable: int) -> Finding:
    """Cores of the machine against what affinity and the cgroup's quota leave."""
    parts = [f"{in_machine} in the machine"]
    if affinity is not None and affinity != in_machine:
        parts.append(f"affinity allows {affinity}")
    parts.append("no cgroup quota" if quota is None else f"the cgroup's quota is {quota:g}")
    remedy = None
    if quota is not None and quota < 1:
        remedy = (
            "less than one core: workers will be throttled in bursts; raise the container's CPU "
            "limit (docker run --cpus, Kubernetes resources.limits.cpu)"
        )
    elif usable == 1 and in_machine > 1:
        remedy = (
            "one core runs one environment at a time; give this process more (taskset -c, "
            "docker run --cpus, sbatch --cpus-per-task)"
        )
    elif usable == 1:
        remedy = (
            "workers will pay only for environments that wait (sleep, network), not for computing"
        )
    return _warn_if("cores", f"{usable} usable ({', '.join(parts)})", remedy)


def check_load(average: float, usable: int) -> Finding:
    """Whether other programs use the cores now."""
    text = f"{average:.2f} over the last minute, {plural(usable, 'usable core')}"
    is_busy = average > usable + 0.5
    remedy = "others use the cores too: measure again when they are done" if is_busy else None
    return _warn_if("load", text, remedy)


def check_memory(available: int, total: int | None, limit: str, usable: int) -> Finding:
    """Memory that is left, and how many workers it holds."""
    of = "" if total is None else f" of {format_bytes(total)}"
    text = f"{format_bytes(available)} free{of} ({limit})"
    need = usable * _WORKER_BYTES
    workers = f"{usable} workers need about {format_bytes(need)}"
    if available < need:
        remedy = (
            f"{workers} before any environment does; free some, raise the limit, or use fewer "
            "workers"
        )
        return Finding("memory", "bad", text, remedy)
    is_tight = available < 4 * need
    remedy = f"{workers}, which leaves little for environments and a learner" if is_tight else ""
    return _warn_if("memory", text, remedy or None)


def check_shared_memory(
    has_memfd: bool, shm_total: int | None, shm_free: int | None, platform: str
) -> Finding:
    """Where observations can be shared between processes."""
    name, shm = "shared memory", "no /dev/shm"
    if shm_total is not None and shm_free is not None:
        shm = f"/dev/shm has {format_bytes(shm_free)} free of {format_bytes(shm_total)}"
    if has_memfd:
        text = f"memfd works, so the size of /dev/shm does not matter to envfleet ({shm})"
        return Finding(name, "ok", text)
    text = f"memfd_create does not work; {shm}"
    if shm_free is None:
        if platform != "linux":
            return Finding(name, "ok", "files mapped into memory (no memfd on this system)")
        remedy = "mount one: mount -t tmpfs -o size=1g tmpfs /dev/shm (docker run --shm-size=1g)"
        return Finding(name, "bad", text, remedy)
    if shm_free < 64 * _MEBI:
        remedy = "give it more: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
        return Finding(name, "bad", text, remedy)
    return Finding(name, "warn", text, "allow memfd_create (a seccomp profile blocks it)")


def check_open_files(in_use: int, soft: int, hard: int, usable: int) -> Finding:
    """How many workers the limit of open files allows."""
    workers = max(0, (soft - in_use - SPARE_FILES) // FILES_PER_WORKER)
    text = f"{in_use} of {soft} in use, room for about {workers} workers"
    if workers >= max(64, usable):
        return Finding("open files", "ok", text)
    level: Level = "bad" if workers < usable else "warn"
    remedy = f"ulimit -n {min(hard, 65536)}"
    if hard <= soft:
        remedy = (
            "the hard limit is as low: raise nofile in /etc/security/limits.conf, or docker run "
            "--ulimit nofile=65536"
        )
    return Finding("open files", level, text, remedy)


def check_processes(in_use: int | None, allowed: int | None, usable: int) -> Finding:
    """How many more processes may be started."""
    if allowed is None:
        return Finding("processes", "ok", "no limit")
    left = allowed - (in_use or 0)
    text = f"{left} more may be started ({in_use or 0} of {allowed} in use)"
    if left >= 4 * usable + 16:
        return Finding("processes", "ok", text)
    level: Level = "bad" if left < usable + 2 else "warn"
    remedy = "raise it: ulimit -u 4096, or docker run --pids-limit 4096"
    return Finding("processes", level, text, remedy)


@dataclass(frozen=True, slots=True)
class StartTrial:
    """What happened when a process was started with one method."""

    method: str
    seconds: float | None
    """How long until the child answered; None when it did not."""
    error: str | None = None


def check_start_method(trial: StartTrial, is_default: bool) -> Finding:
    """Whether worker processes start with one method."""
    name = f"start: {trial.method}"
    default = ", the default here" if is_default else ""
    if trial.seconds is None:
        others = [name for name in ("fork", "spawn", "forkserver") if name != trial.method]
        return Finding(
            name,
            "bad" if is_default else "warn",
            f"does not work{default}: {trial.error or 'no answer'}",
            f"use another: make_vec(..., start_method=...) with {' or '.join(others)}",
        )
    text = f"works{default}; a child answered after {trial.seconds * 1e3:.0f} ms"
    slow = "imports are slow here (network file system?): keep the environment on a local disk"
    return _warn_if(name, text, slow if trial.seconds > 5 else None)


def check_kernel_calls(eventfd: bool, pidfd: bool, platform: str) -> Finding:
    """Whether the kernel's cheap ways to wake and to watch processes work."""
    have = [name for name, works in (("eventfd", eventfd), ("pidfd", pidfd)) if works]
    missing = [name for name in ("eventfd", "pidfd") if name not in have]
    if not missing:
        return Finding("kernel", "ok", "eventfd and pidfd work")
    text = f"{' and '.join(missing)} missing" + (f", {' and '.join(have)} works" if have else "")
    text += "; pipes and sentinels are used instead"
    if platform != "linux":
        return Finding("kernel", "ok", text)
    remedy = "Linux 5.3 or newer has both; in a container, allow them in the seccomp profile"
    return Finding("kernel", "warn", f"{text}, a little slower", remedy)


def check_blas_threads(values: Mapping[str, str], usable: int) -> Finding:
    """Whether numeric libraries would start a pool of threads in this process.

    Args:
        values: The variables that are set, by name.
        usable: Usable cores.
    """
    text = ", ".join(f"{name}={value}" for name, value in sorted(values.items()))
    remedy = None
    wrong = [name for name, value in values.items() if not value.strip().isdigit()]
    if not values:
        text = "no limit is set; workers get one thread each from envfleet"
    elif wrong:
        remedy = f"{wrong[0]} is not a number: set it to one, or unset it"
    elif any(int(value) > usable for value in values.values()):
        remedy = (
            f"more threads than the {usable} usable cores fight for them: export OMP_NUM_THREADS="
            f"{usable}"
        )
    return _warn_if("BLAS threads", text, remedy)


def check_python_version(version: tuple[int, int, int], has_gil: bool, platform: str) -> Finding:
    """Whether this Python is new enough."""
    gil = "with the GIL" if has_gil else "free-threaded: the thread backend runs in parallel"
    text = f"{'.'.join(map(str, version))} on {platform}, {gil}"
    if version[:2] < (3, 11):
        return Finding("python", "bad", text, "install Python 3.11 or newer")
    return Finding("python", "ok", text)


def check_required_packages(
    versions: Mapping[str, str | None], least: Mapping[str, str]
) -> Finding:
    """Whether the packages that envfleet needs are installed and new enough."""
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    wrong = [
        name
        for name, version in versions.items()
        if version is None or version_numbers(version) < version_numbers(least.get(name, "0"))
    ]
    if wrong:
        wanted = " ".join(f"'{name}>={least.get(name, '0')}'" for name in wrong)
        return Finding("packages", "bad", text, f"pip install {wanted}")
    return Finding("packages", "ok", text)


def check_optional_packages(versions: Mapping[str, str | None]) -> Finding:
    """Which packages of the extras are installed; none of them is needed."""
    there = [f"{name} {version}" for name, version in versions.items() if version]
    absent = [name for name, version in versions.items() if not version]
    text = ", ".join(there) or "none"
    if absent:
        text += f" (not installed: {', '.join(absent)})"
    return Finding("extras", "ok", text)


def check_compiled(is_compiled: bool) -> Finding:
    """Whether the part in C was built."""
    if is_compiled:
        return Finding("compiled", "ok", "steps run in C where they can")
    return Finding(
        "compiled",
        "warn",
        "steps run in Python alone: the same results, cheap environments a fifth slower",
        "install a C compiler and Python's headers (Debian: gcc, python3-dev), then envfleet again",
    )


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: enough to compare releases."""
    found = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)


def check_wake_up(round_trip_us: Sequence[float], error: str | None = None) -> Finding:
    """What it costs to wake another process and to be woken by it."""
    if not round_trip_us:
        text = f"could not be measured: {error or 'no answer'}"
        return Finding("wake-up", "warn", text, "envfleet bench ENV")
    ordered = sorted(round_trip_us)
    median = ordered[len(ordered) // 2]
    late = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    text = f"{median:.0f} us there and back (1 in 100 takes {late:.0f} us or more)"
    slow = (
        "slow, as on busy or virtual machines: put more environments on each worker, and use "
        "send/recv with two halves"
    )
    return _warn_if("wake-up", text, slow if median > 250 else None)

"""Reads the machine for ``doctor``; ``doctor_checks.py`` says what the answers mean.

Law: reading changes nothing, takes seconds at most and leaves no process behind, even where a start
method hangs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.cli import doctor_checks as checks
from envfleet.cli.report import Finding
from envfleet.engine import machine
from envfleet.engine.rows import IS_COMPILED

LEAST = {"numpy": "2.0", "gymnasium": "1.2", "cloudpickle": "3.0"}
EXTRAS = (
    "rich",
    "torch",
    "stable-baselines3",
    "mujoco",
    "pettingzoo",
    "joblib",
    "ray",
    "transformers",
)
_BLAS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_TRIAL_S = 30.0


def probe_python() -> Finding:
    """Which Python runs this."""
    is_gil_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    major, minor, micro = sys.version_info[:3]
    system = f"{platform.system()} {platform.machine()}"
    return checks.check_python_version((major, minor, micro), is_gil_enabled(), system)


def probe_packages() -> Finding:
    """The packages that envfleet needs."""
    return checks.check_required_packages({name: installed(name) for name in LEAST}, LEAST)


def probe_extras() -> Finding:
    """The packages of the extras."""
    return checks.check_optional_packages({name: installed(name) for name in EXTRAS})


def installed(name: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def probe_compiled() -> Finding:
    """Whether what every step does to every row runs in C."""
    return checks.check_compiled(IS_COMPILED)


def probe_cores() -> Finding:
    """How many cores there are, and how many this process may use."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    quota = machine.cgroup_cores()
    return checks.check_cores(os.cpu_count() or 1, affinity, quota, machine.usable_cores())


def probe_load() -> Finding:
    """How busy the machine is."""
    return checks.check_load(os.getloadavg()[0], machine.usable_cores())


def probe_memory() -> Finding:
    """How much memory is left."""
    available, limit = machine.available_memory()
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        total = None
    return checks.check_memory(available, total, limit, machine.usable_cores())


def probe_shared_memory() -> Finding:
    """Whether memory can be shared between processes."""
    try:
        stat = os.statvfs("/dev/shm")
        shm: tuple[int, int] | tuple[None, None] = (
            stat.f_blocks * stat.f_frsize,
            stat.f_bavail * stat.f_frsize,
        )
    except OSError:
        shm = (None, None)
    return checks.check_shared_memory(memfd_works(), shm[0], shm[1], sys.platform)


def memfd_works() -> bool:
    """Whether an anonymous shared file can be made; a seccomp profile may forbid it."""
    try:
        os.close(os.memfd_create("envfleet-doctor"))
    except (AttributeError, OSError):
        return False
    return True


def probe_open_files() -> Finding:
    """How many descriptors are left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used, _ = machine.open_files()
    return checks.check_open_files(used, bounded(soft), bounded(hard), machine.usable_cores())


def bounded(limit: int) -> int:
    """A resource limit as a number that can be computed with."""
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def probe_processes() -> Finding:
    """How many processes may still be started: the container's limit, or the user's."""
    allowed = read_number(Path("/sys/fs/cgroup/pids.max"))
    in_use = read_number(Path("/sys/fs/cgroup/pids.current"))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if allowed is None and soft != resource.RLIM_INFINITY:
        allowed, in_use = soft, own_processes()
    return checks.check_processes(in_use, allowed, machine.usable_cores())


def read_number(path: Path) -> int | None:
    """The number in a file of the kernel; None if it says "max" or does not exist."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def own_processes() -> int | None:
    """How many processes this user runs."""
    try:
        return sum(
            path.stat().st_uid == os.getuid() for path in Path("/proc").glob("[0-9]*/task/*")
        )
    except OSError:
        return None


def probe_kernel_calls() -> Finding:
    """Whether eventfd and pidfd really work; having the functions is not enough in a sandbox."""
    return checks.check_kernel_calls(works(_try_eventfd), works(_try_pidfd), sys.platform)


def _try_eventfd() -> None:
    os.close(os.eventfd(0))


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def works(attempt: Callable[[], None]) -> bool:
    """Whether a call to the kernel succeeds here."""
    try:
        attempt()
    except (AttributeError, OSError):
        return False
    return True


def probe_blas_threads() -> Finding:
    """Which thread limits are set for numeric libraries."""
    values = {name: os.environ[name] for name in _BLAS if name in os.environ}
    return checks.check_blas_threads(values, machine.usable_cores())


def probe_start_method(method: str) -> Finding:
    """Start a process with ``method`` and see whether it answers."""
    result, error = trial("start", method)
    default = multiprocessing.get_context().get_start_method()
    seconds = float(result) if result is not None else None
    return checks.check_start_method(checks.StartTrial(method, seconds, error), method == default)


def probe_wake_up() -> Finding:
    """Measure what waking another process costs."""
    result, error = trial("wake")
    return checks.check_wake_up(np.asarray(result or [], dtype=float).tolist(), error)


def trial(*arguments: str) -> tuple[Any, str | None]:
    """Run one trial of ``doctor_probe_child`` in its own process group: its result, or why not."""
    child = subprocess.Popen(
        [sys.executable, "-m", "envfleet.cli.doctor_probe_child", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        output, errors = child.communicate(timeout=_TRIAL_S)
    except subprocess.TimeoutExpired:
        return None, f"no answer in {_TRIAL_S:g} s"
    finally:
        # the whole group: a hung grandchild would outlive its killed parent
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    if child.returncode != 0:
        last = errors.strip().splitlines()
        return None, last[-1] if last else f"exit code {child.returncode}"
    return json.loads(output), None


CHECKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("python", probe_python),
    ("packages", probe_packages),
    ("extras", probe_extras),
    ("compiled", probe_compiled),
    ("cores", probe_cores),
    ("load", probe_load),
    ("memory", probe_memory),
    ("shared memory", probe_shared_memory),
    ("open files", probe_open_files),
    ("processes", probe_processes),
    ("kernel", probe_kernel_calls),
    ("BLAS threads", probe_blas_threads),
    *(
        (f"start: {method}", lambda method=method: probe_start_method(method))
        for method in multiprocessing.get_all_start_methods()
    ),
    ("wake-up", probe_wake_up),
)

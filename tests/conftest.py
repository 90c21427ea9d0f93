"""What holds for every test: nothing is left behind, slow folders run first, Hypothesis repeats.

Law 5 of the house is checked here after each test, by looking at the machine and not at the
library: processes, threads, file descriptors and shared memory. Two test processes may run side
by side: each looks at its own descendants, and at shared memory that no stranger holds.
"""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests import ray_cluster as ray_tests
from tests.ray_cluster import ray_cluster  # noqa: F401  (a fixture for every test)

# No database and no random choice: a run in CI tries the same examples as the run before it. And no
# clock: how long examples take says how busy the machine is.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")

FOLDERS_IN_ORDER = ("learning", "faults", "e2e", "conformance", "unit")
GRACE_S = 30.0
"""How long something in the course of ending may take on a busy machine. Only a leak waits so long;
that closing is quick, as the laws want it, is for tests of its own."""
ORPHANED = "shared memory that nobody holds"
ORPHANED_S = 60.0
"""How long that may be there: it may be a stranger's who was killed, and is then cleared away by
the resource tracker of multiprocessing when the last of the stranger's children is gone."""

LINKS = ("socket:", "anon_inode:")
"""What Ray's connections look like among the open descriptors."""

SHM = Path("/dev/shm")
FDS = Path("/proc/self/fd")


# A shell starts what runs in its background deaf to Ctrl-C, and so would be every child.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs slow folders first, so that test processes side by side end together."""

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return FOLDERS_IN_ORDER.index(folder) if folder in FOLDERS_IN_ORDER else 0

    items.sort(key=rank)


@dataclass(frozen=True)
class Surroundings:
    """What this process has around it at one moment, without the standard library's own servants.

    multiprocessing starts a resource tracker and a fork server when first needed, keeps them for
    the life of the process, and holds one descriptor of each. Its heap, which Gymnasium's
    AsyncVectorEnv uses, never gives back a small arena. loky, a part of joblib, has a tracker of
    its own. These are paid once, and are not leaks. Nor is the Ray cluster of the tests
    (`tests/ray_cluster.py`), of which it is seen what lives in it instead: actors, objects and
    placement groups.
    """

    processes: dict[int, str]
    threads: frozenset[threading.Thread]
    shared_memory: frozenset[str]
    fds: dict[int, str]
    ray: frozenset[str] = frozenset()

    @classmethod
    def now(cls) -> "Surroundings":
        cluster = ray_tests.running()
        loky = sys.modules.get("joblib.externals.loky.backend.resource_tracker")
        loky_tracker = getattr(loky, "_resource_tracker", None)
        servants = {
            getattr(loky_tracker, "_pid", None),
            getattr(resource_tracker._resource_tracker, "_pid", None),
            getattr(forkserver._forkserver, "_forkserver_pid", None),
        }
        their_fds = {
            getattr(loky_tracker, "_fd", None),
            getattr(resource_tracker._resource_tracker, "_fd", None),
            getattr(forkserver._forkserver, "_forkserver_alive_fd", None),
        }
        arena = f"/pym-{os.getpid()}-"
        return cls(
            processes={pid: line for pid, line in our_processes() if pid not in servants},
            threads=frozenset(threading.enumerate()),
            shared_memory=frozenset(os.listdir(SHM)) if SHM.is_dir() else frozenset(),
            fds={
                fd: target
                for fd, target in open_fds()
                if fd not in their_fds and arena not in target
            },
            ray=cluster.contents() if cluster else frozenset(),
        )

    def new_processes(self, now: "Surroundings") -> list[int]:
        """Those that are there now, without the daemons of the Ray cluster of the tests."""
        new = now.processes.keys() - self.processes.keys()
        if new and (cluster := ray_tests.running()):
            new -= cluster.daemons()  # asked for only here, for it looks at all processes
        return sorted(new)

    def left_behind(
        self, *, ignore_threads: bool = False, ignore_links: bool = False
    ) -> dict[str, list[str]]:
        """What there is now and was not then, by kind; empty when all is well.

        Ray opens connections to the cluster, and closes them, when it likes; `ignore_links` leaves
        them out.
        """
        now = Surroundings.now()
        found = {
            "processes": [f"{pid}: {now.processes[pid]}" for pid in self.new_processes(now)],
            "threads": [thread.name for thread in now.threads - self.threads if not ignore_threads],
            "shared memory": [],
            ORPHANED: [],
            "Ray": sorted(now.ray - self.ray),
        }
        ours = {os.getpid(), *now.processes}
        for name in sorted(now.shared_memory - self.shared_memory):
            entry = SHM / name
            holders = holders_of(entry)
            if holders <= ours and entry.exists():
                found["shared memory" if holders else ORPHANED].append(str(entry))
        # By number, since a descriptor may be closed and another opened in its place.
        then_fds, now_fds = (
            {
                fd: target
                for fd, target in one.fds.items()
                if not (ignore_links and target.startswith(LINKS))
            }
            for one in (self, now)
        )
        if len(now_fds) > len(then_fds):
            found["file descriptors"] = [
                f"{fd} -> {target}" for fd, target in now_fds.items() if then_fds.get(fd) != target
            ]
        return {kind: entries for kind, entries in found.items() if entries}


def our_processes() -> Iterator[tuple[int, str]]:
    """Descendants of this process, and orphans of its process group (workers whose parent died).

    active_children also reaps what multiprocessing started and what has ended since, so a zombie
    among the descendants is one that nobody joined. A zombie orphan is init's to reap, not ours.
    """
    descendants = {child.pid for child in multiprocessing.active_children()}
    descendants |= {child.pid for child in psutil.Process().children(recursive=True)}
    group = os.getpgrp()
    in_group = {pid for pid in psutil.pids() if group_of(pid) == group}
    for pid in descendants | in_group - {os.getpid()}:
        try:
            process = psutil.Process(pid)
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            is_orphan = process.ppid() not in in_group and not is_zombie
            if pid in descendants or is_orphan:
                line = " ".join(process.cmdline())[:200] or process.name()
                yield process.pid, line + " (zombie)" * is_zombie
        except psutil.NoSuchProcess:
            continue


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def open_fds() -> Iterator[tuple[int, str]]:
    if not FDS.is_dir():
        yield from ((number, "?") for number in range(psutil.Process().num_fds()))
        return
    for name in os.listdir(FDS):
        try:
            yield int(name), os.readlink(FDS / name)
        except FileNotFoundError:  # the descriptor of this very listing
            continue


def holders_of(entry: Path) -> set[int]:
    """Live processes that map the entry; if one is not ours it is not ours to judge."""
    holders = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(entry) in maps.read_text():
                holders.add(int(maps.parent.name))
        except OSError:
            continue
    return holders


@pytest.fixture(scope="session", autouse=True)
def own_user_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests and the programs they start keep their key here, not in the directory of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("user")))
        yield


@pytest.fixture(scope="session", autouse=True)
def ends_the_ray_cluster() -> Iterator[None]:
    yield
    ray_tests.stop()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which a process, thread, descriptor or shared block is left."""
    ignore_threads = request.node.get_closest_marker("leaves_thread") is not None
    ignore_links = ray_tests.is_asked_for(request)
    if ignore_links:
        ray_tests.started()
    before = Surroundings.now()

    def left_behind() -> dict[str, list[str]]:
        return before.left_behind(ignore_threads=ignore_threads, ignore_links=ignore_links)

    yield
    found = left_behind()
    if found:
        # pytest.raises and a failing test keep frames alive in reference cycles, and with them
        # whatever the test itself had open.
        gc.collect()
    ended_s = time.monotonic()
    while found and time.monotonic() - ended_s < (
        ORPHANED_S if found.keys() == {ORPHANED} else GRACE_S
    ):
        time.sleep(0.01)
        found = left_behind()
    if not found:
        return
    # so that one bad test does not slow, or hang, all that follow
    for pid in before.new_processes(Surroundings.now()):
        try:
            psutil.Process(pid).kill()
        except psutil.NoSuchProcess:
            continue
    listing = "\n".join(
        f"  {kind}:\n" + "\n".join(f"    {entry}" for entry in entries)
        for kind, entries in found.items()
    )
    pytest.fail(
        f"left behind: {', '.join(found)}; {time.monotonic() - ended_s:.1f} s after the test "
        f"there still was\n{listing}",
        pytrace=False,
    )

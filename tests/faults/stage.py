"""Helpers of the fault tests: environments that report their process, clocks, whole programs.

Environments are importable classes, so that every start method can build them. A program runs in a
session of its own, and everything it has started is gone when its `with` block ends.
"""

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import envfleet
from envfleet.engine import Fleet, ResetPlan
from envfleet.testing import Counter, NoisyStream
from tests.gates import PATIENCE_S

METHODS = ("fork", "spawn", "forkserver")
MODES = ("next_step", "same_step", "disabled")
GRACE_S = 2.0
"""What the laws give a named error or a recovery beyond the deadline."""


class Resident(Counter):
    """A `Counter` with endless episodes that reports its process and when it is closed.

    Args:
        closed: a file that `close` creates.
    """

    def __init__(self, closed: str | os.PathLike[str] | None = None, length: int | None = None):
        super().__init__(length)
        self.closed = None if closed is None else Path(closed)

    @property
    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        if self.closed is not None:
            self.closed.touch()

    def leave_later(self, after_s: float, exitcode: int) -> None:
        """End this process after a while."""
        timer = threading.Timer(after_s, os._exit, (exitcode,))
        timer.daemon = True
        timer.start()

    def leave_when_told(self, told: Path, exitcode: int) -> None:
        """End this process while it has no command."""

        def leave() -> None:
            told.unlink()
            os._exit(exitcode)

        _when_told(told, leave)

    def seize_when_told(self, told: Path, for_s: float) -> None:
        """Let a thread hold the interpreter lock in native code."""
        # PyDLL, unlike CDLL, does not release the interpreter lock around a call
        native = ctypes.PyDLL(None)

        def seize() -> None:
            sys.setswitchinterval(1e6)  # no other thread gets the lock between the two calls
            native.unlink(os.fsencode(told))
            native.usleep(int(for_s * 1e6))

        _when_told(told, seize)


def _when_told(told: Path, do: Callable[[], Any]) -> None:
    """Call it in a thread as soon as the file exists; the file is removed first."""

    def wait() -> None:
        until_s = time.monotonic() + 60
        while not told.exists() and time.monotonic() < until_s:
            time.sleep(0.005)
        do()

    threading.Thread(target=wait, daemon=True).start()


class Unlucky(Resident):
    """Has several faults one after another, each in the next environment of its slot.

    Args:
        faults: (moment, fault) each: "step" is the second step of an episode, "reset" one with the
            fault's place in this list as its seed; "sigkill", "sigstop", "os_exit", "exception" or
            "hang".
        met: a file that grows by one byte for every fault.
    """

    def __init__(self, faults: Sequence[tuple[str, str]], met: str | os.PathLike[str]):
        super().__init__()
        self.faults, self.met = list(faults), Path(met)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._meet("reset", seed)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self.t == 1:
            self._meet("step", None)
        return super().step(action)

    def _meet(self, moment: str, seed: int | None) -> None:
        number = self.met.stat().st_size if self.met.exists() else 0
        if number == len(self.faults) or self.faults[number][0] != moment:
            return
        if moment == "reset" and seed != number:
            return
        with self.met.open("ab") as file:
            file.write(b"\0")
        match self.faults[number][1]:
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sigstop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "os_exit":
                os._exit(3)
            case "hang":
                time.sleep(3600)
            case _:
                raise RuntimeError(f"fault number {number}")


class Troubled(NoisyStream):
    """A `NoisyStream` that fails at one step of its life, counted from 1.

    Args:
        trouble: "kill", "exit", "exception" or "hang".
        at_step: when; None for never.
        once: a file that is created at the failure; while it exists there is no other failure.
    """

    def __init__(
        self,
        trouble: str = "exception",
        at_step: int | None = None,
        once: str | os.PathLike[str] | None = None,
        max_length: int = 6,
    ):
        super().__init__(max_length)
        self.trouble, self.at_step = trouble, at_step
        self.once = None if once is None else Path(once)
        self.steps = 0

    @property
    def pid(self) -> int:
        return os.getpid()

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == self.at_step and not (self.once and self.once.exists()):
            if self.once:
                self.once.touch()
            if self.trouble == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "exit":
                os._exit(3)
            if self.trouble == "hang":
                time.sleep(3600)
            raise RuntimeError(f"in trouble at step {self.steps}")
        return super().step(action)


def zeros(count: int) -> Any:
    return np.zeros(count, np.int64)


def plans(*seeds: int | None) -> list[ResetPlan]:
    return [ResetPlan(seed) for seed in seeds]


def step(fleet: Fleet) -> envfleet.Batch:
    """One step of all slots of a fleet of counters."""
    fleet.send(zeros(fleet.num_slots))
    return fleet.recv()


def opened(env: Any, num_envs: int | None = None, **options: Any) -> Any:
    """A vector environment in forked workers (by default) that is closed at the end."""
    chosen = {"backend": "process", "start_method": "fork", **options}
    if chosen["backend"] != "process":
        del chosen["start_method"]
    return closing(envfleet.make_vec(env, num_envs, **chosen))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_after(pids: Iterable[int], seconds: float) -> list[int]:
    """The processes that still run after this time; returns early if none does."""
    give_up_s = time.monotonic() + seconds
    left = [pid for pid in pids if is_alive(pid)]
    while left and time.monotonic() < give_up_s:
        time.sleep(0.01)
        left = [pid for pid in left if is_alive(pid)]
    return left


def kill_and_wait(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert not left_after([pid], PATIENCE_S)


class Program:
    """A Python program in its own session."""

    def __init__(self, script: Path, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.out = self.err = ""

    def line(self) -> str:
        """The next line it prints; empty if it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def numbers(self) -> list[int]:
        return [int(word) for word in self.line().split()]

    def descendants(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]

    def interrupt(self) -> None:
        """Send SIGINT to the whole group, as a terminal does on Ctrl-C."""
        os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def finish(self, within_s: float) -> int:
        """Wait for its end; returns the exit code."""
        self.out, self.err = self._process.communicate(timeout=within_s)
        return self._process.returncode


@contextmanager
def program(folder: Path, source: str, *arguments: object) -> Iterator[Program]:
    """Run a script; nothing of its session survives the block."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(source))
    running = Program(script, *arguments)
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        process = running._process
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def run_program(
    folder: Path, source: str, *arguments: object, within_s: float = 60.0
) -> tuple[int, str, str]:
    """Run a script to its end: exit code, output, errors."""
    with program(folder, source, *arguments) as running:
        code = running.finish(within_s)
        return code, running.out, running.err


Row = dict[str, Any]


def drive(envs: Any, actions: Sequence[Any], seed: int) -> list[list[Row]]:
    """Every slot's rows with these actions, starting with its reset.

    With autoreset="disabled" ended slots are reset by mask, and that observation is recorded.
    """
    count = envs.num_envs
    is_disabled = envs.metadata["autoreset_mode"].name == "DISABLED"
    obs, _ = envs.reset(seed=seed)
    streams: list[list[Row]] = [[{"obs": obs[slot]}] for slot in range(count)]
    for action in actions:
        envs.send(action)
        batch = envs.recv()
        assert sorted(batch.slots.tolist()) == list(range(count))
        incidents = batch.infos.get("incident", [None] * count)
        for row, slot in enumerate(batch.slots.tolist()):
            streams[slot].append(
                {
                    "obs": batch.obs[row],
                    "final_obs": batch.final_obs[row],
                    "reward": batch.rewards[row],
                    "terminated": batch.terminated[row],
                    "truncated": batch.truncated[row],
                    "valid": batch.valid[row],
                    "incident": incidents[row],
                }
            )
        ended = batch.terminated | batch.truncated
        if is_disabled and ended.any():
            mask = np.zeros(count, np.bool_)
            mask[batch.slots[ended]] = True
            obs, _ = envs.reset(options={"reset_mask": mask})
            for slot in np.flatnonzero(mask):
                streams[slot].append({"obs": obs[slot]})
    return streams


def same_rows(left: Sequence[Row], right: Sequence[Row]) -> bool:
    """Bit-equal, field by field."""
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
        for a, b in zip(left, right, strict=True)
    )

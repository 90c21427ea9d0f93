"""Environments that misbehave on purpose, at a moment that is chosen beforehand.

Law: a fault happens at exactly one known point (the n-th call of one method, or the constructor).
Otherwise each is a `Counter`, so any other wrong result is the fleet's fault. Some of them end the
process they run in: never use those in the process of the tests; `spare_pid` names a process in
which nothing happens.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium import spaces

from envfleet.testing.simple_envs import Counter, Info, Step

Moment = Literal["constructor", "reset", "step", "close", "call", "never"]


class Faulty(Counter):
    """A `Counter` that calls `misbehave` at one moment of its life; subclasses say what happens.

    Args:
        at: which call misbehaves. ``"call"`` is a call of the method `probe`.
        nth: which of those calls, counted from 1 over the life of the instance.
        once: a file that is made when the fault happens and forbids any further fault while it
            exists, so that the environment built in the place of this one behaves.
        only_seed: misbehave only if the last seeded reset had this seed, which picks one slot
            of a fleet. It cannot pick a constructor, which has no seed yet.
        spare_pid: a process in which nothing happens, usually the one of the test.
        **counter: as for `Counter`.
    """

    def __init__(
        self,
        *,
        at: Moment = "step",
        nth: int = 1,
        once: str | os.PathLike[str] | None = None,
        only_seed: int | None = None,
        spare_pid: int | None = None,
        **counter: Any,
    ) -> None:
        super().__init__(**counter)
        self.at, self.nth = at, nth
        self.once = None if once is None else os.fspath(once)
        self.only_seed, self.spare_pid = only_seed, spare_pid
        self.last_seed: int | None = None
        self.calls = dict.fromkeys(("constructor", "reset", "step", "close", "call"), 0)
        self._moment("constructor")

    def misbehave(self) -> None:
        """What goes wrong."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode, unless this is the moment."""
        if seed is not None:
            self.last_seed = seed
        self._moment("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Step:
        """Count one step, unless this is the moment."""
        self._moment("step")
        return super().step(action)

    def close(self) -> None:
        """Close, unless this is the moment."""
        self._moment("close")

    def probe(self) -> int:
        """Return t, unless this is the moment: something to `call`."""
        self._moment("call")
        return self.t

    def _moment(self, name: str) -> None:
        self.calls[name] += 1
        if name != self.at or self.calls[name] != self.nth or os.getpid() == self.spare_pid:
            return
        if self.only_seed is not None and self.last_seed != self.only_seed:
            return
        if self.once is not None:
            marker = Path(self.once)
            if marker.exists():
                return
            marker.touch()
        self.misbehave()


class Crashing(Faulty):
    """Raises an exception or ends its process.

    Args:
        mode: ``"exception"`` raises `RuntimeError`; ``"exit"`` is `os._exit` with `exitcode`;
            ``"kill"`` sends SIGKILL to itself; ``"segfault"`` reads address zero.
        exitcode: for ``"exit"``.
        **faulty: as for `Faulty`.
    """

    def __init__(
        self,
        *,
        mode: Literal["exception", "exit", "kill", "segfault"] = "exception",
        exitcode: int = 3,
        **faulty: Any,
    ) -> None:
        self.mode, self.exitcode = mode, exitcode
        super().__init__(**faulty)

    def misbehave(self) -> None:
        """Crash in the way that was asked for."""
        if self.mode == "exit":
            os._exit(self.exitcode)
        if self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "segfault":
            ctypes.string_at(0)
        raise RuntimeError(f"crashed as asked, in {self.at} number {self.nth}")


class Hanging(Faulty):
    """Does not return.

    Args:
        mode: ``"sleep"`` sleeps in Python; ``"gil"`` sleeps in C and keeps the interpreter lock,
            so no other thread of the process runs either; ``"deaf"`` sleeps and ignores SIGTERM
            and SIGINT; ``"stop"`` sends SIGSTOP to itself.
        for_s: how long ``"sleep"``, ``"gil"`` and ``"deaf"`` last; None is for ever. A thread
            cannot be killed, so give a number where one is used.
        **faulty: as for `Faulty`.
    """

    def __init__(
        self,
        *,
        mode: Literal["sleep", "gil", "deaf", "stop"] = "sleep",
        for_s: float | None = None,
        **faulty: Any,
    ) -> None:
        self.mode, self.for_s = mode, for_s
        super().__init__(**faulty)

    def misbehave(self) -> None:
        """Hang in the way that was asked for."""
        if self.mode == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if self.mode == "deaf" and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        until_s = float("inf") if self.for_s is None else time.monotonic() + self.for_s
        # PyDLL, unlike CDLL, does not release the interpreter lock around a call
        keep_lock = ctypes.PyDLL(None).usleep if self.mode == "gil" else None
        while (left_s := until_s - time.monotonic()) > 0:
            if keep_lock is None:
                time.sleep(min(left_s, 3600.0))
            else:
                keep_lock(int(min(left_s, 1800.0) * 1e6))  # between two calls others may run


class FailingConstructor(Faulty):
    """Cannot be built: its constructor raises `RuntimeError`.

    Args:
        **faulty: as for `Faulty`, without `at` and `nth`.
    """

    def __init__(self, **faulty: Any) -> None:
        super().__init__(at="constructor", **faulty)

    def misbehave(self) -> None:
        """Refuse to be built."""
        raise RuntimeError("the constructor failed as asked")


class TwoArgumentError(Exception):
    """An exception that cannot be built again from its message alone."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"error {code} at {place}")
        self.code, self.place = code, place


class TwoArgumentException(Faulty):
    """Raises a `TwoArgumentError`, whose constructor wants two arguments; unpickling it fails."""

    def misbehave(self) -> None:
        """Raise it."""
        raise TwoArgumentError(7, self.at)


class UnpicklableException(Faulty):
    """Raises an exception that holds a function and a lock, which no pickle can carry."""

    def misbehave(self) -> None:
        """Raise it."""
        error = RuntimeError("an exception that cannot be pickled", lambda: None)
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error


class UnpicklableInfo(Counter):
    """Puts a lock and a lambda into every info, beside a number that must arrive all the same.

    The attribute `unpicklable` is a lock too: something to `get_attr`. (A lambda alone would not
    do: cloudpickle carries it.)
    """

    def __init__(self, length: int | None = 5, limit: int | None = None) -> None:
        super().__init__(length, limit)
        self.unpicklable = threading.Lock()

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode, with such an info."""
        obs, _ = super().reset(seed=seed, options=options)
        return obs, self._info()

    def step(self, action: Any) -> Step:
        """Count one step, with such an info."""
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, self._info()

    def _info(self) -> Info:
        return {"t": self.t, "lock": self.unpicklable, "callback": lambda: self.t}


class Leaking(Counter):
    """Takes memory and file descriptors at every step and never gives them back.

    Args:
        bytes_per_step: memory taken, and written to, at each step.
        files_per_step: descriptors opened at each step.
        **counter: as for `Counter`.
    """

    def __init__(
        self, bytes_per_step: int = 2**20, files_per_step: int = 0, **counter: Any
    ) -> None:
        super().__init__(**counter)
        self.bytes_per_step, self.files_per_step = bytes_per_step, files_per_step
        self.memory: list[bytes] = []
        self.files: list[int] = []

    def step(self, action: Any) -> Step:
        """Count one step and leak."""
        self.memory.append(b"\1" * self.bytes_per_step)
        self.files += [os.open(os.devnull, os.O_RDONLY) for _ in range(self.files_per_step)]
        return super().step(action)

    def give_back(self) -> None:
        """Release everything; for a test that ran the environment in its own process."""
        self.memory.clear()
        while self.files:
            os.close(self.files.pop())


class Slow(Counter):
    """Sleeps in every step; how long may depend on the seed.

    Args:
        step_s: seconds of an ordinary step.
        slow_step_s: seconds of a slow step.
        slow_share: probability of a slow step, drawn from the environment's generator.
        reset_s: seconds of a reset.
        **counter: as for `Counter`.
    """

    def __init__(
        self,
        step_s: float = 0.001,
        slow_step_s: float = 0.02,
        slow_share: float = 0.0,
        reset_s: float = 0.0,
        **counter: Any,
    ) -> None:
        super().__init__(**counter)
        self.step_s, self.slow_step_s, self.slow_share = step_s, slow_step_s, slow_share
        self.reset_s = reset_s

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Sleep, then start an episode."""
        time.sleep(self.reset_s)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Step:
        """Sleep, then count one step."""
        slow = self.slow_share > 0 and self.np_random.random() < self.slow_share
        time.sleep(self.slow_step_s if slow else self.step_s)
        return super().step(action)


class ReusingItsArray(Counter):
    """Returns the very same array from every reset and step, with new contents."""

    def __init__(self, length: int | None = 5, limit: int | None = None) -> None:
        super().__init__(length, limit)
        self._array = np.zeros(1, dtype=np.int64)

    def observation(self) -> Any:
        """The one array."""
        self._array[0] = self.t
        return self._array


class HugeObservation(Counter):
    """Observes `num_bytes` bytes, each of which is t modulo 256.

    Args:
        num_bytes: size of one observation.
        **counter: as for `Counter`.
    """

    def __init__(self, num_bytes: int = 2**24, **counter: Any) -> None:
        super().__init__(**counter)
        self.num_bytes = num_bytes
        self.observation_space = spaces.Box(0, 255, (num_bytes,), np.uint8)

    def observation(self) -> Any:
        """A full array."""
        return np.full(self.num_bytes, self.t % 256, dtype=np.uint8)


class _Drawing(Counter):
    def __init__(self, length: int | None = 5, limit: int | None = None) -> None:
        super().__init__(length, limit)
        self.observation_space = spaces.Box(0.0, np.inf, (1,), np.float64)

    def observation(self) -> Any:
        return np.array([self.draw()], dtype=np.float64)

    def draw(self) -> float:
        raise NotImplementedError


class GlobalRandom(_Drawing):
    """Draws from the process's global random state, so its stream depends on other environments.

    Args:
        source: ``"numpy"`` for ``np.random.*``, ``"python"`` for the module `random`.
        reseeds: also seed that state in every seeded reset. Alone such an environment repeats
            its stream; beside others in one process it changes theirs, and they change its own.
        **counter: as for `Counter`.
    """

    def __init__(
        self, source: Literal["numpy", "python"] = "numpy", reseeds: bool = False, **counter: Any
    ) -> None:
        super().__init__(**counter)
        self.source, self.reseeds = source, reseeds

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode."""
        if self.reseeds and seed is not None:
            np.random.seed(seed)
            random.seed(seed)
        return super().reset(seed=seed, options=options)

    def draw(self) -> float:
        """A number from the shared state."""
        if self.source == "numpy":
            return float(np.random.random())
        return random.random()


class IgnoresSeed(_Drawing):
    """Draws from a generator of its own that no seed reaches: no two runs are alike."""

    def __init__(self, length: int | None = 5, limit: int | None = None) -> None:
        super().__init__(length, limit)
        self.generator = np.random.default_rng()

    def draw(self) -> float:
        """A number that cannot be repeated."""
        return float(self.generator.random())


class SharesState(_Drawing):
    """Counts the steps of all its instances in one place: a slot sees how its neighbours move."""

    total: ClassVar[int] = 0

    def draw(self) -> float:
        """How many observations all instances of this process have made."""
        SharesState.total += 1
        return float(SharesState.total)

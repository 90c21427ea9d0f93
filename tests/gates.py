"""What tests use instead of guessed times: gates that a test opens, and the processor's own clock.

A test that waits for what must happen passes on a machine of any speed. One that sleeps, and takes
it that something has happened meanwhile or has not, does not.
"""

import functools
import gc
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envfleet.engine import Fleet
from envfleet.testing import Counter

PATIENCE_S = 60.0
"""For what is sure to come, and for gates that a failed test never opens."""


BUSY = 10
"""How many times as long anything may take where others use the processors."""
WAITS = Path("/proc/pressure/cpu")


def waited_s() -> float:
    """How long so far some process of this machine could run and had no processor."""
    if not WAITS.exists():
        return 0.0
    some = WAITS.read_text().partition("\n")[0]
    return int(some.rpartition("total=")[2]) / 1e6


def allowed_s(seconds: float, while_waited_s: float) -> float:
    """How long `seconds` may become while processes waited so long for a processor."""
    return seconds + min(while_waited_s, (BUSY - 1) * seconds)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer, even if it raises; see `allowed_s`."""
    started_s, waited_before_s = time.monotonic(), waited_s()
    try:
        yield
    finally:
        took_s = time.monotonic() - started_s
        may_s = allowed_s(seconds, waited_s() - waited_before_s)
        assert took_s < may_s, f"took {took_s:.2f} s, may take {may_s:g} s ({seconds:g} s of rest)"


def wait_for(path: Path, is_there: bool = True) -> None:
    """Return as soon as the file is there, or is gone."""
    give_up_s = time.monotonic() + PATIENCE_S
    while path.exists() != is_there:
        assert time.monotonic() < give_up_s, f"{path} never {'came' if is_there else 'went'}"
        time.sleep(0.002)


def wait_for_answers(fleet: Fleet, *workers: int) -> None:
    """Return when these worker processes have answered; nobody has heard it yet."""
    for worker in workers:
        bell: Any = fleet._workers.handles[worker]
        assert select.select([bell.done.fd], [], [], PATIENCE_S)[0], f"worker {worker} is silent"


class Gated(Counter):
    """Counts without an end, but makes no step before its gate is opened.

    Args:
        gate: a file; the gate is open while it exists.
        at: "step" or "reset", which waits at the gate.
    """

    def __init__(self, gate: Path, at: str = "step") -> None:
        super().__init__(length=None)
        self.gate, self.at = gate, at

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.at == "reset":
            wait_for(self.gate)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self.at == "step":
            wait_for(self.gate)
        return super().step(action)


def gated(gate: Path, at: str = "step") -> Any:
    """Builds one, in whatever process."""
    return functools.partial(Gated, gate, at)


@contextmanager
def opened_meanwhile(gate: Path) -> Iterator[None]:
    """The gate opens while the block waits."""
    timer = threading.Timer(0.2, gate.touch)
    timer.start()
    yield
    timer.join()


def in_time_at_best(attempt: Callable[[], Any], within_s: float, tries: int = 4) -> None:
    """Fails if no try is in time: a busy machine makes one of them late, a fault all of them."""
    took_s: list[float] = []
    while len(took_s) < tries:
        started_s, waited_before_s = time.monotonic(), waited_s()
        attempt()
        took_s.append(time.monotonic() - started_s)
        if took_s[-1] < allowed_s(within_s, waited_s() - waited_before_s):
            return
    raise AssertionError(f"took {min(took_s):.2f} s at best, may take {within_s:g} s")


@contextmanager
def computes_within(seconds: float, what: object = "it") -> Iterator[None]:
    """Fails if this thread computes for longer.

    What others do with the processor meanwhile does not count, and neither does the collection of
    garbage, which other tests have left: whoever allocates next pays for it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    started_s = time.thread_time()
    try:
        yield
        took_s = time.thread_time() - started_s
    finally:
        if was_enabled:
            gc.enable()
    assert took_s < seconds, f"{what!r:.60} took {took_s:.3f} s of the {seconds:g} s it may take"

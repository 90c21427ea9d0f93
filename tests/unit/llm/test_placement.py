"""Where environments are played: measured, and chosen by what it costs."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from envfleet.engine import probe
from envfleet.llm.placement import Cost, choose, measure
from tests.unit.llm.games import Climb, Trouble, TroubleConfig

QUICK = Cost(reset_s=50e-6, reset_cpu_s=50e-6, turn_s=9e-6, turn_cpu_s=9e-6, move_s=20e-6)


def where(cost: Cost, num_envs: int = 128, workers: int = 8, cores: int = 2) -> tuple[str, str]:
    placement = choose(cost, num_envs, workers, cores)
    return placement.resets, placement.turns


def test_what_is_quick_stays() -> None:
    assert where(QUICK) == ("here", "here")
    why = choose(QUICK, 128, 8, 2).why
    assert why == "reset in-process: 50 us, step in-process: 9 us < 30 us transport"


def test_slow_levels_are_made_elsewhere_and_played_here() -> None:
    slow = replace(QUICK, reset_s=5e-3, reset_cpu_s=5e-3)
    assert where(slow) == ("process", "here")
    assert choose(slow, 128, 8, 2).why == (
        "reset in workers, step in-process: 9 us < 30 us transport"
    )
    assert where(replace(slow, move_s=None)) == ("here", "here")  # it cannot come back
    assert where(replace(slow, move_s=8e-3)) == ("here", "here")  # it would come back too late
    assert where(slow, cores=1) == ("here", "here")
    assert where(slow, num_envs=1) == ("here", "here")


def test_who_waits_is_waited_for_in_threads() -> None:
    waiting = replace(QUICK, turn_s=20e-3)
    assert where(waiting) == ("thread", "thread")
    assert where(waiting, cores=1) == ("thread", "thread")
    assert where(waiting, workers=1) == ("here", "here")
    assert choose(waiting, 64, 8, 2).why == (
        "reset and step in threads: 20.0 ms per step > 2.5 ms shared by 8"
    )


def test_who_computes_does_so_in_workers() -> None:
    computing = replace(QUICK, turn_s=2e-3, turn_cpu_s=2e-3)
    assert where(computing) == ("process", "process")
    assert where(computing, cores=1) == ("here", "here")
    assert where(computing, num_envs=2) == ("here", "here")  # too little altogether


@pytest.mark.parametrize(
    ("sleeps_s", "computes_s", "kind"), [(0.01, 0.0, "waits"), (0.0, 0.01, "computes")]
)
def test_waiting_and_computing_are_told_apart(
    sleeps_s: float, computes_s: float, kind: str
) -> None:
    class Slow(Climb):
        def _act(self, action: Any) -> Any:
            time.sleep(sleeps_s)
            until_s = time.thread_time() + computes_s
            while time.thread_time() < until_s:
                pass
            return super()._act(action)

    cost = measure(Slow)
    assert cost.turn_s >= 0.01
    assert (cost.turn_cpu_s < 0.005) == (kind == "waits")
    assert cost.reset_s < 0.005
    assert cost.move_s is not None


def test_what_cannot_be_pickled_cannot_move_and_what_fails_is_measured_all_the_same() -> None:
    class Locked(Trouble):
        def __init__(self) -> None:
            super().__init__(TroubleConfig())
            self._lock = threading.Lock()

        def step(self, action: str) -> Any:
            raise ValueError("never")

    assert measure(Locked).move_s is None


@pytest.mark.parametrize(("num_waits", "is_counted"), [(3, False), (None, True)])
def test_who_never_gave_the_processor_away_did_not_wait(
    num_waits: int | None, is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Climb):
        def _act(self, action: Any) -> Any:
            time.sleep(0.01)  # stands for others who had the processor meanwhile
            return super()._act(action)

    monkeypatch.setattr(probe, "_num_waits", lambda: num_waits)
    assert (measure(Interrupted).turn_s >= 0.01) == is_counted


def test_what_only_the_first_takes_does_not_count() -> None:
    class ReadsFirst(Climb):
        has_read = False

        def _begin(self, seed: int, mode: Any) -> None:
            if not ReadsFirst.has_read:
                time.sleep(0.1)
            ReadsFirst.has_read = True
            super()._begin(seed, mode)

    assert measure(ReadsFirst).reset_s < 0.05


@pytest.mark.parametrize("error", [RuntimeError("it is stuck"), SystemExit("it is stuck")])
def test_one_that_cannot_be_closed_is_measured_all_the_same(error: BaseException) -> None:
    class Stuck(Climb):
        def close(self) -> None:
            raise error

    with pytest.warns(RuntimeWarning, match="Stuck failed in close: .*: it is stuck"):
        assert measure(Stuck).reset_s > 0

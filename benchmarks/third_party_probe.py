"""One check of one third-party environment, in an interpreter that has its package.

    python -m benchmarks.third_party_probe NAME CHECK FOLDER

The last line that is printed is the result as JSON: `cell`, a few words for the table, and `note`,
what the cell leaves out. `FOLDER` keeps the streams of the plain loop from check to check. What is
reported was done: two runs are called equal only where an episode ended in them.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gymnasium.vector.utils import concatenate, create_empty_array

import envfleet
from benchmarks.third_party_envs import SUBJECTS, Subject
from envfleet.learn.slot_keeper import SlotKeeper
from envfleet.testing import Streams, count_episodes, first_difference, fleet_driven, hand_driven
from envfleet.testing.streams import slot_actions
from envfleet.testing.values import unbatch, value_difference

NUM_ENVS = 3
STEPS = 100
BEFORE = 55
"""Steps before a snapshot or a kill: the first episodes, which began with a seed, are over."""
MODES = ("next_step", "same_step")
SEED = 7
LIMITS: dict[str, Any] = {"step_timeout_s": 60.0, "reset_timeout_s": 60.0}
PLACES: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread"},
    **{
        method: {"backend": "process", "start_method": method, **LIMITS}
        for method in ("fork", "spawn", "forkserver")
    },
}


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found."""

    cell: str
    note: str = ""


# ---- equality ------------------------------------------------------------------------------------


def by_hand(subject: Subject, folder: Path) -> Result:
    """Record the plain loop, twice: does the environment repeat itself?"""
    notes, cells = [], []
    for mode in MODES:
        one, other = (hand_driven(subject.build, NUM_ENVS, STEPS, SEED, mode) for _ in range(2))
        (folder / f"{mode}.pickle").write_bytes(pickle.dumps(one))
        found = _compared(one, other)
        cells.append(found.cell)
        notes.append(found.note)
    return _joined(cells, notes)


def in_a_fleet(subject: Subject, folder: Path, place: str) -> Result:
    """Compare a fleet with the plain loop, in both autoreset modes."""
    notes, cells = [], []
    for mode in MODES:
        expected = pickle.loads((folder / f"{mode}.pickle").read_bytes())
        try:
            got = fleet_driven(subject.build, NUM_ENVS, STEPS, SEED, mode, **_where(subject, place))
        except Exception as exc:
            cells.append("refused")
            notes.append(_said(exc))
            continue
        found = _compared(expected, got)
        cells.append(found.cell)
        notes.append(found.note)
    return _joined(cells, notes)


def _compared(expected: Streams, got: Streams) -> Result:
    found = first_difference(expected, got)
    if found is not None and "info" in found.field:
        without = first_difference(_without_infos(expected), _without_infos(got))
        if without is None:
            cell = _if_any_ended("yes, without infos", expected)
            return Result(cell, str(found))
        found = without
    if found is None:
        return Result(_if_any_ended("yes", expected))
    return Result("no", str(found))


def _if_any_ended(cell: str, streams: Streams) -> str:
    ended = sum(map(count_episodes, streams.slots))
    return cell if ended else f"{cell}, but no episode ended"


def _without_infos(streams: Streams) -> Streams:
    slots = tuple(tuple(replace(event, info={}) for event in events) for events in streams.slots)
    return replace(streams, slots=slots)


def _joined(cells: list[str], notes: list[str]) -> Result:
    """One cell for both modes, which are named only where they differ."""
    cell = cells[0]
    if len(set(cells)) > 1:
        cell = "; ".join(f"{mode}: {one}" for mode, one in zip(MODES, cells, strict=True))
    return Result(cell, next(filter(None, notes), ""))


# ---- states --------------------------------------------------------------------------------------


class Driver:
    """Drives a fleet by actions that depend on slot and number only."""

    def __init__(self, envs: envfleet.FleetVectorEnv) -> None:
        self._envs, self._space = envs, envs.single_action_space
        sources = [slot_actions(self._space, slot) for slot in range(NUM_ENVS)]
        self._each = [[next(source) for source in sources] for _ in range(3 * STEPS)]

    def step(self, number: int) -> tuple[Any, ...]:
        """The step of this number: observations, rewards and flags, as copies."""
        empty: Any = create_empty_array(self._space, n=NUM_ENVS)
        found = self._envs.step(concatenate(self._space, self._each[number], empty))
        return pickle.loads(pickle.dumps(found[:4]))

    def steps(self, first: int, end: int) -> list[tuple[Any, ...]]:
        """All steps of these numbers."""
        return [self.step(number) for number in range(first, end)]


def snapshot(subject: Subject, folder: Path) -> Result:
    """Take a snapshot, go on, come back, go on again: the same?"""
    with closing(_opened(subject)) as envs:
        driver = Driver(envs)
        envs.reset(seed=SEED)
        driver.steps(0, BEFORE)
        try:
            saved = envs.snapshot()
        except Exception as exc:
            return Result("refused", _said(exc))
        method = ", ".join(sorted({one.method for one in saved}))
        once = driver.steps(BEFORE, BEFORE + STEPS)
        try:
            envs.restore(saved)
        except Exception as exc:
            return Result(f"{method}: refused when restored", _said(exc))
        return _parted(once, driver.steps(BEFORE, BEFORE + STEPS), f"{method}, exact", method)


def killed_and_restarted(subject: Subject, folder: Path) -> Result:
    """Kill a worker: its slots come back truncated, and the others go on as they would have."""
    undisturbed, again = _undisturbed(subject), _undisturbed(subject)
    with closing(_opened(subject, on_failure="restart")) as envs:
        driver = Driver(envs)
        envs.reset(seed=SEED)
        before = driver.steps(0, BEFORE)[-1]
        lost = range(*envs.fleet.bounds[0])
        _kill_first(envs)
        started_s = time.monotonic()
        rows = driver.steps(BEFORE, BEFORE + 1)
        took_s = time.monotonic() - started_s
        told = [slot for one in envs.incidents for slot in one.slots]
        # an episode that had ended already is not truncated
        is_told = rows[0][3] | before[2] | before[3]
        if told != list(lost) or not is_told[lost.start : lost.stop].all():
            return Result("no", f"incidents of the slots {told}, truncated {rows[0][3]}")
        rows += driver.steps(BEFORE + 1, BEFORE + STEPS)
        space, others = envs.single_observation_space, range(lost.stop, NUM_ENVS)
    said = f"its slots came back {took_s:.1f} s after the kill"
    if _first_slot_that_differs(space, undisturbed, again, others) is not None:
        return Result("yes", f"{said}; the others cannot be compared, as none repeats itself")
    slot = _first_slot_that_differs(space, undisturbed, rows, others)
    return Result("yes", said) if slot is None else Result("other slots differ", f"slot {slot}")


def killed_and_resumed(subject: Subject, folder: Path) -> Result:
    """Kill a worker under `resume`: all rows as if nothing had happened?"""
    undisturbed, again = _undisturbed(subject), _undisturbed(subject)
    with closing(_opened(subject, on_failure="resume")) as envs:
        driver = Driver(envs)
        envs.reset(seed=SEED)
        driver.steps(0, BEFORE)
        _kill_first(envs)
        try:
            rows = driver.steps(BEFORE, BEFORE + STEPS)
        except Exception as exc:
            return Result("refused", _said(exc))
    if _parted(undisturbed, again, "exact", "").cell != "exact":
        return Result("resumed, not compared", "two runs in which nothing was killed differ")
    return _parted(undisturbed, rows, "exact", "resumed")


def checkpoint(subject: Subject, folder: Path) -> Result:
    """What a resumed training run does: states in a file, and a new process that goes on."""
    with closing(_opened(subject, on_failure="restart", autoreset="same_step")) as envs:
        driver = Driver(envs)
        envs.reset(seed=SEED)
        driver.steps(0, BEFORE)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = SlotKeeper(envs).take()
        if state is None:
            said = [str(one.message) for one in caught if "new episodes" in str(one.message)]
            return Result("new episodes, said when saved" if said else "new episodes", *said[:1])
        once = driver.steps(BEFORE, BEFORE + STEPS)
    (folder / "checkpoint.pickle").write_bytes(pickle.dumps((state, once)))
    command = [sys.executable, "-m", __spec__.name, subject.name, "go-on", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        return Result("no", f"the other process ended with {done.returncode}: {done.stderr[-300:]}")
    said = [line for line in done.stdout.splitlines() if line.startswith('{"cell"')]
    return Result(**json.loads(said[-1]))


def go_on(subject: Subject, folder: Path) -> Result:
    """The other half of `checkpoint`, in the new process."""
    state, once = pickle.loads((folder / "checkpoint.pickle").read_bytes())
    with closing(_opened(subject, on_failure="restart", autoreset="same_step")) as envs:
        try:
            envs.restore(state)
        except Exception as exc:
            return Result("refused", _said(exc))
        return _parted(once, Driver(envs).steps(BEFORE, BEFORE + STEPS), "exact", "restored")


def _opened(subject: Subject, **options: Any) -> envfleet.FleetVectorEnv:
    return envfleet.make_vec(
        subject.build,
        NUM_ENVS,
        backend="process",
        num_workers=subject.num_workers,
        **LIMITS,
        **options,
    )


def _where(subject: Subject, place: str) -> dict[str, Any]:
    where = dict(PLACES[place])
    return where if place == "serial" else {**where, "num_workers": subject.num_workers}


def _undisturbed(subject: Subject) -> list[tuple[Any, ...]]:
    with closing(_opened(subject)) as envs:
        envs.reset(seed=SEED)
        driver = Driver(envs)
        driver.steps(0, BEFORE)
        return driver.steps(BEFORE, BEFORE + STEPS)


def _kill_first(envs: envfleet.FleetVectorEnv) -> None:
    pid = envs.fleet.worker_pids()[0]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def _parted(expected: list[Any], got: list[Any], equal: str, how: str) -> Result:
    for number, (one, other) in enumerate(zip(expected, got, strict=True), 1):
        found = value_difference(one, other)
        if found is not None:
            return Result(f"{how}, differs after {number} steps", f"at {found.path}")
    return Result(equal)


def _first_slot_that_differs(
    space: Any, expected: list[Any], got: list[Any], slots: range
) -> int | None:
    for one, other in zip(expected, got, strict=True):
        for slot in slots:
            if value_difference(_row(space, one, slot), _row(space, other, slot)) is not None:
                return slot
    return None


def _row(space: Any, found: tuple[Any, ...], slot: int) -> tuple[Any, ...]:
    """One slot's part of a step."""
    return (unbatch(space, found[0], slot), *(column[slot] for column in found[1:]))


def _said(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {' '.join(str(exc).split())[:300]}"


CHECKS: dict[str, Callable[[Subject, Path], Result]] = {
    "by hand": by_hand,
    **{
        place: lambda subject, folder, place=place: in_a_fleet(subject, folder, place)  # type: ignore[misc]
        for place in PLACES
    },
    "snapshot": snapshot,
    "kill -9, restart": killed_and_restarted,
    "kill -9, resume": killed_and_resumed,
    "checkpoint": checkpoint,
}


def main() -> None:
    """Run the check that the command line names."""
    name, check, folder = sys.argv[1:]
    [subject] = [one for one in SUBJECTS if one.name == name]
    work = go_on if check == "go-on" else CHECKS[check]
    print(json.dumps(asdict(work(subject, Path(folder)))), flush=True)


if __name__ == "__main__":
    main()

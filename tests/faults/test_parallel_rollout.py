"""Workers and whole processes of a rollout are killed; nothing that was played is lost."""

import logging
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envfleet.errors import JournalError
from envfleet.llm.environments.base import Mode, Step
from envfleet.llm.inference.manager import SharedLLMInferenceManager
from envfleet.llm.inference.scripted import ScriptedEngine
from envfleet.llm.inference.types import GenerateRequest, Generation
from envfleet.llm.journal import read_journal
from envfleet.llm.parallel_rollout import ParallelRolloutManager
from envfleet.llm.registry import register_env
from envfleet.llm.same_trajectories import trajectory_difference
from envfleet.llm.seats import EnvSeats
from envfleet.llm.worker_round import WorkerRound, WorkersLost
from tests.gates import PATIENCE_S
from tests.misbehaving_server import FAULTS, MisbehavingServer
from tests.unit.llm.games import Climb
from tests.unit.llm.rollouts import config_with, play
from tests.unit.llm.test_parallel_rollout import Counting

TAGS = ("SimpleSokoban", "FrozenLake")
LATENCY_S = 0.01


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


class Killer(Counting):
    """Kills a worker each time that it has been asked so often, or later if it knows none yet."""

    def __init__(self, at: set[int], pids: Any) -> None:
        super().__init__()
        self._latency = lambda request, dice: LATENCY_S
        self._at, self._pids = sorted(at), pids
        self.killed: list[int] = []

    async def generate(self, request: GenerateRequest) -> Generation:
        due = [at for at in self._at if at <= sum(self.asked.values())]
        if len(self.killed) < len(due):
            for pid in [pid for pid in self._pids() if pid not in self.killed][-1:]:
                self.killed.append(pid)
                os.kill(pid, signal.SIGKILL)
        return await super().generate(request)


@pytest.mark.parametrize(
    ("backend", "at"), [("loky", {12}), ("multiprocessing", {3}), ("multiprocessing", {5, 20})]
)
def test_a_killed_worker_of_joblib_costs_nothing(
    backend: str, at: set[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "envfleet.llm.rollout")

    def pids() -> list[int]:
        return [int(pid) for pid in re.findall(r"plays in process (\d+)", caplog.text)]

    wanted = play(config_with(tags=TAGS, group_size=4))
    engine = Killer(at, pids)
    config = config_with(tags=TAGS, group_size=4, backend=backend)
    got = play(config, engine, folder=tmp_path)
    assert engine.killed
    assert "is lost" in caplog.text
    assert got.fallback is None
    assert trajectory_difference(wanted.trajectories, got.trajectories) is None
    assert got.metrics == wanted.metrics
    journalled = read_journal(tmp_path)
    assert trajectory_difference(wanted.trajectories, journalled.trajectories) is None
    assert not journalled.earlier


def test_a_killed_worker_of_the_fleet_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seats: list[Any] = []

    def keep(*args: Any) -> Any:
        seats.append(EnvSeats(*args))
        return seats[-1]

    monkeypatch.setattr("envfleet.llm.parallel_rollout.EnvSeats", keep)
    wanted = play(config_with(tags=TAGS, group_size=4))
    engine = Killer({4, 15}, lambda: seats[-1].worker_pids())
    got = play(config_with(tags=TAGS, group_size=4, backend="fleet"), engine)
    assert len(engine.killed) == 2
    assert trajectory_difference(wanted.trajectories, got.trajectories) is None
    assert max(engine.asked.values()) == 1


class Hanging(Climb):
    """Hangs in its first step, with one seed."""

    def _begin(self, seed: int, mode: Mode) -> None:
        super()._begin(seed, mode)
        self._hangs = seed == 7

    def _act(self, action: Any) -> Step:
        if self._hangs:
            time.sleep(PATIENCE_S)
        return super()._act(action)


def test_a_worker_that_hangs_is_killed_and_costs_its_own_trajectory_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    register_env("hanging-climb", Hanging)
    config = config_with(
        "+custom_envs.Hanging.env_type=hanging-climb",
        "+custom_envs.Hanging.max_actions_per_traj=6",
        "es_manager.step_timeout_s=1",
        "es_manager.max_restarts=2",
        "agent_proxy.on_failure=mask",
        tags=("Hanging", "FrozenLake", "SimpleSokoban"),
        group_size=1,
        backend="multiprocessing",
    )
    got = play(config)
    assert "hangs, and is killed" in caplog.text
    assert got.failures == {"env": 1}
    failure = got.trajectories[0].failure
    assert failure is not None
    assert failure.error == "its worker was lost 3 times"
    wanted = play(config_with(tags=("Countdown", "FrozenLake", "SimpleSokoban"), group_size=1))
    assert trajectory_difference(wanted.trajectories[1:], got.trajectories[1:]) is None


class Deadly(Climb):
    """Ends its worker in its first step, with one seed."""

    def _begin(self, seed: int, mode: Mode) -> None:
        super()._begin(seed, mode)
        self._is_deadly = seed == 7 and multiprocessing.parent_process() is not None

    def _act(self, action: Any) -> Step:
        if self._is_deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._act(action)


def test_trajectories_that_end_all_environments_of_a_fleet_cost_the_others_none() -> None:
    register_env("deadly-climb", Deadly)
    changes = [
        "+custom_envs.Deadly.env_type=deadly-climb",
        "+custom_envs.Deadly.max_actions_per_traj=6",
        "es_manager.train.env_groups=3",
        "es_manager.train.env_configs.n_groups=[3]",
        "es_manager.max_restarts=0",
        "agent_proxy.on_failure=mask",
    ]
    engine = ScriptedEngine(max_concurrency=2)
    engine.remembers_by_place = True  # type: ignore[attr-defined]
    got = play(config_with(*changes, tags=("Deadly",), backend="fleet"), engine)
    assert got.failures == {"env": 2}
    wanted = play(config_with(*changes, tags=("Deadly",)))
    assert trajectory_difference(wanted.trajectories[2:], got.trajectories[2:]) is None


def test_workers_that_cannot_start_leave_the_rollout_to_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(self: WorkerRound, *args: Any) -> None:
        raise WorkersLost("no worker started")

    monkeypatch.setattr(WorkerRound, "run", lost)
    got = play(config_with(tags=TAGS, backend="loky"))
    assert got.backend == "sequential"
    assert got.fallback == "the loky backend of joblib has no workers left: no worker started"
    assert (
        trajectory_difference(play(config_with(tags=TAGS)).trajectories, got.trajectories) is None
    )


def test_what_workers_played_before_they_were_lost_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rounds are cut off in the middle, and this process ends what they began."""
    rounds: list[int] = []
    whole = WorkerRound.run

    def cut(self: WorkerRound, on_entry: Any, on_lost: Any, is_done: Any, on_tick: Any) -> None:
        rounds.append(0)
        if len(rounds) > 1:
            raise WorkersLost("they were cut off")

        def limited(entry: dict[str, Any]) -> None:
            on_entry(entry)
            rounds[0] += 1
            if rounds[0] == 9:
                on_lost(self._share.lost(0) + self._share.lost(1))
                raise WorkersLost("they were cut off")

        whole(self, limited, on_lost, is_done, on_tick)

    monkeypatch.setattr(WorkerRound, "run", cut)
    engine = Counting()
    engine._latency = lambda request, dice: LATENCY_S
    got = play(config_with(tags=TAGS, backend="threading"), engine)
    assert got.fallback is not None
    assert (
        trajectory_difference(play(config_with(tags=TAGS)).trajectories, got.trajectories) is None
    )


PROGRAM = """
import sys
from tests.unit.llm.rollouts import config_with, play
from envfleet.llm.inference.scripted import ScriptedEngine

if __name__ == "__main__":
    engine = ScriptedEngine(latency=lambda request, dice: 0.02)
    backend = None if sys.argv[2] == "none" else sys.argv[2]
    play(config_with(tags=("SimpleSokoban", "FrozenLake"), group_size=4, backend=backend), engine,
         folder=sys.argv[1])
"""


@pytest.mark.parametrize(
    ("backend", "num_lines"), [("none", 12), ("none", 30), ("multiprocessing", 25)]
)
def test_a_killed_program_goes_on_where_it_was(
    backend: str, num_lines: int, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), backend], start_new_session=True
    )
    try:
        wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= num_lines)
        program.kill()
    finally:
        program.kill()
        program.wait()
    kept = {
        (one.env_id, turn.number)
        for one in read_journal(tmp_path).trajectories
        for turn in one.turns
    }
    assert kept
    engine = Counting()
    got = play(config_with(tags=TAGS, group_size=4), engine, folder=tmp_path)
    wanted = play(config_with(tags=TAGS, group_size=4))
    assert trajectory_difference(wanted.trajectories, got.trajectories) is None
    asked = {(int(env), int(turn)) for env, _, turn in (name.split(".") for name in engine.asked)}
    assert not asked & kept
    assert max(engine.asked.values()) == 1
    wait_until(lambda: not _children_of(program.pid))


def _children_of(session: int) -> list[int]:
    """Processes of a session that is over, which have to end by themselves."""
    found = subprocess.run(["ps", "-o", "pid=", "-s", str(session)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


@pytest.mark.parametrize("backend", [None, "threading"])
def test_a_full_disk_stops_a_rollout_which_goes_on_when_there_is_room(
    backend: str | None, tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    config = config_with(tags=TAGS, backend=backend)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(JournalError, match="cannot be written: File too large"):
            play(config, folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = sum(len(one.turns) for one in read_journal(tmp_path).trajectories)
    assert kept
    engine = Counting()
    got, wanted = play(config, engine, folder=tmp_path), play(config_with(tags=TAGS))
    assert trajectory_difference(wanted.trajectories, got.trajectories) is None
    assert sum(engine.asked.values()) == wanted.timings.num_turns - kept


# ---- a server that misbehaves -------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "threading"])
def test_a_server_that_misbehaves_changes_nothing(backend: str | None, tmp_path: Path) -> None:
    with MisbehavingServer() as server:
        config = config_with(
            f"llm.base_url={server.base_url}",
            "llm.engine=openai",
            "llm.retry_delay_s=0.01",
            "llm.max_retries=20",
            tags=TAGS,
            backend=backend,
        )
        with (
            SharedLLMInferenceManager.from_config(config) as llm,
            ParallelRolloutManager(config, llm) as manager,
        ):
            wanted = manager.rollout(seed=7)
            server.misbehave(*FAULTS)
            got = manager.rollout(seed=7, folder=tmp_path)
            assert sum(llm.stats.retries.values()) == len(FAULTS)
            assert got.failures == {}
            assert trajectory_difference(wanted.trajectories, got.trajectories) is None


def test_a_server_that_stays_broken_is_a_reason_and_a_later_one_goes_on(tmp_path: Path) -> None:
    with MisbehavingServer() as server:
        changes = [
            f"llm.base_url={server.base_url}",
            "llm.engine=openai",
            "llm.retry_delay_s=0.001",
            "llm.max_retries=1",
            "agent_proxy.on_failure=mask",
            "llm.grammar=false",
        ]
        config = config_with(*changes, tags=TAGS)
        server.always_misbehave("status 500")
        with (
            SharedLLMInferenceManager.from_config(config) as llm,
            ParallelRolloutManager(config, llm) as manager,
        ):
            broken = manager.rollout(seed=7)
            assert broken.failures == {"engine": 4}
            assert broken.num_masked == 4
            failure = broken.trajectories[0].failure
            assert failure is not None
            assert "500" in failure.error
            server.always_misbehave(None)
            assert manager.rollout(seed=7).failures == {}

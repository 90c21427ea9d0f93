"""Environments with several agents that raise, hang or lose their worker."""

import functools
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envfleet import errors
from envfleet.multiagent import AECVecEnv, AsyncPettingZooVecEnv
from envfleet.testing.values import value_difference
from tests.faults.stage import kill_and_wait
from tests.unit.multiagent import by_hand
from tests.unit.multiagent.dying_agents import DyingAgents, DyingAgentsParallel, _Dying

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.classic import connect_four_v3
    from pettingzoo.test.example_envs import generated_agents_parallel_v0

WORKERS: dict[str, Any] = {"backend": "process", "start_method": "fork", "num_workers": 2}
WHERE: dict[str, Any] = {**WORKERS, "on_failure": "resume", "max_restarts": 100}


class _Troubled(_Dying):
    """Meets its trouble at the third action of its life, once for each folder."""

    def __init__(self, trouble, once, **options):
        super().__init__(is_truncating=True, **options)
        self.trouble, self.once, self.num_actions = trouble, Path(once), 0

    def carry_out(self, agent, action):
        self.num_actions += 1
        mark = self.once / "met"
        if self.num_actions == 3 and not mark.exists():
            mark.touch()
            if self.trouble == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "hang":
                time.sleep(3600)
            raise RuntimeError(f"{agent} stumbles")
        super().carry_out(agent, action)


class TroubledParallel(_Troubled, DyingAgentsParallel):
    pass


class TroubledTurns(_Troubled, DyingAgents):
    pass


def kill_worker(vec: Any, worker: int) -> None:
    kill_and_wait(vec.envs.fleet.worker_pids()[worker])


def killer(vec, at):
    """Kills a worker before these steps, each time another."""
    left = set(at)

    def meanwhile(number):
        for due in [one for one in left if one <= number]:
            left.discard(due)
            kill_worker(vec, due % 2)

    return meanwhile


def test_parallel_environments_go_on_after_a_worker_was_killed():
    make = functools.partial(DyingAgentsParallel, is_truncating=True)
    expected = by_hand.parallel_by_hand(make, 4, 30, 0)
    with AsyncPettingZooVecEnv([make] * 4, **WHERE) as vec:
        got = by_hand.parallel_by_fleet(vec, 30, 0, meanwhile=killer(vec, (4, 9, 20)))
        assert len(vec.incidents) == 3
    by_hand.assert_same(expected, got)


@pytest.mark.parametrize(
    "make", [connect_four_v3.env, functools.partial(DyingAgents, is_truncating=True)]
)
def test_turns_go_on_after_a_worker_was_killed(make):
    expected = by_hand.turns_by_hand(make, 4, 40, 0, legal_rate=0.9)
    with AECVecEnv([make] * 4, **WHERE) as vec:
        got = by_hand.turns_by_fleet(vec, 40, 0, 0.9, meanwhile=killer(vec, (4, 9, 30)))
        assert len(vec.incidents) == 3
    by_hand.assert_same(expected, got)


@pytest.mark.parametrize("trouble", ["raise", "kill", "hang"])
def test_trouble_within_a_step_is_as_if_it_had_not_been(trouble, tmp_path):
    parallel = functools.partial(TroubledParallel, trouble, tmp_path)
    turns = functools.partial(TroubledTurns, trouble, tmp_path)
    limits: dict[str, Any] = {"step_timeout_s": 2.0 if trouble == "hang" else 60.0}
    (tmp_path / "met").touch()
    expected = by_hand.parallel_by_hand(parallel, 2, 15, 0)
    expected_turns = by_hand.turns_by_hand(turns, 2, 15, 0)
    (tmp_path / "met").unlink()
    with AsyncPettingZooVecEnv([parallel] * 2, **WHERE, **limits) as vec:
        by_hand.assert_same(expected, by_hand.parallel_by_fleet(vec, 15, 0))
        assert vec.incidents
    (tmp_path / "met").unlink()
    with AECVecEnv([turns] * 2, **WHERE, **limits) as vec:
        by_hand.assert_same(expected_turns, by_hand.turns_by_fleet(vec, 15, 0))
        assert vec.incidents


def test_an_agent_that_raises_is_named(tmp_path):
    make = functools.partial(TroubledParallel, "raise", tmp_path, death_rate=0.0)
    with AsyncPettingZooVecEnv([make] * 2, **WORKERS) as vec:
        vec.reset(seed=0)
        actions = {name: np.zeros(2, np.int64) for name in vec.agents}
        with pytest.raises(errors.EnvFailed, match="hare_0 stumbles"):
            vec.step(actions)
        vec.reset(seed=0)
        vec.step(actions)


def test_a_lost_worker_without_recovery_is_an_error():
    with AECVecEnv([connect_four_v3.env] * 2, **WORKERS) as vec:
        batch = vec.reset(seed=0)
        kill_worker(vec, 0)
        with pytest.raises(errors.WorkerDied, match="killed"):
            vec.step(batch.masks.argmax(axis=1))


def test_a_restarted_slot_earns_nothing_twice():
    """It shows its last record once more, as truncated."""
    make = functools.partial(DyingAgentsParallel, death_rate=0.0)
    with AsyncPettingZooVecEnv([make] * 2, **WORKERS, on_failure="restart") as vec:
        vec.reset(seed=0)
        actions = {name: np.zeros(2, np.int64) for name in vec.agents}
        _, before, *_ = vec.step(actions)
        assert all(rewards.all() for rewards in before.values())
        kill_worker(vec, 0)
        _, rewards, terminated, truncated, infos = vec.step(actions)
        assert infos["_final_obs"].tolist() == [True, False]
        for name in vec.agents:
            assert rewards[name][0] == 0
            assert rewards[name][1] != 0
            assert truncated[name].tolist() == [True, False]
            assert not terminated[name].any()
            assert vec.alive[name].all()


def test_turns_on_seats_are_the_same_after_a_worker_was_killed():
    make = functools.partial(DyingAgents, is_truncating=True)

    def drive(is_killed):
        with AECVecEnv([make] * 2, seats=3, **WHERE) as vec:
            batch, found = vec.reset(seed=0), []
            for number in range(25):
                if is_killed and number in (5, 20):
                    kill_worker(vec, number // 20)
                batch = vec.step([0, 0])
                found.append((batch.agents, batch.obs, batch.all_rewards, batch.final_seen))
        return found

    assert value_difference(drive(False), drive(True)) is None


def test_seats_are_the_same_after_a_worker_was_killed():
    make = functools.partial(generated_agents_parallel_v0.parallel_env, max_cycles=15)

    def drive(is_killed):
        with AsyncPettingZooVecEnv([make] * 2, seats=30, **WHERE) as vec:
            vec.reset(seed=0)
            found = []
            for number in range(25):
                if is_killed and number in (5, 20):
                    kill_worker(vec, number // 20)
                batch = vec.last_batch
                actions = [dict.fromkeys(names, 0) for names in batch.names]
                obs, rewards, terminated, truncated, _ = vec.step(actions)
                found.append((vec.last_batch.names, obs, rewards, terminated, truncated))
        return found

    assert value_difference(drive(False), drive(True)) is None

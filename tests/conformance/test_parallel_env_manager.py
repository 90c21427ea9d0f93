"""`ParallelEnvManager`: the rows of sequential stepping, on every backend, whatever happens."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envfleet import meta
from envfleet.errors import (
    ConfigError,
    DeadlineExceeded,
    EnvFailed,
    FleetClosed,
    NothingSent,
    ResetNeeded,
    SlotQuarantined,
    StillInFlight,
)
from envfleet.meta import make_parallel_env
from envfleet.meta.parallel import NotAnswered
from tests.conformance.matrix import EVERY, FORK

make_env: Any = meta.make_env

TASKS = {"num_train_tasks": 5, "num_eval_tasks": 3}
WAIT_S = 60.0


def backend_arguments(how):
    renamed = dict(how)
    if "num_workers" in renamed:
        renamed["num_processes"] = renamed.pop("num_workers")
    return renamed


def opened(name="PointRobot-v0", num_workers=3, how=FORK, **kwargs):
    return make_parallel_env(
        name, 2, num_workers, **{"seed": 3, **TASKS, **backend_arguments(how), **kwargs}
    )


class Slow(gymnasium.Env):
    """Waits in a step as many seconds as its action says; an action of -1 raises."""

    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(1000, start=-1)
    _max_episode_steps = 1000

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action < 0:
            raise ValueError("broken")
        time.sleep(float(action))
        return np.zeros(1, np.float32), 1.0, False, False, {}


def rollout_alone(env, task, rng):
    """One trial by `make_env`, with random actions."""
    obs, info = env.reset(task=task)
    rows, is_over = [(obs, info)], False
    while not is_over:
        row = env.step(rng.uniform(-1, 1, env.action_space.shape).astype(np.float32))
        rows.append(row)
        is_over = row[2] or row[3]
    return rows


def assert_same(row, expected):
    assert len(row) == len(expected)
    for one, other in zip(row[:-1], expected[:-1], strict=True):
        assert np.array_equal(one, other)
    assert row[-1].keys() == expected[-1].keys()
    for key, value in row[-1].items():
        assert np.array_equal(value, expected[-1][key])


def rollouts_by_remotes(manager, tasks, rngs, on_step=lambda step: None):
    """Worker i runs a trial of `tasks[i]`; all of them side by side, by the pipe interface."""
    for worker, task in enumerate(tasks):
        manager.remotes[worker].send(("reset", {"task": task}))
    rows = [[remote.recv()] for remote in manager.remotes[: len(tasks)]]
    running = set(range(len(tasks)))
    step = 0
    while running:
        on_step(step)
        for worker in sorted(running):
            action = rngs[worker].uniform(-1, 1, manager.action_space.shape)
            manager.remotes[worker].send(("step", action.astype(np.float32)))
        for worker in sorted(running, reverse=True):  # in any order
            row = manager.remotes[worker].recv()
            rows[worker].append(row)
            if row[2] or row[3]:
                running.discard(worker)
        step += 1
    return rows


def check_equal_to_alone(manager, name, tasks, on_step=lambda step: None, **kwargs):
    seeds = manager.seeds
    together = [
        rollouts_by_remotes(
            manager, tasks, [np.random.default_rng([part, i]) for i in range(len(tasks))], on_step
        )
        for part in range(2)
    ]
    for worker, task in enumerate(tasks):
        env = make_env(name, 2, seed=seeds[worker], **TASKS, **kwargs)
        for part in range(2):
            expected = rollout_alone(env, task, np.random.default_rng([part, worker]))
            rows = together[part][worker]
            assert len(rows) == len(expected)
            for row, other in zip(rows, expected, strict=True):
                assert_same(row, other)


class TestEquality:
    @pytest.mark.parametrize("how", EVERY)
    def test_with_sequential_stepping_on_every_backend(self, how):
        kwargs = {"oracle": True, "max_episode_steps": 15}
        with opened(how=how, **kwargs) as manager:
            check_equal_to_alone(manager, "PointRobot-v0", [4, None, 4], **kwargs)

    @pytest.mark.parametrize("name", ["AntDir-v0", "HopperRandParams-v0", "Wind-v0"])
    def test_of_other_environments_which_end_at_their_own_pace(self, name):
        kwargs = {"max_episode_steps": 25}
        with opened(name, how=FORK, **kwargs) as manager:
            check_equal_to_alone(manager, name, [0, 1, 7], **kwargs)

    @pytest.mark.parametrize("name", ["PointRobot-v0", "AntGoal-v0"])
    def test_with_a_process_killed_in_the_middle_of_a_rollout(self, name):
        kwargs = {"max_episode_steps": 20}
        with opened(name, how=FORK, **kwargs) as manager:
            killed: list[Any] = []

            def kill(step):
                if step in (7, 23):
                    pid = manager.fleet.worker_pids()[len(killed) % 2]
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

            check_equal_to_alone(manager, name, [2, None, 0], kill, **kwargs)
            assert len(killed) == 4
            assert len({incident.slot for incident in manager.fleet.incidents}) >= 2

    def test_of_a_batch_with_the_same_rows(self):
        with opened() as manager, opened() as other:
            actions = np.random.default_rng(0).uniform(-1, 1, (9, 3, 2)).astype(np.float32)
            batch = manager.reset(tasks=[0, 1, 2])
            assert not batch.valid.any()
            for worker, remote in enumerate(other.remotes):
                remote.send(("reset", {"task": worker}))
                assert np.array_equal(remote.recv()[0], batch.obs[worker])
            for action in actions:
                batch = manager.step(action)
                for worker, remote in enumerate(other.remotes):
                    remote.send(("step", action[worker]))
                    obs, reward, *_ = remote.recv()
                    assert np.array_equal(obs, batch.obs[worker])
                    assert reward == batch.rewards[worker]

    def test_task_i_is_one_goal_in_all_workers_in_evaluation_and_after_a_kill(self):
        evaluation = make_env("PointRobot-v0", 2, seed=99, oracle=True, **TASKS)
        with opened(oracle=True) as manager:
            for task in range(8):
                goal = evaluation.reset(task=task)[0][2:4]
                batch = manager.reset(tasks=[task] * 3)
                assert (batch.obs[:, 2:4] == goal).all()
            os.kill(manager.fleet.worker_pids()[0], signal.SIGKILL)
            assert (manager.reset(tasks=[7] * 3).obs[:, 2:4] == goal).all()
            assert len({tuple(start) for start in manager.fleet.observations()[:, :2]}) == 3

    def test_the_lists_are_known_here(self):
        with opened() as manager:
            assert manager.train_tasks == [0, 1, 2, 3, 4]
            assert manager.eval_tasks == [5, 6, 7]
            assert manager.horizon_bamdp == 120
            assert manager.observation_space.shape == (3,)


class TestPace:
    def test_some_workers_step_while_others_wait(self):
        with opened() as manager:
            manager.reset(tasks=[0, 1, 2])
            batch = manager.step(np.zeros((2, 2), np.float32), workers=[2, 0])
            assert batch.slots.tolist() == [2, 0]
            manager.send_reset([3], [1])
            manager.send(np.zeros((2, 2), np.float32), [0, 2])
            batch = manager.recv()
            assert dict(zip(batch.slots.tolist(), batch.valid.tolist(), strict=True)) == {
                0: True,
                1: False,
                2: True,
            }

    def test_an_idle_worker_takes_the_next_rollout(self):
        finished: list[Any] = []
        num_rollouts, started = 7, 0
        with opened("GridNavi-v0") as manager:
            rollout_of = {}
            for worker in range(3):
                manager.send_reset([started % 5], [worker])
                rollout_of[worker], started = started, started + 1
            while len(finished) < num_rollouts:
                batch = manager.recv(min_workers=1)
                for worker, is_over in zip(batch.slots.tolist(), batch.truncated, strict=True):
                    if not is_over:
                        manager.send([1], [worker])
                        continue
                    finished.append(rollout_of[worker])
                    if started < num_rollouts:
                        manager.send_reset([started % 5], [worker])
                        rollout_of[worker], started = started, started + 1
        assert sorted(finished) == list(range(7))

    def test_a_slow_one_does_not_hold_up_the_others(self):
        with make_parallel_env(Slow, 1, 2, num_processes=2) as manager:
            manager.reset()
            manager.send([30, 0])
            assert manager.recv(min_workers=1).slots.tolist() == [1]
            assert not manager.remotes[0].poll()
            started = time.monotonic()
            with pytest.raises(NotAnswered, match=r"not answered its step \(request 3\)"):
                manager.remotes[0].recv(timeout_s=0.05)
            assert time.monotonic() - started < 20


class TestMisuse:
    def test_recv_without_send(self):
        with opened() as manager:
            with pytest.raises(NothingSent, match="worker 1 has nothing to answer"):
                manager.remotes[1].recv()
            with pytest.raises(NothingSent, match="worker 1 has nothing to answer"):
                manager.remotes[1].poll()
            with pytest.raises(NothingSent, match="nothing to wait for"):
                manager.recv()
            manager.remotes[1].send(("reset", {"task": 0}))
            manager.remotes[1].recv()
            with pytest.raises(NothingSent):
                manager.remotes[1].recv()

    def test_two_sends(self):
        with opened() as manager:
            remote = manager.remotes[0]
            assert remote.send(("reset", {"task": 0})) == 1
            for message in (("reset", {"task": 1}), ("step", np.zeros(2))):
                with pytest.raises(StillInFlight, match=r"asked for a reset \(request 1\)"):
                    remote.send(message)
            with pytest.raises(StillInFlight):
                manager.step(np.zeros((3, 2)))
            assert len(remote.recv()) == 2
            assert remote.send(("step", np.zeros(2))) == 2
            assert len(remote.recv()) == 5

    def test_a_step_before_a_reset(self):
        with opened() as manager:
            with pytest.raises(ResetNeeded):
                manager.remotes[0].send(("step", np.zeros(2)))
            manager.remotes[0].send(("reset", {}))
            manager.remotes[0].recv()

    def test_a_step_after_the_end(self):
        with opened("GridNavi-v0", max_episode_steps=1) as manager:
            manager.reset()
            manager.step([0, 0, 0])
            assert manager.step([0, 0, 0]).truncated.all()
            with pytest.raises(ResetNeeded):
                manager.step([0, 0, 0])

    @pytest.mark.parametrize(
        ("message", "text"),
        [
            (("close", None), "a worker knows 'reset' and 'step', not 'close'"),
            (("reset", {"goal": 1}), "a reset takes task, seed and options, not goal"),
            ("reset", "send takes a pair"),
        ],
    )
    def test_unknown_commands(self, message, text):
        with opened(how={"backend": "serial"}) as manager:
            with pytest.raises(ConfigError, match=text):
                manager.remotes[0].send(message)
            manager.remotes[0].send(("reset", None))
            manager.remotes[0].recv()

    @pytest.mark.parametrize("workers", [[3], [-1], [0, 0], []])
    def test_unknown_workers(self, workers):
        wrong = pytest.raises(ConfigError, match="different numbers from 0 to 2")
        with opened(how={"backend": "serial"}) as manager, wrong:
            manager.reset(workers=workers)

    def test_too_few_tasks(self):
        wrong = pytest.raises(ConfigError, match="tasks must have one item for each of 3 workers")
        with opened(how={"backend": "serial"}) as manager, wrong:
            manager.reset(tasks=[1])

    def test_an_unknown_task_is_the_error_of_that_worker_only(self):
        with opened(on_failure="raise") as manager:
            for worker, task in enumerate([0, 77, 2]):
                manager.remotes[worker].send(("reset", {"task": task}))
            assert len(manager.remotes[0].recv()) == 2
            with pytest.raises(EnvFailed, match="there is no task 77"):
                manager.remotes[1].recv()
            assert len(manager.remotes[2].recv()) == 2
            manager.remotes[1].send(("reset", {"task": 1}))
            assert len(manager.remotes[1].recv()) == 2

    def test_an_error_of_one_worker_is_not_raised_by_another(self):
        with make_parallel_env(Slow, 1, 2, num_processes=2, on_failure="raise") as manager:
            manager.reset()
            manager.remotes[0].send(("step", -1))
            manager.remotes[1].send(("step", 1))
            assert manager.remotes[1].recv()[1] == 1.0
            assert manager.remotes[0].poll(WAIT_S)
            with pytest.raises(EnvFailed, match="broken"):
                manager.remotes[0].recv()
            assert len(manager.reset()) == 2

    def test_an_environment_that_always_fails_is_given_up(self):
        with make_parallel_env(Slow, 1, 2, num_processes=2) as manager:
            manager.reset()
            manager.remotes[0].send(("step", -1))
            with pytest.raises(SlotQuarantined, match="broken"):
                manager.remotes[0].recv()
            manager.remotes[1].send(("step", 0))
            assert manager.remotes[1].recv()[1] == 1.0


class TestInterrupts:
    @pytest.fixture
    def alarm(self):
        def ring(*_):
            raise InterruptedError("ring")

        before = signal.signal(signal.SIGALRM, ring)
        yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.2)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    def test_after_a_step_that_was_interrupted_all_can_go_on(self, alarm):
        with make_parallel_env(Slow, 1, 2, num_processes=2) as manager:
            manager.reset()
            alarm()
            with pytest.raises(InterruptedError, match="ring"):
                manager.step([1, 1])
            assert len(manager.step([0, 0])) == 2
            assert len(manager.reset()) == 2

    def test_an_answer_whose_recv_was_interrupted_still_comes(self, alarm):
        with make_parallel_env(Slow, 1, 2, num_processes=2) as manager:
            manager.reset()
            manager.send([1, 0])
            alarm()
            with pytest.raises(InterruptedError, match="ring"):
                manager.remotes[0].recv()
            assert manager.remotes[0].recv()[1] == 1.0
            assert manager.remotes[1].recv()[1] == 1.0

    def test_after_a_step_of_which_a_part_failed_all_can_go_on(self):
        with make_parallel_env(Slow, 1, 2, num_processes=2, on_failure="raise") as manager:
            manager.reset()
            with pytest.raises(EnvFailed, match="broken"):
                manager.step([0, -1])
            assert len(manager.reset()) == 2


class TestDeadlines:
    def test_a_hanging_environment_is_stopped(self):
        with make_parallel_env(
            Slow, 1, 2, num_processes=2, on_failure="raise", step_timeout_s=0.5
        ) as manager:
            manager.reset()
            manager.remotes[0].send(("step", 500))
            with pytest.raises(DeadlineExceeded, match="raise step_timeout_s"):
                manager.remotes[0].recv()
            manager.remotes[1].send(("step", 0))
            assert manager.remotes[1].recv()[1] == 1.0

    def test_an_answer_that_was_not_awaited_can_be_received_later(self):
        with make_parallel_env(Slow, 1, 2, num_processes=2) as manager:
            manager.reset()
            manager.remotes[0].send(("step", 1))
            with pytest.raises(NotAnswered):
                manager.remotes[0].recv(timeout_s=0)
            assert manager.remotes[0].poll(WAIT_S)
            assert manager.remotes[0].poll()
            with pytest.raises(StillInFlight, match="was polled"):
                manager.recv()
            assert manager.remotes[0].recv()[1] == 1.0


class TestResources:
    def test_256_workers_open_no_more_files_than_2(self):
        def open_files(num_workers):
            with opened(num_workers=num_workers, how=FORK) as manager:
                assert len(manager.reset()) == num_workers
                return len(os.listdir("/proc/self/fd"))

        assert open_files(256) == open_files(2)

    def test_processes_default_to_the_usable_cores(self):
        with make_parallel_env("PointRobot-v0", 2, 64) as manager:
            assert len(manager.fleet.worker_pids()) == min(64, len(os.sched_getaffinity(0)))
            assert len(manager.remotes) == manager.num_workers == 64
            assert "64 environments in" in manager.plan

    def test_deleting_the_manager_ends_its_processes(self):
        manager = opened()
        remote, gone = manager.remotes[0], weakref.ref(manager)
        pids = manager.fleet.worker_pids()
        remote.send(("reset", {"task": 0}))  # an answer is under way
        del manager
        gc.collect()
        assert gone() is None  # a remote does not keep it
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        with pytest.raises(FleetClosed, match="was deleted"):
            remote.recv()

    def test_close_twice_and_use_after_it(self):
        manager = opened(how={"backend": "serial"})
        manager.close()
        manager.close()
        with pytest.raises(FleetClosed):
            manager.remotes[0].send(("reset", {"task": 0}))

    def test_a_program_that_ends_leaves_nothing_and_says_nothing(self, tmp_path):
        script = tmp_path / "program.py"
        script.write_text(
            textwrap.dedent(
                """
                from envfleet.meta import make_parallel_env

                parallel = make_parallel_env("PointRobot-v0", 2, num_workers=4, num_processes=2)
                parallel.remotes[0].send(("reset", {"task": 0}))
                print(*parallel.fleet.worker_pids())
                """
            )
        )
        done = subprocess.run(
            [sys.executable, "-W", "error", script],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert done.stderr == ""
        assert not any(os.path.exists(f"/proc/{pid}") for pid in done.stdout.split())

    def test_no_thread_is_started(self):
        before = threading.active_count()
        with opened():
            assert threading.active_count() == before


def test_seeds_of_workers_differ_from_each_other_and_from_those_of_neighbouring_seeds():
    how = {"backend": "serial"}
    with opened(how=how, seed=0) as one, opened(how=how, seed=1) as other:
        assert len({*one.seeds, *other.seeds, 0, 1}) == 8
        first = one.reset(tasks=[0, 0, 0]).obs
        assert len({tuple(row) for row in first}) == 3


def test_a_seed_of_a_reset_goes_before():
    with opened(how={"backend": "serial"}) as manager:
        first = manager.reset(tasks=[1, 1, 1], seeds=[8, 8, None]).obs
        again = manager.reset(tasks=[1], seeds=[8], workers=[2]).obs
        alone, _ = make_env("PointRobot-v0", 2, **TASKS).reset(seed=8, task=1)
        assert (first[0] == alone).all()
        assert (first[1] == alone).all()
        assert (again[0] == alone).all()
        assert (first[2] != alone).any()

"""`envfleet.adapters.sb3` held against Stable-Baselines3's own classes by one script for both.

Stable-Baselines3's own tests run by `scripts/sb3_tests`, for which a checkout is needed.
"""

import functools
import os
import pickle
import signal
import sys
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import tqdm
from gymnasium.utils.env_checker import data_equivalence
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common import vec_env as theirs
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

from envfleet import errors
from envfleet.adapters import sb3 as ours
from envfleet.testing import Counter, Crashing, TwoArgumentException
from tests.unit.sb3_envs import Corridor, DictActions, Maze, Outer, Outermost, SeedOnly

BACKENDS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread", "num_workers": 2},
    "process": {"backend": "process", "num_workers": 2, "start_method": "fork"},
}
CARTPOLE = functools.partial(gymnasium.make, "CartPole-v1")
PENDULUM = functools.partial(gymnasium.make, "Pendulum-v1")
FORK: dict[str, Any] = {"start_method": "fork", "num_workers": 2}


@pytest.fixture(autouse=True)
def one_thread_each():
    """On a busy machine PyTorch's threads wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BACKENDS)
def options(request):
    return BACKENDS[request.param]


def opened(env_fns, **options):
    return closing(ours.FleetVecEnv(env_fns, **options))


def kill_worker(envs, worker):
    os.kill(envs.fleet.worker_pids()[worker], signal.SIGKILL)


def plain(obs):
    """SB3's DummyVecEnv gives an OrderedDict, its SubprocVecEnv and ours a dict."""
    return dict(obs) if isinstance(obs, dict) else obs


def begin_alike(left, right, seed=7):
    for one in (left, right):
        one.seed(seed)
    assert data_equivalence(plain(left.reset()), right.reset(), exact=True)
    assert data_equivalence(list(left.reset_infos), list(right.reset_infos), exact=True)


def step_alike(left, right, steps, at_step=lambda number: None):
    """Step both with the same actions; the number of episodes that ended."""
    left.action_space.seed(3)
    num_ends = 0
    for number in range(steps):
        at_step(number)
        actions = np.array([left.action_space.sample() for _ in range(left.num_envs)])
        expected, got = left.step(actions), right.step(actions)
        expected = plain(expected[0]), *expected[1:]
        assert [type(part) for part in got] == [type(part) for part in expected]
        assert got[1].dtype == np.float32
        assert got[2].dtype == np.bool_
        assert data_equivalence(expected[:3], got[:3], exact=True)
        for one, other in zip(expected[3], got[3], strict=True):
            assert list(one) == list(other)
            assert data_equivalence(one, other, exact=True)
        assert data_equivalence(list(left.reset_infos), list(right.reset_infos), exact=True)
        num_ends += int(expected[2].sum())
    return num_ends


class TestEquality:
    @pytest.mark.parametrize("env_fn", [Maze, CARTPOLE], ids=["maze", "cartpole"])
    def test_with_dummy_vec_env_slot_by_slot(self, env_fn, options):
        with (
            closing(theirs.DummyVecEnv([env_fn] * 5)) as left,
            opened([env_fn] * 5, **options) as right,
        ):
            begin_alike(left, right)
            assert step_alike(left, right, 60) > 5
            begin_alike(left, right, seed=11)  # a reset in the midst of episodes
            step_alike(left, right, 10)

    def test_continuous_actions(self, options):
        with (
            closing(theirs.DummyVecEnv([PENDULUM] * 3)) as left,
            opened([PENDULUM] * 3, **options) as right,
        ):
            begin_alike(left, right)
            assert step_alike(left, right, 210) == 3  # all are truncated

    @pytest.mark.parametrize("env_fn", [Maze, CARTPOLE], ids=["maze", "cartpole"])
    def test_also_after_a_worker_was_killed(self, env_fn):
        with (
            closing(theirs.DummyVecEnv([env_fn] * 4)) as left,
            closing(ours.SubprocVecEnv([env_fn] * 4, on_failure="resume", **FORK)) as right,
        ):
            begin_alike(left, right)

            def kill(number):
                if number == 17:
                    kill_worker(right, 0)

            assert step_alike(left, right, 60, at_step=kill) > 4
            assert len(right.incidents) == 1

    def test_options_and_seeds_count_once(self, options):
        each = [{"place": number} for number in range(3)]
        with (
            closing(theirs.DummyVecEnv([Maze] * 3)) as left,
            opened([Maze] * 3, **options) as right,
        ):
            for given in ({"hello": 1}, each, None):
                for one in (left, right):
                    one.set_options(given)
                begin_alike(left, right)
                assert data_equivalence(left.get_attr("options"), right.get_attr("options"))
            right.set_options({"hello": 2})
            right.reset()
            right.reset()
            assert right.get_attr("options") == [None] * 3


class TestContract:
    def test_attributes_and_methods(self, options):
        with opened([make_wrapped] * 3, **options) as envs:
            assert not envs.has_attr("dummy")
            assert envs.set_attr("dummy", 12) is None
            assert envs.has_attr("dummy")
            assert envs.get_attr("dummy") == [12] * 3
            envs.set_attr("dummy", 5, indices=[0, -1])
            assert envs.get_attr("dummy") == [5, 12, 5]
            assert envs.get_attr("dummy", indices=1) == [12]
            assert envs.get_attr("dummy", indices=np.int64(2)) == [5]
            assert envs.get_attr("dummy", indices=(2, 1, 2)) == [5, 12, 5]
            assert envs.get_attr("dummy", indices=[]) == []
            envs.reset()
            assert envs.env_method("add", 1, right=2) == [3] * 3
            assert envs.env_method("add", 1, indices=range(2)) == [1] * 2
            assert envs.env_is_wrapped(Outer) == [True] * 3
            assert envs.env_is_wrapped(Monitor, indices=0) == [False]
            with pytest.raises(AttributeError, match="no_such_name"):
                envs.get_attr("no_such_name")
            with pytest.raises(AttributeError, match="no_such_name"):
                envs.env_method("no_such_name")
            with pytest.raises(IndexError, match=r"within the 3 environments, got \[3\]"):
                envs.get_attr("dummy", indices=[3])

    def test_set_attr_is_of_the_outermost_layer(self, options):
        with opened([make_wrapped] * 2, **options) as envs:
            envs.set_attr("t", 40)
            layers = envs.fleet.apply(lambda env: (vars(env).get("t"), env.unwrapped.t))
            assert layers == [(40, 0)] * 2

    def test_get_attr_calls_nothing(self):
        with opened([Counter], backend="serial") as envs:
            (add,) = envs.get_attr("add")
            assert add(1, 2) == 3

    def test_dummy_vec_env_shows_its_envs(self):
        with closing(ours.DummyVecEnv([Maze, Maze])) as envs:
            assert [type(env) for env in envs.envs] == [Maze, Maze]
            envs.set_attr("dummy", 1)
            assert vars(envs.envs[0])["dummy"] == 1
            assert envs.action_space is envs.envs[0].action_space

    @pytest.mark.parametrize("name", ["DummyVecEnv", "SubprocVecEnv"])
    def test_one_instance_in_two_slots_is_refused(self, name):
        env = Counter()
        with pytest.raises(ValueError, match="the same environment instance"):
            getattr(ours, name)([lambda: env] * 4)

    def test_an_instance_is_refused(self):
        instance: Any = Counter()
        with pytest.raises(ValueError, match="pass a function that builds one"):
            ours.DummyVecEnv([instance])

    def test_a_wrong_start_method_is_refused(self):
        with pytest.raises(ValueError, match="cannot find context for 'illegal'"):
            ours.SubprocVecEnv([Counter], start_method="illegal")

    def test_images(self, options):
        with opened([Maze] * 3, **options) as envs:
            envs.reset()
            assert [image.shape for image in envs.get_images()] == [(4, 4, 3)] * 3
            assert envs.render().shape == (8, 8, 3)
            with pytest.warns(UserWarning, match="has to be the same"):
                envs.render(mode="something_else")
        with (
            opened([CARTPOLE] * 2, **options) as envs,
            pytest.warns(UserWarning, match="no images"),
        ):
            assert envs.get_images() == [None, None]

    def test_a_step_before_any_reset_resets(self):
        with (
            opened([Maze] * 2, backend="serial") as early,
            opened([Maze] * 2, backend="serial") as late,
        ):
            early.seed(1)
            late.seed(1)
            late.reset()
            actions = np.zeros(2, np.int64)
            assert data_equivalence(early.step(actions)[0], late.step(actions)[0], exact=True)

    def test_a_reset_cancels_a_step(self, options):
        with opened([Counter] * 2, **options) as envs:
            envs.reset()
            envs.step_async(np.zeros(2, np.int64))
            assert envs.reset().tolist() == [[0], [0]]
            assert envs.step(np.zeros(2, np.int64))[0].tolist() == [[1], [1]]

    def test_actions_one_by_one(self, options):
        samples = [{"gear": gear, "force": np.full(2, gear / 2, np.float32)} for gear in range(3)]
        with opened([DictActions] * 3, **options) as envs:
            *_, infos = envs.step(samples)
            assert [info["gear"] for info in infos] == [0, 1, 2]
            assert data_equivalence(infos[1]["force"], samples[1]["force"], exact=True)

    def test_actions_of_another_type_are_taken_if_nothing_is_lost(self):
        with opened([Maze] * 2, backend="serial") as envs:
            envs.step([1, 2])
            envs.step(np.array([1.0, 2.0]))
            with pytest.raises(errors.ActionError):
                envs.step(np.array([1.5, 2.0]))
            with pytest.raises(errors.ActionError):
                envs.step(np.array([1, 2, 3]))

    def test_a_reset_without_options(self, options):
        with (
            closing(theirs.DummyVecEnv([SeedOnly] * 2)) as left,
            opened([SeedOnly] * 2, **options) as right,
        ):
            begin_alike(left, right)
            right.set_options({"a": 1})
            with pytest.raises(errors.EnvFailed, match="options"):
                right.reset()

    def test_cannot_be_pickled(self):
        with opened([Counter], backend="serial") as envs, pytest.raises(TypeError, match="copied"):
            pickle.dumps(envs)

    def test_spaces_must_be_equal(self):
        with pytest.raises(errors.SpacesDiffer):
            ours.DummyVecEnv([Counter, Maze])

    def test_closing_twice(self):
        envs = ours.DummyVecEnv([Counter])
        envs.close()
        envs.close()
        with pytest.raises(errors.FleetClosed):
            envs.step(np.zeros(1, np.int64))


def make_wrapped():
    return Outermost(Counter(3))


class TestPlan:
    def test_small_cheap_environments_stay_here(self):
        with closing(ours.FleetVecEnv([CARTPOLE] * 4)) as envs:
            assert envs.plan.startswith("4 environments in this process: one step takes ")
            assert "would not pay" in envs.plan

    def test_subproc_is_in_processes(self):
        with closing(ours.SubprocVecEnv([Counter] * 4, **FORK)) as envs:
            assert envs.plan.startswith("4 environments in 2 worker processes (fork)")

    @pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
    def test_workers_import_neither_torch_nor_sb3(self, start_method):
        envs = ours.SubprocVecEnv([Maze] * 2, start_method=start_method, num_workers=1)
        with closing(envs):
            envs.reset()
            envs.step(np.zeros(2, np.int64))
            envs.has_attr("t")
            envs.set_attr("t", 1)
            envs.get_attr("t")
            envs.env_method("action_masks")
            assert envs.env_is_wrapped(Monitor) == [False, False]
            heavy = {"torch", "stable_baselines3", "sb3_contrib"}
            loaded = envs.fleet.apply(lambda env: sorted(heavy.intersection(sys.modules)))
            assert loaded == [[], []]


class TestMasks:
    def test_come_with_the_batch(self, options, monkeypatch):
        with (
            closing(theirs.DummyVecEnv([Maze] * 4)) as left,
            opened([Maze] * 4, **options) as right,
        ):
            assert is_masking_supported(right)
            begin_alike(left, right)
            expected = get_action_masks(left)
            assert data_equivalence(get_action_masks(right), expected, exact=True)
            left.action_space.seed(0)
            with monkeypatch.context() as patch:
                for name in ("call", "apply", "get"):
                    patch.delattr(type(right.fleet), name)
                for _ in range(30):
                    actions = np.array([left.action_space.sample() for _ in range(4)])
                    one, other = left.step(actions), right.step(actions)
                    assert data_equivalence(one[3], other[3], exact=True)  # without our own key
                    expected = get_action_masks(left)
                    assert data_equivalence(get_action_masks(right), expected, exact=True)
                    some = right.env_method("action_masks", indices=[2, -1])
                    assert data_equivalence(some, [expected[2], expected[3]], exact=True)
                right.seed(1)
                right.reset()
                assert get_action_masks(right)[:, 0].tolist() == [False] * 4

    def test_are_not_computed_until_asked_for(self):
        with opened([Maze], backend="serial") as envs:
            envs.reset()
            envs.step(np.zeros(1, np.int64))
            assert envs.get_attr("num_masks") == [0]

    def test_are_asked_for_again_after_a_change(self):
        with opened([Maze], backend="serial") as envs:
            envs.reset()
            assert envs.env_method("action_masks")[0].tolist() == [False, True, True, True]
            envs.set_attr("t", 1)
            assert envs.env_method("action_masks")[0].tolist() == [True, False, True, True]
            envs.env_method("set_wrapper_attr", "t", 2)
            assert envs.env_method("action_masks")[0].tolist() == [True, True, False, True]

    def test_survive_the_loss_of_a_worker(self):
        with (
            closing(theirs.DummyVecEnv([Maze] * 4)) as left,
            closing(ours.SubprocVecEnv([Maze] * 4, on_failure="resume", **FORK)) as right,
        ):
            begin_alike(left, right)
            for number in range(12):
                if number == 3:
                    kill_worker(right, 1)
                assert data_equivalence(get_action_masks(right), get_action_masks(left), exact=True)
                actions = np.full(4, number % 4)
                left.step(actions)
                right.step(actions)
            assert right._masks is not None


class TestFailures:
    def test_an_env_that_raises(self, options):
        fns = [Counter, functools.partial(TwoArgumentException, at="step", nth=2), Counter]
        zeros = np.zeros(3, np.int64)
        with opened(fns, **options) as envs:
            envs.reset()
            envs.step(zeros)
            with pytest.raises(errors.EnvFailed, match="slot 1 raised during step"):
                envs.step(zeros)
            assert envs.reset().tolist() == [[0]] * 3
            assert envs.step(zeros)[0].tolist() == [[1]] * 3

    def test_an_env_that_cannot_be_built(self):
        with pytest.raises(errors.EnvConstructionFailed, match="slot 0"):
            ours.SubprocVecEnv([broken] * 2, **FORK)

    def test_a_killed_worker(self):
        with closing(ours.SubprocVecEnv([Counter] * 4, **FORK)) as envs:
            envs.reset()
            kill_worker(envs, 1)
            with pytest.raises(errors.WorkerDied, match=r"slots \[2, 3\]"):
                envs.step(np.zeros(4, np.int64))

    def test_a_restarted_slot_comes_back_truncated(self, tmp_path):
        crash = functools.partial(
            Crashing, at="step", nth=2, once=tmp_path / "once", spare_pid=os.getpid()
        )
        zeros = np.zeros(2, np.int64)
        envs = ours.SubprocVecEnv([crash, Counter], on_failure="restart", **FORK)
        with closing(envs):
            envs.reset()
            envs.step(zeros)
            obs, rewards, dones, infos = envs.step(zeros)
            assert isinstance(obs, np.ndarray)
            assert (obs[:, 0].tolist(), rewards.tolist()) == ([0, 2], [0, 2])
            assert dones.tolist() == [True, False]
            assert infos[0]["TimeLimit.truncated"] is True
            assert infos[0]["terminal_observation"].tolist() == [1]
            assert infos[0]["incident"] is envs.incidents[0]
            assert envs.reset_infos[0] == {}


def broken():
    raise RuntimeError("no simulator here")


class TestWrappersAndAlgorithms:
    def test_normalised_stacked_and_monitored(self, tmp_path):
        def wrapped(envs):
            envs = theirs.VecMonitor(envs, str(tmp_path / f"{type(envs).__name__}.csv"))
            return theirs.VecFrameStack(theirs.VecNormalize(envs), n_stack=3)

        with (
            closing(wrapped(theirs.DummyVecEnv([PENDULUM] * 3))) as left,
            closing(wrapped(ours.FleetVecEnv([PENDULUM] * 3, backend="process", **FORK))) as right,
        ):
            left.seed(1)
            right.seed(1)
            assert np.array_equal(left.reset(), right.reset())
            for _ in range(205):
                actions = np.array([left.action_space.sample() for _ in range(3)])
                one, other = left.step(actions), right.step(actions)
                for info in (*one[3], *other[3]):
                    info.get("episode", {}).pop("t", None)  # seconds
                assert data_equivalence(one[:3], other[:3], exact=True)
                assert data_equivalence(one[3], other[3], exact=True)

    def test_checked_for_nan(self):
        envs = theirs.VecCheckNan(ours.DummyVecEnv([SeedOnly]), raise_exception=True)
        with closing(envs):
            envs.step(np.zeros((1, 1), int))
            with pytest.raises(ValueError, match="nan"):
                envs.step(np.full((1, 1), np.nan))

    def test_recorded(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # moviepy's progress bar: no thread
        env_fn = functools.partial(gymnasium.make, "CartPole-v1", render_mode="rgb_array")
        envs = ours.SubprocVecEnv([env_fn] * 2, **FORK)
        video = theirs.VecVideoRecorder(envs, str(tmp_path), lambda step: step == 0, 5)
        with closing(video):
            assert video.frames_per_sec == 50
            video.reset()
            for _ in range(7):
                video.step(np.ones(2, np.int64))
        assert [path.name for path in tmp_path.iterdir()] == ["rl-video-step-0-to-step-5.mp4"]

    def test_make_vec_env_of_sb3(self):
        own: Any = ours.SubprocVecEnv
        envs = make_vec_env("CartPole-v1", 3, seed=5, vec_env_cls=own, vec_env_kwargs=FORK)
        with closing(envs), closing(make_vec_env("CartPole-v1", 3, seed=5)) as left:
            assert envs.env_is_wrapped(Monitor) == [True] * 3
            assert data_equivalence(envs.reset(), left.reset(), exact=True)
            for _ in range(30):
                one, other = left.step(np.ones(3, int)), envs.step(np.ones(3, int))
                for info in (*one[3], *other[3]):
                    info.get("episode", {}).pop("t", None)
                assert data_equivalence(one[3], other[3], exact=True)

    @pytest.mark.parametrize(
        ("algorithm", "env_fn", "settings"),
        [
            (PPO, CARTPOLE, {"n_steps": 64, "batch_size": 64, "n_epochs": 1}),
            (A2C, CARTPOLE, {}),
            (DQN, CARTPOLE, {"learning_starts": 100}),
            (SAC, PENDULUM, {"learning_starts": 250, "buffer_size": 1000, "batch_size": 32}),
            (MaskablePPO, Corridor, {"n_steps": 64, "batch_size": 64, "n_epochs": 1}),
        ],
        ids=lambda value: getattr(value, "__name__", ""),
    )
    def test_algorithms_learn_the_same_as_on_dummy_vec_env(self, algorithm, env_fn, settings):
        policies = []
        for envs in (
            theirs.DummyVecEnv([env_fn] * 4),
            ours.FleetVecEnv([env_fn] * 4, backend="process", **FORK),
        ):
            with closing(theirs.VecMonitor(envs)) as monitored:
                model = algorithm("MlpPolicy", monitored, seed=0, device="cpu", **settings)
                model.learn(300)
                assert model.num_timesteps >= 300
                if algorithm is PPO:
                    returns, _ = evaluate_policy(
                        model, monitored, n_eval_episodes=2, return_episode_rewards=True
                    )
                    assert np.min(returns) > 5
                policies.append([one.detach().numpy() for one in model.policy.parameters()])
        left, right = policies
        assert data_equivalence(left, right, exact=True)

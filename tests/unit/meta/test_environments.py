"""Each environment against its formula, on states that were recorded on the way."""

import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envfleet.meta  # registers the environments
from envfleet.errors import ConfigError
from envfleet.meta.registered import ENVIRONMENTS

make: Any = gymnasium.make
"""Untyped: the tests look inside the environments."""

STEPS = 12


def rollout(name, **kwargs):
    """Yields what formulas are computed from, after every step of some episodes."""
    env = make(f"{name}-v0", disable_env_checker=True, **kwargs)
    env.action_space.seed(1)
    for seed in range(3):
        env.reset(seed=seed)
        for _ in range(STEPS):
            action = env.action_space.sample()
            before = facts(env.unwrapped)
            obs, reward, terminated, _, _ = env.step(action)
            assert env.observation_space.contains(obs)
            yield env.unwrapped, action, before, facts(env.unwrapped), obs, reward, terminated
            if terminated:
                break
    env.close()


def facts(env):
    if not hasattr(env, "data"):
        return {"state": env.state.copy()}
    data = env.data
    names = ("qpos", "qvel", "cfrc_ext", "xipos", "ctrl", "cinert", "cvel", "qfrc_actuator")
    return {
        **{name: np.array(getattr(data, name)) for name in names},
        "torso": np.array(data.body("torso").xpos),
    }


class TestNavigation:
    def test_point_robot_is_rewarded_by_minus_the_distance(self):
        for env, action, before, after, obs, reward, _ in rollout("PointRobot"):
            assert np.allclose(after["state"], before["state"] + action, atol=1e-7)
            x, y = after["state"] - env.task
            assert reward == pytest.approx(-((x * x + y * y) ** 0.5), abs=1e-12)
            assert (obs == after["state"].astype(np.float32)).all()

    @pytest.mark.parametrize(
        ("name", "radius", "wind"), [("PointRobotSparse", 0.2, False), ("Wind", 0.03, True)]
    )
    def test_sparse_ones_are_rewarded_within_the_radius(self, name, radius, wind):
        env = make(f"{name}-v0").unwrapped
        env.reset(seed=0)
        goal = np.array([0.0, 1.0]) if wind else env.task
        push = env.task if wind else 0.0
        rewards = set()
        for distance in (0.0, radius - 1e-3, radius + 1e-3, 0.5):
            env.state = goal - push - (0.0, 0.05) + (distance, 0.0)
            _, reward, terminated, truncated, _ = env.step(np.array([0.0, 0.05]))
            assert reward == float(np.hypot(*(env.state - goal)) <= radius)
            assert env.is_goal_state() == bool(reward)
            assert not terminated
            assert not truncated
            rewards.add(reward)
        assert rewards == {0.0, 1.0}

    def test_moves_are_at_most_a_tenth(self):
        env = make("PointRobot-v0").unwrapped
        env.reset(seed=0)
        before = env.state
        env.step(np.array([5.0, -5.0]))
        assert np.allclose(env.state - before, [0.1, -0.1])

    def test_starts_and_goals_are_in_their_ranges(self):
        env = make("PointRobotSparse-v0").unwrapped
        for seed in range(50):
            env.reset(seed=seed)
            x, y = env.state
            assert -1.5 <= x <= 1.5
            assert -0.5 <= y <= 1.5
            assert np.hypot(*env.task) == pytest.approx(1.0)
            assert env.task[1] >= 0

    def test_the_winds_are_those_of_the_original(self):
        env = make("Wind-v0", num_tasks=60).unwrapped
        generator = np.random.RandomState(1337)
        for number in range(60):
            expected = [generator.uniform(-0.08, 0.08), generator.uniform(-0.08, 0.08)]
            assert env.tasks[number].tolist() == expected

    def test_grid_navi_moves_and_rewards(self):
        moves = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (0, -1), 4: (-1, 0)}
        for env, action, before, after, _, reward, _ in rollout("GridNavi"):
            expected = [
                min(max(at + by, 0), 4)
                for at, by in zip(before["state"], moves[int(action)], strict=True)
            ]
            assert after["state"].tolist() == expected
            assert reward == (1.0 if expected == env.task.tolist() else -0.1)

    def test_grid_navi_rewards_every_step_on_its_goal(self):
        env = make("GridNavi-v0").unwrapped
        env.reset(options={"task": [0, 2]})
        assert [env.step(1)[1], env.step(1)[1], env.step(0)[1]] == [-0.1, 1.0, 1.0]

    def test_grid_navi_has_21_goals_away_from_the_start(self):
        env = make("GridNavi-v0", num_tasks=21).unwrapped
        goals = {tuple(env.tasks[number].astype(int)) for number in range(21)}
        every = {(x, y) for x in range(5) for y in range(5)}
        assert goals == every - {(0, 0), (0, 1), (1, 0), (1, 1)}


class TestLocomotion:
    def test_half_cheetah_vel(self):
        for env, action, before, after, obs, reward, terminated in rollout("HalfCheetahVel"):
            speed = (after["qpos"][0] - before["qpos"][0]) / 0.05
            expected = -abs(speed - env.task[0]) - 0.05 * (action.astype(float) ** 2).sum()
            assert reward == pytest.approx(expected, abs=1e-6)
            seen = [*after["qpos"][1:], *after["qvel"], *after["torso"]]
            assert (obs == np.array(seen, np.float32)).all()
            assert len(obs) == 20
            assert not terminated
            assert 0 <= env.task[0] <= 3

    @pytest.mark.parametrize("name", ["HalfCheetahDir", "CheetahDir"])
    def test_half_cheetah_dir(self, name):
        for env, action, before, after, _, reward, _ in rollout(name):
            speed = (after["qpos"][0] - before["qpos"][0]) / 0.05
            expected = env.task[0] * speed - 0.05 * (action.astype(float) ** 2).sum()
            assert reward == pytest.approx(expected, abs=1e-6)
            assert abs(env.task[0]) == 1

    @pytest.mark.parametrize("weight", [5e-4, 0.0])
    def test_ant_dir(self, weight):
        kwargs = {} if weight else {"contact_cost_weight": 0.0}
        for env, action, before, after, obs, reward, terminated in rollout("AntDir", **kwargs):
            velocity = (after["torso"] - before["torso"])[:2] / 0.05
            forward = velocity[0] * np.cos(env.task[0]) + velocity[1] * np.sin(env.task[0])
            contact = weight * (np.clip(after["cfrc_ext"], -1, 1) ** 2).sum()
            expected = forward - 0.5 * (action.astype(float) ** 2).sum() - contact + 1
            assert reward == pytest.approx(expected, abs=1e-6)
            assert (obs == np.array([*after["qpos"][2:], *after["qvel"]], np.float32)).all()
            assert terminated == (not 0.2 <= after["qpos"][2] <= 1.0)

    def test_ant_dir_ends_when_it_is_too_high(self):
        env = make("AntDir-v0", disable_env_checker=True)
        env.reset(seed=0)
        inner = env.unwrapped
        qpos = inner.data.qpos.copy()
        qpos[2] = 1.5
        inner.set_state(qpos, inner.data.qvel)
        assert env.step(np.zeros(8, np.float32))[2]

    def test_ant_dir_has_two_angles_or_the_whole_circle(self):
        endless = make("AntDir-v0").unwrapped
        finite = make("AntDir-v0", num_tasks=40).unwrapped
        assert {float(endless.tasks[number][0]) for number in range(9)} == {-1.0, 1.0}
        angles = [float(finite.tasks[number][0]) for number in range(40)]
        assert len(set(angles)) == 40
        assert min(angles) < 1
        assert max(angles) > 5

    def test_ant_goal(self):
        for env, action, _, after, obs, reward, terminated in rollout("AntGoal"):
            away = np.abs(after["torso"][:2] - env.task).sum()
            clipped = np.clip(after["cfrc_ext"], -1, 1)
            contact = 0.5e-3 * (clipped**2).sum()
            expected = -away - 0.1 * (action.astype(float) ** 2).sum() - contact
            assert reward == pytest.approx(expected, abs=1e-6)
            seen = [*after["qpos"], *after["qvel"], *clipped.ravel()]
            assert (obs == np.array(seen, np.float32)).all()
            assert len(obs) == 113
            assert not terminated
            assert np.hypot(*env.task) <= 3

    def test_humanoid_dir(self):
        for env, action, before, after, obs, reward, terminated in rollout("HumanoidDir"):
            mass = env.model.body_mass[:, None]
            centres = [(mass * at["xipos"]).sum(0) / mass.sum() for at in (before, after)]
            moved = (centres[1] - centres[0])[:2]
            direction = (np.cos(env.task[0]), np.sin(env.task[0]))
            impact = min(0.5e-6 * (after["cfrc_ext"] ** 2).sum(), 10)
            control = 0.1 * (action.astype(float) ** 2).sum()
            expected = 0.25 * np.dot(direction, moved) / 0.003 - control - impact + 5
            assert reward == pytest.approx(expected, abs=1e-6)
            parts = ("qvel", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")
            seen = [after["qpos"][2:], *(after[part].ravel() for part in parts)]
            assert (obs == np.concatenate(seen).astype(np.float32)).all()
            assert len(obs) == 376
            assert terminated == (not 1 <= after["qpos"][2] <= 2)
            assert env.get_current_task().tolist() == list(direction)
            assert (env.action_space.high == np.float32(0.4)).all()

    @pytest.mark.parametrize(
        ("name", "size"), [("Walker2DRandParams", 65), ("HopperRandParams", 41)]
    )
    def test_random_bodies(self, name, size):
        for env, action, before, after, obs, reward, terminated in rollout(name):
            assert env.dt == pytest.approx(0.016)
            speed = (after["qpos"][0] - before["qpos"][0]) / 0.016
            expected = speed + 1 - 1e-3 * (action.astype(float) ** 2).sum()
            assert reward == pytest.approx(expected, abs=1e-6)
            assert len(env.task) == size
            seen = [*after["qpos"][1:], *np.clip(after["qvel"], -10, 10)]
            assert (obs == np.array(seen, np.float32)).all()
            _, height, angle = after["qpos"][:3]
            if name == "Walker2DRandParams":
                assert terminated == (not (0.8 < height < 2 and abs(angle) < 1))
            else:
                others = [*after["qpos"][2:], *after["qvel"]]
                is_up = height > 0.7 and abs(angle) < 0.2 and np.abs(others).max() < 100
                assert terminated == (not is_up)

    def test_a_task_scales_the_own_numbers_of_the_model_and_no_earlier_task_s(self):
        env = make("HopperRandParams-v0", num_tasks=2).unwrapped
        plain = make("Hopper-v5").unwrapped.model
        for task in (0, 1, 0):
            env.reset(options={"task": task})
            ratios = env.model.body_mass[1:] / plain.body_mass[1:]
            assert ((ratios > 1.5**-3) & (ratios < 1.5**3)).all()
            assert len(set(ratios)) == len(ratios)
            damping = env.model.dof_damping[3:] / plain.dof_damping[3:]
            assert ((damping > 1.3**-3) & (damping < 1.3**3)).all()
            parts = ("body_mass", "body_inertia", "dof_damping", "geom_friction")
            held = np.concatenate([getattr(env.model, part).ravel() for part in parts])
            assert (held == env.tasks[task]).all()
            # what MuJoCo computes from the masses was computed again
            assert env.model.body_subtreemass[0] == pytest.approx(env.model.body_mass.sum())


class TestPartlySeen:
    @pytest.mark.parametrize(
        ("name", "whole", "seen"),
        [
            ("Pendulum-P", "Pendulum-v1", [0, 1]),
            ("Pendulum-V", "Pendulum-v1", [2]),
            ("CartPole-P", "CartPole-v1", [0, 2]),
            ("CartPole-V", "CartPole-v1", [1, 3]),
        ],
    )
    def test_shows_these_numbers_of_the_whole(self, name, whole, seen):
        one, other = make(f"{name}-v0"), make(whole)
        one.action_space.seed(0)
        assert (one.reset(seed=4)[0] == other.reset(seed=4)[0][seen]).all()
        for _ in range(5):
            action = one.action_space.sample()
            obs, reward, terminated, *_ = one.step(action)
            whole_obs, whole_reward, whole_terminated, *_ = other.step(action)
            assert (obs == whole_obs[seen]).all()
            assert (reward, terminated) == (whole_reward, whole_terminated)
        assert one.spec.max_episode_steps == 200


class TestTasks:
    WITH_TASKS = tuple(name for name in ENVIRONMENTS if not name.endswith(("-P", "-V")))

    @pytest.mark.parametrize("name", WITH_TASKS)
    def test_are_one_list_for_all(self, name):
        kwargs = {"num_train_tasks": 2, "num_eval_tasks": 2}
        one = make(f"{name}-v0", **kwargs).unwrapped
        np.random.seed(5)
        other = make(f"{name}-v0", **kwargs).unwrapped
        longer = make(f"{name}-v0", num_tasks=50).unwrapped
        one.reset(seed=1)
        other.reset(seed=2)
        for number in range(4):
            one.reset(options={"task": number})
            other.reset(options={"task": number})
            assert (one.task == other.task).all()
            assert (one.task == longer.tasks[number]).all()

    @pytest.mark.parametrize("name", WITH_TASKS)
    def test_leave_the_global_generator_alone(self, name):
        state = np.random.get_state(legacy=False)["state"]["key"].tolist()
        env = make(f"{name}-v0", num_tasks=3)
        env.reset(seed=1)
        env.reset(options={"task": 1})
        env.step(env.action_space.sample())
        assert np.random.get_state(legacy=False)["state"]["key"].tolist() == state

    @pytest.mark.parametrize("name", WITH_TASKS)
    @pytest.mark.parametrize("num_tasks", [None, 5])
    def test_a_seed_says_all(self, name, num_tasks):
        runs = []
        env = make(f"{name}-v0", num_tasks=num_tasks)
        for _ in range(2):
            env.reset(seed=11)
            env.action_space.seed(1)
            first = env.unwrapped.task.tolist()
            runs.append((first, [env.step(env.action_space.sample())[1] for _ in range(4)]))
            env.reset()
            assert env.unwrapped.task.tolist() == first  # the task stays
            env.reset(options={"task": None})
        assert runs[0] == runs[1]

    def test_another_task_seed_gives_other_tasks(self):
        one = make("PointRobot-v0", num_tasks=3).unwrapped
        other = make("PointRobot-v0", num_tasks=3, task_seed=1).unwrapped
        assert (one.tasks[0] != other.tasks[0]).any()

    def test_train_and_evaluation_are_disjoint(self):
        env = make("AntDir-v0", num_train_tasks=50, num_eval_tasks=20).unwrapped
        assert env.train_tasks == list(range(50))
        assert env.eval_tasks == list(range(50, 70))
        both = make("Wind-v0", num_tasks=60, num_train_tasks=40, num_eval_tasks=20).unwrapped
        assert not set(both.train_tasks) & set(both.eval_tasks)
        grid = make("GridNavi-v0", num_train_tasks=15, num_eval_tasks=6).unwrapped
        goals = [
            {tuple(grid.tasks[i]) for i in part} for part in (grid.train_tasks, grid.eval_tasks)
        ]
        assert not goals[0] & goals[1]

    def test_endless_ones_are_drawn_for_training_and_listed_for_evaluation(self):
        env = make("PointRobot-v0", num_eval_tasks=3).unwrapped
        assert env.train_tasks == []
        assert env.eval_tasks == [0, 1, 2]
        env.reset(seed=0)
        seen = set()
        for _ in range(5):
            env.reset(options={"task": None})
            seen.add(tuple(env.task))
        assert len(seen) == 5
        env.reset(options={"task": 1000})
        assert (env.task == env.tasks[1000]).all()

    def test_a_sampler_chooses_among_training_tasks(self):
        asked = []

        def last(rng, train_tasks):
            asked.append((type(rng), train_tasks))
            return train_tasks[-1]

        env = make("Wind-v0", num_train_tasks=3, num_eval_tasks=2, task_sampler=last)
        env.reset(seed=0)
        assert asked == [(np.random.Generator, [0, 1, 2])]
        assert (env.unwrapped.task == env.unwrapped.tasks[2]).all()

    def test_the_uniform_sampler_leaves_evaluation_tasks_out(self):
        env = make("PointRobot-v0", num_train_tasks=3, num_eval_tasks=5).unwrapped
        env.reset(seed=0)
        train = {tuple(env.tasks[number]) for number in range(3)}
        seen = set()
        for _ in range(40):
            env.reset_task(None)
            seen.add(tuple(env.task))
        assert seen == train

    @pytest.mark.parametrize(
        ("task", "text"),
        [
            (5, "there is no task 5: this environment has tasks 0 to 4"),
            (-1, "there is no task -1"),
            ([1.0], "a task of this environment is like"),
            ("north", "a task is a number in the list, an array or None"),
            (True, "a task is a number in the list, an array or None"),
        ],
    )
    def test_a_wrong_task_is_named(self, task, text):
        env = make("PointRobot-v0", num_tasks=5).unwrapped
        with pytest.raises(ConfigError, match=text):
            env.reset(seed=0, options={"task": task})

    @pytest.mark.parametrize(
        "numbers",
        [
            {"num_tasks": 3, "num_eval_tasks": 3},
            {"num_tasks": 3, "num_train_tasks": 4},
            {"num_tasks": 0},
            {"num_tasks": 2.5},
        ],
    )
    def test_numbers_that_do_not_fit_are_refused(self, numbers):
        with pytest.raises(ConfigError, match="num_tasks"):
            make("PointRobot-v0", **numbers)

    def test_a_task_that_was_given_is_not_shared(self):
        env = make("PointRobot-v0").unwrapped
        goal = np.array([0.5, 0.5])
        env.reset(seed=0, options={"task": goal})
        goal[:] = 0
        assert env.task.tolist() == [0.5, 0.5]

    @pytest.mark.parametrize("name", ["PointRobot", "Wind", "GridNavi"])
    def test_plain_ones_can_be_pickled(self, name):
        env = make(f"{name}-v0", num_tasks=3).unwrapped
        env.reset(seed=0)
        copy = pickle.loads(pickle.dumps(env))
        action = env.action_space.sample()
        assert copy.step(action)[1] == env.step(action)[1]
        assert (copy.tasks[2] == env.tasks[2]).all()


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # advice on spaces
def test_gymnasium_s_checker_has_no_objection(name):
    check_env(make(f"{name}-v0").unwrapped, skip_render_check=True)


def test_importing_the_package_registers_everything():
    assert envfleet.meta.__all__
    assert {f"{name}-v0" for name in ENVIRONMENTS} <= set(gymnasium.registry)

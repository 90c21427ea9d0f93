"""`Learner`: the same rollouts however they are collected, and the same run however it goes on."""

import os
import signal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet.errors import ConfigError
from envfleet.meta import AGENT_ARCHS, Learner, make_env, make_parallel_env
from envfleet.meta.collect import Seconds, play_many, play_one
from envfleet.meta.options import updates_due
from tests.unit.meta.learners import POLICIES, held, manager, same, small


class TestTheBufferIsTheSame:
    @settings(max_examples=12)
    @given(
        st.sampled_from(sorted(POLICIES)),
        st.integers(1, 9),
        st.integers(1, 11),
        st.integers(0, 3),
        st.booleans(),
    )
    def test_for_any_number_of_slots_and_rollouts(self, policy, slots, rollouts, seed, is_random):
        with small(policy, seed=seed) as alone, small(policy, seed=seed) as together:
            with manager(slots) as parallel:
                for asked in (rollouts, 2):
                    steps = alone.collect_rollouts(asked, is_random)
                    assert steps == asked * 14
                    assert steps == together.collect_rollouts_parallel(asked, is_random, parallel)
            assert same(held(alone), held(together))

    @pytest.mark.parametrize("env_name", ["GridNavi-v0", "Wind-v0"])
    def test_of_other_environments(self, env_name):
        with small(env_name=env_name) as alone, small(env_name=env_name) as together:
            with manager(3, env_name=env_name) as parallel:
                alone.collect_rollouts(5)
                together.collect_rollouts_parallel(5, parallel_env=parallel)
            assert same(held(alone), held(together))

    @pytest.mark.parametrize("on_failure", ["resume", "restart", "fallback"])
    @pytest.mark.filterwarnings("ignore:slots .* go on in this process")
    def test_if_a_process_is_killed_in_the_middle_of_a_rollout(self, on_failure):
        class Killing:
            """An agent at whose tenth action a worker process is killed."""

            def __init__(self, agent, parallel):
                self._agent, self._parallel, self.calls = agent, parallel, 0
                self.initial_state = agent.initial_state

            def act(self, *args):
                self.calls += 1
                if self.calls == 10:
                    os.kill(self._parallel.fleet.worker_pids()[0], signal.SIGKILL)
                return self._agent.act(*args)

        with small() as learner, manager(4, "process", on_failure=on_failure) as parallel:
            plans = [learner.plan(number) for number in range(6)]
            killing, seconds = Killing(learner.agent, parallel), Seconds()
            found = play_many(parallel, killing, plans, deterministic=False, seconds=seconds)
            assert parallel.fleet.incidents
            for plan, trial in zip(plans, found, strict=True):
                alone = play_one(
                    learner.train_env, learner.agent, plan, deterministic=False, seconds=seconds
                )
                for name in ("obs", "actions", "rewards", "terms"):
                    assert np.array_equal(getattr(trial, name), getattr(alone, name)), name

    def test_without_a_parallel_env_rollouts_are_sequential(self):
        with small() as one, small() as other:
            assert one.collect_rollouts(3) == other.collect_rollouts_parallel(3, parallel_env=None)
            assert same(held(one), held(other))

    def test_another_seed_gives_other_rollouts(self):
        with small(seed=0) as one, small(seed=1) as other:
            one.collect_rollouts(2)
            other.collect_rollouts(2)
            assert not np.array_equal(held(one)["obs"], held(other)["obs"])


def test_a_rollout_is_what_a_loop_by_hand_gives():
    with small(oracle=True) as learner:
        plan = learner.plan(7)
        trial = play_one(
            learner.train_env, learner.agent, plan, deterministic=False, seconds=Seconds()
        )
        env = make_env(
            "PointRobot-v0",
            2,
            oracle=True,
            num_train_tasks=6,
            num_eval_tasks=3,
            max_episode_steps=7,
        )
        obs, _ = env.reset(seed=plan.seed, task=plan.task)
        state, total = learner.agent.initial_state(1), [0.0, 0.0]
        for step in range(14):
            assert np.array_equal(trial.obs[step], obs)
            actions, state = learner.agent.act(state, obs[None], plan.noise[step : step + 1], False)
            assert np.array_equal(trial.actions[step], actions[0])
            obs, reward, terminated, truncated, _ = env.step(actions[0])
            state.reward[0] = reward
            assert trial.rewards[step] == reward
            total[step // 7] += reward
        assert truncated
        assert not terminated
        assert not trial.terms.any()  # a time limit ends no task
        assert np.allclose(trial.episode_returns(env.flag_at, 2), total)


@pytest.mark.parametrize(
    ("env_name", "algo_name"), [("CartPole-P-v0", "sacd"), ("HopperRandParams-v0", "sac")]
)
def test_trials_that_end_by_themselves_are_of_different_lengths_and_end_in_a_term(
    env_name, algo_name
):
    args = {"env_name": env_name, "max_rollouts_per_task": 2}
    policy = {"seq_model": "gru", "rnn_hidden_size": 8, "algo_name": algo_name}
    with (
        Learner(env_args=args, policy_args=policy, train_args={"buffer_size": 9000}) as alone,
        Learner(env_args=args, policy_args=policy, train_args={"buffer_size": 9000}) as other,
        make_parallel_env(env_name, 2, 3, backend="serial") as parallel,
    ):
        alone.collect_rollouts(8)
        other.collect_rollouts_parallel(8, parallel_env=parallel)
        kept = held(alone)
        assert same(kept, held(other))
    assert len(set(kept["lengths"])) > 1
    assert kept["terms"].sum() == 8  # the last step of each trial, and no other


def test_a_goal_that_is_reached_is_counted_and_is_no_end():
    with small(env_name="GridNavi-v0", num_train_tasks=21, num_eval_tasks=0) as learner:
        learner.collect_rollouts(40, random_actions=True)
        assert 0 < learner._successes_in_buffer < 40
        assert held(learner)["terms"].sum() == 0


class TestEvaluation:
    def test_gives_the_same_numbers_side_by_side_as_one_by_one(self):
        with small() as learner, manager(3) as parallel:
            alone = learner.evaluate(learner.eval_tasks)
            learner.train_env_parallel = parallel
            together = learner.evaluate(learner.eval_tasks)
            learner.train_env_parallel = None
        for one, other in zip(alone, together, strict=True):
            assert np.array_equal(one, other)
        returns, successes, observations, total_steps = alone
        assert returns.shape == (3, 2)
        assert successes.shape == (3,)
        assert [len(obs) for obs in observations] == [15, 15, 15]
        assert total_steps.tolist() == [14, 14, 14]

    def test_changes_nothing_in_training(self):
        with small() as one, small() as other:
            one.collect_rollouts(2)
            one.evaluate(one.eval_tasks, deterministic=False)
            one.collect_rollouts(2)
            other.collect_rollouts(4)
            assert same(held(one), held(other))

    def test_figures_have_the_names_that_users_know(self):
        with small(eval={"eval_stochastic": True}) as learner:
            figures = learner.log()
        for split in ("train", "eval"):
            for suffix in ("", "_sto"):
                first, second = (
                    figures[f"metrics/return_{split}_episode_{i}{suffix}"] for i in (1, 2)
                )
                assert figures[f"metrics/return_{split}_total{suffix}"] == first + second
                assert f"metrics/success_rate_{split}{suffix}" in figures
                assert figures[f"metrics/total_steps_{split}{suffix}"] == 14
        assert figures["metrics/successes_in_buffer"] == 0


class TestUpdates:
    @pytest.mark.parametrize(
        ("asked", "steps", "due"), [(5, 100, 5), (0.02, 100, 2), (0.02, 101, 3), (None, 9, 9)]
    )
    def test_are_so_many_or_so_many_per_step(self, asked, steps, due):
        assert updates_due(asked, steps) == due

    def test_follow_the_steps_that_were_collected_last(self):
        with small(train={"num_updates_per_iter": 0.25}) as learner:
            learner.collect_rollouts(2)
            stats = learner.update()
            assert learner._n_rl_update_steps_total == 7
            logged = learner.log_train_stats(stats)
            assert logged["z/env_steps"] == 28
            assert logged["z/rl_steps"] == 7
            assert "rl_loss/qf1_loss" in logged

    def test_change_the_agent(self):
        with small() as learner:
            learner.collect_rollouts(2)
            plan = learner.plan(9)
            act: Any = {"deterministic": True, "seconds": Seconds()}
            before = play_one(learner.train_env, learner.agent, plan, **act)
            learner.update(3)
            after = play_one(learner.train_env, learner.agent, plan, **act)
            assert not np.array_equal(before.actions, after.actions)


def test_save_and_load_go_on_with_the_same_numbers(tmp_path):
    with small() as one, small(seed=0) as other:
        one.collect_rollouts(3)
        one.update(2)
        one.save(tmp_path)
        other.load(tmp_path)
        for learner in (one, other):
            learner.collect_rollouts(2)
        assert same(held(one), held(other))
        assert one.update(2) == other.update(2)


def test_each_kind_of_agent_has_its_architecture():
    wanted = {
        "markov": AGENT_ARCHS.Markov,
        "memory": AGENT_ARCHS.Memory,
        "memory-markov": AGENT_ARCHS.Memory_Markov,
    }
    for policy, arch in wanted.items():
        with small(policy) as learner:
            assert learner.agent_arch is arch


def test_rl2_is_not_a_learner_of_replay():
    with pytest.raises(ConfigError, match=r"envfleet\.meta\.train"):
        Learner(
            env_args={"env_name": "PointRobot-v0"},
            policy_args={"algo_name": "rl2", "memory": "lstm"},
        )


def test_what_cannot_be_collected_or_evaluated_is_one_sentence_and_changes_nothing():
    with small() as learner, manager(2, env_name="GridNavi-v0") as other:
        for wrong, text in (
            (lambda: learner.collect_rollouts(-1), "num_rollouts must be a whole number"),
            (lambda: learner.collect_rollouts(2.5), "num_rollouts must be a whole number"),
            (lambda: learner.update(-1), "num_updates must be a whole number"),
            (lambda: learner.evaluate([]), "no task to evaluate on"),
            (
                lambda: learner.collect_rollouts_parallel(2, parallel_env=other),
                "parallel_env has other environments than this learner: its observation_space",
            ),
        ):
            with pytest.raises(ConfigError, match=text):
                wrong()
        assert learner._n_rollouts_total == learner._n_rl_update_steps_total == 0


def test_a_sampler_of_tasks_is_asked_for_each_rollout():
    args = {"env_name": "PointRobot-v0", "num_train_tasks": 6, "num_eval_tasks": 2}
    with Learner(
        env_args=args, policy_args={"seq_model": "mlp"}, task_sampler=lambda rng, tasks: tasks[-1]
    ) as learner:
        learner.collect_rollouts(2, random_actions=True)
        assert learner.tasks_seen == {"5": 2}

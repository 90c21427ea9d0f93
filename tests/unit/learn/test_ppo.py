"""PPO: the same run everywhere, rows that mean what they say, trouble that costs an episode."""

import functools
import hashlib

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import envfleet
from envfleet import errors
from envfleet.learn.ppo import PPOOptions, PPOTrainer
from envfleet.testing import Counter, Crashing

SMALL = PPOOptions(n_steps=16, batch_size=32, n_epochs=2, hidden=(16,))
WHERE = [
    {"backend": "serial"},
    {"backend": "thread", "num_workers": 2},
    {"backend": "process", "num_workers": 1},
    {"backend": "process", "num_workers": 3, "start_method": "spawn"},
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def opened(env, num_envs=4, **options):
    where = {"backend": "serial", **options}
    return envfleet.make_vec(env, num_envs, autoreset="same_step", **where)


def digest(trainer):
    """Every parameter's bytes."""
    values = [parameter.detach().numpy().tobytes() for parameter in trainer.policy.parameters()]
    return hashlib.sha256(b"".join(values)).hexdigest()


@functools.cache
def digest_of_serial(options):
    with opened("CartPole-v1") as envs:
        trainer = PPOTrainer(envs, options, seed=3)
        trainer.train(4 * 16 * 4)
        return digest(trainer)


@pytest.mark.parametrize("where", WHERE, ids=lambda where: "-".join(map(str, where.values())))
@pytest.mark.parametrize("is_normalised", [False, True])
def test_parameters_are_bit_equal_wherever_the_environments_live(where, is_normalised):
    options = PPOOptions(
        n_steps=16,
        batch_size=32,
        n_epochs=2,
        hidden=(16,),
        normalise_obs=is_normalised,
        normalise_rewards=is_normalised,
    )
    with opened("CartPole-v1", **where) as envs:
        trainer = PPOTrainer(envs, options, seed=3)
        trainer.train(4 * 16 * 4)
        assert trainer.env_steps == 256
        assert digest(trainer) == digest_of_serial(options)


def test_another_seed_is_another_run():
    with opened("CartPole-v1") as envs:
        trainer = PPOTrainer(envs, SMALL, seed=4)
        trainer.train(256)
        assert digest(trainer) != digest_of_serial(SMALL)


def test_the_caller_s_random_numbers_are_not_touched():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with opened("CartPole-v1") as envs:
        PPOTrainer(envs, SMALL, seed=1).train(64)
    assert torch.equal(torch.rand(3), expected)


class Walk(gymnasium.Env):
    """Observes its time; ends by itself at `end`, or is cut off at `limit`; keeps actions."""

    observation_space = spaces.Box(-1e3, 1e3, (1,), np.float32)
    action_space = spaces.Box(-0.1, 0.1, (1,), np.float32)

    def __init__(self, end=None, limit=None):
        self.end, self.limit, self.t, self.largest = end, limit, 0, 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        self.largest = max(self.largest, float(np.abs(action).max()))
        obs = np.full(1, self.t, np.float32)
        return obs, 1.0, self.t == self.end, self.t == self.limit, {}


def value_of(trainer, number):
    with torch.inference_mode():
        return trainer.policy.value(torch.tensor([[float(number)]])).item()


def test_what_follows_a_row_is_the_next_one_nothing_or_the_true_last_observation():
    fns = [functools.partial(Walk, end=5), functools.partial(Walk, limit=5)]
    with opened(fns, None) as envs:
        trainer = PPOTrainer(envs, PPOOptions(n_steps=7))
        rollout = trainer.collect()
    assert rollout.obs[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert rollout.successors[4, 0] == 0.0
    assert rollout.successors[4, 1] == pytest.approx(value_of(trainer, 5), rel=1e-5)
    for time in (0, 3, 5):
        expected = value_of(trainer, rollout.obs[time + 1, 0, 0])
        assert rollout.successors[time, 0] == pytest.approx(expected, rel=1e-5)
    assert rollout.successors[6, 1] == pytest.approx(value_of(trainer, 2), rel=1e-5)
    assert rollout.ended[:, 0].tolist() == [False] * 4 + [True, False, False]
    assert rollout.episodes == [(5.0, 5), (5.0, 5)]


def test_actions_are_cut_off_for_the_environment_and_stored_as_drawn():
    with opened(Walk, 2) as envs:
        rollout = PPOTrainer(envs, PPOOptions(n_steps=32)).collect()
        assert max(envs.get_attr("largest")) <= 0.1 + 1e-6
    assert np.abs(rollout.actions).max() > 0.5


def test_a_lost_environment_costs_its_episode_and_teaches_nothing(tmp_path):
    fns = [functools.partial(Crashing, nth=3, once=tmp_path / "crashed"), Counter]
    with opened(fns, None, backend="process", num_workers=2, on_failure="restart") as envs:
        trainer = PPOTrainer(envs, PPOOptions(n_steps=16, batch_size=8))
        rollout = trainer.collect()
        assert len(envs.incidents) == 1
        assert (~rollout.valid).sum() == 1
        assert rollout.ended[~rollout.valid].all()
        assert np.isfinite(trainer.learn(rollout).policy_loss)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"n_steps": 0}, "n_steps must be at least 1"),
        ({"gamma": 1.5}, "gamma must lie between 0 and 1"),
        ({"activation": "sine"}, "activation must be one of"),
    ],
)
def test_options_that_cannot_work(wrong, words):
    with pytest.raises(errors.ConfigError, match=words):
        PPOOptions(**wrong)


def test_a_fleet_with_reset_rows_is_refused():
    envs = envfleet.make_vec("CartPole-v1", 2, backend="serial")
    with envs, pytest.raises(errors.ConfigError, match="autoreset='same_step'"):
        PPOTrainer(envs)


def test_the_epochs_stop_when_the_policy_has_moved_far_enough():
    options = PPOOptions(n_steps=64, batch_size=32, n_epochs=50, learning_rate=0.05, target_kl=1e-4)
    with opened("CartPole-v1") as envs:
        (learned,) = PPOTrainer(envs, options).train(1)
    assert learned.epochs < 50


def test_rates_go_down_to_nothing():
    with opened("CartPole-v1") as envs:
        rates = [one.learning_rate for one in PPOTrainer(envs, SMALL).train(64 * 4)]
    expected = [SMALL.learning_rate * left for left in (1.0, 0.75, 0.5, 0.25)]
    assert rates == pytest.approx(expected)


def test_a_state_of_another_run_is_refused():
    with opened("CartPole-v1") as envs:
        state = PPOTrainer(envs, SMALL).state()
        with pytest.raises(errors.ConfigError, match="of a run with options"):
            PPOTrainer(envs, PPOOptions()).load(state)


class Shifted(gymnasium.Env):
    """Its actions begin at five."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.zeros(1, np.float32), 1.0, False, False, {}


def test_actions_begin_where_their_space_does():
    with opened(Shifted, 2) as envs:
        trainer = PPOTrainer(envs, SMALL)
        rollout = trainer.collect()
        assert set(rollout.actions.reshape(-1).tolist()) == {0, 1, 2}
        assert Shifted.action_space.contains(trainer.agent.decide(np.zeros(1, np.float32)))


def test_a_state_does_not_change_with_its_trainer():
    with opened("CartPole-v1") as envs:
        trainer = PPOTrainer(envs, SMALL, seed=3)
        state = trainer.state()
        trainer.train(4 * 16 * 4)
        trainer.load(state)
        trainer.train(4 * 16 * 4)
        assert digest(trainer) == digest_of_serial(SMALL)


@pytest.mark.parametrize(
    "wrong", [{"learning_rate": -1.0}, {"learning_rate": float("nan")}, {"clip_range": 0.0}]
)
def test_rates_must_be_above_zero(wrong):
    with pytest.raises(errors.ConfigError, match="must be above 0"):
        PPOOptions(**wrong)

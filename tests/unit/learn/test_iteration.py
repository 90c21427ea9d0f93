"""One iteration: what was chosen reaches rollout and loss, and what is lost reaches neither."""

import dataclasses
import functools
from copy import deepcopy
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from envfleet.learn import ppo
from envfleet.learn.checks import check_estimates
from envfleet.learn.evaluate import evaluate
from envfleet.learn.ppo import PPOOptions, PPOTrainer
from envfleet.testing import Counter, Crashing
from tests.unit.learn.test_ppo import SMALL, Show, digest, opened, value_of

FORKED = {"backend": "process", "num_workers": 2, "start_method": "fork"}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- the loss ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_annealed", "ranges"), [(True, [0.2, 0.15, 0.1, 0.05]), (False, [0.2])]
)
@pytest.mark.parametrize(("memory", "way"), [(None, "closed_form"), ("gru", "by_autograd")])
def test_the_clip_range_goes_down_where_that_was_asked_for(is_annealed, ranges, memory, way):
    options = dataclasses.replace(SMALL, anneal_clip_range=is_annealed, memory=memory)
    gradient = mock.Mock(wraps=getattr(ppo, way))
    with opened("CartPole-v1") as envs, mock.patch.object(ppo, way, gradient):
        PPOTrainer(envs, options).train(64 * 4)
    used = dict.fromkeys(call.args[-1].clip for call in gradient.call_args_list)
    assert list(used) == pytest.approx(ranges)


def learned_by_the_book(policy, rollout, options):
    """Parameters after an iteration of one minibatch per epoch, by PyTorch alone."""
    estimates, later = np.zeros_like(rollout.rewards), 0.0
    for row in reversed(range(len(estimates))):
        goes_on = options.gamma * options.gae_lambda * ~rollout.ended[row]
        expected = rollout.rewards[row] + options.gamma * rollout.successors[row]
        estimates[row] = later = expected - rollout.values[row] + goes_on * later
    flat = (rollout.actions, rollout.log_probs, rollout.values, estimates)
    actions, log_probs, before, gain = (torch.from_numpy(part.reshape(-1)) for part in flat)
    seen, returns = torch.from_numpy(rollout.obs[0].reshape(len(gain), -1)), gain + before
    gain = (gain - gain.mean()) / gain.std()
    adam = torch.optim.Adam(policy.parameters(), lr=options.learning_rate, eps=1e-5)
    low, high = 1 - options.clip_range, 1 + options.clip_range
    for _ in range(options.n_epochs):
        chosen = torch.distributions.Categorical(logits=policy.actor(seen))
        ratio = (chosen.log_prob(actions) - log_probs).exp()
        values = policy.critic(seen)[:, 0]
        off = (values - returns) ** 2
        if options.clip_values:
            near = before + (values - before).clamp(-options.clip_range, options.clip_range)
            off = torch.max(off, (near - returns) ** 2)
        loss = options.vf_coef * off.mean()
        loss = loss - torch.min(ratio * gain, ratio.clamp(low, high) * gain).mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), options.max_grad_norm)
        adam.step()
    return torch.nn.utils.parameters_to_vector(policy.parameters()).detach()


def test_an_iteration_is_that_of_the_book_with_and_without_clipped_values():
    found = {}
    for clips in (False, True):
        options = PPOOptions(
            n_steps=32,
            batch_size=128,
            n_epochs=8,
            learning_rate=0.02,
            hidden=(16,),
            clip_values=clips,
        )
        with opened("CartPole-v1") as envs:
            trainer = PPOTrainer(envs, options)
            rollout, policy = trainer.collect(), deepcopy(trainer.policy)
            trainer.learn(rollout)
        parameters = list(trainer.policy.parameters())
        found[clips] = torch.nn.utils.parameters_to_vector(parameters).detach()
        expected = learned_by_the_book(policy, rollout, options)
        torch.testing.assert_close(found[clips], expected, rtol=1e-3, atol=1e-3)
    assert (found[True] - found[False]).abs().max() > 0.05


# ---- normalised -------------------------------------------------------------------------------


class Pays(gymnasium.Env):
    """Pays what chance says, whatever is done; the second slot is paid a fortune once."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.is_lucky = getattr(self, "is_lucky", seed == 1)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        self.steps += 1
        reward = float(self.np_random.normal(1.0))
        if self.is_lucky and self.steps == 90:
            reward = 1000.0
        return np.zeros(1, np.float32), reward, self.t == 13, False, {}


def played(times, slots):
    """Rewards and ends of as many steps of environments that nobody scales."""
    rewards, ended = np.zeros((times, slots)), np.zeros((times, slots), bool)
    for slot in range(slots):
        env = Pays()
        env.reset(seed=slot)
        for row in range(times):
            _, rewards[row, slot], ended[row, slot], _, _ = env.step(0)
            if ended[row, slot]:
                env.reset()
    return rewards, ended


def scaled_by_hand(rewards, ended, gamma):
    running, returns, scaled = np.zeros(rewards.shape[1]), [], []
    for row, ends in zip(rewards, ended, strict=True):
        running = running * gamma + row
        returns.append(running)
        scaled.append(np.clip(row / np.sqrt(np.var(returns) + 1e-8), -10, 10))
        running = np.where(ends, 0.0, running)
    return np.stack(scaled)


@pytest.mark.parametrize("where", [{}, {"copy": False}], ids=["copies", "views"])
def test_rewards_are_scaled_by_the_returns_so_far_and_episodes_told_unscaled(where):
    options = dataclasses.replace(SMALL, n_steps=60, normalise_rewards=True, gamma=0.9)
    with opened(Pays, 3, **where) as envs:
        trainer = PPOTrainer(envs, options)
        rollouts = [trainer.collect() for _ in range(2)]
    rewards, ended = played(120, 3)
    expected = scaled_by_hand(rewards, ended, 0.9)
    found = np.concatenate([rollout.rewards for rollout in rollouts])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found[89, 1] == 10.0
    sums = rewards[: 9 * 13].reshape(9, 13, 3).sum(1).reshape(-1)
    told = [episode for rollout in rollouts for episode in rollout.episodes]
    assert [value for value, _ in told] == pytest.approx(sums.tolist())
    assert {length for _, length in told} == {13}


class Leap(gymnasium.Env):
    """Observes its time, and where it is cut off something that it never sees elsewhere."""

    observation_space = spaces.Box(-1e3, 1e3, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, limit=None):
        self.limit, self.t = limit, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        is_cut = self.t == self.limit
        return np.full(1, 12 if is_cut else self.t, np.float32), 1.0, False, is_cut, {}


@pytest.mark.parametrize("where", [{}, {"copy": False}], ids=["copies", "views"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_last_observation_is_seen_by_the_statistics_of_its_moment_and_not_in_them(where, overlap):
    options = PPOOptions(n_steps=7, normalise_obs=True, overlap=overlap)
    fns = [Leap, functools.partial(Leap, limit=5)]
    with opened(fns, None, **where) as envs:
        trainer = PPOTrainer(envs, options)
        rollout = trainer.collect()
    going_on, cut_off = [0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 0, 1, 2]
    kept = trainer.agent.state()["normalisers"][0]
    assert kept["count"] == 16
    assert kept["mean"][0] == pytest.approx(np.mean([*going_on, *cut_off]))
    assert kept["var"][0] == pytest.approx(np.var([*going_on, *cut_off]))
    before = [*going_on[:5], *cut_off[:5]]
    if overlap:  # the other half's next one is there already
        before.append(going_on[5])
    last = (12 - np.mean(before)) / np.std(before)
    assert abs(last) < 10
    assert rollout.successors[4, 1] == pytest.approx(value_of(trainer, last), rel=1e-4)
    assert rollout.successors[3, 1] == pytest.approx(
        value_of(trainer, rollout.obs[0][4, 1, 0]), rel=1e-4
    )


# ---- lost -------------------------------------------------------------------------------------


def with_junk(rollout, where):
    """A copy in which some rows say something else."""

    def spoiled(array, junk):
        copy = array.copy()
        copy[where] = junk
        return copy

    return dataclasses.replace(
        rollout,
        obs=tuple(spoiled(leaf, 77) for leaf in rollout.obs),
        actions=spoiled(rollout.actions, 1 - rollout.actions[where]),
        log_probs=spoiled(rollout.log_probs, -3.0),
        values=spoiled(rollout.values, 50.0),
        rewards=spoiled(rollout.rewards, 99.0),
        successors=spoiled(rollout.successors, -40.0),
    )


@pytest.mark.parametrize("memory", [None, "lstm"])
@pytest.mark.parametrize("mode", ["exception", "kill"])
def test_nothing_is_learned_from_lost_rows_whatever_is_in_them(mode, memory, tmp_path):
    options = dataclasses.replace(SMALL, memory=memory, memory_size=8, normalise_rewards=True)
    crashing = functools.partial(Crashing, mode=mode, nth=8, once=tmp_path / "crashed")
    where = {"backend": "process", "num_workers": 2, "on_failure": "restart"}
    with opened([crashing, Counter, Counter, Counter], None, **where) as envs:
        trainer = PPOTrainer(envs, options)
        rollout = trainer.collect()
        lost = ~rollout.valid
        assert lost[7, 0]
        trainer.learn(rollout)
        digests = []
        for spoiled in (lost, np.roll(lost, 1, 0)):
            same = PPOTrainer(envs, options)
            same.learn(with_junk(rollout, spoiled))
            digests.append(digest(same))
    assert digests[0] == digest(trainer) != digests[1]


@pytest.mark.parametrize("mode", ["exception", "kill"])
def test_rows_before_a_lost_one_are_worth_nothing_that_lies_behind_it(mode, tmp_path):
    crashing = functools.partial(Crashing, mode=mode, nth=8, once=tmp_path / "crashed")
    where = {"backend": "process", "num_workers": 2, "on_failure": "restart"}
    with opened([Counter, crashing], None, **where) as envs:
        trainer = PPOTrainer(envs, SMALL)
        rollout = trainer.collect()
        with mock.patch.object(ppo, "check_estimates", wraps=check_estimates) as seen:
            trainer.learn(rollout)
    estimates = seen.call_args.args[0][:, 1]
    assert np.flatnonzero(~rollout.valid[:, 1]).tolist() == [7]
    assert rollout.obs[0][:, 1, 0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2]
    assert rollout.successors[6, 1] == rollout.values[7, 1]
    steps = rollout.rewards + np.float32(SMALL.gamma) * rollout.successors - rollout.values
    assert estimates[7] == 0
    assert estimates[6] == pytest.approx(steps[6, 1])
    later = SMALL.gamma * SMALL.gae_lambda
    assert estimates[5] == pytest.approx(steps[5, 1] + later * steps[6, 1])


# ---- threads ----------------------------------------------------------------------------------


def threads_used_in(way, trainer):
    """How many threads PyTorch has while it learns."""
    used, whole = set(), getattr(ppo, way)

    def gradient(*args):
        used.add(torch.get_num_threads())
        return whole(*args)

    with mock.patch.object(ppo, way, gradient):
        trainer.learn(trainer.collect())
    return used


@pytest.mark.parametrize(("memory", "way"), [(None, "closed_form"), ("gru", "by_autograd")])
def test_small_networks_learn_with_one_thread_and_give_the_others_back(memory, way):
    torch.set_num_threads(2)
    with opened("CartPole-v1") as envs:
        trainer = PPOTrainer(envs, dataclasses.replace(SMALL, memory=memory))
        assert threads_used_in(way, trainer) == {1}
    assert torch.get_num_threads() == 2


def test_pictures_are_learned_from_with_all_cores(monkeypatch):
    monkeypatch.setattr("envfleet.learn.torch_setup.usable_cores", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    with opened(functools.partial(Show, ("image",)), 2) as envs:
        trainer = PPOTrainer(envs, dataclasses.replace(SMALL, n_steps=4))
        assert threads_used_in("by_autograd", trainer) == {3}
    assert torch.get_num_threads() == 2


# ---- actions of several parts -----------------------------------------------------------------


class Combination(gymnasium.Env):
    """Shows what every part of the action should be, and pays for the share that is."""

    def __init__(self, action_space):
        self.action_space = action_space
        self.counts = getattr(action_space, "nvec", np.full(action_space.shape, 2))
        self.starts = getattr(action_space, "start", np.zeros_like(self.counts))
        self.observation_space = spaces.Box(0, 1, (int(self.counts.sum()),), np.float32)

    def _told(self):
        self.right = self.np_random.integers(self.counts)
        hot = [np.eye(count)[part] for count, part in zip(self.counts, self.right, strict=True)]
        return np.concatenate(hot).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._told(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        reward = float(np.mean(action == self.right + self.starts))
        self.t += 1
        return self._told(), reward, False, self.t == 10, {}


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([3, 2, 4]),
        spaces.MultiDiscrete([3, 2], start=[1, -5]),
        spaces.MultiBinary(4),
    ],
    ids=str,
)
def test_every_part_of_an_action_is_learned(space):
    env = functools.partial(Combination, space)
    options = PPOOptions(
        n_steps=32,
        batch_size=32,
        n_epochs=8,
        learning_rate=1e-2,
        anneal_learning_rate=False,
        gamma=0.0,
        hidden=(16,),
    )
    curve: list[Any] = []
    with opened(env, 4) as envs:
        trainer = PPOTrainer(envs, options)
        curve += [trainer.train_episode_vectorized().reward for _ in range(25)]
        last = evaluate(trainer.agent.play, env, episodes=3).mean
    assert curve[0] < 6 < 9 < curve[-1], curve
    assert last > 9.5, curve


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([3, 2, 4]), spaces.MultiBinary(4)], ids=str)
def test_actions_of_several_parts_are_bit_equal_in_workers(space):
    found = []
    for where in ({"backend": "serial"}, FORKED):
        with opened(functools.partial(Combination, space), **where) as envs:
            trainer = PPOTrainer(envs, SMALL, seed=3)
            trainer.train(64 * 4)
            found.append(digest(trainer))
    assert found[0] == found[1]


# ---- seeds ------------------------------------------------------------------------------------


class Seeded(Counter):
    """Keeps the seeds that it was reset with."""

    def reset(self, *, seed=None, options=None):
        self.seeds = [*getattr(self, "seeds", []), seed]
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("where", [{}, FORKED], ids=["serial", "workers"])
def test_every_slot_is_reset_with_a_seed_of_its_own_once(where):
    with opened(Seeded, 4, **where) as envs:
        PPOTrainer(envs, SMALL, seed=7).collect()
        seeds = envs.get_attr("seeds")
    assert [given[0] for given in seeds] == [7, 8, 9, 10]
    assert all(given[1:] == [None] * 3 for given in seeds)

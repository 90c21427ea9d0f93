"""PPO: the same run everywhere, rows that mean what they say, trouble that costs an episode."""

import dataclasses
import functools
import hashlib
import time
from contextlib import closing
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import envfleet
from envfleet import errors
from envfleet.learn import segments, torch_setup
from envfleet.learn.agent import Agent
from envfleet.learn.checks import check_obs
from envfleet.learn.evaluate import evaluate
from envfleet.learn.heads import make_head
from envfleet.learn.inputs import Inputs
from envfleet.learn.ppo import PPOOptions, PPOTrainer
from envfleet.runs.time_report import OF_ROLLOUTS
from envfleet.testing import Counter, Crashing, UnpicklableInfo

SMALL = PPOOptions(n_steps=16, batch_size=32, n_epochs=2, hidden=(16,))
WHERE = [
    {"backend": "serial"},
    {"backend": "thread", "num_workers": 2},
    {"backend": "process", "num_workers": 1},
    {"backend": "process", "num_workers": 3, "start_method": "spawn"},
    {"backend": "process", "num_workers": 2, "start_method": "fork"},
    {"backend": "process", "num_workers": 3, "start_method": "fork", "rollout_steps": 16},
    {"backend": "serial", "rollout_steps": 16},
    {"backend": "thread", "num_workers": 2, "rollout_steps": 16},
    {"backend": "process", "num_workers": 2, "rollout_steps": 16},
    {"backend": "process", "num_workers": 3, "rollout_steps": 20},
    {"backend": "process", "num_workers": 2, "rollout_steps": 7},
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
def digest_of_serial(options, num_envs=4):
    with opened("CartPole-v1", num_envs) as envs:
        trainer = PPOTrainer(envs, options, seed=3)
        trainer.train(4 * 16 * num_envs)
        return digest(trainer)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalised": {"normalise_obs": True, "normalise_rewards": True},
    "overlapping": {"overlap": True},
    "remembering": {"memory": "lstm", "memory_size": 8},
}


@pytest.mark.parametrize("where", WHERE, ids=lambda where: "-".join(map(str, where.values())))
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_bit_equal_wherever_the_environments_live(where, kind):
    options = dataclasses.replace(SMALL, **KINDS[kind])
    with opened("CartPole-v1", **where) as envs:
        trainer = PPOTrainer(envs, options, seed=3)
        trainer.train(4 * 16 * 4)
        assert trainer.env_steps == 256
        assert digest(trainer) == digest_of_serial(options)


def test_one_half_steps_while_the_other_is_thought_about(monkeypatch):
    monkeypatch.setattr(segments, "usable_cores", lambda: 3)
    with opened("CartPole-v1", 16) as envs:
        trainer = PPOTrainer(envs, SMALL)
        with mock.patch.object(envs.fleet, "send", wraps=envs.fleet.send) as send:
            trainer.collect()
    assert send.call_count == SMALL.n_steps * 2
    assert {len(call.args[1]) for call in send.call_args_list} == {8}


@pytest.mark.parametrize("env", ["CartPole-v1", "HalfCheetah-v5"])
@pytest.mark.parametrize("kind", ["plain", "overlapping"])
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_workers_write_rollouts_in_place(backend, kind, env):
    options = dataclasses.replace(SMALL, **KINDS[kind])
    with opened(
        env,
        backend=backend,
        num_workers=2,
        copy=False,
        rollout_steps=16,
        rollout_floats="float32",
    ) as envs:
        trainer = PPOTrainer(envs, options)
        for _ in range(4 if env == "HalfCheetah-v5" else 1):  # until it knows which infos come
            envs.fleet.step(np.zeros(envs.action_space.shape, envs.action_space.dtype))
        with mock.patch.object(trainer.agent, "look", wraps=trainer.agent.look) as look:
            rollout = trainer.collect()
        assert np.shares_memory(rollout.obs[0], envs.fleet.pages)
        seen_again = [call for call in look.call_args_list if call.kwargs.get("learns")]
        assert len(seen_again) <= 1, "only what the fleet could not put there itself"


@pytest.mark.parametrize(("cores", "num_envs"), [(2, 16), (3, 15)])
def test_all_step_at_once_where_halves_would_not_pay(cores, num_envs, monkeypatch):
    monkeypatch.setattr(segments, "usable_cores", lambda: cores)
    with opened("CartPole-v1", num_envs) as envs:
        trainer = PPOTrainer(envs, SMALL)
        with mock.patch.object(envs.fleet, "step", wraps=envs.fleet.step) as step:
            trainer.collect()
    assert step.call_count == SMALL.n_steps


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
        rows = (torch.tensor([[float(number)]]),)
        return trainer.policy.value(rows, trainer.agent.fresh_states(1)).item()


def test_what_follows_a_row_is_the_next_one_nothing_or_the_true_last_observation():
    fns = [functools.partial(Walk, end=5), functools.partial(Walk, limit=5)]
    with opened(fns, None) as envs:
        trainer = PPOTrainer(envs, PPOOptions(n_steps=7))
        rollout = trainer.collect()
    assert rollout.obs[0][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert rollout.successors[4, 0] == 0.0
    assert rollout.successors[4, 1] == pytest.approx(value_of(trainer, 5), rel=1e-5)
    for row in (0, 3, 5):
        expected = value_of(trainer, rollout.obs[0][row + 1, 0, 0])
        assert rollout.successors[row, 0] == pytest.approx(expected, rel=1e-5)
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
        ({"n_steps": 0}, "n_steps must be a whole number of at least 1"),
        ({"gamma": 1.5}, "gamma must be a number from 0 to 1, got 1.5"),
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
        with pytest.raises(errors.ConfigError, match="of a run with batch_size=32, this"):
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
        assert Shifted.action_space.contains(trainer.agent.play()(np.zeros(1, np.float32), {}))


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
    with pytest.raises(errors.ConfigError, match="must be a finite number above 0"):
        PPOOptions(**wrong)


class Remember(gymnasium.Env):
    """Shows a sign at the beginning only, and pays for naming it at the end."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sign, self.t = int(self.np_random.integers(2)), 0
        return np.array([2 * self.sign - 1, 1], np.float32), {}

    def step(self, action):
        self.t += 1
        is_over = self.t == 4
        reward = float(action == self.sign) if is_over else 0.0
        return np.zeros(2, np.float32), reward, is_over, False, {}


@pytest.mark.parametrize(
    ("memory", "least", "most"), [("gru", 0.95, 1), ("lstm", 0.95, 1), (None, 0, 0.8)]
)
def test_a_policy_with_a_memory_learns_what_others_cannot(memory, least, most):
    options = PPOOptions(
        n_steps=16,
        batch_size=128,
        n_epochs=8,
        learning_rate=5e-3,
        anneal_learning_rate=False,
        memory=memory,
        memory_size=16,
        hidden=(16,),
    )
    with opened(Remember, 16) as envs:
        trainer = PPOTrainer(envs, options)
        trainer.train(256 * 40)
        found = evaluate(trainer.agent.play, Remember, episodes=40)
    assert least <= found.mean <= most


class Rule(gymnasium.Env):
    """Only one action is allowed at a time, and every other one is an error."""

    action_space = spaces.Discrete(3, start=1)

    def __init__(self, is_in_obs):
        self.is_in_obs = is_in_obs
        box = spaces.Box(0, 1, (1,), np.float32)
        mask = spaces.MultiBinary(3)
        self.observation_space = (
            spaces.Dict({"seen": box, "action_mask": mask}) if is_in_obs else box
        )

    def _told(self):
        self.allowed = int(self.np_random.integers(3))
        mask = np.eye(3, dtype=np.int8)[self.allowed]
        seen = np.zeros(1, np.float32)
        if self.is_in_obs:
            return {"seen": seen, "action_mask": mask}, {}
        return seen, {"action_mask": mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._told()

    def step(self, action):
        assert action == self.allowed + 1
        self.t += 1
        obs, info = self._told()
        return obs, 1.0, False, self.t == 7, info


@pytest.mark.parametrize("is_in_obs", [True, False])
@pytest.mark.parametrize("memory", [None, "gru"])
def test_only_allowed_actions_are_taken(is_in_obs, memory):
    env = functools.partial(Rule, is_in_obs)
    with opened(env, 3) as envs:
        trainer = PPOTrainer(envs, dataclasses.replace(SMALL, memory=memory))
        (learned,) = trainer.train(1)
        assert learned.entropy == pytest.approx(0.0, abs=1e-6)
        assert evaluate(trainer.agent.play, env, episodes=2).returns == (7.0, 7.0)


SHOWN: dict[str, tuple[spaces.Space, Any]] = {
    "number": (spaces.Box(-1, 1, (2, 2), np.float64), lambda n: np.full((2, 2), n - 1.0)),
    "choice": (spaces.Discrete(3, start=2), lambda n: np.int64(2 + n)),
    "choices": (spaces.MultiDiscrete([2, 3]), lambda n: np.array([1, n])),
    "bits": (spaces.MultiBinary(3), lambda n: np.eye(3, dtype=np.int8)[n]),
    "image": (
        spaces.Box(0, 255, (36, 36, 1), np.uint8),
        lambda n: np.repeat(np.eye(3, dtype=np.uint8)[n] * 255, 12 * 36).reshape(36, 36, 1),
    ),
}


class Show(gymnasium.Env):
    """Shows a choice in one of the ways there are, and pays for making it."""

    action_space = spaces.Discrete(3)

    def __init__(self, ways):
        self.ways = ways
        spaces_by_way = {way: SHOWN[way][0] for way in ways}
        self.observation_space = SHOWN[ways[0]][0] if len(ways) == 1 else spaces.Dict(spaces_by_way)

    def _told(self):
        self.choice = int(self.np_random.integers(3))
        told = {way: SHOWN[way][1](self.choice) for way in self.ways}
        return told if len(told) > 1 else told[self.ways[0]]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._told(), {}

    def step(self, action):
        reward = float(action == self.choice)
        self.t += 1
        return self._told(), reward, False, self.t == 10, {}


@pytest.mark.parametrize("ways", [*((way,) for way in SHOWN), tuple(SHOWN)], ids="-".join)
def test_observations_of_every_kind_are_learned_from(ways, monkeypatch):
    monkeypatch.setattr(torch_setup, "usable_cores", lambda: 1)  # the other may be in use
    env = functools.partial(Show, ways)
    options = PPOOptions(
        n_steps=16,
        batch_size=64,
        n_epochs=8,
        learning_rate=1e-3 if "image" in ways else 1e-2,
        anneal_learning_rate=False,
        ent_coef=0.05,
        hidden=(32,),
    )
    with opened(env, 4) as envs:
        trainer = PPOTrainer(envs, options)
        first = np.mean([value for value, _ in trainer.collect().episodes])
        trainer.train(64 * (12 if "image" in ways else 60))
        last = evaluate(trainer.agent.play, env, episodes=3).mean
    assert first < 6
    assert last > 9


@pytest.mark.parametrize(
    "space", [spaces.Text(4), spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))})], ids=str
)
def test_observations_that_cannot_be_taken_in_are_named(space):
    with pytest.raises(errors.ConfigError, match="wrap the environment to encode it"):
        Inputs(space)


class TestTheDocumentsNames:
    def test_an_iteration_of_one_environment(self):
        with opened("CartPole-v1", 1) as envs:
            episode = PPOTrainer(envs, PPOOptions(n_steps=64, batch_size=32)).train_episode()
        assert episode.n_envs == 1
        assert episode.n_completed_episodes >= 1
        assert episode.reward == episode.length

    def test_an_iteration_of_many(self):
        with opened("CartPole-v1", 4) as envs:
            trainer = PPOTrainer(envs, PPOOptions(n_steps=64, batch_size=32))
            assert trainer.train_episode_vectorized().n_envs == 4
            with pytest.raises(errors.ConfigError, match="call train_episode_vectorized"):
                trainer.train_episode()


@pytest.mark.parametrize("more", [{}, {"normalise_obs": True, "normalise_rewards": True}], ids=str)
def test_where_the_time_goes_adds_up(more):
    for _ in range(5):  # what a busy machine takes between two parts is in neither
        with opened("CartPole-v1", 4) as envs:
            trainer = PPOTrainer(envs, dataclasses.replace(SMALL, n_epochs=1, **more))
            begun_s = time.perf_counter()
            trainer.train(1024)
            elapsed_s = time.perf_counter() - begun_s
            parts = trainer.seconds
        assert set(parts) == {*OF_ROLLOUTS, "learning"}
        assert all(seconds >= 0 for seconds in parts.values())
        assert sum(parts.values()) <= elapsed_s
        if 0.95 * elapsed_s < sum(parts.values()):
            break
    assert 0.95 * elapsed_s < sum(parts.values())


@pytest.fixture
def _three_threads(_one_thread):
    torch.set_num_threads(3)


@pytest.mark.usefixtures("_three_threads")
def test_a_trainer_collects_with_one_thread_and_gives_the_others_back(monkeypatch):
    seen = list[int]()

    def fit(agent, actions):
        seen.append(torch.get_num_threads())
        return actions if len(seen) < 20 else 1 / 0

    monkeypatch.setattr(Agent, "fit", fit)
    with opened("CartPole-v1") as envs:
        trainer = PPOTrainer(envs, SMALL)
        trainer.collect()
        assert torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError):
            trainer.collect()
        assert torch.get_num_threads() == 3
    assert seen == [1] * 20


@pytest.mark.parametrize(
    ("said", "number"),
    [(None, 8), ("3", 3), ("64", 8), ("0", 8), ("4,2", 8), ("", 8), ("many", 8)],
)
def test_learning_from_pictures_keeps_to_omp_num_threads(monkeypatch, said, number):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.setattr(torch_setup, "usable_cores", lambda: 8)
    assert torch_setup.threads_for_pictures() == number


class SlowBesideSteps(Counter):
    """Resets and pickles take their time; steps take as long as they are told."""

    def __init__(self, step_s):
        super().__init__(length=None)
        self.step_s = step_s

    def reset(self, **options):
        time.sleep(0.3)
        return super().reset(**options)

    def step(self, action):
        time.sleep(self.step_s)
        return super().step(action)

    def __getstate__(self):
        time.sleep(0.1)
        return self.__dict__


def test_resets_and_snapshots_between_rollouts_are_not_taken_for_steps():
    """One worker of two has nothing to do: that is waiting, however long its first reset took."""
    envs = [functools.partial(SlowBesideSteps, step_s) for step_s in (0.005, 0.0)]
    with opened(envs, 2, backend="process", num_workers=2) as fleet:
        trainer = PPOTrainer(fleet, SMALL)
        assert not any(trainer.seconds.values())
        for _ in range(3):
            trainer.collect()
            trainer.state()
        parts = trainer.seconds
    assert parts["environments"] < 0.8 * (parts["environments"] + parts["waiting"])


class Locks(gymnasium.Env):
    """Allows one of two locks of three positions each; tells of it in its own way."""

    action_space = spaces.MultiDiscrete([3, 3])
    observation_space = spaces.Box(0, 1, (), np.float32)

    def __init__(self, how):
        self.how = how

    def _told(self):
        first, second = self.np_random.integers(3, size=2).tolist()
        parts = tuple(np.eye(3, dtype=np.int8)[[first, second]])
        self.allowed: tuple[int, int] | None = (first, second)
        joined = np.concatenate(parts)
        mask = {"tuple": parts, "list": joined.tolist()}.get(self.how, joined)
        is_late = self.how == "late" and self.t == 0
        is_silent = is_late or (self.how == "now and then" and self.t % 2)
        if is_silent:
            self.allowed = None
        return np.float32(0.5), {} if is_silent else {"action_mask": mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._told()

    def step(self, action):
        assert self.allowed is None or tuple(action.tolist()) == self.allowed
        self.t += 1
        obs, info = self._told()
        return obs, 1.0, False, self.t == 7, info


@pytest.mark.parametrize("how", ["tuple", "list", "late", "now and then"])
def test_masks_may_come_in_any_form_and_at_any_time(how):
    env = functools.partial(Locks, how)
    with opened(env, 3) as envs:
        trainer = PPOTrainer(envs, SMALL)
        trainer.train(1)
        assert evaluate(trainer.agent.play, env, episodes=1).returns == (7.0,)


def test_a_mask_that_leaves_nothing_is_refused():
    with pytest.raises(errors.ConfigError, match=r"\[1, 1, 1, 0, 0\] leaves nothing to choose"):
        make_head(spaces.MultiDiscrete([3, 2]), 0.0).check(np.array([[True] * 3 + [False] * 2]))


@pytest.mark.parametrize(
    "wrong",
    [{"ent_coef": float("nan")}, {"vf_coef": -1.0}, {"target_kl": -1.0}, {"learning_rate": np.inf}],
    ids=str,
)
def test_numbers_that_would_spoil_a_run_in_silence_are_refused(wrong):
    with pytest.raises(errors.ConfigError, match=next(iter(wrong))):
        PPOOptions(**wrong)


def test_progress_is_a_part_of_the_run():
    with opened("CartPole-v1", 1) as envs:
        trainer = PPOTrainer(envs, SMALL)
        with pytest.raises(errors.ConfigError, match=r"from 0 to 1; got 1\.5"):
            trainer.train_episode(1.5)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"gamma": "high"}, "gamma must be a number from 0 to 1, got 'high'"),
        ({"learning_rate": True}, "learning_rate must be a finite number above 0, got True"),
        ({"log_std": float("nan")}, "log_std must be a finite number, got nan"),
        ({"hidden": 64}, "hidden must be a list of whole numbers of at least 1, got 64"),
        ({"hidden": (64, 1.5)}, "hidden must be a list of whole numbers"),
    ],
)
def test_options_of_the_wrong_type_are_named(wrong, words):
    with pytest.raises(errors.ConfigError, match=words):
        PPOOptions(**wrong)


def test_layers_in_a_list_are_those_in_a_tuple():
    layers: Any = [64, 32]
    assert PPOOptions(hidden=layers) == PPOOptions(hidden=(64, 32))


def test_what_a_trainer_cannot_train_on_is_named():
    others: Any = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    said = r"not on a SyncVectorEnv: make it with envfleet"
    with closing(others), pytest.raises(errors.ConfigError, match=said):
        PPOTrainer(others)
    no_options: Any = {"n_steps": 16}
    with opened("CartPole-v1") as envs:
        with pytest.raises(errors.ConfigError, match=r"options must be PPOOptions.*got a dict"):
            PPOTrainer(envs, no_options)
        with pytest.raises(errors.ConfigError, match="seed must be a whole number from 0 to"):
            PPOTrainer(envs, SMALL, seed=1 << 63)


LAST = SMALL.n_steps


class Poisoned(gymnasium.Env):
    """Gives something that is not a number in its fifth step, if it is in the second slot."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, reward=1.0, obs=0.0, when=5, truncates=False):
        self.poison, self.steps = (reward, obs), 0
        self.when, self.truncates = when, truncates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.is_bad, self.steps = seed == 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        is_now = self.is_bad and self.steps == self.when
        reward, obs = self.poison if is_now else (1.0, 0.0)
        return np.full(1, obs, np.float32), reward, False, is_now and self.truncates, {}


@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_no_number_is_named_and_teaches_nothing(reward, is_normalised):
    options = dataclasses.replace(SMALL, normalise_rewards=is_normalised)
    with opened(functools.partial(Poisoned, reward=reward), 3) as envs:
        trainer = PPOTrainer(envs, options)
        before = digest(trainer)
        with pytest.raises(errors.NotFinite, match=f"a reward of slot 1 is {reward} at step 5"):
            trainer.train_episode_vectorized()
        assert digest(trainer) == before


@pytest.mark.parametrize(
    ("poison", "words"),
    [
        ({"obs": float("nan")}, "an observation of slot 1 is nan after step 5 of"),
        ({"obs": float("inf")}, "an observation of slot 1 is inf after step 5 of"),
        ({"obs": float("nan"), "when": LAST}, f"an observation of slot 1 is nan after step {LAST}"),
        ({"obs": float("inf"), "when": LAST}, f"an observation of slot 1 is inf after step {LAST}"),
        (
            {"obs": float("nan"), "truncates": True},
            "the last observation of an episode of slot 1 is nan at step 5 of",
        ),
        ({"reward": 1e39}, "a reward of slot 1 is inf at step 5"),
    ],
)
def test_numbers_that_become_none_on_the_way_are_named(poison, words):
    with opened(functools.partial(Poisoned, **poison), 3) as envs:
        trainer = PPOTrainer(envs, SMALL)
        before = digest(trainer)
        with pytest.raises(errors.NotFinite, match=words):
            trainer.train_episode_vectorized()
        assert digest(trainer) == before


def test_an_observation_in_front_of_a_lost_row_is_named_if_a_row_led_to_it():
    obs, valid = np.zeros((4, 2, 1), np.float32), np.ones((3, 2), np.bool_)
    obs[1, 0], valid[1, 0] = np.nan, False
    with pytest.raises(errors.NotFinite, match="an observation of slot 0 is nan after step 1 of"):
        check_obs((obs,), valid)
    valid[0, 0] = False
    check_obs((obs,), valid)


def test_statistics_that_were_spoiled_are_blamed_on_no_slot_alone():
    options = dataclasses.replace(SMALL, normalise_obs=True)
    with opened(functools.partial(Poisoned, obs=float("inf")), 3) as envs:
        trainer, said = PPOTrainer(envs, options), r"one of the slots \[0, 1, 2\] is nan"
        with pytest.raises(errors.NotFinite, match=said):
            trainer.train_episode_vectorized()


def test_parameters_that_are_no_numbers_any_more_are_not_gone_on_with():
    with opened("CartPole-v1") as envs:
        trainer = PPOTrainer(envs, dataclasses.replace(SMALL, learning_rate=1e38))
        with pytest.raises(errors.NotFinite, match="smaller learning_rate"):
            trainer.train(10 * 64)


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (0,)), spaces.Dict({})], ids=str)
def test_observations_without_a_number_are_refused(space):
    with pytest.raises(errors.ConfigError, match="nothing to observe"):
        Inputs(space)


class PartlyEmpty(gymnasium.Env):
    """Has parts of its observations in which there is nothing."""

    action_space = spaces.Discrete(2)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, bool(self.np_random.random() < 0.2), {}


NOTHING, SOMETHING = spaces.Box(-1, 1, (0,), np.float32), spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize("memory", [None, "gru"])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict({"a": NOTHING, "b": SOMETHING}),
        spaces.Tuple((SOMETHING, spaces.Box(-1, 1, (3, 0), np.float32), spaces.Discrete(3))),
    ],
    ids=str,
)
def test_parts_of_observations_without_a_number_are_left_out(space, memory):
    options = dataclasses.replace(SMALL, normalise_obs=True, memory=memory)
    with opened(functools.partial(PartlyEmpty, space)) as envs:
        trainer = PPOTrainer(envs, options)
        trainer.train(128)
        assert trainer.agent.play()(space.sample(), {}) in (0, 1)


def test_minibatches_that_a_memory_cannot_have_are_told_of():
    options = dataclasses.replace(SMALL, memory="gru", batch_size=8)
    said = r"batch_size=8 has no effect.* n_steps=16 rows"
    with opened("CartPole-v1") as envs, pytest.warns(RuntimeWarning, match=said):
        PPOTrainer(envs, options)


def test_a_state_that_cannot_hold_the_environments_holds_the_rest(monkeypatch):
    monkeypatch.setattr("envfleet.engine.episodes.LIMIT_BYTES", 1000)
    endless = functools.partial(UnpicklableInfo, length=None)
    options = dataclasses.replace(SMALL, normalise_rewards=True)
    with opened(endless) as envs:
        trainer = PPOTrainer(envs, options)
        trainer.train(64)
        with pytest.warns(RuntimeWarning, match="kept without the environments"):
            state = trainer.state()
        learned = digest(trainer)
    ends = []
    for _ in range(2):
        with opened(endless) as envs:
            trainer = PPOTrainer(envs, options, seed=7)
            with pytest.warns(RuntimeWarning, match="new episodes begin in all slots"):
                trainer.load(state)
            assert digest(trainer) == learned
            trainer.train(128)
            ends.append(digest(trainer))
    assert ends[0] == ends[1] != learned


@pytest.mark.parametrize(
    "space",
    [
        *(spaces.Box(-1, 1, (2,), kind) for kind in (np.float16, np.float32, np.float64)),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(-1, 1, (2, 3), np.float32),
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(4),
    ],
    ids=str,
)
def test_what_an_agent_plays_is_of_the_action_space(space):
    seen = spaces.Box(-1, 1, (3,), np.float32)
    agent = Agent(seen, space, SMALL, torch.device("cpu"), 0)

    action = agent.play()(np.full(3, 0.5, np.float32), {})

    assert space.contains(action), repr(action)
    if not isinstance(space, spaces.Discrete):
        assert (action.dtype, action.shape) == (space.dtype, space.shape)


class Outside(gymnasium.Env[Any, Any]):
    """Shows a choice that its space does not have, in the second slot."""

    observation_space = spaces.Discrete(3, start=1)
    action_space = spaces.Discrete(2)

    def __init__(self, when, value, truncates=False):
        self.when, self.value, self.truncates = when, value, truncates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.is_bad, self.steps = seed == 1, 0
        return 1, {}

    def step(self, action):
        self.steps += 1
        is_now = self.is_bad and self.steps == self.when
        return self.value if is_now else 1, 1.0, False, is_now and self.truncates, {}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "wrong", [(5, 7), (5, 0), (LAST, 7), (5, 7, True)], ids=["above", "below", "last", "final"]
)
def test_a_choice_that_its_space_does_not_have_is_named(wrong, overlap):
    with opened(functools.partial(Outside, *wrong), 3) as envs:
        trainer = PPOTrainer(envs, dataclasses.replace(SMALL, overlap=overlap))
        said = f"an observation of slot 1 is {wrong[1]}, and its space has 1 to 3"
        with pytest.raises(errors.ConfigError, match=said):
            trainer.train_episode_vectorized()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"normalise_obs": "yes"}, "normalise_obs must be true or false, got 'yes'"),
        ({"orthogonal": 1}, "orthogonal must be true or false, got 1"),
        ({"overlap": 3}, "overlap must be true or false, or None; got 3"),
    ],
)
def test_what_only_looks_like_yes_or_no_is_refused(wrong, words):
    with pytest.raises(errors.ConfigError, match=words):
        PPOOptions(**wrong)


def test_a_trainer_refuses_what_it_cannot_use():
    with opened("CartPole-v1") as envs:
        with pytest.raises(errors.ConfigError, match="device 'nonsense' cannot be used here"):
            PPOTrainer(envs, SMALL, device="nonsense")
        trainer = PPOTrainer(envs, SMALL)
        for state in ({}, None, {"trainer": trainer.state()}):
            with pytest.raises(errors.ConfigError, match="no state of a trainer"):
                trainer.load(state)  # type: ignore[arg-type]
        with pytest.raises(errors.ConfigError, match="total_steps must be a whole number"):
            trainer.train(total_steps="a")  # type: ignore[arg-type]

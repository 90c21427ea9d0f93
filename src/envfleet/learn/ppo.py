"""Proximal policy optimisation on a fleet, to be read from top to bottom.

    collect: obs ─► actor ─► actions ─► fleet ─► rewards, ends, next obs     [time, slot]
    judge:   values, true successors ─► advantages, returns
    learn:   epochs of shuffled minibatches ─► clipped policy loss + value loss - entropy

The fleet resets in the same step in which an episode ends, so every row is a transition, and a
truncated episode is bootstrapped from its true last observation. Observations and rewards are
normalised in one place for all slots. Actions are stored as they were drawn; only the environment
gets them cut off at its bounds.
"""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor, nn

from envfleet.adapters.gymnasium import FleetVectorEnv
from envfleet.errors import ConfigError
from envfleet.learn.advantages import advantages, explained_variance, successor_values
from envfleet.learn.networks import ActorCritic
from envfleet.learn.normalise import ObservationNormaliser, RewardScaler

Array = npt.NDArray[Any]
_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


@dataclass(frozen=True, slots=True)
class PPOOptions:
    """What can be chosen; the defaults are plain PPO's."""

    n_steps: int = 128
    """Steps of every slot per iteration."""
    batch_size: int = 256
    """Rows per minibatch."""
    n_epochs: int = 4
    learning_rate: float = 2.5e-4
    anneal_learning_rate: bool = True
    """Towards 0 over the whole run."""
    clip_range: float = 0.2
    anneal_clip_range: bool = False
    gamma: float = 0.99
    gae_lambda: float = 0.95
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    clip_values: bool = False
    """Keep new value estimates within `clip_range` of the old ones."""
    target_kl: float | None = None
    """Stop the epochs of an iteration once the policy has moved 1.5 times this far."""
    normalise_obs: bool = False
    normalise_rewards: bool = False
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    log_std: float = 0.0
    orthogonal: bool = True

    def __post_init__(self) -> None:
        for name in ("n_steps", "batch_size", "n_epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip_range", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if any(units < 1 for units in self.hidden):
            raise ConfigError(f"hidden must be layer sizes of at least 1, got {self.hidden}")
        if self.activation not in _ACTIVATIONS:
            raise ConfigError(f"activation must be one of {list(_ACTIVATIONS)}")


@dataclass(frozen=True, slots=True)
class Rollout:
    """One iteration's experience, [time, slot]."""

    obs: Array
    actions: Array
    log_probs: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float32]
    successors: npt.NDArray[np.float32]
    ended: npt.NDArray[np.bool_]
    valid: npt.NDArray[np.bool_]
    episodes: list[tuple[float, int]]
    """Return and length of every episode that ended."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What one iteration did to the policy."""

    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float
    clip_fraction: float
    explained_variance: float
    learning_rate: float
    epochs: int


class Agent:
    """What a run makes: a policy, and how observations and actions reach it."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        options: PPOOptions,
        device: torch.device,
        seed: int,
    ) -> None:
        """Build the networks; their weights follow from `seed` alone."""
        if not isinstance(observation_space, spaces.Box):
            raise ConfigError(f"PPO observes Box spaces for now, not {observation_space}")
        self.device = device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy = ActorCritic(
                observation_space,
                action_space,
                hidden=options.hidden,
                activation=_ACTIVATIONS[options.activation],
                log_std=options.log_std,
                is_orthogonal=options.orthogonal,
            ).to(device)
        shape = observation_space.shape
        self.obs_norm = ObservationNormaliser(shape) if options.normalise_obs else None
        self._space = action_space

    def tensor(self, array: Array) -> Tensor:
        """An array where the networks are."""
        return torch.from_numpy(array).to(self.device)

    def look(self, obs: Array) -> Array:
        """Observations as the networks get them."""
        return np.asarray(obs, np.float32) if self.obs_norm is None else self.obs_norm(obs)

    def fit(self, actions: Array) -> Array:
        """Actions as environments get them."""
        if isinstance(self._space, spaces.Box):
            return np.clip(actions, self._space.low, self._space.high)
        if isinstance(self._space, spaces.Discrete | spaces.MultiDiscrete):
            return actions + self._space.start
        return actions

    def decide(self, obs: Any) -> Any:
        """The likeliest action for one observation, as its environment gets it."""
        with torch.inference_mode():
            said = self.policy.decide(self.tensor(self.look(np.asarray(obs)[None])))
        return self.fit(said.cpu().numpy())[0]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "policy": deepcopy(self.policy.state_dict()),
            "obs_norm": self.obs_norm and self.obs_norm.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the agent that gave this state."""
        self.policy.load_state_dict(state["policy"])
        if self.obs_norm is not None:
            self.obs_norm.load(state["obs_norm"])


class PPOTrainer:
    """A policy, the fleet it acts in, and everything that has to go on exactly as it was."""

    def __init__(
        self,
        envs: FleetVectorEnv,
        options: PPOOptions = PPOOptions(),  # noqa: B008 - frozen
        *,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """Build networks and optimiser; the fleet must reset in the same step.

        Args:
            envs: What `envfleet.make_vec(..., autoreset="same_step")` returned; not closed here.
            options: How to learn.
            seed: Of weights, actions, shuffling, and the first reset.
            device: Where the networks live.
        """
        if envs.fleet.autoreset != "same_step":
            raise ConfigError(
                "PPO needs every row to be a transition: make the fleet with autoreset='same_step'"
            )
        self.envs, self.options, self.device = envs, options, torch.device(device)
        self.agent = Agent(
            envs.single_observation_space, envs.single_action_space, options, self.device, seed
        )
        self.policy = self.agent.policy
        self.optimiser = torch.optim.Adam(
            self.policy.parameters(), lr=options.learning_rate, eps=1e-5
        )
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._shuffler = np.random.default_rng(seed)
        self._scaler = (
            RewardScaler(envs.num_envs, options.gamma) if options.normalise_rewards else None
        )
        self._running_returns = np.zeros(envs.num_envs)
        self._running_lengths = np.zeros(envs.num_envs, np.int64)
        obs, _ = envs.reset(seed=seed)
        self._obs = self._seen(obs)
        self.env_steps = 0
        self.seconds = dict.fromkeys(("environments", "inference", "learning"), 0.0)
        """Where the time went so far; waiting for environments is theirs."""

    def train(self, total_steps: int) -> list[Learned]:
        """Iterate until the fleet has made this many steps."""
        done = []
        while self.env_steps < total_steps:
            progress = self.env_steps / total_steps
            done.append(self.learn(self.collect(), progress))
        return done

    # ---- to go on exactly where it was ---------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that the coming iterations depend on, environments included."""
        return {
            "options": asdict(self.options),
            "num_envs": self.envs.num_envs,
            "env_steps": self.env_steps,
            **self.agent.state(),
            "optimiser": deepcopy(self.optimiser.state_dict()),
            "actions": self._generator.get_state(),
            "shuffling": self._shuffler.bit_generator.state,
            "scaler": self._scaler and self._scaler.state(),
            "obs": self._obs.copy(),
            "returns": self._running_returns.copy(),
            "lengths": self._running_lengths.copy(),
            "slots": self.envs.snapshot(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the trainer that gave this state; the fleet is brought to its states too."""
        for name, mine in (("options", asdict(self.options)), ("num_envs", self.envs.num_envs)):
            if state[name] != mine:
                raise ConfigError(
                    f"the state is of a run with {name} {state[name]}, this one has {mine}; "
                    "go on with the same"
                )
        self.agent.load(state)
        self.optimiser.load_state_dict(deepcopy(state["optimiser"]))
        self._generator.set_state(state["actions"].cpu())
        self._shuffler.bit_generator.state = state["shuffling"]
        if self._scaler is not None:
            self._scaler.load(state["scaler"])
        self._obs = state["obs"].copy()
        self._running_returns = state["returns"].copy()
        self._running_lengths = state["lengths"].copy()
        self.env_steps = state["env_steps"]
        self.envs.restore(state["slots"])

    # ---- experience -----------------------------------------------------------------------------

    def collect(self) -> Rollout:
        """Step every slot `n_steps` times."""
        options, envs = self.options, self.envs
        times, slots = options.n_steps, envs.num_envs
        obs = np.zeros((times, *self._obs.shape), np.float32)
        log_probs, values, rewards, finals = np.zeros((4, times, slots), np.float32)
        terminated, truncated, valid = np.zeros((3, times, slots), np.bool_)
        actions: list[Array] = []
        episodes: list[tuple[float, int]] = []
        clock = time.perf_counter
        for step in range(times):
            begun_s = clock()
            obs[step] = self._obs
            seen = self.agent.tensor(self._obs)
            with torch.inference_mode():
                drawn, log_prob, value = self.policy.act(seen, self._generator)
            action = drawn.cpu().numpy()
            log_probs[step], values[step] = log_prob.cpu().numpy(), value.cpu().numpy()
            actions.append(action)
            acted_s = clock()
            envs.send(self.agent.fit(action))
            batch = envs.recv()
            self.seconds["environments"] += clock() - acted_s
            self.seconds["inference"] += acted_s - begun_s
            ended = batch.terminated | batch.truncated
            rewards[step] = self._reward(batch.rewards, ended, batch.valid)
            terminated[step], truncated[step] = batch.terminated, batch.truncated
            valid[step] = batch.valid
            if batch.truncated.any():
                finals[step] = self._values_of_finals(batch.final_obs, batch.truncated)
            episodes += self._count_episodes(batch.rewards, ended, batch.valid)
            self._obs = self._seen(batch.obs)
        with torch.inference_mode():
            last = self.policy.value(self.agent.tensor(self._obs)).cpu().numpy()
        self.env_steps += times * slots
        return Rollout(
            obs=obs,
            actions=np.stack(actions),
            log_probs=log_probs,
            values=values,
            rewards=rewards,
            successors=successor_values(values, last, terminated, truncated, finals),
            ended=terminated | truncated,
            valid=valid,
            episodes=episodes,
        )

    def _seen(self, obs: Array) -> Array:
        """Observations as the networks get them; the statistics learn from them."""
        if self.agent.obs_norm is not None:
            self.agent.obs_norm.update(obs)
        return self.agent.look(obs)

    def _reward(self, rewards: Array, ended: Array, valid: Array) -> Array:
        return rewards if self._scaler is None else self._scaler(rewards, ended, valid)

    def _values_of_finals(self, finals: Array, truncated: Array) -> Array:
        """What truncated episodes would still have been worth."""
        worth = np.zeros(len(truncated), np.float32)
        rows = self.agent.tensor(self.agent.look(finals[truncated]))
        with torch.inference_mode():
            worth[truncated] = self.policy.value(rows).cpu().numpy()
        return worth

    def _count_episodes(
        self, rewards: Array, ended: Array, valid: Array
    ) -> list[tuple[float, int]]:
        self._running_returns += rewards
        self._running_lengths += valid
        over = np.flatnonzero(ended)
        finished = [
            (float(self._running_returns[slot]), int(self._running_lengths[slot]))
            for slot in over
            if valid[slot]  # an episode whose environment was lost has no honest return
        ]
        self._running_returns[over] = 0.0
        self._running_lengths[over] = 0
        return finished

    # ---- learning -------------------------------------------------------------------------------

    def learn(self, rollout: Rollout, progress: float = 0.0) -> Learned:
        """Improve the policy by one rollout; `progress` is how much of the run is over."""
        begun_s = time.perf_counter()
        options = self.options
        estimates = advantages(
            rollout.rewards,
            rollout.values,
            rollout.successors,
            rollout.ended,
            rollout.valid,
            gamma=options.gamma,
            gae_lambda=options.gae_lambda,
        )
        returns = estimates + rollout.values
        rows = np.flatnonzero(rollout.valid.reshape(-1))
        flat = _Flat(
            *(
                self.agent.tensor(array.reshape(-1, *array.shape[2:])[rows])
                for array in (
                    rollout.obs,
                    rollout.actions,
                    rollout.log_probs,
                    rollout.values,
                    estimates,
                    returns,
                )
            )
        )
        left = 1.0 - progress
        rate = options.learning_rate * (left if options.anneal_learning_rate else 1.0)
        clip = options.clip_range * (left if options.anneal_clip_range else 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        sums, batches, epochs = np.zeros(5), 0, 0
        for _ in range(options.n_epochs):
            order = self._shuffler.permutation(len(rows))
            is_far = False
            for start in range(0, len(order), options.batch_size):
                chosen = self.agent.tensor(order[start : start + options.batch_size])
                figures = self._step(flat.at(chosen), clip)
                sums += figures
                batches += 1
                is_far = options.target_kl is not None and figures[3] > 1.5 * options.target_kl
                if is_far:
                    break
            epochs += 1
            if is_far:
                break
        self.seconds["learning"] += time.perf_counter() - begun_s
        policy_loss, value_loss, entropy, kl, clipped = (sums / max(batches, 1)).tolist()
        return Learned(
            policy_loss=policy_loss,
            value_loss=value_loss,
            entropy=entropy,
            approx_kl=kl,
            clip_fraction=clipped,
            explained_variance=explained_variance(rollout.values, returns),
            learning_rate=rate,
            epochs=epochs,
        )

    def _step(self, rows: _Flat, clip: float) -> Array:
        """One minibatch: policy loss, value loss, entropy, KL, share of clipped rows."""
        options = self.options
        log_probs, entropies, values = self.policy.judge(rows.obs, rows.actions)
        gain = rows.advantages
        if len(gain) > 1:
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        log_ratio = log_probs - rows.log_probs
        ratio = log_ratio.exp()
        policy_loss = -torch.min(gain * ratio, gain * ratio.clamp(1 - clip, 1 + clip)).mean()
        if options.clip_values:
            near = rows.values + (values - rows.values).clamp(-clip, clip)
            value_loss = torch.max((values - rows.returns) ** 2, (near - rows.returns) ** 2).mean()
        else:
            value_loss = nn.functional.mse_loss(values, rows.returns)
        entropy = entropies.mean()
        loss = policy_loss + options.vf_coef * value_loss - options.ent_coef * entropy
        self.optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.policy.parameters(), options.max_grad_norm)
        self.optimiser.step()
        with torch.no_grad():
            kl = ((ratio - 1) - log_ratio).mean()
            clipped = ((ratio - 1).abs() > clip).float().mean()
            return torch.stack((policy_loss, value_loss, entropy, kl, clipped)).cpu().numpy()


@dataclass(frozen=True, slots=True)
class _Flat:
    """Rows of a rollout in any order."""

    obs: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def at(self, rows: Tensor) -> _Flat:
        """Some of them."""
        return _Flat(
            self.obs[rows],
            self.actions[rows],
            self.log_probs[rows],
            self.values[rows],
            self.advantages[rows],
            self.returns[rows],
        )

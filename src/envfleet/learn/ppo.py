"""Proximal policy optimisation on a fleet, to be read from top to bottom.

    collect: obs ─► actor ─► actions ─► fleet ─► rewards, ends, next obs     segments.py, collect.py
    judge:   values, true successors ─► advantages, returns                  advantages.py
    learn:   epochs of shuffled minibatches ─► gradient of the loss ─► Adam  loss.py

Arrays are [time, slot]. The fleet resets in the step in which an episode ends, so every row is a
transition, and a truncated episode is bootstrapped from its true last observation. Observations and
rewards are normalised in one place for all slots. Actions are stored as they were drawn; only the
environment gets them clipped to its bounds. With a memory, minibatches are whole slots, replayed
from the stored state; otherwise they are rows in any order.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from envfleet.adapters.gymnasium import FleetVectorEnv
from envfleet.engine.machine import usable_cores
from envfleet.errors import ConfigError, NotFinite
from envfleet.learn.advantages import advantages, explained_variance
from envfleet.learn.agent import Agent
from envfleet.learn.checks import check_estimates
from envfleet.learn.collect import Collector, Experience
from envfleet.learn.fast.gradients import closed_form
from envfleet.learn.fast.optimiser import FlatAdam
from envfleet.learn.judging import flattened
from envfleet.learn.loss import LossGradient, LossWeights, TrainingRows, by_autograd
from envfleet.learn.node_envs import NodeEnvs
from envfleet.learn.node_stepper import NodeStepper
from envfleet.learn.options import PPOOptions
from envfleet.learn.segments import FleetStepper
from envfleet.learn.sequences import stretches
from envfleet.learn.torch_setup import threads, threads_for_pictures, usable_device
from envfleet.options import Count, Seed, check
from envfleet.runs.plain_data import check_structure
from envfleet.runs.time_report import Setup

__all__ = ["Agent", "Episode", "Experience", "Learned", "PPOLearner", "PPOOptions", "PPOTrainer"]

Gradients = Callable[[], Iterator[LossGradient]]
"""Gives the gradients of one epoch's minibatches, one after another."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What one update did; losses, entropy, KL and clipped share are those of the last epoch."""

    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float
    clip_fraction: float
    explained_variance: float
    learning_rate: float
    epochs: int


@dataclass(frozen=True, slots=True)
class Episode:
    """One iteration: a rollout of every slot and an update."""

    reward: float | None
    """Mean return of the episodes that ended in it; None if none did."""
    length: float | None
    n_completed_episodes: int
    n_envs: int
    learned: Learned


class PPOLearner:
    """An agent and how it learns from experience, however that was collected."""

    def __init__(self, agent: Agent, options: PPOOptions, *, seed: int) -> None:
        """Make the optimiser; `seed` is for shuffling."""
        self.agent, self.options, self.policy = agent, options, agent.policy
        self._optimiser = FlatAdam(self.policy)
        self._shuffler = np.random.default_rng(seed)
        self.learning_s = 0.0
        """Seconds that updates took so far."""
        self.env_steps = 0
        """Steps of the environments that its experience came from."""

    def learn(self, rollout: Experience, progress: float = 0.0) -> Learned:
        """Improve the policy by one rollout; `progress` is the share of the run that is done."""
        if not 0 <= progress <= 1:
            raise ConfigError(f"progress is a part of the run, from 0 to 1; got {progress}")
        begun_s = time.perf_counter()
        options, left = self.options, 1.0 - progress
        with np.errstate(over="ignore", invalid="ignore"):  # the results are checked
            estimates = advantages(
                rollout.rewards,
                rollout.values,
                rollout.successors,
                rollout.ended,
                rollout.valid,
                gamma=options.gamma,
                gae_lambda=options.gae_lambda,
                weights=rollout.weights,
            )
        check_estimates(estimates, rollout.rewards, rollout.values)
        returns = estimates + rollout.values
        rate = options.learning_rate * (left if options.anneal_learning_rate else 1.0)
        weights = LossWeights(
            clip=options.clip_range * (left if options.anneal_clip_range else 1.0),
            value=options.vf_coef,
            entropy=options.ent_coef,
            clips_values=options.clip_values,
        )
        rows = self._rows(rollout, estimates, returns)
        # the fleet does not need the cores meanwhile
        with threads(threads_for_pictures() if self.policy.encoder.learns else 1):
            figures, epochs = self._epochs(rollout, rows, weights, rate)
        if not self._optimiser.is_finite:
            raise NotFinite(
                "a parameter of the policy",
                f"is no longer finite after {self.env_steps:,} environment steps",
                "go on from an earlier state with a smaller learning_rate or max_grad_norm",
            )
        policy_loss, value_loss, entropy, kl, clipped = figures
        learned = Learned(
            policy_loss=policy_loss,
            value_loss=value_loss,
            entropy=entropy,
            approx_kl=kl,
            clip_fraction=clipped,
            explained_variance=explained_variance(
                rollout.values[rollout.valid], returns[rollout.valid]
            ),
            learning_rate=rate,
            epochs=epochs,
        )
        self.learning_s += time.perf_counter() - begun_s
        return learned

    def _rows(self, rollout: Experience, estimates: Any, returns: Any) -> TrainingRows:
        agent, masks = self.agent, rollout.masks
        numbers = (rollout.log_probs, rollout.values, estimates, returns)
        return TrainingRows(
            agent.tensors(flattened(rollout.obs)),
            agent.tensors(flattened((rollout.actions,)))[0],
            None if masks is None else agent.tensors(flattened((masks,)))[0],
            *agent.tensors(flattened(numbers)),
        )

    def _epochs(
        self, rollout: Experience, rows: TrainingRows, weights: LossWeights, rate: float
    ) -> tuple[list[float], int]:
        """Update by all epochs, or until `target_kl`; the last one's figures, and how many."""
        options, far = self.options, self.options.target_kl
        by = self._by_row if self.policy.memories is None else self._by_slot
        gradients = by(rollout, rows, weights)
        figures: list[torch.Tensor] = []
        for epoch in range(1, options.n_epochs + 1):
            figures = []
            is_last = epoch == options.n_epochs
            for found in gradients():
                if is_last or far is not None:
                    figures.append(found.figures(self.policy, weights.clip))
                if far is not None and float(found.kl()) > 1.5 * far:
                    break
                self._optimiser.step(found.gradients, rate=rate, max_norm=options.max_grad_norm)
            else:
                continue
            break
        mean = torch.stack(figures).mean(0).tolist() if figures else [float("nan")] * 5
        return mean, epoch

    def _by_row(self, rollout: Experience, rows: TrainingRows, weights: LossWeights) -> Gradients:
        """Minibatches of rows in any order."""
        policy, size, is_plain = self.policy, self.options.batch_size, self.policy.is_plain
        chosen = np.flatnonzero(rollout.valid.reshape(-1))
        is_shuffled = len(chosen) > size or len(chosen) < len(
            rows
        )  # else the order does not matter
        mine = rows.at(self.agent.tensor(chosen)) if is_shuffled else rows
        minibatches = mine.split(size)

        def gradients() -> Iterator[LossGradient]:
            if is_shuffled:
                rows.gather(self.agent.tensor(self._shuffler.permutation(chosen)), mine)
            for some in minibatches:
                if is_plain:
                    yield closed_form(policy, some, weights)
                else:
                    features, _ = policy.features(some.leaves, self.agent.fresh_states(0))
                    yield by_autograd(policy, self._optimiser.parameters, features, some, weights)

        return gradients

    def _by_slot(self, rollout: Experience, rows: TrainingRows, weights: LossWeights) -> Gradients:
        """Minibatches of whole slots, whose memory is replayed."""
        policy, (times, slots) = self.policy, rollout.rewards.shape
        states, valid = self.agent.tensor(rollout.states), rollout.valid.reshape(-1)
        num_minibatches = max(1, times * slots // self.options.batch_size)

        def gradients() -> Iterator[LossGradient]:
            order = self._shuffler.permutation(slots)
            for some_slots in np.array_split(order, num_minibatches):
                if not len(some_slots):
                    continue
                cut = stretches(rollout.ended, some_slots)
                some = rows.at(self.agent.tensor(cut.order))
                features = policy.unroll(some.leaves, cut, states)
                if not valid.all():
                    whole = self.agent.tensor(valid[cut.order])
                    some, features = some.at(whole), features.at(whole)
                if len(some):
                    yield by_autograd(policy, self._optimiser.parameters, features, some, weights)

        return gradients

    def learner_state(self) -> dict[str, Any]:
        """What coming updates depend on: agent, optimiser, shuffling."""
        return {
            **self.agent.state(),
            "optimiser": self._optimiser.state(),
            "shuffling": deepcopy(self._shuffler.bit_generator.state),
        }

    def load_learner(self, state: dict[str, Any]) -> None:
        """Continue exactly where this state was taken."""
        self.agent.load(state)
        self._optimiser.load(state["optimiser"])
        self._shuffler.bit_generator.state = deepcopy(state["shuffling"])


class PPOTrainer(PPOLearner):
    """A policy, the fleet it acts in, and the optimiser: all that training needs."""

    def __init__(
        self,
        envs: FleetVectorEnv | NodeEnvs,
        options: PPOOptions = PPOOptions(),  # noqa: B008 - frozen
        *,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """Build the networks and the optimiser, and reset the fleet.

        Args:
            envs: What `envfleet.make_vec(..., autoreset="same_step")` returned, or the slots of
                nodes; not closed here.
            options: How to learn.
            seed: For weights, actions, shuffling, and the first reset.
            device: Where the networks are.
        """
        if not isinstance(envs, FleetVectorEnv | NodeEnvs):
            raise ConfigError(
                f"PPO trains on a fleet, not on a {type(envs).__name__}: make it with "
                "envfleet.make_vec(ENV, NUM_ENVS, autoreset='same_step')"
            )
        if not isinstance(options, PPOOptions):
            raise ConfigError(f"options must be PPOOptions(...), got a {type(options).__name__}")
        check("seed", seed, Seed)
        if isinstance(envs, FleetVectorEnv) and envs.fleet.autoreset != "same_step":
            raise ConfigError(
                "PPO needs every row to be a transition: make the fleet with autoreset='same_step'"
            )
        if options.memory is not None and options.batch_size < options.n_steps:
            warnings.warn(
                f"batch_size={options.batch_size} has no effect: with a memory a minibatch is at "
                f"least one whole slot, which has n_steps={options.n_steps} rows; for smaller ones "
                "make n_steps smaller",
                RuntimeWarning,
                stacklevel=2,
            )
        self.envs: Any = envs
        """The fleet, or the slots of nodes."""
        self.device = torch.device(usable_device(str(device)))
        agent = Agent(
            envs.single_observation_space, envs.single_action_space, options, self.device, seed
        )
        super().__init__(agent, options, seed=seed)
        stepper = (
            NodeStepper(envs, agent)
            if isinstance(envs, NodeEnvs)
            else FleetStepper(envs, agent, options)
        )
        self._collector = Collector(stepper, agent, options, seed=seed)

    @property
    def seconds(self) -> dict[str, float]:
        """What the time went into so far."""
        return {**self._collector.seconds, "learning": self.learning_s}

    @property
    def setup(self) -> Setup:
        """The setup facts that advice about the time depends on."""
        return Setup(
            n_envs=self.envs.num_envs,
            n_epochs=self.options.n_epochs,
            num_workers=self._num_workers,
            cores=usable_cores(),
            is_on_cpu=self.device.type == "cpu",
        )

    @property
    def _num_workers(self) -> int:
        if isinstance(self.envs, NodeEnvs):
            return self.envs.num_workers
        return sum(pid is not None for pid in self.envs.fleet.worker_pids())

    def train(self, total_steps: int) -> list[Learned]:
        """Iterate until the fleet has made this many steps."""
        check("total_steps", total_steps, Count)
        per_iteration = self.options.n_steps * self.envs.num_envs
        number, of = self.env_steps // per_iteration, -(-total_steps // per_iteration)
        return [self.learn(self.collect(), done / of) for done in range(number, of)]

    def train_episode(self, progress: float = 0.0) -> Episode:
        """One iteration of a fleet of one environment."""
        if self.envs.num_envs != 1:
            raise ConfigError(
                f"train_episode is for one environment, this fleet has {self.envs.num_envs}; "
                "call train_episode_vectorized"
            )
        return self.train_episode_vectorized(progress)

    def train_episode_vectorized(self, progress: float = 0.0) -> Episode:
        """One iteration: a rollout of every slot and an update.

        `progress` is the share of the run that is done, for what is annealed.
        """
        rollout = self.collect()
        learned = self.learn(rollout, progress)
        returns, lengths = zip(*rollout.episodes, strict=True) if rollout.episodes else ((), ())
        return Episode(
            float(np.mean(returns)) if returns else None,
            float(np.mean(lengths)) if lengths else None,
            len(returns),
            self.envs.num_envs,
            learned,
        )

    # ---- one iteration --------------------------------------------------------------------------

    def collect(self) -> Experience:
        """Step every slot `n_steps` times; the observations are valid until the next call."""
        with threads():
            rollout = self._collector.collect()
        self.env_steps += rollout.rewards.size
        return rollout

    # ---- to continue exactly where it was --------------------------------------------------------

    @property
    def begins_anew(self) -> bool:
        """Whether new episodes began at the last `load`."""
        return self._collector.begins_anew

    def state(self) -> dict[str, Any]:
        """All that the coming iterations depend on, environments included."""
        return {**self._plain_state(), "slots": self._collector.slots()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue exactly where this state was taken; the fleet is restored too."""
        given: Any = state
        mine = self._plain_state()
        if not isinstance(given, Mapping) or not given.keys() >= mine.keys() | {"slots"}:
            raise ConfigError(
                "this is no state of a trainer: give what `trainer.state()` returned, which a "
                "run's checkpoint keeps as its 'job'"
            )
        kept, own = ({**one["options"], "num_envs": one["num_envs"]} for one in (state, mine))
        for name in sorted(kept.keys() | own.keys()):
            if kept.get(name) != own.get(name):
                raise ConfigError(
                    f"the state is of a run with {name}={kept.get(name)}, this one has "
                    f"{name}={own.get(name)}; go on with the same"
                )
        check_structure(mine | {"slots": None}, state, "the trainer's state")
        self.load_learner(state)
        self.env_steps = state["env_steps"]
        self._collector.load(state["collector"], state["slots"])

    def _plain_state(self) -> dict[str, Any]:
        """All but the environments: numbers, arrays and tensors."""
        return {
            "options": asdict(self.options),
            "num_envs": self.envs.num_envs,
            "env_steps": self.env_steps,
            **self.learner_state(),
            "collector": self._collector.state(),
        }

"""PPO trainers as contenders: whole iterations on the same environments and settings.

Each is opened once per row and runs whole iterations for one slice per round. While another one
runs, it blocks and uses no processor time. The number of PyTorch threads is set for each slice.
"""

from __future__ import annotations

import time
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import envfleet
from benchmarks.workload import Workload, timed
from envfleet.cli.measure import Slice
from envfleet.learn.collect import Experience
from envfleet.learn.fast.acting import QuickActor
from envfleet.learn.fast.gradients import closed_form
from envfleet.learn.fast.optimiser import FlatAdam
from envfleet.learn.judging import flattened
from envfleet.learn.loss import LossWeights, TrainingRows
from envfleet.learn.options import PPOOptions
from envfleet.learn.ppo import PPOTrainer
from envfleet.learn.torch_setup import threads

DEFAULT_THREADS = torch.get_num_threads()


@dataclass(frozen=True)
class Training:
    """The environments and options that all trainers share."""

    work: Workload
    options: PPOOptions

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps between two updates."""
        return self.work.num_envs * self.options.n_steps

    def __str__(self) -> str:
        options = self.options
        return (
            f"{self.work.env}, {self.work.num_envs} envs x {options.n_steps} steps, "
            f"batch {options.batch_size}, {options.n_epochs} epochs"
        )


class FleetTraining:
    """envfleet: `PPOTrainer` with `backend="auto"`, as `envfleet train` runs it."""

    key, label = "envfleet", "envfleet"

    def __init__(self, training: Training) -> None:
        self.training = training
        self._envs: envfleet.FleetVectorEnv | None = None

    def open(self) -> None:
        """Start the fleet and build the networks."""
        work = self.training.work
        self._envs = envfleet.make_vec(
            work.env,
            work.num_envs,
            autoreset="same_step",
            rollout_steps=self.training.options.n_steps,
            rollout_floats="float32",
        )
        self.trainer = PPOTrainer(self._envs, self.training.options, seed=work.seed)

    @property
    def notes(self) -> list[str]:
        """The fleet's plan, and the shares of the trainer's time."""
        if self._envs is None:
            return []
        seconds = self.trainer.seconds
        parts = ", ".join(
            f"{name} {part / sum(seconds.values()):.0%}" for name, part in seconds.items()
        )
        return [f"auto chose: {self._envs.plan}", f"{self.training.work.env}: {parts}"]

    def run(self, seconds: float) -> Slice:
        """Collect and learn."""
        with threads(1):
            return timed(self.iterate, seconds)

    def iterate(self) -> int:
        """Make one iteration and return its number of environment steps."""
        self.trainer.learn(self.trainer.collect())
        return self.training.steps_per_iteration

    def close(self) -> None:
        """Close the fleet."""
        if self._envs is not None:
            self._envs.close()


class SB3Training:
    """SB3's PPO with one of its vector environments and a number of PyTorch threads."""

    def __init__(self, training: Training, *, is_subproc: bool, num_threads: int) -> None:
        self._training, self._is_subproc, self._threads = training, is_subproc, num_threads
        kind = "SubprocVecEnv" if is_subproc else "DummyVecEnv"
        self.key = f"sb3-{'subproc' if is_subproc else 'dummy'}-{num_threads}"
        self.label = f"SB3 PPO, {kind}, {num_threads} torch thread{'s' if num_threads > 1 else ''}"
        self._envs: Any = None

    def open(self) -> None:
        """Start the environments and build the networks."""
        from stable_baselines3 import PPO
        from stable_baselines3.common.logger import Logger
        from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

        options, env_fns = self._training.options, self._training.work.env_fns
        # its own default, forkserver, would import PyTorch in every process
        self._envs = (
            SubprocVecEnv(env_fns, start_method="fork")
            if self._is_subproc
            else DummyVecEnv(env_fns)
        )
        activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[options.activation]
        self._model = PPO(
            "MlpPolicy",
            self._envs,
            n_steps=options.n_steps,
            batch_size=options.batch_size,
            n_epochs=options.n_epochs,
            learning_rate=options.learning_rate,
            clip_range=options.clip_range,
            gamma=options.gamma,
            gae_lambda=options.gae_lambda,
            ent_coef=options.ent_coef,
            vf_coef=options.vf_coef,
            max_grad_norm=options.max_grad_norm,
            policy_kwargs={"net_arch": list(options.hidden), "activation_fn": activation},
            seed=self._training.work.seed,
            device="cpu",
        )
        self._model.set_logger(Logger(None, []))  # otherwise `learn` would open a new one each time

    def run(self, seconds: float) -> Slice:
        """Collect and learn."""
        with threads(self._threads):
            return timed(self._iterate, seconds)

    def _iterate(self) -> int:
        steps = self._training.steps_per_iteration
        self._model.learn(steps, reset_num_timesteps=False, log_interval=None)  # type: ignore[arg-type]
        return steps

    def close(self) -> None:
        """Close the environments."""
        if self._envs is not None:
            self._envs.close()


def sb3_ways(training: Training) -> list[SB3Training]:
    """SB3 in all its setups: both vector environments, with one thread and with its default."""
    return [
        SB3Training(training, is_subproc=is_subproc, num_threads=num_threads)
        for is_subproc in (False, True)
        for num_threads in sorted({1, DEFAULT_THREADS})
    ]


class TrainerOverhead(FleetTraining):
    """Repeats the parts of its iterations with prepared inputs, to see what the trainer adds."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.key = training.work.env
        self.percents_added: list[float] = []
        """Percents of the wall time, one per slice."""

    def run(self, seconds: float) -> Slice:
        """Iterate, then repeat the same steps, actions and updates separately."""
        trainer, clock = self.trainer, time.perf_counter
        with threads(1):
            self.iterate()
            before, rollouts = trainer.state(), list[Experience]()
            start_s = clock()
            while not rollouts or clock() - start_s < seconds:
                rollouts.append(trainer.collect())
                trainer.learn(rollouts[-1])
            wall_s = clock() - start_s
            after = trainer.state()
            fleet_s = []
            for num_parts in (1, 2):
                trainer.load(before)
                fleet_s.append(sum(self._stepping_s(rollout, num_parts) for rollout in rollouts))
            trainer.load(after)
            others_s = sum(self._acting_s(one) + self._learning_s(one) for one in rollouts)
        self.percents_added.append(100 * (wall_s - min(fleet_s) - others_s) / wall_s)
        return Slice(self.training.steps_per_iteration * len(rollouts), wall_s)

    def _stepping_s(self, rollout: Experience, num_parts: int) -> float:
        """Time of the fleet alone. With two parts, one is in flight while the other is received."""
        envs, fit = self.trainer.envs, self.trainer.agent.fit
        parts: list[Any] = np.array_split(np.arange(envs.num_envs), num_parts)
        ready = [[(fit(actions[part]), part) for part in parts] for actions in rollout.actions]
        start_s = time.perf_counter()
        if num_parts == 1:
            for ((actions, _),) in ready:
                envs.fleet.step(actions)
            return time.perf_counter() - start_s
        for actions, part in ready[0]:
            envs.send(actions, part)
        for step in ready[1:]:
            for actions, part in step:
                envs.recv(slots=part)
                envs.send(actions, part)
        for part in parts:
            envs.recv(slots=part)
        return time.perf_counter() - start_s

    @torch.inference_mode()
    def _acting_s(self, rollout: Experience) -> float:
        """Time of the policy alone: actions step by step, values and log-probabilities at once."""
        agent, policy = self.trainer.agent, self.trainer.policy
        times, slots = rollout.rewards.shape
        steps = [agent.tensors(tuple(leaf[at] for leaf in rollout.obs)) for at in range(times)]
        rows = agent.tensors(flattened(rollout.obs))
        (actions,) = agent.tensors(flattened((rollout.actions,)))
        states, noise = agent.fresh_states(slots), torch.Generator().manual_seed(0)
        chosen = torch.from_numpy(rollout.actions.copy())
        start_s = time.perf_counter()
        drawn = policy.head.noise((times, slots), noise)
        if QuickActor.can_be(policy):
            quick = QuickActor(policy, rollout.obs[0], drawn, chosen)
            for at in range(times):
                quick.act(at)
        else:
            for leaves, one in zip(steps, drawn, strict=True):
                said, _ = policy.respond(leaves, states, None)
                policy.head.sample(said, one)
        features, _ = policy.features(rows, states)
        said, _ = policy.judge(features, None)
        policy.head.log_prob(said, actions)
        return time.perf_counter() - start_s

    def _learning_s(self, rollout: Experience) -> float:
        """Time of the updates alone: gradients and optimiser steps on prepared minibatches."""
        agent, options = self.trainer.agent, self.training.options
        numbers = (rollout.log_probs, rollout.values, rollout.rewards, rollout.successors)
        (actions,) = agent.tensors(flattened((rollout.actions,)))
        leaves = agent.tensors(flattened(rollout.obs))
        rows = TrainingRows(leaves, actions, None, *agent.tensors(flattened(numbers)))
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        ready = [rows.at(chosen) for chosen in order.split(options.batch_size)]
        policy = deepcopy(self.trainer.policy)
        optimiser = FlatAdam(policy)
        weights = LossWeights(
            options.clip_range, options.vf_coef, options.ent_coef, options.clip_values
        )
        start_s = time.perf_counter()
        for minibatch in ready * options.n_epochs:
            found = closed_form(policy, minibatch, weights)
            optimiser.step(
                found.gradients, rate=options.learning_rate, max_norm=options.max_grad_norm
            )
        return time.perf_counter() - start_s

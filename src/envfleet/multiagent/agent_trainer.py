"""PPO for environments with several agents: one policy for all, or one for each group.

The mathematics is `learn.ppo.PPOLearner`'s; here are the policies, and the fleet they act in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from envfleet.engine.machine import usable_cores
from envfleet.errors import ConfigError
from envfleet.learn.agent import Agent
from envfleet.learn.collect import Experience
from envfleet.learn.options import PPOOptions
from envfleet.learn.ppo import Learned, PPOLearner
from envfleet.learn.torch_setup import threads, usable_device
from envfleet.multiagent.agent_collect import AgentCollector
from envfleet.multiagent.stepping import Stepping
from envfleet.runs.plain_data import check_structure
from envfleet.runs.time_report import Setup


class AgentTrainer:
    """The policies of all groups, the fleet they act in, and how they learn."""

    def __init__(
        self, vec: Stepping, options: PPOOptions, *, seed: int = 0, device: str = "cpu"
    ) -> None:
        """Build a policy for each group, and reset the fleet.

        Args:
            vec: The environments; not closed here.
            options: How to learn.
            seed: For weights, actions, shuffling, and the first reset.
            device: Where the networks are.
        """
        self.vec, self.options = vec, options
        self._device = torch.device(usable_device(device))
        self.learners: dict[Any, PPOLearner] = {}
        for number, group in enumerate(vec.layout.groups):
            spaces = group.observation_space, group.action_space
            agent = Agent(*spaces, options, self._device, seed + number)
            self.learners[group.name] = PPOLearner(agent, options, seed=seed + number)
        self._collector = AgentCollector(vec, self.agents, options, seed=seed)
        self.env_steps = 0

    @property
    def envs(self) -> Any:
        """The fleet, as a vector environment of slots."""
        return self.vec.envs

    @property
    def agents(self) -> dict[Any, Agent]:
        """Who plays each group."""
        return {name: learner.agent for name, learner in self.learners.items()}

    @property
    def ended_returns(self) -> list[tuple[float, ...]]:
        """What each agent got in every episode that ended in the last rollout."""
        return self._collector.ended_returns

    @property
    def seconds(self) -> dict[str, float]:
        """What the time went into so far."""
        learning_s = sum(one.learning_s for one in self.learners.values())
        return {**self._collector.seconds, "learning": learning_s}

    @property
    def setup(self) -> Setup:
        """The setup facts that advice about the time depends on."""
        return Setup(
            n_envs=self.vec.num_envs,
            n_epochs=self.options.n_epochs,
            num_workers=sum(pid is not None for pid in self.vec.envs.fleet.worker_pids()),
            cores=usable_cores(),
            is_on_cpu=self._device.type == "cpu",
        )

    def collect(self) -> dict[Any, Experience]:
        """Step every slot `n_steps` times; what the agents of each group went through."""
        with threads():
            rollouts = self._collector.collect()
        self.env_steps += self.options.n_steps * self.vec.num_envs
        return rollouts

    def learn(
        self, rollouts: Mapping[Any, Experience], progress: float = 0.0
    ) -> dict[Any, Learned]:
        """Improve the policies; those whose agents did nothing stay as they are."""
        learned = {}
        for name, rollout in rollouts.items():
            self.learners[name].env_steps = self.env_steps
            if rollout.valid.any():
                learned[name] = self.learners[name].learn(rollout, progress)
        return learned

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
        mine = self._plain_state()
        check_structure(mine | {"slots": None}, state, "the trainer's state")
        if state["options"] != mine["options"] or state["num_envs"] != mine["num_envs"]:
            raise ConfigError("the state is of a run with other options; go on with the same")
        for name, learner in self.learners.items():
            learner.load_learner(state["policies"][str(name)])
        self.env_steps = state["env_steps"]
        self._collector.load(state["collector"], state["slots"])

    def _plain_state(self) -> dict[str, Any]:
        """All but the environments: numbers, arrays and tensors."""
        return {
            "options": asdict(self.options),
            "num_envs": self.vec.num_envs,
            "env_steps": self.env_steps,
            "policies": {str(name): one.learner_state() for name, one in self.learners.items()},
            "collector": self._collector.state(),
        }


def joined(learned: Mapping[Any, Learned]) -> dict[str, float]:
    """The figures of all policies: their means, and those of each if there are several."""
    each = {name: asdict(one) for name, one in learned.items()}
    if not each:
        return {}
    names = next(iter(each.values()))
    figures = {name: float(np.mean([one[name] for one in each.values()])) for name in names}
    if len(each) > 1:
        figures |= {
            f"{name}_{whose}": value for whose, one in each.items() for name, value in one.items()
        }
    return figures

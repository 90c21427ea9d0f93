"""The environments of a run with several agents: what its name builds, and the fleet of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal

from pettingzoo import AECEnv

from envfleet.errors import ConfigError
from envfleet.learn.agent_options import AgentOptions, Policies
from envfleet.learn.environments import env_fn, placed
from envfleet.learn.options import PPOOptions
from envfleet.learn.torch_setup import threads, usable_device
from envfleet.learn.train_options import TrainOptions
from envfleet.multiagent.agent_trainer import AgentTrainer
from envfleet.multiagent.groups import Group, make_groups
from envfleet.multiagent.slot_envs import ParallelSlot, TurnSlot, build_slot
from envfleet.multiagent.stepping import TeamStepping, TurnStepping

Form = Literal["turns", "team"]
"""Whether agents act in turn (AEC) or at the same time (Parallel)."""
EVERYONE = "all"
"""The name of the group of all agents."""


class AgentEnv:
    """What a run's environment is like, found by building one."""

    def __init__(self, options: TrainOptions, policies: Policies) -> None:
        """Build one, look at it, and close it.

        Raises:
            ConfigError: It cannot be built, has no fixed agents, or its agents cannot share.
        """
        self.env_fn: Callable[..., Any] = env_fn(options)
        try:
            env = self.env_fn()
        except Exception as exc:
            with_kwargs = f" with {options.env_kwargs}" if options.env_kwargs else ""
            raise ConfigError(
                f"{options.env} cannot be built{with_kwargs}: {type(exc).__name__}: {exc}"
            ) from exc
        with closing(env):
            self.form: Form = "turns" if isinstance(env, AECEnv) else "team"
            self.agents = tuple(getattr(env, "possible_agents", None) or ())
            if not self.agents:
                raise ConfigError(
                    f"{options.env} does not say which agents there can be (possible_agents), and "
                    "policies are made for agents that are known beforehand"
                )
            wanted = {EVERYONE: self.agents} if policies == "shared" else None
            try:
                self.groups: tuple[Group, ...] = make_groups(env, self.agents, wanted)
            except ConfigError as exc:
                raise ConfigError(
                    f"{exc}. Train a policy for each group: --policies per-group"
                ) from exc

    @property
    def group_of(self) -> dict[Any, Any]:
        """Agent -> the name of its group."""
        return {name: group.name for group in self.groups for name in group.agents}

    @property
    def action_spaces(self) -> dict[Any, Any]:
        """Agent -> how it acts."""
        return {name: group.action_space for group in self.groups for name in group.agents}


@contextmanager
def opened_agents(
    options: TrainOptions, agents: AgentOptions, ppo: PPOOptions, *, is_wary: bool = False
) -> Iterator[tuple[AgentEnv, AgentTrainer]]:
    """Open a fleet and make a trainer on it, as at the start of a run.

    Args:
        options: Of the run.
        agents: How its agents learn.
        ppo: How to learn.
        is_wary: Whether the environments may take their process along.
    """
    if options.collect != "here":
        raise ConfigError(
            "collect='node' is for environments of one agent; agents of PettingZoo are collected "
            "here, or by workers of this machine"
        )
    device = usable_device(options.device)
    env = AgentEnv(options, agents.policies)
    kind, vectoriser = (
        (TurnSlot, TurnStepping) if env.form == "turns" else (ParallelSlot, TeamStepping)
    )
    groups = {group.name: group.agents for group in env.groups}
    one = functools.partial(build_slot, kind, env.env_fn, groups, None)
    backend, num_workers, why = placed(options, one, is_wary=is_wary)
    vec: Any = vectoriser(
        [env.env_fn] * options.n_envs,
        groups=groups,
        backend=backend,
        num_workers=num_workers,
        **options.fleet,
    )
    vec.plan = why or vec.plan
    with closing(vec), threads():
        yield env, AgentTrainer(vec, ppo, seed=options.seed, device=device)

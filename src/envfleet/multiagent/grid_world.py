"""The grid world as PettingZoo environments: agents in turn (AEC), or all at once (Parallel).

Law: a cycle of `GridWorldEnvMultiAgent` and a step of `GridWorldEnvParallel` with the same seed and
actions change the world alike and give the same rewards. The rules are in `grid_rules`.

Names and defaults are those of the ELENDIL environment by M. Podolinsky (MIT licence); the code is
new. What differs, because the original errs there: every episode draws from one generator of its
own, a field of view stays within its space, a reward counts once, the target is no agent,
`max_steps` counts cycles, what an observer notices is drawn once per move, and visual obstacles
hide what is beneath them. A value that makes no sense is refused instead of replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import AgentSelector

from envfleet.errors import ActionError, ConfigError, ResetNeeded
from envfleet.multiagent.grid_agents import TargetConfig, read_agents, read_config
from envfleet.multiagent.grid_picture import grid_picture, grid_text
from envfleet.multiagent.grid_rules import GridRules, GridState

__all__ = ["GridWorldEnvMultiAgent", "GridWorldEnvParallel"]

Info = dict[str, Any]
_RENDER_MODES = ("rgb_array", "ansi")


class _GridWorld:
    """What both environments share."""

    metadata: dict[str, Any] = {  # noqa: RUF012 - PettingZoo reads it from the class
        "name": "grid_world_v0",
        "render_modes": list(_RENDER_MODES),
        "render_fps": 5,
        "is_parallelizable": True,
    }

    def __init__(
        self,
        size: int = 5,
        max_steps: int = 500,
        render_mode: str | None = None,
        show_fov_display: bool = True,
        intrinsic: bool = False,
        lambda_fov: float = 0.5,
        show_target_coords: bool = False,
        obstacle_collision_penalty: float = -0.05,
        no_target: bool = False,
        agents: Sequence[Mapping[str, Any]] | None = None,
        target_config: Mapping[str, Any] | None = None,
        enable_obstacles: bool = False,
        num_obstacles: int = 0,
        num_visual_obstacles: int = 0,
    ) -> None:
        """Describe a world; `reset` draws one.

        Args:
            size: Cells in a row and in a column.
            max_steps: Cycles after which all agents are truncated.
            render_mode: "rgb_array", "ansi" (text) or None.
            show_fov_display: Show fields of view when rendering.
            intrinsic: Reward an agent for every cell that it enters for the first time.
            lambda_fov: How much being seen costs against seeing, from 0 to 1.
            show_target_coords: Tell agents where the target is; an agent may have its own setting.
            obstacle_collision_penalty: Added to the reward of an agent that runs into an obstacle.
            no_target: Leave the target out.
            agents: Dicts with any of name, type ("FOVAgent" or "ObserverAgent"), color, fov_size,
                outline_width, box_scale and show_target_coords; an ObserverAgent also has
                max_altitude and target_detection_probs. None is two FOVAgents.
            target_config: Any of movement_speed, smooth_movement, box_cells, color,
                outline_width, box_scale.
            enable_obstacles: False leaves out obstacles of both kinds.
            num_obstacles: Rectangles that stop ground agents and the target.
            num_visual_obstacles: Rectangles that observers cannot look through.
        """
        if render_mode is not None and render_mode not in _RENDER_MODES:
            raise ConfigError(
                f"render_mode must be one of {', '.join(_RENDER_MODES)} or None, "
                f"got {render_mode!r}"
            )
        if max_steps < 1:
            raise ConfigError(f"max_steps must be at least 1, got {max_steps}")
        self.render_mode, self.max_steps = render_mode, max_steps
        self.show_fov_display = show_fov_display
        target = None if no_target else read_config(TargetConfig, "a target", target_config or {})
        self.rules = GridRules(
            size=size,
            agents=tuple(read_agents(agents, show_target_coords=show_target_coords)),
            target=target,
            lambda_fov=lambda_fov,
            intrinsic=intrinsic,
            obstacle_collision_penalty=obstacle_collision_penalty,
            num_obstacles=num_obstacles if enable_obstacles else 0,
            num_visual_obstacles=num_visual_obstacles if enable_obstacles else 0,
        )
        self.possible_agents = [agent.name for agent in self.rules.agents]
        self.agents: list[str] = []
        self.observation_spaces: dict[str, spaces.Space[Any]] = {
            agent.name: agent.observation_space(size, has_target=not no_target)
            for agent in self.rules.agents
        }
        self.action_spaces: dict[str, spaces.Space[Any]] = {
            agent.name: agent.action_space for agent in self.rules.agents
        }
        self._rng: np.random.Generator | None = None
        self._state: GridState | None = None

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """The observations of one agent; always the same object."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """The actions of one agent; always the same object."""
        return self.action_spaces[agent]

    @property
    def state_of_world(self) -> GridState:
        """Who is where, in the episode under way."""
        if self._state is None:
            raise ResetNeeded("the grid world has no episode yet: call reset first")
        return self._state

    def observe(self, agent: str) -> dict[str, Any]:
        """What an agent sees now."""
        return self.state_of_world.observation(self.possible_agents.index(agent))

    def render(self) -> Any:
        """A picture, [row, column, colour], or text, as `render_mode` says."""
        if self.render_mode is None:
            return None
        draw = grid_picture if self.render_mode == "rgb_array" else grid_text
        return draw(self.state_of_world, show_views=self.show_fov_display)

    def close(self) -> None:
        """Nothing is held open."""

    def _begin(self, seed: int | None) -> None:
        """Draw a new world; without a seed from where the last one left the generator."""
        if seed is not None or self._rng is None:
            self._rng, _ = seeding.np_random(seed)
        self._state = GridState(self.rules, self._rng)
        self._num_cycles = 0
        self.agents = self.possible_agents.copy()

    def _act(self, agent: str, action: Any) -> float:
        space = self.action_spaces[agent]
        if not space.contains(action):
            raise ActionError(f"the action of {agent} must be in {space}, got {action!r}")
        return self.state_of_world.act(self.possible_agents.index(agent), int(action))

    def _end_cycle(self) -> bool:
        """Move the target; whether this was the last cycle."""
        self.state_of_world.move_target()
        self._num_cycles += 1
        return self._num_cycles >= self.max_steps

    def _info(self, agent: str) -> Info:
        distance = self.state_of_world.distance(self.possible_agents.index(agent))
        return {f"distance_{agent}": distance}


class GridWorldEnvMultiAgent(_GridWorld, AECEnv[str, Any, Any]):  # type: ignore[misc]  # untyped
    """Agents act in turn; the target moves after the last of them. See `_GridWorld.__init__`."""

    def reset(self, seed: int | None = None, options: Info | None = None) -> None:
        """Start an episode; `options` are not used."""
        self._begin(seed)
        self.rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: self._info(agent) for agent in self.agents}
        self._skip_agent_selection: Any = None
        self._selector = AgentSelector(self.possible_agents)
        self.agent_selection = self._selector.next()

    def step(self, action: Any) -> None:
        """Let the selected agent act; an agent that is truncated is stepped with None."""
        if not self.agents:
            raise ResetNeeded("the episode is over: call reset before the next step")
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        reward = self._act(agent, action)
        self._clear_rewards()
        self._cumulative_rewards[agent] = 0.0
        self.rewards[agent] = reward
        if self._selector.is_last() and self._end_cycle():
            self.truncations = dict.fromkeys(self.agents, True)
        self.infos = {name: self._info(name) for name in self.agents}
        self.agent_selection = self._selector.next()
        self._accumulate_rewards()


class GridWorldEnvParallel(_GridWorld, ParallelEnv[str, Any, Any]):  # type: ignore[misc]  # untyped
    """All agents act in one step, carried out in their order. See `_GridWorld.__init__`."""

    def reset(
        self, seed: int | None = None, options: Info | None = None
    ) -> tuple[dict[str, Any], dict[str, Info]]:
        """Start an episode; `options` are not used."""
        self._begin(seed)
        return self._observations(), {agent: self._info(agent) for agent in self.agents}

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Info]]:
        """One cycle, with an action for every agent."""
        if not self.agents:
            raise ResetNeeded("the episode is over: call reset before the next step")
        if set(actions) != set(self.agents):
            raise ActionError(f"actions are for {list(actions)}, but the agents are {self.agents}")
        rewards = {agent: self._act(agent, actions[agent]) for agent in self.agents}
        is_last = self._end_cycle()
        truncations = dict.fromkeys(self.agents, is_last)
        terminations = dict.fromkeys(self.agents, False)
        infos = {agent: self._info(agent) for agent in self.agents}
        observations = self._observations()
        if is_last:
            self.agents = []
        return observations, rewards, terminations, truncations, infos

    def _observations(self) -> dict[str, Any]:
        return {agent: self.observe(agent) for agent in self.agents}

"""Several agents as one: a PettingZoo environment for learners that know Gymnasium only.

`FlattenMultiAgentWrapper` takes an AEC or a Parallel environment in one of two modes.

    joint   one step is one cycle: one learner moves all agents and earns the sum of their rewards
    turn    one step is one turn: one learner plays every agent, always the one whose turn it is

Law: spaces are fixed when the wrapper is made, and every observation lies in them, the last one of
an episode too. What each agent earned is in the info, so nothing is lost in the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
import numpy.typing as npt
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec

from envfleet.errors import ConfigError, OutOfOrder, ResetNeeded
from envfleet.multiagent.bare import MASK_KEY
from envfleet.multiagent.flat_actions import JointActions, SharedActions
from envfleet.multiagent.flat_observations import FlatObservations
from envfleet.multiagent.turns import Outcome, Turns, agents_there, is_any_cut

__all__ = ["FlattenMultiAgentWrapper"]

Mode = Literal["joint", "turn"]
Info = dict[str, Any]
Flat = npt.NDArray[np.float32]


class FlattenMultiAgentWrapper(gymnasium.Env[Flat, Any]):
    """One Gymnasium environment made of an environment with several agents.

    **Observation**: a vector of float32. In "joint" mode the observations of all agents one after
    another, in the order of `possible_agents`, and then for each agent 1 if it is alive. The part
    of an agent that is gone is zero, except in the step in which it went; an agent that was
    truncated still counts as alive in that step. In "turn" mode the
    observation of the agent to act, filled up with zeros to the longest, and then a 1 at its
    number. A part called "action_mask" is left out: see `action_masks`.

    **Action**: in "joint" mode a MultiDiscrete if all agents choose among numbered actions, a Box
    if all actions are Boxes. In "turn" mode a Discrete, MultiDiscrete or Box that is large enough
    for every agent: a number beyond an agent's own actions starts again from its first, numbers
    that an agent does not need are ignored, and Boxes that differ are scaled from -1 to 1. Where
    some agents have numbered actions and others Boxes, the action is a Box: a choice among n is
    then n numbers, of which the largest wins.

    **Reward**: in "joint" mode the sum over all agents. In "turn" mode what the agent to act has
    earned since its own last turn; when the episode is over, what the agent that acted last has
    earned since then. ``info["<agent>/reward"]`` says what each agent got with this step.

    **End**: when no agent is left. It is a truncation if an agent was truncated in the last step.

    **Info**: ``"<agent>/<key>"`` for what the agents' own infos hold, except masks. In "turn" mode
    ``"agent"`` is the number of the agent whose observation this is.

    A reset without a seed draws one from this environment's own generator, so that a whole run
    follows from its first seed.

    Args:
        env: An AEC or Parallel environment with `possible_agents`.
        mode: "joint" or "turn".
    """

    def __init__(self, env: Any, mode: Mode = "joint") -> None:
        """See the class."""
        if mode not in get_args(Mode):
            raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
        if not isinstance(env, AECEnv | ParallelEnv):
            raise ConfigError(
                f"a PettingZoo environment is needed, AEC or Parallel, got {type(env).__name__}"
            )
        names = list(getattr(env, "possible_agents", ()))
        if not names:
            raise ConfigError(
                f"{env} does not say which agents there can be (possible_agents), so its spaces "
                "cannot be fixed in advance; use an environment that does"
            )
        self.env, self.mode = env, mode
        self.possible_agents: list[Any] = names
        self.metadata = dict(env.metadata)
        self.render_mode = getattr(env, "render_mode", None)
        action_spaces = {name: env.action_space(name) for name in names}
        self._observations = FlatObservations({n: env.observation_space(n) for n in names})
        self._turns: Turns | None = None
        """The environment as a sequence of turns; None if it is stepped as a whole."""
        if mode == "turn" or isinstance(env, AECEnv):
            self._turns = Turns(env if isinstance(env, AECEnv) else parallel_to_aec(env))
        self._actions: JointActions | SharedActions
        if mode == "joint":
            self._actions = JointActions(action_spaces)
            self.observation_space = self._observations.joint_space
        else:
            self._actions = SharedActions(action_spaces)
            self.observation_space = self._observations.turn_space
        self.action_space = self._actions.space
        self._live: list[Any] = []
        """Agents that may act next: all in "joint" mode, one in "turn" mode."""
        self._masks: dict[Any, Any] = {}

    # ---- Gymnasium ------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Flat, Info]:
        """Start an episode."""
        super().reset(seed=seed)
        used = seed if seed is not None else int(self.np_random.integers(2**31))
        done = Outcome()
        if self._turns is None:
            done.seen, done.infos = self.env.reset(seed=used, options=options)
            done.live = agents_there(self.env, done.seen)
        else:
            self._turns.reset(used, options)
            done.live = self._turns.live_agents()
            if self.mode == "turn":
                done.live = [self._turns.agent] if done.live else []
            done.seen, done.infos = self._turns.observe(done.live)
        if not done.live:
            raise OutOfOrder(f"{self.env} has no agent that could act after its reset")
        self._live = done.live
        return self._flat(done, done.live), self._info(done, done.live)

    def step(self, action: Any) -> tuple[Flat, float, bool, bool, Info]:
        """One cycle or one turn, as the mode says."""
        if not self._live:
            raise ResetNeeded("the episode is over: call reset before the next step")
        actions = self._actions.of_each(action, self._live)
        actor = self._live[0]
        if self._turns is None:
            done = self._step_at_once(actions)
        elif self.mode == "joint":
            done = self._turns.play_cycle(actions)
        else:
            done = self._turns.play_turn(actions[actor])
        self._live = done.live
        if self.mode == "joint":
            reward = sum(done.rewards.values())
            shown = [name for name in done.seen if not done.terminated.get(name)]
        else:
            shown = done.live or [actor]
            reward = done.rewards.get(shown[0], 0.0)
        is_over = not done.live
        is_cut = is_over and done.is_any_truncated
        info = self._info(done, shown)
        return self._flat(done, shown), float(reward), is_over and not is_cut, is_cut, info

    def render(self) -> Any:
        """What the environment renders."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Which actions are allowed now, as `MaskablePPO` asks for it.

        A MultiDiscrete has the masks of its parts one after another. An agent that does not say
        what it may do may do everything; of one that is gone only the first action is left.
        """
        return self._actions.masks(self._masks, self._live)

    # ---- parts ----------------------------------------------------------------------------------

    def _step_at_once(self, actions: dict[Any, Any]) -> Outcome:
        seen, rewards, terminated, truncated, infos = self.env.step(actions)
        there = agents_there(self.env, seen)  # some environments keep those that died
        return Outcome(
            live=[one for one in there if not (terminated.get(one) or truncated.get(one))],
            seen=dict(seen),
            rewards={name: float(reward) for name, reward in rewards.items()},
            infos=dict(infos),
            terminated={name: bool(flag) for name, flag in terminated.items()},
            is_any_truncated=is_any_cut(terminated, truncated),
        )

    def _flat(self, done: Outcome, shown: list[Any]) -> Flat:
        if self.mode == "joint":
            return self._observations.joint(done.seen, shown)
        return self._observations.turn(shown[0], done.seen[shown[0]])

    def _info(self, done: Outcome, shown: list[Any]) -> Info:
        self._masks = {
            name: _mask_of(done.seen[name], done.infos.get(name, {})) for name in done.live
        }
        info: Info = {f"{name}/reward": reward for name, reward in done.rewards.items()}
        for name, own in done.infos.items():
            info |= {f"{name}/{key}": part for key, part in own.items() if key != MASK_KEY}
        if self.mode == "turn":
            info["agent"] = self.possible_agents.index(shown[0])
        return info


def _mask_of(seen: Any, info: Info) -> Any:
    """Where PettingZoo's environments say what is allowed: in the observation or in the info."""
    if isinstance(seen, Mapping) and MASK_KEY in seen:
        return seen[MASK_KEY]
    return info.get(MASK_KEY)

"""What agents saw, did and earned from one of their own turns to the next: one lane per agent.

A lane is one agent of one slot. Its rows lie one behind the other, however many turns of others
were between them:

    slot 0   anna bert anna anna bert           anna's lane   row row row
             reward since her last turn  ─►     bert's lane   row row ...

A row is complete when its agent's next turn comes, or when the agent is gone. Law: a row's reward
is what its agent got between the two, and its successor is what that same agent saw next. A row
that is not complete at the end of a rollout is the first of the next one, with the probability by
which its action was drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from envfleet.learn.advantages import successor_values
from envfleet.learn.agent import Agent
from envfleet.learn.collect import Experience
from envfleet.learn.inputs import Leaves
from envfleet.learn.judging import judged, worth
from envfleet.learn.normalise import RewardScaler, scaled
from envfleet.learn.options import PPOOptions

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.intp]


class Lanes:
    """The lanes of all agents that one policy plays, while a rollout fills them."""

    def __init__(self, agent: Agent, options: PPOOptions, count: int, first: Leaves) -> None:
        """Make empty lanes.

        Args:
            agent: Who acts.
            options: How it learns; its `n_steps` is the most rows that a rollout completes.
            count: How many lanes there are.
            first: Any observations as the agent looks at them, for their shapes.
        """
        self._agent, self.count = agent, count
        head, rows = agent.policy.head, options.n_steps + 1
        self._obs: Leaves = tuple(
            np.zeros((rows, count, *leaf.shape[1:]), leaf.dtype) for leaf in first
        )
        self._masks: Flags | None = None
        if head.takes_masks:
            self._masks = np.ones((rows, count, head.size), np.bool_)
        self._actions = torch.zeros((rows, count, *head.shape), dtype=head.dtype).numpy()
        self._rewards = np.zeros((rows, count))
        self._seen, self._ended, self._cut, self._lost = np.zeros((4, rows, count), np.bool_)
        """Whether a row has an observation, ends a part, is cut off by that, and is of no use."""
        self._place = np.zeros(count, np.intp)
        """The row that each lane is at."""
        self._finals: list[tuple[Numbers, Numbers, Leaves, Tensor]] = []
        self.open: Flags = np.zeros(count, np.bool_)
        """Who has acted and waits for what comes of it."""
        self._log_probs = np.zeros(count, np.float32)
        """Of the first row's action, where it was drawn before this rollout."""
        self._was_open = np.zeros(count, np.bool_)
        self._states, self._before = agent.fresh_states(count), agent.fresh_states(count)
        """What is remembered now, and before the row that each lane is at."""
        self._first_states = self._before.clone()
        self._scaler = RewardScaler(count, options.gamma) if options.normalise_rewards else None

    # ---- while a rollout fills them --------------------------------------------------------------

    def see(self, lanes: Numbers, leaves: Leaves, masks: Flags | None) -> None:
        """It is the turn of these agents, who observe this and may do that."""
        at = self._place[lanes], lanes
        for mine, leaf in zip(self._obs, leaves, strict=True):
            mine[at] = leaf
        if self._masks is not None and masks is not None:
            self._masks[at] = masks
        self._seen[at] = True

    def act(self, lanes: Numbers, noise: Tensor) -> Array:
        """Draw actions for the agents whose turn it is."""
        agent, at = self._agent, (self._place[lanes], lanes)
        leaves = tuple(agent.tensor(leaf[at]) for leaf in self._obs)
        allowed = None if self._masks is None else agent.tensor(self._masks[at])
        states = self._states[lanes]
        said, after = agent.policy.respond(leaves, states, allowed)
        if agent.policy.state_size:
            self._before[lanes], self._states[lanes] = states, after
        actions: Array = agent.policy.head.sample(said, noise).cpu().numpy()
        self._actions[at] = actions
        self.open[lanes] = True
        return actions

    def complete(self, done: Flags, rewards: Array, *, ended: Flags, valid: Flags) -> None:
        """Close the rows of these lanes with what came of them.

        Args:
            done: For each lane, whether its row is complete.
            rewards: What each got since it acted.
            ended: Whose part is over.
            valid: False where the environment was lost, and the row says nothing.
        """
        lanes = np.flatnonzero(done)
        at = self._place[lanes], lanes
        self._rewards[at] = rewards[lanes]
        self._ended[at], self._lost[at] = ended[lanes], ~valid[lanes]
        self._place[lanes] += 1
        self.open[lanes] = False
        if self._agent.policy.state_size and ended.any():
            self._states[ended] = self._before[ended] = 0.0

    def cut(self, lanes: Numbers, leaves: Leaves) -> None:
        """These agents' parts were cut off, and this is what they saw last; before `complete`."""
        at = self._place[lanes], lanes
        self._cut[at] = True
        self._finals.append((*at, leaves, self._states[lanes]))

    # ---- afterwards ------------------------------------------------------------------------------

    def experience(self, episodes: list[tuple[float, int]]) -> Experience:
        """All complete rows, [row, lane], and begin the next rollout."""
        agent, rows = self._agent, max(int(self._place.max()), 1)
        seen = self._seen[: rows + 1]
        whole = np.arange(rows)[:, None] < self._place
        obs = tuple(leaf[: rows + 1] for leaf in self._obs)
        any_seen = np.unravel_index(int(seen.argmax()), seen.shape)
        for leaf in obs:  # networks take no zeros where a choice begins with one
            leaf[~seen] = leaf[any_seen]
        ended = self._ended[: rows + 1]
        masks = None if self._masks is None else self._masks[: rows + 1]
        actions = self._actions[: rows + 1]
        log_probs, values = judged(agent, obs, actions, masks, ended, self._first_states)
        log_probs[0] = np.where(self._was_open, self._log_probs, log_probs[0])
        finals = np.zeros((rows, self.count), np.float32)
        for steps, lanes, leaves, states in self._finals:
            finals[steps, lanes] = worth(agent, leaves, states, lanes.tolist())
        ended, cut = ended[:rows], self._cut[:rows]
        made = Experience(
            obs=tuple(leaf[:rows].copy() for leaf in obs),
            actions=actions[:rows].copy(),
            masks=None if masks is None else masks[:rows].copy(),
            states=self._first_states.cpu().numpy(),
            log_probs=log_probs[:rows].copy(),
            values=values[:rows].copy(),
            rewards=scaled(self._scaler, self._rewards[:rows], ended, whole & ~self._lost[:rows]),
            successors=successor_values(values[:rows], values[rows], ended & ~cut, cut, finals),
            ended=ended.copy(),
            valid=whole & ~self._lost[:rows],
            episodes=episodes,
        )
        self._begin(np.take_along_axis(log_probs, self._place[None], 0)[0])
        return made

    def _begin(self, log_probs: npt.NDArray[np.float32]) -> None:
        """The rows that are not complete become the first of their lanes."""
        lanes = np.arange(self.count)
        for array in (*self._obs, self._masks, self._actions, self._seen):
            if array is not None:
                array[0] = array[self._place, lanes]
        self._rewards[:] = 0.0
        self._seen[1:] = self._ended[:] = self._cut[:] = self._lost[:] = False
        if self._masks is not None:
            self._masks[1:] = True
        self._actions[1:] = 0
        self._place[:] = 0
        self._finals.clear()
        self._log_probs, self._was_open = log_probs, self.open.copy()
        is_open = torch.from_numpy(self.open).to(self._states.device)[:, None]
        self._first_states = torch.where(is_open, self._before, self._states)

    def begin_anew(self) -> None:
        """New episodes have begun everywhere: forget what was not complete."""
        self._seen[:] = False
        self.open[:] = self._was_open[:] = False
        self._states, self._before, self._first_states = (
            self._agent.fresh_states(self.count) for _ in range(3)
        )
        if self._scaler is not None:
            self._scaler.begin_anew()

    # ---- to continue exactly where it was --------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the coming rollouts depend on; taken between two of them."""
        return {
            "obs": tuple(leaf[0].copy() for leaf in self._obs),
            "masks": None if self._masks is None else self._masks[0].copy(),
            "actions": self._actions[0].copy(),
            "seen": self._seen[0].copy(),
            "open": self.open.copy(),
            "log_probs": self._log_probs.copy(),
            "states": self._states.clone(),
            "before": self._before.clone(),
            "scaler": self._scaler and self._scaler.state(),
        }

    @property
    def to_act(self) -> Numbers:
        """Whose turn it is; asked between two rollouts."""
        return np.flatnonzero(self._seen[0] & ~self.open)

    def load(self, state: dict[str, Any]) -> None:
        """Continue exactly where this state was taken."""
        for mine, kept in zip(self._obs, state["obs"], strict=True):
            mine[0] = kept
        if self._masks is not None:
            self._masks[0] = state["masks"]
        self._actions[0], self._seen[0] = state["actions"], state["seen"]
        self.open[:] = state["open"]
        self._states = state["states"].to(self._agent.device).clone()
        self._before = state["before"].to(self._agent.device).clone()
        self._begin(state["log_probs"].copy())
        if self._scaler is not None:
            self._scaler.load(state["scaler"])

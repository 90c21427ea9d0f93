"""Experience of environments with several agents: the fleet steps, policies act, lanes fill up.

    to act ─► policy of each group ─► actions ─► fleet ─► rewards, deaths, whose turn it is ─► lanes

Agents of a group share a policy. All slots step together, so results depend on no worker.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from envfleet.errors import NotFinite, SnapshotError
from envfleet.learn.agent import Agent
from envfleet.learn.checks import MEND
from envfleet.learn.collect import Experience
from envfleet.learn.inputs import Leaves
from envfleet.learn.options import PPOOptions
from envfleet.learn.rollout_clock import RolloutClock
from envfleet.learn.slot_keeper import SlotKeeper
from envfleet.multiagent.agent_fleet import AgentBatch
from envfleet.multiagent.groups import Group
from envfleet.multiagent.lanes import Lanes
from envfleet.multiagent.stepping import Stepping

Numbers = npt.NDArray[np.intp]


class AgentCollector:
    """Steps a fleet by its policies, and keeps what continues from one rollout to the next."""

    def __init__(
        self, vec: Stepping, agents: Mapping[Any, Agent], options: PPOOptions, *, seed: int
    ) -> None:
        """Reset the fleet; after that, slots only reset at the ends of episodes.

        Args:
            vec: The environments; not closed here.
            agents: Who plays each group.
            options: How they learn.
            seed: Of actions, and of the first reset.
        """
        self._vec, self._agents, self._times = vec, agents, options.n_steps
        self._groups: tuple[Group, ...] = vec.layout.groups
        # always on the CPU: a run may go on on another device with the same noise
        self._generator = torch.Generator().manual_seed(seed)
        self._returns = np.zeros((vec.num_envs, len(vec.layout.agents)))
        self._lengths = np.zeros(vec.num_envs, np.int64)
        self._to_act: dict[Any, Numbers] = {}
        self._episodes: list[tuple[float, int]] = []
        self.ended_returns: list[tuple[float, ...]] = []
        """What each agent got in every episode that ended in the last rollout."""
        self._clock = RolloutClock()
        batch = vec.begin(seed)
        self._lanes: dict[Any, Lanes] = {}
        for group in self._groups:
            count = vec.num_envs * len(group.agents)
            agent = agents[group.name]
            first = agent.look(vec.to_act(batch, group)[1])
            self._lanes[group.name] = Lanes(agent, options, count, first)
        self._see(batch)
        self._keeper = SlotKeeper(vec.envs)
        self.begins_anew = False
        """Whether new episodes began at the last `load`."""

    @property
    def seconds(self) -> dict[str, float]:
        """What the time of all rollouts went into."""
        return self._clock.seconds

    # ---- the loop --------------------------------------------------------------------------------

    def collect(self) -> dict[Any, Experience]:
        """Step every slot `n_steps` times; what the agents of each group went through."""
        self._episodes, self.ended_returns = [], []
        with self._clock.rollout(self._vec.envs.fleet), torch.inference_mode():
            noise = {
                group.name: self._agents[group.name]
                .policy.head.noise((self._times, self._vec.draws(group)), self._generator)
                .to(self._agents[group.name].device)
                for group in self._groups
            }
            for step in range(self._times):
                wanted = {}
                begun_s = time.perf_counter()
                for group in self._groups:
                    name, lanes = group.name, self._to_act[group.name]
                    if not len(lanes):
                        continue
                    drawn = noise[name][step][self._vec.draws(group, lanes)]
                    actions = self._lanes[name].act(lanes, drawn)
                    wanted[name] = lanes, self._agents[name].fit(actions)
                sent_s = time.perf_counter()
                batch = self._vec.advance(wanted)
                self._clock.inference_s += sent_s - begun_s
                self._clock.fleet_s += time.perf_counter() - sent_s
                self._note(batch)
            begun_s = time.perf_counter()
            with np.errstate(over="ignore", invalid="ignore"):  # the results are checked
                found = {
                    name: lanes.experience(self._episodes) for name, lanes in self._lanes.items()
                }
            self._clock.inference_s += time.perf_counter() - begun_s
        return found

    def _note(self, batch: AgentBatch) -> None:
        """Keep what a step brought."""
        rewards = batch.all_rewards
        if not np.isfinite(rewards).all():
            slot, number = (int(one[0]) for one in np.nonzero(~np.isfinite(rewards)))
            raise self._not_finite("a reward", number, slot, rewards[slot, number])
        for group in self._groups:
            self._close(batch, group)
        self._returns += rewards
        self._lengths += batch.valid
        for slot in np.flatnonzero(batch.ended).tolist():
            if batch.valid[slot]:  # the episode of a lost environment has no true return
                returns = tuple(self._returns[slot].tolist())
                self.ended_returns.append(returns)
                self._episodes.append((float(np.mean(returns)), int(self._lengths[slot])))
            self._returns[slot], self._lengths[slot] = 0.0, 0
        self._see(batch)

    def _close(self, batch: AgentBatch, group: Group) -> None:
        """Complete the rows of those whose next turn has come, and of those who are gone."""
        lanes, count = self._lanes[group.name], len(group.agents)
        columns = list(group.numbers)
        rewards = batch.all_rewards[:, columns].reshape(-1)
        terminated = batch.all_terminated[:, columns].reshape(-1)
        truncated = batch.all_truncated[:, columns].reshape(-1)
        alive = batch.all_alive[:, columns].reshape(-1)
        gone = terminated | truncated | np.repeat(batch.ended, count) | ~alive
        valid = np.repeat(batch.valid, count)
        is_next = np.zeros(lanes.count, np.bool_)
        is_next[self._vec.to_act(batch, group)[0]] = True
        done = lanes.open & (is_next | gone)
        cut = np.flatnonzero(done & truncated & ~terminated & valid)
        if len(cut):
            last = self._agents[group.name].look(self._vec.last_seen(batch, group, cut))
            self._check(group, cut, last)
            lanes.cut(cut, last)
        lanes.complete(done, rewards, ended=gone, valid=valid)

    def _see(self, batch: AgentBatch) -> None:
        """Show those who act next what they observe."""
        for group in self._groups:
            agent = self._agents[group.name]
            lanes, obs, masks = self._vec.to_act(batch, group)
            self._to_act[group.name] = lanes
            if not len(lanes):
                continue
            leaves = agent.look(obs, learns=True)
            self._check(group, lanes, leaves)
            if masks is not None:
                agent.policy.head.check(masks)
            self._lanes[group.name].see(lanes, leaves, masks)

    def _check(self, group: Group, lanes: Numbers, leaves: Leaves) -> None:
        for leaf in leaves:
            if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                wrong = ~np.isfinite(leaf).reshape(len(leaf), -1).all(1)
                row = int(np.flatnonzero(wrong)[0])
                slot, place = divmod(int(lanes[row]), len(group.agents))
                number = leaf[row][~np.isfinite(leaf[row])].reshape(-1)[0]
                raise self._not_finite("an observation", group.numbers[place], slot, number)

    def _not_finite(self, what: str, number: int, slot: int, value: Any) -> NotFinite:
        whose = self._vec.layout.agents[number]
        return NotFinite(f"{what} of {whose} in slot {slot}", f"is {value}", MEND)

    # ---- to continue exactly where it was --------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that the coming rollouts depend on, except the environments."""
        return {
            "generator": self._generator.get_state(),
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "lanes": {str(name): lanes.state() for name, lanes in self._lanes.items()},
        }

    def slots(self) -> Any:
        """The environments' states, or None with a warning if they cannot be taken."""
        return self._keeper.take()

    def load(self, state: dict[str, Any], slots: Any) -> None:
        """Continue exactly where this state and these slots were taken."""
        self.begins_anew = False
        self._generator.set_state(state["generator"].cpu())
        self._returns, self._lengths = state["returns"].copy(), state["lengths"].copy()
        for group in self._groups:
            self._lanes[group.name].load(state["lanes"][str(group.name)])
            self._to_act[group.name] = self._lanes[group.name].to_act
        if slots is None:
            self._begin_anew()
        else:
            try:
                self._vec.restore(slots)
            except SnapshotError as exc:
                self._begin_anew(str(exc))

    def _begin_anew(self, why: str = "the environments were not kept with this state") -> None:
        """New episodes everywhere, by seeds that follow from the state."""
        warnings.warn(
            f"{why}: new episodes begin in all slots",
            RuntimeWarning,
            stacklevel=2,
        )
        self.begins_anew = True
        drawn = torch.randint(1 << 31, (), generator=self._generator)
        batch = self._vec.begin(int(drawn))
        for lanes in self._lanes.values():
            lanes.begin_anew()
        self._returns[:], self._lengths[:] = 0.0, 0
        self._see(batch)

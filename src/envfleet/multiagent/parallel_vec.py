"""Parallel environments in parallel: everything is a dict of agent -> batch.

Names and shapes are those of AgileRL's class of the same name. Beyond it: last observations and
infos of an episode are kept, masks say who is alive, and agents come in groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Literal

import numpy as np

from envfleet.engine import Batch
from envfleet.errors import ActionError, ConfigError, NothingSent, ResetNeeded
from envfleet.multiagent.agent_fleet import AgentBatch, AgentFleet, Array, Bools, Floats, Layout
from envfleet.multiagent.agent_records import AgentLayout
from envfleet.multiagent.agilerl_form import (
    obs_with_nan,
    or_nan,
    own_class_of_errors,
    without_nan,
)
from envfleet.multiagent.bare import MASK_KEY
from envfleet.multiagent.seats import SeatLayout
from envfleet.multiagent.slot_envs import ParallelSlot
from envfleet.options import check

Actions = Mapping[Any, Any] | Sequence[Mapping[Any, Any]]
Compat = Literal["agilerl"]
Step = tuple[dict[Any, Any], dict[Any, Array], dict[Any, Array], dict[Any, Array], dict[Any, Any]]


class ParallelBatch(AgentBatch):
    """Results of some slots by agent, or by group with an axis for its agents."""

    def __init__(self, layout: Layout, batch: Batch, *, by_group: bool) -> None:
        """Read a batch of the fleet."""
        super().__init__(layout, batch)
        self._by_group = by_group

    @cached_property
    def obs(self) -> dict[Any, Any]:
        """What agents observe; zero where an agent is not present.

        With seats: one value per slot, None where the seat is empty.
        """
        return self._observations(self._now, self._seen)

    @cached_property
    def final_obs(self) -> dict[Any, Any]:
        """The true successor: the last observation where an episode ended, else `obs`."""
        return self._observations(self._step, self._last_seen)

    @cached_property
    def names(self) -> list[dict[int, Any]]:
        """With seats: for each slot seat -> name, of the agents that are there."""
        return [{seat: name for seat, (name, _) in seen.items()} for seen in self._seen]

    @cached_property
    def rewards(self) -> dict[Any, Floats]:
        """What agents got by this step."""
        return self._split(self.all_rewards)

    @cached_property
    def terminated(self) -> dict[Any, Bools]:
        """Whose part ended in this step."""
        return self._split(self.all_terminated)

    @cached_property
    def truncated(self) -> dict[Any, Bools]:
        """Whose part was cut off in this step."""
        return self._split(self.all_truncated)

    @cached_property
    def present(self) -> dict[Any, Bools]:
        """About whom this step says something."""
        return self._split(self.all_present)

    @cached_property
    def alive(self) -> dict[Any, Bools]:
        """Who may act next."""
        return self._split(self.all_alive)

    @cached_property
    def masks(self) -> dict[Any, Bools]:
        """What agents may do, for those with numbered actions.

        Of an agent that is not alive only the first action is allowed, so that a policy can act for
        the whole batch.
        """
        layout = self._layout
        assert isinstance(layout, AgentLayout)
        masks: dict[Any, Bools] = {}
        for number, group in enumerate(layout.groups):
            given = layout.masks(self._now, number)
            if given is None:
                continue
            is_dead = ~self.all_alive[:, group.numbers]
            if is_dead.any():
                given = np.where(is_dead[..., np.newaxis], False, given)
                given[..., 0] |= is_dead
            masks |= self._each(group.name, group.agents, given)
        return masks

    def _observations(self, records: Array, seen: Any) -> dict[Any, Any]:
        layout = self._layout
        if isinstance(layout, SeatLayout):
            return {
                seat: [None if seat not in one else one[seat][1] for one in seen]
                for seat in layout.agents
            }
        found: dict[Any, Any] = {}
        for number, group in enumerate(layout.groups):
            found |= self._each(group.name, group.agents, layout.observations(records, number))
        return found

    def _each(self, name: Any, agents: Sequence[Any], tree: Any) -> dict[Any, Any]:
        if self._by_group:
            return {name: tree}
        return {agent: _agent_part(tree, place) for place, agent in enumerate(agents)}

    def _split(self, values: Array) -> dict[Any, Any]:
        if self._by_group and isinstance(self._layout, AgentLayout):
            return {group.name: values[:, group.numbers] for group in self._layout.groups}
        return dict(zip(self._layout.agents, values.T, strict=True))


class AsyncPettingZooVecEnv(AgentFleet):
    """Parallel environments on a fleet; observations, rewards and so on are by agent.

    A step resets the episodes that it ends. `infos["final_obs"]` then has the true successors and
    `infos["_final_obs"]` says where episodes ended; `infos["final_info"]` has the last infos.
    `alive` says who may act next. Of an agent that is not there, reward and observation are zero
    and flags are False; actions for it are ignored.
    """

    _slot_kind = ParallelSlot

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        *,
        by_group: bool = False,
        compat: Compat | None = None,
        **options: Any,
    ) -> None:
        """Build the environments.

        Args:
            env_fns: One function per slot that builds its Parallel environment.
            by_group: Everything is by group instead of by agent: arrays are
                [slot, agent of the group, ...], and so are actions.
            compat: "agilerl" marks agents that are not there by NaN, as AgileRL does.
            **options: Those of `AgentFleet`.
        """
        check("compat", compat, Compat | None)
        if by_group and compat:
            raise ConfigError("AgileRL knows no groups: leave out by_group= or compat=")
        super().__init__(env_fns, **options)
        self._by_group, self._compat = by_group, compat
        if isinstance(self.layout, SeatLayout) and (by_group or compat):
            self.close()
            raise ConfigError("with seats= neither by_group= nor compat= is possible")
        count = len(self.layout.agents)
        self._alive: Bools = np.zeros((self.num_envs, count), np.bool_)
        self._last_batch: ParallelBatch | None = None
        self._called: tuple[Any, ...] | None = None

    # ---- AgileRL's names ------------------------------------------------------------------------

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Reset all slots; slot i gets `seed + i`, or the i-th of a list."""
        self.envs.fleet.drop()
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(self, *, seed: Any = None, options: Any = None) -> None:
        """Start a reset of all slots."""
        self.envs.send_reset(seed=seed, options=options)

    def reset_wait(self, timeout: float | None = None) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Wait for what `reset_async` started."""
        with self._errors():
            batch = self._recv_all(timeout)
        return self._shown(batch)[0], self._infos(batch)

    def step(self, actions: Actions) -> Step:
        """Step all slots; returns observations, rewards, terminated, truncated and infos."""
        given = self._actions(actions, None)
        with self._errors():
            return self._answer(self._read(self.envs.fleet.step(given)))

    def step_async(self, actions: Actions) -> None:
        """Start a step of all slots."""
        self.send(actions)

    def step_wait(self, timeout: float | None = None) -> Step:
        """Wait for what `step_async` started."""
        with self._errors():
            return self._answer(self._recv_all(timeout))

    def call_async(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call `name` on all environments; `call_wait` gives the answers."""
        self._called = self.call(name, *args, **kwargs)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """What `call_async` found."""
        if self._called is None:
            raise NothingSent("call_wait needs a call_async before it")
        found, self._called = self._called, None
        return found

    @property
    def last_batch(self) -> ParallelBatch:
        """What `reset`, `step` or `recv` returned last, by name."""
        if self._last_batch is None:
            raise ResetNeeded("there is no batch yet; call reset first")
        return self._last_batch

    @property
    def alive(self) -> dict[Any, Bools]:
        """Who may act next, by agent (or group) and slot, as the last batches said."""
        layout = self.layout
        if self._by_group and isinstance(layout, AgentLayout):
            return {group.name: self._alive[:, group.numbers] for group in layout.groups}
        return dict(zip(layout.agents, self._alive.T.copy(), strict=True))

    # ---- first-ready ----------------------------------------------------------------------------

    def send(self, actions: Actions, slots: Sequence[int] | None = None) -> None:
        """Start a step of these slots (None: all); actions are in their order."""
        self.envs.send(self._actions(actions, slots), slots)

    def recv(
        self,
        min_slots: int | None = None,
        timeout_s: float | None = None,
        slots: Sequence[int] | None = None,
    ) -> ParallelBatch:
        """Wait for at least `min_slots` (None: all in flight) and return what is ready."""
        return self._read(self.envs.recv(min_slots, timeout_s, slots))

    # ---- parts ----------------------------------------------------------------------------------

    def _errors(self) -> AbstractContextManager[None]:
        return nullcontext() if self._compat is None else own_class_of_errors()

    def _recv_all(self, timeout: float | None) -> ParallelBatch:
        batch = self._read(self.envs.recv(None, timeout))
        if len(batch) < self.num_envs:
            missing = sorted(set(range(self.num_envs)).difference(batch.slots.tolist()))
            raise TimeoutError(
                f"slots {missing} were not ready after {timeout} s, and the rows of the others are "
                "lost; go on with reset. To take what is ready, use send and recv"
            )
        return batch

    def _read(self, found: Batch) -> ParallelBatch:
        batch = ParallelBatch(self.layout, found, by_group=self._by_group)
        self._alive[batch.slots] = batch.all_alive
        self._last_batch = batch
        return batch

    def _answer(self, batch: ParallelBatch) -> Step:
        obs, rewards, terminated, truncated = self._shown(batch)
        return obs, rewards, terminated, truncated, self._infos(batch)

    def _infos(self, batch: ParallelBatch) -> dict[Any, Any]:
        infos = dict(batch.infos)
        infos |= {
            f"_{name}": there
            for name, there in zip(self.layout.agents, batch.all_present.T, strict=True)
        }
        if self._compat is not None:
            for name, mask in batch.masks.items():
                infos[name][MASK_KEY], infos[name][f"_{MASK_KEY}"] = mask, infos[f"_{name}"]
        if batch.ended.any():
            infos["final_obs"], infos["_final_obs"] = batch.final_obs, batch.ended
            infos["final_info"], infos["_final_info"] = batch.final_infos, batch.ended
        return infos

    def _shown(self, batch: ParallelBatch) -> tuple[dict[Any, Any], ...]:
        plain = batch.obs, batch.rewards, batch.terminated, batch.truncated
        if self._compat is None:
            return plain
        is_reset = not batch.valid.any()
        there = batch.present
        seen = {
            name: obs_with_nan(tree, batch.alive[name] | (there[name] & ~batch.ended))
            for name, tree in plain[0].items()
        }
        flags = [
            {name: or_nan(values, there[name] | is_reset) for name, values in one.items()}
            for one in plain[1:]
        ]
        return seen, *flags

    def _actions(self, actions: Actions, slots: Sequence[int] | None) -> Any:
        layout = self.layout
        alive = self._alive if slots is None else self._alive[np.asarray(slots, np.intp)]
        if isinstance(layout, SeatLayout):
            return self._seat_actions(actions, alive)
        if not isinstance(actions, Mapping):
            return self._records_of(actions, alive, slots)
        records = np.zeros(len(alive), layout.action_space.dtype)
        for number, group in enumerate(layout.groups):
            names = (group.name,) if self._by_group else group.agents
            for place, name in enumerate(names):
                if name not in actions:
                    columns = list(group.numbers) if self._by_group else [group.numbers[place]]
                    if alive[:, columns].any():
                        raise ActionError(f"{name!r} is alive in some slots and has no actions")
                    continue
                given = actions[name]
                if self._compat is not None:
                    living = alive[:, group.numbers if self._by_group else group.numbers[place]]
                    given = without_nan(given, group.action_space, living, name)
                if self._by_group:
                    layout.put_group_action(records, number, given)
                else:
                    layout.put_action(records, name, given)
        unknown = [
            name
            for name in actions
            if name not in (self.groups if self._by_group else layout.places)
        ]
        if unknown:
            raise ActionError(f"there are actions for {unknown}, who are not among the agents")
        return records

    def _records_of(
        self, actions: Sequence[Mapping[Any, Any]], alive: Bools, slots: Sequence[int] | None
    ) -> Array:
        """Actions that are given slot by slot, each of living agents only."""
        layout = self.layout
        assert isinstance(layout, AgentLayout)
        if len(actions) != len(alive):
            raise ActionError(f"{len(alive)} slots need {len(alive)} dicts, got {len(actions)}")
        records = np.zeros(len(alive), layout.action_space.dtype)
        for row, given in enumerate(actions):
            slot = row if slots is None else slots[row]
            living = [layout.agents[number] for number in np.flatnonzero(alive[row])]
            dead = [name for name in given if name not in living]
            missing = [name for name in living if name not in given]
            if dead or missing:
                which = f"{dead} may not act" if dead else f"{missing} must act"
                raise ActionError(f"in slot {slot} the living agents are {living}: {which}")
            for name, action in given.items():
                one = records[row : row + 1]
                layout.put_action(one, name, _batch_of_one(action))
        return records

    def _seat_actions(self, actions: Actions, alive: Bools) -> tuple[dict[int, Any], ...]:
        """For each slot seat -> action, of the seats whose agents are alive."""
        if isinstance(actions, Mapping):
            rows = [
                {seat: values[row] for seat, values in actions.items()} for row in range(len(alive))
            ]
        else:
            rows = [dict(one) for one in actions]
        if len(rows) != len(alive):
            raise ActionError(f"{len(alive)} slots need {len(alive)} dicts, got {len(rows)}")
        chosen = []
        for given, living in zip(rows, alive, strict=True):
            seats = np.flatnonzero(living).tolist()
            if missing := [seat for seat in seats if seat not in given]:
                raise ActionError(f"the agents on the seats {missing} are alive and have no action")
            chosen.append({seat: given[seat] for seat in seats})
        return tuple(chosen)


def _agent_part(tree: Any, place: int) -> Any:
    """One agent's part of what a group observes."""
    if isinstance(tree, dict):
        return {key: _agent_part(part, place) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_agent_part(part, place) for part in tree)
    return tree[:, place]


def _batch_of_one(action: Any) -> Any:
    if isinstance(action, Mapping):
        return {key: _batch_of_one(part) for key, part in action.items()}
    if isinstance(action, tuple):
        return tuple(_batch_of_one(part) for part in action)
    return np.asarray(action)[np.newaxis]

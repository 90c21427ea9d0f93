"""A fleet of environments with several agents: what both vectorisers share.

Episodes are reset within the step that ends them (same_step). The fleet's batches hold one record
per slot; `AgentBatch` reads them by agent or by group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import batch_space

from envfleet.adapters.gymnasium import FleetVectorEnv, make_vec
from envfleet.engine import Batch, Incident, Snapshot
from envfleet.errors import ConfigError
from envfleet.multiagent.agent_records import AgentLayout
from envfleet.multiagent.groups import Group, Groups, Space
from envfleet.multiagent.seats import SeatLayout
from envfleet.multiagent.slot_envs import agents_of, build_slot, layout_of
from envfleet.options import Count, check

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Layout = AgentLayout | SeatLayout
_FINAL_KEYS = ("final_obs", "final_info")


class AgentBatch:
    """Results of some slots; row i of every array belongs to `slots[i]`.

    `rewards`, `terminated`, `truncated` and `present` say what the step brought, in the last step
    of an episode too. `alive`, and what agents observe, is about what comes next: after an end
    these are of the next episode's start, and `final_obs` has the last observations.
    """

    def __init__(self, layout: Layout, batch: Batch) -> None:
        """Read a batch of the fleet."""
        self._layout = layout
        self.slots = batch.slots
        self.ended: Bools = batch.terminated | batch.truncated
        """Where an episode ended in this step."""
        self.valid: Bools = batch.valid
        """False where the row is no transition: a reset, or a slot that was restarted."""
        self.incidents: tuple[Incident, ...] = batch.incidents
        self._batch, self._is_seated = batch, isinstance(layout, SeatLayout)
        self._now: Array = batch.obs["record"] if self._is_seated else batch.obs
        self._seen: Any = batch.obs["seen"] if self._is_seated else ()

    def __len__(self) -> int:
        """How many slots."""
        return len(self.slots)

    @cached_property
    def _step(self) -> Array:
        """The records of what the step brought: of episodes that ended, the last ones."""
        batch = self._batch
        step: Array = batch.final_obs["record"] if self._is_seated else batch.final_obs
        if not batch.has_events or batch.valid.all():
            return step
        # a lost slot shows its last record once more: what that earned was counted before
        step, rows = step.copy(), ~batch.valid
        step["reward"][rows] = 0
        step["terminated"][rows] = False
        step["truncated"][rows] = step["alive"][rows] & self.ended[rows, np.newaxis]
        return step

    @property
    def _last_seen(self) -> Any:
        return self._batch.final_obs["seen"] if self._is_seated else ()

    @property
    def all_rewards(self) -> Floats:
        """What each agent got by this step, [slot, agent]."""
        return self._step["reward"]

    @property
    def all_terminated(self) -> Bools:
        """Whose part ended in this step, [slot, agent]."""
        return self._step["terminated"]

    @property
    def all_truncated(self) -> Bools:
        """Whose part was cut off in this step, [slot, agent]."""
        return self._step["truncated"]

    @property
    def all_present(self) -> Bools:
        """About whom the step says something, [slot, agent]."""
        return self._step["present"]

    @property
    def all_alive(self) -> Bools:
        """Who may act next, [slot, agent]."""
        return self._now["alive"]

    @cached_property
    def infos(self) -> dict[Any, Any]:
        """Agent -> key -> values, "_key" -> which slots have it; and what is of no agent."""
        return self._by_agent(
            {
                key: value
                for key, value in self._batch.infos.items()
                if key.removeprefix("_") not in _FINAL_KEYS
            }
        )

    @cached_property
    def final_infos(self) -> dict[Any, Any]:
        """The same for the last step of the episodes that ended."""
        return self._by_agent(self._batch.infos.get("final_info", {}))

    def _by_agent(self, flat: Mapping[str, Any]) -> dict[Any, Any]:
        found: dict[Any, Any] = {name: {} for name in self._layout.agents}
        for key, value in flat.items():
            number, slash, rest = key.removeprefix("_").partition("/")
            if not slash or not number.isdigit():
                found[key] = value
                continue
            own = found[self._layout.agents[int(number)]]
            own[f"_{rest}" if key.startswith("_") else rest] = value
        return found


class AgentFleet:
    """Environments with several agents on a fleet; one slot is one environment."""

    _slot_kind: Any

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        *,
        groups: Groups | None = None,
        seats: int | None = None,
        num_workers: int | None = None,
        backend: str = "auto",
        start_method: str | None = None,
        step_timeout_s: float | None = None,
        reset_timeout_s: float | None = None,
        on_failure: str = "raise",
        max_restarts: int = 5,
        copy: bool = True,
        num_here: int = 0,
    ) -> None:
        """Build the environments.

        Args:
            env_fns: One function per slot that builds its environment where it will live.
            groups: Group -> its agents, which must have equal spaces. None: agents whose names
                differ only in the number at their end, such as wolf_0 and wolf_1.
            seats: For environments without `possible_agents`: how many agents can be there at the
                same time. Agents are then known by the numbers of their seats.
            num_workers: How many workers share the slots; None decides.
            backend: "serial", "thread", "process", or "auto", which measures and says why in
                `plan`.
            start_method: "fork", "spawn" or "forkserver"; None takes the fastest that is safe.
            step_timeout_s: Longest one step of one environment may take; None waits.
            reset_timeout_s: Longest one reset of one environment may take; None waits.
            on_failure: "raise", "restart", "resume" or "fallback", as in `envfleet.make_vec`.
            max_restarts: How many failures of one slot are answered by a restart.
            copy: False returns views of shared memory, valid until the next send to that slot.
            num_here: So many slots, the last, live in this process.

        Raises:
            ConfigError: An argument cannot work.
            StartError: The environments could not be built.
        """
        check("seats", seats, Count | None)
        if seats is not None and groups is not None:
            raise ConfigError("seats have no groups: leave out groups= or seats=")
        if seats is not None and backend == "auto":
            backend = "process"  # measuring acts at random, which takes spaces
        given: list[Any] = list(env_fns)
        if wrong := [one for one in given if not callable(one)]:
            raise ConfigError(
                f"env_fns has {wrong[0]!r}, which is no function: give one function per slot that "
                "builds its environment, such as connect_four_v3.env (without parentheses)"
            )
        self.envs: FleetVectorEnv = make_vec(
            [functools.partial(build_slot, self._slot_kind, fn, groups, seats) for fn in env_fns],
            num_workers=num_workers,
            backend=backend,
            start_method=start_method,
            autoreset="same_step",
            step_timeout_s=step_timeout_s,
            reset_timeout_s=reset_timeout_s,
            on_failure=on_failure,
            max_restarts=max_restarts,
            copy=copy,
            num_here=num_here,
        )
        self.layout: Layout = self.envs.apply(layout_of, [0])[0]
        """Who the agents are and where they are in a record."""
        for slot, names in enumerate(self.envs.apply(agents_of)):
            if names != self.layout.agents:  # records know numbers only
                self.envs.close()
                raise ConfigError(
                    f"slot {slot} has the agents {list(names)}, and slot 0 has "
                    f"{list(self.layout.agents)}: possible_agents must be the same in all slots, "
                    "in the same order (the order of a set differs from process to process)"
                )
        self.num_envs, self.plan = self.envs.num_envs, self.envs.plan
        self.render_mode, self.metadata = self.envs.render_mode, self.envs.metadata
        self.possible_agents: list[Any] = list(self.layout.agents)
        """All agents that there can be; with seats, the numbers of the seats."""
        self.agents = self.possible_agents
        self.num_agents = len(self.agents)

    @property
    def groups(self) -> dict[Any, tuple[Any, ...]]:
        """Group -> its agents."""
        if isinstance(self.layout, SeatLayout):
            return {}
        return {group.name: group.agents for group in self.layout.groups}

    def single_observation_space(self, agent: Any) -> Space:
        """What an agent observes."""
        return self._group_of(agent).observation_space

    def single_action_space(self, agent: Any) -> Space:
        """How an agent acts."""
        return self._group_of(agent).action_space

    def observation_space(self, agent: Any) -> Space:
        """What an agent observes in all slots."""
        return self._batched("observation", agent)

    def action_space(self, agent: Any) -> Space:
        """How an agent acts in all slots."""
        return self._batched("action", agent)

    def _batched(self, kind: str, agent: Any) -> Space:
        return batch_space(getattr(self._group_of(agent), f"{kind}_space"), self.num_envs)

    def _group_of(self, agent: Any) -> Group:
        layout = self.layout
        if isinstance(layout, SeatLayout):
            raise ConfigError(
                "the spaces of an agent on a seat are known to its environment only: "
                'call("action_space", name, slots=[slot])'
            )
        if agent not in layout.places:
            raise ConfigError(f"there is no agent {agent!r}; the agents are {list(layout.agents)}")
        return layout.groups[layout.places[agent][0]]

    # ---- the same as of every fleet -------------------------------------------------------------

    def call(
        self, name: str, *args: Any, slots: Sequence[int] | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Call `name` on the environments of these slots (None: all); a value is only read."""
        return self.envs.call(name, *args, slots=slots, **kwargs)

    def get_attr(self, name: str, slots: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Read `name` from the environments of these slots (None: all)."""
        return self.envs.get_attr(name, slots)

    def set_attr(self, name: str, values: Any, slots: Sequence[int] | None = None) -> None:
        """Set `name`; a list or tuple has one value per slot, anything else is for all of them."""
        self.envs.set_attr(name, values, slots)

    def render(self) -> tuple[Any, ...] | None:
        """One frame per slot."""
        return self.envs.render()

    def snapshot(self, slots: Sequence[int] | None = None) -> tuple[Snapshot, ...]:
        """The state of these slots, to go on from later, here or in another fleet."""
        return self.envs.snapshot(slots)

    def restore(self, snapshots: Sequence[Snapshot], slots: Sequence[int] | None = None) -> Any:
        """Bring these slots to those states.

        Returns a batch of them, as `recv` would after a reset: who acts next and what they observe.
        """
        found = self.envs.restore(snapshots, slots)
        wanted = np.arange(self.num_envs) if slots is None else np.asarray(slots, np.intp)
        obs = (
            {"record": found["record"][wanted], "seen": tuple(found["seen"][n] for n in wanted)}
            if isinstance(self.layout, SeatLayout)
            else found[wanted]
        )
        ended, cut, valid = np.zeros((3, len(wanted)), np.bool_)
        return self._read(Batch(wanted, obs, np.zeros(len(wanted)), ended, cut, valid, True))

    def _read(self, found: Batch) -> Any:
        """Note whose turn it is, and return the batch by agent."""
        raise NotImplementedError

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every failure so far, oldest first."""
        return self.envs.incidents

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self.envs.fleet.is_closed

    def close(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close all environments. AgileRL's arguments are accepted; closing is always bounded."""
        self.envs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

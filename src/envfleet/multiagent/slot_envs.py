"""A PettingZoo environment as the Gymnasium environment of one slot, where the slot lives.

`ParallelSlot` and `TurnSlot` turn what their environment says into one record per step (or, with
seats, a record and what has no fixed size). A reset without a seed draws one from the slot's own
generator, so that a whole run follows from its first seed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
from pettingzoo import AECEnv, ParallelEnv

from envfleet.errors import ConfigError, OutOfOrder
from envfleet.multiagent.agent_records import AgentLayout
from envfleet.multiagent.bare import MASK_KEY, BareCycles
from envfleet.multiagent.groups import Groups, make_groups
from envfleet.multiagent.record_writers import RecordWriter
from envfleet.multiagent.seats import SeatLayout, SeatWriter
from envfleet.multiagent.turns import Info, Outcome, Turns, agents_there, is_any_cut

_hosted: weakref.WeakSet[Any] = weakref.WeakSet()
"""The environments of all slots in this process."""


class _AgentSlot(gymnasium.Env[Any, Any]):
    """What both kinds share."""

    _has_turns: bool
    _kind: Any
    _other: str

    def __init__(self, env: Any, groups: Groups | None, seats: int | None) -> None:
        if not isinstance(env, self._kind):
            raise ConfigError(
                f"a PettingZoo {self._kind.__name__} is needed, got {type(env).__name__}; "
                f"{self._other}"
            )
        if env in _hosted:
            raise ConfigError(
                f"two slots were given the same instance of {env}: let each of env_fns build an "
                "environment of its own"
            )
        _hosted.add(env)
        self.env: Any = env
        self.metadata = dict(env.metadata)
        self.render_mode = getattr(env, "render_mode", None)
        names = tuple(getattr(env, "possible_agents", None) or ())
        self.layout: AgentLayout | SeatLayout
        self._writer: RecordWriter | SeatWriter
        if seats is not None:
            self.layout = SeatLayout(seats, self._has_turns)
            self._writer = SeatWriter(self.layout)
        elif names:
            groups_made = make_groups(env, names, groups)
            self.layout = AgentLayout(names, groups_made, self._has_turns)
            self._writer = RecordWriter(self.layout)
        else:
            raise ConfigError(
                f"{env} does not say which agents there can be (possible_agents): give the largest "
                "number of agents that are there at the same time, seats="
            )
        self.observation_space = self.layout.observation_space
        self.action_space = self.layout.action_space

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode."""
        super().reset(seed=seed)
        used = seed if seed is not None else int(self.np_random.integers(2**31))
        self._writer.clear()
        begun, turn = self._begin(used, options)
        if not begun.live:
            raise OutOfOrder(f"{self.env} has no agent that could act after its reset")
        obs = self._writer.write(begun, turn)
        return obs, self._info(begun.infos)

    def _begin(self, seed: int, options: Info | None) -> tuple[Outcome, Any]:
        raise NotImplementedError

    def render(self) -> Any:
        """What the environment renders."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _info(self, infos: Any) -> Info:
        """One info of all agents': "number/key"; masks are in the record."""
        if not any(infos.values()):
            return {}
        is_seated = isinstance(self.layout, SeatLayout)
        number_of = self._writer.number_of if is_seated else self.layout.number_of  # type: ignore[union-attr]
        return {
            f"{number_of[name]}/{key}": value
            for name, own in infos.items()
            if name in number_of
            for key, value in own.items()
            if is_seated or key != MASK_KEY
        }

    # ---- what a caller reads, sets and calls by name is the environment's -----------------------

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether the environment or one of its layers has it."""
        return any(hasattr(layer, name) for layer in self._layers())

    def get_wrapper_attr(self, name: str) -> Any:
        """Read it from the outermost layer that has it; PettingZoo's do not all pass names on."""
        for layer in self._layers():
            if hasattr(layer, name):
                return getattr(layer, name)
        raise AttributeError(f"{type(self.env.unwrapped).__name__!r} object has no {name!r}")

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set it on the layer of the environment that has it, else on the innermost."""
        layers = list(self._layers())
        setattr(next((one for one in layers if name in vars(one)), layers[-1]), name, value)
        return True

    def _layers(self) -> Iterator[Any]:
        """The environment and what it wraps, outermost first."""
        layer = self.env
        while layer is not layer.unwrapped:
            yield layer
            inner = vars(layer).get("env", vars(layer).get("aec_env"))
            layer = layer.unwrapped if inner is None else inner
        yield layer


class ParallelSlot(_AgentSlot):
    """A Parallel environment: all living agents act at once."""

    _has_turns, _kind = False, ParallelEnv
    _other = "AECVecEnv takes AEC environments, pettingzoo.utils.aec_to_parallel converts some"

    _live: list[Any]

    def __init__(self, env: Any, groups: Groups | None, seats: int | None) -> None:
        super().__init__(env, groups, seats)
        self._bare: Any = BareCycles(env) if BareCycles.are_cycles(env) else env

    def _begin(self, seed: int, options: Info | None) -> tuple[Outcome, Any]:
        seen, infos = self._bare.reset(seed=seed, options=options)
        self._live = agents_there(self.env, seen)
        return Outcome(live=self._live, seen=seen, infos=infos), None

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """One step of all living agents."""
        actions = self._writer.actions_of(action, self._live)
        seen, rewards, terminated, truncated, infos = self._bare.step(actions)
        live = agents_there(self.env, seen)
        if any(terminated.values()) or any(truncated.values()):
            live = [name for name in live if not (terminated.get(name) or truncated.get(name))]
        elif live and (record := self._writer.write_all(live, seen, rewards, infos)) is not None:
            return record, float(sum(rewards.values())), False, False, self._info(infos)
        self._live = live
        outcome = Outcome(
            live=live,
            seen=seen,
            rewards=rewards,
            infos=infos,
            terminated=terminated,
            truncated=truncated,
        )
        is_cut = not live and is_any_cut(terminated, truncated)
        obs = self._writer.write(outcome)
        return obs, float(sum(rewards.values())), not live and not is_cut, is_cut, self._info(infos)


class TurnSlot(_AgentSlot):
    """An AEC environment: one agent acts at a time."""

    _has_turns, _kind = True, AECEnv
    _other = "AsyncPettingZooVecEnv takes Parallel environments"

    def __init__(self, env: Any, groups: Groups | None, seats: int | None) -> None:
        super().__init__(env, groups, seats)
        self._turns = Turns(env)

    def _begin(self, seed: int, options: Info | None) -> tuple[Outcome, Any]:
        self._turns.reset(seed, options)
        live = self._turns.live_agents()
        turn = self._turns.agent if live else None
        seen, infos = self._turns.observe([turn] if live else [])
        return Outcome(live=live, seen=seen, infos=infos), turn

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """The turn of one agent; those that died are stepped until a living one is to act."""
        turns, writer = self._turns, self._writer
        actor = turns.agent
        if turns.act(writer.action_of_turn(action, actor)):
            turn = turns.agent
            seen, reward, info = turns.last()
            obs = writer.write_turn(turns.agents, turn, seen, reward, info)
            return obs, reward, False, False, self._info({turn: info}) if info else {}
        done = turns.after_turn(actor)
        is_over = not done.live
        is_cut = is_over and done.is_any_truncated
        turn = None
        if not is_over:
            turn, done.live = done.live[0], turns.live_agents()
        reward = float(sum(done.rewards.values()))
        obs = writer.write(done, turn)
        return obs, reward, is_over and not is_cut, is_cut, self._info(done.infos)


def build_slot(
    kind: type[_AgentSlot], env_fn: Callable[[], Any], groups: Groups | None, seats: int | None
) -> _AgentSlot:
    """Build the environment of one slot."""
    return kind(env_fn(), groups, seats)


def layout_of(slot: Any) -> AgentLayout | SeatLayout:
    """Where the agents of a slot are in its records."""
    return slot.layout  # type: ignore[no-any-return]


def agents_of(slot: Any) -> tuple[Any, ...]:
    """Who the agents of a slot are, in the order of its records."""
    return slot.layout.agents  # type: ignore[no-any-return]

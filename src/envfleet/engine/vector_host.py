"""A natively vectorised environment as a host: m slots that are stepped by one call.

The environment resets itself, so its own autoreset mode must be the fleet's. In most
implementations its slots share one generator. Streams then depend on the seed and on the number of
slots in the instance, so a run is repeatable with the same number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from envfleet.engine.host import Guard
from envfleet.engine.infos import Info
from envfleet.engine.memory import Control, Data
from envfleet.engine.messages import EnvFacts, EnvFailure, Op, Reply, status_word
from envfleet.engine.options import Autoreset, ResetPlan
from envfleet.engine.rows import put_rows
from envfleet.errors import ConfigError


class VectorHost:
    """One `gymnasium.vector.VectorEnv` in the slots `first .. first + env.num_envs - 1`."""

    def __init__(self, first: int, env: VectorEnv, autoreset: Autoreset, guard: Guard) -> None:
        mode = env.metadata.get("autoreset_mode")
        native_mode = str(getattr(mode, "name", mode)).lower()
        if mode is not None and native_mode != autoreset:
            raise ConfigError(
                f"{env} resets itself in mode {native_mode!r} but the fleet was asked for "
                f"{autoreset!r}; pass autoreset={native_mode!r}, or build the environment with "
                f"that mode"
            )
        self.first, self.count = first, env.num_envs
        self._env, self._autoreset = env, autoreset
        self._guard = guard
        self._guarded = guard.around(env)
        self._ended = np.zeros(self.count, np.bool_)
        self._owes_truncation = False
        self._reply = Reply()
        self._empty_reply = Reply()

    def facts(self) -> list[EnvFacts]:
        """Spaces, metadata and spec, the same for every slot."""
        env = self._env
        facts = EnvFacts(
            env.single_observation_space,
            env.single_action_space,
            dict(env.metadata or {}),
            env.render_mode,
            # other libraries keep settings there that may not leave their process
            env.spec if isinstance(env.spec, EnvSpec) else None,
            native=True,
            together=range(self.first, self.first + self.count),
        )
        return [facts] * self.count

    def bind(self, control: Control, data: Data, status: memoryview) -> None:
        """Take the shared rows; the spaces are equal, so the rows are one block."""
        self._control, self._status = control, status
        kind, row = int(data.group_of[self.first]), int(data.row_of[self.first])
        self._rows = slice(row, row + self.count)
        self._obs, self._final_obs = data.obs[kind], data.final_obs[kind]
        self._actions = data.actions[kind]
        self._plain_obs, plain = self._obs.sole_array, self._actions.sole_array
        self._plain_actions = None if plain is None else plain[self._rows]
        self._slots = slots = slice(self.first, self.first + self.count)
        self._rewards, self._flags = control.rewards[slots], control.flags[:, slots]
        self._place = status_word(Op.STEP, self.first)

    def step(self, slots: Sequence[int] | None, spills: dict[int, Any] | None) -> Reply | None:
        """Step the whole instance: the fleet always sends all of its slots."""
        self._status[1] = self._place
        if self._plain_actions is not None:
            actions = self._plain_actions.copy()
        else:
            actions = self._actions.read_batch(self._rows, _by_position(spills, self.first))
        if self._owes_truncation:
            return self._come_back()
        try:
            obs, rewards, terminated, truncated, infos = self._guarded.step(actions)
            self._put_obs(obs)
        except BaseException as exc:
            self._note("step", exc)
            return self._take_reply()
        if np.ndim(rewards) == 2:  # several objectives, as in a host of single environments
            infos = {**infos, "vector_reward": np.asarray(rewards, np.float64)}
            rewards = infos["vector_reward"].sum(1)
        self._rewards[:] = rewards
        flags = self._flags
        flags[0], flags[1] = terminated, truncated
        if self._autoreset == "next_step":
            flags[2] = self._ended
            np.logical_or(terminated, truncated, out=self._ended)
        else:
            flags[2] = False
        if infos:
            self._put_infos(infos)
        return self._take_reply()

    def idle(self) -> None:
        """Nothing to prepare."""

    def reset(self, slots: Sequence[int] | None, plans: Sequence[ResetPlan]) -> Reply | None:
        """Reset the whole instance by its first slot's seed; options are the same for all."""
        self._status[1] = status_word(Op.RESET, self.first)
        plan = plans[0]
        try:
            obs, infos = plan.apply(self._guarded.reset)
            self._put_obs(obs)
        except BaseException as exc:
            self._note("reset", exc)
            return self._take_reply()
        self._ended[:] = False
        self._owes_truncation = False
        control, rows = self._control, self._slots
        control.rewards[rows] = 0.0
        control.terminated[rows] = control.truncated[rows] = False
        control.invalid[rows] = True
        if infos:
            self._put_infos(infos)
        return self._take_reply()

    def queue(self, slots: Sequence[int], plans: Sequence[ResetPlan]) -> Reply | None:
        """Not possible: the instance resets its slots by itself."""
        error = ConfigError(
            "a natively vectorised environment resets itself; nothing can be queued"
        )
        self._note("queue_reset", error)
        return self._take_reply()

    def resume(
        self, slots: Sequence[int], orders: Sequence[tuple[ResetPlan, Any, bool]]
    ) -> Reply | None:
        """The instance is new, with its worker; every slot starts with a truncated row."""
        self._owes_truncation = True
        self._plan = orders[0][0]
        return self._take_reply()

    def call(self, slots: Sequence[int], name: str, args: Any, kwargs: Any) -> Reply | None:
        """Call the instance's own `call`, or read its attribute."""
        self._status[1] = status_word(Op.CALL, self.first)
        try:
            if hasattr(self._env, "call"):
                values = self._env.call(name, *args, **kwargs)
            else:
                attribute = getattr(self._env, name)
                value = attribute(*args, **kwargs) if callable(attribute) else attribute
                values = [value] * self.count
        except BaseException as exc:
            self._note(f"call of {name!r}", exc)
        else:
            self._reply.values = {slot: values[slot - self.first] for slot in slots}
        return self._take_reply()

    def get(self, slots: Sequence[int], name: str) -> Reply | None:
        """Read the instance's attribute, one value for each slot if it has one for each."""
        self._status[1] = status_word(Op.GET, self.first)
        try:
            if hasattr(self._env, "get_attr"):
                values = self._env.get_attr(name)
            else:
                values = [getattr(self._env, name)] * self.count
        except BaseException as exc:
            self._note(f"get of {name!r}", exc)
        else:
            self._reply.values = {slot: values[slot - self.first] for slot in slots}
        return self._take_reply()

    def apply(self, slots: Sequence[int], function: Callable[[Any], Any]) -> Reply | None:
        """Call `function` once, with the instance; its result is every slot's."""
        self._status[1] = status_word(Op.APPLY, self.first)
        try:
            value = self._guard.wrap(function)(self._env)
        except BaseException as exc:
            self._note("apply", exc)
        else:
            self._reply.values = dict.fromkeys(slots, value)
        return self._take_reply()

    def set_attr(self, slots: Sequence[int], pairs: Sequence[tuple[str, Any]]) -> Reply | None:
        """Set one value for the whole instance."""
        name, value = pairs[0]
        try:
            if hasattr(self._env, "set_attr"):
                self._env.set_attr(name, [value for _, value in pairs])
            else:
                setattr(self._env, name, value)
        except BaseException as exc:
            self._note(f"set_attr of {name!r}", exc)
        return self._take_reply()

    def snapshot(self, slots: Sequence[int]) -> Reply | None:
        """Not possible slot by slot."""
        return self._no_state("snapshot")

    def restore(self, slots: Sequence[int], states: Sequence[Any]) -> Reply | None:
        """Not possible slot by slot."""
        return self._no_state("restore")

    def close(self) -> Reply | None:
        """Close the instance."""
        self._status[1] = status_word(Op.CLOSE, self.first)
        try:
            self._env.close()
        except BaseException as exc:
            self._note("close", exc)
        return self._take_reply()

    def _no_state(self, doing: str) -> Reply | None:
        error = ConfigError(
            "the slots of a natively vectorised environment have no state of their own"
        )
        self._note(doing, error)
        return self._take_reply()

    def _come_back(self) -> Reply | None:
        self._owes_truncation = False
        last = self._obs.read_batch(self._rows) if self._autoreset == "same_step" else None
        reply = self.reset(None, [self._plan] * self.count)
        if last is not None:
            self._final_obs.write_batch(self._rows, last)
        self._control.truncated[self._slots] = True
        return reply

    def _put_obs(self, obs: Any) -> None:
        rows, plain = self._rows, self._plain_obs
        if plain is not None and put_rows(plain, rows.start, rows.stop, obs):
            return
        spills = self._obs.write_batch(rows, obs)
        for position, spill in (spills or {}).items():
            self._reply.spills[self.first + position] = spill

    def _put_infos(self, infos: dict[str, Any]) -> None:
        for position, info in _split(infos, self.count).items():
            slot = self.first + position
            final_obs = info.pop("final_obs", None)
            if final_obs is not None:
                spill = self._final_obs.writer(self._rows.start + position)(final_obs)
                if spill is not None:
                    self._reply.final_spills[slot] = spill
            final_info = info.pop("final_info", None)
            if final_info:
                self._reply.final_infos[slot] = final_info
            if info:
                self._reply.infos[slot] = info

    def _note(self, doing: str, exc: BaseException) -> None:
        self._guard.let_pass(exc)
        self._reply.failures.append(EnvFailure.of(self.first, doing, exc))

    def _take_reply(self) -> Reply | None:
        if self._reply == self._empty_reply:
            return None
        reply, self._reply = self._reply, Reply()
        return reply


def _by_position(spills: dict[int, Any] | None, first: int) -> dict[int, Any] | None:
    return spills and {slot - first: spill for slot, spill in spills.items()}


def _split(infos: dict[str, Any], count: int) -> dict[int, Info]:
    """Gymnasium's vector form back into one dict per slot that has any."""
    each: dict[int, Info] = {}
    for key, values in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        mask = infos.get(f"_{key}", np.ones(count, np.bool_))
        inner = _split(values, count) if isinstance(values, dict) else values
        for position in np.flatnonzero(mask).tolist():
            value = inner.get(position, {}) if isinstance(values, dict) else inner[position]
            each.setdefault(position, {})[key] = value
    return each

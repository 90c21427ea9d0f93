"""The shared rows of one host's slots: actions are read from them, results are written into them.

What does not fit into a row (a long text, an info that is not made of numbers) goes into the reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from envfleet.engine.detached_copy import detached_copy
from envfleet.engine.infos import Info, InfoWriter, SchemaRegistry
from envfleet.engine.memory import Control, Data
from envfleet.engine.messages import Reply


class HostRows:
    """The rows of the slots `first .. first + count - 1`, and the reply to the command under way.

    Methods count rows from 0; slots are numbered in the whole fleet.
    """

    def __init__(self, first: int, count: int, schemas: SchemaRegistry) -> None:
        self.first, self.count = first, count
        self._reply, self._schemas = Reply(), schemas
        self._last_spill: dict[int, dict[int, Any]] = {}
        """What the last observations of rows spilled."""
        # set until known to be clear: a slot may still carry the infos of a worker that died
        self._has_info = bytearray([1] * count)
        self._all_clear = bytes(count)

    def bind_rows(self, control: Control, data: Data) -> None:
        """Take the rows of these slots."""
        self._data = data
        mine = slice(self.first, self.first + self.count)
        groups, rows = data.group_of[mine], data.row_of[mine]
        where: list[tuple[int, int]] = list(zip(groups.tolist(), rows.tolist(), strict=True))
        self._where = where
        """The space group of each slot, and its row there."""
        self._write_obs = [data.obs[group].writer(row) for group, row in where]
        self._write_final = [data.final_obs[group].writer(row) for group, row in where]
        is_block = bool((groups == groups[0]).all() and (np.diff(rows) == 1).all())
        block = slice(int(rows[0]), int(rows[-1]) + 1)
        self._read_actions: Callable[[], list[Any]] | None = (
            data.actions[where[0][0]].reader(block) if is_block else None
        )
        # item by item and as bytes, memoryviews take a fraction of an array's time
        self._rewards = control.rewards[mine]
        self._reward_of: Any = self._rewards.data
        self._marks = [marks[mine].view(np.uint8).data for marks in control.flags]
        self._infos = InfoWriter(control.infos, control.schemas, self.first, self._schemas)
        self._final_infos = InfoWriter(
            control.final_infos, control.final_schemas, self.first, self._schemas, is_final=True
        )

    def _actions(self, slots: Sequence[int] | None, spills: dict[int, Any] | None) -> list[Any]:
        """The actions of these slots (None: all), with what of them did not fit into their rows."""
        if spills is None and self._read_actions is not None:
            if slots is None:
                return self._read_actions()
            rows = np.array([self._where[slot - self.first][1] for slot in slots], np.intp)
            return self._data.actions[self._where[0][0]].read_each(rows)
        spills = spills or {}
        chosen = range(self.first, self.first + self.count) if slots is None else slots
        return [
            self._data.actions[group].read(row, spills.get(slot))
            for slot, (group, row) in ((slot, self._where[slot - self.first]) for slot in chosen)
        ]

    def _put_final(self, row: int, obs: Any, info: Info) -> None:
        """same_step: keep what an episode ended with.

        It is copied: an environment that reuses its arrays and its dict overwrites them next.
        """
        slot, spill = self.first + row, self._write_final[row](obs)
        # the parent knows of the end even if this worker is lost in the same step
        self._marks[1][row] = 1
        if spill is not None:
            self._reply.final_spills[slot] = spill
        if not info:
            self._final_infos.clear(row)
        elif not self._final_infos.write(row, info):
            self._reply.final_infos[slot] = detached_copy(dict(info))

    def _inform(self, row: int, info: Info) -> None:
        """Replace the info of a row."""
        if not info:
            if self._has_info[row]:
                self._infos.clear(row)
                self._has_info[row] = 0
            return
        self._has_info[row] = 1
        if not self._infos.write(row, info):
            self._reply.infos[self.first + row] = dict(info)

    def _spill(self, row: int, spill: dict[int, Any]) -> None:
        self._last_spill[row] = spill
        self._reply.spills[self.first + row] = spill

    def _written(self, row: int, obs: Any) -> Any:
        """Write an observation into its row, and read it from there."""
        group, index = self._where[row]
        return self._data.obs[group].read(index, self._write_obs[row](obs))

    def _last_obs(self, row: int) -> Any:
        group, index = self._where[row]
        return self._data.obs[group].read(index, self._last_spill.get(row))

    def _mark(
        self, rows: Sequence[int], ends: list[tuple[int, bool, bool]], invalid: Sequence[int]
    ) -> None:
        """Mark which of these rows are ends and which are not transitions."""
        marks = terminated, truncated, invalids = self._marks
        if len(rows) == self.count:
            for mark in marks:
                mark[:] = self._all_clear
        else:
            for row in rows:
                terminated[row] = truncated[row] = invalids[row] = 0
        for row, is_terminated, is_truncated in ends:
            terminated[row], truncated[row] = is_terminated, is_truncated
        for row in invalid:
            invalids[row] = 1

    def _take_reply(self) -> Reply | None:
        """The reply, if it says anything."""
        reply = self._reply
        reply.schemas = self._schemas.take_fresh()
        if not (
            reply.failures
            or reply.schemas
            or reply.infos
            or reply.final_infos
            or reply.spills
            or reply.final_spills
            or reply.values
        ):
            return None
        self._reply = Reply()
        return reply


def one_number(reward: Any, info: dict[str, Any], env: Any) -> tuple[float, dict[str, Any]]:
    """A reward that is no float as one, and the info of its step.

    Environments with several objectives declare a `reward_space`. Their reward is the sum of its
    parts, and the info has these as `vector_reward`.

    Raises:
        TypeError: It is not one number, and no such space was declared.
    """
    try:
        parts = np.asarray(reward)
        if parts.ndim == 1 and getattr(env.unwrapped, "reward_space", None) is not None:
            parts = parts.astype(np.float64)
            return float(parts.sum()), {**info, "vector_reward": parts}
        return float(parts.item()), info
    except Exception:
        raise TypeError(f"the reward must be one number, got {reward!r}") from None

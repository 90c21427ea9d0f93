"""Episodes begun in workers and played here: for levels that take long to make and short to play.

Each worker makes what it is handed, a few at a time, whoever is free; an environment comes back
with its opening. What is lost with a worker is handed out again, and what is lost too often comes
back as None, to be made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import cloudpickle
import gymnasium

from envfleet.engine import ResetPlan
from envfleet.engine.options import StartMethod
from envfleet.llm.places import Anything, batch_of, open_fleet
from envfleet.llm.settings import Tag
from envfleet.llm.turns import Opening, Player

Wanted = tuple[str, int, str]
"""Tag, seed, mode."""
Made = tuple[Any, Opening]
_HANDFULS = 4
"""Per worker: with more they wait less for each other at the end, and cross more often."""
_MOST_LOSSES = 3


class _Maker(gymnasium.Env[Any, Any]):
    """In a slot: a step begins the episodes it is handed."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (Gymnasium's own form)
    observation_space, action_space = Anything(), Anything()

    def __init__(self, tags: Mapping[str, Tag]) -> None:
        self._tags = tags

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return None, {}

    def step(
        self, action: list[tuple[int, Wanted]]
    ) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        made = []
        for env_id, (name, seed, mode) in action:
            env = self._tags[name].make()
            opening = Player(env).begin(seed, mode)
            made.append((env_id, (env, opening)))
        return cloudpickle.dumps(made), 0.0, False, False, {}


class Makers:
    """A fleet whose workers begin episodes for others."""

    def __init__(
        self, tags: Mapping[str, Tag], *, num_workers: int, start_method: StartMethod | None
    ) -> None:
        known = dict(tags)
        self.fleet = open_fleet([lambda: _Maker(known)] * num_workers, num_workers, start_method)
        self._waiting: deque[list[tuple[int, Wanted]]] = deque()
        self._handed: dict[int, list[tuple[int, Wanted]]] = {}
        self.fleet.reset([ResetPlan()] * num_workers)

    def send(self, wanted: Mapping[int, Wanted]) -> None:
        """Begin with these episodes."""
        self.fleet.reset([ResetPlan()] * self.fleet.num_slots)
        todo = list(wanted.items())
        size = max(1, len(todo) // (_HANDFULS * self.fleet.num_slots))
        self._waiting = deque(todo[at : at + size] for at in range(0, len(todo), size))
        self._handed = {}
        for slot in range(self.fleet.num_slots):
            self._hand(slot)

    def recv(self) -> dict[int, Made | None]:
        """All of them, as they are made; None for those that nobody can make there."""
        made: dict[int, Made | None] = {}
        losses = 0
        while self._handed:
            batch = self.fleet.recv(min_slots=1)
            for row, slot in enumerate(batch.slots.tolist()):
                mine = self._handed.pop(slot)
                if batch.valid[row]:
                    made.update(cloudpickle.loads(batch.obs[row]))
                else:
                    losses += 1
                    self.fleet.reset([ResetPlan()], [slot])
                    if losses <= _MOST_LOSSES:
                        self._waiting.append(mine)
                    else:
                        made.update(dict.fromkeys(env_id for env_id, _ in mine))
                self._hand(slot)
        return made

    def close(self) -> None:
        """End the workers."""
        self.fleet.close()

    def _hand(self, slot: int) -> None:
        if self._waiting:
            self._handed[slot] = self._waiting.popleft()
            self.fleet.send(batch_of([self._handed[slot]]), [slot])

"""Episodes that workers begin and this process plays: for levels slow to make and quick to play.

    wanted ─► chunks ─► workers begin them ─► episodes come back and go on here
                  └──► this process begins some too, whenever nothing has come back

Of an environment with `dump_episode` and `load_episode`, as every `TextEnv` has, only the episode
travels, and one environment in a worker begins the episodes of all of its kind. Any other
environment travels whole, built for the one episode. It goes on as it would have where it began.

What is lost with a worker is handed out again. If a worker died of a chunk, only workers begin its
episodes and all others of its tag, one at a time: what kills a worker would kill this process too.
"""

from __future__ import annotations

import math
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import cloudpickle
import gymnasium

from envfleet.engine import Fleet, Incident, ResetPlan
from envfleet.engine.backends.encoding import dumps
from envfleet.engine.options import RestartPolicy, StartMethod
from envfleet.engine.plan import choose_start_method
from envfleet.llm.remote import (
    FLEET_ERRORS,
    FROM_OUTSIDE,
    RemoteValue,
    action_batch,
    describe_loss,
    end_workers,
)
from envfleet.llm.settings import Tag
from envfleet.llm.turns import EpisodeFailure, EpisodeStart, TurnPlayer

PackedEpisode = tuple[bool, bytes]
"""Whether it is an episode without its environment, and the pickle."""
EpisodeSpec = tuple[str, int, str]
"""Tag, seed, mode."""
BegunEpisode = tuple[PackedEpisode, EpisodeStart]
Chunk = list[tuple[int, EpisodeSpec]]
"""Episodes that a worker begins in one step, each with the id of its environment."""

_AHEAD = 2
"""Chunks that a worker has at a time: the next one is ready when it is done with one."""
_SHARE = 3
"""A chunk is 1/`_SHARE` of what is left for each process, at least one episode."""
_LOOK_EVERY_S = 3e-3
"""The longest time for which this process begins episodes of its own before it looks what has come
back; shorter if the smallest chunk must be done sooner."""
_SLOT_LOSSES = 100
"""How many workers may be lost in one slot during a rollout: many episodes begin there."""
_RESET_EVERY = 16
"""Rollouts after which the fleet is reset, so that it forgets the chunks that it was sent."""


# ---- episodes that travel -----------------------------------------------------------------------


class EpisodeStarter:
    """Begins episodes of one kind, for environments in another process to go on with."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._player: TurnPlayer | None = None

    def begin(self, seed: int, mode: str) -> BegunEpisode:
        """Begin the episode of this seed."""
        player = self._player or TurnPlayer(self._make())
        start = player.begin(seed, mode)
        # One that failed may be in any state, and an environment that travels whole is used up.
        is_kept = start.failure is None and can_hand_over(player.env)
        self._player = player if is_kept else None
        return pack_episode(player.env), start


def can_hand_over(env: Any) -> bool:
    """Whether an environment can hand its episode over to another of its kind."""
    return hasattr(env, "dump_episode") and hasattr(env, "load_episode")


def pack_episode(env: Any) -> PackedEpisode:
    """An environment's episode, or the whole environment, ready to travel."""
    if can_hand_over(env):
        # At once: the next episode of this environment may use the same lists.
        return True, pickle.dumps(env.dump_episode(), pickle.HIGHEST_PROTOCOL)
    return False, cloudpickle.dumps(env)


def unpack_episode(packed: PackedEpisode, env: Any) -> Any:
    """The environment in which the episode goes on: `env`, or the one that came."""
    is_episode, content = packed
    if not is_episode:
        return pickle.loads(content)
    env.load_episode(pickle.loads(content))
    return env


class _StarterEnv(gymnasium.Env[Any, Any]):
    """In a slot: a step begins the episodes of a chunk. It has no episodes of its own."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (Gymnasium's own form)
    observation_space, action_space = RemoteValue(), RemoteValue()

    def __init__(self, tags: Mapping[str, Tag]) -> None:
        self._starters = {
            name: EpisodeStarter(partial(Tag.make, tag)) for name, tag in tags.items()
        }

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return None, {}

    def step(self, action: bytes) -> tuple[bytes, float, bool, bool, dict[str, Any]]:
        begun = []
        for env_id, (name, seed, mode) in pickle.loads(action):
            packed, start = self._starters[name].begin(seed, mode)
            # the fields of a dataclass, because pickle takes ten times as long to list them
            begun.append((env_id, packed, (start.state, start.answer, start.failure)))
        return dumps(begun), 0.0, False, False, {}


# ---- workers ------------------------------------------------------------------------------------


class EpisodePrefetcher:
    """A fleet whose workers begin episodes for environments of this process."""

    def __init__(
        self,
        tags: Mapping[str, Tag],
        *,
        num_workers: int,
        start_method: StartMethod | None,
        max_restarts: int,
        fatal_tags: set[str],
    ) -> None:
        """Start the workers.

        Args:
            tags: The tags whose episodes they begin.
            num_workers: How many workers.
            start_method: How they are started.
            max_restarts: How many workers the beginning of one episode may cost.
            fatal_tags: Tags that must not begin here, because workers have died of them; it grows.
        """
        self._tags, self._start_method = dict(tags), start_method
        self._num_processes = num_workers + 1
        self.fleet = self._open()
        self._fatal_tags = fatal_tags
        self._max_restarts = max_restarts
        self._losses: Counter[int] = Counter()
        """How many workers the episode of each environment has cost, in this rollout."""
        self._waiting: deque[tuple[int, EpisodeSpec]] = deque()
        self._for_workers: deque[tuple[int, EpisodeSpec]] = deque()
        """Episodes that only workers may begin, one at a time."""
        self._suspects: set[int] = set()
        """Environments in a chunk that a worker died of, in this rollout."""
        self._handed: dict[int, Chunk] = {}
        """The chunk that each slot is at."""
        self._num_rollouts = 0
        """Rollouts since the last reset of the fleet."""
        self._is_idle = False
        """Whether the last rollout was received to its end."""

    def send(self, wanted: Mapping[int, EpisodeSpec]) -> None:
        """Have workers begin with these episodes."""
        self._repair()
        num_slots = self.fleet.num_slots
        self._waiting, self._handed = deque(wanted.items()), {}
        self._for_workers.clear()
        self._suspects.clear()
        self._losses.clear()
        self._sort_out()
        try:
            if not self._is_idle or self._num_rollouts == _RESET_EVERY:
                self.fleet.reset([ResetPlan()] * num_slots)
                self._num_rollouts = 0
            self._is_idle = False
            # A worker's slots are neighbours: every worker gets a first chunk before any a second.
            for slot in sorted(range(num_slots), key=lambda slot: slot % _AHEAD):
                self._hand_out(slot)
        except FLEET_ERRORS:
            if not self.fleet.quarantined:
                raise  # else `recv` begins them here

    def _repair(self) -> None:
        """Replace workers that are gone, or still busy with a rollout that was interrupted."""
        if not self._is_idle and self._handed:
            end_workers(self.fleet, self._handed)
        if self.fleet.incidents:
            with suppress(*FLEET_ERRORS):  # if none can be started, `recv` does without
                fleet = self._open()
                self.fleet.close()
                self.fleet, self._is_idle = fleet, False

    def _open(self) -> Fleet:
        tags, num_workers = self._tags, self._num_processes - 1
        env_fns = [lambda: _StarterEnv(tags)] * (_AHEAD * num_workers)
        return Fleet(
            env_fns,
            num_workers=num_workers,
            start_method=choose_start_method(self._start_method),
            autoreset="disabled",
            on_failure="restart",
            restarts=RestartPolicy(max_restarts=_SLOT_LOSSES),
        )

    def recv(
        self,
        take: Callable[[int, BegunEpisode], None],
        begin_here: Callable[[int], None],
        fail: Callable[[int, EpisodeFailure], None],
        others: Sequence[int] = (),
    ) -> None:
        """Go on until all episodes have begun.

        Args:
            take: Called with each episode that came back.
            begin_here: Begins an episode in this process.
            fail: Called for each environment that cannot begin.
            others: Environments that begin in this process anyway, before those of `send`.
        """
        only_here = deque(others)
        try:
            self._share(take, begin_here, fail, only_here)
            self._num_rollouts += 1
            self._is_idle = True
        except FLEET_ERRORS as exc:
            if not self.fleet.quarantined:
                raise
            # No worker can be started any more: what is left begins here, if it may.
            error = f"workers died of its kind, and none is left: {str(exc).splitlines()[0]}"
            left = [one for chunk in self._handed.values() for one in chunk]
            for env_id, (tag, _, _) in [*left, *self._waiting, *self._for_workers]:
                if tag in self._fatal_tags:
                    fail(env_id, EpisodeFailure("reset", error))
                else:
                    begin_here(env_id)
            for env_id in only_here:
                begin_here(env_id)

    def _share(
        self,
        take: Callable[[int, BegunEpisode], None],
        begin_here: Callable[[int], None],
        fail: Callable[[int, EpisodeFailure], None],
        only_here: deque[int],
    ) -> None:
        looked_s, each_s = 0.0, _LOOK_EVERY_S
        while self._handed or self._waiting or self._for_workers or only_here:
            has_work = bool(only_here or self._waiting)
            begun_s = time.perf_counter()
            if has_work and begun_s < looked_s + self._patience_s(each_s):
                begin_here(only_here.popleft() if only_here else self._waiting.pop()[0])
                each_s = time.perf_counter() - begun_s
                continue
            batch = self.fleet.recv(min_slots=1, timeout_s=0 if has_work else None)
            for row, slot in enumerate(batch.slots.tolist()):
                if batch.valid[row]:
                    del self._handed[slot]
                    self._hand_out(slot)
                    for env_id, packed, start in pickle.loads(batch.obs[row]):
                        take(env_id, (packed, EpisodeStart(*start)))
                    continue
                self.fleet.reset([ResetPlan()], [slot])
                chunk = self._handed.pop(slot)
                incident = next((one for one in batch.incidents if slot in one.slots), None)
                if incident is None or incident.slot != slot:  # the worker died of another chunk
                    self._waiting.extendleft(reversed(chunk))
                    self._sort_out()
                elif incident.kind == "exception" and not any(map(self._is_for_workers, chunk)):
                    for env_id, _ in chunk:  # one of them cannot be pickled
                        begin_here(env_id)
                else:
                    self._count_loss(chunk, incident, fail)
                self._hand_out(slot)
            looked_s = time.perf_counter()

    def _count_loss(
        self, chunk: Chunk, incident: Incident, fail: Callable[[int, EpisodeFailure], None]
    ) -> None:
        """A worker died of one of these."""
        first = chunk[0][0]
        if len(chunk) == 1:
            self._losses[first] += 1
        has_failed = self._losses[first] > self._max_restarts
        if has_failed:
            error = describe_loss(incident, self._losses[first])
            fail(first, EpisodeFailure("reset", error))
        else:  # the episodes are begun one at a time from now on
            self._suspects.update(env_id for env_id, _ in chunk)
            self._for_workers.extendleft(reversed(chunk))
        if has_failed or incident.exitcode not in FROM_OUTSIDE:
            self._fatal_tags.update(tag for _, (tag, _, _) in chunk)
        self._sort_out()

    def _sort_out(self) -> None:
        """Keep suspects, and all of a fatal tag, from beginning in this process."""
        if self._fatal_tags or self._suspects:
            waiting, self._waiting = self._waiting, deque()
            for one in waiting:
                (self._for_workers if self._is_for_workers(one) else self._waiting).append(one)

    def _is_for_workers(self, one: tuple[int, EpisodeSpec]) -> bool:
        env_id, (tag, _, _) = one
        return env_id in self._suspects or tag in self._fatal_tags

    def _patience_s(self, each_s: float) -> float:
        """How long to go on before looking, if the beginning of one episode takes `each_s`."""
        if not self._handed:
            return math.inf
        return min(_LOOK_EVERY_S, each_s * min(map(len, self._handed.values())))

    def close(self) -> None:
        """End the workers."""
        self.fleet.close()

    def _hand_out(self, slot: int) -> None:
        if self._for_workers:
            chunk = [self._for_workers.popleft()]
        elif self._waiting:
            size = max(1, len(self._waiting) // (_SHARE * self._num_processes))
            chunk = [self._waiting.popleft() for _ in range(size)]
        else:
            return
        self._handed[slot] = chunk
        # As bytes, because the fleet copies what it sends, and a copy of bytes costs nothing.
        self.fleet.send(action_batch([pickle.dumps(chunk)]), [slot])

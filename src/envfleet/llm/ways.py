"""The ways in which one rollout can be played, and the playing.

Law: whatever a way does to the process (seeds, environment variables), afterwards it is as before.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from envfleet.engine.options import StartMethod
from envfleet.errors import EnvfleetError, StartError, StartTimeout, WorkerDied
from envfleet.llm.entries import Cache
from envfleet.llm.manager import EnvStateManager
from envfleet.llm.policies import make_policy
from envfleet.llm.recordings import Recording, record
from envfleet.llm.rollout import play
from envfleet.llm.settings import AgentProxy, Settings, UseMultiprocessing
from envfleet.testing.global_random import shared_states, untouched_states

_TRIES = 3
"""So often an environment may end its worker before nobody dares to play it here."""
_NOT_HERE = "cannot be played by one loop in this process, which it would take along"
_MOST_WATCHED = 4
"""Groups of a kind that are watched for their use of shared random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to play a rollout."""

    name: str
    use_multiprocessing: UseMultiprocessing = False
    max_workers: int = 1
    start_method: StartMethod | None = None
    is_backwards: bool = False
    """Inputs come in another order at every turn."""
    is_one_by_one: bool = False
    """Every environment gets a call of `step` for itself."""
    has_kills: bool = False
    """Before each turn a worker is killed."""
    max_restarts: int | None = None
    """The configuration's own unless given, and one more for each kill."""
    global_seed: int = 1
    """What the random numbers of the whole process are seeded with."""
    has_deadline: bool = True
    """Whether the configuration's deadline counts, if it has one."""
    hash_seed: int | None = None
    """PYTHONHASHSEED of spawned workers: what the order of sets depends on."""


HERE = Way(name="in this process")
AGAIN = replace(HERE, name="in this process, again")
OTHER_RANDOM = replace(
    HERE, name="one by one, other global random numbers", is_one_by_one=True, global_seed=2
)


def ways_for(
    workers: Sequence[int], start_methods: Sequence[StartMethod], configured: UseMultiprocessing
) -> list[Way]:
    """Every way to play that has to give the reference's rollout."""
    ways = [
        AGAIN,
        OTHER_RANDOM,
        replace(HERE, name="in this process, other orders", is_backwards=True),
        Way(name="in threads", use_multiprocessing="threads", max_workers=max(workers)),
    ]
    for method in start_methods:
        for number in workers:
            hash_seed = number if method == "spawn" else None
            note = "" if hash_seed is None else f", PYTHONHASHSEED={hash_seed}"
            ways.append(
                Way(
                    name=f"{_count(number)} by {method}{note}",
                    use_multiprocessing=True,
                    max_workers=number,
                    start_method=method,
                    hash_seed=hash_seed,
                )
            )
    most, method = max(workers), start_methods[0]
    in_workers = Way(name="", use_multiprocessing=True, max_workers=most, start_method=method)
    ways += [
        replace(in_workers, name=f"{_count(most)}, other orders", is_backwards=True),
        replace(
            in_workers,
            name=f"{_count(most)}, one killed before each turn",
            has_kills=True,
        ),
        replace(
            in_workers,
            name=f"{_count(most)}, killed, going on in this process",
            has_kills=True,
            max_restarts=0,
        ),
        # a turn that is played here cannot be cut off, and a manager refuses to pretend it can
        replace(
            in_workers,
            name="begun in workers, played here",
            use_multiprocessing="resets",
            has_deadline=False,
        ),
    ]
    if configured is not False:
        said = configured if isinstance(configured, str) else str(configured).lower()
        ways.append(
            Way(
                name=f"as configured ({said})",
                use_multiprocessing=configured,
                max_workers=most,
                start_method=method,
            )
        )
    return ways


def _count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"


# ---- playing ------------------------------------------------------------------------------------


def played(
    whole: Mapping[str, Any], settings: Settings, proxy: AgentProxy, way: Way, seed: int
) -> Recording:
    """One rollout of the random policy, played this way."""
    changes: dict[str, Any] = {
        "use_multiprocessing": way.use_multiprocessing,
        "max_workers": way.max_workers,
        "start_method": way.start_method,
    }
    if not way.has_deadline:
        changes["step_timeout_s"] = None
    if way.max_restarts is not None:
        changes["max_restarts"] = way.max_restarts
    elif way.has_kills:
        changes["max_restarts"] = settings.max_restarts + proxy.max_turn
    config = {**whole, "es_manager": {**whole["es_manager"], **changes}}
    tags = [tag for tag, _ in settings.groups]
    with _surroundings(way), EnvStateManager(config, settings.mode) as manager:
        stage = _Disturbed(manager, way)
        play(stage, make_policy("random", tags, proxy, seed), proxy, seed=seed)
        return record(manager, stage.calls)


class _Disturbed:
    """A manager, played in another way than it is asked to be."""

    def __init__(self, manager: EnvStateManager, way: Way) -> None:
        self._manager, self._way = manager, way
        self.calls: list[tuple[list[int], list[int]]] = []
        """For each call of `step`: who was asked, and who it gave back."""
        self._num_turns = 0

    def reset(self, seed: int | None = None) -> list[Cache]:
        return self._manager.reset(seed)

    def step(self, all_env_inputs: Sequence[Mapping[str, Any]]) -> list[Cache]:
        if self._way.has_kills:
            self._kill_one()
        self._num_turns += 1
        inputs = all_env_inputs[::-1] if self._way.is_backwards else all_env_inputs
        if not self._way.is_one_by_one:
            return self._call(inputs)
        return [cache for one in inputs for cache in self._call([one])]

    def get_rollout_states(self) -> list[Cache]:
        return self._manager.get_rollout_states()

    def _call(self, inputs: Sequence[Mapping[str, Any]]) -> list[Cache]:
        caches = self._manager.step(inputs)
        asked = [one["env_id"] for one in inputs]
        self.calls.append((asked, [cache["env_id"] for cache in caches]))
        return caches

    def _kill_one(self) -> None:
        pids = self._manager.worker_pids()
        if pids:
            with suppress(ProcessLookupError):
                os.kill(pids[self._num_turns % len(pids)], signal.SIGKILL)


@contextmanager
def _surroundings(way: Way) -> Iterator[None]:
    """What the process around a rollout is like; afterwards it is as before."""
    before = os.environ.get("PYTHONHASHSEED")
    with untouched_states():
        _seed_everybody(way.global_seed)
        if way.hash_seed is not None:
            os.environ["PYTHONHASHSEED"] = str(way.hash_seed)
        try:
            yield
        finally:
            if way.hash_seed is not None:
                del os.environ["PYTHONHASHSEED"]
                if before is not None:
                    os.environ["PYTHONHASHSEED"] = before


def _seed_everybody(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


# ---- who must not be played in this process -----------------------------------------------------


def who_ends_processes(
    whole: Mapping[str, Any],
    settings: Settings,
    proxy: AgentProxy,
    seed: int,
    *,
    max_workers: int,
    start_method: StartMethod,
) -> str | None:
    """A sentence on the first environment that a process cannot play to its end.

    Found out in workers, within the configuration's deadline if it has one.
    """
    changes: dict[str, Any] = {
        "use_multiprocessing": True,
        "max_workers": max_workers,
        "start_method": start_method,
        "sequential_env_types": [],
        "max_restarts": _TRIES - 1,
    }
    config = {**whole, "es_manager": {**whole["es_manager"], **changes}}
    tags = [tag for tag, _ in settings.groups]
    try:
        with _surroundings(HERE), EnvStateManager(config, settings.mode) as manager:
            pids = manager.worker_pids()
            play(manager, make_policy("random", tags, proxy, seed), proxy, seed=seed)
            if manager.worker_pids() == pids:
                return None
            for cache, entry in zip(manager.rollout_cache, manager.envs, strict=True):
                failure = cache.get("failure", {"error": ""})
                if "worker" in failure["error"]:
                    return (
                        f"environment {entry['env_id']} ({entry['tag']}, seed "
                        f"{entry['status'].seed}) {_NOT_HERE}: in {failure['doing']} "
                        f"{failure['error']}"
                    )
    except (WorkerDied, StartTimeout) as exc:
        names = " or ".join(dict.fromkeys(tag.name for tag in tags))
        return f"an environment of {names} {_NOT_HERE}: {str(exc).partition(';')[0]}"
    except EnvfleetError as exc:
        # a class that cannot be put into workers may do well here, and what its constructor raises
        # is better raised here; only what has no class of its own may stand for a death
        return str(exc) if type(exc) is StartError else None
    return None


# ---- random numbers that everybody shares -------------------------------------------------------


def who_draws(
    whole: Mapping[str, Any], settings: Settings, proxy: AgentProxy, seed: int
) -> str | None:
    """A sentence on the first kind of environment that draws from shared random numbers."""
    for tag, count in settings.groups:
        if not count:
            continue
        groups = min(count, _MOST_WATCHED)
        block = {
            "env_groups": groups,
            "group_size": 1,
            "env_configs": {"tags": [tag.name], "n_groups": [groups]},
        }
        manager_block = {**whole["es_manager"], "use_multiprocessing": False, settings.mode: block}
        with _surroundings(Way(name="")):
            watch = _Watch(tag.name)
            with EnvStateManager({**whole, "es_manager": manager_block}, settings.mode) as manager:
                watch.look("its constructor")
                stage = _Watched(manager, watch)
                play(stage, make_policy("random", [tag], proxy, seed), proxy, seed=seed)
            watch.look("close")
        if watch.said is not None:
            return watch.said
    return None


class _Watch:
    """Notices when shared random numbers have moved."""

    def __init__(self, tag: str) -> None:
        self._tag, self._before = tag, shared_states()
        self.said: str | None = None

    def look(self, doing: str) -> None:
        moved = [name for name, state in shared_states().items() if state != self._before[name]]
        if moved and self.said is None:
            self.said = (
                f"{self._tag} draws from {moved[0]} in {doing}, which every environment of a "
                "process shares: draw from a generator of its own, seeded by reset."
            )


class _Watched:
    """A manager whose environments are watched."""

    def __init__(self, manager: EnvStateManager, watch: _Watch) -> None:
        self._manager, self._watch = manager, watch

    def reset(self, seed: int | None = None) -> list[Cache]:
        caches = self._manager.reset(seed)
        self._watch.look("reset")
        return caches

    def step(self, all_env_inputs: Sequence[Mapping[str, Any]]) -> list[Cache]:
        caches = self._manager.step(all_env_inputs)
        self._watch.look("step")
        return caches

    def get_rollout_states(self) -> list[Cache]:
        return self._manager.get_rollout_states()

"""What `verify` looks for first: environments that end their process, or share random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envfleet.engine.options import StartMethod
from envfleet.errors import EnvfleetError, StartError, StartTimeout, WorkerDied
from envfleet.llm.manager import EnvStateManager
from envfleet.llm.manager_types import Cache
from envfleet.llm.policies import make_policy
from envfleet.llm.rollout import play_rollout
from envfleet.llm.settings import AgentProxy, Settings
from envfleet.llm.variants import IN_PROCESS, process_state
from envfleet.testing.global_random import shared_states

_TRIES = 3
"""How many workers an environment may end before it counts as one that ends processes."""
_NOT_HERE = "cannot be played by one loop in this process, which it would take along"
_MOST_WATCHED = 4
"""Groups of a tag that are watched for their use of global random numbers."""


def find_fatal_env(
    whole: Mapping[str, Any],
    settings: Settings,
    proxy: AgentProxy,
    seed: int,
    *,
    max_workers: int,
    start_method: StartMethod,
) -> str | None:
    """A sentence on the first environment that ends its process or passes its deadline.

    It is found by playing in workers, with the configuration's deadline.
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
        with process_state(IN_PROCESS), EnvStateManager(config, settings.mode) as manager:
            pids = manager.worker_pids()
            play_rollout(manager, make_policy("random", tags, proxy, seed), proxy, seed=seed)
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
        # A class that cannot be sent to workers may work here, and what its constructor raises is
        # better raised here. Only a bare StartError may stand for a worker that died.
        return str(exc) if type(exc) is StartError else None
    return None


def find_global_random_use(
    whole: Mapping[str, Any], settings: Settings, proxy: AgentProxy, seed: int
) -> str | None:
    """A sentence on the first tag whose environments draw from global random numbers."""
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
        with process_state(IN_PROCESS):
            watch = _GlobalRandomWatch(tag.name)
            config = {**whole, "es_manager": manager_block}
            with _WatchedManager(config, settings.mode) as manager:
                watch.look("its constructor")
                manager.watch = watch
                policy = make_policy("random", [tag], proxy, seed)
                play_rollout(manager, policy, proxy, seed=seed)
            watch.look("close")
        if watch.finding is not None:
            return watch.finding
    return None


class _GlobalRandomWatch:
    """Notices when global random numbers have been drawn."""

    def __init__(self, tag: str) -> None:
        self._tag, self._before = tag, shared_states()
        self.finding: str | None = None

    def look(self, doing: str) -> None:
        moved = [name for name, state in shared_states().items() if state != self._before[name]]
        if moved and self.finding is None:
            self.finding = (
                f"{self._tag} draws from {moved[0]} in {doing}, which every environment of a "
                "process shares: draw from a generator of its own, seeded by reset."
            )


class _WatchedManager(EnvStateManager):
    """A manager that looks for global random numbers after every call."""

    watch: _GlobalRandomWatch

    def reset(self, seed: int | None = None) -> list[Cache]:
        caches = super().reset(seed)
        self.watch.look("reset")
        return caches

    def step(self, all_env_inputs: Sequence[Mapping[str, Any]]) -> list[Cache]:
        caches = super().step(all_env_inputs)
        self.watch.look("step")
        return caches

"""Variants of playing one rollout: in this process, in threads, in workers that are killed, ...

Law: what a variant changes in the process (seeds, environment variables) is undone afterwards.
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
from envfleet.llm.compare import RolloutRecord, record_rollout
from envfleet.llm.manager import EnvStateManager
from envfleet.llm.manager_types import Cache
from envfleet.llm.policies import make_policy
from envfleet.llm.rollout import play_rollout
from envfleet.llm.settings import AgentProxy, Settings, UseMultiprocessing
from envfleet.testing.global_random import untouched_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One variant of playing a rollout."""

    name: str
    use_multiprocessing: UseMultiprocessing = False
    max_workers: int = 1
    start_method: StartMethod | None = None
    is_backwards: bool = False
    """Whether `step` gets its inputs in reverse order."""
    is_one_by_one: bool = False
    """Whether `step` is called for each environment alone."""
    has_kills: bool = False
    """Whether a worker is killed before each turn."""
    moves_here: bool = False
    """Whether all environments move to this process before the second turn."""
    global_seed: int = 1
    """The seed of the process's global random numbers."""
    has_deadline: bool = True
    """Whether the configuration's deadline is kept."""
    hash_seed: int | None = None
    """PYTHONHASHSEED of spawned workers, which decides the order of sets."""


IN_PROCESS = Variant(name="in this process")
REPEATED = replace(IN_PROCESS, name="in this process, again")
OTHER_RANDOM = replace(
    IN_PROCESS, name="one by one, other global random numbers", is_one_by_one=True, global_seed=2
)


def variants_for(
    workers: Sequence[int], start_methods: Sequence[StartMethod], configured: UseMultiprocessing
) -> list[Variant]:
    """Every variant that has to give the same rollout as `IN_PROCESS`."""
    variants = [
        REPEATED,
        OTHER_RANDOM,
        replace(IN_PROCESS, name="in this process, other orders", is_backwards=True),
        Variant(name="in threads", use_multiprocessing="threads", max_workers=max(workers)),
    ]
    for method in start_methods:
        for number in workers:
            hash_seed = number if method == "spawn" else None
            note = "" if hash_seed is None else f", PYTHONHASHSEED={hash_seed}"
            variants.append(
                Variant(
                    name=f"{_variant_count(number)} by {method}{note}",
                    use_multiprocessing=True,
                    max_workers=number,
                    start_method=method,
                    hash_seed=hash_seed,
                )
            )
    most, method = max(workers), start_methods[0]
    in_workers = Variant(name="", use_multiprocessing=True, max_workers=most, start_method=method)
    variants += [
        replace(in_workers, name=f"{_variant_count(most)}, other orders", is_backwards=True),
        replace(
            in_workers,
            name=f"{_variant_count(most)}, one killed before each turn",
            has_kills=True,
        ),
        replace(
            in_workers,
            name=f"{_variant_count(most)}, killed, going on in this process",
            has_kills=True,
            moves_here=True,
        ),
        # A turn in this process cannot be interrupted, so a manager refuses a deadline there.
        replace(
            in_workers,
            name="begun in workers, played here",
            use_multiprocessing="resets",
            has_deadline=False,
        ),
    ]
    if configured is not False:
        name = configured if isinstance(configured, str) else str(configured).lower()
        variants.append(
            Variant(
                name=f"as configured ({name})",
                use_multiprocessing=configured,
                max_workers=most,
                start_method=method,
            )
        )
    return variants


def _variant_count(workers: int) -> str:
    return f"{workers} worker{'' if workers == 1 else 's'}"


# ---- playing ------------------------------------------------------------------------------------


def play_variant(
    whole: Mapping[str, Any], settings: Settings, proxy: AgentProxy, variant: Variant, seed: int
) -> RolloutRecord:
    """Play one rollout of the random policy, as the variant says."""
    changes: dict[str, Any] = {
        "use_multiprocessing": variant.use_multiprocessing,
        "max_workers": variant.max_workers,
        "start_method": variant.start_method,
    }
    if not variant.has_deadline:
        changes["step_timeout_s"] = None
    if variant.has_kills:
        changes["max_restarts"] = settings.max_restarts + proxy.max_turn
    config = {**whole, "es_manager": {**whole["es_manager"], **changes}}
    tags = [tag for tag, _ in settings.groups]
    with process_state(variant), EnvStateManager(config, settings.mode) as manager:
        varied = _VariedManager(manager, variant)
        play_rollout(varied, make_policy("random", tags, proxy, seed), proxy, seed=seed)
        return record_rollout(manager, varied.calls)


class _VariedManager:
    """A manager whose `step` is called as a variant says."""

    def __init__(self, manager: EnvStateManager, variant: Variant) -> None:
        self._manager, self._variant = manager, variant
        self.calls: list[tuple[list[int], list[int]]] = []
        """For each call of `step`: the environments given, and those returned."""
        self._num_turns = 0

    def reset(self, seed: int | None = None) -> list[Cache]:
        return self._manager.reset(seed)

    def step(self, all_env_inputs: Sequence[Mapping[str, Any]]) -> list[Cache]:
        if self._variant.has_kills:
            self._kill_one()
        if self._variant.moves_here and self._num_turns == 1:
            self._manager.use_multiprocessing = False
        self._num_turns += 1
        inputs = all_env_inputs[::-1] if self._variant.is_backwards else all_env_inputs
        if not self._variant.is_one_by_one:
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
def process_state(variant: Variant) -> Iterator[None]:
    """Set seeds and environment variables as a variant says, and restore them afterwards."""
    before = os.environ.get("PYTHONHASHSEED")
    with untouched_states():
        random.seed(variant.global_seed)
        np.random.seed(variant.global_seed)
        if variant.hash_seed is not None:
            os.environ["PYTHONHASHSEED"] = str(variant.hash_seed)
        try:
            yield
        finally:
            if variant.hash_seed is not None:
                del os.environ["PYTHONHASHSEED"]
                if before is not None:
                    os.environ["PYTHONHASHSEED"] = before

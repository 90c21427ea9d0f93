"""Is a rollout of this configuration the same, however it is played?

    one seed, one policy ─┬─► here, in one loop ──────────────────► recording ─┐
                          └─► threads, workers, kills, any order ─► recording ─┴─► first parting

Owns what the outcome of all ways means. Playing is the business of `ways.py`, comparing that of
`recordings.py`. Law: a configuration that does not even repeat itself in one loop is reported as
that, before any way of playing is blamed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from envfleet.engine.options import StartMethod
from envfleet.errors import ConfigError, EnvfleetError
from envfleet.llm.config import plain
from envfleet.llm.recordings import Parting, Recording, first_parting
from envfleet.llm.settings import AgentProxy, Settings, read_agent_proxy, read_settings
from envfleet.llm.ways import (
    AGAIN,
    HERE,
    OTHER_RANDOM,
    Way,
    played,
    ways_for,
    who_draws,
    who_ends_processes,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one way."""

    way: Way
    seconds: float
    digest: str | None = None
    parting: Parting | None = None
    error: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether it gave the reference's rollout."""
        return self.parting is None and self.error is None


@dataclass(frozen=True, slots=True)
class Verification:
    """All that was found."""

    num_envs: int
    num_turns: int
    """Turns of all environments together."""
    num_failures: int
    """Environments that failed, in the reference."""
    digest: str
    """Of the reference: the same number on another machine means the same rollout."""
    outcomes: tuple[Outcome, ...]
    global_random: str | None
    """Who draws from random numbers that the whole process shares, in a sentence."""

    @property
    def ok(self) -> bool:
        """Whether every way gave one rollout, and will again."""
        return self.global_random is None and all(one.is_equal for one in self.outcomes)

    @property
    def conclusion(self) -> str:
        """All of it in a sentence or two."""
        parted = [one for one in self.outcomes if not one.is_equal]
        if parted:
            first = parted[0]
            what = first.error or str(first.parting)
            is_alone = first.way.name in (AGAIN.name, OTHER_RANDOM.name)
            where = f"The first, {first.way.name}: {what}."
            if is_alone and self.global_random is None:
                where += (
                    " No way of playing can repair that: an episode may depend on its seed, its "
                    "mode and the configuration only."
                )
            random_too = f" {self.global_random}" if self.global_random is not None else ""
            return (
                f"{len(parted)} of {len(self.outcomes)} ways differ from one loop in this process. "
                f"{where}{random_too}"
            )
        if self.global_random is not None:
            return f"All ways were equal, but that is luck. {self.global_random}"
        return (
            f"All {len(self.outcomes)} ways gave the rollout of one loop in this process: every "
            "state, action, reward, info, penalty, metric and status of "
            f"{self.num_envs} environments and {self.num_turns} turns."
        )


def verify(
    config: Any,
    *,
    mode: str = "train",
    seed: int = 0,
    workers: Sequence[int] = (1, 2, 3),
    start_methods: Sequence[StartMethod] = ("fork", "spawn"),
    on_way: Callable[[str], None] = lambda name: None,
) -> Verification:
    """Play one rollout in every way and compare.

    Args:
        config: As for `EnvStateManager`.
        mode: "train" or "val".
        seed: Of the first group, and of the policy that plays.
        workers: Numbers of workers to play with.
        start_methods: How workers are started.
        on_way: Called with the name of each way before it is played.

    Raises:
        EnvfleetError: An environment ends the process that plays it, or passes its deadline; it is
            tried in workers first.
    """
    whole = plain(config)
    settings, proxy = read_settings(whole, mode), read_agent_proxy(whole)
    on_way(HERE.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        deadly = who_ends_processes(
            whole,
            settings,
            proxy,
            seed,
            max_workers=max(workers),
            start_method=start_methods[0],
        )
    if deadly is not None:
        raise EnvfleetError(deadly)
    reference = played(whole, settings, proxy, HERE, seed)
    with warnings.catch_warnings():
        # what the reference said of failures need not be said again, and kills are our own
        warnings.simplefilter("ignore", RuntimeWarning)
        on_way("global random numbers")
        draws = who_draws(whole, settings, proxy, seed)
        outcomes = []
        for way in ways_for(workers, start_methods, settings.use_multiprocessing):
            on_way(way.name)
            outcomes.append(_compared(whole, settings, proxy, way, seed, reference))
    return Verification(
        num_envs=len(reference.environments),
        num_turns=sum(len(one["history"]) - 1 for one in reference.environments),
        num_failures=sum("failure" in one for one in reference.environments),
        digest=reference.digest,
        outcomes=tuple(outcomes),
        global_random=draws,
    )


def _compared(
    whole: dict[str, Any],
    settings: Settings,
    proxy: AgentProxy,
    way: Way,
    seed: int,
    reference: Recording,
) -> Outcome:
    begun_s = time.perf_counter()
    try:
        found = played(whole, settings, proxy, way, seed)
    except ConfigError:
        raise
    except Exception as exc:
        error = f"{type(exc).__name__}: {' '.join(str(exc).split())}"
        return Outcome(way, time.perf_counter() - begun_s, error=error)
    seconds = time.perf_counter() - begun_s
    return Outcome(way, seconds, found.digest, first_parting(reference, found))

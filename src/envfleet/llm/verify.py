"""Does a configuration give the same rollout, however it is played?

    one seed, one policy ─┬─► here, in one loop ──────────────────► record ─┐
                          └─► threads, workers, kills, any order ─► record ─┴─► first difference

This file says what the outcomes mean; `variants.py` plays and `compare.py` compares. Law: a
configuration that does not even repeat itself in one loop is reported as such, before any other
variant is blamed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from envfleet.engine.options import StartMethod
from envfleet.errors import ConfigError, EnvfleetError
from envfleet.llm.compare import RolloutDifference, RolloutRecord, recorded_difference
from envfleet.llm.config import plain_config
from envfleet.llm.settings import AgentProxy, Settings, read_agent_proxy, read_settings
from envfleet.llm.variants import (
    IN_PROCESS,
    OTHER_RANDOM,
    REPEATED,
    Variant,
    play_variant,
    variants_for,
)
from envfleet.llm.verify_checks import find_fatal_env, find_global_random_use


@dataclass(frozen=True, slots=True)
class VariantOutcome:
    """What one variant gave."""

    variant: Variant
    seconds: float
    digest: str | None = None
    difference: RolloutDifference | None = None
    error: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether it gave the same rollout as one loop in this process."""
        return self.difference is None and self.error is None


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcomes of all variants."""

    num_envs: int
    num_turns: int
    """Turns of all environments together."""
    num_failures: int
    """Environments that failed in the reference, which is one loop in this process."""
    digest: str
    """A checksum of the reference: the same on another machine means the same rollout."""
    outcomes: tuple[VariantOutcome, ...]
    global_random: str | None
    """A sentence on environments that draw from global random numbers."""

    @property
    def ok(self) -> bool:
        """Whether all variants gave the same rollout, and not by luck."""
        return self.global_random is None and all(one.is_equal for one in self.outcomes)

    @property
    def conclusion(self) -> str:
        """The outcomes in a sentence or two."""
        different = [one for one in self.outcomes if not one.is_equal]
        if different:
            first = different[0]
            what = first.error or str(first.difference)
            is_alone = first.variant.name in (REPEATED.name, OTHER_RANDOM.name)
            where = f"The first, {first.variant.name}: {what}."
            if is_alone and self.global_random is None:
                where += (
                    " No way of playing can repair that: an episode may depend on its seed, its "
                    "mode and the configuration only."
                )
            random_too = f" {self.global_random}" if self.global_random is not None else ""
            return (
                f"{len(different)} of {len(self.outcomes)} ways differ from one loop in this "
                f"process. {where}{random_too}"
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
    on_variant: Callable[[str], None] = lambda name: None,
) -> Verification:
    """Play one rollout in all variants and compare.

    Args:
        config: As for `EnvStateManager`.
        mode: "train" or "val".
        seed: Of the first group, and of the policy that plays.
        workers: Numbers of workers to play with.
        start_methods: How workers are started.
        on_variant: Called with the name of each variant before it is played.

    Raises:
        EnvfleetError: An environment ends the process that plays it, or passes its deadline. This
            is found in workers, before anything is played here.
    """
    whole = plain_config(config)
    settings, proxy = read_settings(whole, mode), read_agent_proxy(whole)
    on_variant(IN_PROCESS.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        fatal = find_fatal_env(
            whole,
            settings,
            proxy,
            seed,
            max_workers=max(workers),
            start_method=start_methods[0],
        )
    if fatal is not None:
        raise EnvfleetError(fatal)
    reference = play_variant(whole, settings, proxy, IN_PROCESS, seed)
    with warnings.catch_warnings():
        # The reference has warned of failures already, and workers are killed here on purpose.
        warnings.simplefilter("ignore", RuntimeWarning)
        on_variant("global random numbers")
        draws = find_global_random_use(whole, settings, proxy, seed)
        outcomes = []
        for variant in variants_for(workers, start_methods, settings.use_multiprocessing):
            on_variant(variant.name)
            outcomes.append(_compared(whole, settings, proxy, variant, seed, reference))
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
    variant: Variant,
    seed: int,
    reference: RolloutRecord,
) -> VariantOutcome:
    begun_s = time.perf_counter()
    try:
        found = play_variant(whole, settings, proxy, variant, seed)
    except ConfigError:
        raise
    except Exception as exc:
        error = f"{type(exc).__name__}: {' '.join(str(exc).split())}"
        return VariantOutcome(variant, time.perf_counter() - begun_s, error=error)
    seconds = time.perf_counter() - begun_s
    return VariantOutcome(variant, seconds, found.digest, recorded_difference(reference, found))

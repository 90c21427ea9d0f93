"""The options of rollouts with a model, from the block `agent_proxy` of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Annotated, Any, Literal

from envfleet.errors import ConfigError
from envfleet.llm.config import plain_config
from envfleet.llm.trajectories import Trajectory
from envfleet.options import Count, Must, from_mapping, option_class

OnFailure = Literal["retry", "mask", "refill", "raise"]
ParallelBackend = Literal[
    "auto", "fleet", "joblib", "loky", "threading", "multiprocessing", "ray", "sequential"
]
RolloutMode = Literal["asynchronous", "lockstep"]
JOBLIB_BACKENDS = frozenset(("joblib", "loky", "threading", "multiprocessing"))
RewardFunction = Callable[[Trajectory], float]
"""Gets a finished trajectory, and gives a reward that is added to those of its turns."""


CountOrAll = Annotated[int, Must("-1, or 1 or more", lambda number: number == -1 or number >= 1)]


@option_class
@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOptions:
    """How trajectories are played, and what becomes of those that fail."""

    use_parallel_rollout: bool = False
    """Whether environments may leave this process; requests to the model overlap in any case."""
    parallel_n_jobs: CountOrAll = -1
    """Workers; -1 for as many as are of use, which may change while a rollout goes on."""
    parallel_backend: ParallelBackend = "auto"
    """Where environments live; auto leaves this process only where a step takes long."""
    ray_address: str | None = None
    """Of the Ray cluster that the backend ray plays on, host:port or auto; None takes the
    environment variable RAY_ADDRESS, or starts a cluster on this machine."""
    rollout_mode: RolloutMode = "asynchronous"
    """lockstep waits for all answers before any environment goes on, to compare with."""
    on_failure: OnFailure = "retry"
    """What a failed trajectory leads to."""
    max_attempts: Count = 3
    """How often a trajectory (retry) or a group (refill) is played at most."""
    max_invalid_turns: Count | None = None
    """How many turns in a row may name no known action; None for any number."""
    max_context_window: CountOrAll = -1
    """How many turns the model is shown; -1 for all."""
    reward_functions: tuple[str, ...] = ()
    """More rewards for a finished trajectory, each as `module:function`."""
    prompt: str | None = None
    """Writes the messages, as `module:function`; None for the form of RAGEN."""


ROLLOUT_KEYS = tuple(one.name for one in fields(RolloutOptions))
"""Keys of `agent_proxy` that are read here."""


def read_rollout_options(config: Any) -> RolloutOptions:
    """Read the options; keys that are not there have defaults."""
    block = plain_config(config).get("agent_proxy") or {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"agent_proxy must be a mapping, got {block!r:.60}")
    given = {name: block[name] for name in ROLLOUT_KEYS if block.get(name) is not None}
    return from_mapping(RolloutOptions, given, "agent_proxy")


def in_workers(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration with environments in a fleet's workers; None if they leave this process."""
    options = read_rollout_options(config)
    here = ("auto", "sequential", "threading")
    if options.use_parallel_rollout and options.parallel_backend not in here:
        return None
    asked = {"use_parallel_rollout": True, "parallel_backend": "fleet"}
    return {**config, "agent_proxy": {**(config.get("agent_proxy") or {}), **asked}}


def load_function(name: str, option: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"agent_proxy.{option} must be written module:function, got {name!r}")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"agent_proxy.{option} {name!r} cannot be imported: {exc}") from exc
    if not callable(found):
        raise ConfigError(f"agent_proxy.{option} {name!r} is not a function")
    function: Callable[..., Any] = found
    return function

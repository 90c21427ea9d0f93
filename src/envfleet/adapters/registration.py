"""envfleet behind `gymnasium.make_vec`, for libraries that open their environments by it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from envfleet.adapters.gymnasium import FleetVectorEnv, make_vec
from envfleet.adapters.opening import spec_of

__all__ = ["register"]


def register(env_id: str, **options: Any) -> None:
    """Let `gymnasium.make_vec(env_id, n, vectorization_mode="vector_entry_point")` open a fleet.

    The registration is this process's; one that has the same id already gets the fleet in the place
    of its own vector environment, and `gymnasium.make` is what it was.

    Args:
        env_id: A registered id, also as "module:id".
        **options: Those of `make_vec`, such as `num_workers` and `on_failure`.
    """
    spec = spec_of(env_id)
    single = replace(deepcopy(spec), vector_entry_point=None)
    entry = functools.partial(_opened, single, options)
    gymnasium.registry[spec.id] = replace(spec, vector_entry_point=entry)


def _opened(
    spec: EnvSpec, options: Mapping[str, Any], num_envs: int, **kwargs: Any
) -> FleetVectorEnv:
    return make_vec(spec, num_envs, env_kwargs=kwargs, **options)

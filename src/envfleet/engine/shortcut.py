"""The shortest way to step an environment: past wrappers of Gymnasium's that have nothing to do.

What `gymnasium.make` puts around an environment costs four Python calls a step, as much as a tenth
of CartPole's own. Two of those wrappers do nothing after the first steps; the third counts, which
`step_rows` can do for it, in the wrapper's own attributes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

_KNOWN: dict[type, tuple[set[str], ...]] = {
    TimeLimit: ({"env", "step", "_elapsed_steps", "_max_episode_steps"},),
    OrderEnforcing: ({"_has_reset", "ResetNeeded", "super", "step"},),
    PassiveEnvChecker: (
        {"checked_step", "env_step_passive_checker", "env", "step"},
        {
            *("checked_step", "env_step_passive_checker", "env", "step"),
            *("checked_data_reuse", "env_data_reuse_passive_checker", "_previous_data"),
        },
    ),
}
"""The names in the code of each wrapper's step: another version of it is left alone."""


class StepShortcut(NamedTuple):
    """How to step an environment."""

    layer: Any
    """The outermost layer that has something to do, or the environment itself."""
    limit: TimeLimit | None
    """What has to count the steps."""
    is_shortest: bool
    """Whether it is as short as it will ever be."""


def shortest_step(env: Any) -> StepShortcut:
    """The way that does all that `env.step` would do now and later."""
    limit: TimeLimit | None = None
    layer, is_shortest = env, True
    while _is_known(layer):
        if isinstance(layer, TimeLimit):
            if limit is not None:
                break
            limit = layer
        elif not _has_nothing_to_do(layer):
            is_shortest = False
            break
        layer = layer.env
    return StepShortcut(layer, limit, is_shortest)


def _has_nothing_to_do(layer: OrderEnforcing[Any, Any] | PassiveEnvChecker[Any, Any]) -> bool:
    if isinstance(layer, OrderEnforcing):
        return layer._has_reset
    return layer.checked_step and getattr(layer, "checked_data_reuse", True)


def _is_known(layer: Any) -> bool:
    """Whether this is a wrapper of which we know what its step does; subclasses may do more."""
    kind = type(layer)
    if kind not in _KNOWN or "step" in vars(layer):
        return False
    code = getattr(kind.step, "__code__", None)
    return code is not None and {*code.co_names} in _KNOWN[kind]

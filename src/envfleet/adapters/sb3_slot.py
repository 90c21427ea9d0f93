"""What the Stable-Baselines3 adapter runs where an environment lives.

Law: this module imports neither Stable-Baselines3 nor PyTorch, so that a worker process starts
without them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium

MASKS = "envfleet.action_masks"
"""The key of an info that brings the action masks along with the observation."""


class SlotEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The layer around an environment that has action masks, or a `reset` without options."""

    is_sending = False
    """Whether infos bring the masks: from the first time that the caller has asked for them."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._takes_options = _takes_options(env.reset)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset as Stable-Baselines3 does: without options where there are none."""
        if options is None and not self._takes_options:
            obs, info = self.env.reset(seed=seed)
        else:
            obs, info = self.env.reset(seed=seed, options=options)
        return obs, self._with_masks(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; where the episode ends, the reset brings the masks."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            info = self._with_masks(info)
        return obs, reward, terminated, truncated, info

    def _with_masks(self, info: dict[str, Any]) -> dict[str, Any]:
        if not self.is_sending:
            return info
        return {**info, MASKS: self.env.get_wrapper_attr("action_masks")()}


@dataclass(frozen=True, slots=True)
class BuildSlot:
    """Builds the environment of a slot, with the layer above only where it is needed."""

    env_fn: Callable[[], Any]

    def __call__(self) -> Any:
        """Build it."""
        env = self.env_fn()
        if isinstance(env, gymnasium.Env) and (
            env.has_wrapper_attr("action_masks") or not _takes_options(env.reset)
        ):
            return SlotEnv(env)
        return env


def own_env(env: Any) -> Any:
    """The environment as the user's function returned it."""
    return env.env if isinstance(env, SlotEnv) else env


def instance_of(env: Any) -> tuple[int, int]:
    """A value that two slots share only if they hold the same instance."""
    return os.getpid(), id(env.unwrapped)


def video_files(env: Any) -> str | None:
    """Where Gymnasium's `RecordVideo` writes, if the environment is wrapped in it."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.RecordVideo):
            return os.path.join(env.video_folder, f"{env.name_prefix}-*")
        env = env.env
    return None


def masks_of(env: Any) -> Any:
    """The action masks now; from the next step on they come with the infos."""
    if isinstance(env, SlotEnv):
        env.is_sending = True
    return own_env(env).get_wrapper_attr("action_masks")()


def has_attr(name: str, env: Any) -> bool:
    """Whether the environment or one of its wrappers has this name."""
    return bool(own_env(env).has_wrapper_attr(name))


def set_attr(name: str, value: Any, env: Any) -> None:
    """Set the name on the outermost layer."""
    setattr(own_env(env), name, value)


def is_wrapped(module: str, qualname: str, env: Any) -> bool:
    """Whether a wrapper is of the class of this name, or of one that derives from it.

    The class itself stays where it is: to send it here would import its module.
    """
    env = own_env(env)
    while isinstance(env, gymnasium.Wrapper):
        if any((one.__module__, one.__qualname__) == (module, qualname) for one in type(env).mro()):
            return True
        env = env.env
    return False


def _takes_options(reset: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):  # written in C: it cannot be asked
        return True
    return any(one.name == "options" or one.kind is one.VAR_KEYWORD for one in parameters)

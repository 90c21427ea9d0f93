"""Where networks live: what was asked for, if it is there."""

from __future__ import annotations

import torch

from envfleet.errors import ConfigError


def usable_device(name: str) -> str:
    """The device of this name; auto is cuda where there is one, else cpu.

    Raises:
        ConfigError: It cannot be used here.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, TypeError) as exc:
        # PyTorch goes on for pages after its first sentence
        reason = str(exc).partition(". ")[0]
        raise ConfigError(
            f"device {name!r} cannot be used here; try --device cpu ({reason})"
        ) from exc
    return name

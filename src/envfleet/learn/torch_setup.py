"""How PyTorch works here: on which device, and with how many threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from envfleet.engine.machine import usable_cores
from envfleet.errors import ConfigError

__all__ = ["threads", "threads_for_pictures", "usable_device"]


def usable_device(name: str) -> str:
    """The device of this name; auto is cuda if there is one, else cpu.

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
        raise ConfigError(f"device {name!r} cannot be used here; take the CPU ({reason})") from exc
    return name


@contextmanager
def threads(number: int = 1) -> Iterator[None]:
    """Work with this many threads, and afterwards with as many as before.

    Small networks get slower with threads, and workers need the cores. The last digits of sums
    depend on the number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for_pictures() -> int:
    """All cores, or as many of them as OMP_NUM_THREADS allows if it is a whole number."""
    said = os.environ.get("OMP_NUM_THREADS", "").strip()
    most = int(said) if said.isdecimal() else 0
    return min(usable_cores(), most) if most else usable_cores()

"""How many threads PyTorch works with, and for how long."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from envfleet.engine.machine import usable_cores


@contextmanager
def threads(number: int = 1) -> Iterator[None]:
    """As many, and afterwards as many as before.

    Small networks lose by threads, and workers need the cores; sums must not depend on them.
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

"""Workers that spin look busy, so the scheduler may leave two of them on one core.

So each says now and then on which core it runs, and one that finds itself beside another, while
cores are free, moves over. Nobody stays pinned: the allowed cores are the same before and after.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

CHECK_EVERY = 16
"""Commands between two looks; a look costs some microseconds."""
CORE_WORD = 4
"""Which word of a worker's post says its core, plus one."""


def spreader(worker: int, posts: Sequence[memoryview]) -> Callable[[], None]:
    """What `worker` calls every `CHECK_EVERY` commands."""
    current_core = getattr(ctypes.CDLL(None), "sched_getcpu", None)
    if current_core is None or not hasattr(os, "sched_setaffinity"):
        return lambda: None
    mine = posts[worker]
    others = [post for index, post in enumerate(posts) if index != worker]
    before_me = posts[:worker]

    def spread() -> None:
        core = current_core()
        mine[CORE_WORD] = core + 1
        if any(post[CORE_WORD] == core + 1 for post in before_me):
            allowed = os.sched_getaffinity(0)
            free = allowed - {post[CORE_WORD] - 1 for post in others}
            if free:
                os.sched_setaffinity(0, free)
                os.sched_setaffinity(0, allowed)
                mine[CORE_WORD] = current_core() + 1

    return spread

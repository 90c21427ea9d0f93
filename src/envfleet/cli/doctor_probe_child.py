"""Trials that need processes of their own, run by ``doctor`` in a child that can be killed safely.

``python -m envfleet.cli.doctor_probe_child start METHOD`` starts one process with that method and
prints how many seconds it took to answer; ``... wake`` prints round trips of a wake-up in
microseconds. Law: everything started here, even if it hangs, ends with the child's process group.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

_DEADLINE_S = 20.0


def answer(connection: Connection) -> None:
    """What the started process does: say that it is there."""
    connection.send(os.getpid())
    connection.close()


def start_seconds(method: str) -> float:
    """Start a process with ``method`` and wait for its answer.

    Raises:
        TimeoutError: It did not answer in time.
    """
    # the stubs type a context chosen by a string as the base class, which has no Process
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    start_s = time.perf_counter()
    process = context.Process(target=answer, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(_DEADLINE_S):
        process.kill()
        raise TimeoutError(f"no answer in {_DEADLINE_S:g} s")
    try:
        ours.recv()
    except EOFError:
        process.join(_DEADLINE_S)
        raise RuntimeError(f"the child ended with exit code {process.exitcode}") from None
    elapsed_s = time.perf_counter() - start_s
    process.join(_DEADLINE_S)
    return elapsed_s


def wake_round_trips(num: int = 1000) -> list[float]:
    """Ring a bell in another process and wait until it rings back, ``num`` times; microseconds."""
    from envfleet.engine.backends.process.bell import Bell

    there, back = Bell.create(take_waits=True), Bell.create(take_waits=True)
    # two processes that only answer each other are put on one core, where a wake-up is
    # nearly free; a parent and its workers sit on different ones
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    child = os.fork()
    if len(usable) > 1:
        os.sched_setaffinity(0, {usable[1] if child == 0 else usable[0]})
    if child == 0:
        try:
            for _ in range(num):
                there.take()
                back.ring()
        finally:
            os._exit(0)
    trips = []
    for _ in range(num):
        start_s = time.perf_counter()
        there.ring()
        back.take()
        trips.append((time.perf_counter() - start_s) * 1e6)
    os.waitpid(child, 0)
    # the first ones pay for page faults after the fork
    return trips[num // 10 :]


def main(argv: list[str]) -> None:
    """Run one trial and print its result as JSON."""
    match argv:
        case ["start", method]:
            result: object = start_seconds(method)
        case ["wake"]:
            result = wake_round_trips()
        case _:
            raise SystemExit(f"unknown trial {argv}")
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])

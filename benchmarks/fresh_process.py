"""Call a function in fresh processes, several at a time."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

Result = TypeVar("Result")


class EndedEarly(RuntimeError):
    """A process ended without a result."""


def in_fresh_processes(
    work: Callable[..., Result], asked: Sequence[tuple[Any, ...]], jobs: int
) -> Generator[tuple[int, Result], None, None]:
    """Call `work` with each of the given arguments, each time in a fresh process.

    Args:
        work: The function to call. A process must be able to import it.
        asked: The arguments of each call.
        jobs: How many calls may run at the same time.

    Yields:
        The index of a call in `asked` and its result, in the order in which the calls end.

    Raises:
        EndedEarly: A process ended without a result. The others are terminated.
    """
    context = multiprocessing.get_context("spawn")
    to_do = deque(enumerate(asked))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    try:
        while to_do or running:
            while to_do and len(running) < jobs:
                place, arguments = to_do.popleft()
                here, there = context.Pipe(duplex=False)
                sent = (there, work, arguments)
                # not daemonic: those may not start workers
                started = context.Process(target=_answer, args=sent)
                started.start()
                there.close()  # otherwise the end of the process would not close the pipe
                running[here] = place, started
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                place, process = running[pipe]
                try:
                    result = pipe.recv()
                except EOFError:
                    process.join()
                    raise EndedEarly(
                        f"call {place + 1} of {len(asked)} ended with exit code "
                        f"{process.exitcode}; its error is printed above"
                    ) from None
                process.join()
                del running[pipe]
                yield place, result
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


def _answer(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(work(*arguments))

"""Fixtures of the fault tests: a fork server that loads its imports once."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_fork_server() -> Iterator[None]:
    """Preload what every worker imports, which saves half a second for each of a hundred workers.

    A server that runs already was started by other tests and does not preload. That
    workers come up under an ordinary server too is shown by the programs in this folder, each
    of which has its own, and by the conformance suite.
    """
    server = forkserver._forkserver
    server._stop()  # type: ignore[attr-defined]
    multiprocessing.set_forkserver_preload(["envfleet.testing", "tests.faults.stage"])
    yield
    server._stop()  # type: ignore[attr-defined]
    multiprocessing.set_forkserver_preload(["__main__"])

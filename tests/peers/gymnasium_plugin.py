"""A pytest plugin that puts envfleet in the place of Gymnasium's vector environments.

`scripts/gymnasium_tests` loads it for a run over a checkout of Gymnasium. Before a test module is
imported, `gymnasium.vector.SyncVectorEnv` and `AsyncVectorEnv` become doors to `envfleet.make_vec`,
and so does what `gymnasium.make_vec` builds in its modes "sync" and "async". A test then holds exactly
what `make_vec` returns. Arguments that only say how AsyncVectorEnv transports its data are accepted.

Tests of what a fleet does not have are named in `gymnasium_exceptions`, each with its reason. A name
there that no collected test has is an error, so the list cannot outlive what it excuses.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode

import envfleet

from .gymnasium_exceptions import EXCEPTIONS

parallel_backend = "process"
"""What stands for AsyncVectorEnv in this run."""


class _Door(type):
    """Calling such a class opens a fleet; what it opened counts as its instance."""

    opened: weakref.WeakSet[envfleet.FleetVectorEnv]

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None:
        super().__init__(name, bases, body)
        cls.opened = weakref.WeakSet()

    def __call__(cls, *args: Any, **kwargs: Any) -> envfleet.FleetVectorEnv:
        envs = cls.open(*args, **kwargs)  # type: ignore[attr-defined]
        cls.opened.add(envs)
        return envs

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, envfleet.FleetVectorEnv) and instance in cls.opened


class SyncVectorEnv(metaclass=_Door):
    """Takes what Gymnasium's takes, in its order."""

    @staticmethod
    def open(
        env_fns: Iterable[Callable[[], gymnasium.Env]],
        copy: bool = True,
        observation_mode: Any = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> envfleet.FleetVectorEnv:
        refuse(observation_mode != "same", "make_vec has no observation_mode")
        return envfleet.make_vec(
            list(env_fns), backend="serial", copy=copy, autoreset=AutoresetMode(autoreset_mode)
        )


class AsyncVectorEnv(metaclass=_Door):
    """Takes what Gymnasium's takes, in its order."""

    @staticmethod
    def open(
        env_fns: Iterable[Callable[[], gymnasium.Env]],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Any = None,
        observation_mode: Any = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
    ) -> envfleet.FleetVectorEnv:
        refuse(observation_mode != "same", "make_vec has no observation_mode")
        refuse(worker is not None, "a fleet's workers cannot be replaced")
        return envfleet.make_vec(
            list(env_fns),
            num_workers=max_concurrency,
            backend=parallel_backend,
            start_method=context,
            copy=copy,
            autoreset=AutoresetMode(autoreset_mode),
        )


def refuse(is_asked: bool, why: str) -> None:
    """A test that asks for this should have been excepted, even if it expects an error."""
    if is_asked:
        pytest.fail(why)


def bare(node_id: str) -> str:
    """The id without the parameters of the test."""
    return node_id.partition("[")[0]


def unknown(names: Iterable[str], node_ids: Sequence[str]) -> list[str]:
    """Names that neither a test nor a test with all its parameters has, if its file was collected."""
    known = {*node_ids, *map(bare, node_ids)}
    files = {node_id.partition("::")[0] for node_id in node_ids}
    return [name for name in names if name.partition("::")[0] in files and name not in known]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("envfleet")
    group.addoption("--parallel-backend", choices=("process", "thread"), default="process")
    group.addoption("--run-exceptions", action="store_true", help="run only the excepted tests")


def pytest_configure(config: pytest.Config) -> None:
    global parallel_backend
    parallel_backend = config.getoption("--parallel-backend")
    doors: Any = gymnasium.vector
    doors.SyncVectorEnv, doors.AsyncVectorEnv = SyncVectorEnv, AsyncVectorEnv


def pytest_report_header() -> str:
    return f"envfleet {envfleet.__version__} for Sync (serial) and Async ({parallel_backend})"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    node_ids = [item.nodeid for item in items]
    is_selection = any("::" in arg for arg in config.args) or config.getoption("-k")
    if not is_selection and (gone := unknown(EXCEPTIONS, node_ids)):
        raise pytest.UsageError(
            "gymnasium_exceptions.py names tests that this checkout does not have:\n  "
            + "\n  ".join(gone)
        )
    excepted = [
        item for item in items if item.nodeid in EXCEPTIONS or bare(item.nodeid) in EXCEPTIONS
    ]
    rest = [item for item in items if item not in excepted]
    kept, dropped = (excepted, rest) if config.getoption("--run-exceptions") else (rest, excepted)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)

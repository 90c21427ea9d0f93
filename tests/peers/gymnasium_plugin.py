"""A pytest plugin that puts envfleet in the place of Gymnasium's vector environments.

`scripts/gymnasium_tests` loads it for a run over a checkout of Gymnasium. Before a test module is
imported, `gymnasium.vector.SyncVectorEnv` and `AsyncVectorEnv` become doors to `envfleet.make_vec`,
and with them what `gymnasium.make_vec` builds in its modes "sync" and "async". A test then holds
exactly what `make_vec` returns. Arguments that only say how AsyncVectorEnv moves its data are
accepted and mean nothing.

Tests of what a fleet does not have are named in `gymnasium_exceptions`, each with its reason. A
name there that fits no test is an error, so the list cannot outlive what it excuses.
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
        envs: envfleet.FleetVectorEnv = cls.open(*args, **kwargs)  # type: ignore[attr-defined]
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
    """Fail a test that asks for this, even one that expects an error: it is to be excepted."""
    if is_asked:
        pytest.fail(why)


def fits(name: str, node_id: str) -> bool:
    """True if an exception of this name is meant for this test."""
    if name.endswith("*"):
        return node_id.startswith(name.removesuffix("*"))
    return name in (node_id, node_id.partition("[")[0])


def unfit(names: Iterable[str], node_ids: Sequence[str]) -> list[str]:
    """Names that fit no test, among those of files that were collected."""
    files = {node_id.partition("::")[0] for node_id in node_ids}
    return [
        name
        for name in names
        if name.partition("::")[0] in files and not any(fits(name, one) for one in node_ids)
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("envfleet")
    group.addoption("--parallel-backend", choices=("process", "thread"), default="process")
    group.addoption("--only-exceptions", action="store_true", help="run what is excepted instead")


def pytest_configure(config: pytest.Config) -> None:
    global parallel_backend
    parallel_backend = config.getoption("--parallel-backend")
    doors: Any = gymnasium.vector
    doors.SyncVectorEnv, doors.AsyncVectorEnv = SyncVectorEnv, AsyncVectorEnv


def pytest_report_header() -> str:
    return f"envfleet {envfleet.__version__} for Sync (serial) and Async ({parallel_backend})"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    node_ids = [item.nodeid for item in items]
    is_whole = not any("::" in argument for argument in config.args)
    if is_whole and (gone := unfit(EXCEPTIONS, node_ids)):
        raise pytest.UsageError(
            "gymnasium_exceptions names what this checkout does not have: " + ", ".join(gone)
        )
    excepted = [item for item in items if any(fits(name, item.nodeid) for name in EXCEPTIONS)]
    others = [item for item in items if item not in excepted]
    is_turned = config.getoption("--only-exceptions")
    items[:], dropped = (excepted, others) if is_turned else (others, excepted)
    config.hook.pytest_deselected(items=dropped)

"""A pytest plugin that puts envfleet in the place of AgileRL's vector environment.

`scripts/agilerl_tests` loads it for a run over a checkout of AgileRL. Before a test module is
imported, `envfleet.multiagent.AsyncPettingZooVecEnv` with `compat="agilerl"` takes the place of the
class of the same name.

Tests of what a fleet does not have are named in `agilerl_exceptions`, each with its reason. A name
there that fits no test is an error, so the list cannot outlive what it excuses.
"""

import functools
import importlib

import pytest

from envfleet.multiagent import AsyncPettingZooVecEnv

from .agilerl_exceptions import EXCEPTIONS
from .gymnasium_plugin import fits, unfit


def pytest_configure(config: pytest.Config) -> None:
    theirs = importlib.import_module("agilerl.vector.pz_async_vec_env")
    own = functools.partial(AsyncPettingZooVecEnv, backend="process", compat="agilerl")
    theirs.AsyncPettingZooVecEnv = own  # type: ignore[attr-defined]


def pytest_report_header() -> str:
    return "envfleet for AsyncPettingZooVecEnv"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    node_ids = [item.nodeid for item in items]
    is_whole = not any("::" in argument for argument in config.args)
    if is_whole and (gone := unfit(EXCEPTIONS, node_ids)):
        raise pytest.UsageError(
            "agilerl_exceptions names what this checkout does not have: " + ", ".join(gone)
        )
    excepted = [item for item in items if any(fits(name, item.nodeid) for name in EXCEPTIONS)]
    items[:] = [item for item in items if item not in excepted]
    config.hook.pytest_deselected(items=excepted)

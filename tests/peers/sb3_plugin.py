"""A pytest plugin that puts envfleet in the place of Stable-Baselines3's vector environments.

`scripts/sb3_tests` loads it for a run over a checkout of Stable-Baselines3. Before a test module is
imported, `DummyVecEnv` and `SubprocVecEnv` of `envfleet.adapters.sb3` take the places of the
originals wherever Stable-Baselines3 has imported them, so that its algorithms and `make_vec_env`
use them too.

Tests of what a fleet does not have are named in `sb3_exceptions`, each with its reason. A name
there that fits no test is an error, so the list cannot outlive what it excuses.
"""

import importlib
import sys

import pytest

from envfleet.adapters import sb3

from .gymnasium_plugin import fits, unfit
from .sb3_exceptions import EXCEPTIONS

NAMES = ("DummyVecEnv", "SubprocVecEnv")
USERS = (
    "stable_baselines3.common.base_class",
    "stable_baselines3.common.env_util",
    "stable_baselines3.common.evaluation",
    "stable_baselines3.common.callbacks",
)
"""Modules that use the two classes; what they import is replaced as well."""


def put_in_place() -> None:
    """Replace the two classes in every module of Stable-Baselines3 that holds them."""
    for name in USERS:
        importlib.import_module(name)
    originals = importlib.import_module("stable_baselines3.common.vec_env")
    for name in NAMES:
        original, own = getattr(originals, name), getattr(sb3, name)
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("stable_baselines3") and vars(module).get(name) is original:
                setattr(module, name, own)


def pytest_configure(config: pytest.Config) -> None:
    put_in_place()


def pytest_report_header() -> str:
    return "envfleet for DummyVecEnv and SubprocVecEnv"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    node_ids = [item.nodeid for item in items]
    is_whole = not any("::" in argument for argument in config.args)
    if is_whole and (gone := unfit(EXCEPTIONS, node_ids)):
        raise pytest.UsageError(
            "sb3_exceptions names what this checkout does not have: " + ", ".join(gone)
        )
    excepted = [item for item in items if any(fits(name, item.nodeid) for name in EXCEPTIONS)]
    items[:] = [item for item in items if item not in excepted]
    config.hook.pytest_deselected(items=excepted)

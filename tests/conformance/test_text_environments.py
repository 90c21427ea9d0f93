"""The six text environments, made by Gymnasium and checked by its checker."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envfleet.llm.registry import env_type

SIX = ["bandit", "countdown", "frozen_lake", "metamathqa", "sokoban", "webshop"]
WITH_PICTURES = {"frozen_lake", "sokoban"}


@pytest.fixture(params=SIX)
def name(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A type that is registered with Gymnasium during the test."""
    monkeypatch.setenv("ENVFLEET_CACHE", str(tmp_path))
    name: str = request.param
    env_class = env_type(name).env_class
    gymnasium.register(_id(name), entry_point=f"{env_class.__module__}:{env_class.__name__}")
    yield name
    del gymnasium.registry[_id(name)]


def _id(name: str) -> str:
    return f"{name}-v0"


def modes_of(name: str) -> list[str]:
    return ["text", "rgb_array"] if name in WITH_PICTURES else ["text"]


def test_gymnasium_finds_nothing_to_complain_about(name: str) -> None:
    for mode in modes_of(name):
        env = gymnasium.make(_id(name), render_mode=mode)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env.unwrapped)
        env.close()


def test_it_shows_itself_in_the_mode_it_was_made_for(name: str) -> None:
    for mode in modes_of(name):
        env = gymnasium.make(_id(name), render_mode=mode)
        text, _ = env.reset(seed=1)
        assert isinstance(text, str)
        shown = env.render()
        if mode == "text":
            assert isinstance(shown, str)
        else:
            assert isinstance(shown, np.ndarray)
            assert (shown.ndim, shown.shape[2]) == (3, 3)
            assert shown.dtype == np.uint8
        env.close()

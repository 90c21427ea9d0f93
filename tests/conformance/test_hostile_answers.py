"""A manager takes any answer of a player: quickly, without harm, and equally everywhere."""

import os
import threading
import time
from typing import Any

import pytest

from envfleet.llm.config import load_config
from envfleet.llm.manager import EnvStateManager
from tests.unit.llm.laws import HOSTILE

TAGS = ["SimpleSokoban", "FrozenLake", "Bandit", "Countdown", "MetamathQA", "WebShop"]
TURN_S = 0.5
"""For six environments on a busy machine; alone it takes some 15 ms."""


def answered(way: Any) -> list[Any]:
    """The results of all six types for every hostile answer, each in its own episode."""
    changes = ["train.group_size=1", "max_workers=2", f"use_multiprocessing={way}"]
    config = load_config("mixed", [f"es_manager.{change}" for change in changes])
    seen = []
    with EnvStateManager(config) as all_six:
        assert [entry["tag"] for entry in all_six.envs] == TAGS
        for seed, answer in enumerate(HOSTILE):
            turn = [{"env_id": one, "actions": [answer, answer]} for one in range(len(TAGS))]
            took_s: list[float] = []
            while not took_s or (len(took_s) < 4 and took_s[-1] > TURN_S):
                all_six.reset(seed=seed)
                begun_s = time.perf_counter()
                all_six.step(turn)
                took_s.append(time.perf_counter() - begun_s)
            assert min(took_s) < TURN_S
            seen.append(repr(all_six.get_rollout_states()))
            assert not any("failure" in cache for cache in all_six.rollout_cache)
    return seen


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return answered("false")


@pytest.mark.parametrize("way", ["threads", "true", "resets"])
def test_it_is_taken_alike_everywhere(way: str, alone: list[Any]) -> None:
    assert answered(way) == alone


class Refuses:
    """Neither copied nor pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("it stays where it is")

    __deepcopy__ = __reduce__


class Strikes(str):
    """Text that runs code when it is unpickled or read."""

    def __reduce__(self) -> Any:
        return os._exit, (7,)

    def lower(self) -> str:
        raise RuntimeError("must not be read")


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("way", ["false", "threads", "true", "resets"])
@pytest.mark.parametrize(
    ("answer", "is_action"),
    [
        (threading.Lock(), False),
        (Refuses(), False),
        (nested(100_000), False),
        ((number for number in range(3)), False),
        (Strikes("Left"), True),
    ],
    ids=["lock", "refuses", "nested", "generator", "strikes"],
)
def test_what_cannot_travel_is_taken_too(answer: Any, is_action: bool, way: str) -> None:
    changes = ["train.group_size=1", "max_workers=1", f"use_multiprocessing={way}"]
    config = load_config("frozen_lake", [f"es_manager.{change}" for change in changes])
    with EnvStateManager(config) as manager:
        manager.reset(seed=1)
        manager.step([{"env_id": 0, "actions": [answer]}, {"env_id": 1, "actions": ["Left"]}])
        first, second = manager.rollout_cache[:2]
        assert first["history"][0]["actions"] == ([1] if is_action else [])
        assert first["penalty"] == (0 if is_action else -0.1)
        assert second["history"][0]["actions"] == [1]


@pytest.mark.parametrize("tag", ["SimpleSokoban", "FrozenLake", "Bandit"])
def test_what_names_no_action_is_a_penalty(tag: str) -> None:
    config = load_config("mixed", ["es_manager.train.group_size=1"])
    with EnvStateManager(config) as manager:
        for answer in HOSTILE:
            manager.reset(seed=1)
            manager.step([{"env_id": TAGS.index(tag), "actions": [answer]}])
            cache = manager.rollout_cache[TAGS.index(tag)]
            assert cache["penalty"] == -0.1
            assert cache["history"][0]["actions"] == []

"""A manager gives the same rollout wherever environments run, also if workers are killed."""

import os
import signal
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envfleet.llm.manager import EnvStateManager
from tests.unit.llm import games

ACTIONS: dict[str, st.SearchStrategy[Any]] = {
    "Climb": st.sampled_from(["Up", "down", "UP", "sideways", "", "Up "]) | st.none(),
    "Trouble": st.sampled_from(["raise", "exit", "done", "NaN"]) | st.text(max_size=8),
    "Picture": st.text(max_size=8) | st.integers(),
}
WAYS = st.sampled_from(
    [
        {"use_multiprocessing": "auto"},
        {"use_multiprocessing": "threads", "max_workers": 2},
        {"use_multiprocessing": True, "max_workers": 1},
        {"use_multiprocessing": True, "max_workers": 3},
        {"use_multiprocessing": True, "max_workers": 2, "sequential_env_types": ["climb"]},
    ]
)


@st.composite
def plays(draw: st.DrawFn) -> tuple[dict[str, Any], int, list[Any]]:
    """A configuration, a seed, and possible answers for each turn."""
    tags = draw(st.lists(st.sampled_from(list(ACTIONS)), min_size=1, max_size=3, unique=True))
    counts = [draw(st.integers(1, 2)) for _ in tags]
    size = draw(st.integers(1, 3))
    config = games.config(*zip(tags, counts, strict=True), group_size=size, max_restarts=50)
    kinds = [tag for tag, count in zip(tags, counts, strict=True) for _ in range(count * size)]
    said = st.tuples(
        *(st.none() | st.lists(ACTIONS[tag], max_size=4) for tag in kinds),
    )
    turns = draw(st.lists(said, max_size=4))
    return config, draw(st.integers(0, 1000)), turns


def played(config: dict[str, Any], seed: int, turns: list[Any], kills: set[int]) -> Any:
    """Everything visible of a rollout; a worker dies before each of the turns in `kills`."""
    seen: list[Any] = []
    with EnvStateManager(config) as manager:
        manager.reset(seed=seed)
        for number, said in enumerate(turns):
            if number in kills:
                _kill_one(manager, number)
            turn = [
                {"env_id": env_id, "actions": actions, "llm_response": str(actions)}
                for env_id, actions in enumerate(said)
                if actions is not None and not manager.envs[env_id]["status"].terminated
            ]
            seen.append([cache["env_id"] for cache in manager.step(turn)])
        caches = manager.get_rollout_states()
        seen += [[entry["status"] for entry in manager.envs], repr(manager.render())]
        for cache in caches:
            for entry in cache["history"]:
                if "images" in entry:
                    entry["images"] = [picture.tobytes() for picture in entry["images"]]
        return [*seen, caches]


def _kill_one(manager: EnvStateManager, number: int) -> None:
    for remote_envs in manager._placed._remote:
        found = remote_envs.fleet.worker_pids()
        pid = found[number % len(found)]
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:environment .* failed in:RuntimeWarning")
@given(plays(), WAYS, st.sets(st.integers(0, 3), max_size=2))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_one_rollout_everywhere(play: Any, way: dict[str, Any], kills: set[int]) -> None:
    games.register()
    config, seed, turns = play
    config["es_manager"]["use_multiprocessing"] = False
    alone = played(config, seed, turns, set())
    config["es_manager"] |= way
    assert played(config, seed, turns, kills) == alone


@pytest.mark.filterwarnings("ignore:environment .* failed in:RuntimeWarning")
@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_however_workers_start(start_method: str) -> None:
    games.register()
    config = games.config(("Climb", 2), ("Trouble", 1), ("Picture", 1))
    said: Any = (["Up"], ["down", "x"], ["Up", "Up", "Up"], [], ["a"], ["raise"], ["ab"], None)
    turns = [said, (["Up", "Up"], None, None, ["Up"], ["done"], None, None, ["c"])]
    alone = played(config, 7, turns, set())
    config["es_manager"] |= {
        "use_multiprocessing": True,
        "max_workers": 2,
        "start_method": start_method,
    }
    assert played(config, 7, turns, {1}) == alone

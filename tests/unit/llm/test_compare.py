"""Recordings of rollouts: what is in them, and the first thing that differs between two."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from envfleet.llm.compare import (
    RolloutDifference,
    RolloutRecord,
    record_rollout,
    recorded_difference,
)
from envfleet.llm.manager import EnvStateManager
from tests.unit.llm import games


def environment(env_id: int, *turns: dict[str, Any]) -> dict[str, Any]:
    last = {"state": "end", "actions_left": 0}
    return {
        "env_id": env_id,
        "history": [{"state": "s", "actions_left": 5, **turn} for turn in turns] + [last],
        "group_id": 0,
        "tag": "Climb",
        "penalty": 0,
        "metrics": {"Climb/success": 1.0},
        "status": {"terminated": True, "rewards": [1.0]},
        "render": "end",
    }


def turn(reward: float = 1.0, **info: Any) -> dict[str, Any]:
    return {"actions": [1], "reward": reward, "info": {"success": False, **info}}


def recording() -> RolloutRecord:
    environments = (environment(0, turn(), turn()), environment(1, turn(), turn(shake=0.5)))
    return RolloutRecord(environments, (([0, 1], [0, 1]), ([1, 0], [])))


def changed(env_id: int, *path: Any, value: Any) -> RolloutRecord:
    found = deepcopy(recording())
    inner: Any = found.environments[env_id]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


def test_equal_ones_do_not_part() -> None:
    assert recorded_difference(recording(), recording()) is None
    assert recording().digest == recording().digest


@pytest.mark.parametrize(
    ("path", "value", "turn_number", "field", "expected"),
    [
        (("history", 0, "state"), "t", 1, "state", "s"),
        (("history", 1, "reward"), 2.0, 2, "reward", 1.0),
        (("history", 1, "info", "shake"), 0.5000001, 2, "info.shake", 0.5),
        (("history", 1, "info", "new"), 1, 2, "info.new", "<missing>"),
        (("history", 1, "actions"), [1, 1], 2, "actions.length", 1),
        (("history", 2, "actions_left"), 1, 3, "actions_left", 0),
        (("penalty",), -0.1, None, "penalty", 0),
        (("metrics", "Climb/success"), 0.0, None, "metrics.Climb/success", 1.0),
        (("status", "terminated"), False, None, "status.terminated", True),
        (("status", "rewards"), [2.0], None, "status.rewards[0]", 1.0),
        (("render",), "?", None, "render", "end"),
        (("failure",), {"doing": "step"}, None, "failure", "<missing>"),
    ],
)
def test_whatever_differs_is_named(
    path: Any, value: Any, turn_number: Any, field: str, expected: Any
) -> None:
    other = changed(1, *path, value=value)
    found = recorded_difference(recording(), other)
    assert found is not None
    assert (found.env_id, found.tag, found.turn, found.field) == (1, "Climb", turn_number, field)
    assert str(found.expected) == str(expected)
    assert recording().digest != other.digest


def test_the_earliest_turn_is_named_then_the_first_environment() -> None:
    other = changed(0, "history", 1, "reward", value=9.0)
    other.environments[1]["history"][0]["info"]["success"] = True
    found = recorded_difference(recording(), other)
    assert found == RolloutDifference(1, "Climb", 1, "info.success", False, True)
    other.environments[0]["history"][0]["state"] = "t"
    found = recorded_difference(recording(), other)
    assert found is not None
    assert (found.env_id, found.field) == (0, "state")


def test_a_rollout_that_went_on_longer_differs_where_the_other_ended() -> None:
    other = deepcopy(recording())
    other.environments[0]["history"].append({"state": "more", "actions_left": 0})
    found = recorded_difference(recording(), other)
    assert found is not None
    assert (found.env_id, found.turn, found.field, found.got) == (0, 4, "state", "more")


def test_results_come_in_the_order_they_were_asked_for() -> None:
    backwards = RolloutRecord(recording().environments, (([1, 0], [1, 0]), ([1], [])))
    assert recorded_difference(recording(), backwards) is None
    wrong = RolloutRecord(recording().environments, (([1, 0], [0, 1]),))
    assert recorded_difference(recording(), wrong) == RolloutDifference(
        1, "Climb", 1, "order of results", [1, 0], [0, 1]
    )
    twice = RolloutRecord(recording().environments, (([1, 0], [1, 0, 0]),))
    assert recorded_difference(recording(), twice) is not None


def test_it_reads_as_a_sentence() -> None:
    assert str(RolloutDifference(3, "Climb", 2, "reward", 1.0, 2.0)) == (
        "environment 3 (Climb), turn 2: reward is 1.0 in one loop and 2.0 here"
    )
    long = str(RolloutDifference(3, "Climb", None, "render", "x" * 1_000_000, "y\n"))
    assert long.startswith("environment 3 (Climb), at the end: render is 'xxx")
    assert len(long) < 300


def test_a_manager_s_rollout_is_copied_with_its_pictures() -> None:
    games.register()
    with EnvStateManager(games.config(("Picture", 1), group_size=1)) as manager:
        manager.reset(seed=3)
        manager.step(games.inputs(e0=["hello"]))
        manager.get_rollout_states()
        found = record_rollout(manager, [([0], [0])])
        (env,) = found.environments
        manager.rollout_cache[0]["history"][0]["info"]["new"] = 1
        manager.envs[0]["status"].rewards.append(1.0)
    assert np.array_equal(env["history"][1]["images"][0], np.full((2, 3, 3), 5, np.uint8))
    assert "new" not in env["history"][0]["info"]
    assert env["status"] == {
        "truncated": False, "terminated": False, "num_actions": 1, "rewards": [0.0], "seed": 3,
    }  # fmt: skip
    assert found.calls == (([0], [0]),)

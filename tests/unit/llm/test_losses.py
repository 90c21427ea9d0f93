"""What becomes of environments that cost workers."""

import signal
from typing import Any

import pytest

from envfleet.engine import Incident
from envfleet.llm.losses import ALONE, Losses


def lost(kind: Any = "death", exitcode: int | None = -signal.SIGKILL) -> Incident:
    facts: dict[str, Any] = {"seed": None, "options": None, "actions": (), "rng": None}
    facts |= {"is_complete": True, "env_fn": None, "traceback": "", "reason": "why"}
    return Incident(
        kind=kind, slot=0, slots=(0,), worker=0, doing="step", exitcode=exitcode, **facts
    )


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_one_that_is_killed_is_tried_alone_and_fails_at_one_place_only(max_restarts: int) -> None:
    losses = Losses(max_restarts)
    for _ in range(max_restarts):
        assert losses.add(7, lost()).what == "again"
    assert losses.add(7, lost()).what == "alone"
    for place in range(5):  # somebody outside kills at any place
        for _ in range(ALONE - 1):
            assert losses.add(7, lost(), place).what == "alone"
    assert losses.add(7, lost(), 3).what == "failed"
    assert losses.add(8, lost(), 3).what == ("again" if max_restarts else "alone")


@pytest.mark.parametrize("incident", [lost(exitcode=3), lost("timeout", None), lost("exception")])
def test_one_that_fails_by_itself_is_tried_nowhere_else(incident: Incident) -> None:
    assert Losses(0).add(7, incident).what == "failed"


def test_a_new_episode_has_its_whole_budget() -> None:
    losses = Losses(1)
    for _ in range(2):
        assert [losses.add(7, lost()).what for _ in range(5)] == [
            "again",
            "alone",
            "alone",
            "alone",
            "failed",
        ]
        losses.begin_episodes()

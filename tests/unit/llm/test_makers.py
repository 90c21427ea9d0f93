"""Episodes begun by workers and by this process at once."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from envfleet.llm.environments.base import Mode
from envfleet.llm.makers import Makers
from envfleet.llm.moving import arrived
from envfleet.llm.registry import EnvType
from envfleet.llm.settings import Tag
from envfleet.llm.turns import Opening, Player
from tests.unit.llm.games import Climb, ClimbConfig


class Slow(Climb):
    """A level takes longer than this process waits before it looks what has come back."""

    def _begin(self, seed: int, mode: Mode) -> None:
        time.sleep(0.005)
        super()._begin(seed, mode)


TAGS = {
    name: Tag(name, name, EnvType(kind, ClimbConfig), None, 10)
    for name, kind in {"Climb": Climb, "Slow": Slow}.items()
}


@pytest.fixture
def makers() -> Iterator[Makers]:
    opened = Makers(TAGS, num_workers=1, start_method=None)
    yield opened
    opened.close()


def made_of(makers: Makers, tag: str, num: int) -> tuple[dict[int, Opening], list[int]]:
    """How each episode began, and which of them here."""
    openings: dict[int, Opening] = {}
    here: list[int] = []

    def take(env_id: int, made: Any) -> None:
        assert env_id not in openings
        moved, openings[env_id] = made
        assert arrived(moved, TAGS[tag].make()).render() == openings[env_id].state

    def begin_here(env_id: int) -> None:
        assert env_id not in openings
        here.append(env_id)
        openings[env_id] = Player(TAGS[tag].make()).begin(env_id, "val")

    makers.send({env_id: (tag, env_id, "val") for env_id in range(num)})
    makers.recv(take, begin_here)
    return openings, here


@pytest.mark.parametrize("num", [1, 2, 7, 64])
def test_everybody_begins_once_wherever_that_is(makers: Makers, num: int) -> None:
    expected = {seed: Player(Climb()).begin(seed, "val") for seed in range(num)}
    for _ in range(2):
        openings, _ = made_of(makers, "Climb", num)
        assert openings == expected


def test_this_process_does_its_part(makers: Makers) -> None:
    openings, here = made_of(makers, "Slow", 40)
    assert len(openings) == 40
    assert 5 <= len(here) <= 35

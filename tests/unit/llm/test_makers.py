"""Episodes begun by workers and by this process at once."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from envfleet.llm.environments.base import Mode
from envfleet.llm.makers import _RESET_EVERY, Makers
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
    for _ in range(5):  # on a busy machine one of the two may come to nothing
        openings, here = made_of(makers, "Slow", 40)
        assert len(openings) == 40
        if 5 <= len(here) <= 35:
            break
    assert 5 <= len(here) <= 35


def test_what_is_left_of_a_rollout_that_broke_off_is_not_the_next_ones(makers: Makers) -> None:
    made_of(makers, "Climb", 8)
    makers.send({env_id: ("Slow", env_id, "val") for env_id in range(100, 140)})

    def interrupted(env_id: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        makers.recv(lambda env_id, made: None, interrupted)
    makers.send({env_id: ("Slow", env_id, "val") for env_id in range(200, 240)})  # and no recv
    for _ in range(3):
        openings, _ = made_of(makers, "Climb", 8)
        assert sorted(openings) == list(range(8))


def test_the_fleet_keeps_what_it_was_sent_for_a_few_rollouts_only(makers: Makers) -> None:
    lengths = []
    for _ in range(2 * _RESET_EVERY + 2):
        made_of(makers, "Climb", 4)
        lengths.append(len(makers.fleet._logbook.journal.log_of(0).actions))
    assert max(lengths) <= 4 * _RESET_EVERY
    assert sum(after < before for before, after in itertools.pairwise(lengths)) >= 2

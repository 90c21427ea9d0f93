"""Episodes begun by workers and by this process at once."""

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from envfleet.llm import prefetch
from envfleet.llm.environments.base import Mode
from envfleet.llm.prefetch import _RESET_EVERY, EpisodePrefetcher, unpack_episode
from envfleet.llm.registry import EnvType
from envfleet.llm.settings import Tag
from envfleet.llm.turns import EpisodeFailure, EpisodeStart, TurnPlayer
from tests.unit.llm.games import Climb, ClimbConfig


class Slow(Climb):
    """A level takes longer than this process waits before it looks what has come back."""

    def _begin(self, seed: int, mode: Mode) -> None:
        time.sleep(0.005)
        super()._begin(seed, mode)


class Deadly(Slow):
    """Its first beginning ends a worker."""

    def _begin(self, seed: int, mode: Mode) -> None:
        if seed == 0 and multiprocessing.parent_process() is not None:
            os._exit(7)
        super()._begin(seed, mode)


class AllDeadly(Deadly):
    """All of them do."""

    def _begin(self, seed: int, mode: Mode) -> None:
        super()._begin(0, mode)


TAGS = {
    kind.__name__: Tag(kind.__name__, kind.__name__, EnvType(kind, ClimbConfig), None, 10)
    for kind in (Climb, Slow, Deadly, AllDeadly)
}


@pytest.fixture
def makers() -> Iterator[EpisodePrefetcher]:
    opened = EpisodePrefetcher(
        TAGS, num_workers=1, start_method=None, max_restarts=1, fatal_tags=set()
    )
    yield opened
    opened.close()


def made_of(
    makers: EpisodePrefetcher, tag: str, num: int, failed: dict[int, str] | None = None
) -> tuple[dict[int, EpisodeStart], list[int]]:
    """How each episode began, and which of them here; who did not is in `failed`."""
    openings: dict[int, EpisodeStart] = {}
    here: list[int] = []

    def take(env_id: int, made: Any) -> None:
        assert env_id not in openings
        moved, openings[env_id] = made
        assert unpack_episode(moved, TAGS[tag].make()).render() == openings[env_id].state

    def begin_here(env_id: int) -> None:
        assert env_id not in openings
        here.append(env_id)
        openings[env_id] = TurnPlayer(TAGS[tag].make()).begin(env_id, "val")

    def fail(env_id: int, failure: EpisodeFailure) -> None:
        assert failed is not None, failure
        assert env_id not in failed.keys() | openings.keys()
        failed[env_id] = failure.error

    makers.send({env_id: (tag, env_id, "val") for env_id in range(num)})
    makers.recv(take, begin_here, fail)
    return openings, here


@pytest.mark.parametrize("num", [1, 2, 7, 64])
def test_everybody_begins_once_wherever_that_is(makers: EpisodePrefetcher, num: int) -> None:
    expected = {seed: TurnPlayer(Climb()).begin(seed, "val") for seed in range(num)}
    for _ in range(2):
        openings, _ = made_of(makers, "Climb", num)
        assert openings == expected


def test_this_process_does_its_part(makers: EpisodePrefetcher) -> None:
    for _ in range(5):  # on a busy machine one of the two may come to nothing
        openings, here = made_of(makers, "Slow", 40)
        assert len(openings) == 40
        if 5 <= len(here) <= 35:
            break
    assert 5 <= len(here) <= 35


def test_what_a_worker_died_of_begins_in_no_other_process(makers: EpisodePrefetcher) -> None:
    for _ in range(2):
        failed: dict[int, str] = {}
        openings, here = made_of(makers, "Deadly", 40, failed)
        assert failed == {0: "its worker died 2 times in one episode"}
        assert sorted(openings) == list(range(1, 40))
    assert here == []  # nor does any of its kind
    assert made_of(makers, "Slow", 40)[1]


def test_who_is_left_when_all_workers_have_died_of_a_kind_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetch, "_SLOT_LOSSES", 20)
    failed: dict[int, str] = {}
    fatal_tags = {"AllDeadly"}
    makers = EpisodePrefetcher(
        TAGS, num_workers=1, start_method=None, max_restarts=1, fatal_tags=fatal_tags
    )
    openings, _ = made_of(makers, "AllDeadly", 60, failed)
    makers.close()
    assert openings == {}
    assert sorted(failed) == list(range(60))
    assert {error.partition(":")[0] for error in failed.values()} == {
        "its worker died 2 times in one episode",
        "workers died of its kind, and none is left",
    }


def test_workers_that_died_in_many_rollouts_are_there_for_the_next(
    makers: EpisodePrefetcher,
) -> None:
    for _ in range(25):
        failed: dict[int, str] = {}
        made_of(makers, "Deadly", 8, failed)
        assert failed == {0: "its worker died 2 times in one episode"}


def test_what_is_left_of_a_rollout_that_broke_off_is_not_the_next_ones(
    makers: EpisodePrefetcher,
) -> None:
    made_of(makers, "Climb", 8)
    makers.send({env_id: ("Slow", env_id, "val") for env_id in range(100, 140)})

    def interrupted(env_id: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        makers.recv(lambda env_id, made: None, interrupted, lambda env_id, failure: None)
    makers.send({env_id: ("Slow", env_id, "val") for env_id in range(200, 240)})  # and no recv
    for _ in range(3):
        openings, _ = made_of(makers, "Climb", 8)
        assert sorted(openings) == list(range(8))


def test_the_fleet_keeps_what_it_was_sent_for_a_few_rollouts_only(
    makers: EpisodePrefetcher,
) -> None:
    lengths = []
    for _ in range(2 * _RESET_EVERY + 2):
        made_of(makers, "Climb", 4)
        lengths.append(len(makers.fleet._episodes.action_log.log_of(0).actions))
    assert max(lengths) <= 4 * _RESET_EVERY
    assert sum(after < before for before, after in itertools.pairwise(lengths)) >= 2

"""What is put side by side: other people's vectorisers work, and slots are cut between workers."""

import itertools
import sys

import numpy as np
import pytest

from envfleet.cli.contenders import (
    GymnasiumVector,
    PlainLoop,
    SB3Vector,
    Workload,
    gymnasium_can_contend,
    halves,
    has_sb3,
    in_opening_order,
    shares_of,
    timed_steps,
)
from envfleet.cli.env_argument import choose_env
from envfleet.cli.measure import Shares


def workload(env="CartPole-v1", **kwargs):
    return Workload(choose_env(env), 3, **kwargs)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize(
    "make",
    [
        PlainLoop,
        lambda work: GymnasiumVector(work, parallel=False),
        lambda work: GymnasiumVector(work, parallel=True),
        lambda work: SB3Vector(work, parallel=False),
        lambda work: SB3Vector(work, parallel=True),
    ],
    ids=["loop", "gym-sync", "gym-async", "sb3-dummy", "sb3-subproc"],
)
def test_contenders_step(make, autoreset):
    contender = make(workload(autoreset=autoreset))
    contender.open()
    try:
        for _ in range(2):
            measured = contender.run(0.02)

            assert measured.steps >= 3
            assert measured.steps % 3 == 0
            assert measured.seconds >= 0.02
    finally:
        contender.close()


def test_closing_what_never_opened_is_fine():
    work = workload()

    for contender in (PlainLoop(work), GymnasiumVector(work, True), SB3Vector(work, True)):
        contender.close()


def test_everybody_gets_the_same_actions():
    first, second = workload(), workload()

    assert all((a == b).all() for a, b in zip(first.actions, second.actions, strict=True))
    one_by_one = first.actions_one_by_one()
    assert [list(batch) for batch in first.actions] == [list(batch) for batch in one_by_one]


def test_time_is_counted_after_one_uncounted_step():
    calls = itertools.count()

    def step():
        next(calls)
        return 5

    measured = timed_steps(step, 0.001)

    assert measured.steps == 5 * (next(calls) - 1)


@pytest.mark.parametrize(
    ("bounds", "cut"),
    [
        ([(0, 32), (32, 64)], 32),
        ([(0, 3), (3, 5)], 3),
        ([(0, 3), (3, 5), (5, 7)], 3),
        ([(0, 2), (2, 4), (4, 6), (6, 8)], 4),
        ([(0, 4)], 2),
        ([(0, 5)], 3),
        ([(0, 1)], 1),
    ],
)
def test_halves_are_cut_between_workers(bounds, cut):
    first, second = halves(bounds)

    assert np.concatenate([first, second]).tolist() == list(range(bounds[-1][1]))
    assert len(first) == cut


def test_shares_come_from_two_readings():
    before = {"env_s": 1.0, "worker_wait_s": 1.0, "copy_s": 0.0}
    after = {"env_s": 2.5, "worker_wait_s": 1.4, "copy_s": 0.1}

    found = shares_of(before, after, 1.0, 2)

    assert found is not None
    assert (found.env, found.waiting, found.copying) == pytest.approx((0.75, 0.2, 0.1))
    assert shares_of({}, {}, 1.0, 1) is None
    assert shares_of({}, {"env_s": 9.0}, 1.0, 1) == Shares(1.0, 0.0, 0.0)


def test_gymnasium_shares_only_plain_spaces():
    from gymnasium.spaces import Box, Dict, Discrete, Sequence, Text, Tuple

    assert gymnasium_can_contend(Dict(a=Box(0, 1), b=Tuple([Discrete(2)])))
    for space in (Text(5), Sequence(Discrete(2)), Dict(a=Text(5)), Tuple([Text(5)])):
        assert not gymnasium_can_contend(space)


def test_threads_are_started_last():
    class Named:
        def __init__(self, key):
            self.key = key

    order = in_opening_order([Named("thread"), Named("process"), Named("serial")])  # type: ignore[list-item]

    assert [one.key for one in order] == ["process", "serial", "thread"]


def test_sb3_may_be_missing(monkeypatch):
    assert has_sb3()
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    assert not has_sb3()

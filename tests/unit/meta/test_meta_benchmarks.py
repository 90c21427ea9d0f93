"""The rows of benchmarks/meta.py run, and say what they lack."""

import pytest

from benchmarks import meta_rows, peer_pomdp
from benchmarks.rounds import Pace
from envfleet.meta import load_config
from envfleet.observe.progress import Silent

LITTLE = Pace(rounds=1, seconds=0.01, part=0.01)


def test_rows_of_speed_compare_with_one_environment():
    outcome = meta_rows.ROWS["point-robot"](LITTLE, Silent(), "title")
    (line,) = outcome.lines
    assert line.failure is None
    assert line.values[0] > 0
    assert line.target.bound == 7
    assert len(outcome.entries) == 2


def test_acting_for_more_slots_takes_longer_but_not_as_much_longer():
    (line,) = meta_rows.ROWS["inference"](Pace(rounds=3, seconds=0.05), Silent(), "title").lines
    assert line.target.is_ceiling
    assert 0.5 < line.values[0] < 8


def test_without_its_interpreter_the_other_library_s_line_says_how_to_get_it(monkeypatch):
    monkeypatch.delenv(peer_pomdp.PYTHON, raising=False)
    (line,) = meta_rows.ROWS["pomdp-baselines"](LITTLE, Silent(), "title").lines
    assert line.failure is not None
    assert peer_pomdp.PYTHON in line.failure


def test_a_row_that_learns_has_a_curve_for_each_episode():
    outcome = meta_rows.ROWS["grid-navi-rl2"](LITTLE, Silent(), "title")
    assert [line.target.is_ceiling for line in outcome.lines] == [False, True]
    assert len(outcome.curves) == 4
    assert all(line.failure is None for line in outcome.lines)


def test_returns_are_scaled_between_chance_and_knowing():
    task = meta_rows.POINT_ROBOT
    assert (task.scaled(task.random), task.scaled(task.oracle)) == (0, 1)


@pytest.mark.parametrize("task", meta_rows.LEARNING_TASKS.values())
def test_rows_that_learn_have_a_preset(task):
    assert load_config(task.preset).is_rl2

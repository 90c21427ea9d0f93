"""The rows of benchmarks/meta.py run, and say what they lack."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from benchmarks import meta_learning, meta_rows, peer_pomdp
from benchmarks.rounds import Pace
from envfleet.meta import AGENT_ARCHS, load_config
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


def test_agents_are_compared_with_the_one_without_a_memory_seed_by_seed(monkeypatch):
    def done_backwards(work, asked, jobs):
        for place in reversed(range(len(asked))):
            task, seed, _ = asked[place]
            level = {"Memory SAC": 0.9, "RL²": 0.2, "Markov SAC": 0.4}[task.name.split(", ")[1]]
            yield place, [(100, [0.0]), (200, [level + seed / 10])]

    monkeypatch.setattr(meta_learning, "in_fresh_processes", done_backwards)
    outcome = meta_learning.ROWS["wind-returns"](replace(LITTLE, seeds=2), Silent(), "title")
    assert [line.against for line in outcome.lines] == ["Wind-v0, Markov SAC"] * 2
    assert np.allclose([line.rounds[0] for line in outcome.lines], [[0.5, 0.5], [-0.2, -0.2]])
    assert [line.is_met for line in outcome.lines] == [True, False]
    assert [np.round(one.last, 9).tolist() for one in outcome.curves] == [
        [0.9, 1.0],
        [0.2, 0.3],
        [0.4, 0.5],
    ]


def test_returns_are_scaled_between_chance_and_knowing():
    scale = meta_learning.POINT_ROBOT
    assert (scale.of(scale.random), scale.of(scale.oracle)) == (0, 1)


AGENTS = [*meta_learning.ALONE.values(), *chain(*meta_learning.COMPARED.values())]


@pytest.mark.parametrize("task", AGENTS, ids=lambda task: task.name)
def test_rows_that_learn_have_a_preset(task):
    config = load_config(task.preset, task.changes)
    assert config.is_rl2 == ("RL²" in task.name)
    assert config.env.oracle == ("sees the task" in task.name)
    if not config.is_rl2:
        assert (config.policy.arch is AGENT_ARCHS.Markov) == ("Markov" in task.name)


@pytest.mark.parametrize("tasks", meta_learning.COMPARED.values())
def test_agents_that_are_compared_learn_from_as_many_steps(tasks):
    assert len({meta_learning.steps(task) for task in tasks}) == 1


def test_rows_of_speed_and_rows_that_learn_have_names_of_their_own():
    assert not vars(meta_rows).keys() & {name.replace("-", "_") for name in meta_learning.ROWS}

"""Elo's ratings: known values, consistency, and results that leave no finite answer."""

import math

import numpy as np
import pytest

from envfleet.multiagent.elo import elo


def scores(*rows):
    return np.array(rows, float)


@pytest.mark.parametrize(
    ("won", "lost", "difference"),
    [(50, 50, 0.0), (75, 25, 190.848502), (10, 1, 400.0), (100, 1, 800.0), (64, 36, 99.950989)],
)
def test_two_players_differ_by_what_the_model_says(won, lost, difference):
    rated = elo(scores([0, won], [lost, 0]), added_draws=0)
    assert rated.points[0] - rated.points[1] == pytest.approx(difference, abs=1e-3)
    assert sum(rated.points) == pytest.approx(0)


def test_draws_count_half():
    drawn = elo(scores([0, 60 + 15], [10 + 15, 0]))
    assert drawn == elo(scores([0, 75], [25, 0]))


def test_ratings_that_made_the_results_are_found_again():
    true = np.array([0.0, 120.0, 300.0, -80.0])
    expected = 1 / (1 + 10 ** ((true[None] - true[:, None]) / 400))
    np.fill_diagonal(expected, 0)
    rated = elo(1000 * expected, reference=0, added_draws=0)
    np.testing.assert_allclose(rated.points, true, atol=1e-6)


def test_players_who_never_met_are_compared_by_those_who_did():
    three = scores([0, 75, 0], [25, 0, 75], [0, 25, 0])
    rated = elo(three, reference=2, added_draws=0)
    np.testing.assert_allclose(rated.points, [2 * 190.848502, 190.848502, 0], atol=1e-4)


def test_whoever_won_everything_is_rated_high_but_not_infinitely():
    few, many = (elo(scores([0, won], [0, 0]), reference=1).points[0] for won in (10, 1000))
    assert few == pytest.approx(400 * math.log10(10.5 / 0.5))
    assert many == pytest.approx(400 * math.log10(1000.5 / 0.5))


def test_the_error_is_the_model_s_and_shrinks_with_the_games():
    rated = elo(scores([0, 50], [50, 0]), reference=1, added_draws=0)
    # one difference, of which each of n games tells a fourth: its deviation is 2 / sqrt(n)
    assert rated.errors[0] == pytest.approx(1.96 * 2 / 10 * 400 / math.log(10))
    assert rated.errors[1] == 0
    more = elo(scores([0, 200], [200, 0]), reference=1, added_draws=0)
    assert more.errors[0] == pytest.approx(rated.errors[0] / 2)

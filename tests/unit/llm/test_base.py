"""Which action is meant: numbers as Gymnasium has them, names in any case, and nothing else."""

import numpy as np
import pytest

from envfleet.llm.environments.base import action_number

NAMES = {1: "Left", 2: "Straße"}


@pytest.mark.parametrize(
    ("action", "number"),
    [
        (1, 1), (np.int64(2), 2), (np.uint8(1), 1), (np.array(2), 2), ("Left", 1), ("lEFT", 1),
        ("straße", 2), (0, None), (3, None), (1.0, None), ("1", None), (" Left", None),
        ("Left!", None), ("", None), (None, None), (np.array([1]), None), (10**400, None),
    ],
)  # fmt: skip
def test_a_number_or_a_name(action, number):
    assert action_number(action, NAMES) == number


def test_of_nothing_nothing_is_chosen():
    assert action_number("Left", {}) is action_number(1, {}) is None

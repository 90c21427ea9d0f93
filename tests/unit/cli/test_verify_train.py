"""What ``verify train`` compares and names; rollouts and states may have any fields."""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from envfleet.cli.train_args import StartOptions, TrainArgs
from envfleet.cli.verify_train import (
    ITERATIONS,
    Compared,
    TrainDifference,
    rollout_difference,
    runs_of,
    side_by_side,
    state_difference,
    train_conclusion,
)
from envfleet.learn.environments import opened
from envfleet.learn.ppo import PPOOptions
from envfleet.learn.train import TrainOptions
from envfleet.observe.progress import Silent

TIMES, SLOTS = 6, 3


@dataclass
class Experience:
    """Like a trainer's, with nested observations and things that are no rows."""

    obs: dict[str, Any] = field(
        default_factory=lambda: {
            "image": np.zeros((TIMES, SLOTS, 2, 2), np.uint8),
            "speed": torch.zeros(TIMES, SLOTS),
        }
    )
    actions: Any = field(default_factory=lambda: np.zeros((TIMES, SLOTS), np.int64))
    rewards: Any = field(default_factory=lambda: np.full((TIMES, SLOTS), np.nan, np.float32))
    successors: Any = field(default_factory=lambda: np.zeros((TIMES, SLOTS), np.float32))
    memory: Any = field(default_factory=lambda: np.zeros((SLOTS, 4), np.float32))
    episodes: list[tuple[float, int]] = field(default_factory=lambda: [(1.0, 2)])


def changed(**places):
    """An experience in which these fields differ at these places."""
    found = Experience()
    for name, place in places.items():
        array = found.obs[name] if name in found.obs else getattr(found, name)
        array[place] = 7
    return found


def test_equal_experience_does_not_part():
    assert rollout_difference(Experience(), Experience(), 1) is None


@pytest.mark.parametrize(
    ("places", "name", "step", "slot"),
    [
        ({"actions": (4, 1)}, "actions", 4, 1),
        ({"image": (3, 2, 1, 0)}, "obs.image", 3, 2),
        ({"speed": (5, 0)}, "obs.speed", 5, 0),
        # the earliest, whatever comes first among the fields
        ({"image": (3, 2), "rewards": (2, 2)}, "rewards", 2, 2),
        # at the same time: the first slot, then the first field
        ({"image": (3, 2), "rewards": (3, 1)}, "rewards", 3, 1),
        ({"actions": (3, 1), "rewards": (3, 1)}, "actions", 3, 1),
        # what looks ahead differs before its cause
        ({"image": (4, 0), "successors": (3, 0)}, "obs.image", 4, 0),
        ({"successors": (3, 0)}, "successors", 3, 0),
    ],
)
def test_the_first_row_that_differs_is_named(places, name, step, slot):
    found = rollout_difference(Experience(), changed(**places), 9)

    assert found is not None
    assert (found.iteration, found.field, found.step, found.slot) == (9, name, step, slot)


def test_what_has_no_rows_is_compared_too():
    found = rollout_difference(Experience(), changed(memory=(1, 3)), 2)
    assert found == TrainDifference(2, "memory[1, 3]", 0.0, 7.0)

    found = rollout_difference(Experience(), Experience(episodes=[(1.0, 3)]), 2)
    assert found == TrainDifference(2, "episodes[0][1]", 2, 3)


def test_a_bit_is_enough():
    other = Experience(rewards=np.full((TIMES, SLOTS), np.nan, np.float32))
    other.successors[1, 1] = -0.0

    found = rollout_difference(Experience(), other, 1)

    assert found is not None
    assert found.field == "successors"


def test_another_shape_or_type_is_a_difference():
    short = Experience(actions=np.zeros((TIMES, SLOTS, 2), np.int64))
    narrow = Experience(actions=np.zeros((TIMES, SLOTS), np.int32))

    for other in (short, narrow):
        found = rollout_difference(Experience(), other, 1)
        assert found is not None
        assert (found.field, found.step) == ("actions", None)
        assert found.expected == "int64[6, 3]"


def test_a_parameter_is_named():
    state = {"policy": {"actor.0.weight": torch.zeros(4, 3)}, "obs_norm": None}
    other = {"policy": {"actor.0.weight": torch.zeros(4, 3)}, "obs_norm": None}
    assert state_difference(state, other, 3) is None

    other["policy"]["actor.0.weight"][3, 2] = 1e-30  # type: ignore[index]
    found = state_difference(state, other, 3)

    assert found is not None
    assert found.field == "policy.actor.0.weight[3, 2]"
    assert found.place == "iteration 3"


class TestRuns:
    ASKED = TrainArgs(StartOptions(), TrainOptions("CartPole-v1", n_envs=8), PPOOptions())

    def test_are_short_and_unlike_unless_asked_otherwise(self):
        one, two = runs_of(self.ASKED)

        assert one.num_episodes == two.num_episodes == ITERATIONS
        assert (one.backend, one.num_workers, one.parallel_start_method) == ("serial", None, None)
        assert (two.backend, two.num_workers, two.parallel_start_method) == ("process", 3, "spawn")

    def test_take_what_was_asked_for(self):
        options = TrainOptions(
            "CartPole-v1", num_workers=2, parallel_start_method="fork", num_episodes=7
        )
        one, two = runs_of(replace(self.ASKED, options=options, said=frozenset({"num_episodes"})))

        assert one.num_episodes == 7
        assert (two.num_workers, two.parallel_start_method) == (2, "fork")

    def test_have_no_more_workers_than_environments(self):
        options = TrainOptions("CartPole-v1", n_envs=1)

        assert runs_of(replace(self.ASKED, options=options))[1].num_workers == 1

    def test_have_deadlines_only_where_there_can_be_some(self):
        options = TrainOptions("CartPole-v1", step_timeout_s=5.0, reset_timeout_s=60.0)

        one, other = runs_of(replace(self.ASKED, options=options))

        assert not one.has_deadlines
        assert (other.step_timeout_s, other.reset_timeout_s) == (5.0, 60.0)

    def test_may_be_the_same_twice(self):
        options = TrainOptions("CartPole-v1", backend="serial")

        one, two = runs_of(replace(self.ASKED, options=options))
        assert one == two


class TestSideBySide:
    PPO = PPOOptions(n_steps=8, batch_size=16, n_epochs=1, hidden=(8,), normalise_obs=True)
    OPTIONS = TrainOptions("CartPole-v1", n_envs=2, backend="serial")

    @pytest.fixture
    def trainers(self):
        with ExitStack() as stack:
            yield [stack.enter_context(opened(self.OPTIONS, self.PPO)) for _ in range(2)]

    def compared(self, trainers):
        with Silent().bar("", 3) as bar:
            one, two = trainers
            return side_by_side(one, two, 3, bar)

    def test_equal_trainers(self, trainers):
        parting, compared = self.compared(trainers)

        assert parting is None
        assert (compared.iterations, compared.transitions) == (3, 3 * 8 * 2)
        assert {"obs", "actions", "rewards", "ended"} <= set(compared.fields)
        policy = trainers[0].policy
        assert compared.parameters >= sum(part.numel() for part in policy.parameters())

    def test_a_learner_that_differs_is_told_by_its_parameter(self, trainers, monkeypatch):
        learn = trainers[1].learn

        def learn_and_slip(rollout, progress):
            learned = learn(rollout, progress)
            if progress > 0:
                with torch.no_grad():
                    next(iter(trainers[1].policy.parameters())).view(-1)[0] += 1
            return learned

        monkeypatch.setattr(trainers[1], "learn", learn_and_slip)

        parting, _ = self.compared(trainers)

        name = next(name for name, _ in trainers[1].policy.named_parameters())
        assert parting is not None
        assert (parting.iteration, parting.step) == (2, None)
        assert parting.field.startswith(f"policy.{name}[0")

    def test_another_beginning_is_told_before_the_first_iteration(self, trainers):
        with torch.no_grad():
            next(iter(trainers[1].policy.parameters())).view(-1)[0] += 1

        parting, _ = self.compared(trainers)

        assert parting is not None
        assert parting.place == "before the first iteration"


class TestConclusions:
    ONE = TrainOptions("CartPole-v1", n_envs=4, backend="serial")
    TWO = replace(ONE, backend="process", num_workers=3, parallel_start_method="spawn")
    COMPARED = Compared(5, 1280, ("obs", "actions"), 9155)

    def test_equal(self):
        assert train_conclusion(None, self.COMPARED, self.ONE, self.TWO) == (
            "Equal, bit by bit, in this process and in 3 worker processes (spawn): 1,280 "
            "transitions of 4 environments (obs, actions) and 9,155 parameters after each of 5 "
            "updates."
        )

    @pytest.mark.parametrize(
        ("parting", "said"),
        [
            (
                TrainDifference(2, "obs", np.zeros(2), np.ones(2), 5, 1),
                "They differ in iteration 2, step 5, slot 1: obs is [0. 0.] in this process and "
                "[1. 1.] in 3 worker processes (spawn). That comes from the environment; look "
                "closer with: envfleet verify CartPole-v1",
            ),
            (
                TrainDifference(2, "log_probs", 1.0, 2.0, 5, 1),
                "They differ in iteration 2, step 5, slot 1: log_probs is 1.0 in this process and "
                "2.0 in 3 worker processes (spawn). The observations were equal, so the cause "
                "lies in the networks: threads, or a GPU.",
            ),
            (
                TrainDifference(0, "policy.x[0]", 1.0, 2.0),
                "They differ before the first iteration: policy.x[0] is 1.0 in this process and "
                "2.0 in 3 worker processes (spawn). The experience was equal, so the cause lies in "
                "the learner: threads, or a GPU.",
            ),
        ],
    )
    def test_different(self, parting, said):
        assert train_conclusion(parting, self.COMPARED, self.ONE, self.TWO) == said

"""Experience of several agents: what is credited to whom, with masks, deaths and lost slots."""

import functools
import warnings
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from envfleet import errors
from envfleet.errors import SnapshotError
from envfleet.learn.advantages import advantages
from envfleet.learn.ppo import PPOOptions
from envfleet.multiagent.agent_trainer import AgentTrainer
from envfleet.multiagent.stepping import TeamStepping, TurnStepping
from tests.unit.multiagent.dying_agents import (
    DyingAgents,
    DyingAgentsParallel,
    boxes,
    numbered_actions,
)
from tests.unit.multiagent.played_by_hand import (
    Collected,
    assert_rows_as_by_hand,
    steps_by_hand,
    turns_by_hand,
)
from tests.unit.multiagent.small_game import Guessing

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.classic import connect_four_v3

HERE: dict[str, Any] = {"backend": "serial", "copy": False}
OPTIONS = PPOOptions(n_steps=12, batch_size=32, n_epochs=2, hidden=(8,))


class _Masking:
    """At least one action is allowed, and no other may be taken."""

    def draw(self):
        super().draw()  # type: ignore[misc]
        for seen in self.seen.values():  # type: ignore[attr-defined]
            if isinstance(seen, dict):
                seen["action_mask"][0] = 1

    def carry_out(self, agent, action):
        if self.has_masks:  # type: ignore[attr-defined]
            assert self.seen[agent]["action_mask"][action]  # type: ignore[attr-defined]
        super().carry_out(agent, action)  # type: ignore[misc]


class Turns(_Masking, DyingAgents):
    pass


class Team(_Masking, DyingAgentsParallel):
    pass


def trained_on(stepping, make, options=OPTIONS, num_slots=3, seed=5, **more):
    vec = stepping([make] * num_slots, **(HERE | more))
    return AgentTrainer(vec, options, seed=seed)


def collected_on(stepping, make, times=3, **more):
    trainer = trained_on(stepping, make, **more)
    return Collected(trainer, [trainer.collect() for _ in range(times)])


TURNS = {
    "masked": functools.partial(Turns, is_truncating=True),
    "several choices": functools.partial(Turns, numbered_actions(), False, True),
    "boxes": functools.partial(Turns, boxes(), False, True),
    "connect four": connect_four_v3.env,
}


@pytest.mark.parametrize("make", TURNS.values(), ids=TURNS.keys())
def test_a_reward_between_two_turns_belongs_to_the_first(make):
    collected = collected_on(TurnStepping, make)
    for slot in range(3):
        env = make()
        actions = {name: collected.actions(slot, name) for name in env.possible_agents}
        rows = turns_by_hand(env, 5 + slot, actions, 36)
        assert sum(map(len, rows.values())) > 20
        assert_rows_as_by_hand(collected, slot, rows)


TEAMS = {
    "masked": functools.partial(Team, is_truncating=True),
    "boxes": functools.partial(Team, boxes(), False, True),
}


@pytest.mark.parametrize("make", TEAMS.values(), ids=TEAMS.keys())
def test_a_team_s_rows_are_its_members_steps(make):
    collected = collected_on(TeamStepping, make)
    for slot in range(3):
        env = make()
        actions = {name: collected.actions(slot, name) for name in env.possible_agents}
        assert_rows_as_by_hand(collected, slot, steps_by_hand(env, 5 + slot, actions, 36))


def test_advantages_go_from_turn_to_turn_of_one_agent():
    collected = collected_on(TurnStepping, connect_four_v3.env, times=1)
    (made,) = collected.rollouts[0].values()
    found = advantages(
        made.rewards,
        made.values,
        made.successors,
        made.ended,
        made.valid,
        gamma=0.9,
        gae_lambda=0.5,
    )
    env = connect_four_v3.env()
    actions = {name: collected.actions(0, name) for name in env.possible_agents}
    for agent, rows in turns_by_hand(env, 5, actions, 12).items():
        later = 0.0
        for (_, at, lane), row in reversed(list(zip(collected.lane(0, agent), rows, strict=True))):
            then = 0.0 if row.is_ended else collected.worth(agent, row.then)
            surprise = row.reward + 0.9 * then - collected.worth(agent, row.obs)
            later = surprise + (0.0 if row.is_ended else 0.45 * later)
            np.testing.assert_allclose(found[at, lane], later, atol=1e-5)


def test_a_row_that_waited_for_its_reward_keeps_the_probability_it_was_drawn_by():
    trainer = trained_on(TurnStepping, connect_four_v3.env)
    (first,) = trainer.collect().values()
    kept = trainer.state()["collector"]["lanes"]["player"]
    waiting = np.flatnonzero(kept["open"])
    assert len(waiting)
    before = deepcopy(trainer.agents["player"])
    trainer.learn({"player": first})
    (second,) = trainer.collect().values()
    for who, is_same in ((before, True), (trainer.agents["player"], False)):
        leaves = who.tensors(tuple(leaf[0, waiting] for leaf in second.obs))
        allowed = who.tensor(second.masks[0, waiting])
        said, _ = who.policy.respond(leaves, who.fresh_states(len(waiting)), allowed)
        then = who.policy.head.log_prob(said, who.tensor(second.actions[0, waiting])).detach()
        assert np.allclose(then, second.log_probs[0, waiting], atol=1e-6) == is_same


@pytest.mark.parametrize("stepping", [TurnStepping, TeamStepping])
def test_each_agent_remembers_its_own_turns(stepping):
    make = functools.partial(Turns if stepping is TurnStepping else Team, boxes(), False, True)
    options = PPOOptions(n_steps=12, batch_size=64, hidden=(8,), memory="gru", memory_size=4)
    trainer = trained_on(stepping, make, options)
    collected = Collected(trainer, [trainer.collect() for _ in range(3)])
    for agent in trainer.vec.agents:
        policy = trainer.agents[collected._place(agent)[0].name]
        for slot in range(3):
            states, is_new = policy.fresh_states(1), False
            for made, at, lane in collected.lane(slot, agent):
                if is_new:
                    states = policy.fresh_states(1)
                leaves = policy.tensors(tuple(leaf[at, lane][None] for leaf in made.obs))
                value = policy.policy.value(leaves, states).detach()
                said, states = policy.policy.respond(leaves, states, None)
                action = torch.from_numpy(made.actions[at, lane][None])
                log_prob = policy.policy.head.log_prob(said, action).detach()
                np.testing.assert_allclose(made.values[at, lane], value[0], atol=1e-5)
                np.testing.assert_allclose(made.log_probs[at, lane], log_prob[0], atol=1e-5)
                is_new = made.ended[at, lane]
    assert trainer.learn(collected.rollouts[-1])


class Failing(Turns):
    """Raises at its twentieth turn, once in a process."""

    has_failed = False
    turns = 0

    def step(self, action):
        if action is not None:
            self.turns += 1
        if self.turns == 20 and not Failing.has_failed:
            Failing.has_failed = True
            raise RuntimeError("lost")
        super().step(action)


def test_rows_of_a_lost_environment_teach_nothing():
    Failing.has_failed = False
    make = functools.partial(Failing, death_rate=0.0)
    trainer = trained_on(TurnStepping, make, num_slots=2, on_failure="restart")
    whole, lost = trainer.collect(), trainer.collect()
    assert all(made.ended.sum() == 0 for made in whole.values())
    assert len(trainer.vec.incidents) == 1
    slot = trainer.vec.incidents[0].slot
    for made in lost.values():
        # all rows that waited end there, those of the other slot go on
        assert made.ended[:, slot].sum() == 1
        assert made.ended[:, 1 - slot].sum() == 0
        (at,) = np.flatnonzero(made.ended[:, slot])
        assert not made.valid[at, slot]
        assert made.valid[:at, slot].all()
    assert trainer.ended_returns == []
    assert trainer.learn(lost).keys() == lost.keys()


@pytest.mark.parametrize(
    ("nonsense", "said"),
    [("reward", "a reward of right in slot 0 is nan"), ("observation", "an observation of right")],
)
def test_what_is_not_a_number_is_refused_by_its_agent(nonsense, said):
    trainer = trained_on(TeamStepping, functools.partial(Guessing, nonsense))
    with pytest.raises(errors.NotFinite, match=said):
        trainer.collect()


def test_rewards_are_scaled_by_what_each_agent_earns():
    options = PPOOptions(n_steps=12, batch_size=32, hidden=(8,), normalise_rewards=True)
    trainer = trained_on(TurnStepping, connect_four_v3.env, options)
    for _ in range(4):
        (made,) = trainer.collect().values()
    assert np.isfinite(made.rewards).all()
    assert 1 < np.abs(made.rewards).max() <= 10


@pytest.mark.parametrize(
    ("stepping", "make"),
    [
        (TurnStepping, functools.partial(Turns, numbered_actions(), False, True)),
        (TurnStepping, connect_four_v3.env),
        (TeamStepping, functools.partial(Team, is_truncating=True)),
    ],
    ids=["turns of several spaces", "connect four", "team"],
)
def test_a_trainer_goes_on_exactly_where_another_was(stepping, make):
    one, other = (trained_on(stepping, make) for _ in range(2))
    one.learn(one.collect())
    other.load(one.state())
    for trainer in (one, other):
        trainer.learn(trainer.collect(), 0.5)
    for name, learner in one.learners.items():
        theirs = other.learners[name].policy.state_dict()
        for key, value in learner.policy.state_dict().items():
            assert torch.equal(value, theirs[key])
    assert other.env_steps == one.env_steps == 72


def refuse(*_):
    raise SnapshotError("they do not repeat")


@pytest.mark.parametrize("how", ["not kept", "not restored"])
def test_a_state_without_environments_begins_new_episodes(how, monkeypatch):
    trainer = trained_on(TurnStepping, connect_four_v3.env)
    trainer.collect()
    state = trainer.state()
    if how == "not kept":
        state |= {"slots": None}
    monkeypatch.setattr(TurnStepping, "restore", refuse)
    with pytest.warns(RuntimeWarning, match="new episodes begin"):
        trainer.load(state)
    assert trainer.begins_anew
    (made,) = trainer.collect().values()
    # every game has a first move, and no row of the games before is left
    assert (np.stack([leaf[0] for leaf in made.obs]).reshape(6, -1).sum(1)[::2] == 0).all()

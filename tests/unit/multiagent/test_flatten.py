"""FlattenMultiAgentWrapper: equal to a loop by hand, in both modes, while agents die."""

import functools
import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st
from pettingzoo.classic.connect_four import connect_four
from stable_baselines3.common.env_checker import check_env as sb3_check_env

from envfleet.errors import ActionError, ConfigError, ResetNeeded
from envfleet.multiagent import (
    FlattenMultiAgentWrapper,
    GridWorldEnvMultiAgent,
    GridWorldEnvParallel,
)
from envfleet.testing import first_difference, fleet_driven, hand_driven
from tests.unit.multiagent.dying_agents import (
    DyingAgents,
    DyingAgentsParallel,
    boxes,
    flattened_dying,
    mixed_actions,
    numbered_actions,
    single_choices,
)
from tests.unit.multiagent.test_vectorised import Pair, Unsaid

MODES = ("joint", "turn")
BOTH = (DyingAgents, DyingAgentsParallel)
TEAM: list[dict[str, Any]] = [
    {"type": "ObserverAgent", "name": "eye"},
    {"name": "ground", "fov_size": 5},
]
ENVS = {
    "grid": functools.partial(GridWorldEnvMultiAgent, max_steps=20),
    "grid at once": functools.partial(GridWorldEnvParallel, max_steps=20),
    "grid with observer": functools.partial(GridWorldEnvMultiAgent, max_steps=20, agents=TEAM),
    "connect four": connect_four.env,
    "dying": DyingAgents,
    "dying at once": DyingAgentsParallel,
    "numbered": functools.partial(DyingAgents, numbered_actions()),
    "boxes": functools.partial(DyingAgents, boxes(), has_masks=False),
    "mixed": functools.partial(DyingAgents, mixed_actions(), has_masks=False),
}


def flattened(seen):
    """What the agents of `dying_agents` see, as a vector and without the mask."""
    return np.asarray(seen["observation"] if isinstance(seen, dict) else seen, np.float32).ravel()


def by_hand_action(space, drawn):
    """The same choice by hand: `drawn` counts from 0."""
    if isinstance(space, spaces.Discrete):
        return space.start + drawn[0] % space.n
    return (drawn % space.nvec).astype(space.dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env", ENVS)
def test_both_checkers_pass(env, mode):
    wrapped = FlattenMultiAgentWrapper(ENVS[env](), mode)
    with warnings.catch_warnings():
        # "we recommend" to normalise actions; what an agent may see is without bounds
        warnings.filterwarnings("ignore", ".*(symmetric and normalized|value is -?infinity).*")
        check_env(wrapped, skip_render_check=True, skip_close_check=True)
        sb3_check_env(FlattenMultiAgentWrapper(ENVS[env](), mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env", ENVS)
def test_every_observation_lies_in_the_space_and_values_are_python_s(env, mode):
    wrapped = FlattenMultiAgentWrapper(ENVS[env](), mode)
    wrapped.action_space.seed(0)
    for episode in range(5):
        obs, _ = wrapped.reset(seed=episode)
        is_over = False
        while not is_over:
            assert obs.dtype == np.float32
            assert obs in wrapped.observation_space
            obs, reward, terminated, truncated, info = wrapped.step(wrapped.action_space.sample())
            assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)
            assert not (terminated and truncated)
            assert type(info) is dict
            is_over = terminated or truncated
        assert obs in wrapped.observation_space
        with pytest.raises(ResetNeeded, match="call reset"):
            wrapped.step(wrapped.action_space.sample())


def turns_by_hand(env, seed, draws):
    """A loop over `agent_iter`: for every turn who, what was seen and earned, dead or masked."""
    env.reset(seed=seed)
    turns = []
    for agent in env.agent_iter():
        seen, reward, terminated, truncated, _ = env.last()
        is_dead = terminated or truncated
        mask = None if is_dead or not isinstance(seen, dict) else seen["action_mask"].astype(bool)
        turns.append((agent, flattened(seen), float(reward), is_dead, truncated, mask))
        action = None
        if not is_dead:
            space: Any = env.action_space(agent)
            width = 1 if isinstance(space, spaces.Discrete) else len(space.nvec)
            action = by_hand_action(space, next(draws)[:width])
        env.step(action)
    return turns


@given(
    seed=st.integers(0, 9999),
    is_truncating=st.booleans(),
    has_masks=st.booleans(),
    actions=st.sampled_from([single_choices, numbered_actions]),
    death_rate=st.sampled_from([0.02, 0.15, 0.5, 1.0]),
)
def test_turns_are_those_of_a_loop_by_hand(seed, is_truncating, has_masks, actions, death_rate):
    def make():
        return DyingAgents(actions(), has_masks, is_truncating, death_rate)

    wrapped: Any
    wrapped, alone = FlattenMultiAgentWrapper(make(), "turn"), make()
    names, space = wrapped.possible_agents, wrapped.action_space
    counts = space.nvec if isinstance(space, spaces.MultiDiscrete) else np.array([space.n])

    def draws():
        rng = np.random.default_rng(seed)
        while True:
            yield rng.integers(0, counts)

    expected = turns_by_hand(alone, seed, draws())
    source = draws()
    obs, info = wrapped.reset(seed=seed)
    turns, earned, is_over = [], [], False
    while not is_over:
        actor = names[info["agent"]]
        turns.append((actor, obs, wrapped.action_masks()))
        numbers = next(source)
        obs, reward, terminated, truncated, info = wrapped.step(
            numbers if space.shape else numbers[0]
        )
        earned += [
            (key.removesuffix("/reward"), part)
            for key, part in info.items()
            if key.endswith("/reward")
        ]
        is_over = terminated or truncated
        assert reward == info[f"{names[info['agent']]}/reward"]

    live = [turn for turn in expected if not turn[3]]
    assert [agent for agent, *_ in turns] == [agent for agent, *_ in live]
    assert earned == [(agent, reward) for agent, _, reward, *_ in expected[1:]]
    assert wrapped.env.taken == alone.taken
    # the last one to act sees the end
    assert names[info["agent"]] == actor
    (last_seen,) = [seen for agent, seen, _, is_dead, *_ in expected if agent == actor and is_dead]
    assert obs[: len(last_seen)].tolist() == last_seen.tolist()
    # a truncation, if one of those that died in the last step was truncated
    last_turn = max(number for number, turn in enumerate(expected) if not turn[3])
    assert truncated is any(turn[4] for turn in expected[last_turn + 1 :])
    for (_, row, allowed), (agent, seen, *_, mask) in zip(turns, live, strict=True):
        width = len(row) - len(names)
        assert row[: len(seen)].tolist() == seen.tolist()
        assert not row[len(seen) : width].any()
        assert row[width:].tolist() == [float(name == agent) for name in names]
        assert allowed.tolist() == wide_mask(alone.action_space(agent), mask, counts)


def wide_mask(space, mask, counts):
    """The mask of one agent's own actions within shared ones, by hand."""
    own = [space.n] if isinstance(space, spaces.Discrete) else list(space.nvec)
    mask = [True] * sum(own) if mask is None else mask.tolist()
    wide = []
    for number, count in enumerate(counts):
        if number < len(own):
            start = sum(own[:number])
            part = mask[start : start + own[number]]
        else:
            part = [True]
        wide += part + [False] * (count - len(part))
    return wide


def cycles_by_hand(env, seed, draws):
    """For every cycle what each agent earned, saw, and who was alive after it."""
    env.reset(seed=seed)
    cycles = []
    while env.agents:
        drawn = next(draws)
        rewards, seen, terminated = dict.fromkeys(env.agents, 0.0), {}, set()
        is_cut = False
        to_act = list(env.agents)
        while env.agents and env.agent_selection in to_act:
            agent = env.agent_selection
            if env.terminations[agent] or env.truncations[agent]:
                seen[agent] = flattened(env.observe(agent))
                terminated |= {agent} if env.terminations[agent] else set()
                env.step(None)
                continue
            to_act.remove(agent)
            env.step(by_hand_action(env.action_space(agent), drawn[agent]))
            for name in env.rewards:
                rewards[name] += env.rewards[name]
            is_cut = any(env.truncations.values())
            while env.agents and (
                env.terminations[env.agent_selection] or env.truncations[env.agent_selection]
            ):
                dead = env.agent_selection
                seen[dead] = flattened(env.observe(dead))
                terminated |= {dead} if env.terminations[dead] else set()
                env.step(None)
        live = list(env.agents)
        masks = {}
        for name in live:
            observation = env.observe(name)
            seen[name] = flattened(observation)
            if isinstance(observation, dict):
                masks[name] = observation["action_mask"].astype(bool)
        cycles.append((rewards, seen, [n for n in seen if n not in terminated], masks, is_cut))
    return cycles


@given(
    seed=st.integers(0, 9999),
    is_truncating=st.booleans(),
    has_masks=st.booleans(),
    actions=st.sampled_from([single_choices, numbered_actions]),
    death_rate=st.sampled_from([0.02, 0.15, 0.5, 1.0]),
)
def test_cycles_are_those_of_a_loop_by_hand(seed, is_truncating, has_masks, actions, death_rate):
    def make():
        return DyingAgents(actions(), has_masks, is_truncating, death_rate)

    wrapped: Any
    wrapped, alone = FlattenMultiAgentWrapper(make(), "joint"), make()
    names = wrapped.possible_agents
    widths = {
        name: 1 if isinstance(space, spaces.Discrete) else len(space.nvec)
        for name, space in actions().items()
    }
    stops = dict(zip(names, np.cumsum(list(widths.values())), strict=True))

    def draws():
        rng = np.random.default_rng(seed)
        while True:
            action = (
                rng.random(len(wrapped.action_space.nvec)) * wrapped.action_space.nvec
            ).astype(np.int64)
            yield {n: action[stops[n] - widths[n] : stops[n]] for n in names} | {"all": action}

    expected = cycles_by_hand(alone, seed, draws())
    source = draws()
    wrapped.reset(seed=seed)
    for number, (rewards, seen, alive, masks, is_cut) in enumerate(expected, start=1):
        obs, reward, terminated, truncated, info = wrapped.step(next(source)["all"])
        assert reward == pytest.approx(sum(rewards.values()), abs=1e-12)
        assert {n: info[f"{n}/reward"] for n in rewards} == rewards
        start = 0
        for index, name in enumerate(names):
            part = obs[start : start + index + 1]
            assert part.tolist() == seen.get(name, np.zeros(index + 1)).tolist()
            start += index + 1
        assert obs[start:].tolist() == [float(name in alive) for name in names]
        is_last = number == len(expected)
        assert (terminated, truncated) == (is_last and not is_cut, is_last and is_cut)
        allowed: Any = wrapped.action_masks()
        start = 0
        for name in names:
            width = make().width(name)
            own = allowed[start : start + width]
            if name in masks:
                assert own.tolist() == masks[name].tolist()
            elif is_last or name not in seen:
                assert own[0]
                assert own.sum() == widths[name]
            start += width
    assert wrapped.env.taken == alone.taken


@given(seed=st.integers(0, 9999), is_truncating=st.booleans())
def test_all_at_once_is_a_step_of_the_parallel_environment(seed, is_truncating):
    wrapped = FlattenMultiAgentWrapper(DyingAgentsParallel(is_truncating=is_truncating), "joint")
    alone = DyingAgentsParallel(is_truncating=is_truncating)
    names = wrapped.possible_agents
    alone.reset(seed=seed)
    wrapped.reset(seed=seed)
    wrapped.action_space.seed(seed)
    while alone.agents:
        action = wrapped.action_space.sample()
        obs, reward, terminated, truncated, info = wrapped.step(action)
        acted = list(alone.agents)
        seen, rewards, ends, cuts, infos = alone.step({n: action[names.index(n)] for n in acted})
        assert reward == pytest.approx(sum(rewards.values()))
        assert {n: info[f"{n}/reward"] for n in acted} == rewards
        assert {n: info[f"{n}/drawn"] for n in acted} == {n: infos[n]["drawn"] for n in acted}
        assert obs[-3:].tolist() == [float(n in seen and not ends[n]) for n in names]
        is_over = not alone.agents
        is_cut = any(cuts.values())
        assert (terminated, truncated) == (is_over and not is_cut, is_over and is_cut)


def test_the_grid_world_and_its_parallel_twin_are_flattened_alike():
    both = [
        FlattenMultiAgentWrapper(kind(max_steps=15, agents=TEAM), "joint")
        for kind in (GridWorldEnvMultiAgent, GridWorldEnvParallel)
    ]
    assert both[0].action_space == both[1].action_space
    first = [env.reset(seed=4)[0] for env in both]
    assert first[0].tolist() == first[1].tolist()
    both[0].action_space.seed(1)
    for _ in range(15):
        action = both[0].action_space.sample()
        one, other = (env.step(action) for env in both)
        assert one[0].tolist() == other[0].tolist()
        assert one[1:] == other[1:]


# ---- actions ------------------------------------------------------------------------------------


def test_numbered_actions_become_a_multidiscrete_or_one_that_is_large_enough():
    joint: Any = FlattenMultiAgentWrapper(DyingAgents(numbered_actions()), "joint")
    assert joint.action_space == spaces.MultiDiscrete([3, 5, 2, 4])
    turn = FlattenMultiAgentWrapper(DyingAgents(numbered_actions()), "turn")
    assert turn.action_space == spaces.MultiDiscrete([5, 4])
    single = FlattenMultiAgentWrapper(DyingAgents(), "turn")
    assert single.action_space == spaces.Discrete(5)


def test_boxes_are_put_side_by_side_or_scaled():
    joint: Any = FlattenMultiAgentWrapper(
        DyingAgents(boxes(), has_masks=False, death_rate=0), "joint"
    )
    assert joint.action_space.low.tolist() == [-1, -1, 0, 0, -5]
    joint.reset(seed=0)
    joint.step(np.array([0.5, -0.5, 1, 9, 4], np.float32))
    assert joint.env.taken == [("wolf_0", [0.5, -0.5]), ("wolf_1", [1, 9, 4])]
    turn = FlattenMultiAgentWrapper(DyingAgents(boxes(), has_masks=False, death_rate=0), "turn")
    assert turn.action_space == spaces.Box(-1, 1, (3,))
    turn.reset(seed=0)
    turn.step(np.array([0.5, -0.5, 1], np.float32))
    turn.step(np.array([-1, 1, 0], np.float32))
    assert turn.env.taken == [("wolf_0", [0.5, -0.5]), ("wolf_1", [0, 10, 0])]


def test_where_both_kinds_meet_the_largest_number_is_the_choice():
    joint: Any = FlattenMultiAgentWrapper(
        DyingAgents(mixed_actions(), has_masks=False, death_rate=0), "joint"
    )
    assert joint.action_space.shape == (7,)
    joint.reset(seed=0)
    joint.step(np.array([0.1, -0.2, 0.7, 2, -2, 1, 0], np.float32))
    assert joint.env.taken == [("wolf_0", 2), ("hare_0", [[2, -2], [1, 0]])]
    turn = FlattenMultiAgentWrapper(
        DyingAgents(mixed_actions(), has_masks=False, death_rate=0), "turn"
    )
    turn.reset(seed=0)
    turn.step(np.array([0.1, 0.2, -0.3, 1], np.float32))
    turn.step(np.array([1, -1, 0, 0.5], np.float32))
    assert turn.env.taken == [("wolf_0", 1), ("hare_0", [[2, -2], [0, 1]])]
    with pytest.raises(ActionError, match="only numbered actions have masks"):
        turn.action_masks()


def test_a_number_beyond_an_agent_s_own_starts_again():
    wrapped = FlattenMultiAgentWrapper(DyingAgents(death_rate=0), "turn")
    wrapped.reset(seed=0)
    for _ in range(3):
        wrapped.step(4)
    assert wrapped.env.taken == [("wolf_0", 1), ("wolf_1", 4), ("hare_0", 0)]


@pytest.mark.parametrize("action", [None, [1], [1, 1, 1, 1], [np.nan, 0, 0]])
def test_an_action_of_another_form_is_refused(action):
    wrapped = FlattenMultiAgentWrapper(DyingAgents(), "joint")
    wrapped.reset(seed=0)
    with pytest.raises(ActionError, match="an action must be in"):
        wrapped.step(np.array(action))
    turn = FlattenMultiAgentWrapper(DyingAgents(), "turn")
    turn.reset(seed=0)
    with pytest.raises(ActionError, match="an action must be in"):
        turn.step("up")


def test_masks_of_connect_four_are_the_game_s():
    wrapped = FlattenMultiAgentWrapper(connect_four.env(), "turn")
    wrapped.reset(seed=0)
    for _ in range(6):
        assert wrapped.action_masks().all()
        wrapped.step(3)
    assert wrapped.action_masks().tolist() == [True] * 3 + [False] + [True] * 3
    # an illegal move is the environment's to judge: who makes it loses
    _, reward, terminated, _, info = wrapped.step(3)
    assert terminated
    assert (reward, info["player_0/reward"]) == (-1.0, -1.0)


def test_the_winner_of_connect_four_earns_with_its_last_move():
    wrapped = FlattenMultiAgentWrapper(connect_four.env(), "turn")
    wrapped.reset(seed=0)
    for move in (0, 1, 0, 1, 0, 1):
        _, reward, terminated, *_ = wrapped.step(move)
        assert (reward, terminated) == (0.0, False)
    _, reward, terminated, _, info = wrapped.step(0)
    assert terminated
    assert (reward, info["player_0/reward"], info["player_1/reward"]) == (1.0, 1.0, -1.0)


# ---- what cannot be ----------------------------------------------------------------------------


class HasNoList(DyingAgents):
    """As PettingZoo's environments whose agents are made up on the way."""

    def __init__(self):
        super().__init__()
        del self.possible_agents


class SeesGraphs(DyingAgents):
    def _observation_space(self, number):
        return spaces.Graph(spaces.Box(0, 1, (2,)), None)


@pytest.mark.parametrize(
    ("make", "mode", "message"),
    [
        (DyingAgents, "both", "mode must be one of joint, turn, got 'both'"),
        (lambda: 3, "joint", "a PettingZoo environment is needed"),
        (HasNoList, "turn", "does not say which agents there can be"),
        (SeesGraphs, "turn", "observations of wolf_0 cannot be a vector"),
        (
            lambda: DyingAgents({"a": spaces.Text(3)}, has_masks=False),
            "joint",
            "actions of a must be Discrete",
        ),
        (
            lambda: DyingAgents(
                {"a": spaces.Box(-1, 1, (2,)), "b": spaces.Box(-np.inf, np.inf, (3,))},
                has_masks=False,
            ),
            "turn",
            "actions of b have none",
        ),
    ],
)
def test_what_cannot_be_flattened_is_refused_at_once(make, mode, message):
    with pytest.raises(ConfigError, match=message):
        FlattenMultiAgentWrapper(make(), mode)


@pytest.mark.parametrize("kind", [Pair, Unsaid])
def test_an_environment_that_never_empties_its_agents_ends_when_all_are_done(kind):
    wrapped = FlattenMultiAgentWrapper(kind(length=2), "joint")
    wrapped.reset(seed=0)
    ends = [wrapped.step(wrapped.action_space.sample())[2:4] for _ in range(2)]
    assert ends == [(False, False), (True, False)]


def test_a_step_before_the_first_reset_is_refused():
    with pytest.raises(ResetNeeded, match="call reset"):
        FlattenMultiAgentWrapper(DyingAgents(), "turn").step(0)


# ---- runs follow from their first seed ---------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_a_fleet_of_them_equals_a_loop_by_hand(autoreset, kind, mode):
    env = functools.partial(flattened_dying, kind, mode)
    expected = hand_driven(env, 3, 40, 0, autoreset)
    got = fleet_driven(
        env, 3, 40, 0, autoreset, backend="process", start_method="fork", num_workers=2
    )
    assert first_difference(expected, got) is None

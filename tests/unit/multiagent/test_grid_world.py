"""GridWorldEnvMultiAgent and GridWorldEnvParallel: PettingZoo's contract, and the rules."""

import doctest
import functools
import inspect
import pickle
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pettingzoo.utils.conversions import aec_to_parallel

from envfleet.errors import ActionError, ConfigError, ResetNeeded
from envfleet.multiagent import (
    GridWorldEnvMultiAgent,
    GridWorldEnvParallel,
    GridWorldPolicy,
    grid_policy,
)
from tests.unit.multiagent.pettingzoo_tests import (
    api_test,
    max_cycles_test,
    parallel_api_test,
    parallel_seed_test,
    seed_test,
)

RIGHT, UP, LEFT, DOWN, STAY, RISE, LEVEL, SINK = range(8)
EYE: dict[str, Any] = {"type": "ObserverAgent", "name": "eye"}
CONFIGS: dict[str, Any] = {
    "default": {},
    "script": {
        "size": 7,
        "agents": [{"name": "alpha", "type": "FOVAgent", "fov_size": 5}],
        "target_config": {"movement_speed": 1, "box_cells": 3},
        "enable_obstacles": True,
        "num_obstacles": 3,
    },
    "observers": {
        "size": 7,
        "agents": [EYE, {"name": "ground", "show_target_coords": True}],
        "enable_obstacles": True,
        "num_obstacles": 3,
        "num_visual_obstacles": 2,
        "intrinsic": True,
    },
    "no target": {"no_target": True, "show_target_coords": True},
    "crowded": {"size": 2, "agents": [{}, {}, {}], "enable_obstacles": True, "num_obstacles": 9},
}
EVERY = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
KINDS = (GridWorldEnvMultiAgent, GridWorldEnvParallel)


def world(places, target=None, **kwargs):
    """A world whose agents and target stand where they are put."""
    kwargs = {"size": 7, "agents": [{} for _ in places], "no_target": target is None, **kwargs}
    env = GridWorldEnvParallel(**kwargs)
    env.reset(seed=0)
    state = env.state_of_world
    state.places[:] = places
    state.target = target
    return env, state


# ---- PettingZoo's contract ----------------------------------------------------------------------


# It recommends other names for agents, and arrays where a Dict is what the original observes.
@pytest.mark.filterwarnings("ignore::UserWarning:pettingzoo.test")
@EVERY
def test_pettingzoo_s_tests_pass(config):
    api_test(GridWorldEnvMultiAgent(max_steps=30, **config), num_cycles=200)
    parallel_api_test(GridWorldEnvParallel(max_steps=30, **config), num_cycles=200)
    seed_test(functools.partial(GridWorldEnvMultiAgent, **config), num_cycles=50)
    parallel_seed_test(functools.partial(GridWorldEnvParallel, **config), num_cycles=50)


def test_max_steps_counts_cycles():
    max_cycles_test(
        SimpleNamespace(
            env=lambda max_cycles: GridWorldEnvMultiAgent(max_steps=max_cycles),
            parallel_env=lambda max_cycles: GridWorldEnvParallel(max_steps=max_cycles),
        )
    )


@EVERY
@settings(max_examples=20)
@given(seed=st.integers(0, 999))
def test_the_twins_are_one_world(config, seed):
    """Also by way of PettingZoo's own conversion."""
    aec = GridWorldEnvMultiAgent(max_steps=8, **config)
    envs = [GridWorldEnvParallel(max_steps=8, **config), aec_to_parallel(aec)]
    rng = np.random.default_rng(seed)
    for episode in range(2):  # the second goes on with the same generator
        answers = [env.reset(seed=seed if episode == 0 else None) for env in envs]
        while envs[0].agents:
            assert equal(*answers)
            actions = {
                agent: int(rng.integers(envs[0].action_space(agent).n)) for agent in envs[0].agents
            }
            answers = [env.step(actions) for env in envs]
            for agent, seen in answers[0][0].items():
                assert seen in envs[0].observation_space(agent)
        assert equal(*answers)
        assert not envs[1].agents


def equal(one, other):
    """Whether two answers are alike, arrays included."""
    return pickle.dumps([dict(part) for part in one]) == pickle.dumps([dict(p) for p in other])


def test_rewards_are_counted_once_and_until_the_agent_s_next_turn():
    env = GridWorldEnvMultiAgent(max_steps=4)
    env.reset(seed=0)
    total: Any = dict.fromkeys(env.agents, 0.0)
    heard: Any = dict.fromkeys(env.agents, 0.0)
    for agent in env.agent_iter():
        _, reward, _, is_cut, info = env.last()
        heard[agent] += reward
        assert info == {f"distance_{agent}": env.state_of_world.distance(int(agent[-1]) - 1)}
        env.step(None if is_cut else STAY)
        if not is_cut:
            for name, part in env.rewards.items():
                total[name] += part
    assert heard == total
    assert all(total.values())


def global_states():
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tolist()


def test_nothing_global_is_drawn_from_or_seeded():
    random.seed(1), np.random.seed(1)
    before = global_states()
    env = GridWorldEnvParallel(**CONFIGS["observers"], max_steps=20)
    env.reset(seed=5)
    while env.agents:
        env.step({agent: env.action_space(agent).sample() for agent in env.agents})
    assert global_states() == before


# ---- the original's names and defaults ----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_constructor_is_the_original_s(kind):
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()
    }
    assert defaults == {
        "size": 5,
        "max_steps": 500,
        "render_mode": None,
        "show_fov_display": True,
        "intrinsic": False,
        "lambda_fov": 0.5,
        "show_target_coords": False,
        "obstacle_collision_penalty": -0.05,
        "no_target": False,
        "agents": None,
        "target_config": None,
        "enable_obstacles": False,
        "num_obstacles": 0,
        "num_visual_obstacles": 0,
    }
    env: Any = kind()
    assert env.possible_agents == ["agent_1", "agent_2"]
    assert env.action_space("agent_1").n == 5
    assert env.observation_space("agent_2")["obstacles_fov"].shape == (3, 3)


def test_an_observer_has_eight_actions_and_a_flight_level():
    env: Any = GridWorldEnvParallel(agents=[EYE])
    assert env.action_space("eye").n == 8
    assert env.observation_space("eye")["obstacles_fov"].shape == (7, 7)
    seen, _ = env.reset(seed=0)
    assert seen["eye"]["flight_level"] == 1
    base: Any = GridWorldEnvParallel(agents=[{**EYE, "fov_base_size": 5}])
    assert base.observation_space("eye")["obstacles_fov"].shape == (9, 9)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": 1}, "size must be at least 2, got 1"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"render_mode": "human"}, "render_mode must be one of rgb_array, ansi or None"),
        ({"lambda_fov": 1.5}, "lambda_fov must be from 0 to 1, got 1.5"),
        ({"num_obstacles": -1, "enable_obstacles": True}, "num_obstacles must not be negative"),
        ({"agents": []}, "agents must be one or more"),
        ({"agents": [{"name": "a"}, {"name": "a"}]}, "each with a name of its own"),
        ({"agents": [{"fov_size": 4}]}, "fov_size of agent_1 must be odd"),
        ({"agents": [{"type": "Ghost"}]}, "must be one of FOVAgent, ObserverAgent, got 'Ghost'"),
        ({"agents": [{"speed": 4}]}, "an agent of type FOVAgent has no 'speed'; it has name"),
        ({"agents": [{"max_altitude": 2}]}, "an agent of type FOVAgent has no 'max_altitude'"),
        ({"agents": [{"color": (1, 2)}]}, "color of agent_1 must be three numbers"),
        ({"agents": [{"name": ""}]}, "must not be empty"),
        ({"agents": [{**EYE, "max_altitude": 4}]}, "max_altitude of eye must be from 1 to 3"),
        ({"agents": [{**EYE, "target_detection_probs": [2, 0, 0]}]}, "must be 3 numbers from 0"),
        ({"target_config": {"movement_speed": 2}}, "movement_speed must be from 0 to 1, got 2"),
        ({"target_config": {"box_cells": 2}}, "box_cells must be odd"),
        ({"target_config": {"pace": 2}}, "a target has no 'pace'"),
        ({"size": 2, "agents": [{}] * 4}, "do not fit into a grid of size 2"),
    ],
)
def test_what_makes_no_sense_is_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        GridWorldEnvMultiAgent(**kwargs)


@pytest.mark.parametrize("action", [5, -1, None, 1.5, "up"])
def test_an_action_that_an_agent_does_not_have_is_refused(action):
    env = GridWorldEnvMultiAgent()
    env.reset(seed=0)
    with pytest.raises(ActionError, match=r"the action of agent_1 must be in Discrete\(5\)"):
        env.step(action)
    assert env.agent_selection == "agent_1"


def test_actions_for_other_agents_are_refused():
    env = GridWorldEnvParallel()
    env.reset(seed=0)
    for actions in ({}, {"agent_1": 0}, {"agent_1": 0, "agent_2": 0, "agent_3": 0}):
        with pytest.raises(ActionError, match="but the agents are"):
            env.step(actions)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_out_of_order_say_so(kind):
    env = kind(max_steps=1, agents=[{"name": "alpha"}], render_mode="ansi")
    for call in (lambda: env.observe("alpha"), env.render, lambda: env.step({"alpha": 0})):
        with pytest.raises(ResetNeeded, match="reset"):
            call()


# ---- the rules ----------------------------------------------------------------------------------


def test_moves_and_what_stops_them():
    env, state = world([(0, 0), (1, 0)])
    state.is_blocked[0, 1] = True
    names = env.possible_agents
    for first, second, expected in [
        (LEFT, STAY, [(0, 0), (1, 0)]),  # the wall
        (RIGHT, STAY, [(0, 0), (1, 0)]),  # the other agent
        (UP, UP, [(0, 0), (1, 1)]),  # an obstacle
        (RIGHT, LEFT, [(1, 0), (1, 1)]),  # an obstacle for the second
        (DOWN, RIGHT, [(1, 0), (2, 1)]),
    ]:
        env.step(dict(zip(names, (first, second), strict=True)))
        assert state.places == expected


@pytest.mark.parametrize(
    ("place", "move", "reward"),
    [
        ((3, 3), STAY, -1.2),  # on the target: -3 lambda
        ((2, 3), STAY, -0.4),  # in its box, which the agent sees, too
        ((4, 4), STAY, -0.4),
        ((1, 3), STAY, 0.6),  # sees without being seen
        ((5, 5), STAY, 0.6),
        ((0, 3), STAY, -0.01),
        ((0, 3), RIGHT, 0.6),  # what counts is where it is after its move
        ((0, 0), RIGHT, -0.06),  # an obstacle
    ],
)
def test_rewards(place, move, reward):
    env, state = world([place], (3, 3), agents=[{"fov_size": 5}], lambda_fov=0.4)
    state.is_blocked[1, 0] = True
    _, rewards, *_ = env.step({"agent_1": move})
    assert rewards["agent_1"] == pytest.approx(reward)


def test_new_cells_are_rewarded_if_intrinsic():
    env, _ = world([(0, 0)], intrinsic=True)
    env.state_of_world._visited[0] = {(0, 0)}
    rewards = [env.step({"agent_1": move})[1]["agent_1"] for move in (RIGHT, LEFT, RIGHT, UP)]
    assert rewards == pytest.approx([0.015, -0.01, -0.01, 0.015])


def test_a_field_of_view_shows_walls_agents_and_the_target():
    env, state = world([(0, 1), (1, 2)], (0, 0))
    state.is_blocked[1, 1] = True
    assert env.observe("agent_1")["agent"].tolist() == [0, 1]
    assert env.observe("agent_1")["obstacles_fov"].tolist() == [
        [1, 1, 1],  # x = -1: outside
        [3, 0, 0],  # x = 0, from y = 0 up
        [0, 1, 2],  # x = 1
    ]


def test_an_observer_sees_further_from_above_and_flies_over_obstacles():
    env, state = world([(3, 3), (3, 4)], (3, 5), agents=[{**EYE, "fov_size": 3}, {}])
    state.is_blocked[4, 3] = True
    view = env.observe("eye")["obstacles_fov"]
    assert (view[2:5, 2:5].tolist(), (view == -10).sum()) == ([[0] * 3, [0, 0, 2], [0] * 3], 40)
    env.step({"eye": RISE, "agent_2": STAY})
    state._luck[0] = 0.5
    assert state.levels[0] == 2
    view = env.observe("eye")["obstacles_fov"]
    assert ((view == -10).sum(), view[3, 5]) == (24, 3 if state.target == (3, 5) else view[3, 5])
    env.step({"eye": RIGHT, "agent_2": STAY})
    assert state.places[0] == (4, 3)
    for action, level in ((RISE, 3), (RISE, 3), (LEVEL, 3), (SINK, 2), (SINK, 1), (SINK, 1)):
        env.step({"eye": action, "agent_2": STAY})
        assert state.levels[0] == level


def test_what_an_observer_notices_depends_on_its_level_and_on_luck_once_per_move():
    env, state = world(
        [(3, 3)], (3, 4), agents=[{**EYE, "target_detection_probs": (0.9, 0.5, 0.0)}]
    )
    for level, luck, is_noticed in ((1, 0.8, True), (2, 0.8, False), (2, 0.4, True), (3, 0, False)):
        state.levels[0], state._luck[0] = level, luck
        assert state.sees_target(0) is is_noticed
        assert all((env.observe("eye")["obstacles_fov"] == 3).any() == is_noticed for _ in "twice")
    state.levels[0], state._luck[0] = 1, 0.0
    state.is_clouded[3, 4] = True
    assert not state.sees_target(0)
    assert env.observe("eye")["obstacles_fov"][3, 4] == 4


def test_the_target_moves_once_a_cycle_by_one_cell_and_around_obstacles():
    env, state = world([(6, 6)], (3, 3), target_config={"movement_speed": 1})
    state.is_blocked[:, 2] = state.is_blocked[:, 4] = True
    seen = set()
    for _ in range(60):
        before = state.target
        env.step({"agent_1": STAY})
        assert sum(abs(a - b) for a, b in zip(before, state.target, strict=True)) <= 1
        assert state.target[1] == 3
        seen.add(state.target)
    assert len(seen) > 3


def test_obstacles_are_there_only_if_enabled():
    without = GridWorldEnvParallel(size=9, num_obstacles=4, num_visual_obstacles=4)
    without.reset(seed=0)
    assert not without.state_of_world.is_blocked.any()
    env = GridWorldEnvParallel(
        size=9, num_obstacles=4, num_visual_obstacles=4, enable_obstacles=True
    )
    env.reset(seed=0)
    state = env.state_of_world
    assert (len(state.obstacles), len(state.clouds)) == (4, 4)
    assert state.is_clouded.sum() == sum(w * h for _, _, w, h in state.clouds)  # none overlap
    assert not any(state.is_blocked[place] for place in [*state.places, state.target])


# ---- pictures -----------------------------------------------------------------------------------


def test_text_shows_y_upwards():
    env, state = world([(0, 0), (2, 1)], (1, 2), size=3, agents=[{}, {}], render_mode="ansi")
    state.is_blocked[2, 2] = True
    assert env.render().startswith(".*#\n..2\n1..\n\nagent_1 sees\n")
    env.show_fov_display = False
    assert env.render() == ".*#\n..2\n1..\n"


@EVERY
def test_pictures_are_images(config):
    env = GridWorldEnvMultiAgent(render_mode="rgb_array", **config)
    env.reset(seed=0)
    picture = env.render()
    side = env.rules.size * (512 // env.rules.size)
    assert (picture.shape, picture.dtype) == ((side, side, 3), np.uint8)
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 2


def test_an_agent_is_drawn_where_it_is():
    env, _ = world([(0, 0)], agents=[{"color": (1, 2, 3)}], render_mode="rgb_array", size=4)
    assert env.render()[-64, 64].tolist() == [1, 2, 3]  # below, left: y is upwards
    assert GridWorldEnvParallel().render() is None


# ---- the scripted player ------------------------------------------------------------------------


def played(config, seed, is_scripted):
    """The mean reward of an agent in one step."""
    env: Any = GridWorldEnvParallel(max_steps=100, **config)
    policy, rng = GridWorldPolicy(env), np.random.default_rng(seed)
    seen, _ = env.reset(seed=seed)
    total = 0.0
    while env.agents:
        actions = {
            agent: policy(agent, seen[agent])
            if is_scripted
            else int(rng.integers(env.action_space(agent).n))
            for agent in env.agents
        }
        seen, rewards, *_ = env.step(actions)
        total += sum(rewards.values())
    return total / 100 / len(env.possible_agents)


@pytest.mark.parametrize(
    ("config", "least"),
    [
        (CONFIGS["script"], 0.35),
        ({"size": 7, "agents": [{"fov_size": 5}, {"fov_size": 5}]}, 0.45),
        ({"size": 7, "agents": [EYE]}, 0.25),
        ({}, -0.05),  # it cannot see further than the target: staying away is best
    ],
)
def test_the_scripted_player_is_far_better_than_chance(config, least):
    """At most 0.5 can be earned, and 0.33 by an observer that notices two times of three."""
    scripted = np.mean([played(config, seed, True) for seed in range(6)])
    at_random = np.mean([played(config, seed, False) for seed in range(6)])
    assert scripted > least
    assert scripted > at_random + 0.05


def test_the_documented_example_of_the_scripted_player_holds():
    result = doctest.testmod(grid_policy)
    assert result.attempted
    assert not result.failed


def test_the_scripted_player_acts_in_turns_and_starts_anew():
    env = GridWorldEnvMultiAgent(**CONFIGS["observers"], max_steps=20)
    policy = GridWorldPolicy(env)
    taken = []
    for _ in range(2):
        env.reset(seed=3)
        policy.reset()
        actions = []
        for agent in env.agent_iter():
            seen, _, _, is_cut, _ = env.last()
            actions.append(None if is_cut else policy(agent, seen))
            env.step(actions[-1])
        taken.append(actions)
    assert taken[0] == taken[1]

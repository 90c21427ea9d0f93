"""The two vectorisers: names, shapes, wrong input, seats, groups."""

import functools
import pickle
import warnings
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector.utils import iterate
from mpe2 import simple_spread_v3
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import aec_to_parallel, wrappers

from envfleet import errors
from envfleet.multiagent import AECVecEnv, AsyncPettingZooVecEnv, GridWorldEnvParallel
from envfleet.multiagent.bare import Bare
from envfleet.multiagent.slot_envs import ParallelSlot, TurnSlot
from envfleet.testing.values import value_difference
from tests.unit.multiagent.dying_agents import (
    DyingAgents,
    DyingAgentsParallel,
    boxes,
    mixed_actions,
)
from tests.unit.multiagent.small_game import Sticks

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.classic import connect_four_v3
    from pettingzoo.test import example_envs
    from pettingzoo.test.example_envs import (
        generated_agents_env_action_mask_info_v0,
        generated_agents_env_action_mask_obs_v0,
        generated_agents_env_cust_agentid_v0,
        generated_agents_env_v0,
        generated_agents_parallel_cust_agentid_v0,
        generated_agents_parallel_v0,
    )

HERE: dict[str, Any] = {"backend": "serial"}
APART: dict[str, Any] = {"backend": "process", "start_method": "fork", "num_workers": 2}


class Pair(ParallelEnv[Any, Any, Any]):
    """Two agents that see different things; nothing ever ends, and `agents` never changes."""

    metadata: ClassVar[dict[str, Any]] = {"name": "pair_v0", "render_modes": ["rgb_array"]}
    possible_agents: ClassVar[list[str]] = ["speaker_0", "listener_0"]

    def __init__(self, is_continuous=False, render_mode=None, length=None, space=None):
        self.agents = list(self.possible_agents)
        self.is_continuous, self.render_mode, self.length = is_continuous, render_mode, length
        self.space = space

    def observation_space(self, agent):
        return self.space or spaces.Box(-9, 9, (3 if agent == "speaker_0" else 11,))

    def action_space(self, agent):
        return spaces.Box(-1, 1, (2,)) if self.is_continuous else spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        if options and "raise" in options:
            raise ValueError("Error in reset")
        self.t, self.options = 0, options
        return self.seen(), {name: {} for name in self.agents}

    def seen(self):
        for name in self.agents:
            self.observation_space(name).seed(self.t)
        return {name: self.observation_space(name).sample() for name in self.agents}

    def step(self, actions):
        self.t, self.actions = self.t + 1, actions
        is_over = self.t == self.length
        rewards = {"speaker_0": 1, "listener_0": 0.5}
        flags = dict.fromkeys(self.agents, is_over), dict.fromkeys(self.agents, False)
        infos = {"speaker_0": {"said": np.arange(3)}, "listener_0": {}}
        return self.seen(), rewards, flags[0], flags[1], infos

    def render(self):
        return np.zeros((4, 4, 3), np.uint8)


# ---- what AgileRL's users know ------------------------------------------------------------------


@pytest.mark.parametrize("where", [HERE, APART], ids=["here", "apart"])
@pytest.mark.parametrize("is_continuous", [False, True])
def test_names_and_shapes_are_agilerl_s(where, is_continuous):
    make = functools.partial(Pair, is_continuous, "rgb_array")
    with AsyncPettingZooVecEnv([make] * 2, **where) as vec:
        assert vec.num_envs == 2
        assert vec.agents == vec.possible_agents == ["speaker_0", "listener_0"]
        assert vec.num_agents == 2
        obs, infos = vec.reset(seed=1)
        assert set(vec.agents) <= set(infos)
        actions = {name: vec.action_space(name).sample() for name in vec.agents}
        assert isinstance(
            vec.action_space("speaker_0"), spaces.Box if is_continuous else spaces.MultiDiscrete
        )
        for _ in range(2):
            obs, rewards, terminated, truncated, infos = vec.step(actions)
            for name in vec.agents:
                assert obs[name].shape == vec.observation_space(name).shape
                assert obs[name].shape == (2, *(vec.single_observation_space(name).shape or ()))
                assert obs[name].dtype == vec.observation_space(name).dtype
                assert rewards[name].dtype == np.float64
                assert rewards[name].shape == (2,)
                for flags in (terminated[name], truncated[name]):
                    assert flags.dtype == bool
                    assert flags.shape == (2,)
            assert infos["speaker_0"]["said"].tolist() == [[0, 1, 2]] * 2
            assert infos["_speaker_0"].tolist() == [True, True]
            singles = {name: [vec.single_action_space(name).sample()] * 2 for name in vec.agents}
            actions = singles
        frames = vec.render()
        assert isinstance(frames, tuple)
        assert [frame.shape for frame in frames] == [(4, 4, 3)] * 2
        assert vec.render_mode == "rgb_array"
        assert vec.call("max_num_agents") == (2, 2)
        vec.set_attr("test_attribute", [1, 2])
        assert vec.get_attr("test_attribute") == (1, 2)
        vec.set_attr(name="test_attribute", values=3)
        assert vec.call("test_attribute") == (3, 3)
        with pytest.raises(ValueError, match="list of 2"):
            vec.set_attr("test_attribute", values=[1, 2, 3])
        with pytest.raises(ValueError, match="reset"):
            vec.call("reset")
        with pytest.raises(AttributeError, match=r"slot 0.*'Pair' object has no 'tset'"):
            vec.call("tset")
    assert vec.closed
    with pytest.raises(ClosedEnvironmentError):
        vec.step(actions)


def test_halves_of_a_step():
    with AsyncPettingZooVecEnv([Pair] * 2, **APART) as vec:
        with pytest.raises(errors.ResetNeeded, match="no batch yet"):
            _ = vec.last_batch
        for wait in (vec.step_wait, vec.reset_wait):
            with pytest.raises(NoAsyncCallError):
                wait()
        vec.reset_async(seed=[3, 4])
        vec.reset_wait(timeout=60)
        actions = {name: np.array([1, 2]) for name in vec.agents}
        vec.step_async(actions)
        with pytest.raises(errors.StillInFlight):
            vec.step_async(actions)
        _, rewards, *_ = vec.step_wait()
        assert rewards["speaker_0"].tolist() == [1, 1]
        vec.step_async([{"speaker_0": 0, "listener_0": 3}] * 2)
        vec.step_wait()
        assert vec.get_attr("actions") == ({"speaker_0": 0, "listener_0": 3},) * 2


def test_options_and_errors_reach_their_slot():
    with AsyncPettingZooVecEnv([Pair] * 2, **APART) as vec:
        vec.reset(options=[{"a": 1}, None])
        assert vec.get_attr("options") == ({"a": 1}, None)
        with pytest.raises(errors.EnvFailed, match="Error in reset"):
            vec.reset(options=[None, {"raise": 1}])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict(place=spaces.Box(-1, 1, (3,)), image=spaces.Box(0, 255, (4, 4, 3), np.uint8)),
        spaces.Tuple([spaces.Box(-1, 1, (3,)), spaces.Discrete(5), spaces.MultiBinary(3)]),
        spaces.Dict(
            inner=spaces.Tuple([spaces.MultiDiscrete([2, 3])]), n=spaces.Discrete(3, start=2)
        ),
        spaces.Discrete(7),
    ],
    ids=["dict", "tuple", "nested", "number"],
)
def test_nested_observations_keep_their_form(space):
    make = functools.partial(Pair, space=space)
    with AsyncPettingZooVecEnv([make] * 2, **HERE) as vec:
        obs, _ = vec.reset(seed=0)
        space.seed(0)
        space.sample()
        for name in vec.agents:
            assert obs[name] in vec.observation_space(name)
        by_hand = make()
        expected, _ = by_hand.reset()
        for name in vec.agents:
            first = next(iter(iterate(vec.observation_space(name), obs[name])))
            assert value_difference(_plain(expected[name]), _plain(first)) is None


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return np.asarray(value).tolist()


def test_an_environment_that_never_empties_its_agents_ends_when_all_are_done():
    with AsyncPettingZooVecEnv([functools.partial(Pair, length=2)] * 2, **HERE) as vec:
        vec.reset(seed=0)
        actions = {name: np.zeros(2, np.int64) for name in vec.agents}
        vec.step(actions)
        _, _, terminated, _, infos = vec.step(actions)
        assert terminated["speaker_0"].all()
        assert infos["_final_obs"].all()
        assert infos["final_info"]["speaker_0"]["said"].tolist() == [[0, 1, 2]] * 2
        assert vec.get_attr("t") == (0, 0)


class Unsaid(ParallelEnv[Any, Any, Any]):
    """Says who is there by what it returns only: it has no `agents`."""

    metadata, possible_agents = Pair.metadata, Pair.possible_agents

    def __init__(self, length=2):
        pair = Pair(length=length)
        self.observation_space, self.action_space = pair.observation_space, pair.action_space
        self.reset, self.step = pair.reset, pair.step


class OtherOrder(Pair):
    possible_agents: ClassVar[list[str]] = ["listener_0", "speaker_0"]


@pytest.mark.parametrize("where", [HERE, APART], ids=["here", "apart"])
def test_slots_that_list_their_agents_in_another_order_are_refused(where):
    """Records know numbers, so the agents would be mistaken for each other."""
    fns = [functools.partial(kind, space=spaces.Discrete(3)) for kind in (Pair, OtherOrder)]
    with pytest.raises(errors.ConfigError, match=r"slot 1 has the agents \['listener_0', 'speake"):
        AsyncPettingZooVecEnv(fns, **where)


def test_an_environment_without_agents_by_that_name():
    with AsyncPettingZooVecEnv([Unsaid], **HERE) as vec:
        vec.reset(seed=0)
        actions = {name: np.zeros(1, np.int64) for name in vec.agents}
        infos = [vec.step(actions)[4] for _ in range(4)]
    assert ["_final_obs" in info for info in infos] == [False, True, False, True]


def test_agilerl_s_marks_for_agents_that_are_gone():
    make = functools.partial(DyingAgentsParallel, boxes(), has_masks=False, death_rate=0.5)
    with (
        AsyncPettingZooVecEnv([make] * 4, compat="agilerl", **HERE) as vec,
        AsyncPettingZooVecEnv([make] * 4, **HERE) as plain,
    ):
        vec.reset(seed=0)
        plain.reset(seed=0)
        was_gone = False
        for _ in range(20):
            alive = plain.alive
            actions = {name: vec.action_space(name).sample() for name in vec.agents}
            marked = {name: actions[name].copy() for name in vec.agents}
            for name in vec.agents:
                marked[name][~alive[name]] = np.nan
            obs, rewards, terminated, truncated, _ = vec.step(marked)
            expected = plain.step(actions)
            for name in vec.agents:
                gone = ~plain.last_batch.present[name]
                was_gone |= bool(gone.any())
                for got, wanted in zip(
                    (rewards, terminated, truncated), expected[1:4], strict=True
                ):
                    assert np.isnan(got[name][gone].astype(float)).all()
                    assert (got[name][~gone] == wanted[name][~gone]).all()
                unseen = gone & ~plain.last_batch.alive[name]
                assert np.isnan(obs[name][unseen]).all()
                assert not np.isnan(obs[name][~unseen]).any()
        assert was_gone
        with pytest.raises(errors.ActionError, match="alive in some slots where its action is NaN"):
            vec.step({name: np.full_like(actions[name], np.nan) for name in vec.agents})


# ---- actions ------------------------------------------------------------------------------------


def test_actions_that_cannot_be_are_refused():
    with AsyncPettingZooVecEnv([Pair] * 2, **HERE) as vec:
        vec.reset(seed=0)
        zeros = np.zeros(2, np.int64)
        for wrong, why in (
            ({"speaker_0": zeros}, "'listener_0' is alive in some slots and has no actions"),
            ({"speaker_0": zeros, "listener_0": zeros[:1]}, "the actions of 'listener_0'"),
            ({"speaker_0": zeros, "listener_0": zeros + 0.5}, "the actions of 'listener_0'"),
            ({"speaker_0": zeros, "listener_0": zeros, "x": zeros}, "not among the agents"),
            ([{"speaker_0": 0, "listener_0": 0}], "2 slots need 2 dicts"),
            (
                [{"speaker_0": 0, "listener_0": 0}, {"speaker_0": 0}],
                r"in slot 1 .*'listener_0'\] must",
            ),
        ):
            with pytest.raises(errors.ActionError, match=why):
                vec.step(wrong)
        vec.step({"speaker_0": zeros, "listener_0": zeros})


def test_an_action_for_a_dead_agent():
    """In a batch it is ignored, because something has to be there; alone it is an error."""
    make = functools.partial(DyingAgentsParallel, death_rate=0.4)
    with AsyncPettingZooVecEnv([make] * 1, **HERE) as vec:
        vec.reset(seed=0)
        while True:
            living = [name for name in vec.agents if vec.alive[name][0]]
            if len(living) < len(vec.agents):
                break
            vec.step({name: np.zeros(1, np.int64) for name in vec.agents})
        (dead, *_) = (name for name in vec.agents if name not in living)
        with pytest.raises(errors.ActionError, match=rf"in slot 0 .*'{dead}'.* may not act"):
            vec.step([dict.fromkeys(vec.agents, 0)])
        before = len(vec.get_attr("taken")[0])
        vec.set_attr("death_rate", 0.0)
        vec.step({name: np.zeros(1, np.int64) for name in vec.agents})
        assert [name for name, _ in vec.get_attr("taken")[0][before:]] == living


def test_an_action_outside_its_mask():
    """Connect four ends; without its wrapper the environment itself refuses."""
    with AECVecEnv([connect_four_v3.env] * 2, **HERE) as vec:
        vec.reset(seed=0)
        for _ in range(6):
            vec.step([0, 1])
        batch = vec.step([0, 2])
        assert batch.ended.tolist() == [True, False]
        assert batch.all_rewards[0].tolist() == [-1, 0]
        assert batch.all_truncated[0].all()
    with AECVecEnv([connect_four_v3.raw_env] * 2, **HERE) as vec:
        vec.reset(seed=0)
        for _ in range(6):
            vec.step([0, 1])
        with pytest.raises(errors.EnvFailed, match="played illegal move"):
            vec.step([0, 2])


def test_an_action_outside_its_space():
    with AECVecEnv([connect_four_v3.env] * 2, **HERE) as vec:
        vec.reset(seed=0)
        with pytest.raises(errors.EnvFailed, match="of player_0 is not in its space"):
            vec.step([7, 0])


def test_masks_leave_one_action_to_the_dead():
    make = functools.partial(DyingAgentsParallel, death_rate=0.4)
    with AsyncPettingZooVecEnv([make] * 8, **HERE) as vec:
        vec.reset(seed=0)
        vec.step({name: np.zeros(8, np.int64) for name in vec.agents})
        batch = vec.last_batch
        for name in vec.agents:
            dead = ~batch.alive[name]
            masks = batch.masks[name]
            assert (masks[dead].sum(axis=1) == 1).all()
            assert masks[dead, 0].all()
            given = batch.obs[name]["action_mask"][~dead]
            assert (masks[~dead] == given.astype(bool)).all()


# ---- groups and turns ---------------------------------------------------------------------------


def test_groups_by_wish():
    wanted = {"all": ["agent_2", "agent_1"]}
    with AsyncPettingZooVecEnv(
        [GridWorldEnvParallel] * 2, groups=wanted, by_group=True, **HERE
    ) as vec:
        assert vec.groups == {"all": ("agent_2", "agent_1")}
        obs, _ = vec.reset(seed=0)
        env = GridWorldEnvParallel()
        seen, _ = env.reset(seed=0)
        assert obs["all"]["agent"][0, 0].tolist() == seen["agent_2"]["agent"].tolist()
    for wrong, why in (
        ({"all": ["agent_1"]}, "every agent once"),
        ({"a": ["agent_1", "agent_2"], "b": []}, "none may be empty"),
    ):
        with pytest.raises(errors.ConfigError, match=why):
            AsyncPettingZooVecEnv([GridWorldEnvParallel] * 2, groups=wrong, **HERE)
    with pytest.raises(errors.ConfigError, match="different observation spaces"):
        AsyncPettingZooVecEnv([Pair], groups={"all": Pair.possible_agents}, **HERE)


def test_one_policy_for_each_group_of_a_game_with_different_spaces():
    make = functools.partial(DyingAgents, mixed_actions(), has_masks=False)
    with AECVecEnv([make] * 4, **HERE) as vec:
        batch = vec.reset(seed=0)
        with pytest.raises(errors.ConfigError, match="use rows_of and obs_of"):
            _ = batch.obs
        with pytest.raises(errors.ConfigError, match="use masks_of"):
            _ = batch.masks
        assert vec.shared_action_space is None
        for _ in range(30):
            actions = {
                "wolf": np.zeros(len(batch.rows_of("wolf")), np.int64),
                "hare": np.ones((len(batch.rows_of("hare")), 2, 2), np.float32),
            }
            assert batch.obs_of("hare_0").shape == (len(batch.rows_of("hare_0")), 2)
            batch = vec.step(actions)
        done = dict(one for taken in vec.get_attr("taken") for one in taken)
        assert done == {"wolf_0": 0, "hare_0": [[1, 1], [1, 1]]}
        with pytest.raises(errors.ActionError, match="it is the turn of the group"):
            vec.step({"wolf": []})
        with pytest.raises(errors.ActionError, match="4 slots need 4 actions, got 1"):
            vec.step([0])
        with pytest.raises(errors.ConfigError, match="neither an agent nor a group 'x'"):
            batch.rows_of("x")


def test_one_policy_acts_on_the_whole_batch():
    with AECVecEnv([connect_four_v3.env] * 6, **APART) as vec:
        batch = vec.reset(seed=0)
        assert vec.groups == {"player": ("player_0", "player_1")}
        for _ in range(50):
            assert batch.obs["observation"].shape == (6, 6, 7, 2)
            assert (batch.obs["action_mask"].astype(bool) == batch.masks).all()
            batch = vec.step(batch.masks.argmax(axis=1))


# ---- seats --------------------------------------------------------------------------------------

GENERATED_PARALLEL = [
    generated_agents_parallel_v0.parallel_env,
    generated_agents_parallel_cust_agentid_v0.parallel_env,
]
GENERATED_TURNS = [
    generated_agents_env_v0,
    generated_agents_env_action_mask_info_v0,
    generated_agents_env_action_mask_obs_v0,
    generated_agents_env_cust_agentid_v0,
]


@pytest.mark.parametrize("where", [HERE, APART], ids=["here", "apart"])
@pytest.mark.parametrize("make", GENERATED_PARALLEL)
def test_generated_agents_have_seats(make, where):
    make = functools.partial(make, max_cycles=30)
    by_hand = [make(), make()]
    expected = [env.reset(seed=slot)[0] for slot, env in enumerate(by_hand)]
    with AsyncPettingZooVecEnv([make] * 2, seats=40, **where) as vec:
        vec.reset(seed=0)
        seats: list[dict[Any, int]] = [{}, {}]
        for _ in range(30):
            batch = vec.last_batch
            actions = []
            for slot, env in enumerate(by_hand):
                names = {name: seat for seat, name in batch.names[slot].items()}
                assert set(expected[slot]) == set(names)
                living = {name for name in names if batch.alive[names[name]][slot]}
                assert living == set(env.agents)
                for name, seat in names.items():
                    assert seats[slot].get(name, seat) == seat
                    assert (batch.obs[seat][slot] == expected[slot][name]).all()
                seats[slot] = names
                actions.append({names[name]: 1 for name in living})
            _, rewards, terminated, truncated, _ = vec.step(actions)
            for slot, env in enumerate(by_hand):
                expected[slot], *brought, _ = env.step(dict.fromkeys(env.agents, 1))
                names = {name: seat for seat, name in vec.last_batch.names[slot].items()}
                for found, wanted in zip((rewards, terminated, truncated), brought, strict=True):
                    assert {name: found[names[name]][slot] for name in wanted} == wanted


@pytest.mark.parametrize("where", [HERE, APART], ids=["here", "apart"])
@pytest.mark.parametrize("module", GENERATED_TURNS, ids=lambda module: module.__name__[-25:])
def test_generated_agents_take_turns_on_seats(module, where):
    """What they observe is drawn without a seed, so that only names and rewards are compared."""
    # one of them draws masks that forbid everything, which its wrapper would take for illegal moves
    make = module.raw_env if module is generated_agents_env_action_mask_obs_v0 else module.env
    by_hand = [make(), make()]
    for slot, env in enumerate(by_hand):
        env.reset(seed=slot)
    with AECVecEnv([make] * 2, seats=60, **where) as vec:
        batch = vec.reset(seed=0)
        for _ in range(300):
            actions = []
            for slot, env in enumerate(by_hand):
                while env.terminations[env.agent_selection]:
                    env.last()
                    env.step(None)
                agent = env.agent_selection
                seen, reward, *_, info = env.last()
                assert batch.agents[slot] == agent
                assert batch.rewards[slot] == reward
                told = batch.infos[int(batch.turns[slot])]
                own = {key: told[key][slot] for key in ("action_mask",) if key in told}
                actions.append(_first_allowed(batch.obs[slot], own))
                env.step(_first_allowed(seen, info))
            batch = vec.step(actions)
        assert not batch.ended.any()


def _first_allowed(seen, info):
    mask = seen["action_mask"] if isinstance(seen, dict) else info.get("action_mask")
    return 0 if mask is None or not np.any(mask) else int(np.flatnonzero(mask)[0])


def test_without_seats_one_sentence_says_so():
    for kind, make in (
        (AsyncPettingZooVecEnv, generated_agents_parallel_v0.parallel_env),
        (AECVecEnv, generated_agents_env_v0.env),
    ):
        with pytest.raises(
            errors.ConfigError, match=r"possible_agents\): give the largest.*seats="
        ):
            kind([make] * 2, **HERE)
        with (
            pytest.raises(errors.EnvFailed, match="finds no free seat: 3 agents"),
            kind([make] * 2, seats=3, **HERE) as vec,
        ):
            vec.reset(seed=0)


def test_seats_refuse_what_they_cannot_do():
    make = generated_agents_parallel_v0.parallel_env
    with pytest.raises(errors.ConfigError, match="seats must be a whole number"):
        AsyncPettingZooVecEnv([make], seats=0, **HERE)
    with pytest.raises(errors.ConfigError, match="seats have no groups"):
        AsyncPettingZooVecEnv([make], seats=9, groups={"a": ["b"]}, **HERE)
    with pytest.raises(errors.ConfigError, match="neither by_group"):
        AsyncPettingZooVecEnv([make], seats=9, by_group=True, **HERE)
    with AsyncPettingZooVecEnv([make], seats=9, **HERE) as vec:
        vec.reset(seed=0)
        with pytest.raises(errors.ActionError, match="are alive and have no action"):
            vec.step([{}])
        with pytest.raises(errors.ConfigError, match="known to its environment only"):
            vec.single_action_space(0)
        seat, name = next(iter(vec.last_batch.names[0].items()))
        assert isinstance(vec.call("action_space", name, slots=[0])[0], spaces.Discrete)
        assert vec.alive[seat][0]


class WithGhost(Pair):
    """Brings up an agent that it did not speak of."""

    def step(self, actions):
        seen, *rest = super().step(actions)
        return {**seen, "ghost": np.zeros(3)}, *rest


def test_an_agent_that_was_not_among_the_possible_ones_is_named():
    with AsyncPettingZooVecEnv([WithGhost], **HERE) as vec:
        vec.reset(seed=0)
        with pytest.raises(errors.EnvFailed, match=r"'ghost', who is not among .*give seats="):
            vec.step({name: np.zeros(1, np.int64) for name in vec.agents})


# ---- one slot -----------------------------------------------------------------------------------


def test_wrong_environments_are_refused():
    with pytest.raises(errors.ConfigError, match="a PettingZoo ParallelEnv is needed, got"):
        AsyncPettingZooVecEnv([connect_four_v3.env], **HERE)
    with pytest.raises(errors.ConfigError, match="AsyncPettingZooVecEnv takes Parallel"):
        AECVecEnv([Pair], **HERE)
    env = Pair()
    with pytest.raises(errors.ConfigError, match="is no function: give one function per slot"):
        AsyncPettingZooVecEnv([env], **HERE)
    with pytest.raises(errors.ConfigError, match="the same instance"):
        AsyncPettingZooVecEnv([lambda: env] * 2, **HERE)
    text = functools.partial(Pair, space=spaces.Text(5))
    with pytest.raises(errors.ConfigError, match="cannot be part of a record"):
        AsyncPettingZooVecEnv([text], **HERE)
    with pytest.raises(errors.ConfigError, match="compat must be"):
        AsyncPettingZooVecEnv([Pair], **{"compat": "sb3", **HERE})
    with pytest.raises(errors.ConfigError, match="AgileRL knows no groups"):
        AsyncPettingZooVecEnv([Pair], compat="agilerl", by_group=True, **HERE)


def test_what_was_set_can_be_read_through_layers_that_pass_no_names_on():
    with AsyncPettingZooVecEnv([simple_spread_v3.parallel_env] * 2, **HERE) as vec:
        vec.set_attr("note", [1, 2])
        assert vec.get_attr("note") == (1, 2)
        assert vec.get_attr("max_cycles") == (25, 25)


@pytest.mark.parametrize(
    ("kind", "make"),
    [(ParallelSlot, DyingAgentsParallel), (TurnSlot, DyingAgents)],
    ids=["parallel", "turns"],
)
def test_a_pickled_slot_goes_on_where_it_was(kind, make):
    slot = kind(make(), None, None)
    slot.action_space.seed(0)
    slot.reset(seed=0)
    slot.step(slot.action_space.sample())
    other = pickle.loads(pickle.dumps(slot))
    for _ in range(5):
        action = slot.action_space.sample()
        one, two = slot.step(action), other.step(action)
        assert all((one[0][name] == two[0][name]).all() for name in one[0].dtype.names)
        assert one[1:4] == two[1:4]
        if one[2] or one[3]:
            slot.reset()
            other.reset()


@pytest.mark.parametrize("where", [HERE, APART], ids=["here", "apart"])
@pytest.mark.parametrize(
    ("kind", "make"),
    [(AsyncPettingZooVecEnv, DyingAgentsParallel), (AECVecEnv, DyingAgents)],
    ids=["parallel", "turns"],
)
def test_restored_slots_go_on_where_they_were(kind, make, where):
    def on(vec, rng):
        # one action for each living agent, or for each agent whose turn it is: others are refused
        batches = []
        for _ in range(8):
            if kind is AECVecEnv:
                batch = vec.step(rng.integers(2, size=vec.num_envs))
                obs = {group: batch.obs_of(group) for group in vec.groups}
            else:
                alive = vec.alive
                vec.step(
                    [
                        {name: int(rng.integers(2)) for name in alive if alive[name][slot]}
                        for slot in range(vec.num_envs)
                    ]
                )
                batch = vec.last_batch
                obs = batch.obs
            batches.append((obs, batch.all_rewards, batch.all_alive, batch.ended))
        return batches

    with kind([make] * 3, **where) as vec, kind([make] * 3, **where) as other:
        vec.reset(seed=0)
        on(vec, np.random.default_rng(0))
        kept = vec.snapshot()
        now = vec.restore(kept)
        assert not now.valid.any()
        assert not now.all_rewards.any()
        expected = on(vec, np.random.default_rng(1))
        assert value_difference(expected, on_restored(other, kept, on)) is None
        # some slots, in another order
        found = vec.restore([kept[2], kept[0]], [2, 0])
        assert found.slots.tolist() == [2, 0]
        assert (found.all_alive == now.all_alive[[2, 0]]).all()
        vec.restore([kept[1]], [1])
        assert value_difference(expected, on(vec, np.random.default_rng(1))) is None


def on_restored(vec, kept, on):
    vec.reset(seed=7)
    vec.restore(kept)
    return on(vec, np.random.default_rng(1))


def test_restored_seats_have_their_names():
    make = functools.partial(GENERATED_PARALLEL[0], max_cycles=30)
    with AsyncPettingZooVecEnv([make] * 2, seats=40, **HERE) as vec:
        vec.reset(seed=0)
        for _ in range(5):
            alive = vec.alive
            vec.step([{seat: 1 for seat in alive if alive[seat][slot]} for slot in range(2)])
        before = vec.last_batch
        kept = vec.snapshot()
        vec.reset(seed=5)
        assert vec.restore(kept).names == before.names
        assert value_difference(vec.alive, before.alive) is None


class Doubling(wrappers.BaseWrapper):
    def step(self, action):
        super().step(action)


class AnnaAgain(Sticks):
    """It is always the turn of the first agent."""

    metadata: ClassVar[dict[str, Any]] = {**Sticks.metadata, "is_parallelizable": True}

    def step(self, action):
        super().step(action)
        self.agent_selection = "anna"


def test_an_order_that_is_no_cycle_is_an_error_that_says_where_to_go():
    with AsyncPettingZooVecEnv([lambda: aec_to_parallel(AnnaAgain())], **HERE) as vec:
        vec.reset(seed=0)
        with pytest.raises(errors.EnvFailed, match=r"turn of anna, not of bert.*AECVecEnv"):
            vec.step({name: np.zeros(1, np.int64) for name in vec.agents})


def test_wrappers_of_other_kinds_stay():
    assert type(Bare(connect_four_v3.env()).env) is connect_four_v3.raw_env
    kept = Doubling(connect_four_v3.raw_env())
    outer = wrappers.OrderEnforcingWrapper(wrappers.TerminateIllegalWrapper(kept, -1))
    assert Bare(outer).env is kept

    class Own(wrappers.OrderEnforcingWrapper):
        pass

    own = Own(connect_four_v3.raw_env())
    assert Bare(own).env is own


def test_a_game_that_should_tell_its_masks_and_does_not():
    class Silent(DyingAgents):
        def __init__(self):
            super().__init__(has_masks=False)

    env = wrappers.TerminateIllegalWrapper(Silent(), -1)
    with AECVecEnv([lambda: env], **HERE) as vec:
        vec.reset(seed=0)
        with pytest.raises(errors.EnvFailed, match="neither in its observation nor in its info"):
            vec.step([0])


def test_pettingzoo_s_examples_are_all_here():
    names = {name for name in dir(example_envs) if name.startswith("generated_agents")}
    here = {one.__name__.rpartition(".")[2] for one in GENERATED_TURNS}
    here |= {one.__module__.rpartition(".")[2] for one in GENERATED_PARALLEL}
    assert names <= here
    assert issubclass(connect_four_v3.raw_env, AECEnv)

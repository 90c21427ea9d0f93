"""What make_vec returns, held against Gymnasium's SyncVectorEnv by one script for both.

Gymnasium's own tests run by `scripts/gymnasium_tests`, for which a checkout is needed. Here is what
they look at, in our words. How data travels is the business of tests/conformance, and wrong input
of test_wrong_input; almost everything here runs in this process.
"""

import functools
import gc
import time
import weakref
from contextlib import closing
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit
from gymnasium.wrappers import vector as vector_wrappers

import envfleet
from envfleet import errors
from envfleet.testing import Counter, TaskCounter
from envfleet.testing.values import value_difference
from tests.conformance.matrix import FORK
from tests.conformance.matrix import opened as opened_fleet

MODES = list(AutoresetMode)
MODE_IDS = [mode.name for mode in MODES]
ZEROS = np.zeros(3, np.int64)


class Observatory(gymnasium.Env[Any, Any]):
    """Nested observations, nested actions, and infos of every kind that Gymnasium can collate."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012 - Gymnasium's way
    observation_space = spaces.Dict(
        {
            "position": spaces.Box(-1, 1, (2,)),
            "image": spaces.Box(0, 255, (2, 2), np.uint8),
            "count": spaces.Discrete(9),
            "pair": spaces.Tuple((spaces.MultiBinary(3), spaces.MultiDiscrete([3, 4]))),
            "word": spaces.Text(6),
        }
    )
    action_space = spaces.Dict({"gear": spaces.Discrete(3), "force": spaces.Box(-1, 1, (2,))})

    def __init__(self, length: int = 4, render_mode: str | None = None) -> None:
        self.length, self.render_mode, self.t = length, render_mode, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {**self._inform(), "options": options}

    def step(self, action):
        self.t += 1
        reward = float(action["force"].sum()) + int(action["gear"])
        return self._observe(), reward, self.t >= self.length, False, self._inform()

    def render(self):
        return np.full((2, 2, 3), self.t, np.uint8)

    def _observe(self):
        draw = self.np_random
        return {
            "position": draw.uniform(-1, 1, 2).astype(np.float32),
            "image": draw.integers(0, 256, (2, 2), dtype=np.uint8),
            "count": draw.integers(9),
            "pair": (draw.integers(0, 2, 3).astype(np.int8), draw.integers(0, 3, 2)),
            "word": "abc"[: int(draw.integers(4))],
        }

    def _inform(self):
        info = {
            "whole": self.length,
            "part": self.t / 2,
            "flag": self.t % 2 == 0,
            "single": np.float32(self.t),
            "array": np.arange(3) + self.t,
            "text": f"step {self.t}",
            "nothing": None,
            "nested": {"t": self.t, "deeper": {"half": 0.5}},
        }
        return {**info, "odd": self.t} if self.t % 2 else info


def lake():
    # Not slippery: with chances below 1 Gymnasium's own info cuts them off to 0 beside a reset's 1.
    return gymnasium.make("FrozenLake-v1", is_slippery=False)


ENVS: dict[str, list[Any]] = {
    "Box": [functools.partial(gymnasium.make, "CartPole-v1")] * 3,
    "Discrete": [lake] * 3,
    "Tuple": [functools.partial(gymnasium.make, "Blackjack-v1")] * 3,
    "Dict": [functools.partial(Observatory, length) for length in (3, 4, 5)],
    "statistics": [lambda: RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))] * 3,
    "truncation": [lambda: TimeLimit(gymnasium.make("Pendulum-v1").unwrapped, 7)] * 3,
}


def fleet(env_fns, **kwargs):
    return envfleet.make_vec(env_fns, **{"backend": "serial", **kwargs})


def both(env_fns, mode=AutoresetMode.NEXT_STEP, **kwargs):
    return SyncVectorEnv(env_fns, autoreset_mode=mode), fleet(env_fns, autoreset=mode, **kwargs)


def difference(expected, got, path=""):
    """The first place where two results differ, also in type, or None."""
    if path.endswith((".episode.t", "['episode']['t']")):  # wall clock
        return None
    if isinstance(expected, dict) and isinstance(got, dict):
        if expected.keys() != got.keys():
            return f"{path}: keys {sorted(expected)} and {sorted(got)}"
        pairs = [(f"{path}.{key}", expected[key], got[key]) for key in expected]
    elif isinstance(expected, np.ndarray) and isinstance(got, np.ndarray):
        # FrozenLake reports 1 at reset and 1.0 after, and we do not cut the second off
        is_wider = (expected.dtype.kind, got.dtype.kind) == ("i", "f")
        if expected.shape != got.shape or (expected.dtype != got.dtype and not is_wider):
            return f"{path}: {expected!r} and {got!r}"
        if expected.dtype != object:
            return None if np.array_equal(expected, got) else f"{path}: {expected} and {got}"
        pairs = [(f"{path}[{i}]", *two) for i, two in enumerate(zip(expected, got, strict=True))]
    elif isinstance(expected, list | tuple):
        if type(expected) is not type(got) or len(expected) != len(got):
            return f"{path}: {expected!r} and {got!r}"
        pairs = [(f"{path}[{i}]", *two) for i, two in enumerate(zip(expected, got, strict=True))]
    else:
        # a row of numbers does not keep whether an environment said 3 or np.int64(3)
        is_whole = isinstance(expected, int | np.integer) and isinstance(got, int | np.integer)
        is_same = expected == got and (type(expected) is type(got) or is_whole)
        return None if is_same else f"{path}: {expected!r} and {got!r}"
    return next((found for name, a, b in pairs if (found := difference(a, b, name))), None)


def assert_same(expected, got, what):
    found = difference(expected, got)
    assert found is None, f"{what}: Gymnasium and envfleet differ at {found}"


def assert_run_alike(pair, num_steps=40):
    """Play one script on both, with manual and masked resets, and compare everything."""
    reference, ours = pair
    with closing(reference), closing(ours):
        reference.action_space.seed(5)
        for seed in (3, [7, None, 9], None):
            assert_same(reference.reset(seed=seed), ours.reset(seed=seed), f"reset({seed})")
            for step in range(num_steps):
                actions = reference.action_space.sample()
                expected = reference.step(actions)
                assert_same(expected, ours.step(actions), f"step {step} after reset({seed})")
                ended = expected[2] | expected[3]
                if reference.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
                    # Gymnasium takes the mask out of the dict it is given, so each gets its own
                    expected = reference.reset(options={"reset_mask": ended})
                    got = ours.reset(options={"reset_mask": ended})
                    assert_same(expected, got, f"masked reset after step {step}")


class TestAgainstSync:
    @pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
    @pytest.mark.parametrize("env_fns", ENVS.values(), ids=ENVS)
    def test_same_streams(self, env_fns, mode):
        assert_run_alike(both(env_fns, mode))

    @pytest.mark.parametrize("mode", MODES[:2], ids=MODE_IDS[:2])
    def test_same_streams_from_processes(self, mode):
        kwargs = {"backend": "process", "start_method": "fork", "num_workers": 2}
        assert_run_alike(both(ENVS["Dict"], mode, **kwargs), num_steps=15)

    def test_same_streams_without_copies(self):
        # read at once, before the next step, which is as long as such views are valid
        assert_run_alike(both(ENVS["Box"], copy=False))

    @pytest.mark.parametrize("env_fns", ENVS.values(), ids=ENVS)
    def test_same_facts(self, env_fns):
        reference, ours = both(env_fns)
        with closing(reference), closing(ours):
            for name in (
                *("num_envs", "single_observation_space", "observation_space"),
                *(
                    "single_action_space",
                    "action_space",
                    "metadata",
                    "render_mode",
                    "spec",
                    "closed",
                ),
            ):
                assert getattr(ours, name) == getattr(reference, name), name
            assert isinstance(ours, VectorEnv)
            assert ours.unwrapped is ours

    def test_same_numbers_when_spaces_are_sampled(self):
        reference, ours = both(ENVS["Dict"])
        with closing(reference), closing(ours):
            for space in ("action_space", "observation_space", "single_action_space"):
                # one after the other: here both hold the class's own single space
                getattr(reference, space).seed(4)
                expected = getattr(reference, space).sample()
                getattr(ours, space).seed(4)
                assert_same(expected, getattr(ours, space).sample(), space)


class TestAutoreset:
    """The three modes on an environment whose answers are known: slots end at steps 2, 3 and 3."""

    @pytest.fixture
    def open_counters(self):
        opened = []

        def of(mode):
            envs = fleet(
                [functools.partial(Counter, length) for length in (2, 3, 3)], autoreset=mode
            )
            opened.append(envs)
            return envs

        yield of
        for envs in opened:
            envs.close()

    @staticmethod
    def rows(envs, num_steps):
        for _ in range(num_steps):
            obs, rewards, terminated, truncated, infos = envs.step(ZEROS)
            assert not truncated.any()
            yield obs[:, 0].tolist(), rewards.tolist(), terminated.tolist(), infos

    @pytest.mark.parametrize("name", ["next_step", AutoresetMode.NEXT_STEP])
    def test_next_step(self, open_counters, name):
        envs = open_counters(name)
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        envs.reset()
        assert list(self.rows(envs, 4)) == [
            ([1, 1, 1], [1, 1, 1], [False, False, False], {}),
            ([2, 2, 2], [2, 2, 2], [True, False, False], {}),
            ([0, 3, 3], [0, 3, 3], [False, True, True], {}),
            ([1, 0, 0], [1, 0, 0], [False, False, False], {}),
        ]

    def test_same_step(self, open_counters):
        envs = open_counters("same_step")
        assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        envs.reset()
        first, second, third = self.rows(envs, 3)
        assert first == ([1, 1, 1], [1, 1, 1], [False, False, False], {})
        assert second[:3] == ([0, 2, 2], [2, 2, 2], [True, False, False])
        assert third[:3] == ([1, 0, 0], [1, 3, 3], [False, True, True])
        for infos, finals in ((second[3], [2, None, None]), (third[3], [None, 3, 3])):
            has = [final is not None for final in finals]
            assert infos.keys() == {"final_obs", "final_info", "_final_obs", "_final_info"}
            assert infos["final_obs"].dtype == object
            assert [obs if obs is None else obs[0] for obs in infos["final_obs"]] == finals
            assert infos["_final_obs"].tolist() == infos["_final_info"].tolist() == has
            assert infos["final_info"] == {}

    def test_disabled(self, open_counters):
        envs = open_counters("disabled")
        assert envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
        envs.reset()
        _, (_, _, ended, _) = self.rows(envs, 2)
        assert ended == [True, False, False]
        obs, infos = envs.reset(options={"reset_mask": np.array(ended)})
        assert (obs[:, 0].tolist(), infos) == ([0, 2, 2], {})
        assert next(self.rows(envs, 1))[0] == [1, 3, 3]

    def test_disabled_does_not_step_past_an_end(self, open_counters):
        envs = open_counters("disabled")
        envs.reset()
        list(self.rows(envs, 2))
        with pytest.raises(errors.ResetNeeded, match=r"slots \[0\] .* call reset"):
            envs.step(ZEROS)

    @pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
    def test_the_mode_stays_out_of_the_environment_class(self, mode):
        with closing(fleet(ENVS["Dict"], autoreset=mode)) as envs:
            assert envs.metadata == {**Observatory.metadata, "autoreset_mode": mode}
        assert "autoreset_mode" not in Observatory.metadata

    @pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
    def test_the_mode_is_an_attribute_too(self, mode):
        """TorchRL's GymWrapper reads it there."""
        with closing(fleet(ENVS["Dict"], autoreset=mode)) as envs:
            assert envs.autoreset_mode is mode


class TestSeeds:
    @pytest.fixture
    def envs(self):
        with closing(fleet(TaskCounter, num_envs=3)) as envs:
            yield envs

    @pytest.mark.parametrize(
        ("seed", "given"),
        [
            (5, [5, 6, 7]),
            (np.int64(5), [5, 6, 7]),
            ([9, 2, 2], [9, 2, 2]),
            ((9, 2, 2), [9, 2, 2]),
            (np.array([9, 2, 2]), [9, 2, 2]),
            ([None, 4, None], [-1, 4, -1]),
            (None, [-1, -1, -1]),
        ],
    )
    def test_reach_their_slots(self, envs, seed, given):
        obs, infos = envs.reset(seed=seed)
        assert obs[:, 0].tolist() == infos["seed"].tolist() == given

    def test_stay_until_the_next(self, envs):
        envs.reset(seed=42)
        assert envs.np_random_seed == (42, 43, 44)
        before = [generator.bit_generator.state for generator in envs.np_random]
        envs.reset()
        assert envs.np_random_seed == (42, 43, 44)
        assert [generator.bit_generator.state for generator in envs.np_random] == before

    def test_are_drawn_for_an_environment_that_got_none(self, envs):
        assert len(set(envs.np_random_seed)) == 3

    @pytest.mark.parametrize(
        "seed", [[1, 2], [1, 2, 3, 4], "abc", 1.5, [1, "a", 2], True, {1, 2, 3}]
    )
    def test_of_the_wrong_kind_or_number_are_refused(self, envs, seed):
        with pytest.raises(
            errors.ConfigError, match="seed must be a whole number, None, or a list"
        ):
            envs.reset(seed=seed)
        envs.reset(seed=1)


class TestOptions:
    @pytest.fixture
    def envs(self):
        with closing(fleet(TaskCounter, num_envs=3)) as envs:
            yield envs

    def test_reach_every_slot(self, envs):
        _, infos = envs.reset(options={"task": 4, "level": "hard"})
        assert infos["options"].tolist() == ["{'level': 'hard', 'task': 4}"] * 3

    def test_may_differ_by_slot(self, envs):
        obs, _ = envs.reset(options=[{"task": 1}, None, {"task": 3}])
        assert obs[:, 1].tolist() == [1, 0, 3]

    def test_are_left_as_they_were(self, envs):
        mask = np.array([True, False, True])
        options = {"task": 2, "reset_mask": mask}
        envs.reset(options=options)
        assert options.keys() == {"task", "reset_mask"}
        assert options["reset_mask"] is mask

    def test_empty_ones_are_passed_on(self):
        with closing(fleet(Observatory, num_envs=2)) as envs:
            assert envs.reset(options={})[1]["options"] == {}
            assert envs.reset()[1]["options"].tolist() == [None, None]

    @pytest.mark.parametrize("options", [3, "abc", [{}, {}], [1, 2, 3], ["a", "b", "c"]])
    def test_of_the_wrong_kind_or_number_are_refused(self, envs, options):
        with pytest.raises(errors.ConfigError, match="options must be a mapping, None, or a list"):
            envs.reset(options=options)


class TestResetMask:
    @pytest.fixture
    def envs(self):
        with closing(fleet(TaskCounter, num_envs=3)) as envs:
            envs.reset(seed=0)
            yield envs

    def test_resets_those_and_no_others(self, envs):
        envs.step(ZEROS)
        obs, infos = envs.reset(
            seed=[7, 8, 9], options={"task": 5, "reset_mask": np.array([True, False, True])}
        )
        assert obs.tolist() == [[7, 5, 2, 0], [1, 0, 1, 1], [9, 5, 2, 0]]
        assert infos["_seed"].tolist() == [True, False, True]
        assert infos["seed"].tolist() == [7, 0, 9]
        assert infos["options"].tolist() == ["{'task': 5}", None, "{'task': 5}"]

    def test_of_all_is_a_reset(self, envs):
        envs.step(ZEROS)
        obs, infos = envs.reset(options={"reset_mask": np.ones(3, np.bool_)})
        assert obs[:, 3].tolist() == [0, 0, 0]
        assert infos["_task"].all()

    def test_cancels_the_pending_autoreset_of_those_only(self, envs):
        for _ in range(3):
            _, _, terminated, _, _ = envs.step(ZEROS)
        assert terminated.all()
        envs.reset(options={"reset_mask": np.array([True, False, False])})
        obs, rewards, _, _, _ = envs.step(ZEROS)
        assert obs[:, 2:].tolist() == [[2, 1], [2, 0], [2, 0]]
        assert rewards.tolist() == [1, 0, 0]

    def test_may_come_first(self):
        with closing(fleet(TaskCounter, num_envs=3)) as envs:
            obs, _ = envs.reset(seed=1, options={"reset_mask": np.array([True, False, True])})
            assert obs[[0, 2], 0].tolist() == [1, 3]
            with pytest.raises(errors.ResetNeeded, match=r"slots \[1\] .* call reset"):
                envs.step(ZEROS)
            envs.reset(options={"reset_mask": np.array([False, True, False])})
            envs.step(ZEROS)

    @pytest.mark.parametrize(
        ("mask", "error", "text"),
        [
            ([True, True, False], TypeError, "must be a numpy array of bool, got list"),
            (None, TypeError, "must be a numpy array of bool, got NoneType"),
            (np.array([True]), ValueError, r"must have shape `\(3,\)`, got \(1,\)"),
            (np.ones(4, np.bool_), ValueError, r"must have shape `\(3,\)`, got \(4,\)"),
            (np.ones((1, 3), np.bool_), ValueError, r"must have shape `\(3,\)`, got \(1, 3\)"),
            (np.zeros(3, np.bool_), ValueError, r"at least one True value, got reset_mask=\[False"),
            (np.array([1, 1, 0]), TypeError, "must have `dtype=np.bool_`, got int64"),
            (np.ones(3), TypeError, "must have `dtype=np.bool_`, got float64"),
        ],
    )
    def test_of_the_wrong_kind_is_refused(self, envs, mask, error, text):
        with pytest.raises(error, match=text):
            envs.reset(options={"reset_mask": mask})
        envs.step(ZEROS)


class TestVectorWrappers:
    """Gymnasium's vector wrappers on top of ours do what they do on top of Gymnasium's."""

    ANY_MODE: ClassVar = [
        (vector_wrappers.RecordEpisodeStatistics, "Box"),
        (vector_wrappers.RecordEpisodeStatistics, "Tuple"),
        (vector_wrappers.NormalizeReward, "truncation"),
        (vector_wrappers.DictInfoToList, "Dict"),
        (vector_wrappers.DictInfoToList, "statistics"),
        (vector_wrappers.ClipAction, "truncation"),
        (functools.partial(vector_wrappers.ClipReward, max_reward=0.5), "Box"),
    ]
    # wrappers of observations refuse same_step, of whose last observations they do not know
    NEXT_STEP: ClassVar = [
        (vector_wrappers.NormalizeObservation, "Box"),
        (functools.partial(vector_wrappers.DtypeObservation, dtype=np.float64), "Box"),
        (functools.partial(vector_wrappers.FilterObservation, filter_keys=["image"]), "Dict"),
    ]

    @pytest.mark.parametrize(
        ("wrap", "env", "mode"),
        [
            *((*one, mode) for one in ANY_MODE for mode in MODES[:2]),
            *((*one, AutoresetMode.NEXT_STEP) for one in NEXT_STEP),
        ],
        ids=lambda value: getattr(getattr(value, "func", value), "__name__", str(value)),
    )
    def test_give_the_same(self, wrap, env, mode):
        reference, ours = (wrap(envs) for envs in both(ENVS[env], mode))
        with closing(reference), closing(ours):
            reference.action_space.seed(5)
            assert_same(reference.reset(seed=1), ours.reset(seed=1), "reset")
            for step in range(40):
                actions = reference.action_space.sample()
                assert_same(reference.step(actions), ours.step(actions), f"step {step}")

    def test_statistics_count_each_episode_once(self):
        with closing(
            vector_wrappers.RecordEpisodeStatistics(
                fleet([functools.partial(Counter, length) for length in (2, 3)])
            )
        ) as envs:
            envs.reset()
            seen: list[list[tuple[float, int]]] = [[], []]
            for _ in range(12):
                *_, infos = envs.step(np.zeros(2, np.int64))
                for slot in np.flatnonzero(infos.get("_episode", [])):
                    episode = infos["episode"]
                    seen[slot].append((episode["r"][slot], episode["l"][slot]))
        assert seen == [[(3.0, 2)] * 4, [(6.0, 3)] * 3]

    def test_a_wrapper_forwards_to_the_fleet(self):
        with closing(vector_wrappers.NormalizeObservation(fleet(ENVS["Box"]))) as envs:
            assert envs.unwrapped is envs.env
            assert envs.num_envs == 3
            assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        assert envs.env.closed


class TestAttributes:
    @pytest.fixture
    def envs(self):
        with closing(fleet(lambda: TimeLimit(Counter(None), 9), num_envs=3)) as envs:
            envs.reset()
            yield envs

    def test_call_gives_one_answer_per_slot(self, envs):
        envs.step(ZEROS)
        assert envs.call("add", 2, right=3) == (6, 6, 6)
        assert envs.call("add", 2, slots=[2]) == (3,)

    def test_call_of_what_is_not_callable_reads_it(self, envs):
        assert envs.call("t") == envs.get_attr("t") == (0, 0, 0)

    @pytest.mark.parametrize("values", [[1, 2, 3], (1, 2, 3)])
    def test_set_attr_of_a_list_has_one_for_each(self, envs, values):
        envs.set_attr("t", values)
        assert envs.get_attr("t") == (1, 2, 3)

    @pytest.mark.parametrize("value", [7, "seven", None, {"seven": 7}])
    def test_set_attr_of_anything_else_is_for_all(self, envs, value):
        envs.set_attr("label", value)
        assert envs.get_attr("label") == (value,) * 3

    def test_set_attr_reaches_below_the_wrappers(self, envs):
        envs.set_attr("t", [4, 5, 6])
        assert envs.step(ZEROS)[0][:, 0].tolist() == [5, 6, 7]

    def test_set_attr_of_the_wrong_number_is_refused(self, envs):
        with pytest.raises(ValueError, match="one value, or a list of 3 values; got 2 values"):
            envs.set_attr("t", [1, 2])

    def test_a_missing_attribute_is_named(self, envs):
        with pytest.raises(errors.NoSuchAttribute, match=r"slot 0 .*'no_such'"):
            envs.get_attr("no_such")
        envs.step(ZEROS)

    @pytest.mark.parametrize("backend", ["serial", "process"])
    def test_what_a_method_itself_lacks_is_told_as_its_own_trouble(self, backend):
        class Lacking(Counter):
            def ask(self):
                return self.unwrapped.np_random.no_such  # type: ignore[attr-defined]

        with closing(fleet([lambda: TimeLimit(Lacking(None), 9)] * 2, backend=backend)) as envs:
            envs.reset()
            with pytest.raises(errors.EnvFailed, match=r"during call of 'ask': Attrib.*such"):
                envs.call("ask")
            with pytest.raises(errors.NoSuchAttribute, match=r"does not have it: .*'tell'"):
                envs.call("tell")

    @pytest.mark.parametrize("name", ["reset", "step", "close"])
    def test_what_the_fleet_does_itself_is_not_called_by_name(self, envs, name):
        with pytest.raises(errors.EnvfleetError, match=f"use the fleet's own {name}"):
            envs.call(name)


class TestRendering:
    def test_one_frame_per_slot(self):
        with closing(
            fleet(Observatory, num_envs=3, env_kwargs={"render_mode": "rgb_array"})
        ) as envs:
            envs.reset(seed=0)
            envs.step(envs.action_space.sample())
            frames = envs.render()
            assert envs.render_mode == "rgb_array"
            assert isinstance(frames, tuple)
            assert [frame.tolist() for frame in frames] == [np.ones((2, 2, 3)).tolist()] * 3

    def test_no_mode_is_none(self):
        with closing(fleet(Counter, num_envs=2)) as envs:
            assert envs.render_mode is None


class TestSpec:
    def test_says_what_the_environments_were_made_with(self):
        kwargs = {"sutton_barto_reward": True, "max_episode_steps": 7}
        with closing(fleet("CartPole-v1", num_envs=2, env_kwargs=kwargs)) as envs:
            assert envs.spec is not None
            assert envs.spec.id == "CartPole-v1"
            assert envs.spec.max_episode_steps == 7
            assert envs.spec.kwargs == {"sutton_barto_reward": True}
            assert repr(envs) == "FleetVectorEnv(CartPole-v1, num_envs=2)"
            with closing(gymnasium.make(envs.spec)) as one:
                assert one.observation_space == envs.single_observation_space

    @pytest.mark.parametrize("order_enforce", [True, False])
    def test_says_what_was_registered(self, order_enforce):
        spec = replace(gymnasium.spec("CartPole-v1"), order_enforce=order_enforce)
        for backend in ("serial", "process"):
            with closing(fleet(spec, num_envs=2, backend=backend)) as envs:
                assert envs.spec is not None
                assert envs.spec.order_enforce is order_enforce

    def test_is_not_the_registry_s(self):
        with closing(fleet("CartPole-v1", num_envs=2)) as envs:
            assert envs.spec is not gymnasium.spec("CartPole-v1")

    def test_may_be_what_is_asked_for(self):
        spec = gymnasium.spec("FrozenLake-v1")
        with closing(fleet(spec, num_envs=2, env_kwargs={"map_name": "8x8"})) as envs:
            assert envs.single_observation_space == spaces.Discrete(64)

    def test_is_none_for_functions(self):
        with closing(fleet(Counter, num_envs=2)) as envs:
            assert envs.spec is None
            assert repr(envs) == "FleetVectorEnv(num_envs=2)"

    def test_the_checker_can_be_turned_off(self):
        with closing(
            fleet("CartPole-v1", num_envs=2, env_kwargs={"disable_env_checker": True})
        ) as envs:
            assert envs.call("has_wrapper_attr", "checked_step") == (False, False)


class AskedOften(spaces.Box):
    """Counts how often it is compared; what `==` costs is a matter of its size."""

    asked = 0

    def __eq__(self, other):
        AskedOften.asked += 1
        return super().__eq__(other)


class OfLargeSpaces(Counter):
    """Each has a space of its own that equals the others', and one that all have in common."""

    action_space = AskedOften(-1, 1, (3,))

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (1000,), np.uint8)


class TestSpaces:
    @pytest.mark.parametrize(
        ("backend", "num_workers", "most"), [("serial", 1, 0), ("thread", 4, 0), ("process", 2, 2)]
    )
    def test_are_compared_once_if_at_all(self, backend, num_workers, most, monkeypatch):
        asked: list[object] = []
        monkeypatch.setattr(spaces.Box, "__eq__", watched(spaces.Box.__eq__, asked))
        AskedOften.asked = 0
        options = {"backend": backend, "num_workers": num_workers, "num_envs": 8}
        with closing(fleet(OfLargeSpaces, **options)) as envs:
            assert AskedOften.asked <= most
            assert len(asked) == AskedOften.asked, "only those that must be asked"
            found = {id(facts.observation_space) for facts in envs.fleet.facts}
            assert len(found) == num_workers, "a worker sends what is the same once"

    def test_a_slot_among_many_that_differs_is_found(self):
        for backend in ("serial", "process"):
            env_fns = [*[lambda: gymnasium.make("CartPole-v1")] * 5, Counter]
            with pytest.raises(errors.SpacesDiffer, match="slot 5 has the observation space"):
                fleet(env_fns, backend=backend, num_workers=1)


def watched(function, calls):
    def call(self, other):
        calls.append(type(self))
        return function(self, other)

    return call


class TestPlan:
    @pytest.mark.parametrize(
        "env", [Counter, envfleet.native("CartPole-v1")], ids=["one by one", "native"]
    )
    def test_says_what_runs_where_and_why(self, env):
        """Natively vectorised ones are not stepped one after another."""
        with closing(fleet(env, num_envs=2)) as envs:
            assert envs.plan == "2 environments in this process: backend='serial' was asked for."


class TestClosing:
    USES: ClassVar = {
        "step": lambda envs: envs.step(ZEROS),
        "reset": lambda envs: envs.reset(),
        "masked reset": lambda envs: envs.reset(options={"reset_mask": np.ones(3, np.bool_)}),
        "send": lambda envs: envs.send(ZEROS),
        "recv": lambda envs: envs.recv(),
        "call": lambda envs: envs.call("t"),
        "get_attr": lambda envs: envs.get_attr("t"),
        "set_attr": lambda envs: envs.set_attr("t", 1),
        "render": lambda envs: envs.render(),
        "queue_reset": lambda envs: envs.queue_reset(),
        "snapshot": lambda envs: envs.snapshot(),
        "np_random": lambda envs: envs.np_random,
    }

    @pytest.mark.parametrize("use", USES.values(), ids=USES)
    def test_use_after_close_is_refused(self, use):
        envs = fleet(Counter, num_envs=3)
        envs.reset()
        envs.close()
        with pytest.raises(gymnasium.error.ClosedEnvironmentError, match="closed; open a new one"):
            use(envs)

    def test_twice_is_once(self):
        envs = fleet(Counter, num_envs=3)
        envs.close()
        envs.close()
        assert envs.closed

    def test_takes_gymnasium_s_arguments(self):
        fleet(Counter, num_envs=3).close(timeout=1, terminate=True)

    def test_with_slots_in_flight(self):
        envs = fleet(Counter, num_envs=3)
        envs.reset()
        envs.send(ZEROS)
        envs.close()

    def test_closes_the_environments(self):
        closed = []

        class Closable(Counter):
            def close(self):
                closed.append(self)

        fleet(Closable, num_envs=3).close()
        assert len(closed) == 3

    def test_a_with_block_closes(self):
        with pytest.raises(KeyError), fleet(Counter, num_envs=3) as envs:
            raise KeyError
        assert envs.closed

    @pytest.mark.parametrize("backend", ["serial", "process"])
    def test_what_nobody_holds_any_more_is_closed(self, backend):
        # that the workers are gone as well is seen by the fixture that watches every test
        envs = fleet(Counter, num_envs=2, backend=backend)
        envs.reset()
        gone = weakref.ref(envs)
        del envs
        gc.collect()
        assert gone() is None


def test_parallel_env_is_make_vec_as_a_class():
    envs = envfleet.ParallelEnv([Counter] * 3, backend="process", start_method="fork")
    gc.collect()  # nobody else may close its fleet
    with envs:
        assert isinstance(envs, envfleet.FleetVectorEnv)
        assert envs.num_envs == 3
        envs.reset(seed=0)
        assert envs.step(np.zeros(3, np.int64))[0].shape == (3, 1)
    with pytest.raises(errors.ConfigError, match="num_envs"):
        envfleet.ParallelEnv("CartPole-v1", 0)


def test_step_async_and_step_wait_are_a_step():
    envs_here = opened_fleet(Counter, 2, backend="serial")
    with envs_here as envs, opened_fleet(Counter, 2, **FORK) as others:
        for fleet in (envs, others):
            fleet.reset(seed=0)
        for _ in range(8):
            others.step_async(np.zeros(2, np.int64))
            found = others.step_wait(timeout=60.0)
            for one, other in zip(envs.step(np.zeros(2, np.int64)), found, strict=True):
                assert value_difference(one, other) is None


class Asked(Counter):
    """Answers a question after a wait."""

    def answer(self, wait_s, slot=None):
        time.sleep(wait_s)
        return self.t


class TestCallAsync:
    def test_is_a_call_in_two_halves(self):
        with opened_fleet(Asked, 2, **FORK) as envs:
            envs.reset(seed=0)
            with pytest.raises(gymnasium.error.NoAsyncCallError, match="use call_async first"):
                envs.call_wait()
            envs.call_async("answer", 0.0)
            with pytest.raises(gymnasium.error.AlreadyPendingCallError, match="waits for"):
                envs.call_async("answer", 0.0)
            assert envs.call_wait(timeout=60) == (0, 0)
            envs.step(np.zeros(2, np.int64))
            envs.call_async("answer", wait_s=0.5)
            with pytest.raises(TimeoutError, match=r"not done within 0.01 s"):
                envs.call_wait(timeout=0.01)
            assert envs.call("answer", 0.0) == (1, 1), "the late answers are dropped"


def test_registered_environments_open_as_fleets_by_gymnasium(monkeypatch):
    for name in ("CartPole-v1", "Pendulum-v1"):
        monkeypatch.setitem(gymnasium.registry, name, gymnasium.registry[name])
    envfleet.register("CartPole-v1", backend="serial", autoreset="same_step")
    envfleet.register("gymnasium.envs.classic_control:Pendulum-v1", **FORK)
    mode = "vector_entry_point"
    kwargs: dict[str, Any] = {"max_episode_steps": 3, "sutton_barto_reward": True}
    with closing(gymnasium.make_vec("CartPole-v1", 2, mode, **kwargs)) as envs:
        assert isinstance(envs, envfleet.FleetVectorEnv)
        assert "backend='serial' was asked for" in envs.plan
        envs.reset(seed=0)
        steps = [envs.step(np.array([0, 1])) for _ in range(3)]
        assert steps[-1][3].all()
        assert not steps[0][1].any()
    assert not isinstance(gymnasium.make("CartPole-v1").unwrapped, VectorEnv)
    pendulums: Any = gymnasium.make_vec("Pendulum-v1", 2, mode)
    with closing(pendulums):
        assert pendulums.unwrapped.fleet.worker_pids()[1] is not None

"""Every wrong use of make_vec's result gets a sentence that says what to do, and harms nothing.

All of it is refused before anything is sent or started, which is why this process is enough.
"""

import functools
from contextlib import closing

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import envfleet
from envfleet import errors
from envfleet.testing import Counter, VectorCounter

ZEROS = np.zeros(3, np.int64)
MACHINE = spaces.Dict({"gear": spaces.Discrete(3), "force": spaces.Box(-1, 1, (2,))})


class Steered(Counter):
    """A counter with another action space."""

    def __init__(self, action_space):
        super().__init__()
        self.action_space = action_space


def fleet(env, **kwargs):
    return envfleet.make_vec(env, **{"backend": "serial", **kwargs})


class TestWrongActions:
    @pytest.mark.parametrize(
        ("actions", "got"),
        [
            (np.zeros(2, np.int64), r"shape \(2,\)"),
            (np.zeros(4, np.int64), r"shape \(4,\)"),
            ([0, 1], r"shape \(2,\)"),
            (np.zeros((3, 1), np.int64), r"shape \(3, 1\)"),
            (0, "scalar"),
            (None, "NoneType"),
            ("abc", "scalar of dtype <U3"),
            (np.zeros(3), "float64"),
            ([0.5, 0, 1], "float64"),
            (["a", "b", "c"], "<U1"),
            ({"a": 1}, r"dict with the keys \['a'\]"),
        ],
    )
    def test_say_what_fits_and_harm_nothing(self, actions, got):
        with closing(fleet(Counter, num_envs=3)) as envs:
            envs.reset()
            with pytest.raises(
                errors.ActionError, match=rf"3 slots .*Discrete\(2\).*shape \(3,\).*{got}"
            ):
                envs.step(actions)
            assert envs.step(ZEROS)[0][:, 0].tolist() == [1, 1, 1]

    @pytest.mark.parametrize(
        "actions",
        [[0, 1, 1], (0, 1, 1), np.array([0, 1, 1], np.uint8), np.array([False, True, True])],
    )
    def test_whatever_numpy_can_take_is_taken(self, actions):
        with closing(fleet(Counter, num_envs=3)) as envs:
            envs.reset()
            envs.step(actions)

    def test_a_wrong_part_of_nested_actions_is_named(self):
        with closing(fleet(functools.partial(Steered, MACHINE), num_envs=3)) as envs:
            envs.reset(seed=0)
            right = envs.action_space.sample()
            with pytest.raises(errors.ActionError, match="force"):
                envs.step({**right, "force": right["force"][:2]})
            with pytest.raises(errors.ActionError, match="gear"):
                envs.step({"force": right["force"]})
            envs.step(right)


class TestWrongOrder:
    @pytest.fixture
    def envs(self):
        with closing(fleet(Counter, num_envs=3)) as envs:
            yield envs

    @pytest.mark.parametrize("use", ["step", "send"])
    def test_step_before_reset(self, envs, use):
        with pytest.raises(gymnasium.error.ResetNeeded, match=r"slots \[0, 1, 2\] .* call reset"):
            getattr(envs, use)(ZEROS)

    def test_recv_with_nothing_sent(self, envs):
        with pytest.raises(errors.NothingSent, match="no slot is in flight"):
            envs.recv()
        envs.reset()
        with pytest.raises(errors.NothingSent, match="no slot is in flight"):
            envs.recv()

    def test_send_twice(self, envs):
        envs.reset()
        envs.send(ZEROS[:2], [0, 2])
        with pytest.raises(errors.StillInFlight, match=r"slots \[0, 2\] .* call recv before"):
            envs.send(ZEROS)
        assert envs.recv().slots.tolist() == [0, 2]

    def test_reset_drops_what_is_in_flight(self, envs):
        envs.reset()
        envs.send(ZEROS)
        assert envs.reset()[0][:, 0].tolist() == [0, 0, 0]
        with pytest.raises(errors.NothingSent):
            envs.recv()

    @pytest.mark.parametrize(
        ("slots", "text"),
        [
            ([], "non-empty list of slot numbers"),
            ([0.5], "non-empty list of slot numbers"),
            (0, "non-empty list of slot numbers"),
            ([[0]], "non-empty list of slot numbers"),
            ([3], "between 0 and 2"),
            ([-1], "between 0 and 2"),
            ([0, 0], "only once"),
        ],
    )
    def test_slots_that_are_none(self, envs, slots, text):
        envs.reset()
        with pytest.raises(errors.ConfigError, match=text):
            envs.send(ZEROS[:1], slots)

    def test_recv_of_less_than_one(self, envs):
        envs.reset()
        envs.send(ZEROS)
        with pytest.raises(errors.ConfigError, match="min_slots must be a whole number"):
            envs.recv(min_slots=0)


class TestWrongArguments:
    @pytest.mark.parametrize("num_envs", [0, -1, True, 2.0, "3"])
    def test_num_envs(self, num_envs):
        with pytest.raises(
            errors.ConfigError, match="num_envs must be a whole number of at least 1"
        ):
            envfleet.make_vec("CartPole-v1", num_envs)

    def test_num_envs_left_out(self):
        with pytest.raises(errors.ConfigError, match="num_envs is needed unless env is a sequence"):
            envfleet.make_vec("CartPole-v1")

    def test_num_envs_that_is_not_the_length_of_the_sequence(self):
        with pytest.raises(errors.ConfigError, match="num_envs is 3 but 2 functions were given"):
            envfleet.make_vec([Counter, Counter], 3)

    def test_an_empty_sequence(self):
        with pytest.raises(errors.ConfigError, match="sequence of environment functions is empty"):
            envfleet.make_vec([])

    @pytest.mark.parametrize("num_workers", [0, -1, 3, True, 1.5, "2"])
    def test_num_workers(self, num_workers):
        with pytest.raises(
            errors.ConfigError,
            match=r"num_workers must be a whole number between 1 and num_envs \(2\)",
        ):
            envfleet.make_vec(Counter, 2, num_workers=num_workers)

    @pytest.mark.parametrize(
        ("argument", "value", "choices"),
        [
            ("backend", "fibre", "'auto', 'serial', 'thread', 'process'"),
            ("backend", None, "'auto', 'serial', 'thread', 'process'"),
            ("start_method", "teleport", "'fork', 'spawn', 'forkserver'"),
            ("autoreset", "never", "'next_step', 'same_step', 'disabled'"),
            ("autoreset", None, "'next_step', 'same_step', 'disabled'"),
            ("on_failure", "ignore", "'raise', 'restart', 'fallback'"),
        ],
    )
    def test_names(self, argument, value, choices):
        with pytest.raises(
            errors.ConfigError, match=f"{argument} must be one of {choices}; got {value!r}"
        ):
            envfleet.make_vec(Counter, 2, **{argument: value})

    @pytest.mark.parametrize("argument", ["step_timeout_s", "reset_timeout_s"])
    @pytest.mark.parametrize("seconds", [0, -1, float("nan")])
    def test_seconds(self, argument, seconds):
        with pytest.raises(
            errors.ConfigError, match=f"{argument} must be positive seconds, or None"
        ):
            envfleet.make_vec(Counter, 2, **{argument: seconds})

    def test_a_limit_that_nothing_can_enforce(self):
        with pytest.raises(
            errors.ConfigError, match="leave out the timeouts or use backend='process'"
        ):
            envfleet.make_vec(Counter, 2, backend="serial", step_timeout_s=1.0)

    @pytest.mark.parametrize(
        "env",
        [Counter(), [Counter(), Counter()], VectorCounter((2, 3))],
        ids=["one", "list", "vector"],
    )
    def test_an_environment_instead_of_a_function(self, env):
        with pytest.raises(errors.ConfigError, match="pass a function that builds one"):
            envfleet.make_vec(env, 2)

    @pytest.mark.parametrize("env", [None, 5, ["CartPole-v1"] * 2])
    def test_something_else_instead_of_a_function(self, env):
        with pytest.raises(
            errors.ConfigError, match="must be an id, an EnvSpec, a function or a seq"
        ):
            envfleet.make_vec(env, 2)

    def test_a_function_that_returns_something_else(self):
        with pytest.raises(errors.EnvfleetError, match="returned int, not a"):
            fleet(lambda: 5, num_envs=2)

    def test_an_unknown_id(self):
        with pytest.raises(gymnasium.error.NameNotFound, match="NoSuch"):
            envfleet.make_vec("NoSuch-v0", 2)

    def test_keyword_arguments_that_are_none(self):
        with pytest.raises(errors.ConfigError, match="env_kwargs must be a mapping"):
            envfleet.make_vec(Counter, 2, env_kwargs=["length"])  # type: ignore[arg-type]

    def test_keyword_arguments_the_environment_does_not_take(self):
        with pytest.raises(errors.EnvConstructionFailed, match=r"slot 0 failed.*'height'"):
            fleet(Counter, num_envs=2, env_kwargs={"height": 3})

    @pytest.mark.parametrize(
        ("which", "second"),
        [
            ("observation", functools.partial(gymnasium.make, "FrozenLake-v1")),
            ("action", lambda: Steered(spaces.Discrete(3))),
        ],
    )
    def test_spaces_that_differ(self, which, second):
        first = {
            "observation": functools.partial(gymnasium.make, "CartPole-v1"),
            "action": lambda: Steered(spaces.Discrete(2)),
        }[which]
        with pytest.raises(
            errors.SpacesDiffer, match=f"slot 1 has the {which} space .*equal spaces.*engine.Fleet"
        ):
            fleet([first, second])

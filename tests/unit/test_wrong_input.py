"""Every wrong use of make_vec's result gets a sentence that says what to do, and harms nothing.

All of it is refused before anything is sent or started, which is why this process is enough.
"""

import copy
import functools
import pickle
from contextlib import closing

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

import envfleet
from envfleet import errors
from envfleet.testing import Counter, VectorCounter

ZEROS = np.zeros(3, np.int64)
MACHINE = spaces.Dict({"gear": spaces.Discrete(3), "force": spaces.Box(-1, 1, (2,))})


class OfTheOldApi(Counter):
    """Four values from step; from reset the observation alone, unless that is new already."""

    def __init__(self, has_new_reset=False):
        super().__init__()
        self.has_new_reset = has_new_reset

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return (obs, info) if self.has_new_reset else obs

    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


class Muddled(Counter):
    """Unpacks something of its own, and fails at that."""

    def step(self, action):
        _, _, _, _, _ = list("four")


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

    @pytest.mark.parametrize("slots", [1, 0.5, "1", [[0]], [[0], [1, 2]], np.array(1)])
    def test_slots_that_cannot_be_counted(self, envs, slots):
        for use in (
            lambda: envs.queue_reset(seed=1, slots=slots),
            lambda: envs.set_attr("t", 1, slots=slots),
        ):
            with pytest.raises(errors.ConfigError, match="slots must be a non-empty list of slot"):
                use()

    def test_a_copy(self, envs):
        for make_one in (pickle.dumps, copy.deepcopy, copy.copy):
            with pytest.raises(TypeError, match="a fleet cannot be pickled or copied: its env"):
                make_one(envs)
        envs.reset()

    @pytest.mark.parametrize("timeout_s", ["1", -1, -0.001, float("nan"), True, [1]])
    def test_a_time_that_is_none(self, envs, timeout_s):
        envs.reset()
        envs.send(ZEROS)
        with pytest.raises(errors.ConfigError, match="timeout_s must be seconds, 0 or more, or No"):
            envs.recv(timeout_s=timeout_s)
        assert envs.recv(timeout_s=np.float32(1)).slots.tolist() == [0, 1, 2]

    def test_no_time_at_all_is_a_time(self, envs):
        envs.reset()
        envs.send(ZEROS)
        received = len(envs.recv(timeout_s=0))
        while received < 3:
            received += len(envs.recv(timeout_s=0))

    def test_recv_of_less_than_one(self, envs):
        envs.reset()
        envs.send(ZEROS)
        with pytest.raises(errors.ConfigError, match="min_slots must be a whole number"):
            envs.recv(min_slots=0)


class TestWrongAnswers:
    """Of environments: what they return is not what Gymnasium asks for."""

    STEP = r"step must return five values \(obs, reward, terminated, truncated, info\), got 4; env"
    RESET = r"reset must return two values \(obs, info\), got 1 of type ndarray; .*old Gym API"

    @pytest.mark.parametrize("backend", ["serial", "thread", "process"])
    def test_a_step_of_the_old_api(self, backend):
        env_fn = functools.partial(OfTheOldApi, has_new_reset=True)
        with closing(fleet([Counter, env_fn], backend=backend)) as envs:
            envs.reset(seed=0)
            with pytest.raises(errors.EnvFailed, match=f"slot 1 raised.*{self.STEP}.* wrapper"):
                envs.step(ZEROS[:2])

    def test_a_step_of_the_old_api_inside_a_wrapper(self):
        """Gymnasium's wrappers unpack what it returns, where we do not go past them."""
        env_fn = functools.partial(OfTheOldApi, has_new_reset=True)
        with closing(fleet(lambda: TimeLimit(TimeLimit(env_fn(), 9), 9), num_envs=1)) as envs:
            envs.reset(seed=0)
            with pytest.raises(errors.EnvFailed, match=self.STEP) as caught:
                envs.step(ZEROS[:1])
            assert "in step" in str(caught.value.__cause__), "where it happened is shown too"

    def test_a_step_of_the_old_api_while_it_is_measured(self):
        env_fn = functools.partial(OfTheOldApi, has_new_reset=True)
        with pytest.raises(errors.EnvConstructionFailed, match=f"its step failed.*{self.STEP}"):
            envfleet.make_vec(env_fn, 2, on_failure="restart")

    @pytest.mark.parametrize("seed", [None, 0])
    def test_a_reset_of_the_old_api(self, seed):
        with (
            closing(fleet(OfTheOldApi, num_envs=2)) as envs,
            pytest.raises(errors.EnvFailed, match=self.RESET),
        ):
            envs.reset(seed=seed)

    def test_an_environment_s_own_trouble_is_told_as_it_is(self):
        with closing(fleet(Muddled, num_envs=1)) as envs:
            envs.reset(seed=0)
            with pytest.raises(errors.EnvFailed, match="ValueError: not enough values to unpack"):
                envs.step(ZEROS[:1])


class TestWrongArguments:
    @pytest.mark.parametrize("num_envs", [0, -1, True, 2.0, "3"])
    def test_num_envs(self, num_envs):
        with pytest.raises(
            errors.ConfigError, match="num_envs must be a whole number of at least 1"
        ):
            envfleet.make_vec("CartPole-v1", num_envs)

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

    @pytest.mark.parametrize("max_restarts", ["3", float("nan"), 1.5, -1, True, None])
    def test_max_restarts(self, max_restarts):
        with pytest.raises(
            errors.ConfigError, match=r"max_restarts must be a whole number, 0 or more, got"
        ):
            envfleet.make_vec(Counter, 2, max_restarts=max_restarts)

    @pytest.mark.parametrize(
        ("argument", "value", "choices"),
        [
            ("backend", "fibre", "'auto', 'serial', 'thread', 'process'"),
            ("backend", None, "'auto', 'serial', 'thread', 'process'"),
            ("start_method", "teleport", "'fork', 'spawn', 'forkserver'"),
            ("autoreset", "never", "'next_step', 'same_step', 'disabled'"),
            ("autoreset", None, "'next_step', 'same_step', 'disabled'"),
            ("on_failure", "ignore", "'raise', 'restart', 'resume', 'fallback'"),
        ],
    )
    def test_names(self, argument, value, choices):
        with pytest.raises(
            errors.ConfigError, match=f"{argument} must be one of {choices}.*; got {value!r}"
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

    @pytest.mark.parametrize("one", ["CartPole-v1", gymnasium.spec("CartPole-v1")])
    def test_an_id_in_a_sequence(self, one):
        with pytest.raises(errors.ConfigError, match="a sequence must hold functions") as caught:
            envfleet.make_vec([Counter, one])
        assert "got 'CartPole-v1' in it" in str(caught.value)
        assert "make_vec('CartPole-v1', 2)" in str(caught.value)
        assert "[lambda: gymnasium.make('CartPole-v1'), ...]" in str(caught.value)

    @pytest.mark.parametrize("env", [None, 5, [None, 5]])
    def test_something_else_instead_of_a_function(self, env):
        with pytest.raises(
            errors.ConfigError, match="must be an id, an EnvSpec, a function or a seq"
        ):
            envfleet.make_vec(env, 2)

    def test_a_function_that_returns_something_else(self):
        with pytest.raises(errors.EnvfleetError, match="returned int, not a"):
            fleet(lambda: 5, num_envs=2)

    @pytest.mark.parametrize("backend", ["serial", "auto", "process"])
    @pytest.mark.parametrize(
        ("env", "num_envs", "slot"),
        [
            (functools.partial(VectorCounter, (2, 3)), 1, 0),
            (functools.partial(VectorCounter, (2, 3)), 3, 2),
            ([functools.partial(VectorCounter, (2, 3)) for _ in range(2)], None, 0),
            ([Counter, functools.partial(VectorCounter, (2, 3)), Counter], None, 1),
        ],
        ids=["fewer", "no multiple", "sequence", "mixed"],
    )
    def test_a_function_that_returns_too_large_a_vector(self, env, num_envs, slot, backend):
        """It would fill slots that other functions were given for."""
        workers = None if backend == "auto" else 1
        with pytest.raises(
            errors.ConfigError,
            match=rf"slot {slot} built a VectorCounter of 2 env.* pass envfleet\.native\(",
        ):
            envfleet.make_vec(env, num_envs, backend=backend, num_workers=workers)

    def test_a_native_function_that_builds_too_many(self):
        """It was asked for one, since the second slot is another's."""
        pair = [envfleet.native(lambda num_envs: VectorCounter((2, 3))) for _ in range(2)]
        with pytest.raises(errors.ConfigError, match=r"of 2 environments, .* there on 1 slots"):
            fleet(pair)

    def test_an_unknown_id(self):
        with pytest.raises(gymnasium.error.NameNotFound, match="NoSuch"):
            envfleet.make_vec("NoSuch-v0", 2)

    def test_keyword_arguments_that_are_none(self):
        with pytest.raises(errors.ConfigError, match="env_kwargs must be a mapping"):
            envfleet.make_vec(Counter, 2, env_kwargs=["length"])  # type: ignore[arg-type]

    def test_keyword_arguments_the_environment_does_not_take(self):
        with pytest.raises(errors.EnvConstructionFailed, match=r"slot 0 failed.*'height'"):
            fleet(Counter, num_envs=2, env_kwargs={"height": 3})

    @pytest.mark.parametrize("backend", ["serial", "thread", "process"])
    def test_another_backend_is_advised_where_it_is_another(self, backend):
        with pytest.raises(errors.EnvConstructionFailed) as caught:
            fleet(Counter, num_envs=2, env_kwargs={"height": 3}, backend=backend)
        assert ("backend='serial'" in str(caught.value)) == (backend != "serial")
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

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

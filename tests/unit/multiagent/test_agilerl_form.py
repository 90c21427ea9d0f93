"""What AgileRL's users expect beyond shapes: errors, calls in two halves; its tests' plugin."""

import pickle

import numpy as np
import pytest
from gymnasium.error import NoAsyncCallError

from envfleet import errors
from envfleet.multiagent import AECVecEnv, AsyncPettingZooVecEnv
from tests.peers.agilerl_exceptions import EXCEPTIONS
from tests.unit.multiagent.dying_agents import DyingAgents, DyingAgentsParallel
from tests.unit.multiagent.test_vectorised import APART, HERE, Pair


class Odd(Exception):
    pass


class Raising(Pair):
    """Raises what its reset is told to."""

    def reset(self, seed=None, options=None):
        if options:
            raise options["raise"]
        return super().reset(seed)


@pytest.mark.parametrize("where", [HERE, APART], ids=["here", "apart"])
def test_an_error_is_of_the_environment_s_own_class_too(where):
    with AsyncPettingZooVecEnv([Raising] * 2, compat="agilerl", **where) as vec:
        with pytest.raises(ValueError, match=r"slot 1 .*ValueError: at odds") as caught:
            vec.reset(options=[None, {"raise": ValueError("at odds")}])
        assert isinstance(caught.value, errors.EnvFailed)
        assert isinstance(caught.value.__cause__, errors.RemoteTraceback)
        again = pickle.loads(pickle.dumps(caught.value))
        assert isinstance(again, ValueError)
        assert isinstance(again, errors.EnvFailed)
        assert (again.slot, str(again)) == (1, str(caught.value))
        vec.reset()


@pytest.mark.parametrize("exception", [Odd("of its own"), ExceptionGroup("several", [Odd()])])
def test_an_error_whose_class_cannot_be_had_is_env_failed(exception):
    with AsyncPettingZooVecEnv([Raising], compat="agilerl", **HERE) as vec:
        with pytest.raises(errors.EnvFailed) as caught:
            vec.reset(options={"raise": exception})
        assert type(caught.value) is errors.EnvFailed


def test_calls_in_two_halves():
    with AsyncPettingZooVecEnv([Pair] * 2, **HERE) as vec:
        with pytest.raises(NoAsyncCallError):
            vec.call_wait()
        vec.call_async("max_num_agents")
        assert vec.call_wait(timeout=60) == (2, 2)
        with pytest.raises(NoAsyncCallError):
            vec.call_wait()
        with pytest.raises(ValueError, match="reset"):
            vec.call("reset")
        with pytest.raises(ValueError, match="2 values; got 3 values"):
            vec.set_attr("test", [1, 2, 3])


@pytest.mark.parametrize("where", [HERE, APART], ids=["here", "apart"])
def test_agents_that_all_die_in_one_step(where):
    with AsyncPettingZooVecEnv([lambda: DyingAgentsParallel(death_rate=1.0)] * 2, **where) as vec:
        vec.reset(seed=0)
        _, _, terminated, _, infos = vec.step({name: np.zeros(2, np.int64) for name in vec.agents})
        assert all(terminated[name].all() for name in vec.agents)
        assert vec.last_batch.ended.all()
        assert infos["_final_obs"].all()
        assert all(vec.alive[name].all() for name in vec.agents)  # the next episodes have begun

    with AECVecEnv([lambda: DyingAgents(death_rate=1.0)] * 2, **where) as turns:
        batch = turns.reset(seed=0)
        for _ in range(len(turns.agents)):  # each in its own turn, unless all die at once
            first = {name: [0] * len(batch.rows_of(name)) for name in turns.groups}
            batch = turns.step(first)
            if batch.ended.any():
                break
        assert batch.ended.all()
        assert batch.all_terminated.any(axis=1).all()
        assert (batch.rewards == 0).all()


def test_every_exception_has_a_reason():
    assert all(len(reason) > 40 for reason in EXCEPTIONS.values())

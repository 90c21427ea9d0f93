"""Opening a fleet from the arguments of a door."""

import math
import multiprocessing
from contextlib import closing

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode

import envfleet
from envfleet.adapters import opening
from envfleet.errors import ConfigError
from envfleet.testing import Counter
from tests.conformance.matrix import FORK, opened


def refuse_to_measure(*args, **kwargs):
    raise AssertionError("the environments were measured")


class TestOpenFleet:
    @pytest.mark.parametrize(
        ("arguments", "backend", "num_workers"),
        [
            ({"backend": "serial"}, "serial", 1),
            ({"backend": "thread", "num_workers": 2}, "thread", 2),
            ({"num_workers": 2}, "process", 2),
        ],
    )
    def test_measures_nothing_where_the_caller_decides(
        self, arguments, backend, num_workers, monkeypatch
    ):
        monkeypatch.setattr(opening, "plan_fleet", refuse_to_measure)
        fleet, plan = opening.open_fleet([Counter] * 3, autoreset="disabled", **arguments)
        with closing(fleet):
            assert (plan.backend, plan.num_workers) == (backend, num_workers)
            assert (fleet.num_slots, fleet.autoreset) == (3, "disabled")
            assert fleet.reset([envfleet.engine.ResetPlan()] * 3).obs[:, 0].tolist() == [0, 0, 0]

    def test_measures_where_nothing_is_decided(self, monkeypatch):
        monkeypatch.setattr(opening, "plan_fleet", refuse_to_measure)
        with pytest.raises(AssertionError, match="were measured"):
            opening.open_fleet([Counter] * 3)

    def test_chooses_a_start_method_unless_one_is_named(self, monkeypatch):
        monkeypatch.setattr(opening, "choose_start_method", lambda named: named or "spawn")
        for named, chosen in ((None, "spawn"), ("fork", "fork")):
            fleet, plan = opening.open_fleet([Counter], backend="serial", start_method=named)
            fleet.close()
            assert plan.start_method == chosen


class TestEnvFunctions:
    def test_of_an_id_have_its_spec(self):
        env_fns, spec = opening.env_functions("CartPole-v1", 2, {"render_mode": "rgb_array"})
        assert spec is not None
        assert spec.id == "CartPole-v1"
        with closing(env_fns[1]()) as env:
            assert env.render_mode == "rgb_array"

    def test_of_a_sequence_are_its_own(self):
        made = [lambda: Counter(3), lambda: Counter(4)]
        env_fns, spec = opening.env_functions(made)
        assert spec is None
        assert [env_fn().length for env_fn in env_fns] == [3, 4]

    def test_of_a_native_environment_are_one_object(self):
        vector = envfleet.native("CartPole-v1")
        env_fns, _ = opening.env_functions(vector, 3)
        assert env_fns == [vector] * 3
        with pytest.raises(ConfigError, match=r"give keyword arguments to envfleet\.native"):
            opening.env_functions(vector, 3, {"size": 2})

    def test_a_native_environment_needs_an_entry_point(self):
        with pytest.raises(ConfigError, match="FrozenLake-v1 has no vector_entry_point"):
            envfleet.native(gymnasium.spec("FrozenLake-v1"))


class TestNamesFromElsewhere:
    @pytest.mark.parametrize(
        ("named", "ours"), [("async", "process"), ("subproc", "process"), ("sync", "serial")]
    )
    def test_a_backend_of_another_library_is_answered_with_ours(self, named, ours):
        with pytest.raises(ConfigError, match=f"write backend='{ours}'"):
            envfleet.make_vec("CartPole-v1", 2, backend=named)

    @pytest.mark.parametrize("named", ["SameStep", "same_step", AutoresetMode.SAME_STEP])
    def test_autoreset_takes_the_enum_and_its_names(self, named):
        with closing(envfleet.make_vec(Counter, 1, backend="serial", autoreset=named)) as envs:
            assert envs.autoreset_mode is AutoresetMode.SAME_STEP

    def test_one_environment_is_made_where_no_number_is_given(self):
        with closing(envfleet.make_vec("CartPole-v1")) as envs:
            assert envs.num_envs == 1


def tell_plans(each, answer_to):
    for arguments in each:
        try:
            with closing(envfleet.make_vec(Counter, 4, **arguments)) as envs:
                envs.reset(seed=0)
                answer_to.send(envs.plan)
        except ConfigError as exc:
            answer_to.send(str(exc))


def test_a_daemonic_process_gets_threads_or_none_and_is_told_why():
    asked = [{}, {"on_failure": "restart"}, {"num_workers": 2}, {"backend": "process"}]
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=tell_plans, args=(asked, theirs), daemon=True)
    child.start()
    theirs.close()
    told = [ours.recv() if ours.poll(120) else "nothing" for _ in asked]
    child.join()
    child.close()
    ours.close()
    assert all("this process is daemonic" in text for text in told), told
    assert ["thread" in text for text in told] == [False, True, True, True], told


@pytest.mark.parametrize("limit_s", [math.inf, 3e6])
def test_a_deadline_beyond_what_the_kernel_can_wait_is_a_long_one(limit_s):
    with opened(Counter, 2, reset_timeout_s=limit_s, **FORK) as envs:
        assert len(envs.reset(seed=0)[0]) == 2

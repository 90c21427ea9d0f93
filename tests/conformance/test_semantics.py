"""The semantics of a vector environment, numbered as in the list of semantics."""

import functools
import os
import signal
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import envfleet
from envfleet import errors
from envfleet.engine.backends.base import backend_named
from envfleet.testing import (
    AnySpace,
    Counter,
    Crashing,
    FailingConstructor,
    HugeObservation,
    MixedInfo,
    NoisyStream,
    ReusingItsArray,
    Slow,
    TaskCounter,
    TwoArgumentException,
    UnpicklableException,
    UnpicklableInfo,
    first_difference,
    fleet_driven,
    hand_driven,
)
from tests.conformance.matrix import EVERY, FORK, MODES, PROCESSES, QUICK, SERIAL, opened
from tests.gates import PATIENCE_S, at_most, gated

ZERO = np.zeros(3, dtype=np.int64)


# ---------------------------------------------------------------------- 1, 3, 4: ends of episodes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", QUICK)
def test_1_a_true_end_at_the_time_limit_is_terminated(where, mode):
    with opened(functools.partial(Counter, length=4, limit=4), 3, autoreset=mode, **where) as envs:
        envs.reset(seed=0)
        for _ in range(4):
            _, _, terminated, truncated, _ = envs.step(ZERO)
    assert terminated.all()
    assert not truncated.any()


@pytest.mark.parametrize("where", QUICK)
def test_1_the_limit_alone_truncates(where):
    with opened(functools.partial(Counter, length=None, limit=4), 3, **where) as envs:
        envs.reset(seed=0)
        for _ in range(4):
            _, _, terminated, truncated, _ = envs.step(ZERO)
    assert truncated.all()
    assert not terminated.any()


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("where", QUICK)
def test_3_truncation_bootstraps_from_the_true_successor(where, mode):
    """With reward 1 and value(obs) = obs the target of the last row has a closed form."""
    gamma, limit = 0.5, 3
    targets = []
    with opened(
        functools.partial(Counter, length=None, limit=limit), 3, autoreset=mode, **where
    ) as e:
        e.reset(seed=0)
        for _ in range(2 * (limit + 1)):
            e.send(ZERO)
            batch = e.recv()
            value = batch.final_obs[:, 0].astype(float)
            targets += list((1.0 + gamma * value)[batch.valid & batch.truncated])
    assert len(targets) >= 3
    assert set(targets) == {1.0 + gamma * limit}


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("where", QUICK)
def test_4_valid_rows_are_the_steps_of_the_episodes(where, mode):
    lengths, returns, running = [], [], np.zeros(3)
    with opened(Counter, 3, autoreset=mode, **where) as envs:
        envs.reset(seed=0)
        steps = np.zeros(3, dtype=int)
        for _ in range(24):
            envs.send(ZERO)
            batch = envs.recv()
            assert batch.slots.tolist() == [0, 1, 2]
            assert (batch.rewards[~batch.valid] == 0.0).all()
            steps += batch.valid
            running += batch.rewards
            for slot in np.flatnonzero(batch.terminated | batch.truncated):
                lengths.append(int(steps[slot]))
                returns.append(float(running[slot]))
                steps[slot], running[slot] = 0, 0.0
    assert set(lengths) == {5}
    assert set(returns) == {15.0}
    assert len(lengths) == 3 * (24 // 6 if mode == "next_step" else 24 // 5)


def test_4_the_action_of_a_reset_row_is_ignored():
    actions = spaces.Discrete(1000)
    env = functools.partial(AnySpace, spaces.Discrete(3), actions, max_length=1)
    with opened(env, 2, **FORK) as envs:
        envs.reset(seed=0)
        envs.step(np.array([1, 2]))
        _, rewards, terminated, truncated, _ = envs.step(np.array([7, 8]))
    assert rewards.tolist() == [0.0, 0.0]
    assert not (terminated | truncated).any()


@pytest.mark.parametrize("where", QUICK)
def test_disabled_mode_asks_for_a_reset(where):
    with opened(Counter, 3, autoreset="disabled", **where) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            envs.step(ZERO)
        with pytest.raises(gymnasium.error.ResetNeeded, match="reset"):
            envs.step(ZERO)


# ---------------------------------------------------------------------- 2: the final observation


@pytest.mark.parametrize("where", EVERY)
def test_2_final_obs_of_an_env_that_reuses_its_array(where):
    """[V] Gymnasium returns 0, the observation of the reset, instead of 5, on sync and async."""
    with opened(ReusingItsArray, 3, autoreset="same_step", **where) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            obs, _, terminated, _, infos = envs.step(ZERO)
    assert terminated.all()
    assert obs[:, 0].tolist() == [0, 0, 0]
    assert infos["_final_obs"].tolist() == [True] * 3
    assert [int(last[0]) for last in infos["final_obs"]] == [5, 5, 5]


@pytest.mark.parametrize("where", QUICK)
def test_2_final_obs_holds_only_slots_that_ended(where):
    env_fns = [functools.partial(Counter, length) for length in (2, 3, 2)]
    with opened(env_fns, autoreset="same_step", **where) as envs:
        envs.reset(seed=0)
        envs.step(ZERO)
        _, _, _, _, infos = envs.step(ZERO)
    assert infos["_final_obs"].tolist() == [True, False, True]
    assert infos["final_obs"][1] is None


# ---------------------------------------------------------------------- 5, 6: stale state


@pytest.mark.parametrize("where", EVERY)
def test_5_a_manual_reset_cancels_the_pending_autoreset(where):
    """[V] Gymnasium's pipes drop the next action after a done and a reset."""
    with opened(Counter, 3, **where) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            envs.step(ZERO)
        envs.reset(seed=0)
        obs, rewards, _, _, _ = envs.step(ZERO)
    assert obs[:, 0].tolist() == [1, 1, 1]
    assert rewards.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("where", QUICK)
def test_5_a_masked_reset_cancels_only_its_own_slots(where):
    with opened(Counter, 3, **where) as envs:
        envs.reset(seed=0)
        for _ in range(5):
            envs.step(ZERO)
        envs.reset(options={"reset_mask": np.array([False, True, False])})
        obs, rewards, _, _, _ = envs.step(ZERO)
    assert obs[:, 0].tolist() == [0, 1, 0]
    assert rewards.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("where", EVERY)
def test_6_text_is_decoded_anew_each_step(where):
    """[V] Gymnasium's shared memory always returns '00000000'."""
    env = functools.partial(AnySpace, spaces.Text(8))
    expected, got = hand_driven(env, 2, 12), fleet_driven(env, 2, 12, **where)
    assert first_difference(expected, got) is None
    assert len({event.obs for event in got.slots[0]}) > 5


# ---------------------------------------------------------------------- 8: infos and options


@pytest.mark.parametrize("where", EVERY)
def test_8_mixed_int_and_float_infos_keep_their_values(where):
    """[V] Gymnasium makes [1 0] of 1 and 0.5."""
    with opened(MixedInfo, 4, **where) as envs:
        _, infos = envs.reset(seed=[1, 2, 3, 4])
    assert [float(value) for value in infos["mixed"]] == [1.0, 2.5, 3.0, 4.5]
    assert infos["_mixed"].all()


@pytest.mark.parametrize("where", QUICK)
def test_8_missing_keys_are_masked(where):
    with opened(MixedInfo, 4, **where) as envs:
        _, infos = envs.reset(seed=[1, 2, 3, 4])
    assert infos["_sometimes"].tolist() == [False, False, True, False]
    assert infos["sometimes"][2] == 3
    assert infos["nested"]["_even"].tolist() == [False, True, False, True]


@pytest.mark.parametrize("where", QUICK)
def test_8_ragged_arrays_and_large_integers_keep_their_values(where):
    with opened(MixedInfo, 4, **where) as envs:
        _, infos = envs.reset(seed=[1, 2, 3, 4])
    assert [len(value) for value in infos["ragged"]] == [1, 2, 0, 1]
    assert [int(infos["large"][0]), float(infos["large"][1])] == [2**60 + 1, 0.25]


@pytest.mark.parametrize("where", QUICK)
def test_8_infos_of_a_step_are_not_those_of_the_step_before(where):
    with opened(MixedInfo, 3, **where) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            _, _, _, _, infos = envs.step(ZERO)
    assert infos["steady"].tolist() == [3, 3, 3]
    assert infos["_sometimes"].tolist() == [True, False, False]


@pytest.mark.parametrize("where", QUICK)
def test_8_slots_share_no_info(where):
    with opened(MixedInfo, 3, **where) as envs:
        _, first = envs.reset(seed=[2, 2, 2])
        first["items"][0].append("mine")
        first["array"][0] = -1
        _, second = envs.reset(seed=[2, 2, 2])
    assert first["items"][1] == [2, "2"]
    assert (first["array"][1] == 2).all()
    assert second["items"][0] == [2, "2"]


@pytest.mark.parametrize("where", QUICK)
def test_8_options_of_the_caller_are_not_mutated(where):
    """[V] Gymnasium pops reset_mask out of the caller's dict."""
    mask = np.array([True, False, True])
    options = {"reset_mask": mask, "task": 4}
    with opened(TaskCounter, 3, **where) as envs:
        envs.reset(seed=0)
        obs, _ = envs.reset(options=options)
    assert options == {"reset_mask": mask, "task": 4}
    assert mask.tolist() == [True, False, True]
    assert obs[:, 1].tolist() == [4, 0, 4]


class PopsItsOptions(TaskCounter):
    """Removes items from its options."""

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        (options or {}).clear()
        return result


@pytest.mark.parametrize("where", QUICK)
def test_8_an_env_that_pops_its_options_leaves_the_callers_alone(where):
    options = {"task": 4}
    with opened(PopsItsOptions, 3, **where) as envs:
        obs, _ = envs.reset(seed=0, options=options)
    assert options == {"task": 4}
    assert obs[:, 1].tolist() == [4, 4, 4]


@pytest.mark.parametrize("where", QUICK)
def test_actions_of_the_caller_are_not_mutated(where):
    actions = np.full((3, 2), 0.5, dtype=np.float32)
    with opened(NoisyStream, 3, **where) as envs:
        envs.reset(seed=0)
        envs.step(actions)
    assert (actions == 0.5).all()


# ---------------------------------------------------------------------- 9: seeds


@pytest.mark.parametrize("where", QUICK)
def test_9_an_int_seeds_slots_in_order(where):
    with opened(TaskCounter, 3, **where) as envs:
        obs, _ = envs.reset(seed=10)
    assert obs[:, 0].tolist() == [10, 11, 12]


@pytest.mark.parametrize("where", QUICK)
def test_9_autoreset_gets_no_seed(where):
    with opened(TaskCounter, 3, **where) as envs:
        envs.reset(seed=10)
        for _ in range(4):
            obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, 0].tolist() == [-1, -1, -1]
    assert obs[:, 2].tolist() == [2, 2, 2]


@pytest.mark.parametrize("where", QUICK)
def test_9_without_a_seed_slots_differ(where):
    with opened(NoisyStream, 4, **where) as envs:
        obs, _ = envs.reset()
    assert len({float(row[0]) for row in obs}) == 4


# ---------------------------------------------------------------------- 10: timeouts


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_10_recv_that_times_out_leaves_the_protocol_in_step(backend, tmp_path):
    """[V] After a timeout Gymnasium returns every later result one step late."""
    gate = tmp_path / "gate"
    env_fns = [Counter, gated(gate), Counter]
    with opened(env_fns, backend=backend, num_workers=3) as envs:
        envs.reset(seed=0)
        envs.send(ZERO)
        first: list[int] = []
        while sorted(first) != [0, 2]:
            first += envs.recv(timeout_s=0.1).slots.tolist()
            assert 1 not in first
        nothing = envs.recv(timeout_s=0.05)
        assert len(nothing.slots) == 0
        gate.touch()
        late = envs.recv(timeout_s=PATIENCE_S)
        assert late.slots.tolist() == [1]
        for t in (2, 3):
            obs, rewards, _, _, _ = envs.step(ZERO)
            assert obs[:, 0].tolist() == [t, t, t]
            assert rewards.tolist() == [t, t, t]


# ---------------------------------------------------------------------- 11, 12: failures


@pytest.mark.parametrize("where", PROCESSES)
def test_11_sigkill_gives_a_named_error_and_close_succeeds(where):
    """[V] Gymnasium: BrokenPipeError from step and from close, survivors alive, closed False."""
    env_fns: list[Any] = [Counter, functools.partial(Crashing, mode="kill", nth=2), Counter]
    envs = envfleet.make_vec(env_fns, **{**where, "num_workers": 3})
    try:
        envs.reset(seed=0)
        envs.step(ZERO)
        with at_most(2.0), pytest.raises(errors.WorkerDied) as caught:
            envs.step(ZERO)
    finally:
        envs.close()
    assert envs.closed
    assert caught.value.slots == (1,)
    assert caught.value.exitcode == -signal.SIGKILL
    assert "SIGKILL" in str(caught.value)
    assert "[1]" in str(caught.value)


def test_11_a_worker_killed_while_idle_is_named():
    envs = envfleet.make_vec(KnowsItsProcess, 2, backend="process", num_workers=2)
    try:
        envs.reset(seed=0)
        os.kill(envs.call("pid", slots=[1])[0], signal.SIGKILL)
        with at_most(2.0), pytest.raises(errors.WorkerDied) as caught:
            envs.step(np.zeros(2, dtype=np.int64))
    finally:
        envs.close()
    assert caught.value.slots == (1,)


class KnowsItsProcess(Counter):
    def pid(self):
        return os.getpid()


@pytest.mark.parametrize("where", EVERY)
def test_11_a_constructor_that_fails_is_named(where):
    """[V] Gymnasium: a bare ConnectionResetError."""
    env_fns = [Counter, Counter, FailingConstructor]
    with pytest.raises(errors.EnvConstructionFailed, match="as asked") as caught:
        envfleet.make_vec(env_fns, **where)
    assert caught.value.slot == 2
    assert "faulty_envs.py" in str(caught.value.__cause__)


@pytest.mark.parametrize("where", EVERY)
def test_12_a_two_argument_exception_arrives_as_text(where):
    """[V] Gymnasium: TypeError, missing argument."""
    env_fns = [Counter, functools.partial(TwoArgumentException, nth=2), Counter]
    with opened(env_fns, **where) as envs:
        envs.reset(seed=0)
        envs.step(ZERO)
        with pytest.raises(errors.EnvFailed, match="error 7 at step") as caught:
            envs.step(ZERO)
    assert caught.value.slot == 1
    assert "TwoArgumentError" in caught.value.reason
    assert "faulty_envs.py" in str(caught.value.__cause__)


@pytest.mark.parametrize("at", ["reset", "step", "call"])
@pytest.mark.parametrize("where", QUICK)
def test_12_an_unpicklable_exception_arrives_as_text(where, at):
    def live(envs):
        envs.reset(seed=0)
        envs.step(ZERO)
        envs.call("probe")

    env = functools.partial(UnpicklableException, at=at)
    with (
        opened(env, 3, **where) as envs,
        pytest.raises(errors.EnvFailed, match="cannot be pickled"),
    ):
        live(envs)


@pytest.mark.parametrize("mode", MODES[:2])
@pytest.mark.parametrize("where", EVERY)
def test_12_an_unpicklable_info_affects_no_other_slot(where, mode):
    with opened(UnpicklableInfo, 3, autoreset=mode, **where) as envs:
        envs.reset(seed=0)
        for t in range(1, 13):
            obs, _, _, _, infos = envs.step(ZERO)
            assert infos["t"].tolist() == obs[:, 0].tolist(), t
        assert infos["_lock"].all()


@pytest.mark.parametrize("where", QUICK)
def test_12_an_unpicklable_attribute_affects_no_other_slot(where):
    with opened(UnpicklableInfo, 3, **where) as envs:
        envs.reset(seed=0)
        if backend_named(where["backend"]).needs_pickle:
            with pytest.raises(errors.EnvFailed, match="pickle"):
                envs.get_attr("unpicklable")
        else:
            assert len(envs.get_attr("unpicklable")) == 3
        obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, 0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", QUICK)
def test_12_what_the_other_slots_did_can_be_received_after_a_failure(where):
    env_fns = [Counter, functools.partial(Crashing, nth=2), Counter]
    with opened(env_fns, **where) as envs:
        envs.reset(seed=0)
        envs.step(ZERO)
        envs.send(ZERO)
        with pytest.raises(errors.EnvFailed):
            envs.recv()
        batch = envs.recv()
    assert sorted(batch.slots.tolist()) == [0, 2]
    assert batch.obs[:, 0].tolist() == [2, 2]


@pytest.mark.parametrize("where", QUICK)
def test_12_after_a_failure_the_other_slots_are_unharmed(where):
    env_fns = [Counter, functools.partial(Crashing, nth=2), Counter]
    with opened(env_fns, **where) as envs:
        envs.reset(seed=0)
        envs.step(ZERO)
        with pytest.raises(errors.EnvFailed):
            envs.step(ZERO)
        envs.reset(options={"reset_mask": np.array([False, True, False])})
        obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, 0].tolist() == [3, 1, 3]


# ---------------------------------------------------------------------- 13: nothing left behind


@pytest.mark.parametrize("where", QUICK)
def test_13_twenty_fleets_in_a_row_leave_nothing(where):
    for _ in range(20):
        with opened(Counter, 2, **where) as envs:
            envs.reset(seed=0)


@pytest.mark.parametrize("where", QUICK)
def test_13_close_is_idempotent_and_use_after_close_is_named(where):
    envs = envfleet.make_vec(Counter, 3, **where)
    envs.reset(seed=0)
    envs.close()
    envs.close()
    assert envs.closed
    with pytest.raises(gymnasium.error.ClosedEnvironmentError, match="close"):
        envs.step(ZERO)
    with pytest.raises(gymnasium.error.ClosedEnvironmentError, match="close"):
        envs.reset()


@pytest.mark.parametrize("where", QUICK)
def test_13_close_while_in_flight(where):
    envs = envfleet.make_vec(functools.partial(Slow, step_s=0.05), 3, **where)
    envs.reset(seed=0)
    envs.send(ZERO)
    envs.close()
    assert envs.closed


# ---------------------------------------------------------------------- 15: edges


@pytest.mark.parametrize("where", PROCESSES)
def test_15_lambdas_and_closures_are_built_in_workers(where):
    length = 2

    class Local(Counter):
        def __init__(self):
            super().__init__(length)

    for env in (lambda: Counter(length), Local):
        expected, got = hand_driven(env, 2, 7), fleet_driven(env, 2, 7, **where)
        assert first_difference(expected, got) is None


@pytest.mark.parametrize("where", PROCESSES)
def test_15_an_id_registered_in_the_parent_is_known_in_workers(where):
    gymnasium.register(
        "ParentOnly-v0", entry_point="envfleet.testing:Counter", kwargs={"length": 3}
    )
    try:
        expected = hand_driven("ParentOnly-v0", 2, 7)
        got = fleet_driven("ParentOnly-v0", 2, 7, **where)
    finally:
        del gymnasium.registry["ParentOnly-v0"]
    assert first_difference(expected, got) is None


@pytest.mark.parametrize("where", QUICK)
def test_15_a_wrong_number_of_actions_raises_at_once(where):
    """Gymnasium waits for ever (its issue 1417)."""
    with opened(Counter, 3, **where) as envs:
        envs.reset(seed=0)
        for actions in (np.zeros(2, np.int64), np.zeros(4, np.int64), np.int64(0), [], [0, 0]):
            with pytest.raises(errors.ActionError, match="3"):
                envs.step(actions)
        obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, 0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", QUICK)
def test_15_actions_of_a_wrong_shape_raise_at_once(where):
    with opened(NoisyStream, 3, **where) as envs:
        envs.reset(seed=0)
        for actions in (np.zeros((3, 5), np.float32), np.zeros(3, np.float32)):
            with pytest.raises(errors.ActionError):
                envs.step(actions)


class LiesAboutItsSpace(Counter):
    def observation(self):
        return np.array([np.nan]) if self.t == 2 else super().observation()


@pytest.mark.parametrize("where", QUICK)
def test_15_nan_is_never_written_to_an_integer_observation(where):
    with opened(LiesAboutItsSpace, 3, **where) as envs:
        envs.reset(seed=0)
        envs.step(ZERO)
        with pytest.raises(errors.EnvFailed, match="float64"):
            envs.step(ZERO)


@pytest.mark.parametrize("where", QUICK)
def test_15_step_before_reset_is_named(where):
    with (
        opened(Counter, 3, **where) as envs,
        pytest.raises(gymnasium.error.ResetNeeded, match="reset"),
    ):
        envs.step(ZERO)


@pytest.mark.parametrize("where", QUICK)
def test_15_spaces_that_differ_are_named(where):
    with pytest.raises(errors.SpacesDiffer) as caught:
        envfleet.make_vec([Counter, Counter, TaskCounter], **where)
    assert caught.value.slot == 2


@pytest.mark.parametrize(
    "kwargs", [{"num_envs": 0}, {"num_envs": -1}, {"num_workers": 0}, {"num_workers": 9}]
)
def test_15_impossible_sizes_are_refused_before_anything_starts(kwargs):
    with pytest.raises(errors.ConfigError):
        envfleet.make_vec(Counter, **{"num_envs": 2, "backend": "process", **kwargs})


@pytest.mark.parametrize("where", QUICK)
def test_huge_observations_travel_whole(where):
    env = functools.partial(HugeObservation, num_bytes=2**22)
    with opened(env, 2, **where) as envs:
        envs.reset(seed=0)
        for t in range(1, 4):
            obs, _, _, _, _ = envs.step(np.zeros(2, dtype=np.int64))
            assert (obs == t).all()


def test_rewards_of_long_runs_do_not_drift():
    """Rewards are float64 all the way: a float32 sum of 0.1 drifts within a thousand steps."""
    with opened(NoisyStream, 1, **SERIAL) as envs:
        envs.reset(seed=0)
        _, rewards, _, _, _ = envs.step(np.zeros((1, 2), np.float32))
    assert rewards.dtype == np.float64

"""Seeds, options and tasks for single slots: at a reset, masked, and queued."""

import functools
from typing import Any

import numpy as np
import pytest

from envfleet import errors
from envfleet.testing import Counter, Crashing, Hanging, Slow, TaskCounter
from tests.conformance.matrix import BY_RAY, FORK, MODES, QUICK, RAY, THREAD, opened
from tests.gates import gated, in_time_at_best

ZERO = np.zeros(3, dtype=np.int64)
SEED, TASK, EPISODES, T = range(4)


@pytest.fixture(params=QUICK)
def envs(request):
    with opened(TaskCounter, 3, **request.param) as envs:
        yield envs


def run_to_the_end(envs):
    for _ in range(3):
        result = envs.step(ZERO)
    return result


def test_a_seed_for_each_slot(envs):
    obs, infos = envs.reset(seed=[7, None, 3])
    assert obs[:, SEED].tolist() == [7, -1, 3]
    assert infos["seed"].tolist() == [7, -1, 3]


def test_options_for_all_slots(envs):
    obs, _ = envs.reset(seed=0, options={"task": 5})
    assert obs[:, TASK].tolist() == [5, 5, 5]


def test_options_for_each_slot(envs):
    obs, infos = envs.reset(seed=0, options=[{"task": 5}, None, {"task": 6, "more": "x"}])
    assert obs[:, TASK].tolist() == [5, 0, 6]
    assert list(infos["options"]) == ["{'task': 5}", "{}", "{'more': 'x', 'task': 6}"]


def test_a_list_of_another_length_is_refused(envs):
    with pytest.raises(ValueError, match="3"):
        envs.reset(seed=[1, 2])
    with pytest.raises(ValueError, match="3"):
        envs.reset(options=[{}, {}])


def test_a_masked_reset_leaves_the_other_slots_alone(envs):
    envs.reset(seed=0)
    envs.step(ZERO)
    obs, infos = envs.reset(
        seed=[20, 21, 22], options={"reset_mask": np.array([True, False, True]), "task": 2}
    )
    assert obs[:, SEED].tolist() == [20, 1, 22]
    assert obs[:, TASK].tolist() == [2, 0, 2]
    assert obs[:, T].tolist() == [0, 1, 0]
    assert infos["_seed"].tolist() == [True, False, True]
    assert infos["options"][0] == "{'task': 2}", "the mask itself is not for the environments"
    obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, T].tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    "mask",
    [
        [True, False, True],
        np.array([1, 0, 1]),
        np.array([True, False]),
        np.array([False, False, False]),
    ],
    ids=["list", "integers", "too short", "no slot"],
)
def test_a_bad_mask_is_refused(envs, mask):
    envs.reset(seed=0)
    with pytest.raises((TypeError, ValueError), match="reset_mask"):
        envs.reset(options={"reset_mask": mask})
    obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, T].tolist() == [1, 1, 1]


def test_a_plan_is_used_at_the_next_autoreset_only(envs):
    envs.reset(seed=0)
    envs.queue_reset(seed=[30, 31, 32], options={"task": 9})
    run_to_the_end(envs)
    obs, _, _, _, infos = envs.step(ZERO)
    assert obs[:, SEED].tolist() == [30, 31, 32]
    assert obs[:, TASK].tolist() == [9, 9, 9]
    assert infos["seed"].tolist() == [30, 31, 32]
    run_to_the_end(envs)
    obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, SEED].tolist() == [-1, -1, -1]


def test_plans_of_one_slot_are_used_in_order(envs):
    envs.reset(seed=0)
    for task in (4, 5, 6):
        envs.queue_reset(options={"task": task}, slots=[1])
    tasks = []
    for _ in range(3):
        run_to_the_end(envs)
        obs, _, _, _, _ = envs.step(ZERO)
        tasks.append(obs[:, TASK].tolist())
    assert tasks == [[0, 4, 0], [0, 5, 0], [0, 6, 0]]


def test_plans_for_some_slots_each_with_its_own(envs):
    envs.reset(seed=0)
    envs.queue_reset(seed=[50, 51], options=[{"task": 1}, {"task": 2}], slots=[2, 0])
    run_to_the_end(envs)
    obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, SEED].tolist() == [51, -1, 50]
    assert obs[:, TASK].tolist() == [2, 0, 1]


def test_the_caller_may_change_options_after_queueing(envs):
    envs.reset(seed=0)
    options = {"task": 3}
    envs.queue_reset(options=options)
    options["task"] = 8
    run_to_the_end(envs)
    obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, TASK].tolist() == [3, 3, 3]


@pytest.mark.parametrize("where", QUICK)
def test_a_plan_is_used_in_same_step_mode(where):
    with opened(TaskCounter, 3, autoreset="same_step", **where) as envs:
        envs.reset(seed=0)
        envs.queue_reset(options={"task": 7}, slots=[1])
        obs, _, terminated, _, infos = run_to_the_end(envs)
    assert terminated.all()
    assert obs[:, TASK].tolist() == [0, 7, 0]
    assert [int(last[TASK]) for last in infos["final_obs"]] == [0, 0, 0]
    assert infos["task"].tolist() == [0, 7, 0]


def test_a_seed_queued_continues_as_that_seed(envs):
    """A queued seed gives the same stream as a reset with that seed."""
    envs.reset(seed=0)
    envs.queue_reset(seed=[5, 6, 7])
    run_to_the_end(envs)
    queued, _, _, _, _ = envs.step(ZERO)
    direct, _ = envs.reset(seed=[5, 6, 7])
    assert queued[:, SEED].tolist() == direct[:, SEED].tolist()


def test_an_unknown_slot_is_refused(envs):
    envs.reset(seed=0)
    for slots in ([3], [-1], [0, 0]):
        with pytest.raises((errors.ConfigError, ValueError, IndexError), match="slot"):
            envs.queue_reset(options={"task": 1}, slots=slots)


@pytest.mark.parametrize("where", QUICK)
def test_a_reset_drops_what_its_slots_have_in_flight(where):
    """The first action of the new episode is not answered with a row of the old one."""
    with opened(functools.partial(Slow, step_s=0.02), 3, **where) as envs:
        envs.reset(seed=0)
        envs.send(ZERO)
        obs, _ = envs.reset(seed=0)
        assert obs[:, 0].tolist() == [0, 0, 0]
        with pytest.raises(errors.NothingSent):
            envs.recv()
        obs, rewards, _, _, _ = envs.step(ZERO)
    assert obs[:, 0].tolist() == [1, 1, 1]
    assert rewards.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("where", QUICK)
def test_a_masked_reset_keeps_what_other_slots_have_in_flight(where):
    with opened(functools.partial(Slow, step_s=0.02), 3, **where) as envs:
        envs.reset(seed=0)
        envs.send(ZERO)
        envs.reset(options={"reset_mask": np.array([True, False, False])})
        batch = envs.recv()
        assert sorted(batch.slots.tolist()) == [1, 2]
        assert batch.obs[:, 0].tolist() == [1, 1]
        obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, 0].tolist() == [1, 2, 2]


# ---- resets that come back through recv ----------------------------------------------------------

APART = [pytest.param({**THREAD, "num_workers": 4}, id="thread")]
APART += [pytest.param({**FORK, "num_workers": 4}, id="fork")]
APART_OR_RAY = [*APART, pytest.param({**RAY, "num_workers": 4}, id="ray")]
"""A worker for each of four slots."""


@pytest.mark.parametrize("where", [*QUICK, *BY_RAY])
@pytest.mark.parametrize("mode", MODES)
def test_resets_and_steps_are_received_together(mode, where):
    with opened(TaskCounter, 4, autoreset=mode, **where) as envs:
        envs.reset(seed=100)
        if mode != "disabled":
            envs.queue_reset(options={"task": 7}, slots=[2])
        envs.send(np.zeros(2, np.int64), [0, 1])
        envs.send_reset(seed=[20, 21], options={"task": 3}, slots=[3, 2])
        batch = envs.recv()
        assert batch.slots.tolist() == [0, 1, 2, 3]
        assert batch.obs[:, SEED].tolist() == [100, 101, 21, 20]
        assert batch.obs[:, TASK].tolist() == [0, 0, 3, 3]
        assert batch.obs[:, T].tolist() == [1, 1, 0, 0]
        assert batch.valid.tolist() == [True, True, False, False]
        assert batch.rewards[2:].tolist() == [0.0, 0.0]
        assert not (batch.terminated | batch.truncated).any()
        assert batch.infos["seed"].tolist()[2:] == [21, 20]
        zero = np.zeros(4, np.int64)
        assert envs.step(zero)[0][:, T].tolist() == [2, 2, 1, 1]
        if mode == "disabled":
            return
        envs.step(zero)  # slots 0 and 1 end here, the others a step later
        obs = envs.step(zero)[0]
        if mode == "next_step":
            obs = envs.step(zero)[0]
        assert obs[2:, TASK].tolist() == [7, 3], "a plan that was queued is still there"
        assert obs[2:, T].tolist() == [0, 0]


@pytest.mark.parametrize("where", QUICK)
def test_a_fleet_says_which_slots_are_in_flight_or_need_a_reset(where):
    with opened(TaskCounter, 4, autoreset="disabled", **where) as envs:
        fleet = envs.fleet
        assert fleet.without_episode == [0, 1, 2, 3]
        envs.send_reset(seed=[1, 2, 3], slots=[0, 1, 3])
        assert fleet.in_flight == [0, 1, 3]
        envs.recv()
        assert fleet.without_episode == [2]
        envs.send(np.zeros(2, np.int64), [3, 0])
        envs.recv(slots=[3])
        assert fleet.in_flight == [0]
        envs.recv()
        assert fleet.in_flight == []


@pytest.mark.parametrize("where", QUICK)
def test_rows_of_send_reset_are_those_of_reset(where):
    with opened(TaskCounter, 4, **where) as envs:
        waited, _ = envs.reset(seed=5, options={"task": 2})
        envs.send_reset(seed=5, options={"task": 2})
        batch = envs.recv(slots=[0, 1, 2, 3])
        assert np.array_equal(batch.obs[:, [SEED, TASK, T]], waited[:, [SEED, TASK, T]])
        assert np.array_equal(batch.final_obs, batch.obs)
        plans = envs._plans(5, {"task": 2}, 4)
        again = envs.fleet.reset(plans)
        for name in ("rewards", "terminated", "truncated", "valid"):
            assert getattr(batch, name).tolist() == getattr(again, name).tolist()


@pytest.mark.parametrize("where", APART)
def test_slots_reset_side_by_side(where):
    with opened(functools.partial(Slow, reset_s=0.3), 4, **where) as envs:

        def reset_one_by_one():
            for slot in range(4):
                envs.send_reset(seed=[slot], slots=[slot])
            assert envs.recv().slots.tolist() == [0, 1, 2, 3]

        in_time_at_best(reset_one_by_one, 0.9)


@pytest.mark.parametrize("where", APART_OR_RAY)
def test_others_step_while_a_slot_resets(where, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    with opened([Counter, gated(gate, "reset"), Counter, Counter], **where) as envs:
        envs.reset(seed=0)
        gate.unlink()
        envs.send_reset(seed=[7], slots=[1])
        others = np.array([0, 2, 3])
        for t in range(1, 4):
            envs.send(np.zeros(3, np.int64), others)
            seen: dict[int, Any] = {}
            while len(seen) < 3:
                batch = envs.recv(min_slots=1)
                seen |= dict(zip(batch.slots.tolist(), batch.obs[:, 0].tolist(), strict=True))
            assert seen == {0: t, 2: t, 3: t}
        assert envs.recv(timeout_s=0.02, slots=[1]).slots.tolist() == []
        gate.touch()
        batch = envs.recv(timeout_s=60.0, slots=[1])
        assert (batch.slots.tolist(), batch.valid.tolist()) == ([1], [False])


@pytest.mark.parametrize("where", QUICK)
def test_a_slot_that_resets_is_in_flight(where):
    with opened(TaskCounter, 3, **where) as envs:
        envs.reset(seed=0)
        envs.send_reset(seed=[9], slots=[1])
        for misuse in (
            lambda: envs.send(np.zeros(1, np.int64), [1]),
            lambda: envs.send_reset(slots=[1]),
            lambda: envs.step(ZERO),
        ):
            with pytest.raises(errors.StillInFlight, match=r"slots \[1\]"):
                misuse()
        assert envs.recv().obs[:, SEED].tolist() == [9]
        with pytest.raises(errors.NothingSent):
            envs.recv()


@pytest.mark.parametrize("where", QUICK)
@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_reset_that_is_dropped_has_happened(where, is_waited_for):
    with opened(TaskCounter, 3, **where) as envs:
        envs.reset(seed=0)
        envs.step(ZERO)
        envs.send_reset(seed=[30, 31], slots=[0, 2])
        if is_waited_for:
            assert envs.recv(slots=[0]).obs[:, SEED].tolist() == [30]
        envs.fleet.drop([2] if is_waited_for else [0, 2])
        obs, *_ = envs.step(ZERO)
        assert obs[:, SEED].tolist() == [30, 1, 31]
        assert obs[:, T].tolist() == [1, 2, 1]
        for _ in range(3):
            obs, *_ = envs.step(ZERO)
        assert obs[:, T].tolist() == [0, 1, 0]


@pytest.mark.parametrize("where", QUICK)
def test_a_reset_that_raises_costs_its_own_slot_only(where):
    broken = functools.partial(Crashing, at="reset", nth=2)
    with opened([Counter, broken, Counter], **where) as envs:
        envs.reset(seed=0)
        envs.send(np.zeros(1, np.int64), [0])
        envs.send_reset(seed=[1, 2], slots=[1, 2])
        with pytest.raises(errors.EnvFailed, match="slot 1"):
            envs.recv()
        batch = envs.recv()
        assert batch.slots.tolist() == [0, 2]
        assert batch.obs.tolist() == [[1], [0]]
        with pytest.raises(errors.ResetNeeded, match=r"\[1\]"):
            envs.step(ZERO)
        envs.send_reset(seed=[1], slots=[1])
        assert envs.recv().obs.tolist() == [[0]]
        assert envs.step(ZERO)[0][:, 0].tolist() == [2, 1, 1]


@pytest.mark.parametrize("where", [*QUICK, *BY_RAY])
def test_a_reset_that_raises_is_done_again_after_a_restart(where, tmp_path):
    broken = functools.partial(Crashing, at="reset", nth=2, once=tmp_path / "happened")
    with opened([Counter, broken, Counter], on_failure="restart", **where) as envs:
        envs.reset(seed=0)
        envs.send(np.zeros(1, np.int64), [0])
        envs.send_reset(seed=[1, 2], slots=[1, 2])
        batch = envs.recv()
        assert batch.slots.tolist() == [0, 1, 2]
        assert batch.obs[:, 0].tolist() == [1, 0, 0]
        assert not batch.truncated.any()
        assert [incident.slot for incident in batch.incidents] == [1]
        assert envs.step(ZERO)[0][:, 0].tolist() == [2, 1, 1]


@pytest.mark.parametrize("where", APART_OR_RAY)
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_reset_that_hangs_has_a_deadline(where, on_failure, tmp_path):
    hangs = functools.partial(
        Hanging, at="reset", nth=2, for_s=3.0, once=tmp_path / "happened", length=None
    )
    env_fns = [Counter, hangs, Counter, Counter]
    with opened(env_fns, on_failure=on_failure, reset_timeout_s=1.0, **where) as envs:
        envs.reset(seed=0)
        envs.send_reset(seed=[1], slots=[1])
        envs.send(np.zeros(3, np.int64), [0, 2, 3])
        if on_failure == "raise":
            with pytest.raises(errors.DeadlineExceeded, match="slot 1") as caught:
                envs.recv()
            assert (caught.value.doing, caught.value.option) == ("reset", "reset_timeout_s")
            assert envs.recv().slots.tolist() == [0, 2, 3]
        else:
            batch = envs.recv()
            assert batch.obs[:, 0].tolist() == [1, 0, 1, 1]
            assert [incident.kind for incident in batch.incidents] == ["timeout"]
            assert not batch.truncated.any()
            assert envs.step(np.zeros(4, np.int64))[0][:, 0].tolist() == [2, 1, 2, 2]

"""Seeds, options and tasks for single slots: at a reset, masked, and queued."""

import functools

import numpy as np
import pytest

from envfleet import errors
from envfleet.testing import Slow, TaskEnv
from tests.conformance.matrix import QUICK, opened

ZERO = np.zeros(3, dtype=np.int64)
SEED, TASK, EPISODES, T = range(4)


@pytest.fixture(params=QUICK)
def envs(request):
    with opened(TaskEnv, 3, **request.param) as envs:
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
    with opened(TaskEnv, 3, autoreset="same_step", **where) as envs:
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

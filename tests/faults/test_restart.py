"""on_failure="restart" and "fallback": lost slots come back truncated, others do not notice."""

import functools
import os
import pickle
import signal
import time
import warnings
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces

import envfleet
from envfleet import errors
from envfleet.engine import Deadlines, Fleet, ResetPlan, RestartPolicy
from envfleet.engine.backends.process import handle, launch
from envfleet.engine.backends.process.backend import ProcessBackend
from envfleet.testing import (
    AnySpace,
    Counter,
    Crashing,
    FailingConstructor,
    Hanging,
    NoisyStream,
    Slow,
    TaskCounter,
    VectorCounter,
)
from tests.faults.stage import (
    GRACE_S,
    MODES,
    Resident,
    Troubled,
    drive,
    kill_and_wait,
    left_after,
    opened,
    plans,
    same_rows,
    step,
    zeros,
)
from tests.gates import PATIENCE_S, at_most, opened_meanwhile, wait_for, wait_for_answers

TROUBLES = ("kill", "exit", "hang", "exception")
SEED = 11
STEPS = 30
AT_STEP = 9
"""Of the troubled environment's own steps; well into the stream, and not at its start."""


def actions(num_envs):
    generator = np.random.default_rng(0)
    return generator.uniform(-1, 1, (STEPS, num_envs, 2)).astype(np.float32)


def streams(env_fns, **options):
    with opened(env_fns, num_workers=3, on_failure="restart", **options) as envs:
        return drive(envs, actions(len(env_fns)), SEED), envs.incidents


@functools.cache
def undisturbed(mode):
    return streams([Troubled] * 6, autoreset=mode)[0]


def disturbed(mode, trouble, once, **options):
    """Six slots in three workers; slot 2, in worker 1 with slot 3, fails."""
    env_fns: list[Any] = [Troubled] * 6
    env_fns[2] = functools.partial(Troubled, trouble, AT_STEP, once)
    if trouble == "hang":
        options["step_timeout_s"] = 0.4
    return streams(env_fns, autoreset=mode, **options)


def place_of_incident(rows):
    places = [place for place, row in enumerate(rows) if row.get("incident") is not None]
    assert len(places) == 1, f"rows {places} carry an incident"
    return places[0]


# ---- law 3: the others --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_all_other_streams_are_bit_equal(trouble, mode, tmp_path):
    found, incidents = disturbed(mode, trouble, tmp_path / "happened")
    expected = undisturbed(mode)
    assert len(incidents) == 1
    lost = {2} if trouble == "exception" else {2, 3}
    assert set(incidents[0].slots) == lost
    for slot in set(range(6)) - lost:
        assert same_rows(found[slot], expected[slot]), f"slot {slot} was disturbed"
    for slot in lost:
        place = place_of_incident(found[slot])
        assert same_rows(found[slot][:place], expected[slot][:place])
        row = found[slot][place]
        assert row["incident"] is incidents[0]
        assert (row["terminated"], row["truncated"], row["valid"]) == (False, True, False)
        assert row["reward"] == 0.0
        assert np.isfinite(row["obs"]).all()


@pytest.mark.parametrize("trouble", ["kill", "exception"])
def test_what_a_lost_slot_does_next_is_what_an_end_leads_to(trouble, tmp_path):
    """As after any truncation: next_step resets in the next step, same_step at once."""
    found, _ = disturbed("next_step", trouble, tmp_path / "next")
    place = place_of_incident(found[2])
    after = found[2][place + 1]
    assert (after["valid"], after["truncated"], after["reward"]) == (False, False, 0.0)
    assert found[2][place + 2]["valid"]
    assert not np.array_equal(after["obs"], found[2][place]["obs"])

    found, _ = disturbed("same_step", trouble, tmp_path / "same")
    place = place_of_incident(found[2])
    row = found[2][place]
    assert not np.array_equal(row["obs"], row["final_obs"])
    assert np.array_equal(row["final_obs"], found[2][place - 1]["obs"])
    assert found[2][place + 1]["valid"]

    found, _ = disturbed("disabled", trouble, tmp_path / "disabled")
    place = place_of_incident(found[2])
    assert list(found[2][place + 1]) == ["obs"]  # drive reset it, and that worked
    assert found[2][place + 2]["valid"]


def test_disabled_asks_for_a_reset_after_a_restart(tmp_path):
    env_fn = functools.partial(Crashing, mode="kill", once=tmp_path / "happened")
    with opened([Counter, env_fn], num_workers=2, autoreset="disabled", on_failure="restart") as e:
        e.reset(seed=0)
        *_, truncated, _ = e.step(zeros(2))
        assert truncated.tolist() == [False, True]
        with pytest.raises(errors.ResetNeeded, match=r"slots \[1\]"):
            e.step(zeros(2))
        e.reset(options={"reset_mask": np.array([False, True])})
        obs, *_ = e.step(zeros(2))
        assert obs.tolist() == [[2], [1]]


@pytest.mark.parametrize(
    ("trouble", "mode"),
    [
        *((trouble, mode) for trouble in ("kill", "exception") for mode in MODES),
        ("hang", "next_step"),
    ],
)
def test_the_same_crash_gives_the_same_streams(trouble, mode, tmp_path):
    """All of them: those of the lost slots after their restart too."""
    first, _ = disturbed(mode, trouble, tmp_path / "first")
    second, _ = disturbed(mode, trouble, tmp_path / "second")
    for slot in range(6):
        for rows in (first[slot], second[slot]):
            for row in rows:
                row.pop("incident", None)
        assert same_rows(first[slot], second[slot])


def test_lost_slots_do_not_repeat_each_other_or_themselves(tmp_path):
    found, _ = disturbed("next_step", "kill", tmp_path / "happened")
    after = {
        slot: [row["obs"].tobytes() for row in found[slot][place_of_incident(found[slot]) + 1 :]]
        for slot in (2, 3)
    }
    assert not set(after[2]) & set(after[3])
    for slot in (2, 3):
        earlier = {row["obs"].tobytes() for row in found[slot][: place_of_incident(found[slot])]}
        assert not earlier & set(after[slot])


# ---- what is replaced ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["process", "thread", "serial"])
def test_an_exception_replaces_one_environment_where_it_is(backend, tmp_path):
    env_fns = [Troubled, functools.partial(Troubled, "exception", 2, tmp_path / "happened")]
    options = {} if backend == "serial" else {"num_workers": 1}
    with opened(env_fns, backend=backend, on_failure="restart", **options) as envs:
        envs.reset(seed=0)
        before = envs.get_attr("pid"), envs.get_attr("steps")
        for _ in range(3):
            envs.step(actions(2)[0])
        assert len(envs.incidents) == 1
        assert envs.get_attr("pid") == before[0]
        neighbour, restarted = envs.get_attr("steps")
        assert (neighbour, before[1]) == (3, (0, 0))
        assert restarted < 2, "it is not a new environment"


class Unflattened(spaces.Space[Any]):
    """A space whose values do not fit into shared memory, even small ones."""

    def __init__(self):
        super().__init__(None, None)

    @property
    def is_np_flattenable(self):
        return False

    def sample(self, mask=None, probability=None):
        return ""

    def contains(self, x):
        return True

    def __eq__(self, other):
        return isinstance(other, Unflattened)

    def __hash__(self):
        return hash(Unflattened)


class RaisesAtAWord(Counter):
    def __init__(self):
        super().__init__()
        self.action_space = Unflattened()

    def step(self, action):
        if action == "raise":
            raise ValueError("it was told to raise")
        return super().step(0)


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
def test_an_exception_at_an_action_that_does_not_fit_the_slab(backend):
    with opened([RaisesAtAWord] * 3, backend=backend, on_failure="restart") as envs, at_most(20):
        envs.reset(seed=0)
        truncated = envs.step(("go", "raise", "go"))[3]
        assert truncated.tolist() == [False, True, False]
        assert len(envs.incidents) == 1
        assert not envs.step(("go", "go", "go"))[3].any()


class Counted(Counter):
    """Creates a file each time one is built."""

    def __init__(self, folder, **options):
        super().__init__(**options)
        (folder / f"{os.getpid()}-{time.monotonic_ns()}").touch()

    pid = property(lambda self: os.getpid())


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_restart_builds_each_lost_environment_once(mode, tmp_path):
    env_fn = functools.partial(Counted, tmp_path, length=None)
    with opened(env_fn, 4, num_workers=2, on_failure="restart", autoreset=mode) as envs:
        envs.reset(seed=0)
        assert len(list(tmp_path.iterdir())) == 4
        kill_and_wait(envs.get_attr("pid")[0])
        for _ in range(3):
            envs.step(zeros(4))
        assert len(list(tmp_path.iterdir())) == 6


def test_the_broken_environment_is_closed_when_it_is_replaced(tmp_path):
    class Closing(Crashing):
        def close(self):
            (tmp_path / "closed").touch()

    env_fn = functools.partial(Closing, once=tmp_path / "happened")
    with opened([env_fn], on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(zeros(1))
        assert (tmp_path / "closed").exists()


def test_two_workers_lost_in_one_step_both_come_back(tmp_path):
    env_fns = [
        functools.partial(Crashing, mode="kill", once=tmp_path / "0", length=None),
        Resident,
        functools.partial(Crashing, mode="exit", once=tmp_path / "2", length=None),
    ]
    with opened(env_fns, num_workers=3, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.send(zeros(3))
        batch = envs.recv()
        assert batch.truncated.tolist() == [True, False, True]
        assert sorted(incident.slot for incident in batch.incidents) == [0, 2]
        owners = [None if one is None else one.slot for one in batch.infos["incident"]]
        assert owners == [0, None, 2]
        for expected in ([0, 2, 0], [1, 3, 1], [2, 4, 2]):
            obs, *_ = envs.step(zeros(3))
            assert obs[:, 0].tolist() == expected


def test_two_environments_that_raise_in_one_step_both_come_back(tmp_path):
    env_fns = [
        functools.partial(Crashing, once=tmp_path / "0", length=None),
        Resident,
        functools.partial(Crashing, once=tmp_path / "2", length=None),
    ]
    with opened(env_fns, num_workers=1, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.send(zeros(3))
        batch = envs.recv()
        assert batch.slots.tolist() == [0, 1, 2]
        assert batch.truncated.tolist() == [True, False, True]
        assert sorted(incident.slot for incident in batch.incidents) == [0, 2]
        for expected in ([0, 2, 0], [1, 3, 1]):
            obs, *_ = envs.step(zeros(3))
            assert obs[:, 0].tolist() == expected


def test_twenty_restarts_leave_nothing_behind():
    """Above all descriptors: a replaced worker has a dozen of them."""
    fleet = Fleet(
        [Resident] * 2,
        num_workers=2,
        on_failure="restart",
        restarts=RestartPolicy(max_restarts=20),
    )
    fleet.reset(plans(0, 1))
    in_use = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        kill_and_wait(fleet.call("pid")[1])
        assert step(fleet).truncated.tolist() == [False, True]
        step(fleet)
    assert len(os.listdir("/proc/self/fd")) == in_use
    fleet.close()


# ---- what the new episode begins with -----------------------------------------------------------


class KillsAtOne(TaskCounter):
    """Ends its worker, or raises, at an action of 1."""

    def __init__(self, how):
        super().__init__(length=3)
        self.how = how

    def step(self, action):
        if action == 1 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 1:
            raise RuntimeError("it was told to raise")
        return super().step(action)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["kill", "exception"])
def test_a_lost_episode_begins_again_with_its_own_options(how, mode):
    options = {"num_workers": 1, "on_failure": "restart", "autoreset": mode}
    with opened(functools.partial(KillsAtOne, how), 2, **options) as envs:
        envs.reset(seed=0, options=[{"task": 7}, {"task": 8}])
        obs = envs.step(np.array([0, 1]))[0]
        if mode == "disabled":
            envs.reset(options={"reset_mask": np.array([False, True]), "task": 9})
            assert envs.get_attr("task")[1] == 9
            return
        if mode == "next_step":
            obs = envs.step(zeros(2))[0]
        assert obs[1, 1] == 8
        assert obs[0, 1] == 7
        assert obs[1, 0] not in (-1, 1), "it has a seed that follows from its last one"


def test_an_episode_that_had_ended_leaves_its_options_behind():
    """What comes next is an autoreset, which has none."""
    with opened(functools.partial(KillsAtOne, "kill"), 1, on_failure="restart") as envs:
        envs.reset(seed=0, options={"task": 7})
        for _ in range(3):
            terminated = envs.step(zeros(1))[2]
        assert terminated.all()
        kill_and_wait(envs.fleet.worker_pids()[0])
        obs, _, _, _, infos = envs.step(zeros(1))
        assert obs[0, 1:].tolist() == [0, 1, 0]
        assert infos["options"][0] == "{}"


# ---- the budget ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "num_workers"), [("exception", 1), ("exception", 3), ("kill", 3)])
def test_a_slot_that_keeps_failing_is_quarantined(mode, num_workers):
    always = functools.partial(Crashing, mode=mode, length=None)
    fleet = Fleet(
        [Resident, always, Resident],
        num_workers=num_workers,
        on_failure="restart",
        restarts=RestartPolicy(max_restarts=2, window_s=300.0),
    )
    fleet.reset(plans(0, 1, 2))
    for _ in range(2):
        assert step(fleet).truncated.tolist() == [False, True, False]
        step(fleet)
    with pytest.raises(errors.SlotQuarantined) as caught:
        step(fleet)
    error = caught.value
    assert (error.slot, error.restarts, error.window_s) == (1, 3, 300.0)
    assert len(fleet.incidents) == 3
    assert "slot 1 failed 3 times, within 300 s or with no good step in between" in str(error)
    assert "envfleet doctor replay" in str(error)
    assert error.__cause__ is not None

    batch = fleet.recv()
    assert batch.slots.tolist() == [0, 2]
    assert batch.obs.tolist() == [[5], [5]]
    for t in range(6, 9):
        fleet.send(zeros(2), [0, 2])
        assert fleet.recv().obs.tolist() == [[t], [t]]
    for use in (
        lambda: fleet.send(zeros(3)),
        lambda: fleet.send(zeros(1), [1]),
        lambda: fleet.reset(plans(1), [1]),
        lambda: fleet.call("t", slots=[1]),
    ):
        with pytest.raises(errors.SlotQuarantined, match="slot 1"):
            use()
    assert fleet.call("t", slots=[0, 2]) == [8, 8]
    with at_most(2.0):
        fleet.close()


class Bad(Resident):
    """Ends its worker, or hangs, at an action of 1."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def step(self, action):
        if action == 1 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 1:
            time.sleep(3600 if self.how == "hang" else 2.0)
        return super().step(action)


@pytest.mark.parametrize(
    ("how", "backend"), [("kill", "process"), ("hang", "process"), ("late", "thread")]
)
@pytest.mark.parametrize("mode", MODES)
def test_neighbours_of_a_quarantined_slot_that_kills_go_on(mode, how, backend):
    """They are in the worker that it kills: they are truncated too, and come back without it."""
    fleet = Fleet(
        [Resident, functools.partial(Bad, how), Resident, Resident],
        num_workers=2,
        backend=backend,
        autoreset=mode,
        on_failure="restart",
        deadlines=Deadlines(step_s=None if how == "kill" else 0.4),
        restarts=RestartPolicy(max_restarts=0),
    )
    fleet.reset(plans(0, 1, 2, 3))
    step(fleet)
    fleet.send(np.array([0, 1, 0, 0]))
    with pytest.raises(errors.SlotQuarantined, match="slot 1"):
        fleet.recv()
    batch = fleet.recv()
    assert batch.slots.tolist() == [0, 2, 3]
    assert batch.truncated.tolist() == [True, False, False]
    assert batch.valid.tolist() == [False, True, True]
    assert batch.obs[1:].tolist() == [[2], [2]]
    assert batch.incidents == tuple(fleet.incidents)
    assert fleet.quarantined.keys() == {1}
    others = [0, 2, 3]
    if mode == "disabled":
        fleet.reset(plans(0, 2, 3), others)
    for _ in range(3):
        fleet.send(zeros(3), others)
        assert fleet.recv().slots.tolist() == others
    for use in (
        lambda: fleet.send(zeros(1), [1]),
        lambda: fleet.reset(plans(1), [1]),
        lambda: fleet.call("t"),
        lambda: step(fleet),
    ):
        with pytest.raises(errors.SlotQuarantined, match="slot 1"):
            use()
    fleet.reset(plans(0, 2, 3), others)
    assert fleet.call("t", slots=others) == [0, 0, 0]
    if backend == "process":  # slots that die later come back without it too
        pid = fleet.worker_pids()[0]
        assert pid is not None
        kill_and_wait(pid)
        fleet.send(zeros(3), others)
        with pytest.raises(errors.SlotQuarantined, match="slot 0"):
            fleet.recv()
        assert fleet.recv().slots.tolist() == [2, 3]
    assert len(fleet.incidents) == 1 + (backend == "process")
    fleet.close()


def test_a_killer_in_reset_is_quarantined_alone():
    fleet = Fleet(
        [Resident, functools.partial(Crashing, mode="kill", at="reset"), Resident],
        num_workers=1,
        on_failure="restart",
        restarts=RestartPolicy(max_restarts=1),
    )
    with pytest.raises(errors.SlotQuarantined, match="slot 1 failed 2 times"):
        fleet.reset(plans(0, 1, 2))
    fleet.reset(plans(0, 2), [0, 2])
    fleet.send(zeros(2), [0, 2])
    assert fleet.recv().obs.tolist() == [[1], [1]]
    fleet.close()


@pytest.mark.parametrize("how", ["exception", "exit"])
def test_who_cannot_be_built_again_is_quarantined_alone(how, tmp_path):
    """Its neighbour killed the worker and has restarts left."""
    fleet = Fleet(
        [functools.partial(Bad, "kill"), functools.partial(BuildsOnce, tmp_path / "built", how)],
        on_failure="restart",
        restarts=RestartPolicy(max_restarts=2),
    )
    fleet.reset(plans(0, 1))
    fleet.send(np.array([1, 0]))
    with at_most(10.0), pytest.raises(errors.SlotQuarantined, match="slot 1 failed 3 times"):
        fleet.recv()
    assert fleet.recv().slots.tolist() == [0]
    assert fleet.quarantined.keys() == {1}
    assert [incident.slot for incident in fleet.incidents] == [0, 1, 1, 1]
    fleet.send(zeros(1), [0])
    assert fleet.recv().slots.tolist() == [0]
    fleet.close()


def test_the_default_budget_forgives_five(tmp_path):
    with opened([Crashing], on_failure="restart") as envs:
        envs.reset(seed=0)
        for _ in range(10):
            envs.step(zeros(1))
        with pytest.raises(errors.SlotQuarantined, match="failed 6 times"):
            envs.step(zeros(1))
        assert len(envs.incidents) == 6


ONE_RESTART = RestartPolicy(max_restarts=1, window_s=1e-3)
"""Of a window that is over before the next failure."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", ["step", "reset"])
def test_failures_are_forgotten_after_the_window_if_the_slot_works_in_between(at, mode):
    env_fn = functools.partial(Crashing, at=at, nth=2, length=1 if at == "reset" else None)
    fleet = Fleet(
        [env_fn], backend="serial", autoreset=mode, on_failure="restart", restarts=ONE_RESTART
    )
    for _ in range(5):
        fleet.reset(plans(0))
        if at == "step":
            assert step(fleet).valid.tolist() == [True]
            assert step(fleet).truncated.tolist() == [True]
        time.sleep(2e-3)
    assert len(fleet.incidents) == (5 if at == "step" else 4)
    fleet.close()


def test_one_that_always_fails_is_quarantined_however_slowly():
    fleet = Fleet([Crashing], backend="serial", on_failure="restart", restarts=ONE_RESTART)
    fleet.reset(plans(0))
    for is_truncated in (True, False):  # the failure, then the reset after it
        assert step(fleet).truncated.tolist() == [is_truncated]
        time.sleep(2e-3)
    with pytest.raises(errors.SlotQuarantined, match="slot 0 failed 2 times"):
        step(fleet)
    fleet.close()


def test_one_that_always_hangs_is_quarantined_though_its_deadline_is_as_long_as_the_window():
    fleet = Fleet(
        [functools.partial(Bad, "hang")],
        on_failure="restart",
        deadlines=Deadlines(step_s=1.0),
        restarts=RestartPolicy(max_restarts=2, window_s=1.0),
    )
    fleet.reset(plans(0))
    for _ in range(2):
        fleet.send(np.array([1]))
        assert fleet.recv().truncated.tolist() == [True]
        step(fleet)
    fleet.send(np.array([1]))
    with pytest.raises(errors.SlotQuarantined, match="slot 0 failed 3 times"):
        fleet.recv()
    fleet.close()


def test_a_worker_that_was_given_up_has_no_process():
    fleet = Fleet([functools.partial(Bad, "kill"), Resident], num_workers=2)
    fleet.reset(plans(0, 1))
    before = fleet.worker_pids()
    fleet.send(np.array([1, 0]))
    with pytest.raises(errors.WorkerDied):
        fleet.recv()
    assert None not in before
    assert fleet.worker_pids() == [None, before[1]]
    fleet.close()


class BuildsOnce(Counter):
    """Works once; it cannot be built a second time."""

    def __init__(self, built, how="exception", **options):
        super().__init__(**options)
        if built.exists() and how == "exception":
            raise RuntimeError("no second life")
        if built.exists():
            os._exit(4)
        built.touch()

    pid = property(lambda self: os.getpid())

    def step(self, action):
        if self.t == 1:
            raise RuntimeError("the first life is over")
        return super().step(action)


@pytest.mark.parametrize("how", ["exception", "exit"])
def test_a_successor_that_cannot_be_built_uses_up_the_budget(how, tmp_path):
    env_fn = functools.partial(BuildsOnce, tmp_path / "built", how, length=None)
    fleet = Fleet(
        [Resident, env_fn],
        num_workers=2,
        on_failure="restart",
        restarts=RestartPolicy(max_restarts=2),
    )
    fleet.reset(plans(0, 1))
    step(fleet)
    with at_most(5.0), pytest.raises(errors.SlotQuarantined) as caught:
        step(fleet)
    assert caught.value.slot == 1
    assert len(fleet.incidents) == 3
    assert fleet.recv().obs.tolist() == [[2]]
    fleet.close()


def test_a_worker_whose_successor_cannot_be_built_is_quarantined(tmp_path):
    env_fn = functools.partial(BuildsOnce, tmp_path / "built", length=None)
    fleet = Fleet(
        [Resident, env_fn],
        num_workers=2,
        on_failure="restart",
        restarts=RestartPolicy(max_restarts=2),
    )
    fleet.reset(plans(0, 1))
    kill_and_wait(fleet.call("pid")[1])
    with at_most(5.0), pytest.raises(errors.SlotQuarantined) as caught:
        step(fleet)
    assert caught.value.slot == 1
    assert "no second life" in str(caught.value.__cause__)
    assert fleet.recv().obs.tolist() == [[1]]
    fleet.close()


def test_a_constructor_that_fails_at_the_start_is_an_error_in_every_mode():
    for on_failure in ("raise", "restart", "fallback"):
        with pytest.raises(errors.EnvConstructionFailed):
            envfleet.make_vec(
                [FailingConstructor], backend="process", start_method="fork", on_failure=on_failure
            )


# ---- when it dies -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_death_while_idle(mode):
    with opened([Resident] * 4, num_workers=2, autoreset=mode, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(zeros(4))
        kill_and_wait(envs.get_attr("pid")[2])
        envs.send(zeros(4))
        batch = envs.recv()
        assert batch.truncated.tolist() == [False, False, True, True]
        assert batch.valid.tolist() == [True, True, False, False]
        assert batch.obs[:2, 0].tolist() == [2, 2]
        assert batch.final_obs[2:, 0].tolist() == [1, 1]


def test_death_while_idle_after_an_episode_has_ended():
    """Nothing was lost: the slot is reset as usual, and no end is reported twice."""
    with opened([functools.partial(Resident, length=2)], on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(zeros(1))
        assert envs.step(zeros(1))[2].tolist() == [True]
        kill_and_wait(envs.get_attr("pid")[0])
        obs, _, terminated, truncated, _ = envs.step(zeros(1))
        assert (obs.tolist(), terminated.tolist(), truncated.tolist()) == ([[0]], [False], [False])
        assert envs.step(zeros(1))[0].tolist() == [[1]]
        assert len(envs.incidents) == 1


def test_death_between_send_and_recv():
    env_fns = [Resident, functools.partial(Slow, step_s=30.0, length=None)]
    with opened(env_fns, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        (pid,) = worker_pids(envs)[1:]
        envs.send(zeros(2))
        kill_and_wait(pid)
        with at_most(2.0):
            batch = envs.recv()
        assert batch.truncated.tolist() == [False, True]
        assert batch.obs.tolist() == [[1], [0]]
        assert batch.incidents[0].exitcode == -signal.SIGKILL


def test_death_after_the_answer_and_before_recv():
    """A finished step counts, or the slot comes back truncated; never a mixture."""
    with opened([Resident] * 2, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        pids = envs.get_attr("pid")
        for _ in range(5):
            t = envs.get_attr("t")[1]
            envs.send(zeros(2))
            time.sleep(0.05)
            kill_and_wait(pids[1])
            batch = envs.recv()
            if batch.valid[1]:
                assert batch.obs[1].tolist() == [t + 1]
                assert batch.rewards[1] == t + 1
                assert not batch.truncated[1]
                assert batch.incidents == ()
                envs.send(zeros(2))
                batch = envs.recv()
            assert batch.truncated.tolist() == [False, True]
            assert batch.infos["_incident"].tolist() == [False, True]
            assert envs.step(zeros(2))[0][1].tolist() == [0]
            pids = envs.get_attr("pid")


def test_only_slots_in_flight_come_back_now_and_their_neighbours_when_stepped(tmp_path):
    """Slots 0 and 1 share a worker; slot 0 is sent alone, and kills it."""
    env_fns = [
        functools.partial(Crashing, mode="kill", nth=2, once=tmp_path / "x", length=None),
        Resident,
        Resident,
    ]
    with opened(env_fns, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(zeros(3))
        envs.send(zeros(1), [0])
        batch = envs.recv()
        assert batch.slots.tolist() == [0]
        assert batch.truncated.tolist() == [True]
        (incident,) = batch.incidents
        assert incident.slots == (0, 1)
        envs.send(zeros(3))
        batch = envs.recv()
        assert batch.truncated.tolist() == [False, True, False]
        assert batch.valid.tolist() == [False, False, True]
        assert list(batch.infos["incident"]) == [None, incident, None]
        assert envs.step(zeros(3))[0][:, 0].tolist() == [1, 0, 3]


class TellsT(Crashing):
    """Reports t in its info."""

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"t": self.t}


@pytest.mark.parametrize("how", ["kill", "exception"])
def test_results_that_wait_to_be_received_are_not_harmed_by_a_later_death(how, tmp_path):
    """Slot 0 has answered; slot 1 then ends their worker; one recv gives both."""
    env_fns = [
        functools.partial(TellsT, at="never", length=None),
        functools.partial(TellsT, mode=how, nth=2, once=tmp_path / "x", length=None),
    ]
    with opened(env_fns, num_workers=1, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        envs.send(zeros(1), [0])
        envs.send(zeros(1), [1])
        batch = envs.recv()
        assert batch.slots.tolist() == [0, 1]
        assert batch.valid.tolist() == [True, False]
        assert batch.truncated.tolist() == [False, True]
        assert batch.obs[0].tolist() == [2]
        assert batch.infos["_t"].tolist() == [True, False]
        assert batch.infos["t"][0] == 2
        assert batch.infos["_incident"].tolist() == [False, True]
        envs.send(zeros(2))
        batch = envs.recv()
        was_lost = how == "kill"
        assert batch.truncated.tolist() == [was_lost, False]
        assert bool(batch.infos.get("_incident", [False])[0]) == was_lost


class Fatal:
    """Ends the process that pickles it: after the step, before the answer."""

    def __reduce__(self):
        os._exit(3)


class ToldTooLate(Resident):
    """Its second info is fatal, once."""

    def __init__(self, once):
        super().__init__()
        self.once = once

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        is_fatal = self.t == 2 and is_first(self.once)
        return obs, reward, terminated, truncated, {"odd": Fatal()} if is_fatal else {}


@pytest.mark.parametrize("mode", MODES)
def test_an_end_that_was_never_told_is_told_as_a_truncation(mode, tmp_path):
    """Slot 0's episode has ended in shared memory when its worker dies, but was not received."""
    env_fns = [
        functools.partial(Resident, length=2),
        functools.partial(ToldTooLate, tmp_path / "x"),
    ]
    with opened(env_fns, num_workers=1, autoreset=mode, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        envs.send(zeros(2))
        batch = envs.recv()
        assert batch.truncated.tolist() == [True, True]
        assert batch.terminated.tolist() == [False, False]
        assert batch.valid.tolist() == [False, False]
        assert batch.infos["_incident"].tolist() == [True, True]
        assert set(batch.final_obs[:, 0].tolist()) <= {1, 2}, "no observations of that episode"
        if mode == "disabled":
            obs, _ = envs.reset(options={"reset_mask": np.array([True, True])})
        elif mode == "next_step":
            obs, *_ = envs.step(zeros(2))
        else:
            obs = batch.obs
        assert obs.tolist() == [[0], [0]]
        assert envs.step(zeros(2))[0].tolist() == [[1], [1]]


@pytest.mark.parametrize("how", ["kill", "exception", "exit"])
def test_a_call_that_ends_its_worker(how, tmp_path):
    """A call has no row to return, so it raises; the slots are truncated in the next step."""
    env_fn = functools.partial(
        Crashing, mode=how, at="call", once=tmp_path / "happened", length=None
    )
    with opened([Counter, env_fn], num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        expected = errors.EnvFailed if how == "exception" else errors.WorkerDied
        with at_most(2.0), pytest.raises(expected, match=r"slot 1|worker 1"):
            envs.call("probe", slots=[1])
        envs.send(zeros(2))
        batch = envs.recv()
        if how == "exception":
            assert batch.obs.tolist() == [[2], [2]]
            assert batch.incidents == ()
        else:
            assert batch.truncated.tolist() == [False, True]
            assert len(batch.incidents) == 1
            assert envs.call("probe", slots=[1]) == (0,)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_restart_is_advised_where_it_is_not_the_rule(on_failure):
    env_fn = functools.partial(Crashing, mode="kill", at="call")
    with opened([env_fn], on_failure=on_failure) as envs:
        envs.reset(seed=0)
        with pytest.raises(errors.WorkerDied, match="Run those with backend='serial'") as caught:
            envs.call("probe")
    assert ("on_failure='restart'" in str(caught.value)) == (on_failure == "raise")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_restart_is_not_advised_for_what_never_came_up():
    """In every mode a death in the constructor at the start is an error."""
    env_fn = functools.partial(Crashing, mode="kill", at="constructor")
    with pytest.raises(errors.WorkerDied) as caught:
        Fleet([env_fn])
    assert "on_failure" not in str(caught.value)


class LeavesAfterReset(Resident):
    """Answers its first reset and dies a moment later; a file has its process id."""

    def __init__(self, once):
        super().__init__()
        self.once = once

    def reset(self, *, seed=None, options=None):
        if is_first(self.once):
            self.leave_later(0.5, 3)
            self.once.with_name("written").write_text(str(os.getpid()))
            self.once.with_name("written").rename(self.once.with_name("pid"))
        return super().reset(seed=seed, options=options)


class OutlivesIt(Resident):
    """Answers no reset before the process named in the file has ended."""

    def __init__(self, named):
        super().__init__()
        self.named = named

    def reset(self, *, seed=None, options=None):
        wait_for(self.named)
        assert not left_after([int(self.named.read_text())], PATIENCE_S)
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("mode", MODES)
def test_death_after_a_reset_was_answered_and_before_it_was_received(mode, tmp_path):
    """The reset waits for another worker meanwhile, so the next row is lost."""
    env_fns = [
        functools.partial(LeavesAfterReset, tmp_path / "x"),
        functools.partial(OutlivesIt, tmp_path / "pid"),
    ]
    with opened(env_fns, num_workers=2, autoreset=mode, on_failure="restart") as envs:
        obs, infos = envs.reset(seed=0)
        assert obs.tolist() == [[0], [0]]
        assert "incident" not in infos
        envs.send(zeros(2))
        batch = envs.recv()
        assert batch.truncated.tolist() == [True, False]
        assert batch.infos["_incident"].tolist() == [True, False]


class SlowOnOne(Resident):
    """Action 1 is slow."""

    def step(self, action):
        if action == 1:
            time.sleep(0.5)
        return super().step(action)


def test_death_while_a_dropped_step_is_waited_for():
    """Its answer was not wanted, but the restart of its slots is still reported."""
    with opened([SlowOnOne] * 4, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(zeros(4))
        envs.send(np.array([0, 0, 1, 1]))
        wait_for_answers(envs.fleet, 0)
        kill_and_wait(worker_pids(envs)[0])
        envs.fleet.drop()
        batch = envs.fleet.step(zeros(4))
        assert batch.truncated.tolist() == [True, True, False, False]
        assert batch.infos["_incident"].tolist() == [True, True, False, False]
        assert [incident.kind for incident in batch.incidents] == ["death"]


def worker_pids(envs):
    """Process ids by worker, from the engine: not every environment reports its own."""
    return [handle.process.pid for handle in envs.fleet._workers.handles]


# ---- plans and seeds ----------------------------------------------------------------------------


class Tasks(TaskCounter):
    pid = property(lambda self: os.getpid())


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("num_plans", [1, 3, 40])
def test_queued_plans_survive_a_restart(num_plans, mode):
    """Each is used once, in order, for any number of them."""
    env_fn = functools.partial(Tasks, length=1)
    with opened(env_fn, 2, num_workers=1, autoreset=mode, on_failure="restart") as envs:
        envs.reset(seed=0)
        for number in range(num_plans):
            envs.queue_reset(options={"task": 100 + number}, slots=[1])
        kill_and_wait(envs.get_attr("pid")[0])
        seen = []
        for _ in range(2 * num_plans + 8):
            envs.step(zeros(2))
            seen.append((envs.get_attr("task"), envs.get_attr("episodes")))
        tasks = [task for (_, task), _ in seen]
        order = [task for index, task in enumerate(tasks) if task and task not in tasks[:index]]
        assert order == [100 + number for number in range(num_plans)]
        assert {task for (task, _), _ in seen} == {0}


def test_a_plan_used_before_the_restart_is_not_used_again():
    env_fn = functools.partial(Tasks, length=1)
    with opened(env_fn, 1, autoreset="next_step", on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.queue_reset(options={"task": 7})
        envs.step(zeros(1))
        obs, *_ = envs.step(zeros(1))
        assert obs[0, 1] == 7
        kill_and_wait(envs.get_attr("pid")[0])
        begun_with = []
        for _ in range(6):
            *_, infos = envs.step(zeros(1))
            begun_with += list(infos.get("options", []))
        # the lost episode begins again as it began, and those after it begin plainly
        assert begun_with == ["{'task': 7}", "{}", "{}"]


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_by_hand_after_a_restart_begins_the_stream_of_its_seed(mode, tmp_path):
    def run(env_fn):
        with opened([env_fn], autoreset=mode, on_failure="restart") as envs:
            envs.reset(seed=1)
            envs.step(actions(1)[0])
            return drive(envs, actions(1), SEED)

    calm = run(Troubled)
    for trouble in ("kill", "exception"):
        env_fn = functools.partial(Troubled, trouble, 1, tmp_path / trouble)
        assert same_rows(run(env_fn)[0], calm[0])


@pytest.mark.parametrize("how", ["kill", "exception"])
def test_a_failure_in_reset_leaves_no_trace_in_the_stream(how, tmp_path):
    """The reset is repeated with its own seed, so the stream is unchanged."""

    class Late(Troubled):
        def reset(self, *, seed=None, options=None):
            if not (tmp_path / how).exists():
                (tmp_path / how).touch()
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("not yet")
            return super().reset(seed=seed, options=options)

    with opened([Troubled, Late, Troubled], num_workers=1, on_failure="restart") as envs:
        found = drive(envs, actions(3), SEED)
        assert len(envs.incidents) == 1
    with opened([Troubled] * 3, num_workers=1) as envs:
        expected = drive(envs, actions(3), SEED)
    for slot in range(3):
        assert same_rows(found[slot], expected[slot])


def test_neighbours_of_a_failed_reset_keep_their_own_seeds(tmp_path):
    """This shows when one of them fails later."""
    env_fns = [
        Resident,
        functools.partial(Crashing, at="reset", once=tmp_path / "1"),
        functools.partial(Crashing, at="step", nth=2, once=tmp_path / "2"),
        functools.partial(Crashing, at="step", nth=3, once=tmp_path / "3"),
    ]
    with opened(env_fns, num_workers=1, on_failure="restart") as envs:
        envs.reset(seed=[10, 20, 30, 40])
        for _ in range(4):
            envs.step(zeros(4))
        assert [(one.slot, one.seed) for one in envs.incidents] == [(1, 20), (2, 30), (3, 40)]


# ---- observations that do not fit into rows -----------------------------------------------------


class Letters(gymnasium.Env):
    """Alternates short and long texts; the long ones do not fit into shared memory."""

    def __init__(self, first_is_long):
        self.observation_space = spaces.Text(200_000, charset="ab")
        self.action_space = spaces.Discrete(2)
        self.first_is_long = first_is_long
        self.t = 0

    pid = property(lambda self: os.getpid())

    def text(self, t):
        return ("b" if t % 2 else "a") * (100_000 + t if t % 2 == self.first_is_long else t + 1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.text(0), {}

    def step(self, action):
        self.t += 1
        return self.text(self.t), float(self.t), False, False, {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("killed_at", [1, 2])
@pytest.mark.parametrize("first_is_long", [True, False])
def test_texts_of_any_length_come_through_a_restart(first_is_long, killed_at, mode, tmp_path):
    """Slot 0 has answered when slot 1 kills both, so its long text is lost."""

    class Deadly(Letters):
        def step(self, action):
            if self.t + 1 == killed_at and not (tmp_path / "happened").exists():
                (tmp_path / "happened").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

    env_fns = [functools.partial(Letters, first_is_long), functools.partial(Deadly, first_is_long)]
    env_fns.append(env_fns[0])
    text = Letters(first_is_long).text
    with opened(env_fns, num_workers=2, autoreset=mode, on_failure="restart") as envs:
        assert envs.reset(seed=0)[0] == (text(0),) * 3
        for t in range(1, killed_at):
            assert envs.step(zeros(3))[0] == (text(t),) * 3
        envs.send(zeros(3))
        batch = envs.recv()
        assert batch.truncated.tolist() == [True, True, False]
        assert batch.obs[2] == text(killed_at)
        lasts = {text(killed_at - 1), text(killed_at)}
        assert batch.final_obs[0] in lasts
        assert batch.final_obs[1] == text(killed_at - 1)
        if mode == "same_step":
            assert batch.obs[:2] == (text(0),) * 2
        if mode == "disabled":
            obs, _ = envs.reset(options={"reset_mask": np.array([True, True, False])})
            assert obs == (text(0), text(0), text(killed_at))
        for t in range(1, 5):
            obs = envs.step(zeros(3))[0]
            expected = t - 1 if mode == "next_step" else t
            assert obs == (text(expected), text(expected), text(killed_at + t))


GRAPH = spaces.Graph(spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(3), seed=0)


class Graphs(AnySpace):
    """Samples graphs, and ends its process or raises at its third step."""

    def __init__(self, how=None, once=None):
        super().__init__(GRAPH, max_length=50)
        self.how, self.once, self.steps = how, once, 0

    def step(self, action):
        self.steps += 1
        if self.how and self.steps == 3 and not self.once.exists():
            self.once.touch()
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("no third step")
        return super().step(action)


def same_graph(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["kill", "exception"])
def test_graphs_come_through_a_restart(how, mode, tmp_path):
    def run(env_fn):
        seen = []
        with opened(
            [Graphs, env_fn, Graphs], num_workers=2, autoreset=mode, on_failure="restart"
        ) as envs:
            obs, _ = envs.reset(seed=5)
            seen.append((obs, obs, None))
            for _ in range(6):
                envs.send(zeros(3))
                batch = envs.recv()
                seen.append((batch.obs, batch.final_obs, batch.truncated))
                if mode == "disabled" and (batch.truncated | batch.terminated).any():
                    ended = batch.truncated | batch.terminated
                    envs.reset(options={"reset_mask": ended})
        return seen

    found, expected = run(functools.partial(Graphs, how, tmp_path / "x")), run(Graphs)
    for (obs, final_obs, _), (calm_obs, _, _) in zip(found[:3], expected[:3], strict=True):
        assert all(same_graph(a, b) for a, b in zip(obs, calm_obs, strict=True))
        assert all(GRAPH.contains(one) for one in final_obs)
    obs, final_obs, truncated = found[3]
    assert truncated[1]
    assert same_graph(final_obs[1], expected[2][0][1]), "its last observation was another"
    assert all(GRAPH.contains(one) for one in (*obs, *final_obs))
    for (obs, *_), (calm_obs, *_) in zip(found, expected, strict=True):
        assert same_graph(obs[2], calm_obs[2])
        assert all(GRAPH.contains(one) for one in obs)


# ---- natively vectorised environments -----------------------------------------------------------


class DeadlyVector(VectorCounter):
    """A vector of counters that fails as a whole at its third step."""

    def __init__(self, num_envs, how, once, mode):
        super().__init__((5,) * num_envs, gymnasium.vector.AutoresetMode[mode.upper()])
        self.how, self.once, self.steps = how, once, 0

    def step(self, actions):
        self.steps += 1
        if self.steps == 3 and is_first(self.once):
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("no third step")
        return super().step(actions)


def is_first(file):
    """True for exactly one process."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("how", ["kill", "exception"])
def test_a_native_environment_comes_back_as_a_whole(how, mode, tmp_path):
    def build(num_envs):
        return DeadlyVector(num_envs, how, tmp_path / "happened", mode)

    native = envfleet.native(build)
    with opened(native, 4, num_workers=2, autoreset=mode, on_failure="restart") as e:
        e.reset(seed=0)
        for t in (1, 2):
            assert e.step(zeros(4))[0][:, 0].tolist() == [t] * 4
        e.send(zeros(4))
        batch = e.recv()
        (incident,) = batch.incidents
        lost = list(incident.slots)
        assert lost in ([0, 1], [2, 3])
        others = [slot for slot in range(4) if slot not in lost]
        assert batch.truncated[lost].all()
        assert not batch.valid[lost].any()
        assert batch.obs[others, 0].tolist() == [3, 3]
        assert batch.valid[others].all()
        following = e.step(zeros(4))[0][:, 0]
        assert following[others].tolist() == [4, 4]
        assert set(following[lost].tolist()) <= {0, 1}


class Failing(VectorCounter):
    """Raises after the given number of steps."""

    def __init__(self, num_envs, steps):
        super().__init__((5,) * num_envs)
        self.left = steps

    def step(self, actions):
        if not self.left:
            raise RuntimeError("no more")
        self.left -= 1
        return super().step(actions)


def test_a_native_environment_that_raises_leaves_the_others_alone():
    fails = envfleet.native(functools.partial(Failing, steps=1))
    lasts = envfleet.native(functools.partial(Failing, steps=99))
    fleet = Fleet([fails, fails, lasts, lasts], num_workers=2, on_failure="raise")
    fleet.reset([ResetPlan(0)] * 4)
    fleet.send(zeros(4))
    fleet.recv()
    fleet.send(zeros(4))
    with pytest.raises(errors.EnvFailed, match="no more"):
        fleet.recv()
    with suppress(errors.NothingSent):
        assert fleet.recv().slots.tolist() == [2, 3]
    with pytest.raises(errors.NothingSent):
        fleet.recv()
    fleet.send(zeros(2), [2, 3])
    assert fleet.recv().slots.tolist() == [2, 3]
    fleet.close()


class Picky(VectorCounter):
    """Raises at an action of 1."""

    def __init__(self, num_envs):
        super().__init__((99,) * num_envs)

    def step(self, actions):
        if np.any(actions == 1):
            raise RuntimeError("no such action")
        return super().step(actions)


@pytest.mark.parametrize("backend", ["serial", "thread", "process"])
@pytest.mark.parametrize("on_failure", ["raise", "fallback"])
def test_a_native_environment_that_raised_goes_on_after_a_reset(on_failure, backend):
    native = envfleet.native(Picky)
    with opened(native, 4, num_workers=2, backend=backend, on_failure=on_failure) as envs:
        envs.reset(seed=0)
        envs.step(zeros(4))
        with pytest.raises(errors.EnvFailed, match=r"slots 2 to 3 raised during step.*reset"):
            envs.step(np.array([0, 0, 0, 1]))
        with pytest.raises(errors.ResetNeeded, match=r"\[2, 3\]"):
            envs.step(zeros(4))
        obs, _ = envs.reset(options={"reset_mask": np.array([False, False, True, True])})
        assert obs[:, 0].tolist() == [2, 2, 0, 0]
        assert envs.step(zeros(4))[0][:, 0].tolist() == [3, 3, 1, 1]
        assert len(envs.incidents) == 1


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_part_of_a_native_environment_is_refused_and_nothing_is_lost(backend):
    """Two vectors of two in each worker: a whole one may be sent alone."""
    with opened([functools.partial(Picky, 2)] * 8, num_workers=2, backend=backend) as envs:
        envs.reset(seed=0)
        mask = np.zeros(8, np.bool_)
        mask[5] = True
        size = np.arange(3.0)
        for use in (
            lambda: envs.reset(options={"reset_mask": mask}),
            lambda: envs.send(zeros(1), [5]),
            lambda: envs.send(zeros(3), [0, 1, 4]),
            lambda: envs.set_attr("lengths", 3, [4]),
            lambda: envs.reset(options=[{"size": size}] + [{"size": size + 1}] * 7),
            lambda: envs.queue_reset(seed=3),
        ):
            with pytest.raises(errors.ConfigError, match="natively vectorised"):
                use()
        with pytest.raises(errors.SnapshotError, match="natively vectorised"):
            envs.snapshot()
        assert envs.step(zeros(8))[0][:, 0].tolist() == [1] * 8
        envs.send(zeros(2), [4, 5])
        assert envs.recv().obs[:, 0].tolist() == [2, 2]
        mask[4] = True
        obs, _ = envs.reset(options={"reset_mask": mask})
        assert obs[:, 0].tolist() == [1, 1, 1, 1, 0, 0, 1, 1]
        envs.reset(options=[{"size": size + slot // 2} for slot in range(8)])
        assert not envs.incidents


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_native_environment_is_quarantined_as_a_whole(backend):
    env_fns = [functools.partial(Picky, 2)] * 2 + [functools.partial(VectorCounter, (99, 99))] * 2
    fleet = Fleet(
        env_fns, backend=backend, on_failure="restart", restarts=RestartPolicy(max_restarts=0)
    )
    fleet.reset(plans(0, 1, 2, 3))
    fleet.send(np.array([0, 1, 0, 0]))
    with pytest.raises(errors.SlotQuarantined, match="slot 0"):
        fleet.recv()
    batch = fleet.recv()
    assert batch.slots.tolist() == [2, 3]
    assert batch.truncated.all()
    assert fleet.quarantined.keys() == {0, 1}
    fleet.reset(plans(2, 3), [2, 3])
    fleet.send(zeros(2), [2, 3])
    assert fleet.recv().obs.tolist() == [[1], [1]]
    fleet.close()


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_what_was_asked_behind_a_native_failure_is_not_taken_for_its_answer(on_failure):
    native = envfleet.native(functools.partial(Failing, steps=1))
    with opened(native, 2, num_workers=1, on_failure=on_failure) as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        envs.send(zeros(2))
        time.sleep(0.2)  # the failure is told of, and not yet heard
        with pytest.raises(errors.EnvfleetError):
            envs.call("num_envs")
        if on_failure == "restart":
            batch = envs.recv()
            assert batch.truncated.all()
            assert not batch.valid.any()


# ---- while a successor comes up -----------------------------------------------------------------


class GatedWhenBuiltAgain(Counter):
    """In every process but the first of its slot, building waits for the gate."""

    def __init__(self, folder, slot, gate):
        if not is_first(folder / str(slot)):
            wait_for(gate)
        super().__init__()


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "gate"


@pytest.fixture
def half_lost(tmp_path, gate):
    """Two workers with one slot each; the one of slot 0 was killed in a step that is awaited.

    Its successor starts only after the gate is open.
    """
    env_fns = [functools.partial(GatedWhenBuiltAgain, tmp_path, slot, gate) for slot in range(2)]
    with opened(env_fns, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        kill_and_wait(envs.fleet.worker_pids()[0])
        envs.send(zeros(2))
        while not envs.incidents:
            assert envs.recv(min_slots=1).slots.tolist() == [1]
            envs.send(zeros(1), [1])
        yield envs


def test_no_slot_waits_for_another_worker_s_successor(half_lost, gate):
    for _ in range(20):
        batch = half_lost.recv(min_slots=1)
        assert batch.slots.tolist() == [1]
        half_lost.send(zeros(1), [1])
    with opened_meanwhile(gate):
        late = half_lost.recv()
    assert late.slots.tolist() == [0, 1]
    assert late.truncated.tolist() == [True, False]
    assert [incident.slot for incident in late.incidents] == [0]


def test_what_is_asked_of_a_successor_waits_until_it_is_there(half_lost, gate):
    other = half_lost.recv(min_slots=1)
    assert other.slots.tolist() == [1]
    # after as many steps as the death took to be noticed, perhaps at the start of an episode
    with opened_meanwhile(gate):
        assert half_lost.get_attr("t") == (0, other.obs[0, 0])
    batch = half_lost.recv()
    assert batch.slots.tolist() == [0]
    assert batch.truncated.all()


def test_a_reset_meanwhile_drops_what_the_lost_worker_owed(half_lost, gate):
    with opened_meanwhile(gate):
        obs, _ = half_lost.reset(seed=5)
    assert obs[:, 0].tolist() == [0, 0]
    obs, _, _, truncated, _ = half_lost.step(zeros(2))
    assert obs[:, 0].tolist() == [1, 1]
    assert not truncated.any()


def test_what_is_dropped_meanwhile_is_never_received(half_lost, gate):
    with opened_meanwhile(gate):
        half_lost.fleet.drop([0])
        assert half_lost.recv().slots.tolist() == [1]
    half_lost.send(zeros(2))
    batch = half_lost.recv()
    assert batch.slots.tolist() == [0, 1]


class DiesAsASuccessor(Counter):
    """Ends its process when it is built for the second time."""

    def __init__(self, folder):
        if not is_first(folder / "first") and is_first(folder / "second"):
            os._exit(3)
        super().__init__()


def test_one_successor_dies_while_another_comes_up(tmp_path):
    fns = [functools.partial(DiesAsASuccessor, tmp_path), Counter]
    with opened(fns, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        for pid in envs.fleet.worker_pids():
            kill_and_wait(pid)
        envs.send(zeros(2))
        envs.recv(min_slots=2, timeout_s=0.02)
        time.sleep(0.5)  # both are told of at the same time
        batch = envs.recv()
        assert batch.slots.tolist() == [0, 1]
        assert batch.truncated.all()
        assert len(envs.incidents) == 3
        assert "exit code 3" in envs.incidents[-1].reason


@pytest.mark.parametrize("trouble", [OSError, KeyboardInterrupt])
def test_a_successor_that_cannot_be_launched_leaves_clear_words(trouble, monkeypatch):
    def refuse(*_):
        raise trouble("no process to be had")

    with opened([Counter] * 2, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        kill_and_wait(envs.fleet.worker_pids()[0])
        envs.send(zeros(2))
        with monkeypatch.context() as patched:
            patched.setattr(ProcessBackend, "launch", refuse)
            with pytest.raises(trouble):
                envs.recv(min_slots=2)
        with pytest.raises(errors.WorkerDied, match=r"slots \[0\]"):
            envs.send(zeros(1), [0])
        assert envs.recv().slots.tolist() == [1]
        envs.send(zeros(1), [1])
        assert envs.recv().slots.tolist() == [1]


def test_a_restored_slot_goes_on_as_its_snapshot_did_after_a_restart_too():
    def stream(envs):
        return [envs.step(np.zeros((1, 2), np.float32))[0].tolist() for _ in range(12)]

    with opened(functools.partial(NoisyStream, max_length=3), 1, on_failure="restart") as envs:
        envs.reset(seed=0)
        taken = envs.snapshot()
        expected = stream(envs)
        kill_and_wait(envs.fleet.worker_pids()[0])
        with pytest.raises(errors.WorkerDied):
            envs.restore(taken)
        envs.restore(taken)
        assert stream(envs) == expected


def test_a_fleet_can_be_closed_while_a_successor_comes_up(half_lost):
    half_lost.recv(min_slots=1)
    with at_most(1.0):
        half_lost.close()


def test_a_successor_that_dies_while_it_comes_up_is_one_more_failure(half_lost, gate):
    half_lost.recv(min_slots=1)
    kill_and_wait(half_lost.fleet.worker_pids()[0])
    with opened_meanwhile(gate):
        batch = half_lost.recv()
    assert batch.slots.tolist() == [0]
    assert batch.truncated.all()
    assert len(half_lost.incidents) == 2


WORDS = functools.partial(AnySpace, spaces.Text(40), max_length=10**9)


@pytest.mark.parametrize("env_fn", [Resident, WORDS])
def test_junk_for_views_is_not_what_a_lost_slot_shows(monkeypatch, env_fn):
    """Its truncated row has the last observation, although rows in flight hold junk."""
    monkeypatch.setenv("ENVFLEET_DEBUG", "1")
    with opened([env_fn] * 4, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        actions = envs.action_space.sample()
        for _ in range(3):
            before, *_ = envs.step(actions)
            pid = envs.fleet.worker_pids()[0]
            os.kill(pid, signal.SIGSTOP)  # it will not answer before it ends
            envs.send(actions)
            kill_and_wait(pid)
            batch = envs.recv()
            assert batch.truncated.tolist() == [True, True, False, False]
            assert list(map(repr, batch.obs[:2])) == list(map(repr, before[:2]))
            envs.step(actions)


def test_junk_for_views_leaves_what_is_answered(monkeypatch):
    """A slot that answered before its worker was lost returns that answer."""
    monkeypatch.setenv("ENVFLEET_DEBUG", "1")
    env_fns = [Resident, functools.partial(Crashing, mode="exit", nth=2, length=None)]
    with opened(env_fns, num_workers=1, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        envs.send(zeros(1), [0])
        envs.send(zeros(1), [1])
        assert envs.recv(slots=[1]).truncated.all()
        assert envs.recv(slots=[0]).obs[0, 0] == 2


# ---- slots that live here -----------------------------------------------------------------------


@pytest.mark.parametrize("when", ["idle", "under way"])
def test_a_lost_worker_beside_slots_that_live_here(when):
    """It comes back; slots in this process are not affected."""
    with opened([Resident] * 6, num_workers=3, num_here=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        assert envs.get_attr("pid")[4:] == (os.getpid(),) * 2
        for lost in (0, 1, 0):
            envs.step(zeros(6))
            pids = envs.fleet.worker_pids()
            if when == "under way":
                os.kill(pids[lost], signal.SIGSTOP)  # it will not answer before it ends
                envs.send(zeros(6))
            kill_and_wait(pids[lost])
            batch = envs.recv() if when == "under way" else envs.fleet.step(zeros(6))
            assert batch.truncated.tolist() == [slot // 2 == lost for slot in range(6)]
            assert envs.fleet.worker_pids()[2] is None
        counted = envs.step(zeros(6))[0][:, 0]
        assert counted[4:].tolist() == [7, 7]


def test_what_lives_here_is_rebuilt_here():
    env_fns = [Resident, functools.partial(Crashing, nth=2, length=None)]
    with opened(env_fns, num_workers=2, num_here=1, on_failure="restart") as envs:
        envs.reset(seed=0)
        *_, truncated, _ = envs.step(zeros(2))
        assert not truncated.any()
        *_, truncated, _ = envs.step(zeros(2))
        assert truncated.tolist() == [False, True]
        assert envs.fleet.worker_pids()[1] is None
        assert envs.incidents[0].slot == 1


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_successor_that_is_gone_before_it_is_watched_is_one_more_loss(method, monkeypatch):
    """A fork server reaps its children at once, so there may be no process left to watch."""
    watch_end = launch.watch_end
    gone: list[int] = []

    def watch_late(process, start_method):
        if not gone:
            gone.append(process.pid)
            kill_and_wait(process.pid)
            while method == "forkserver" and psutil.pid_exists(process.pid):
                time.sleep(0.001)
        return watch_end(process, start_method)

    with opened([Resident] * 2, num_workers=2, start_method=method, on_failure="restart") as envs:
        envs.reset(seed=0)
        monkeypatch.setattr(handle, "watch_end", watch_late)
        os.kill(envs.fleet.worker_pids()[0], signal.SIGKILL)
        envs.step(zeros(2))
        envs.step(zeros(2))
        assert len(gone) == 1
        assert [incident.exitcode for incident in envs.incidents] == [-9, -9]


# ---- fallback -----------------------------------------------------------------------------------


def test_fallback_goes_on_in_this_process(tmp_path):
    """With a warning; the lost worker's slots come back truncated, the others do not notice."""
    env_fns: list[Any] = [Troubled] * 6
    env_fns[2] = functools.partial(Troubled, "kill", AT_STEP, tmp_path / "happened")
    with opened(env_fns, num_workers=3, on_failure="fallback") as envs:
        with pytest.warns(RuntimeWarning, match="slots 2 to 3 go on in this process") as caught:
            found = drive(envs, actions(6), SEED)
        assert len(caught) == 1
        pids = envs.get_attr("pid")
        assert pids[2] == pids[3] == os.getpid()
        assert os.getpid() not in (pids[0], pids[1], pids[4], pids[5])
        assert len(envs.incidents) == 1
    expected = undisturbed("next_step")
    for slot in (0, 1, 4, 5):
        assert same_rows(found[slot], expected[slot])
    for slot in (2, 3):
        row = found[slot][place_of_incident(found[slot])]
        assert (row["truncated"], row["valid"]) == (True, False)


def test_fallback_of_one_worker_after_another():
    with opened([Resident] * 3, num_workers=3, on_failure="fallback") as envs:
        envs.reset(seed=0)
        pids = envs.get_attr("pid")
        for lost in range(3):
            kill_and_wait(pids[lost])
            with pytest.warns(RuntimeWarning, match=f"^slot {lost} goes on in this process"):
                *_, truncated, _ = envs.step(zeros(3))
            assert truncated.tolist() == [slot == lost for slot in range(3)]
        assert envs.get_attr("pid") == (os.getpid(),) * 3
        envs.step(zeros(3))
        before, *_ = envs.step(zeros(3))
        after, *_ = envs.step(zeros(3))
        assert (after == before + 1).all()


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_who_misses_a_deadline_does_not_fall_back(backend):
    """In this process its next hang would stop the whole program."""
    env_fn = functools.partial(Hanging, for_s=2.0, length=None)
    options: dict[str, Any] = {"step_timeout_s": 0.4, "on_failure": "fallback"}
    with opened([Resident, env_fn], num_workers=2, backend=backend, **options) as envs:
        envs.reset(seed=0)
        with at_most(0.4 + GRACE_S), pytest.raises(errors.DeadlineExceeded, match="slot 1"):
            envs.step(zeros(2))
        with pytest.raises(errors.DeadlineExceeded, match="slot 1"):
            envs.step(zeros(2))
        envs.send(zeros(1), [0])
        assert envs.recv().slots.tolist() == [0]
        assert [incident.kind for incident in envs.incidents] == ["timeout"]


def test_fallback_closes_what_it_built_here(tmp_path):
    env_fn = functools.partial(Resident, tmp_path / "closed")
    with opened([env_fn], on_failure="fallback") as envs:
        envs.reset(seed=0)
        kill_and_wait(envs.get_attr("pid")[0])
        with pytest.warns(RuntimeWarning, match="slot 0 goes on in this process"):
            envs.step(zeros(1))
        assert not (tmp_path / "closed").exists()
    assert (tmp_path / "closed").exists()


def test_fallback_raises_what_an_environment_raises():
    """Its worker is not lost, so there is nothing to fall back from."""
    with opened([Crashing], on_failure="fallback") as envs:
        envs.reset(seed=0)
        with pytest.raises(errors.EnvFailed):
            envs.step(zeros(1))
        envs.reset(seed=0)


def test_fallback_that_cannot_build_here_raises():
    """It ran in a worker; it cannot be built in this process."""

    class NotHere(Resident):
        parent = os.getpid()

        def __init__(self):
            if os.getpid() == self.parent:
                raise RuntimeError("not in this process")
            super().__init__()

    with opened([Resident, NotHere], num_workers=2, on_failure="fallback") as envs:
        envs.reset(seed=0)
        kill_and_wait(envs.get_attr("pid")[1])
        envs.send(zeros(2))
        with pytest.raises(errors.EnvConstructionFailed, match="not in this process") as caught:
            envs.recv()
        assert "backend='serial'" not in str(caught.value), "it would be built here again"
        assert envs.recv().slots.tolist() == [0]


# ---- raise --------------------------------------------------------------------------------------


def test_errors_of_one_step_are_not_raised_by_a_later_one():
    """Two fail together: one error is enough, and after a reset it is over."""
    with opened([functools.partial(Crashing, nth=2)] * 3, num_workers=3) as envs:
        for _ in range(2):
            envs.reset(seed=0)
        envs.step(zeros(3))
        with pytest.raises(errors.EnvFailed):
            envs.step(zeros(3))
        _, infos = envs.reset(seed=0)
        assert infos == {}
        for t in (1, 2, 3):
            assert envs.step(zeros(3))[0][:, 0].tolist() == [t] * 3
        assert len(envs.incidents) == 3


@pytest.mark.parametrize("backend", ["process", "thread", "serial"])
def test_after_a_failed_step_the_others_go_on_from_where_they_are(backend):
    """`step` returns a whole batch or none; the slots themselves have stepped."""
    env_fns = [Resident, functools.partial(Crashing, nth=2, length=None), Resident]
    with opened(env_fns, num_workers=2, backend=backend) as envs:
        envs.reset(seed=0)
        envs.step(zeros(3))
        with pytest.raises(errors.EnvFailed):
            envs.step(zeros(3))
        with pytest.raises(errors.ResetNeeded, match=r"\[1\]"):
            envs.step(zeros(3))
        obs, _ = envs.reset(options={"reset_mask": np.array([False, True, False])})
        assert obs[:, 0].tolist() == [2, 0, 2]
        assert envs.step(zeros(3))[0][:, 0].tolist() == [3, 1, 3]


def step_alone(envs, slot):
    envs.send(zeros(1), [slot])
    return envs.recv()


def test_every_lost_worker_is_named_in_its_turn():
    """Both were killed; each slot gives the error of its own worker."""
    with opened([Resident] * 3, num_workers=3) as envs:
        envs.reset(seed=0)
        pids = envs.get_attr("pid")
        kill_and_wait(pids[0])
        kill_and_wait(pids[2])
        with pytest.raises(errors.WorkerDied):
            envs.step(zeros(3))
        for slot in (0, 2):
            with pytest.raises(errors.WorkerDied) as caught:
                step_alone(envs, slot)
            assert caught.value.worker == slot
        assert not left_after(pids[:1] + pids[2:], 1.0)


def test_a_restart_inside_reset_does_not_disturb_what_others_have_in_flight(tmp_path):
    """Slot 1 is reset by its plan while slot 0 is in flight."""
    env_fns: list[Any] = [
        functools.partial(Slow, step_s=0.3, length=None),
        functools.partial(Crashing, at="reset", nth=2, mode="kill", once=tmp_path / "x"),
    ]
    fleet = Fleet(env_fns, num_workers=2, on_failure="restart", deadlines=Deadlines(step_s=5.0))
    fleet.reset(plans(0, 1))
    fleet.send(zeros(1), [0])
    batch = fleet.reset([ResetPlan(7)], [1])
    assert batch.slots.tolist() == [1]
    assert len(batch.incidents) == 1
    batch = fleet.recv()
    assert (batch.slots.tolist(), batch.obs.tolist()) == ([0], [[1]])
    fleet.close()


@pytest.mark.parametrize("on_failure", ["raise", "restart", "fallback"])
def test_named_slots_are_waited_for_through_a_death(on_failure):
    with opened([Counter] * 4, num_workers=2, on_failure=on_failure) as envs:
        envs.reset(seed=0)
        kill_and_wait(envs.fleet.worker_pids()[0])
        envs.send(zeros(2), [0, 1])
        envs.send(zeros(2), [2, 3])
        if on_failure == "fallback":
            with pytest.warns(RuntimeWarning, match="in this process"):
                batch = envs.recv(slots=[0, 1])
            assert batch.truncated.all()
        elif on_failure == "restart":
            assert envs.recv(slots=[0, 1]).truncated.all()
        else:
            with pytest.raises(errors.WorkerDied):
                envs.recv(slots=[0, 1])
            with pytest.raises(errors.WorkerDied):
                envs.recv(slots=[0, 1])
        assert envs.recv(slots=[2, 3]).slots.tolist() == [2, 3]


def test_a_slot_that_has_just_been_lost_begins_alike_after_every_restore():
    """Its snapshot is taken between the death and the reset of its successor."""

    def stream(envs):
        return [envs.step(np.zeros((1, 2), np.float32))[0].tolist() for _ in range(6)]

    with opened(functools.partial(NoisyStream, max_length=3), 1, on_failure="restart") as envs:
        envs.reset(seed=0)
        kill_and_wait(envs.fleet.worker_pids()[0])
        with pytest.raises(errors.WorkerDied):
            envs.snapshot()
        taken = envs.snapshot()
        expected = stream(envs)
        for _ in range(2):
            envs.restore(taken)
            assert stream(envs) == expected


# ---- the last observation of a lost episode, in same_step ----------------------------------------


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_lost_slot_does_not_show_the_end_of_the_episode_before(is_queued):
    """Its last row was an end, and its next episode began by a plan, or plainly."""
    with opened(Tasks, 1, autoreset="same_step", on_failure="restart") as envs:
        envs.reset(seed=5)
        for _ in range(3):  # once it has begun an episode by itself
            envs.step(zeros(1))
        if is_queued:
            envs.queue_reset(seed=[30])
        for _ in range(3):
            first, _, terminated, *_ = envs.step(zeros(1))
        assert terminated.all()
        kill_and_wait(envs.get_attr("pid")[0])
        envs.send(zeros(1))
        batch = envs.recv()
        assert batch.truncated.all()
        assert batch.final_obs.tolist() == first.tolist()


@pytest.mark.parametrize("has_ended_before", [True, False])
@pytest.mark.parametrize("is_queued", [True, False])
def test_a_slot_that_ends_as_its_neighbour_kills_shows_its_own_end(has_ended_before, is_queued):
    """It has been reset already, and its caller has heard of neither."""
    length = 1 if has_ended_before else 3
    env_fns = [functools.partial(Tasks, length), functools.partial(KillsAtOne, "kill")]
    with opened(env_fns, num_workers=1, autoreset="same_step", on_failure="restart") as envs:
        envs.reset(seed=5)
        for _ in range(5):  # all have begun an episode by themselves
            envs.step(zeros(2))
        if is_queued:
            envs.queue_reset(seed=[30], slots=[0])
        envs.send(np.array([0, 1]))
        batch = envs.recv()
        assert batch.truncated.tolist() == [True, True]
        assert batch.final_obs[0, 3] == length
        assert batch.obs[0, 3] == 0


# ---- plans queued as a worker dies ---------------------------------------------------------------


def seeds_used(envs, num_steps=12):
    """The seeds that each slot's episodes begin with from here on; those of restarts left out."""
    used: dict[int, list[int]] = {slot: [] for slot in range(envs.num_envs)}
    for _ in range(num_steps):
        *_, infos = envs.step(zeros(envs.num_envs))
        for slot in used:
            if "seed" in infos and infos["_seed"][slot] and infos["seed"][slot] in range(30, 40):
                used[slot].append(int(infos["seed"][slot]))
    return used


@pytest.mark.parametrize("on_failure", ["restart", "resume", "fallback"])
def test_a_plan_queued_as_a_worker_dies_is_queued_once(on_failure):
    options = {"num_workers": 2, "on_failure": on_failure}
    with opened(functools.partial(Tasks, 1), 2, **options) as envs, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        envs.reset(seed=5)
        kill_and_wait(envs.get_attr("pid")[1])
        envs.queue_reset(seed=[30, 31])
        assert seeds_used(envs) == {0: [30], 1: [31]}
        assert len(envs.incidents) == 1


def test_a_plan_that_cannot_be_queued_for_all_is_queued_for_none():
    with opened(functools.partial(Tasks, 1), 2, num_workers=2) as envs:
        envs.reset(seed=5)
        kill_and_wait(envs.get_attr("pid")[1])
        for _ in range(2):
            with pytest.raises(errors.WorkerDied):
                envs.queue_reset(seed=[30, 31])
        used = []
        for _ in range(6):
            envs.send(zeros(1), [0])
            infos = envs.recv().infos
            used += infos.get("seed", np.zeros(0)).tolist()
        assert used == [-1, -1, -1]
        envs.queue_reset(seed=[33], slots=[0])
        envs.send(zeros(1), [0])
        envs.recv()
        envs.send(zeros(1), [0])
        assert envs.recv().infos["seed"].tolist() == [33]

"""on_failure="resume": a lost slot is replayed, and its caller gets the rows it would have got."""

import functools
import os
import random
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import envfleet
from envfleet import errors
from envfleet.engine import Deadlines, Fleet, ResetPlan, RestartPolicy, episodes
from envfleet.testing import Counter, Crashing, Hanging, VectorCounter
from tests.faults.stage import GRACE_S, MODES, Resident, kill_and_wait, opened, zeros
from tests.gates import at_most
from tests.pipe_backend import PipeBackend

NUM_SLOTS = 6
OFTEN = RestartPolicy(max_restarts=1_000_000)


class Wanderer(gymnasium.Env[Any, Any]):
    """Random walks of random length, in every form that a row can have.

    Args:
        once: a folder; what happens to this environment once leaves a file there.
        raises_at, hangs_at: the step of a life, counted from 1, at which it raises or hangs.
    """

    def __init__(
        self,
        once: Path | None = None,
        raises_at: int | None = None,
        hangs_at: int | None = None,
        hang_s: float = 3600.0,
        has_text: bool = False,
    ) -> None:
        place = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.observation_space = place
        if has_text:
            self.observation_space = spaces.Dict({"place": place, "word": spaces.Text(3000)})
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.once, self.raises_at, self.hangs_at = once, raises_at, hangs_at
        self.hang_s, self.has_text = hang_s, has_text
        self.steps = 0

    pid = property(lambda self: os.getpid())

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=3) + (options or {}).get("from", 0.0)
        self.t, self.length = 0, int(self.np_random.integers(1, 9))
        return self.observation(), {"began": self.length, "options": repr(options)}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps in (self.raises_at, self.hangs_at) and self.once is not None:
            mark = self.once / f"{self.steps}"
            if not mark.exists():
                mark.touch()
                if self.steps == self.hangs_at:
                    time.sleep(self.hang_s)
                raise RuntimeError("bad luck")
        self.t += 1
        self.place = self.place + self.np_random.normal(size=3) + action.sum()
        is_over = self.t >= self.length
        info = {"t": self.t} if self.t % 2 else {"t": self.t, "note": "even " * self.t}
        reward = float(self.place[0])
        return self.observation(), reward, is_over and self.t % 2 == 0, is_over, info

    def observation(self) -> Any:
        if not self.has_text:
            return self.place.copy()
        # now and then more than a cell holds
        word = "x" * int(self.np_random.integers(0, 3000))
        return {"place": self.place.copy(), "word": word}


class ByHand:
    """One environment, driven as Gymnasium defines the modes; what the fleet must answer."""

    def __init__(self, mode: str, has_text: bool = False) -> None:
        self.env, self.mode = Wanderer(has_text=has_text), mode
        self.plans: deque[ResetPlan] = deque()
        self.has_ended = False

    def reset(self, plan: ResetPlan) -> Any:
        obs, info = self.env.reset(seed=plan.seed, options=plan.options)
        self.has_ended = False
        return obs, 0.0, False, False, False, info, obs

    def step(self, action: Any) -> Any:
        if self.has_ended:
            return self._reset_by_itself()
        obs, reward, terminated, truncated, info = self.env.step(action)
        final = obs
        if terminated or truncated:
            self.has_ended = self.mode != "same_step"
            if self.mode == "same_step":
                obs, *_, began, _ = self._reset_by_itself()
                info = {**began, "final_obs": final, "final_info": info}
        return obs, reward, terminated, truncated, True, info, final

    def _reset_by_itself(self) -> Any:
        return self.reset(self.plans.popleft() if self.plans else ResetPlan())


def pid_of(fleet: Fleet, worker: int) -> int:
    pid = fleet.worker_pids()[worker]
    assert pid is not None
    return pid


def row_of(batch, position):
    is_dict = isinstance(batch.obs, dict)

    def pick(obs):
        return {key: obs[key][position] for key in obs} if is_dict else obs[position]

    return (
        pick(batch.obs),
        float(batch.rewards[position]),
        bool(batch.terminated[position]),
        bool(batch.truncated[position]),
        bool(batch.valid[position]),
        batch.each_info[position],
        pick(batch.final_obs),
    )


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return np.array_equal(one, other)


class Killer(threading.Thread):
    """Kills or stops one worker after another, at random."""

    def __init__(self, fleet, seed):
        super().__init__(daemon=True)
        self.fleet, self.dice = fleet, random.Random(seed)
        self.over = threading.Event()

    def run(self):
        while not self.over.wait(self.dice.uniform(0.001, 0.05)):
            how = signal.SIGKILL if self.dice.random() < 0.93 else signal.SIGSTOP
            # the worker that it picks may be gone, being replaced, or not yet there
            with suppress(ProcessLookupError, ValueError, AttributeError, IndexError):
                os.kill(self.dice.choice(self.fleet._workers.handles).process.pid, how)


class Driver:
    """Uses a fleet in every way at random, and compares each row with the one by hand."""

    def __init__(self, fleet, mode, seed, has_text=False):
        self.fleet, self.mode, self.dice = fleet, mode, random.Random(seed)
        self.generator = np.random.default_rng(seed)
        self.by_hand = [ByHand(mode, has_text) for _ in range(NUM_SLOTS)]
        self.expected: dict[int, Any] = {}
        """What the slots in flight must answer."""
        self.rows = 0

    def begin(self):
        batch = self.fleet.reset([ResetPlan(slot) for slot in range(NUM_SLOTS)])
        self.expected = {
            slot: self.by_hand[slot].reset(ResetPlan(slot)) for slot in range(NUM_SLOTS)
        }
        self.take(batch)

    def round(self):
        idle = [slot for slot in range(NUM_SLOTS) if slot not in self.expected]
        is_over = [slot for slot in idle if self.by_hand[slot].has_ended]
        resets = [slot for slot in idle if self.dice.random() < 0.06]
        if self.mode == "disabled":
            resets = sorted({*resets, *is_over})
        steps = [slot for slot in idle if slot not in resets and self.dice.random() < 0.8]
        self.dice.shuffle(steps)
        if self.mode != "disabled" and self.dice.random() < 0.15:
            slots = self.dice.sample(range(NUM_SLOTS), 2)
            plans = [self.plan() for _ in slots]
            self.queue(plans, slots)
        if resets:
            plans = [self.plan() for _ in resets]
            self.fleet.send_reset(plans, resets)
            for slot, plan in zip(resets, plans, strict=True):
                self.expected[slot] = self.by_hand[slot].reset(plan)
        if steps:
            if len(steps) == NUM_SLOTS:
                steps = list(range(NUM_SLOTS))
            actions = self.generator.uniform(-1, 1, (len(steps), 2)).astype(np.float32)
            self.fleet.send(actions, steps)
            for slot, action in zip(steps, actions, strict=True):
                self.expected[slot] = self.by_hand[slot].step(action)
        if self.dice.random() < 0.1:
            slot = self.dice.randrange(NUM_SLOTS)
            self.fleet.call("pid", slots=[slot])
        if self.expected and self.dice.random() < 0.05:
            slots = self.dice.sample(sorted(self.expected), 1)
            self.fleet.drop(slots)
            for slot in slots:
                del self.expected[slot]
        if not self.expected:
            return
        among = self.dice.choice([None, sorted(self.expected)])
        self.take(
            self.fleet.recv(
                self.dice.choice([None, None, 1, 2]), self.dice.choice([None, 0.0, 0.003]), among
            )
        )

    def queue(self, plans, slots):
        """Not for slots in flight: by hand they have taken their step already."""
        slots = [slot for slot in slots if slot not in self.expected]
        if not slots:
            return
        self.fleet.queue_reset(plans[: len(slots)], slots)
        for slot, plan in zip(slots, plans, strict=False):
            self.by_hand[slot].plans.append(plan)

    def plan(self):
        seed = self.dice.choice([None, self.dice.randrange(1000)])
        return ResetPlan(seed, self.dice.choice([None, {"from": self.dice.random()}]))

    def finish(self):
        while self.expected:
            self.take(self.fleet.recv())

    def take(self, batch):
        assert batch.incidents == ()
        for position, slot in enumerate(batch.slots.tolist()):
            expected, found = self.expected.pop(slot), row_of(batch, position)
            assert same(found, expected), f"slot {slot}: {found} instead of {expected}"
            self.rows += 1


def fleet_of(tmp_path, mode, backend, has_text=False, hangs=False):
    env_fns = []
    for slot in range(NUM_SLOTS):
        (tmp_path / f"{slot}").mkdir(exist_ok=True)
        hang_s = 1.5 if backend == "thread" else 3600.0
        env_fns.append(
            functools.partial(
                Wanderer,
                tmp_path / f"{slot}",
                raises_at=2 + 3 * slot,
                hangs_at=23 + 5 * slot if hangs and slot % 2 else None,
                hang_s=hang_s,
                has_text=has_text,
            )
        )
    limit_s = None if backend == "serial" else 0.6
    return Fleet(
        env_fns,
        num_workers=3,
        backend=backend,
        autoreset=mode,
        on_failure="resume",
        restarts=OFTEN,
        deadlines=Deadlines(step_s=limit_s, reset_s=limit_s, start_s=20.0),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("backend", "seed", "has_text"),
    [
        ("process", 1, False),
        ("process", 2, False),
        ("process", 3, True),
        (PipeBackend.NAME, 1, False),
        (PipeBackend.NAME, 3, True),
    ],
)
def test_streams_are_undisturbed_by_random_kills(mode, backend, seed, has_text, tmp_path):
    """Real kills, exceptions and hangs; every row is the one that a loop by hand gives."""
    fleet = fleet_of(tmp_path, mode, backend, has_text, hangs=seed == 1)
    driver = Driver(fleet, mode, seed, has_text)
    driver.begin()
    killer = Killer(fleet, seed)
    killer.start()
    until_s = time.monotonic() + 2.5
    while time.monotonic() < until_s or driver.rows < 100 or len(fleet.incidents) < 10:
        driver.round()
    killer.over.set()
    killer.join()
    driver.finish()
    assert {incident.kind for incident in fleet.incidents} >= {"death", "exception"}
    fleet.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("backend", "hangs"), [("serial", False), ("thread", True)])
def test_streams_are_undisturbed_without_processes(mode, backend, hangs, tmp_path):
    fleet = fleet_of(tmp_path, mode, backend, hangs=hangs)
    driver = Driver(fleet, mode, 5)
    driver.begin()
    while driver.rows < 700:
        driver.round()
    driver.finish()
    kinds = [incident.kind for incident in fleet.incidents]
    assert kinds.count("exception") >= NUM_SLOTS
    assert ("timeout" in kinds) == hangs
    fleet.close()


@pytest.mark.parametrize(("method", "mode"), [("spawn", "next_step"), ("forkserver", "same_step")])
def test_a_death_is_undone_under_every_start_method(method, mode):
    with opened(
        Wanderer, NUM_SLOTS, num_workers=2, start_method=method, autoreset=mode, on_failure="resume"
    ) as envs:
        driver = Driver(envs.fleet, mode, 7)
        driver.begin()
        for number in range(40):
            driver.round()
            if number == 20:
                kill_and_wait(envs.fleet.worker_pids()[0])
        driver.finish()
        assert [incident.kind for incident in envs.incidents] == ["death"]
        assert envs.incidents[0].slots == (0, 1, 2)


# ---- where each slot stands when its worker is lost ----------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("moment", ["received", "ready", "in flight"])
def test_whether_its_row_was_received_ready_or_in_flight(moment, mode):
    fleet = Fleet(
        [Wanderer] * 4, num_workers=2, autoreset=mode, on_failure="resume", restarts=OFTEN
    )
    by_hand = [ByHand(mode) for _ in range(4)]

    def check(batch, expected):
        for position, row in enumerate(expected):
            assert same(row_of(batch, position), row)

    first = [ResetPlan(slot) for slot in range(4)]
    check(fleet.reset(first), [hand.reset(ResetPlan(slot)) for slot, hand in enumerate(by_hand)])
    for number in range(12):
        over = [slot for slot in range(4) if by_hand[slot].has_ended]
        if mode == "disabled" and over:
            batch = fleet.reset([ResetPlan()] * len(over), over)
            check(batch, [by_hand[slot].reset(ResetPlan()) for slot in over])
        if mode != "disabled" and number % 3 == 0:
            fleet.queue_reset([ResetPlan(number), ResetPlan(None, {"from": 1.0})], [0, 1])
            by_hand[0].plans.append(ResetPlan(number))
            by_hand[1].plans.append(ResetPlan(None, {"from": 1.0}))
        pid = pid_of(fleet, 0)
        if moment == "in flight":
            os.kill(pid, signal.SIGSTOP)
        actions = np.full((4, 2), number / 10, np.float32)
        fleet.send(actions)
        if moment == "ready":
            fleet.call("pid")  # it is behind the steps, so these are answered
            kill_and_wait(pid)
            assert fleet.call("pid")[0] != pid
        elif moment == "in flight":
            kill_and_wait(pid)
        check(fleet.recv(), [hand.step(one) for hand, one in zip(by_hand, actions, strict=True)])
        if moment == "received":
            kill_and_wait(pid_of(fleet, 0))
    assert len(fleet.incidents) >= 11
    fleet.close()


class LongerLater(Counter):
    """One step with a seed, three without; the info is the number of the step."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.length = 3 if seed is None else 1
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        *row, _ = super().step(action)
        return *row, {"t": self.t}


def test_the_last_info_of_an_earlier_episode_is_not_told_again():
    """The row that waits when its worker is lost is not an end."""
    fleet = Fleet([LongerLater], autoreset="same_step", on_failure="resume")
    fleet.reset([ResetPlan(0)])
    assert fleet.step(zeros(1)).infos["final_info"]["t"].tolist() == [1]
    fleet.send(zeros(1))
    assert fleet.get("t") == [1]  # asked behind the step, so that is answered
    kill_and_wait(pid_of(fleet, 0))
    assert fleet.get("t") == [1]
    assert "final_info" not in fleet.recv().infos
    fleet.step(zeros(1))
    assert fleet.step(zeros(1)).infos["final_info"]["t"].tolist() == [3]
    fleet.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [None, 8])
def test_a_reset_in_flight_is_done_again(seed, mode):
    """Without a seed it goes on with the generator of the episode before."""
    fleet = Fleet([Wanderer] * 2, num_workers=1, autoreset=mode, on_failure="resume")
    by_hand = [ByHand(mode) for _ in range(2)]
    fleet.reset([ResetPlan(0), ResetPlan(1)])
    for slot, hand in enumerate(by_hand):
        hand.reset(ResetPlan(slot))
    fleet.step(np.ones((2, 2), np.float32))
    for hand in by_hand:
        hand.step(np.ones(2, np.float32))
    plan = ResetPlan(seed, {"from": 2.0})
    os.kill(pid_of(fleet, 0), signal.SIGSTOP)
    fleet.send_reset([plan], [1])
    kill_and_wait(pid_of(fleet, 0))
    assert same(row_of(fleet.recv(), 0), by_hand[1].reset(plan))
    if mode == "disabled" and by_hand[0].has_ended:
        fleet.close()
        return
    batch = fleet.step(np.ones((2, 2), np.float32))
    for slot, hand in enumerate(by_hand):
        assert same(row_of(batch, slot), hand.step(np.ones(2, np.float32)))
    fleet.close()


class Told(Resident):
    """Ends its process in a call, or in a function, once."""

    def __init__(self, once):
        super().__init__()
        self.once = once

    def ask(self):
        if not self.once.exists():
            self.once.touch()
            os._exit(3)
        return self.t


def test_whatever_was_asked_is_asked_again(tmp_path):
    env_fn = functools.partial(Told, tmp_path / "happened")
    with opened([env_fn, Resident], num_workers=1, on_failure="resume") as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        assert envs.call("ask", slots=[0]) == (1,)
        kill_and_wait(envs.get_attr("pid")[0])
        assert envs.get_attr("t") == (1, 1)
        kill_and_wait(envs.get_attr("pid")[0])
        assert [snapshot.obs.tolist() for snapshot in envs.snapshot()] == [[1], [1]]
        assert envs.step(zeros(2))[0].tolist() == [[2], [2]]
        assert len(envs.incidents) == 3


def test_a_restored_slot_goes_on_from_its_snapshot():
    with opened(Wanderer, 2, num_workers=1, on_failure="resume", autoreset="same_step") as envs:
        envs.reset(seed=0)
        actions = np.ones((2, 2), np.float32)
        saved = envs.snapshot()
        assert saved[0].method == "pickle"
        expected = [envs.step(actions)[:4] for _ in range(4)]
        envs.restore(saved)
        for number, rows in enumerate(expected):
            if number in (0, 2):
                kill_and_wait(envs.get_attr("pid")[0])
            assert same(envs.step(actions)[:4], rows)


def test_an_action_that_does_not_fit_the_slab_is_taken_again(tmp_path):
    class Listening(Counter):
        def __init__(self, once):
            super().__init__(length=None)
            self.once = once
            self.action_space = spaces.Text(5000)

        def step(self, action):
            if len(action) > 3000 and not self.once.exists():
                self.once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            obs, _, terminated, truncated, _ = super().step(0)
            return obs, float(len(action)), terminated, truncated, {}

    env_fns = [functools.partial(Listening, tmp_path / f"{slot}") for slot in range(2)]
    with opened(env_fns, num_workers=1, on_failure="resume") as envs:
        envs.reset(seed=0)
        for length in (10, 4000, 20, 4500):
            rewards = envs.step(("x" * length, "y" * (length + 1)))[1]
            assert rewards.tolist() == [length, length + 1]
        assert len(envs.incidents) == 2


def test_actions_of_another_type_are_taken_again_as_they_were_taken():
    """The rows hold what the space says, and that is what the environment was given."""
    fleet = Fleet([Wanderer] * 2, num_workers=1, autoreset="same_step", on_failure="resume")
    by_hand = [ByHand("same_step") for _ in range(2)]
    fleet.reset([ResetPlan(0), ResetPlan(1)])
    for slot, hand in enumerate(by_hand):
        hand.reset(ResetPlan(slot))
    actions = np.full((2, 2), 0.1)
    for _ in range(6):
        batch = fleet.step(actions)
        kill_and_wait(pid_of(fleet, 0))
        for slot, hand in enumerate(by_hand):
            expected = hand.step(actions[slot].astype(np.float32))
            assert same(row_of(batch, slot), expected)
    fleet.close()


# ---- what cannot be resumed ----------------------------------------------------------------------


class Forgetful(Resident):
    """Observes something else in every life."""

    def observation(self):
        return np.array([self.t + os.getpid()])


@pytest.mark.parametrize("is_sent", [True, False])
def test_an_environment_that_does_not_repeat_itself_is_refused(is_sent):
    with opened([Forgetful, Resident], num_workers=1, on_failure="resume") as envs:
        envs.reset(seed=0)
        envs.step(zeros(2))
        kill_and_wait(envs.get_attr("pid")[0])
        if is_sent:
            envs.send(zeros(2))
        with pytest.raises(errors.ResumeFailed, match=r"slot 0 .*does not repeat itself") as caught:
            envs.recv() if is_sent else envs.get_attr("t")
        assert caught.value.slot == 0
        if is_sent:
            batch = envs.recv()
            assert (batch.slots.tolist(), batch.obs.tolist()) == ([1], [[2]])
        with pytest.raises(errors.ResetNeeded, match=r"slots \[0\]"):
            envs.step(zeros(2))
        envs.reset(options={"reset_mask": np.array([True, False])})
        assert envs.step(zeros(2))[0][1].tolist() == [3 if is_sent else 2]
        assert len(envs.incidents) == 1


def test_an_episode_of_too_many_actions_is_refused(monkeypatch):
    monkeypatch.setattr(episodes, "LIMIT_BYTES", 2000)
    with opened([Resident, Resident], num_workers=2, on_failure="resume") as envs:
        envs.reset(seed=0)
        for _ in range(50):
            envs.step(zeros(2))
        kill_and_wait(envs.get_attr("pid")[1])
        with pytest.raises(errors.ResumeFailed, match=r"slot 1 .*more actions than are kept"):
            envs.step(zeros(2))
        envs.reset(options={"reset_mask": np.array([False, True])})
        assert envs.step(zeros(2))[0].tolist() == [[52], [1]]


def test_natively_vectorised_environments_are_refused():
    native = envfleet.native(lambda num: VectorCounter((5,) * num))
    with pytest.raises(errors.ConfigError, match=r"slots 0 to 1 .*on_failure='restart'"):
        envfleet.make_vec(native, 2, num_workers=1, backend="process", on_failure="resume")


# ---- the budget ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exception", "kill"])
def test_a_slot_that_keeps_failing_is_quarantined(mode):
    always = functools.partial(Crashing, mode=mode, nth=3, length=None)
    fleet = Fleet(
        [Resident, always],
        num_workers=2,
        on_failure="resume",
        restarts=RestartPolicy(max_restarts=2),
    )
    fleet.reset([ResetPlan(0), ResetPlan(1)])
    fleet.step(zeros(2))
    fleet.step(zeros(2))
    with pytest.raises(errors.SlotQuarantined, match="slot 1 failed 3 times"):
        fleet.step(zeros(2))
    assert len(fleet.incidents) == 3
    fleet.send(zeros(1), [0])
    assert fleet.recv().obs.tolist() == [[4]]
    fleet.close()


class Choosy(Resident):
    """Knows two tasks; each environment that is built leaves a mark."""

    def __init__(self, built):
        super().__init__()
        with built.open("a") as file:
            file.write("x")

    def reset(self, *, seed=None, options=None):
        task = (options or {}).get("task", 0)
        if task > 1:
            raise ValueError(f"there is no task {task}, only 0 and 1")
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("autoreset", MODES)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_reset_that_cannot_work_is_its_caller_s_error_and_costs_nothing(
    num_workers, autoreset, tmp_path
):
    fleet = Fleet(
        [Resident, functools.partial(Choosy, tmp_path / "built")],
        num_workers=num_workers,
        autoreset=autoreset,
        on_failure="resume",
        restarts=RestartPolicy(max_restarts=2),
    )
    fleet.reset([ResetPlan(0), ResetPlan(1)])
    for number in range(1, 6):  # more often than the budget allows failures
        with pytest.raises(errors.EnvFailed, match="there is no task 7, only 0 and 1") as caught:
            fleet.reset([ResetPlan(0), ResetPlan(1, {"task": 7})])
        assert (caught.value.slot, caught.value.doing) == (1, "reset")
        assert "raised the same in a new environment" in caught.value.__notes__[0]
        assert len((tmp_path / "built").read_text()) == 1 + number, "it was tried once more"
    assert fleet.quarantined == {}
    assert fleet.without_episode == [1]
    fleet.reset([ResetPlan(0), ResetPlan(1, {"task": 1})])
    assert fleet.step(zeros(2)).obs.tolist() == [[1], [1]]
    fleet.close()


class Worsening(Resident):
    """Fails at its third step, and from then on at the first of every life: in the replay."""

    def __init__(self, how, once):
        super().__init__()
        self.how, self.once, self.steps = how, once, 0

    def step(self, action):
        self.steps += 1
        if self.steps == (1 if self.once.exists() else 3):
            self.once.touch()
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                time.sleep(3600)
            raise RuntimeError("worse and worse")
        return super().step(action)


@pytest.mark.parametrize("how", ["exception", "kill", "hang"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_failure_in_the_replay_counts(how, is_shared, tmp_path):
    fleet = Fleet(
        [Resident, functools.partial(Worsening, how, tmp_path / "happened"), Resident],
        num_workers=1 if is_shared else 3,
        on_failure="resume",
        deadlines=Deadlines(step_s=0.4 if how == "hang" else None),
        restarts=RestartPolicy(max_restarts=2),
    )
    fleet.reset([ResetPlan(slot) for slot in range(3)])
    fleet.step(zeros(3))
    fleet.step(zeros(3))
    fleet.send(zeros(3))
    with at_most(3 * 0.4 + 10 * GRACE_S), pytest.raises(errors.SlotQuarantined, match="slot 1"):
        fleet.recv()
    assert [incident.slot for incident in fleet.incidents] == [1, 1, 1]
    batch = fleet.recv()
    assert batch.slots.tolist() == [0, 2]
    assert batch.obs.tolist() == [[3], [3]]
    assert batch.valid.all()
    fleet.close()


def test_a_long_replay_is_not_taken_for_a_silence():
    class Steady(Resident):
        def step(self, action):
            time.sleep(0.02)
            return super().step(action)

    fleet = Fleet([Steady], on_failure="resume", deadlines=Deadlines(step_s=0.5, reset_s=0.5))
    fleet.reset([ResetPlan(0)])
    for _ in range(60):
        fleet.step(zeros(1))
    kill_and_wait(pid_of(fleet, 0))
    assert fleet.step(zeros(1)).obs.tolist() == [[61]]
    assert [incident.kind for incident in fleet.incidents] == ["death"]
    fleet.close()


def test_a_hang_is_undone_and_the_others_go_on(tmp_path):
    hangs = functools.partial(Hanging, nth=2, once=tmp_path / "happened", length=None)
    env_fns = [Resident, hangs]
    with opened(env_fns, num_workers=2, on_failure="resume", step_timeout_s=0.5) as envs:
        envs.reset(seed=0)
        for t in range(1, 5):
            obs, _, _, truncated, infos = envs.step(zeros(2))
            assert obs.tolist() == [[t], [t]]
            assert not truncated.any()
            assert "incident" not in infos
        assert [incident.kind for incident in envs.incidents] == ["timeout"]

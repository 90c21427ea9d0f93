"""Workers are killed and stopped at random moments, and every row is accounted for.

Laws 2 and 3 together: in any sequence of calls, a slot's row is either the next of its
episode, or truncated with an incident, or the first of a new episode. Law 5: nothing is left.
"""

import os
import random
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from gymnasium import spaces

from envfleet import errors
from envfleet.engine import Deadlines, Fleet, ResetPlan, RestartPolicy
from envfleet.testing import Counter
from tests.faults.stage import GRACE_S, MODES, opened, zeros
from tests.gates import at_most

LENGTH = 9
SECONDS = 2.0


class Erratic(Counter):
    """Counts to LENGTH; sometimes it raises or is slow. Reports t in its info."""

    def __init__(self):
        super().__init__(LENGTH)
        self.luck = random.Random(os.getpid() ^ time.monotonic_ns())

    def step(self, action):
        draw = self.luck.random()
        if draw < 0.02:
            raise RuntimeError("bad luck")
        if draw < 0.04:
            time.sleep(0.005)
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"t": self.t}

    pid = property(lambda self: os.getpid())


class Killer(threading.Thread):
    """Kills or stops one worker after another, at random."""

    def __init__(self, fleet, seed):
        super().__init__(daemon=True)
        self.fleet, self.dice = fleet, random.Random(seed)
        self.over = threading.Event()
        self.strikes = 0

    def run(self):
        while not self.over.wait(self.dice.uniform(0.001, 0.06)):
            how = signal.SIGKILL if self.dice.random() < 0.9 else signal.SIGSTOP
            # whom it picks may be gone, being replaced, or not yet there
            with suppress(ProcessLookupError, ValueError, AttributeError, IndexError):
                handle = self.dice.choice(self.fleet._workers.handles)
                os.kill(handle.process.pid, how)
                self.strikes += 1


def told_t(infos, row):
    """The t that the environment reports, if any."""
    return int(infos["t"][row]) if "t" in infos and infos["_t"][row] else None


class Accounts:
    """What each slot may answer next."""

    def __init__(self, num_slots, mode):
        self.mode = mode
        self.t: list[int | None] = [None] * num_slots
        """Steps of the running episode; None while an end waits for its reset."""

    def began(self, slot):
        self.t[slot] = 0

    def take(self, batch):
        infos = batch.infos
        for row, slot in enumerate(batch.slots.tolist()):
            t = self.t[slot]
            incident = bool(infos["_incident"][row]) if "_incident" in infos else False
            obs, valid = int(batch.obs[row, 0]), bool(batch.valid[row])
            ended = bool(batch.terminated[row] | batch.truncated[row])
            has_final = ended and self.mode == "same_step"
            told = told_t(infos["final_info"] if has_final else infos, row)
            where = f"slot {slot} after t={t}: obs {obs}, valid {valid}, {batch}"
            if valid:
                assert t is not None, where
                assert batch.rewards[row] == t + 1 == told, where
                assert int(batch.final_obs[row, 0]) == t + 1, where
                assert batch.terminated[row] == (t + 1 == LENGTH), where
                assert not batch.truncated[row], where
                assert obs == (0 if has_final else t + 1), where
                self.t[slot] = t + 1
            elif ended:
                assert incident, where
                assert batch.truncated[row], where
                assert told is None, where
                assert batch.rewards[row] == 0, where
            else:
                assert self.mode == "next_step", where
                assert t is None, where
                assert obs == 0, where
                self.t[slot] = 0
            if ended:
                self.t[slot] = 0 if self.mode == "same_step" else None


@pytest.mark.parametrize("mode", MODES)
def test_every_row_is_accounted_for(mode):
    seed = 1
    fleet = Fleet(
        [Erratic] * 7,
        num_workers=3,
        autoreset=mode,
        on_failure="restart",
        restarts=RestartPolicy(max_restarts=1_000_000),
        # also one that is stopped while it comes up is to be given up
        deadlines=Deadlines(step_s=0.4, reset_s=0.4, start_s=4.0),
    )
    killer = Killer(fleet, seed)
    dice, accounts = random.Random(seed), Accounts(7, mode)
    in_flight: set[int] = set()
    rows = 0
    fleet.reset([ResetPlan(slot) for slot in range(7)])
    for slot in range(7):
        accounts.began(slot)
    killer.start()
    until_s = time.monotonic() + SECONDS
    # longer where little happens in that time
    while time.monotonic() < until_s or rows <= 20 or killer.strikes <= 10:
        if mode == "disabled":
            over = [slot for slot in range(7) if accounts.t[slot] is None]
            if over:
                fleet.reset([ResetPlan()] * len(over), over)
                for slot in over:
                    accounts.began(slot)
        idle = [slot for slot in range(7) if slot not in in_flight]
        if idle:
            chosen = dice.sample(idle, dice.randint(1, len(idle)))
            fleet.send(zeros(len(chosen)), chosen)
            in_flight.update(chosen)
        if dice.random() < 0.1:
            with suppress(errors.WorkerDied, errors.DeadlineExceeded):
                fleet.call("pid", slots=[dice.randrange(7)])
        batch = fleet.recv(dice.choice([None, 1, 3]), dice.choice([None, None, 0.0, 0.002]))
        accounts.take(batch)
        in_flight.difference_update(batch.slots.tolist())
        rows += len(batch)
    killer.over.set()
    killer.join()
    while in_flight:
        batch = fleet.recv()
        accounts.take(batch)
        in_flight.difference_update(batch.slots.tolist())
    fleet.close()


def test_a_fleet_can_be_closed_at_any_moment_of_a_disaster():
    for seed in range(6):
        fleet = Fleet(
            [Erratic] * 4,
            num_workers=2,
            on_failure="restart",
            restarts=RestartPolicy(max_restarts=1_000_000),
            deadlines=Deadlines(step_s=0.4, reset_s=0.4, start_s=4.0, close_s=0.5),
        )
        fleet.reset([ResetPlan(slot) for slot in range(4)])
        killer = Killer(fleet, seed)
        killer.start()
        until_s = time.monotonic() + 0.05 * seed
        while time.monotonic() < until_s:
            fleet.send(zeros(4))
            fleet.recv()
        if seed % 2:
            fleet.send(zeros(4))
        fleet.close()
        killer.over.set()
        killer.join()


class Talkative(Counter):
    """Its infos are far larger than a socket's buffer."""

    def __init__(self):
        super().__init__(length=None)

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"talk": bytes([self.t]) * BLOB}

    pid = property(lambda self: os.getpid())


BLOB = 20 << 20


def test_half_a_message_is_never_taken_for_a_whole_one():
    """The worker is killed while it sends; whole infos arrive, or the slot is truncated."""
    fleet = Fleet(
        [Talkative] * 2,
        num_workers=2,
        on_failure="restart",
        restarts=RestartPolicy(max_restarts=1000),
    )
    fleet.reset([ResetPlan(0), ResetPlan(1)])
    fleet.step(zeros(2))
    started_s = time.monotonic()
    fleet.step(zeros(2))
    whole_s = time.monotonic() - started_s
    outcomes: set[bool] = set()
    for number in range(70):
        if number >= 14 and len(outcomes) == 2:
            break
        try:
            pid = fleet.call("pid")[0]
        except errors.WorkerDied:  # the last kill came after its row
            pid = fleet.call("pid")[0]
        fleet.send(zeros(2))
        # from before the first byte to after the last, and later if even that was too early
        after_s = whole_s * (number % 14) / 7 * 2 ** (number // 14)
        timer = threading.Timer(after_s, os.kill, (pid, signal.SIGKILL))
        timer.start()
        batch = fleet.recv()
        timer.join()
        for row in range(2):
            if batch.valid[row]:
                assert batch.infos["talk"][row] == bytes([int(batch.obs[row, 0])]) * BLOB
            else:
                assert row == 0
                assert batch.truncated[row]
        outcomes.add(bool(batch.valid[0]))
        while not batch.valid[0]:
            fleet.send(zeros(2))
            batch = fleet.recv()
    assert outcomes == {True, False}, "every kill came too early, or too late, to show anything"
    fleet.close()


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_worker_that_does_not_read_does_not_block_the_caller(on_failure):
    """It is stopped; what it is sent does not fit into the socket's buffer."""
    fleet = Fleet(
        [Talkative] * 2,
        num_workers=2,
        deadlines=Deadlines(reset_s=0.5),
        on_failure=on_failure,
    )
    fleet.reset([ResetPlan(0), ResetPlan(1)])
    os.kill(fleet.call("pid")[0], signal.SIGSTOP)
    large = [ResetPlan(0, {"talk": bytes(BLOB)}), ResetPlan(1)]
    with at_most(0.5 + GRACE_S):
        if on_failure == "raise":
            with pytest.raises(errors.DeadlineExceeded, match="slot 0"):
                fleet.reset(large)
        else:
            assert fleet.reset(large).obs.tolist() == [[0], [0]]
    fleet.close()


# ---- publication ---------------------------------------------------------------------------------

WORDS = 2000
MIXER = np.uint64(0x9E3779B97F4A7C15)


class Sealed(Counter):
    """Every word of the observation depends on t and its index, so half a row is noticed."""

    def __init__(self, length=50):
        super().__init__(length)
        self.observation_space = spaces.Box(0, 2**64 - 1, (WORDS,), np.uint64)

    def observation(self):
        return seal(self.t)


def seal(t):
    return (np.arange(WORDS, dtype=np.uint64) + np.uint64(t + 1)) * MIXER


@pytest.mark.parametrize("copy", [True, False])
def test_a_row_is_whole_when_its_signal_comes(copy):
    """The signal never arrives before the data, in every way of collecting steps."""
    seals = np.stack([seal(t) for t in range(51)])
    with opened(Sealed, 8, num_workers=4, copy=copy) as envs:
        envs.reset(seed=0)
        dice, rows = random.Random(0), 0
        envs.send(zeros(8))
        while rows < 12_000:
            batch = envs.recv(min_slots=dice.randint(1, 8))
            t = np.where(batch.valid, batch.rewards, 0).astype(np.int64)
            assert np.array_equal(batch.obs, seals[t])
            rows += len(batch)
            envs.send(zeros(len(batch)), batch.slots)
        envs.recv()

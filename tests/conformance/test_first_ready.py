"""send and recv: ready slots return first, without waiting for the slowest, in the right rows."""

import functools

import numpy as np
import pytest

from envfleet import errors
from envfleet.testing import Counter, NoisyStream, TaskCounter
from tests.conformance.matrix import BY_RAY, FORK, QUICK, THREAD, opened
from tests.gates import gated, in_time_at_best

ZERO = np.zeros(4, dtype=np.int64)


@pytest.fixture
def gate(tmp_path):
    """A file; slot 1 of `one_slow` waits until it exists."""
    return tmp_path / "gate"


def one_slow(gate):
    return [Counter, gated(gate), Counter, Counter]


def take_the_others(envs, **how):
    """Receive until every slot but slot 1 has answered."""
    seen: list[int] = []
    while sorted(seen) != [0, 2, 3]:
        seen += envs.recv(**how).slots.tolist()
        assert 1 not in seen


@pytest.mark.parametrize("where", QUICK)
def test_recv_gives_all_in_flight_by_default(where):
    with opened(Counter, 4, **where) as envs:
        envs.reset(seed=0)
        envs.send(ZERO)
        batch = envs.recv()
    assert sorted(batch.slots.tolist()) == [0, 1, 2, 3]
    assert batch.obs.shape == (4, 1)
    assert batch.rewards.dtype == np.float64
    assert batch.terminated.dtype == batch.truncated.dtype == batch.valid.dtype == np.bool_
    assert batch.incidents == ()


@pytest.mark.parametrize("where", [*QUICK, *BY_RAY])
def test_rows_belong_to_the_slots_they_name(where):
    with opened(TaskCounter, 4, **where) as envs:
        envs.reset(seed=100)
        for slots in ([2], [3, 0], [1, 3, 2, 0]):
            envs.send(np.zeros(len(slots), np.int64), slots=np.array(slots))
            batch = envs.recv()
            assert sorted(batch.slots.tolist()) == sorted(slots)
            assert batch.obs[:, 0].tolist() == [100 + slot for slot in batch.slots]


@pytest.mark.parametrize("where", QUICK)
def test_actions_belong_to_the_slots_they_name(where):
    """The reward is the sum of the action, and every action has a different sum."""
    with opened(functools.partial(NoisyStream, max_length=99), 4, **where) as envs:
        envs.reset(seed=0)
        actions = np.array([[slot, 0.0] for slot in (2, 0, 3)], dtype=np.float32) * 10
        envs.send(actions, slots=[2, 0, 3])
        batch = envs.recv()
    for slot, reward in zip(batch.slots, batch.rewards, strict=True):
        assert 10 * slot <= reward < 10 * slot + 1


@pytest.mark.parametrize("where", [*QUICK, *BY_RAY])
def test_infos_are_aligned_with_the_slots(where):
    with opened(
        functools.partial(TaskCounter, length=1), 4, autoreset="same_step", **where
    ) as envs:
        envs.reset(seed=0)
        envs.queue_reset(options=[{"task": 10 * slot} for slot in range(4)])
        envs.send(np.zeros(2, np.int64), slots=[3, 1])
        batch = envs.recv()
    assert batch.infos["task"].tolist() == [10 * slot for slot in batch.slots]
    assert batch.infos["_task"].all()
    assert batch.final_obs[:, 3].tolist() == [1, 1]
    assert batch.obs[:, 3].tolist() == [0, 0]


@pytest.mark.parametrize("where", [THREAD, FORK], ids=["thread", "fork"])
def test_who_is_ready_is_not_kept_waiting(where, gate):
    with opened(one_slow(gate), **{**where, "num_workers": 4}) as envs:
        envs.reset(seed=0)
        envs.send(ZERO)
        take_the_others(envs, min_slots=1)
        gate.touch()
        assert envs.recv().slots.tolist() == [1]


@pytest.mark.parametrize("where", [THREAD, FORK], ids=["thread", "fork"])
def test_min_slots_waits_for_that_many(where, gate):
    with opened(one_slow(gate), **{**where, "num_workers": 4}) as envs:
        envs.reset(seed=0)
        envs.send(ZERO)
        assert sorted(envs.recv(min_slots=3).slots.tolist()) == [0, 2, 3]
        gate.touch()
        assert envs.recv(min_slots=1).slots.tolist() == [1]


@pytest.mark.parametrize("where", [THREAD, FORK], ids=["thread", "fork"])
def test_a_timeout_gives_what_is_ready(where, gate):
    with opened(one_slow(gate), **{**where, "num_workers": 4}) as envs:
        envs.reset(seed=0)
        envs.send(ZERO)
        take_the_others(envs, timeout_s=0.15)
        nothing = envs.recv(timeout_s=0.01)
        assert nothing.slots.tolist() == []
        assert nothing.obs.shape == (0, 1)
        assert nothing.rewards.shape == (0,)
        in_time_at_best(lambda: envs.recv(timeout_s=0.15), 0.4)
        gate.touch()
        assert envs.recv().slots.tolist() == [1]


@pytest.mark.parametrize("where", QUICK)
def test_slots_go_at_their_own_pace(where):
    with opened(Counter, 4, **where) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.send(np.zeros(1, np.int64), slots=[2])
            envs.recv()
        envs.send(ZERO)
        batch = envs.recv()
    assert batch.obs[np.argsort(batch.slots), 0].tolist() == [1, 1, 4, 1]


@pytest.mark.parametrize("where", [*QUICK, *BY_RAY])
def test_send_some_while_others_are_in_flight(where):
    with opened(Counter, 4, **where) as envs:
        envs.reset(seed=0)
        envs.send(np.zeros(2, np.int64), slots=[0, 1])
        envs.send(np.zeros(2, np.int64), slots=[2, 3])
        seen: list[int] = []
        while len(seen) < 4:
            seen += envs.recv(min_slots=1).slots.tolist()
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.parametrize("where", [*QUICK, *BY_RAY])
def test_misuse_is_one_sentence_and_leaves_the_protocol_in_step(where):
    with opened(Counter, 4, **where) as envs:
        envs.reset(seed=0)
        with pytest.raises(errors.NothingSent, match="send"):
            envs.recv()
        envs.send(np.zeros(2, np.int64), slots=[0, 1])
        with pytest.raises(errors.StillInFlight, match="1"):
            envs.send(np.zeros(2, np.int64), slots=[1, 2])
        with pytest.raises(errors.StillInFlight):
            envs.step(ZERO)
        with pytest.raises(errors.ActionError):
            envs.send(np.zeros(3, np.int64), slots=[2, 3])
        with pytest.raises((ValueError, IndexError), match="4"):
            envs.send(np.zeros(1, np.int64), slots=[4])
        assert sorted(envs.recv().slots.tolist()) == [0, 1]
        envs.send(np.zeros(2, np.int64), slots=[2, 3])
        batch = envs.recv()
    assert batch.obs[:, 0].tolist() == [1, 1]


@pytest.mark.parametrize("where", [*QUICK, *BY_RAY])
def test_named_slots_are_waited_for_and_others_left_where_they_are(where):
    with opened(TaskCounter, 4, **where) as envs:
        envs.reset(seed=100)
        for slots in ([0, 1], [2, 3]):
            envs.send(np.zeros(2, np.int64), slots)
        for slots in ([2, 3], [1], [0]):  # also a part of what was sent together
            batch = envs.recv(slots=slots)
            assert batch.slots.tolist() == slots
        with pytest.raises(errors.NothingSent, match=r"slots \[0\]: send them first"):
            envs.recv(slots=[0])
        envs.send(ZERO)
        assert envs.recv(slots=[3, 1]).slots.tolist() == [3, 1]
        assert envs.recv().slots.tolist() == [0, 2]


def test_waiting_for_named_slots_does_not_wait_for_a_slow_one(gate):
    with opened(one_slow(gate), None, **FORK | {"num_workers": 4}) as envs:
        envs.reset(seed=0)
        envs.send(ZERO)
        assert envs.recv(slots=[0, 2]).slots.tolist() == [0, 2]
        assert envs.recv(timeout_s=0.01, slots=[1]).slots.tolist() == []
        assert envs.recv(min_slots=1, slots=[1, 3]).slots.tolist() == [3]
        envs.send(np.zeros(1, np.int64), [3])
        assert envs.recv(min_slots=1, timeout_s=60.0, slots=[3, 1]).slots.tolist() == [3]
        envs.send(np.zeros(1, np.int64), [3])
        gate.touch()
        assert envs.recv(slots=[3, 1]).slots.tolist() == [3, 1]

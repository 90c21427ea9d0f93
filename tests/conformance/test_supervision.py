"""Laws 3, 4, 5 and 9: deaths are noticed, waits end, nothing is left behind, plans explained."""

import functools
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
import pytest

import envfleet
from envfleet import errors
from envfleet.testing import (
    Counter,
    Crashing,
    Hanging,
    NoisyStream,
    first_difference,
    fleet_driven,
    hand_driven,
)
from tests.conformance.matrix import APART, BY_RAY, FORK, FORKSERVER, PIPES, QUICK, SPAWN, opened
from tests.gates import PATIENCE_S, at_most

ZERO = np.zeros(3, dtype=np.int64)


@pytest.fixture(params=APART)
def one_each(request) -> dict[str, Any]:
    """Three worker processes, for three environments."""
    return {**request.param, "num_workers": 3}


def one_bad(env, **kwargs) -> list[Any]:
    return [Counter, functools.partial(env, **kwargs), Counter]


# ---------------------------------------------------------------------- law 3


@pytest.mark.parametrize(
    ("where", "mode"),
    [
        (FORK, "kill"),
        (FORK, "exit"),
        (FORK, "segfault"),
        (FORK, "exception"),
        (PIPES, "kill"),
        (PIPES, "exit"),
        (PIPES, "segfault"),
        (PIPES, "exception"),
        (SPAWN, "kill"),
        (FORKSERVER, "kill"),
    ],
)
def test_a_lost_slot_comes_back_truncated_and_the_others_go_on(where, mode, tmp_path):
    env_fns = one_bad(Crashing, mode=mode, nth=3, once=tmp_path / "happened", length=None)
    where = {**where, "num_workers": 3}
    with opened(env_fns, on_failure="restart", **where) as envs:
        envs.reset(seed=0)
        seen = []
        for _ in range(5):
            envs.send(ZERO)
            batch = envs.recv()
            order = np.argsort(batch.slots)
            seen.append(
                (
                    batch.obs[order, 0].tolist(),
                    batch.truncated[order].tolist(),
                    batch.valid[order].tolist(),
                    len(batch.incidents),
                )
            )
        obs, truncated, valid, incidents = zip(*seen, strict=True)
        assert [row[0] for row in obs] == [1, 2, 3, 4, 5]
        assert [row[2] for row in obs] == [1, 2, 3, 4, 5]
        assert [row[1] for row in truncated] == [False, False, True, False, False]
        assert [row[1] for row in valid] == [True, True, False, False, True]
        assert obs[4][1] == 1
        assert incidents == (0, 0, 1, 0, 0)
        assert len(envs.incidents) == 1
        assert envs.incidents[0].slot == 1


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_a_restart_leaves_the_streams_of_other_slots_as_they_are(mode, tmp_path, one_each):
    good = functools.partial(Counter, length=4)
    bad = functools.partial(Crashing, mode="kill", nth=6, once=tmp_path / "happened", length=4)
    got = fleet_driven([good, bad, good], 3, 20, 0, mode, on_failure="restart", **one_each)
    expected = hand_driven(good, 3, 20, 0, mode)
    for slot in (0, 2):
        alone = [
            type(streams)(source="", autoreset=mode, slots=(streams.slots[slot],))
            for streams in (expected, got)
        ]
        assert first_difference(*alone) is None


def test_a_slot_that_fails_for_ever_is_quarantined():
    env_fns = one_bad(Crashing, mode="exception", at="step", nth=1)
    with opened(env_fns, on_failure="restart", **FORK) as envs:
        envs.reset(seed=0)

        def go_on():
            for _ in range(200):
                envs.step(ZERO)

        with pytest.raises(errors.SlotQuarantined) as caught:
            go_on()
    assert caught.value.slot == 1


def test_a_fleet_falls_back_to_this_process(tmp_path, one_each):
    env_fns = one_bad(Crashing, mode="kill", nth=3, once=tmp_path / "happened", length=None)
    with opened(env_fns, on_failure="fallback", **one_each) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(ZERO)
        with pytest.warns(RuntimeWarning, match="in this process"):
            _, _, _, truncated, _ = envs.step(ZERO)
        assert truncated.tolist() == [False, True, False]
        envs.step(ZERO)
        obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, 0].tolist() == [5, 1, 5]


# ---------------------------------------------------------------------- law 4


@pytest.mark.parametrize("mode", ["sleep", "gil", "deaf", "stop"])
def test_a_hang_ends_at_its_deadline_with_its_stack(mode, one_each):
    env_fns = one_bad(Hanging, mode=mode, nth=2)
    with opened(env_fns, step_timeout_s=0.5, **one_each) as envs:
        envs.reset(seed=0)
        envs.step(ZERO)
        start_s = time.monotonic()
        with at_most(2.5), pytest.raises(errors.DeadlineExceeded) as caught:
            envs.step(ZERO)
        assert time.monotonic() - start_s >= 0.5
    assert caught.value.slot == 1
    if mode != "stop":
        assert "misbehave" in caught.value.stack


def test_a_hanging_reset_ends_at_its_deadline(one_each):
    env_fns = one_bad(Hanging, at="reset", nth=2)
    with opened(env_fns, reset_timeout_s=0.5, **one_each) as envs:
        envs.reset(seed=0)
        with at_most(2.5), pytest.raises(errors.DeadlineExceeded, match="reset"):
            envs.reset(seed=0)


def test_a_hang_is_answered_by_a_restart(tmp_path, one_each):
    env_fns = one_bad(Hanging, nth=2, once=tmp_path / "happened", length=None)
    with opened(env_fns, step_timeout_s=0.5, on_failure="restart", **one_each) as envs:
        envs.reset(seed=0)
        envs.step(ZERO)
        obs, _, _, truncated, _ = envs.step(ZERO)
        assert truncated.tolist() == [False, True, False]
        for _ in range(2):
            obs, _, _, _, _ = envs.step(ZERO)
    assert obs[:, 0].tolist() == [4, 1, 4]


@pytest.mark.parametrize("mode", ["sleep", "stop"])
def test_close_is_bounded_when_an_env_hangs_in_it(mode, one_each):
    envs = envfleet.make_vec(one_bad(Hanging, mode=mode, at="close"), **one_each)
    envs.reset(seed=0)
    with at_most(6.0):
        envs.close()


# ---------------------------------------------------------------------- law 5


PARENT = """
import sys, time
import numpy as np
import envfleet
from envfleet.testing import Counter

if __name__ == "__main__":
    envs = envfleet.make_vec(Counter, 2, backend="process", num_workers=2, start_method=sys.argv[1])
    envs.reset(seed=0)
    print("ready", flush=True)
    if sys.argv[2] == "raise":
        raise RuntimeError("not closed")
    time.sleep(60)
"""


def start_parent(tmp_path, start_method, then):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    return subprocess.Popen(
        [sys.executable, str(script), start_method, then],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_13_no_child_outlives_a_killed_parent(start_method, tmp_path):
    with start_parent(tmp_path, start_method, "sleep") as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(PATIENCE_S)
        with at_most(3.0):
            _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_13_an_exception_in_the_main_program_ends_it_at_once(start_method, tmp_path):
    with start_parent(tmp_path, start_method, "raise") as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        with at_most(3.0):
            _, complaints = parent.communicate(timeout=PATIENCE_S)
    assert complaints.count("Traceback") == 1
    assert "not closed" in complaints


# ---------------------------------------------------------------------- law 9


@pytest.mark.parametrize("num_envs", [1, 4])
def test_auto_says_what_it_chose_and_keeps_the_streams(num_envs):
    with opened(NoisyStream, num_envs) as envs:
        assert isinstance(envs.plan, str)
        assert envs.plan.strip()
        assert len(envs.plan.splitlines()) == 1
    expected = hand_driven(NoisyStream, num_envs, 20)
    assert first_difference(expected, fleet_driven(NoisyStream, num_envs, 20)) is None


@pytest.mark.parametrize("where", [*QUICK, *BY_RAY])
def test_a_chosen_backend_is_told_too(where):
    with opened(Counter, 2, **where) as envs:
        assert where["backend"] in envs.plan

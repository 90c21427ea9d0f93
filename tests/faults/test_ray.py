"""Actors, nodes and heads that are really killed under a fleet on Ray."""

import os
import signal
import time
from contextlib import closing, suppress

import gymnasium
import numpy as np
import psutil
import pytest

import envfleet
from envfleet.cli.doctor_ray import ray_checks
from envfleet.errors import DeadlineExceeded, ObjectStoreTooSmall, WorkerDied
from envfleet.testing import Counter, Hanging, NoisyStream
from tests.faults.stage import Resident, program
from tests.gates import PATIENCE_S
from tests.ray_cluster import NODE


class OnSomeNode(NoisyStream):
    """A stream that depends on its seed and actions, and reports its process."""

    @property
    def pid(self) -> int:
        return os.getpid()


def opened(env, count, **kwargs):
    return closing(envfleet.make_vec(env, count, backend="ray", num_workers=2, **kwargs))


def until(is_so, what):
    """Return as soon as it is so."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_s, f"{what} never came"
        time.sleep(0.01)


def nodes_of(envs):
    return {handle.node for handle in envs.fleet._workers.handles}


def kill_worker_of(envs, slot):
    """Kill it for certain."""
    pid = envs.get_attr("pid")[slot]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid), "the end of a worker")


def rows(envs, actions, between=(), is_new=True):
    """What a fleet answers to these actions; `between` has what is done before a step."""
    found = [envs.reset(seed=11)[0].copy()] if is_new else []
    for number, action in enumerate(actions):
        if number in between:
            between[number]()
        obs, rewards, terminated, truncated, _ = envs.step(action)
        found += [obs.copy(), rewards.copy(), terminated.copy(), truncated.copy()]
    return found


def actions_for(envs, steps):
    space = envs.action_space
    space.seed(5)
    return [space.sample() for _ in range(steps)]


def test_a_killed_actor_is_named_and_says_what_ray_says(ray_cluster):
    with opened(Resident, 4) as envs:
        assert len(nodes_of(envs)) == 2  # they are spread unless something else is asked for
        envs.reset(seed=0)
        kill_worker_of(envs, 2)
        start_s = time.monotonic()
        with pytest.raises(WorkerDied) as caught:
            envs.step(np.zeros(4, int))
        assert time.monotonic() - start_s < PATIENCE_S
        assert caught.value.slots == (2, 3)
        assert caught.value.doing == "step"
        assert "still running" not in str(caught.value)
        assert "worker process has died" in str(caught.value)


def test_a_killed_actor_is_replaced_and_its_slots_come_back_truncated(ray_cluster):
    with opened(Resident, 4, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(4, int))
        kill_worker_of(envs, 0)
        *_, truncated, infos = envs.step(np.zeros(4, int))
        assert truncated.tolist() == [True, True, False, False]
        assert infos["_incident"].tolist() == [True, True, False, False]
        assert envs.step(np.zeros(4, int))[0][:, 0].tolist()[2:] == [3, 3]


def test_streams_are_bit_equal_when_actors_are_killed_under_resume(ray_cluster):
    with closing(envfleet.make_vec(OnSomeNode, 4, backend="serial")) as envs:
        actions = actions_for(envs, 40)
        expected = rows(envs, actions)
    with opened(OnSomeNode, 4, on_failure="resume") as envs:
        found = rows(
            envs,
            actions,
            {7: lambda: kill_worker_of(envs, 0), 25: lambda: kill_worker_of(envs, 3)},
        )
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_slots_of_a_removed_node_go_on_where_they_stood_once_it_is_back(ray_cluster):
    with closing(envfleet.make_vec(OnSomeNode, 4, backend="serial")) as envs:
        actions = actions_for(envs, 20)
        expected = rows(envs, actions)
    node, is_there = ray_cluster.nodes.add_node(**NODE, resources={"doomed": 2}), True
    options = envfleet.RayOptions(resources={"doomed": 1})
    try:
        with opened(OnSomeNode, 4, on_failure="resume", backend_options=options) as envs:
            found = rows(envs, actions[:9])
            pids = envs.get_attr("pid")
            ray_cluster.nodes.remove_node(node, allow_graceful=False)
            is_there = False
            for pid in set(pids):  # a node that goes takes them along; here they linger for a while
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            envs.send(actions[9])
            until(lambda: not envs.recv(timeout_s=0.1) and envs.incidents, "the loss of a node")
            node, is_there = ray_cluster.nodes.add_node(**NODE, resources={"doomed": 2}), True
            batch = envs.recv()
            found += [batch.obs, batch.rewards, batch.terminated, batch.truncated]
            found += rows(envs, actions[10:], is_new=False)
    finally:
        if is_there:
            ray_cluster.nodes.remove_node(node)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mode", ["sleep", "gil"])
def test_a_hanging_actor_is_given_up_at_its_deadline(mode, ray_cluster):
    env_fns = [Counter, lambda: Hanging(mode=mode, nth=2), Counter, Counter]
    packed = envfleet.RayOptions(placement="pack", resources={"CPU": 0.5})
    with opened(env_fns, None, step_timeout_s=1.0, backend_options=packed) as envs:
        assert len(nodes_of(envs)) == 1
        envs.reset(seed=0)
        envs.step(np.zeros(4, int))
        with pytest.raises(DeadlineExceeded) as caught:
            envs.step(np.zeros(4, int))
        assert caught.value.worker == 0
        if mode == "sleep":
            assert caught.value.slot == 1
            assert "misbehave" in caught.value.stack
        else:
            assert "hold the interpreter" in caught.value.stack


class Pictures(Counter):
    """Its observations are larger than the object stores of the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.MultiBinary(NODE["object_store_memory"])


def test_the_doctor_asks_every_node(ray_cluster):
    with ray_checks(ray_cluster.address) as checks:
        cluster, *nodes = [ask() for _, ask in checks]
    assert cluster.text == f"2 nodes with 8 CPUs at {ray_cluster.address}"
    for node in nodes:
        assert "ms to a worker and back, object store 80 MiB, niceness 0, Python 3." in node.text
        assert node.level == "warn"
        assert "--object-store-memory" in str(node.remedy)
    assert len(nodes) == 2


def test_rows_that_the_object_store_cannot_hold_are_an_error_at_once(ray_cluster):
    with pytest.raises(ObjectStoreTooSmall, match=r"160 MiB.*has 80 MiB") as caught:
        envfleet.make_vec(Pictures, 1, backend="ray", num_workers=1)
    assert caught.value.num_slots == 1


PARENT = """
    import sys, time

    import numpy as np

    import envfleet
    from tests.faults.test_ray import OnSomeNode

    envs = envfleet.make_vec(OnSomeNode, 4, backend="ray", num_workers=2)
    envs.reset(seed=0)
    print(*envs.get_attr("pid"), flush=True)
    while sys.argv[1] == "stepping":
        envs.step(envs.action_space.sample())
    time.sleep(600)
"""


def test_sigkill_of_the_parent_ends_its_actors(ray_cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.getcwd(), prepend=os.pathsep)
    with program(tmp_path, PARENT, "stepping") as parent:
        pids = set(parent.numbers())
        assert len(pids) == 2
        assert len(ray_cluster.actors()) == 2
        parent.kill()
        until(lambda: not ray_cluster.actors(), "the end of the actors")
        until(lambda: not any(map(psutil.pid_exists, pids)), "the end of their processes")


HEADLESS = """
    import os
    import sys
    import time
    from dataclasses import replace
    from pathlib import Path

    import numpy as np
    import psutil

    import envfleet
    from envfleet.engine.backends.ray import cluster
    from envfleet.errors import ClusterLost, ClusterUnreachable
    from envfleet.learn.options import PPOOptions
    from envfleet.learn.train import train
    from envfleet.learn.train_options import TrainOptions
    from envfleet.runs.callbacks import RunCallback
    from envfleet.testing import Counter

    class Elsewhere(Counter):
        def whereabouts(self):
            import only_there
            return only_there.NAME, os.environ["FLAG"]

    class KillsTheHead(RunCallback):
        def iterated(self, iteration):
            if iteration.number == 2:
                for child in psutil.Process().children(recursive=True):
                    if child.name() == "gcs_server":
                        child.kill()

    class Stops(RunCallback):
        def should_stop(self):
            return True

    cluster.HEAD_LOST_S = 3.0
    sent, folder = map(Path, sys.argv[1:])
    options = envfleet.RayOptions(
        address="local",
        resources={"CPU": 0.0},
        runtime_env={"working_dir": str(sent), "env_vars": {"FLAG": "up"}},
    )
    envs = envfleet.make_vec(Elsewhere, 2, backend="ray", num_workers=1, backend_options=options)
    print(*envs.call("whereabouts")[0], flush=True)
    envs.reset(seed=0)
    chosen = TrainOptions("CartPole-v1", n_envs=2, backend="serial", collect="node",
                          total_steps=10**9, save_every=1, eval_every=0, tensorboard=False)
    ppo = PPOOptions(n_steps=16, n_epochs=1)
    try:
        train(chosen, ppo, folder, KillsTheHead())
    except ClusterLost as exc:
        print(exc, flush=True)
    start_s = time.monotonic()
    try:
        while True:
            envs.step(np.zeros(2, int))
            time.sleep(0.05)
    except ClusterUnreachable as exc:
        print(int(time.monotonic() - start_s), exc, flush=True)
    envs.close()
    again = train(replace(chosen, collect="here"), ppo, folder, Stops(), is_resumed=True)
    print(again.is_stopped, again.new_steps, again.env_steps > 64, flush=True)
"""


def test_a_lost_head_is_an_error_before_ray_ends_all_and_a_run_goes_on_without(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    sent = tmp_path / "sent"
    sent.mkdir()
    (sent / "only_there.py").write_text("NAME = 'there'")
    with program(tmp_path, HEADLESS, sent, tmp_path / "run") as running:
        code = running.finish(100.0)
        assert code == 0, running.err
        whereabouts, run, fleet, again = running.out.splitlines()
    assert whereabouts == "there up"  # the runtime environment
    for text in (run, fleet):
        assert "its head has been silent" in text
        assert "from the last checkpoint" in text or "from its last checkpoint" in text
    assert int(fleet.partition(" ")[0]) < 50
    assert again == "True 32 True"

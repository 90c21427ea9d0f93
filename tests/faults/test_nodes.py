"""Work on the nodes of a real cluster: lost with an actor, a node or too little memory."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envfleet.errors import ConfigError, NoNodes, RemoteTraceback, WorkLost
from envfleet.observe.events import Event
from envfleet.runs.nodes import NodePool
from tests.ray_cluster import NODE, RayCluster

LONG_S = 60.0


def waiting(condition: Callable[[], object]) -> bool:
    limit_s = time.monotonic() + LONG_S
    while not condition():
        if time.monotonic() > limit_s:
            return False
        time.sleep(0.05)
    return True


def build(place: Any) -> Any:
    def worker(task: Any, shared: Any) -> Any:
        if task == "raises":
            raise ConfigError("not like this")
        if task == "ends":
            os.kill(os.getpid(), signal.SIGKILL)
        if task == "hangs":
            time.sleep(LONG_S)
        if isinstance(task, str) and " once " in task:
            what, _, marker = task.partition(" once ")
            if not os.path.exists(marker):
                open(marker, "w").close()
                if what == "hangs":
                    time.sleep(LONG_S)
                os.kill(os.getpid(), signal.SIGKILL)
        return task, shared, place.node

    return worker


def kinds(pool: NodePool[Any, Any]) -> list[str]:
    return [event.kind for event in pool.events]


def test_each_piece_is_done_once_whatever_its_worker_does(
    ray_cluster: RayCluster, tmp_path: Any
) -> None:
    told: list[Event] = []
    with NodePool[Any, Any](
        build, deadline_s=LONG_S / 4, most_losses=1, on_event=told.append
    ) as pool:
        assert len(pool.workers) == 2
        shared = pool.share({"weights": 3})

        tasks = ["a", f"ends once {tmp_path / 'marker'}", "b", "c"]
        done = list(pool.work(tasks, shared))

        assert sorted(one.index for one in done) == [0, 1, 2, 3]
        assert {one.index: one.result[0] for one in done} == dict(enumerate(tasks))
        assert all(one.result[1] == {"weights": 3} for one in done)
        assert {"lost", "again"} <= set(kinds(pool))
        assert told == pool.events
        assert waiting(lambda: list(pool.work(["x"])) and len(pool.workers) == 2)

        first, second = sorted(pool.workers)
        one, other = pool.work(["x", "y"], None, [second, first])
        assert {one.index: one.worker, other.index: other.worker} == {0: second, 1: first}

        with pytest.raises(ConfigError, match="not like this") as caught:
            list(pool.work(["raises"]))
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        with pytest.raises(WorkLost, match="lost 2 times"):
            list(pool.work(["ends"]))
        assert waiting(lambda: list(pool.work(["x"])))


def test_nodes_join_and_leave_and_are_expelled_while_work_goes_on(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    with NodePool[Any, Any](build, deadline_s=LONG_S) as pool:
        node = ray_cluster.nodes.add_node(**NODE)
        try:
            assert waiting(lambda: list(pool.work(["x"])) and len(pool.workers) == 3)
            mine = next(no for no, place in pool.workers.items() if place.node == node.node_id)
        finally:
            ray_cluster.nodes.remove_node(node, allow_graceful=False)
        # its process may answer for a moment after the node was killed
        assert waiting(lambda: list(pool.work(["x"], None, [mine])) and mine not in pool.workers)
        [done] = pool.work(["x"], None, [mine])
        assert done.result[2] != node.node_id
        assert kinds(pool).count("joined") == 3

        slow, marker = min(pool.workers), tmp_path / "marker"
        there = pool.workers[slow].node
        pool.give(7, f"hangs once {marker}", None, slow)
        assert waiting(marker.exists)
        assert pool.under_way()[7][0] == slow
        pool.expel(slow, "it takes too long")
        again = None
        while again is None:
            again = pool.next()
        assert again.index == 7
        assert again.result[2] != there
        pool.refresh()
        assert there not in {place.node for place in pool.workers.values()}


def test_a_node_without_the_memory_gets_fewer_actors_and_a_piece_that_hangs_is_given_up(
    ray_cluster: RayCluster,
) -> None:
    import ray

    smallest = min(one["Resources"]["memory"] for one in ray.nodes() if one["Alive"])
    with NodePool[Any, Any](
        build, per_node=2, memory_bytes=int(smallest * 0.6), deadline_s=1.0, most_losses=0
    ) as pool:
        assert len(pool.workers) == 2
        assert "enough for 1, not for 2" in next(
            event.why for event in pool.events if event.kind == "fewer"
        )
        with pytest.raises(WorkLost, match="no answer within 1 s"):
            list(pool.work(["hangs"]))
        assert [one.result[0] for one in pool.work(["x"])] == ["x"]
    with pytest.raises(NoNodes):
        NodePool[Any, Any](build, memory_bytes=int(smallest * 10), start_timeout_s=1.0)

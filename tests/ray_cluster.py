"""A real Ray cluster of two nodes on this machine, started when a test first needs it.

It serves all tests of this process; `connection` is what keeps the process connected. A test asks
for it by the fixture `ray_cluster`, or by running with `backend="ray"` of the matrix.
"""

import gc
import os
from typing import Any

import psutil
import pytest

HOST = "127.0.0.2"
"""Of the loopback interface; Ray replaces 127.0.0.1 by an address that others can reach."""
NODE: dict[str, Any] = {"node_ip_address": HOST, "num_cpus": 4, "object_store_memory": 80 << 20}
ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else a key would be written into the user's directory
}


class RayCluster:
    """The nodes, and this process's connection to them."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        from envfleet.engine.backends.ray.cluster import connect

        os.environ.update(ENVIRONMENT)
        self.nodes = Cluster(
            initialize_head=True,
            head_node_args={**NODE, "include_dashboard": False},
        )
        self.address = str(self.nodes.address)
        self.nodes.add_node(**NODE)
        os.environ["RAY_ADDRESS"] = self.address
        self.connection = connect(self.address)

    def daemons(self) -> set[int]:
        """The processes of the cluster: its nodes' servants, and the workers that these keep."""
        found = {
            info.process.pid
            for node in self.nodes.list_all_nodes()
            for kind in node.all_processes.values()
            for info in kind
        }
        parents = {one.pid: one.info["ppid"] for one in psutil.process_iter(["ppid"])}
        more = found
        while more:  # one look at all processes, for this is asked before and after every test
            more = {pid for pid, parent in parents.items() if parent in more} - found
            found |= more
        return found

    def contents(self) -> frozenset[str]:
        """Everything in the cluster that some test made, in words."""
        return frozenset(
            [f"actor {one}" for one in self.actors()]
            + [f"object {one}" for one in self.objects()]
            + [f"placement group {one}" for one in self.placement_groups()]
        )

    def actors(self) -> set[str]:
        """What lives in the cluster and was made by `@ray.remote` classes: "class id"."""
        import ray._private.state

        return {
            f"{one['ActorClassName']} {actor}"
            for actor, one in ray._private.state.actors().items()
            if one["State"] != "DEAD"
        }

    def objects(self) -> set[str]:
        """The objects that this process holds."""
        import ray._private.worker

        worker: Any = ray._private.worker.global_worker
        if worker.core_worker.get_all_reference_counts():
            gc.collect()
        return {str(one) for one in worker.core_worker.get_all_reference_counts()}

    def placement_groups(self) -> set[str]:
        """What holds resources of the cluster."""
        from ray.util import placement_group_table

        return {
            group for group, one in placement_group_table().items() if one["state"] != "REMOVED"
        }

    def close(self) -> None:
        self.connection.close()
        self.nodes.shutdown()
        os.environ.pop("RAY_ADDRESS", None)


_running: RayCluster | None = None


def started() -> RayCluster:
    """The cluster of this process."""
    global _running
    if _running is None:
        _running = RayCluster()
    return _running


def running() -> RayCluster | None:
    return _running


def stop() -> None:
    global _running
    if _running is not None:
        _running.close()
        _running = None


def is_asked_for(request: pytest.FixtureRequest) -> bool:
    """Whether this test runs on the cluster: by the fixture, or with `ray` of the matrix."""
    callspec = getattr(request.node, "callspec", None)
    by_matrix = callspec is not None and "ray" in callspec.id.split("-")
    return by_matrix or "ray_cluster" in request.fixturenames


@pytest.fixture
def ray_cluster() -> RayCluster:
    """The cluster; the test gives back the nodes that it adds."""
    return started()

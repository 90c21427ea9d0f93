"""Meta-RL on a Ray cluster of three nodes is that of one machine, also if a node is lost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from envfleet.cli import main
from envfleet.runs.nodes import NodePool
from tests.ray_cluster import NODE, RayCluster
from tests.unit.meta.test_runs import LEARNER

SLOW = (
    *LEARNER,
    "env.env_name=tests.faults.meta_envs:Slow",
    "env.env_kwargs={}",
    "env.num_processes=1",
    "train.num_iters=2",
    "train.num_init_rollouts_pool=3",
    "train.num_rollouts_per_iter=12",
)


@pytest.fixture
def third_node(ray_cluster: RayCluster) -> Iterator[Any]:
    """A node that the test may lose."""
    node = ray_cluster.nodes.add_node(**NODE)
    yield node
    if node in ray_cluster.nodes.worker_nodes:
        ray_cluster.nodes.remove_node(node)


def test_a_node_that_is_lost_in_the_middle_of_a_run_changes_no_row(
    ray_cluster: RayCluster, third_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, nodes, pools = NodePool.work, ray_cluster.nodes, set[NodePool[Any, Any]]()
    raylet = psutil.Process(third_node.all_processes["raylet"][0].process.pid)

    def work(self: NodePool[Any, Any], *args: Any) -> Iterator[Any]:
        """As it is, but the node is lost while it plays a piece of an iteration."""
        for done in whole(self, *args):
            busy = {one.place.node for one in self._hired.values() if one.piece is not None}
            is_late = len(args[0]) > 3 and third_node in nodes.worker_nodes
            if is_late and third_node.node_id in busy:
                for process in raylet.children(recursive=True):
                    process.kill()
                nodes.remove_node(third_node, allow_graceful=False)
                pools.add(self)
            yield done

    here, far = tmp_path / "here", tmp_path / "far"
    assert main(["meta", *SLOW, "--num-parallel-workers", "6", "--checkpoint-dir", str(here)]) == 0
    monkeypatch.setattr(NodePool, "work", work)
    flags = ["--collect", "node", "--ray-address", ray_cluster.address]
    flags += ["--num-parallel-workers", "5", "--checkpoint-dir", str(far)]
    assert main(["meta", *SLOW, *flags]) == 0
    [pool] = pools
    happened = [event.kind for event in pool.events]
    assert happened.count("joined") == 3
    assert "lost" in happened
    assert "again" in happened
    for name in ("replay.bin", "trials.json"):
        assert (here / name).read_bytes() == (far / name).read_bytes()

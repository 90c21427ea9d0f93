"""Rollouts on a Ray cluster of three nodes are those of one machine, also if a node is lost."""

import asyncio
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envfleet.cli import main
from envfleet.llm import parallel_rollout
from envfleet.llm.inference.types import GenerateRequest, Generation
from envfleet.llm.journal import read_journal
from envfleet.llm.same_trajectories import trajectory_difference
from tests.gates import PATIENCE_S
from tests.ray_cluster import NODE, RayCluster
from tests.unit.llm.rollouts import config_with, play
from tests.unit.llm.test_parallel_rollout import Counting

TAGS = ("SimpleSokoban", "FrozenLake")


@pytest.fixture
def third_node(ray_cluster: RayCluster) -> Iterator[Any]:
    """A node that the test may remove."""
    node = ray_cluster.nodes.add_node(**NODE)
    yield node
    if node in ray_cluster.nodes.worker_nodes:
        ray_cluster.nodes.remove_node(node)


class NodeKiller(Counting):
    """Replaces a node when all workers play, and goes on answering when the new one plays too."""

    def __init__(self, num_workers: int, log: pytest.LogCaptureFixture, kill: Any) -> None:
        super().__init__()
        self._num_workers, self._log, self._kill = num_workers, log, kill
        self.max_concurrency = 1
        self.thread: threading.Thread | None = None

    def is_logged(self, what: str, times: int = 1) -> bool:
        return len(re.findall(what, self._log.text)) >= times

    async def generate(self, request: GenerateRequest) -> Generation:
        answer = await super().generate(request)
        while not self.is_logged("plays in process", self._num_workers):
            await asyncio.sleep(0.02)
        if self.thread is None and sum(self.asked.values()) > 20:
            self.thread = threading.Thread(target=self._kill)
            self.thread.start()
        while self.thread is not None and not (
            self.is_logged("is lost; [1-9]")
            and self.is_logged("plays in process", self._num_workers + 1)
        ):
            await asyncio.sleep(0.02)
        return answer


def test_a_node_that_is_lost_in_the_middle_costs_nothing_and_one_that_joins_plays(
    ray_cluster: RayCluster,
    third_node: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "envfleet.llm.rollout")
    monkeypatch.setattr(parallel_rollout, "_LEAST_LIVE", 6)  # the others wait
    wanted = play(config_with(tags=TAGS, group_size=6))
    nodes = ray_cluster.nodes
    # a node that is added in a thread cannot have handlers of signals, and needs none
    monkeypatch.setattr("ray._private.node.Node._register_shutdown_hooks", lambda self: None)
    fourth_node, is_over = [], threading.Event()

    def replace() -> None:
        nodes.remove_node(third_node, allow_graceful=False)
        fourth_node.append(nodes.add_node(**NODE))
        is_over.wait(PATIENCE_S)  # it ends with the thread that started it

    engine = NodeKiller(6, caplog, replace)
    address = f"+agent_proxy.ray_address={ray_cluster.address}"
    config = config_with(address, tags=TAGS, group_size=6, backend="ray", workers=6)
    try:
        got = play(config, engine, folder=tmp_path)
        assert engine.thread is not None
    finally:
        for node in fourth_node:
            nodes.remove_node(node)
        is_over.set()
    engine.thread.join()
    assert engine.is_logged("is lost; [1-9]")
    assert engine.is_logged("1 node joined, and [1-9][0-9]* trajectories wait: [1-9] more workers")
    assert (got.backend, got.fallback) == ("ray", None)
    assert got.num_workers > 6
    assert trajectory_difference(wanted.trajectories, got.trajectories) is None
    assert got.metrics == wanted.metrics
    journalled = read_journal(tmp_path)
    assert trajectory_difference(wanted.trajectories, journalled.trajectories) is None
    assert not journalled.earlier
    turns = [turn for one in got.trajectories for turn in one.turns]
    assert all(0.0 <= turn.times.start_s < got.timings.wall_s for turn in turns)


def test_the_command_gives_the_rollout_of_one_machine(
    ray_cluster: RayCluster, third_node: Any, tmp_path: Path
) -> None:
    changes = ["llm.engine=scripted", "es_manager.train.env_groups=2"]
    changes += ["es_manager.train.group_size=3", "es_manager.train.env_configs.n_groups=[2]"]
    alone, far = tmp_path / "alone", tmp_path / "far"
    words = ["rollout", "--config-name", "base-parallel", "--policy", "llm", *changes]
    assert main([*words, "agent_proxy.parallel_backend=sequential", "--out", str(alone)]) == 0
    on_ray = ["agent_proxy.parallel_backend=ray", f"agent_proxy.ray_address={ray_cluster.address}"]
    assert main([*words, *on_ray, "--out", str(far)]) == 0
    wanted, got = read_journal(alone), read_journal(far)
    assert trajectory_difference(wanted.trajectories, got.trajectories) is None


def test_images_travel_to_the_folder_of_the_run(ray_cluster: RayCluster, tmp_path: Path) -> None:
    change = "+custom_envs.SimpleSokoban.env_config.render_mode=rgb_array"
    alone, far = tmp_path / "alone", tmp_path / "far"
    config = config_with(change, tags=TAGS[:1])
    wanted = play(config, folder=alone)
    got = play(config_with(change, tags=TAGS[:1], backend="ray"), folder=far)
    assert trajectory_difference(wanted.trajectories, got.trajectories) is None
    images = sorted((alone / "images").iterdir())
    assert images
    assert [one.read_bytes() for one in images] == [
        (far / "images" / one.name).read_bytes() for one in images
    ]
